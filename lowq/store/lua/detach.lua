-- detach: a consumer leaves for a while, and what it has in flight stays so.
--
-- KEYS[1]  prefix of the shard
-- ARGV[1]  now: Unix seconds, or '' for the server's clock
-- ARGV[2]  token of the lease
-- ARGV[3]  lease_ttl, milliseconds
--
-- Reply: 1.
-- Errors: LEASELOST.
--
-- Invariant: the lease has its whole time from now on. Until it runs out only a consumer with the same session gets the
-- shard, see `acquire`. Whoever else gets it later restores what is in flight without charging it, as in `surrender`.
--
--!flags allow-oom
local prefix = KEYS[1]
local lost = check_lease(prefix, ARGV[2])
if lost then
  return lost
end
redis.call('PEXPIRE', prefix .. 'lease', ARGV[3])
redis.call('HSET', prefix .. 'meta', 'detached', '1', 'uncharged', '1', 'leased_until', read_now() + ARGV[3] / 1000)
return 1
