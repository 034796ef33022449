-- task_report: how far a task is, or how it ended, from the process that runs it.
--
-- KEYS[1]  the registry of tasks
-- ARGV[1]  now: Unix seconds, or '' for the server's clock
-- ARGV[2]  id of the task
-- ARGV[3]  its state: running, done, cancelled or failed
-- ARGV[4]  to how many jobs it was done so far
-- ARGV[5]  of how many; '' while they are counted
-- ARGV[6]  why it failed; '' otherwise
-- ARGV[7]  seconds without any report after which the registry expires
--
-- Reply: {its state from now on, 1 when it is to be cancelled}; {'', 0} when there is no such task.
--
-- Invariant: a task that has ended stays as it is, `done` never shrinks, and a total that is known stays known: so a
--   report may be repeated, and a late one changes nothing but the heartbeat.
--
--!flags allow-oom
local task = parse_task(redis.call('HGET', KEYS[1], ARGV[2]))
if not task then
  return { '', 0 }
end
if task.state == 'running' then
  task.heartbeat = read_now()
  if tonumber(ARGV[4]) >= tonumber(task.done) then
    task.done, task.total = ARGV[4], ARGV[5] ~= '' and ARGV[5] or task.total
  end
  if ARGV[3] ~= 'running' then
    task.state, task.ended, task.error = ARGV[3], string.format('%.6f', task.heartbeat), ARGV[6]
  end
  write_task(KEYS[1], ARGV[2], task)
  redis.call('EXPIRE', KEYS[1], ARGV[7])
end
return { task.state, tonumber(task.cancel) }
