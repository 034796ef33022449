-- task_begin: enters a bulk action in the registry of tasks, if there is room for another one.
--
-- KEYS[1]  the registry of tasks
-- ARGV[1]  now: Unix seconds, or '' for the server's clock
-- ARGV[2]  id of the task
-- ARGV[3]  its facts, which never change: JSON
-- ARGV[4]  how many tasks may run at once
-- ARGV[5]  how many tasks that don't run are kept, the latest
-- ARGV[6]  seconds without a report after which a task that runs counts as interrupted
-- ARGV[7]  seconds without any report after which the registry expires
--
-- Reply: {1, began_at} when it runs; {0, how many others run} when they are too many, and nothing was entered.
--
-- Invariant: at most ARGV[4] tasks run when one is entered, and at most ARGV[4] + ARGV[5] records are kept. What is no
--   record is removed. A repeated call changes nothing.
--
--!flags allow-oom
local key, id, now = KEYS[1], ARGV[2], read_now()
local known = parse_task(redis.call('HGET', key, id))
if known then
  return { 1, string.format('%.6f', known.began) }
end

local running, others = 0, {}
local records = redis.call('HGETALL', key)
for i = 1, #records, 2 do
  local task = parse_task(records[i + 1])
  if not task then
    redis.call('HDEL', key, records[i])
  -- The clock may have stepped back: then a task that lives reports with the new time soon.
  elseif task.state == 'running' and math.abs(now - task.heartbeat) <= tonumber(ARGV[6]) then
    running = running + 1
  else
    others[#others + 1] = { task.began, records[i] }
  end
end
if running >= tonumber(ARGV[4]) then
  return { 0, running }
end
table.sort(others, function(a, b) return a[1] > b[1] end)
for i = tonumber(ARGV[5]) + 1, #others do
  redis.call('HDEL', key, others[i][2])
end
write_task(key, id, {
  state = 'running', began = now, heartbeat = now, ended = '-', done = '0', total = '-', cancel = '0',
  facts = ARGV[3], error = '',
})
redis.call('EXPIRE', key, ARGV[7])
return { 1, string.format('%.6f', now) }
