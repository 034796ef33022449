-- push: merge payloads into waiting jobs and make their ids due.
--
-- KEYS[1]  prefix of the shard
-- ARGV[1]  now: Unix seconds, or '' for the server's clock
-- ARGV[2]  token: random, one per call
-- ARGV[3]  '1' when this call repeats one whose reply was lost
-- ARGV[4]  shards_count of the queue
-- ARGV[5]  width: how many arguments a job has, 2 to 4
-- ARGV[6+] jobs: id, payload, score ('' = the clock), perform_at (Unix seconds, '' = now, '+n' = in n seconds)
--
-- Reply: number of jobs accepted.
-- Errors: SHARDSCOUNT n: the queue has n shards; nothing was written.
--
-- Invariant: every id in `payloads:*` is in `due`. An id that waits already keeps its perform_at and its
-- retry_count, an equal payload its lowest score. A repeat changes nothing when the first call got through.
--
--!include clock
--!include touch
--!include wake
local prefix, token, width = KEYS[1], ARGV[2], tonumber(ARGV[5])
local accepted = (#ARGV - 5) / width

local meta = redis.call('HMGET', prefix .. 'meta', 'shards_count', 'clock', 'repeated')
-- A call may arrive after its own repeat, from a connection that was given up: then it finds its token in `repeated`,
-- which costs nothing as long as no call was ever repeated.
if meta[3] and ARGV[3] ~= '1' and string.find(meta[3], token, 1, true) then
  return accepted
end
if ARGV[3] == '1' then
  redis.call('HSET', prefix .. 'meta', 'repeated', string.sub(token .. ' ' .. (meta[3] or ''), 1, 680))
  if redis.call('LPOS', prefix .. 'pushed', token) then
    return accepted
  end
end
if meta[1] and meta[1] ~= ARGV[4] then
  return redis.error_reply('SHARDSCOUNT ' .. meta[1])
end

local ids = {}
for i = 6, #ARGV, width do
  ids[#ids + 1] = ARGV[i]
end
touch(prefix, { 'payloads:' }, ids)

local now = read_now()
local clock = math.max(now, (tonumber(meta[2]) or 0) + 0.000001)
local first, due = nil, {}
for i = 6, #ARGV, width do
  local id, score, at = ARGV[i], ARGV[i + 2], ARGV[i + 3]
  if width == 2 or score == '' then
    score = clock
  end
  if width < 4 or at == '' then
    at = clock
  elseif string.byte(at) == 43 then
    at = clock + tonumber(string.sub(at, 2))
  else
    at = math.max(clock, tonumber(at))
  end
  redis.call('ZADD', prefix .. 'payloads:' .. id, 'LT', score, ARGV[i + 1])
  due[#due + 1] = at
  due[#due + 1] = id
  if not first or at < first then
    first = at
  end
  clock = clock + 0.000001
end

local head = redis.call('ZRANGE', prefix .. 'due', 0, 0, 'WITHSCORES')[2]
redis.call('ZADD', prefix .. 'due', 'NX', unpack(due))
if ARGV[1] == '' then
  redis.call('HSET', prefix .. 'meta', 'clock', clock - 0.000001, 'shards_count', ARGV[4])
elseif not meta[1] then
  redis.call('HSET', prefix .. 'meta', 'shards_count', ARGV[4])
end
if redis.call('LPUSH', prefix .. 'pushed', token) > 1100 then
  redis.call('LTRIM', prefix .. 'pushed', 0, 999)
end
if not head or first < tonumber(head) then
  -- Perhaps the first is of an id that waits already and keeps its perform_at: then the head hasn't moved.
  local moved = redis.call('ZRANGE', prefix .. 'due', 0, 0, 'WITHSCORES')[2]
  if moved ~= head then
    wake(prefix, tonumber(moved) < clock and 0 or tonumber(moved) - now)
  end
end
return accepted
