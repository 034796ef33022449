-- set_schedule: the record of a schedule changes, unless somebody else has changed it.
--
-- KEYS[1]  prefix of the shard that its ticks are pushed to
-- ARGV[1]  now: not used; every script has it first
-- ARGV[2]  the schedule's name
-- ARGV[3]  the record that this one was made from; '': there is none
-- ARGV[4]  the record; '' removes it
--
-- Reply: 1; 0: there is another one, or it is being moved to another layout, and nothing was written.
--
-- Invariant: a record changes only from what its writer has read. A repeat finds its own record there and changes
--            nothing.
--
--!flags allow-oom
local key, name = KEYS[1] .. 'schedules', ARGV[2]
local present = redis.call('HGET', key, name) or ''
if present == ARGV[4] then
  return 1
end
if present ~= ARGV[3] then
  return 0
end
local meta = redis.call('HMGET', KEYS[1] .. 'meta', 'sealed', 'fed')
if meta[1] or meta[2] then
  return 0
end
if ARGV[4] == '' then
  redis.call('HDEL', key, name)
else
  redis.call('HSET', key, name, ARGV[4])
end
return 1
