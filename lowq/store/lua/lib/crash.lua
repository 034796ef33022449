-- Somebody died with the job in flight. It waits again, alone and a little later, so that the next crash
-- convicts the right one; or, after max_crash_count crashes, it is buried as poison. Returns whether it was.
-- Needs `crashes`.
local function crash(prefix, id, record, now, max_crash_count, delay)
  local crashes, uncharged = read_crashes(prefix, id)
  crashes = crashes + 1
  write_crashes(prefix, id, crashes, uncharged)
  if crashes < max_crash_count then
    put_back(prefix, id, record, now, now + delay)
    redis.call('SADD', prefix .. 'solo', id)
    return false
  end
  -- The whole job, also what came meanwhile. Should both that and the morgue hold thousands of payloads, a part of
  -- them waits on, as a job that starts afresh.
  local waiting = prefix .. 'payloads:' .. id
  materialize(prefix, id, record)
  merge(prefix .. 'taken:payloads:' .. id, waiting)
  if merge(waiting, prefix .. 'morgue:payloads:' .. id, { payloads = 500, bytes = 1048576 }) then
    redis.call('ZREM', prefix .. 'due', id)
  else
    redis.call('ZADD', prefix .. 'due', 'NX', now, id)
  end
  redis.call('HDEL', prefix .. 'taken', id)
  redis.call('ZADD', prefix .. 'morgue', now, id)
  redis.call('HSET', prefix .. 'morgue:errors', id,
    'poison: the process died ' .. crashes .. ' times with this job in flight'
    .. (uncharged > 0 and ', or was stopped and could not wait for it' or ''))
  redis.call('HINCRBY', prefix .. 'meta', 'buried', 1)
  forget(prefix, id)
  return true
end
