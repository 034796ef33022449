-- About how many bytes Redis frees on the spot when it unlinks a payloads key: only sets of more than 64 members
-- are left to its background thread, and 64 payloads of 1 MiB each take milliseconds. 0 where nothing tells, and for
-- an inline payload, which is small.
local function weight(key)
  if redis.call('TYPE', key).ok ~= 'zset' or redis.call('ZCARD', key) > 64 then
    return 0
  end
  local bytes = redis.pcall('MEMORY', 'USAGE', key, 'SAMPLES', 0)
  return type(bytes) == 'number' and bytes or 0
end
