-- renew: lengthen the lease of a shard.
--
-- KEYS[1]  prefix of the shard
-- ARGV[1]  now: Unix seconds, or '' for the server's clock
-- ARGV[2]  token of the lease
-- ARGV[3]  lease_ttl, milliseconds
-- ARGV[4]  '1' when the holder is a consumer, otherwise missing
--
-- Reply: {pushed, backlog, sealed}; 1 to a consumer, which doesn't count them, and where they can't be read.
--   pushed: payloads that have come in since the shard was created; backlog: jobs that are due or in flight
--   sealed: 1 when the jobs of the shard belong to another layout, else 0
-- Errors: LEASELOST.
--
-- Invariant: only the holder lengthens; a lease that has run out is not renewed but acquired again.
--
--!flags allow-oom
local lost = check_lease(KEYS[1], ARGV[2])
if lost then
  return lost
end
local prefix, now = KEYS[1], read_now()
redis.call('PEXPIRE', prefix .. 'lease', ARGV[3])
redis.call('HSET', prefix .. 'meta', 'leased_until', now + ARGV[3] / 1000)
if ARGV[4] then
  redis.call('SET', prefix .. 'consumer', '1', 'PX', ARGV[3])
  return 1
end
local meta = redis.call('HMGET', prefix .. 'meta', 'pushed', 'features', 'clock', 'sealed')
-- A key of the wrong type must not keep the lease from being renewed.
local is_known, backlog = pcall(function()
  local due = count_due(prefix, meta[2], read_due_cutoff(prefix, now, meta[3] or ''))
  return due + redis.call('HLEN', prefix .. 'taken')
end)
return is_known and { tonumber(meta[1] or '') or 0, backlog, meta[4] and 1 or 0 } or 1
