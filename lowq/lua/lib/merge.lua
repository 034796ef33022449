-- Moves the payloads of source into target: equal ones collapse, the lowest score wins. Stops after `most`
-- payloads or about 1 MiB (all of them when `most` is nil) and returns whether source is empty now. Reads 16
-- at a time, since a payload may be 1 MiB and nothing tells its size beforehand.
local function merge(source, target, most)
  if redis.call('EXISTS', source) == 0 then
    return true
  end
  if redis.call('EXISTS', target) == 0 then
    redis.call('RENAME', source, target)
    return true
  end
  local moved, bytes = 0, 0
  repeat
    local part = redis.call('ZRANGE', source, 0, 15, 'WITHSCORES')
    if #part == 0 then
      return true
    end
    local pairs_, payloads = {}, {}
    for i = 1, #part, 2 do
      pairs_[i], pairs_[i + 1] = part[i + 1], part[i]
      payloads[#payloads + 1] = part[i]
      bytes = bytes + #part[i]
    end
    redis.call('ZADD', target, 'LT', unpack(pairs_))
    redis.call('ZREM', source, unpack(payloads))
    moved = moved + #payloads
  until most and (moved >= most or bytes >= 1048576)
  return redis.call('EXISTS', source) == 0
end
