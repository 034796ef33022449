-- prepare_shard: a shard of a new layout, which accepts pushes, and of which nothing is taken until all jobs that
-- belong to it have come.
--
-- KEYS[1]  prefix of the shard
-- ARGV[1]  now: not used; every script has it first
-- ARGV[2]  shards_count of the new layout
-- ARGV[3]  since when the queue is paused (Unix seconds), '': it is not
-- ARGV[4]  who has paused it, or ''
--
-- Reply: 1 (it is fed from now on), 2 (it is fed already: nothing changed), 0 (it was opened: nothing changed).
--
-- Invariant: a shard that was opened is never closed again, also when this call comes late.
--
--!flags allow-oom
local key = KEYS[1] .. 'meta'
local meta = redis.call('HMGET', key, 'shards_count', 'fed')
if meta[1] then
  redis.call('HSET', key, 'shards_count', meta[1]) -- for `WAIT`, see seal.lua
  return meta[2] and 2 or 0
end
redis.call('HSET', key, 'shards_count', ARGV[2])
redis.call('HSET', key, 'fed', 1)
if ARGV[3] ~= '' then
  redis.call('HSET', key, 'paused', ARGV[3])
  if ARGV[4] ~= '' then
    redis.call('HSET', key, 'paused_by', ARGV[4])
  end
end
return 1
