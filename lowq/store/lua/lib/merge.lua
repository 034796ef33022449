-- Moves the payloads of source into target: equal ones collapse, the lowest score wins. All of them, which is for what
-- is in flight, as take has bounded that; or as many as the budget allows: {payloads = n, bytes = n}, which is used up,
-- also over many ids of one call. At least one payload is moved while the budget is not used up. Returns whether source
-- is empty now. Reads a few at a time: a payload may be 1 MiB, and nothing tells its size beforehand.
local function merge(source, target, budget)
  if redis.call('EXISTS', source) == 0 then
    return true
  end
  if redis.call('EXISTS', target) == 0 then
    redis.call('RENAME', source, target)
    return true
  end
  budget = budget or { payloads = math.huge, bytes = math.huge }
  if budget.payloads <= 0 or budget.bytes <= 0 then
    return false
  end
  local inline = redis.call('MGET', source)[1]
  if inline then
    add_payload(target, split_inline(inline))
    redis.call('DEL', source)
    budget.payloads, budget.bytes = budget.payloads - 1, budget.bytes - #inline
    return true
  end
  promote_to_zset(target)
  local step, largest = 1, 1
  while budget.payloads > 0 and budget.bytes > 0 do
    local part = redis.call('ZRANGE', source, 0, step - 1, 'WITHSCORES')
    if #part == 0 then
      return true
    end
    local pairs_, payloads = {}, {}
    for i = 1, #part, 2 do
      pairs_[i], pairs_[i + 1] = part[i + 1], part[i]
      payloads[#payloads + 1] = part[i]
      budget.bytes = budget.bytes - #part[i]
      largest = math.max(largest, #part[i])
    end
    redis.call('ZADD', target, 'LT', unpack(pairs_))
    redis.call('ZREM', source, unpack(payloads))
    budget.payloads = budget.payloads - #payloads
    step = math.max(1, math.min(16, step * 2, math.floor(budget.bytes / largest)))
  end
  return redis.call('EXISTS', source) == 0
end
