-- rights: which commands the user may not run.
--
-- KEYS[1]  the prefix of a shard, a key, or a channel: what the commands would get
-- ARGV[1+] names of commands
--
-- Reply: those that Redis would refuse. Empty where it can't be asked: the embedded store has no users.
-- Errors: none.
--
-- Invariant: it reads only. Each command is asked for with three arguments first: a server before Redis 8 that is asked
-- for one without the keys that it must have may panic. Redis 8 looks at the number of arguments instead.
--!flags no-writes
local function is_allowed(command)
  for _, count in ipairs({ 3, 2, 1, 0 }) do
    local is_answered, answer = pcall(redis.acl_check_cmd, command, unpack({ KEYS[1], KEYS[1], KEYS[1] }, 1, count))
    if is_answered then
      return answer
    end
  end
  return false
end

local refused = {}
for _, command in ipairs(redis.acl_check_cmd and ARGV or {}) do
  if not is_allowed(command) then
    refused[#refused + 1] = command
  end
end
return refused
