-- seal: from now on the jobs of a shard belong to another layout of its queue.
--
-- KEYS[1]  prefix of the shard
-- ARGV[1]  now: Unix seconds, or '' for the server's clock
-- ARGV[2]  shards_count of the queue in the shard's own layout
-- ARGV[3]  shards_count of the other layout
-- ARGV[4]  epoch of the other layout
-- ARGV[5]  the last step that has come from the shard to the other layout; 0 or missing: none that the
--          caller knows of
--
-- Reply: 1 (sealed), 0 (it was already), 2 (and all of its jobs were moved).
-- Errors: SEALED m epoch: it was sealed for another layout; nothing was written.
--
-- Invariant: a shard is sealed for good, for one layout. A push is carried out before, or answered SEALED: nothing is
-- written to a sealed shard by a push that was not carried out before. Its holder finishes what is in flight.
--
-- A failover to a replica that was behind may lose the seal, after jobs have come to the other layout already. Then the
-- shard is sealed anew, and what was pushed to it meanwhile must not be taken for what has come. So steps are counted
-- from the server's time in microseconds: they are later than all steps before.
--
-- A call that changes nothing writes all the same, as do the others of a reshard: `WAIT` behind it is about that write.
--
--!flags allow-oom
local prefix, layout = KEYS[1], ARGV[3] .. ' ' .. ARGV[4]
local meta = redis.call('HMGET', prefix .. 'meta', 'sealed', 'moved', 'fed', 'clock', 'pushed')
if meta[1] then
  if meta[1] ~= layout then
    return redis.error_reply('SEALED ' .. meta[1])
  end
  redis.call('HSET', prefix .. 'meta', 'sealed', layout)
  return meta[2] and 2 or 0
end
-- One to which nothing was pushed may have been leased by a caller with a wrong number.
redis.call((meta[3] or meta[4] or meta[5]) and 'HSETNX' or 'HSET', prefix .. 'meta', 'shards_count', ARGV[2])
local step = math.max(read_now() * 1000000, (tonumber(ARGV[5] or '') or 0) + 1)
redis.call('HSET', prefix .. 'meta', 'sealed', layout, 'step', string.format('%.0f', step))
publish(prefix .. 'wake', 'sealed')
publish(prefix .. 'room', '')
return 1
