-- Takeover: the jobs in flight of an owner that has died wait again, charged with a crash. `acquire` calls it when the
-- owner's lease has run out, `release` when a handler has stopped its process.

-- The record of an id whose owners end with it in flight: "crashes", or "crashes uncharged". The first number counts
-- deaths; the second, how often an owner that was told to stop did not wait for it any longer, and it went uncharged.
local function read_crashes(prefix, id)
  local crashes, uncharged = string.match(redis.call('HGET', prefix .. 'crashes', id) or '', '^(%d+) ?(%d*)$')
  return tonumber(crashes) or 0, tonumber(uncharged) or 0
end

local function write_crashes(prefix, id, crashes, uncharged)
  local value = string.format(uncharged > 0 and '%d %d' or '%d', crashes, uncharged)
  redis.call('HSET', prefix .. 'crashes', id, value)
end

-- An owner died with the job in flight. It waits again, alone and a little later, so that the next crash
-- convicts the right one; or, after max_crash_count crashes, it is buried as poison. Returns whether it was. `room`:
-- see `merge_taken`.
local function crash(prefix, id, record, now, max_crash_count, delay, features, room)
  local crashes, uncharged = read_crashes(prefix, id)
  crashes = crashes + 1
  write_crashes(prefix, id, crashes, uncharged)
  if crashes < max_crash_count then
    put_back(prefix, id, record, now, now + delay, features, room)
    redis.call('SADD', prefix .. 'solo', id)
    return false
  end
  -- The whole job, also what came meanwhile. Should both that and the morgue hold thousands of payloads, a part of
  -- them waits on, as a job that starts afresh.
  local taken = prefix .. 'taken:payloads:' .. id
  local budget, has_ttl, lives, is_swept = { payloads = 500, bytes = 1048576 }, uses(features, 'ttl'), true, true
  materialize(prefix, id, record)
  if has_ttl then
    lives, is_swept = expire_in_flight(prefix, id, now, room), expire_within(prefix, id, now, budget)
    lives = lives or (is_swept and has_payloads(prefix .. 'payloads', id))
    merge_set(taken, prefix .. 'morgue:payloads', id, room) -- at once: beside what waits may be more that has expired
    redis.call('UNLINK', prefix .. 'taken:expires:' .. id)
  else
    merge_set(taken, prefix .. 'payloads', id, room)
  end
  if uses(features, 'traces') then
    forget_traces(prefix, 'taken:traces:', { id })
    forget_traces(prefix, 'traces:', { id })
  end
  if is_swept and merge_into_morgue(prefix, id, budget, has_ttl) then
    redis.call('ZREM', prefix .. 'due', id)
  else
    redis.call('ZADD', prefix .. 'due', 'NX', now, id)
  end
  if room then
    room.payloads, room.bytes = room.payloads + budget.payloads - 500, room.bytes + budget.bytes - 1048576
  end
  end_debounce(prefix, id, features)
  redis.call('HDEL', prefix .. 'taken', id)
  if not lives then -- all of it had expired
    forget(prefix, id)
    return false
  end
  redis.call('ZADD', prefix .. 'morgue', now, id)
  local reason = 'poison: its process died, or its batch exceeded ttr, ' .. crashes .. ' times with this job in flight'
    .. (uncharged > 0 and ', or was stopped and could not wait for it' or '')
  redis.call('HSET', prefix .. 'morgue:errors', id,
    with_attempts(reason, attempts_of(redis.call('HGET', prefix .. 'errors', id))))
  redis.call('HINCRBY', prefix .. 'meta', 'buried', 1)
  forget(prefix, id)
  return true
end
