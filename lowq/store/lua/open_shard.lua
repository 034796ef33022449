-- open_shard: all jobs that belong to a shard of a new layout have come: it is worked from now on.
--
-- KEYS[1]  prefix of the shard
-- ARGV[1]  now: not used; every script has it first
-- ARGV[2]  the latest clock of the shards that they came from (Unix seconds), '' = none had one
-- ARGV[3]  the server's time at the last push to one of these, or ''
-- ARGV[4]  since when it had come there without a jump, or ''
-- ARGV[5]  the highest fence of the shards that they came from, or ''
-- ARGV[6]  the last step in which they came; 0 or missing: none that the caller knows of
--
-- Reply: 1 (opened), 0 (it was open), 2 (it is not there).
--
-- Invariant: steps that come late find in `came` that they have come, and change nothing (`move_in`). Its clock is not
-- behind any score that came by default, and its fence is not lower than any under which its jobs were performed.
--
--!flags allow-oom
local prefix = KEYS[1]
local key = prefix .. 'meta'
local meta = redis.call('HMGET', key, 'fed', 'clock', 'shards_count')
if not meta[3] then
  return 2
elseif not meta[1] then
  redis.call('HSET', key, 'shards_count', meta[3]) -- for `WAIT`, see seal.lua
  return 0
end
if ARGV[2] ~= '' and tonumber(ARGV[2]) > (tonumber(meta[2] or '') or 0) then
  redis.call('HSET', key, 'clock', ARGV[2])
end
if ARGV[3] ~= '' and redis.call('HSETNX', key, 'server_time', ARGV[3]) == 1 and ARGV[4] ~= '' then
  redis.call('HSET', key, 'server_time_since', ARGV[4])
end
if ARGV[5] ~= '' then
  redis.call('HSETNX', key, 'fence', ARGV[5])
end
end_feeding(key, tonumber(ARGV[6] or '') or 0)
publish(prefix .. 'lease_released', '0')
return 1
