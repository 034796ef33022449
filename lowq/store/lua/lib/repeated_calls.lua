-- The memory of calls, which keeps a repeat after a lost reply from being done twice.

-- The memory of push calls: a token each in `pushed`, newest first; those of calls that were repeated in `repeated`.
-- It covers a time, as repeats come within one, however many calls there are meanwhile, and is divided into slots:
-- `slot` in `meta` is "ends keep number keep1 keep2 length1 length2", whole numbers all.
--   ends               when the current slot may end, Unix seconds
--   keep keep1 keep2   seconds for which calls of this slot, and of the two before, want to be remembered, at the most
--   number             of the current slot; scores of `repeated` are such numbers
--   length1 length2    how many tokens are of the two slots before
-- A slot lasts for as long as any of the three is to be remembered. The third is forgotten with its end, so a token
-- stays for twice that time at least. When Redis's clock steps ahead, or Redis stood still for long, one slot ends too
-- soon: the time that was asked for is still kept. When it steps back, the slot lasts for longer.
-- The latest 1,000 tokens are kept in any case, and at most 500,000, some 6.5 MB: older ones are forgotten before their
-- time when there are more than 33,000 calls in each of 15 seconds, which is more than one Redis can do.
local function next_slot(prefix, record, repeated, keep, now)
  -- Nearly always the slot goes on, and is asked for no longer than before. `ends` has ten digits until 2286.
  if record and now < tonumber(string.sub(record, 1, 10)) and string.find(record, keep, 12, true) == 12 then
    return
  end
  local ends, keep0 = string.match(record or '', '^(%d+) (%d+) ')
  keep = tonumber(keep)
  if ends and now < tonumber(ends) and keep <= tonumber(keep0) then
    return
  end
  local number, keep1, keep2, length1, length2 =
    string.match(record or '', '^%d+ %d+ (%d+) (%d+) (%d+) (%d+) (%d+)$')
  now, ends, keep0 = math.floor(now), tonumber(ends), tonumber(keep0)
  local key_pushed = prefix .. 'pushed'
  if not number then
    number, ends, keep0, keep1, keep2, length1, length2 = 1, now + keep, keep, 0, 0, 0, 0
  elseif now < ends then
    ends = ends + math.max(keep - math.max(keep0, tonumber(keep1), tonumber(keep2)), 0)
    keep0 = keep
  else
    local length = redis.call('LLEN', key_pushed)
    -- Of the 1,000 those that are older than all slots count as of this one: so they stay longer.
    length1, length2 = math.max(length - length1 - length2, 0), tonumber(length1)
    number, keep0, keep1, keep2 = number + 1, keep, keep0, tonumber(keep1)
    ends = now + math.max(keep0, keep1, keep2)
    local most = math.max(length1 + length2, 1000)
    if length > most then
      redis.call('LTRIM', key_pushed, 0, most - 1)
    end
    if repeated then
      redis.call('ZREMRANGEBYSCORE', prefix .. 'repeated', '-inf', number - 3)
      if redis.call('EXISTS', prefix .. 'repeated') == 0 then
        redis.call('HDEL', prefix .. 'meta', 'repeated')
      end
    end
  end
  redis.call('HSET', prefix .. 'meta', 'slot',
    string.format('%d %d %d %d %d %d %d', ends, keep0, number, keep1, keep2, length1, length2))
end

-- The first call may arrive after its repeat. At most 10,000 are remembered, some 1 MB.
-- The last command changes something each time, as Redis sees it, also of a second repeat: whoever waits behind the
-- call for replicas or the disk (WAIT, WAITAOF) waits for the last write of this connection, and for nothing if it has
-- written nothing.
local function remember_repeat(prefix, record, token)
  redis.call('ZADD', prefix .. 'repeated', string.match(record or '', '^%d+ %d+ (%d+) ') or 1, token)
  redis.call('ZREMRANGEBYRANK', prefix .. 'repeated', 0, -10001)
  redis.call('HSET', prefix .. 'meta', 'repeated', 1)
end

-- Whether a call of an operator comes after a repeat of itself, out of a connection that was given up meanwhile. Then
-- it has been done, and what has come since is not meant. `attempt`: a random token of this attempt, and behind it
-- those of the earlier attempts of the same call, which are superseded from now on: "token earlier earlier"; '': it is
-- never repeated. They are kept for an hour, and the latest 1,000 of them: by then no connection holds anything back.
local function is_superseded(prefix, attempt, now)
  local key = prefix .. 'superseded'
  local token, earlier = string.match(attempt, '^(%S*) ?(.*)$')
  if redis.call('ZSCORE', key, token) then
    return true
  end
  if earlier ~= '' then
    for each in string.gmatch(earlier, '%S+') do
      redis.call('ZADD', key, now, each)
    end
    redis.call('ZREMRANGEBYRANK', key, 0, -1001)
    redis.call('EXPIRE', key, 3600)
  end
  return false
end
