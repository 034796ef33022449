-- pause: no more jobs of the shard are taken until it is resumed; what is in flight is finished.
--
-- KEYS[1]  prefix of the shard
-- ARGV[1]  now: Unix seconds, or '' for the server's clock
-- ARGV[2]  the attempt, see lib/repeated_calls.lua; '' when it is never repeated
-- ARGV[3]  '1' pauses, '' resumes
-- ARGV[4]  who pauses, '' or absent: nobody says
--
-- Reply: 1 when that changed something, else 0.
--
-- Invariant: `paused` holds the time of the first of several pauses, `paused_by` who that was;
--            pushing goes on meanwhile.
-- A repeat supersedes the earlier attempts of its call: one that comes later does nothing.
--
--!flags allow-oom
local prefix, now = KEYS[1], read_now()
if is_superseded(prefix, ARGV[2], now) then
  return 0
end
if ARGV[3] == '1' then
  local first = redis.call('HSETNX', prefix .. 'meta', 'paused', now)
  if first == 1 and ARGV[4] and ARGV[4] ~= '' then
    redis.call('HSET', prefix .. 'meta', 'paused_by', ARGV[4])
  end
  return first
end
local changed = redis.call('HDEL', prefix .. 'meta', 'paused')
redis.call('HDEL', prefix .. 'meta', 'paused_by')
if changed == 1 then
  wake(prefix, 0)
end
return changed
