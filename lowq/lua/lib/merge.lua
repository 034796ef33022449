-- Moves the payloads of source into target, all of them: equal ones collapse, the lowest score wins. For what is in
-- flight, which take has bounded. Reads 16 at a time, since a payload may be 1 MiB.
local function merge(source, target)
  if redis.call('EXISTS', source) == 0 then
    return
  end
  if redis.call('EXISTS', target) == 0 then
    redis.call('RENAME', source, target)
    return
  end
  while true do
    local part = redis.call('ZRANGE', source, 0, 15, 'WITHSCORES')
    if #part == 0 then
      return
    end
    local pairs_, payloads = {}, {}
    for i = 1, #part, 2 do
      pairs_[i], pairs_[i + 1] = part[i + 1], part[i]
      payloads[#payloads + 1] = part[i]
    end
    redis.call('ZADD', target, 'LT', unpack(pairs_))
    redis.call('ZREM', source, unpack(payloads))
  end
end
