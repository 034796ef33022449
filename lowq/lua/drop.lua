-- drop: a part of a shard that nobody works, for good; when nothing is left, all that is known of the shard.
--
-- KEYS[1]  prefix of the shard
-- ARGV[1]  now: not used; every script has it first
-- ARGV[2]  how many jobs of each kind at most
-- ARGV[3]  '1' only asks whether it might be dropped
--
-- Reply: {1 (nothing is left), removed} | {0 (call again), removed} | {2 (somebody holds the lease), 0}
--   removed: how many jobs
--
-- Invariant: nothing of a job that is removed is left in any key. A shard with an owner is not touched.
--
--!flags allow-oom
--!include touch
local prefix, most = KEYS[1], tonumber(ARGV[2])
if redis.call('EXISTS', prefix .. 'lease') == 1 then
  return { 2, 0 }
end
if ARGV[3] == '1' then
  return { 0, 0 }
end
local waiting = redis.call('ZRANGE', prefix .. 'due', 0, most - 1)
local buried = redis.call('ZRANGE', prefix .. 'morgue', 0, most - 1)
local records = redis.call('HSCAN', prefix .. 'taken', '0', 'COUNT', most)[2]
local taken = {}
for i = 1, #records, 2 do
  taken[#taken + 1] = records[i]
end
touch(prefix, { 'payloads:' }, waiting)
touch(prefix, { 'morgue:payloads:' }, buried)
touch(prefix, { 'taken:payloads:' }, taken)

local function remove(ids, command, key, payloads)
  for start = 1, #ids, 500 do
    local some, keys = {}, {}
    for i = start, math.min(start + 499, #ids) do
      some[#some + 1] = ids[i]
      keys[#keys + 1] = prefix .. payloads .. ids[i]
    end
    redis.call(command, prefix .. key, unpack(some))
    redis.call('UNLINK', unpack(keys))
  end
  return #ids
end
local removed = remove(waiting, 'ZREM', 'due', 'payloads:') + remove(buried, 'ZREM', 'morgue', 'morgue:payloads:')
  + remove(taken, 'HDEL', 'taken', 'taken:payloads:')
if removed > 0 then
  return { 0, removed }
end
local rest = {}
for i, key in ipairs({ 'retries', 'errors', 'solo', 'crashes', 'morgue:errors', 'pushed', 'meta' }) do
  rest[i] = prefix .. key
end
redis.call('UNLINK', unpack(rest))
return { 1, 0 }
