-- task_cancel: asks for the end of a task. The process that runs it learns that from the reply to its next report.
--
-- KEYS[1]  the registry of tasks
-- ARGV[1]  now: not used; every script has it first
-- ARGV[2]  id of the task
--
-- Reply: 1 when it is to be cancelled, 0 when it has ended or there is no such task.
--
-- Invariant: a task that has ended stays as it is. A repeated call changes nothing.
--
--!flags allow-oom
local task = parse_task(redis.call('HGET', KEYS[1], ARGV[2]))
if not task or task.state ~= 'running' then
  return 0
end
task.cancel = '1'
write_task(KEYS[1], ARGV[2], task)
return 1
