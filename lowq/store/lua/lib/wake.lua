-- Tells the owner when the shard's head is due. Not while something is in flight: whoever holds that asks for
-- the next due time anyway when it reports the outcome.
local function wake(prefix, delay)
  if redis.call('EXISTS', prefix .. 'taken') == 0 then
    redis.call('PUBLISH', prefix .. 'wake', string.format('%.6f', math.max(delay, 0)))
  end
end
