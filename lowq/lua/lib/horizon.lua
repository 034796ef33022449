-- A waiting job is due when its perform_at is not after the horizon: the server's time, or the shard's own clock
-- when that is ahead. Returns the clock too, as Redis wrote it ('' before the first push).
local function read_horizon(prefix, now)
  local clock = redis.call('HGET', prefix .. 'meta', 'clock') or ''
  return math.max(now, tonumber(clock) or 0), clock
end
