-- renew: lengthen the lease of a shard.
--
-- KEYS[1]  prefix of the shard
-- ARGV[1]  now: Unix seconds, or '' for the server's clock
-- ARGV[2]  token of the lease
-- ARGV[3]  lease_ttl, milliseconds
-- ARGV[4]  '1' when the holder is a consumer, otherwise missing
--
-- Reply: 1.
-- Errors: LEASELOST.
--
-- Invariant: only the holder lengthens; a lease that has run out is not renewed but acquired again.
--
--!flags allow-oom
local lost = check_lease(KEYS[1], ARGV[2])
if lost then
  return lost
end
redis.call('PEXPIRE', KEYS[1] .. 'lease', ARGV[3])
redis.call('HSET', KEYS[1] .. 'meta', 'leased_until', read_now() + ARGV[3] / 1000)
if ARGV[4] then
  redis.call('SET', KEYS[1] .. 'consumer', '1', 'PX', ARGV[3])
end
return 1
