-- pause: no more jobs of the shard are taken until it is resumed; what is in flight is finished.
--
-- KEYS[1]  prefix of the shard
-- ARGV[1]  now: Unix seconds, or '' for the server's clock
-- ARGV[2]  '1' pauses, '' resumes
--
-- Reply: 1 when that changed something, else 0.
--
-- Invariant: `paused` holds the time of the first of several pauses; pushing goes on meanwhile.
--
--!flags allow-oom
--!include clock
--!include wake
local prefix = KEYS[1]
if ARGV[2] == '1' then
  return redis.call('HSETNX', prefix .. 'meta', 'paused', read_now())
end
local changed = redis.call('HDEL', prefix .. 'meta', 'paused')
if changed == 1 then
  wake(prefix, 0)
end
return changed
