-- A waiting job is due when its perform_at is not after the due_cutoff, which is the server's time: the shard's own
-- clock only gives scores. But the jobs of one push are due a tick apart, so while that clock is ahead, be it for these
-- ticks or because the server's has stepped back, up to a millisecond of it counts. `clock` is that clock if it is
-- known already. Returns it too, as Redis wrote it ('' before the first push).
local function read_due_cutoff(prefix, now, clock)
  clock = clock or redis.call('HGET', prefix .. 'meta', 'clock') or ''
  return math.max(now, math.min(tonumber(clock) or 0, now + 0.001)), clock
end
