-- set_layout: changes the entry of a queue in the registry, unless somebody else has changed it.
--
-- KEYS[1]  the registry of queues
-- ARGV[1]  now: not used; every script has it first
-- ARGV[2]  queue
-- ARGV[3]  the entry that the new one was made from
-- ARGV[4]  the new entry
--
-- Reply: 1; or the entry that there is, '' for none, and nothing was written.
--
-- Invariant: an entry changes only from what its writer has read: of two who begin a reshard one does. A repeat finds
-- its own entry, and writes it again for `WAIT` (see seal.lua).
--
--!flags allow-oom
local entry = redis.call('HGET', KEYS[1], ARGV[2])
if entry ~= ARGV[3] and entry ~= ARGV[4] then
  return entry or ''
end
redis.call('HSET', KEYS[1], ARGV[2], ARGV[4])
return 1
