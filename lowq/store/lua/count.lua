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
-- ARGV[8]  flow: "pushed change width slots": payloads that came in in that time, by how many jobs the backlog has
--          grown, and the ring for these: width of a stretch in seconds, number of slots; '' = the node doesn't know
-- ARGV[9]  rings of times: "width slots width slots ..."; '' = nothing was taken or performed
-- ARGV[10] waits: "seconds index count index count ...": how long the jobs taken in that time had waited together, and
--          how many of them for how long, by buckets; '' = none was taken
-- ARGV[11] slow: "count most width slots": how many slow batches follow, how many are kept of a stretch, and their
--          ring: width of a stretch in seconds, number of slots; '' = none
-- ARGV[12] how many spans follow
-- ARGV[13+] spans: width in seconds, number of slots, ...
-- then     slow batches: ended so many seconds ago, took so many seconds, how many ids, shard, the first id, ...
-- then     performs by their length: index of a bucket, how many, ...
--
-- Reply: 1.
--
-- Invariant: a span is a ring: slot n holds the latest stretch of time whose number is n modulo its slots, so a
-- history never grows beyond its rings. Counts are spread over the stretches that they come from; the lag of a
-- stretch is the longest that anybody saw in it. Where nobody saw any it is that of the next word, if that came within
-- a minute, and otherwise -1: not known. The flow has fields of its own, so nodes that don't know it leave it as it is.
-- So have times, "stretch waits performs", both "index:count,index:count..." or "-", counted in the stretch of the
-- call; and the slowest batches, "at seconds count shard id", each of another id.
--
--!flags allow-oom
local key, now = KEYS[1], read_now()
local seconds, processed, failed = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local lag, spans = tonumber(ARGV[5]) or -1, tonumber(ARGV[12])
local slow_count, slow_most, slow_width, slow_slots = string.match(ARGV[11], '^(%d+) (%d+) (%d+) (%d+)$')
local first_slow = 13 + 2 * spans
local first_perform = first_slow + 5 * (tonumber(slow_count or '') or 0)

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

local function add_flow(pushed, change, number, slots, share)
  local field = 'flow:' .. number % slots
  local before = redis.call('HGET', key, field)
  local stretch, came, grown, done, bad = string.match(before or '', '^(%S+) (%S+) (%S+) (%S+) (%S+)$')
  if tonumber(stretch or '') ~= number then
    came, grown, done, bad = 0, 0, 0, 0
  end
  came, grown = (tonumber(came) or 0) + pushed * share, (tonumber(grown) or 0) + change * share
  done, bad = (tonumber(done) or 0) + processed * share, (tonumber(bad) or 0) + failed * share
  redis.call('HSET', key, field, string.format('%d %.10g %.10g %.10g %.10g', number, came, grown, done, bad))
end

-- Calls `add_share` for each stretch of a ring that "lately" was in: its number, how much of that time was in it, and
-- whether it is the last.
local function spread(width, slots, add_share)
  local last = math.floor(now / width)
  local from = now - math.min(seconds, width * math.min(slots, 60))
  local first = math.floor(from / width)
  for number = first, last do
    local length = math.min((number + 1) * width, now) - math.max(number * width, from)
    local share = now > from and length / (now - from) or (number == last and 1 or 0)
    add_share(number, share, number == last)
  end
end

