-- defer_limit: has nobody begin anything of a limit over all nodes for a while, or calls that off.
--
-- KEYS[1]  the limit; also the channel for those who wait for it
-- ARGV[1]  now: Unix seconds, or '' for the server's clock
-- ARGV[2]  seconds from now on; 0: it may begin again
--
-- Reply: 1
--
-- Invariant: the latest end that was asked for since it was called off last holds. A repeat puts it off by the time
-- between the two calls more, at most. Holders that have permits which they may use again are told by a message "!
-- seconds"; all others learn of it when they ask.
--
--!flags allow-oom
local key, now, seconds = KEYS[1], read_now(), tonumber(ARGV[2])
if seconds == 0 then
  redis.call('HDEL', key, 'deferred')
else
  seconds = math.max(seconds, read_deferral(key, redis.call('HGET', key, 'deferred'), now) or 0)
  redis.call('HSET', key, 'deferred', string.format('%.17g %.17g', now + seconds, seconds))
  local left = math.ceil(seconds * 1000) + 1000
  if redis.call('PTTL', key) < left then
    redis.call('PEXPIRE', key, string.format('%.0f', left))
  end
end
publish(key, string.format('! %.6f', seconds))
return 1
