-- Somebody died with the job in flight. It waits again, alone and a little later, so that the next crash
-- convicts the right one; or, after max_crash_count crashes, it is buried as poison. Returns whether it was.
local function crash(prefix, id, record, now, max_crash_count, delay)
  local crashes = redis.call('HINCRBY', prefix .. 'crashes', id, 1)
  if crashes < max_crash_count then
    local _, was_due = parse_taken(record)
    put_back(prefix, id, record, math.max(tonumber(was_due), now + delay))
    redis.call('SADD', prefix .. 'solo', id)
    return false
  end
  merge(prefix .. 'taken:payloads:' .. id, prefix .. 'morgue:payloads:' .. id)
  redis.call('HDEL', prefix .. 'taken', id)
  redis.call('ZADD', prefix .. 'morgue', now, id)
  redis.call('HSET', prefix .. 'morgue:errors', id,
    'poison: the process died ' .. crashes .. ' times with this job in flight')
  redis.call('HINCRBY', prefix .. 'meta', 'died', 1)
  forget(prefix, id)
  return true
end
