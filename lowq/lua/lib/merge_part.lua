-- As `merge`, but only as much as the budget allows: {payloads = n, bytes = n}, which is used up, also over many
-- ids of one call. At least one payload is moved while the budget is not used up. Returns whether source is
-- empty now. Reads a few at a time: a payload may be 1 MiB, and nothing tells its size beforehand.
local function merge_part(source, target, budget)
  if redis.call('EXISTS', source) == 0 then
    return true
  end
  if redis.call('EXISTS', target) == 0 then
    redis.call('RENAME', source, target)
    return true
  end
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
