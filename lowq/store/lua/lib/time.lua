-- The server's time, and the jobs that are due by it.

-- Time, in Unix seconds. A number goes to redis.call as it is (Redis writes it with 17 digits); it must never
-- pass through tostring, .. or cjson, which keep 14 digits and lose the microseconds.
local function read_now()
  if ARGV[1] ~= '' then
    return math.min(tonumber(ARGV[1]), 8589934591)
  end
  local time = redis.call('TIME')
  return tonumber(time[1]) + tonumber(time[2]) / 1000000
end

-- A time, or a delay, that is a number and not after the year 2242, which means "never": doubles beyond leave the 64
-- bits of an integer reply, and come back as something long overdue. NaN is neither before nor after anything.
local function bounded(time)
  return time < 8589934591 and time or 8589934591
end

-- A waiting job is due when its perform_at is not after the due_cutoff, which is the server's time: the shard's own
-- clock only gives scores. But the jobs of one push are due a tick apart, so while that clock is ahead, be it for these
-- ticks or because the server's has stepped back, up to a millisecond of it counts. `clock` is that clock if it is
-- known already. Returns it too, as Redis wrote it ('' before the first push).
local function read_due_cutoff(prefix, now, clock)
  clock = clock or redis.call('HGET', prefix .. 'meta', 'clock') or ''
  return math.max(now, math.min(tonumber(clock) or 0, now + 0.001)), clock
end

-- What has become due stays due when the server's clock steps back, by itself or because another server with an
-- earlier clock has taken over. `meta` has the server's time at the last push, `server_time`, and `server_time_since`,
-- from when on it had come there without a jump forward. Jobs whose time is in that stretch were due. They are moved
-- back with it, by as much as the clock stepped, so they keep their order. Others wait until the server's clock is
-- there, among them those of the time that it had jumped over: a clock that was a day ahead for a moment must not
-- start a day's jobs. At most 500 jobs a call; until all are moved the stretch stays as it is, and the next call goes
-- on. Returns whether they are.
local function shift_due(prefix, now, server_time, since)
  local latest = tonumber(server_time or '') or 0
  local step = latest - now
  local stepped = step > 0.001 and step < math.huge
  if not stepped then
    return true
  end
  local first = tonumber(since or '') or latest
  local top = redis.call('ZRANGE', prefix .. 'due', -1, -1, 'WITHSCORES')[2]
  local moved = {}
  for level = 0, top and split_score(top) or 0 do
    local base = level * 8589934592
    -- Beside a level times are rounded, and what is due now is not moved.
    local lowest = base + first > base + now and string.format('%.17g', base + first)
      or string.format('(%.17g', base + now)
    -- What was pushed last may be due up to a millisecond later, see `read_due_cutoff`.
    local jobs = redis.call('ZRANGE', prefix .. 'due', lowest, string.format('%.17g', base + latest + 0.001), 'BYSCORE',
      'LIMIT', 0, 500 - #moved / 2, 'WITHSCORES')
    for i = 1, #jobs, 2 do
      moved[#moved + 1], moved[#moved + 2] = jobs[i + 1] - step, jobs[i]
    end
  end
  if #moved > 0 then
    redis.call('ZADD', prefix .. 'due', 'XX', unpack(moved))
  end
  if #moved == 1000 then
    return false
  end
  redis.call('HSET', prefix .. 'meta', 'server_time', now, 'server_time_since', first - step)
  return true
end

-- Seconds for which a limit is still put off, or nil: never more than its deferral had, "ends seconds", as the server's
-- clock may have stepped back since. Then it ends so much earlier.
local function read_deferral(key, deferral, now)
  local ends, seconds = string.match(deferral or '', '^([%d.e+]+) ([%d.e+-]+)$')
  ends, seconds = tonumber(ends), tonumber(seconds)
  local left = ends and seconds and math.min(ends - now, seconds) or 0
  if left <= 0 or seconds > 2678400 then
    return nil
  end
  if left < ends - now then
    redis.call('HSET', key, 'deferred', string.format('%.17g %.17g', now + left, seconds))
  end
  return left
end
