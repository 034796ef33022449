-- pause: no more jobs of the shard are taken until it is resumed; what is in flight is finished.
--
-- KEYS[1]  prefix of the shard
-- ARGV[1]  now: Unix seconds, or '' for the server's clock
-- ARGV[2]  '1' pauses, '' resumes
-- ARGV[3]  who pauses, '' or absent: nobody says
--
-- Reply: 1 when that changed something, else 0.
--
-- Invariant: `paused` holds the time of the first of several pauses, `paused_by` who that was;
--            pushing goes on meanwhile.
--
--!flags allow-oom
--!include clock
--!include wake
local prefix = KEYS[1]
if ARGV[2] == '1' then
  local first = redis.call('HSETNX', prefix .. 'meta', 'paused', read_now())
  if first == 1 and ARGV[3] and ARGV[3] ~= '' then
    redis.call('HSET', prefix .. 'meta', 'paused_by', ARGV[3])
  end
  return first
end
local changed = redis.call('HDEL', prefix .. 'meta', 'paused')
redis.call('HDEL', prefix .. 'meta', 'paused_by')
if changed == 1 then
  wake(prefix, 0)
end
return changed
