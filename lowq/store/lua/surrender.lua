-- surrender: give a shard up, so that somebody else may have it at once.
--
-- KEYS[1]  prefix of the shard
-- ARGV[1]  now: Unix seconds, or '' for the server's clock
-- ARGV[2]  token of the lease
-- ARGV[3]  '' or, for an owner that stops in the middle of its work, the milliseconds that the lease still runs
--
-- Reply: 1 (given up, or left to run out), 0 (something is in flight: nothing changed).
-- Errors: LEASELOST.
--
-- Invariant: nobody gets the shard while something is in flight before its owner is surely gone. What was in
-- flight when the lease was left to run out is restored without being charged, unless that happened twice before.
--
--!flags allow-oom
local prefix = KEYS[1]
local lost = check_lease(prefix, ARGV[2])
if lost then
  return lost
end
if redis.call('EXISTS', prefix .. 'taken') == 1 then
  if ARGV[3] == '' then
    return 0
  end
  redis.call('HSET', prefix .. 'meta', 'uncharged', '1', 'leased_until', read_now() + ARGV[3] / 1000)
  redis.call('PEXPIRE', prefix .. 'lease', ARGV[3])
  publish(prefix .. 'lease_released', ARGV[3])
  return 1
end
redis.call('HDEL', prefix .. 'meta', 'owner')
redis.call('HSET', prefix .. 'meta', 'leased_until', read_now())
redis.call('DEL', prefix .. 'lease', prefix .. 'consumer')
publish(prefix .. 'lease_released', '0')
return 1
