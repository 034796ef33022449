-- rights: which commands the user may not run.
--
-- KEYS[1]  the prefix of a shard, a key, or a channel: what the commands would get
-- ARGV[1+] names of commands
--
-- Reply: those that Redis would refuse. Empty where it can't be asked: the embedded store has no users.
-- Errors: none.
--
-- Invariant: it reads only. Each command is asked for with three arguments: a server that is asked for one without the
-- keys that it must have may panic.
--!flags no-writes
local refused = {}
for _, command in ipairs(redis.acl_check_cmd and ARGV or {}) do
  local is_known, is_allowed = pcall(redis.acl_check_cmd, command, KEYS[1], KEYS[1], KEYS[1])
  if not (is_known and is_allowed) then
    refused[#refused + 1] = command
  end
end
return refused
