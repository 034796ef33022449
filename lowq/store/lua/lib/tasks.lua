-- Records in the registry of tasks: "state began_at heartbeat_at ended_at done total cancel size facts error". Times
-- are Unix seconds; `size` are the bytes of `facts`; '-' stands for what is not known yet.

-- The parts of a record; nil when it is none of ours.
local function parse_task(record)
  local state, began, heartbeat, ended, done, total, cancel, size, rest =
    string.match(record or '', '^(%l+) ([%d.]+) ([%d.]+) ([%d.-]+) (%d+) ([%d-]+) ([01]) (%d+) (.*)$')
  if not state or not tonumber(began) or not tonumber(heartbeat) then
    return nil
  end
  local length = math.min(tonumber(size), #rest)
  return {
    state = state, began = tonumber(began), heartbeat = tonumber(heartbeat), ended = ended, done = done, total = total,
    cancel = cancel, facts = string.sub(rest, 1, length), error = string.sub(rest, length + 1),
  }
end

local function write_task(key, id, task)
  local head = string.format('%s %.6f %.6f %s %s %s %s %d ', task.state, task.began, task.heartbeat, task.ended,
    task.done, task.total, task.cancel, #task.facts)
  redis.call('HSET', key, id, head .. task.facts .. task.error)
end
