-- count: what a node did for a queue lately, added to the queue's history.
--
-- KEYS[1]  the queue's history
-- ARGV[1]  now: Unix seconds, or '' for the server's clock
-- ARGV[2]  seconds: how long "lately" was, until now
-- ARGV[3]  jobs performed in that time
-- ARGV[4]  failures in that time
-- ARGV[5]  lag, seconds: the longest of the node's shards, now; '' = it holds none, so it doesn't know
-- ARGV[6]  seconds that the performs of that time took together
-- ARGV[7]  seconds after which a history that nobody adds to is forgotten
-- ARGV[8]  how many spans follow
-- ARGV[9+] spans: width in seconds, number of slots, ...
-- then     performs by their length: index of a bucket, how many, ...
--
-- Reply: 1.
--
-- Invariant: a span is a ring: slot n holds the latest stretch of time whose number is n modulo its slots, so a
-- history never grows beyond its rings. Counts are spread over the stretches that they come from; the lag of a
-- stretch is the longest that anybody saw in it. Where nobody saw any it is that of the next word, if that came within
-- a minute, and otherwise -1: not known.
--
--!flags allow-oom
local key, now = KEYS[1], read_now()
local seconds, processed, failed = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local lag, spans = tonumber(ARGV[5]) or -1, tonumber(ARGV[8])

local function add(width, number, slots, share, is_last)
  local field = string.format('%d:%d', width, number % slots)
  local before, done, bad, worst = redis.call('HGET', key, field), 0, 0, -1
  if before then
    local stretch, performed, failures, longest = string.match(before, '^(%S+) (%S+) (%S+) (%S+)$')
    if tonumber(stretch) == number then
      done, bad, worst = tonumber(performed) or 0, tonumber(failures) or 0, tonumber(longest) or -1
    end
  end
  done, bad = done + processed * share, bad + failed * share
  if is_last or worst < 0 and seconds <= 60 then
    worst = math.max(worst, lag)
  end
  redis.call('HSET', key, field, string.format('%d %.10g %.10g %.6g', number, done, bad, worst))
end

for i = 9, 8 + 2 * spans, 2 do
  local width, slots = tonumber(ARGV[i]), tonumber(ARGV[i + 1])
  local last = math.floor(now / width)
  local from = now - math.min(seconds, width * math.min(slots, 60))
  local first = math.floor(from / width)
  for number = first, last do
    local length = math.min((number + 1) * width, now) - math.max(number * width, from)
    local share = now > from and length / (now - from) or (number == last and 1 or 0)
    add(width, number, slots, share, number == last)
  end
end
for i = 9 + 2 * spans, #ARGV, 2 do
  redis.call('HINCRBY', key, 'perform:' .. ARGV[i], ARGV[i + 1])
end
if tonumber(ARGV[6]) > 0 then
  redis.call('HINCRBYFLOAT', key, 'perform:seconds', ARGV[6])
end
redis.call('EXPIRE', key, ARGV[7])
return 1
