-- The memory of push calls: a token each in `pushed`, newest first, and those of calls that were repeated in `repeated`.
-- It covers a time, as repeats come within one, however many calls there are meanwhile. It is divided into slots:
-- `tokens` in `meta` is "slot since keep keep1 keep2 length1 length2", whole numbers all.
--   slot              number of the current slot; scores of `repeated` are such numbers
--   since             when it began, Unix seconds
--   keep keep1 keep2  seconds for which calls of this slot, and of the two before it, want to be remembered, at the most
--   length1 length2   how many tokens are of the two slots before
-- A slot lasts for as long as any of the three is to be remembered. The third is forgotten with its end, so a token stays
-- for twice that time at least. When Redis's clock steps ahead, or Redis stood still for long, one slot ends too soon: the
-- time that was asked for is still kept. When it steps back, the slot begins anew.
-- The latest 1,000 tokens are kept in any case, and at most 500,000, some 6.5 MB: older ones are forgotten before their
-- time when there are more than 33,000 calls in each of 15 seconds, which is more than one Redis can do.
local function next_slot(prefix, record, repeated, keep, now)
  local slot, since, keep0, keep1, keep2, length1, length2 =
    string.match(record or '', '^(%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+)$')
  now = math.floor(now)
  if not slot then
    return string.format('1 %d %d 0 0 0 0', now, keep)
  end
  since, keep0, keep1, keep2 = tonumber(since), tonumber(keep0), tonumber(keep1), tonumber(keep2)
  if now - since >= math.max(keep0, keep1, keep2) then
    local length = redis.call('LLEN', prefix .. 'pushed')
    -- Of the 1,000 those that are older than all slots count as of this one: so they stay longer.
    length1, length2 = math.max(length - length1 - length2, 0), tonumber(length1)
    slot, since, keep0, keep1, keep2 = slot + 1, now, keep, keep0, keep1
    if length > math.max(length1 + length2, 1000) then
      redis.call('LTRIM', prefix .. 'pushed', 0, math.max(length1 + length2, 1000) - 1)
    end
    if repeated then
      redis.call('ZREMRANGEBYSCORE', prefix .. 'repeated', '-inf', slot - 3)
      if redis.call('EXISTS', prefix .. 'repeated') == 0 then
        redis.call('HDEL', prefix .. 'meta', 'repeated')
      end
    end
  elseif now < since or keep > keep0 then
    since, keep0 = math.min(since, now), math.max(keep0, keep)
  else
    return nil
  end
  return string.format('%d %d %d %d %d %d %d', slot, since, keep0, keep1, keep2, length1, length2)
end

local function remember(prefix, token)
  if redis.call('LPUSH', prefix .. 'pushed', token) > 500000 then
    redis.call('LTRIM', prefix .. 'pushed', 0, 449999)
  end
end

-- The first call may arrive after its repeat. At most 10,000 are remembered, some 1 MB.
local function remember_repeat(prefix, record, repeated, token)
  redis.call('ZADD', prefix .. 'repeated', string.match(record or '', '^%d+') or 1, token)
  redis.call('ZREMRANGEBYRANK', prefix .. 'repeated', 0, -10001)
  if not repeated then
    redis.call('HSET', prefix .. 'meta', 'repeated', 1)
  end
end