-- Counts as a field has them, with more added: index -> how many.
local function merge_counts(before, more)
  local counts, indexes = {}, {}
  for index, count in string.gmatch(before, '(%d+):(%d+)') do
    counts[tonumber(index)] = tonumber(count)
  end
  for index, count in pairs(more) do
    counts[index] = (counts[index] or 0) + count
  end
  for index in pairs(counts) do
    indexes[#indexes + 1] = index
  end
  table.sort(indexes)
  for i, index in ipairs(indexes) do
    indexes[i] = string.format('%d:%.0f', index, counts[index])
  end
  return #indexes > 0 and table.concat(indexes, ',') or '-'
end

local function add_times(width, slots, waits, performs)
  local number = math.floor(now / width)
  local field = string.format('times:%d:%d', width, number % slots)
  local before = redis.call('HGET', key, field)
  local stretch, waited, performed = string.match(before or '', '^(%S+) (%S+) (%S+)$')
  if tonumber(stretch or '') ~= number then
    waited, performed = '', ''
  end
  waited, performed = merge_counts(waited, waits), merge_counts(performed, performs)
  redis.call('HSET', key, field, string.format('%d %s %s', number, waited, performed))
end

-- Adds the slow batches of this call to those of the stretch.
local function add_slow(most, width, slots)
  local fields, slowest, of_id = {}, {}, {}
  for n = 1, most do
    fields[n] = string.format('slow:%d:%d', math.floor(now / width) % slots, n - 1)
  end
  local function keep(at, took, rest, id)
    -- Left out: of a round before, of a clock that was set since, or a foreign value.
    local sane = at and took and math.abs(at - now) < width * (slots - 1) and took < 1e10
    if sane and not (of_id[id] and of_id[id].took >= took) then
      of_id[id] = { took = took, raw = string.format('%.3f %.6g ', at, took) .. rest .. ' ' .. id }
    end
  end
  for _, raw in ipairs(redis.call('HMGET', key, unpack(fields))) do
    local at, took, rest, id = string.match(raw or '', '^(%S+) (%S+) (%d+ %d+) (.*)$')
    keep(tonumber(at or ''), tonumber(took or ''), rest, id)
  end
  for i = first_slow, first_perform - 1, 5 do
    keep(now - ARGV[i], tonumber(ARGV[i + 1]), ARGV[i + 2] .. ' ' .. ARGV[i + 3], ARGV[i + 4])
  end
  for _, batch in pairs(of_id) do
    slowest[#slowest + 1] = batch
  end
  table.sort(slowest, function(a, b)
    if a.took == b.took then
      return a.raw < b.raw
    end
    return a.took > b.took
  end)
  for n, field in ipairs(fields) do
    if slowest[n] then
      redis.call('HSET', key, field, slowest[n].raw)
    else
      redis.call('HDEL', key, field)
    end
  end
end

for i = 13, 12 + 2 * spans, 2 do
  local width, slots = tonumber(ARGV[i]), tonumber(ARGV[i + 1])
  spread(width, slots, function(number, share, is_last)
    add(width, number, slots, share, is_last)
  end)
end
if ARGV[8] ~= '' then
  local pushed, change, width, slots = string.match(ARGV[8], '^(%S+) (%S+) (%S+) (%S+)$')
  slots = tonumber(slots)
  spread(tonumber(width), slots, function(number, share)
    add_flow(tonumber(pushed), tonumber(change), number, slots, share)
  end)
end
local performs, waits = {}, {}
for i = first_perform, #ARGV, 2 do
  performs[tonumber(ARGV[i])] = tonumber(ARGV[i + 1])
  redis.call('HINCRBY', key, 'perform:' .. ARGV[i], ARGV[i + 1])
end
if tonumber(ARGV[6]) > 0 then
  redis.call('HINCRBYFLOAT', key, 'perform:seconds', ARGV[6])
end
local waited, by_length = string.match(ARGV[10], '^(%S+) (.*)$')
for index, count in string.gmatch(by_length or '', '(%d+) (%d+)') do
  waits[tonumber(index)] = tonumber(count)
  redis.call('HINCRBY', key, 'wait:' .. index, count)
end
if tonumber(waited or 0) > 0 then
  redis.call('HINCRBYFLOAT', key, 'wait:seconds', waited)
end
for width, slots in string.gmatch(ARGV[9], '(%d+) (%d+)') do
  add_times(tonumber(width), tonumber(slots), waits, performs)
end
if slow_count then
  add_slow(tonumber(slow_most), tonumber(slow_width), tonumber(slow_slots))
end
redis.call('EXPIRE', key, ARGV[7])
return 1
