-- Payloads with a ttl. Only shards that use it (`features`, see lib/features.lua) come here.
--   expires             ZSET: id -> when the first of its payloads that wait expires, Unix seconds: an index
--   expires:<id>        ZSET: payload -> when it expires, where the payloads that wait are a set. Of an inline payload it
--                       is in its text, "score,expires payload"
--   taken:expires:<id>  as `expires:<id>`, of those in flight
-- Of two equal payloads the earlier time counts, and if one of them never expires, neither do they: a push without a ttl
-- wants it performed. A buried payload does not expire, nor does it when it is kicked.
--
-- An expired payload is gone, though nothing has swept it yet: it is not handed out or buried, and nothing joins it.

-- Brings the index up to date with the times of an id whose payloads are a set.
local function index_expiry(prefix, id)
  local first = redis.call('ZRANGE', prefix .. 'expires:' .. id, 0, 0, 'WITHSCORES')[2]
  if first then
    redis.call('ZADD', prefix .. 'expires', first, id)
  else
    redis.call('ZREM', prefix .. 'expires', id)
  end
end

-- No payload that waits for the id expires any more.
local function forget_expiry(prefix, id)
  redis.call('ZREM', prefix .. 'expires', id)
  redis.call('UNLINK', prefix .. 'expires:' .. id)
end

-- The payload that waits inline becomes one of a set, if it is not yet; and so does its time.
local function promote_expiring(prefix, id)
  local at, payload = promote_to_zset(prefix .. 'payloads', id)
  if at then
    redis.call('ZADD', prefix .. 'expires:' .. id, at, payload)
  end
end

-- When an inline payload expires, as text, or nil.
local function expiry_in(inline)
  return string.match(inline, '^[^ ,]*,(%d+%.?%d*) ')
end

-- The time of two equal payloads, each as text or nil.
local function earlier(a, b)
  return a and b and (tonumber(a) <= tonumber(b) and a or b) or nil
end

-- As `add_payload`, for a payload that waits. `at`: when it expires, as text, or nil: never. `form`: as there, not nil.
local function add_expiring(prefix, id, payload, score, form, at)
  local place, key, times = prefix .. 'payloads', prefix .. 'payloads:' .. id, prefix .. 'expires:' .. id
  form = form or redis.call('EXISTS', key) == 1
  if not form then
    form = add_payload(place, id, payload, score, false, at)
    if at then
      redis.call('ZADD', prefix .. 'expires', at, id)
      if form == true then
        redis.call('ZADD', times, at, payload)
      end
    end
    return form
  end
  local present, its_score, its_at
  if form ~= true then
    present, its_score, its_at = split_inline(form)
  end
  if present == payload then
    at = earlier(at, its_at)
    if at then
      redis.call('ZADD', prefix .. 'expires', at, id)
    else
      redis.call('ZREM', prefix .. 'expires', id)
    end
    form = join_inline(payload, tonumber(score) < tonumber(its_score) and score or its_score, at)
    redis.call('HSET', place, id, form)
    return form
  end
  promote_expiring(prefix, id)
  if at and not redis.call('ZSCORE', key, payload) then
    redis.call('ZADD', times, at, payload)
  elseif at then
    redis.call('ZADD', times, 'XX', 'LT', at, payload)
  else
    redis.call('ZREM', times, payload)
  end
  index_expiry(prefix, id)
  return add_payload(place, id, payload, score, true)
end

-- When a payload that waits expires, as text, or nil.
local function expiry_of(prefix, id, payload)
  local inline = redis.call('HGET', prefix .. 'payloads', id)
  if inline then
    return expiry_in(inline)
  end
  return redis.call('ZSCORE', prefix .. 'expires:' .. id, payload) or nil
end

-- As `add_latest`, for a payload that waits; the one that stays keeps its own time. `at`, `form`: as of `add_expiring`.
local function add_latest_expiring(prefix, id, payload, score, form, at)
  local place = prefix .. 'payloads'
  local present, its_score = get_highest(place, id, form)
  local stays = payload
  if present and present ~= payload and tonumber(its_score) > tonumber(score) then
    stays, at = present, expiry_of(prefix, id, present)
  elseif present == payload or (present and redis.call('ZSCORE', place .. ':' .. id, payload)) then
    at = earlier(at, expiry_of(prefix, id, payload)) -- also of one that another policy has left behind the highest
  end
  forget_expiry(prefix, id)
  form = add_latest(place, id, payload, score, form, at)
  if at then
    redis.call('ZADD', prefix .. 'expires', at, id)
    if form == true then
      redis.call('ZADD', prefix .. 'expires:' .. id, at, stays)
    end
  end
  return form
end

-- As `merge_latest`, with the times of both. `times`: the key of those of source, or false: none of it expires.
local function merge_latest_expiring(prefix, id, source, times)
  local payload, score = unpack(redis.call('ZRANGE', source, -1, -1, 'WITHSCORES'))
  if payload then
    local at = times and redis.call('ZSCORE', times, payload) or nil
    local present, its_score = get_highest(prefix .. 'payloads', id)
    if present and tonumber(its_score) >= tonumber(score) then
      at = expiry_of(prefix, id, present)
      if redis.call('ZSCORE', source, present) then
        at = times and earlier(at, redis.call('ZSCORE', times, present)) or nil
      end
      payload, score = present, its_score
    end
    redis.call('UNLINK', source)
    if times then
      redis.call('UNLINK', times)
    end
    add_latest_expiring(prefix, id, payload, score, nil, at)
  end
end

-- Before the payloads of an id in flight, a set, are merged into those that wait: the same with their times. Bounded,
-- as ack_and_take bounds the payloads in flight.
local function merge_expiries(prefix, id)
  local source, times = prefix .. 'taken:payloads:' .. id, prefix .. 'taken:expires:' .. id
  local target, its_times = prefix .. 'payloads:' .. id, prefix .. 'expires:' .. id
  if not has_payloads(prefix .. 'payloads', id) then
    if redis.call('EXISTS', times) == 1 then
      redis.call('RENAME', times, its_times)
    end
  else
    promote_expiring(prefix, id)
    local payloads = redis.call('ZRANGE', source, 0, -1)
    for start = 1, #payloads, 100 do
      local some = { unpack(payloads, start, math.min(start + 99, #payloads)) }
      local at = redis.call('ZMSCORE', times, unpack(some))
      local present = redis.call('ZMSCORE', target, unpack(some))
      for i, payload in ipairs(some) do
        if not at[i] then
          redis.call('ZREM', its_times, payload)
        elseif present[i] then
          redis.call('ZADD', its_times, 'XX', 'LT', at[i], payload)
        else
          redis.call('ZADD', its_times, at[i], payload)
        end
      end
    end
    redis.call('UNLINK', times)
  end
  index_expiry(prefix, id)
end

-- The payloads of an id, a set, are being taken: all of them, or of `parted` those in it, which is a job as a reply has
-- it. So are their times.
local function take_expiries(prefix, id, parted)
  local times, taken = prefix .. 'expires:' .. id, prefix .. 'taken:expires:' .. id
  redis.call('UNLINK', taken)
  if not parted then
    if redis.call('EXISTS', times) == 1 then
      redis.call('RENAME', times, taken)
    end
    return
  end
  for i = 4, #parted, 2 do
    local at = redis.call('ZSCORE', times, parted[i])
    if at then
      redis.call('ZADD', taken, at, parted[i])
      redis.call('ZREM', times, parted[i])
    end
  end
  index_expiry(prefix, id)
end

-- Removes expired payloads in flight, of a set. Returns how many: no more than one take hands out.
local function drop_expired(key, times, now)
  local count = 0
  repeat
    local expired = redis.call('ZRANGE', times, '-inf', string.format('%.17g', now), 'BYSCORE', 'LIMIT', 0, 500)
    if #expired > 0 then
      redis.call('ZREM', key, unpack(expired))
      redis.call('ZREM', times, unpack(expired))
    end
    count = count + #expired
  until #expired < 500
  return count
end

-- The same of an id in flight whose payloads have a key, and counts it, in `room` as well: see `merge_taken`. Returns
-- whether any are left.
local function expire_in_flight(prefix, id, now, room)
  local key = prefix .. 'taken:payloads:' .. id
  local count = drop_expired(key, prefix .. 'taken:expires:' .. id, now)
  add_to_meta(prefix, 'expired', count)
  if room then
    room.payloads = room.payloads - count
  end
  return redis.call('EXISTS', key) == 1
end

-- Removes expired payloads of an id in flight that is not performed. Returns whether nothing is left of it.
local function expire_taken(prefix, id, record, now, features)
  if uses(features, 'traces') then
    touch(prefix, { 'taken:traces:' }, { id })
  end
  if has_inline(record) then
    local at = expiry_in(get_inline(record) or '')
    if not at or tonumber(at) > now then
      return false
    end
    redis.call('HINCRBY', prefix .. 'meta', 'expired', 1)
  elseif expire_in_flight(prefix, id, now) then
    return false
  end
  redis.call('HDEL', prefix .. 'taken', id)
  if not has_payloads(prefix .. 'payloads', id) then
    forget(prefix, id)
  end
  if uses(features, 'traces') then
    forget_traces(prefix, 'taken:traces:', { id })
  end
  announce_room(prefix, redis.call('HGET', prefix .. 'meta', 'features'))
  return true
end

-- Removes what has expired of these ids, each of which has a payload that waits and has. About `most` payloads, and as
-- many bytes of them as `room`. Returns how many payloads that are; id, number of payloads, id, number...; whether that
-- was all; and the room that is left.
local function expire(prefix, ids, now, most, room)
  local until_now = string.format('%.17g', now)
  touch(prefix, { 'payloads:', 'expires:' }, ids)
  local features = redis.call('HGET', prefix .. 'meta', 'features')
  if uses(features, 'traces') then
    touch(prefix, { 'traces:' }, ids)
  end
  local keys = keys_of(prefix, 'payloads:', ids)
  local inline = redis.call('HMGET', prefix .. 'payloads', unpack(ids))
  local in_flight = redis.call('HMGET', prefix .. 'taken', unpack(ids))
  local gone, gone_keys, over, count, found = {}, {}, {}, 0, {}
  for i, id in ipairs(ids) do
    if count >= most or room <= 0 then
      break
    end
    local is_gone, before = inline[i], count
    if is_gone then
      local at = expiry_in(inline[i])
      is_gone = at and tonumber(at) <= now
      if is_gone then
        count = count + 1
      elseif at then -- the index was wrong
        redis.call('ZADD', prefix .. 'expires', at, id)
      else
        redis.call('ZREM', prefix .. 'expires', id)
      end
    else
      local times = prefix .. 'expires:' .. id
      local expired = redis.call('ZCOUNT', times, '-inf', until_now)
      if expired <= most - count and expired == redis.call('ZCARD', keys[i]) then
        if expired <= 64 then -- Redis frees more of them in its background; what these have is guessed by one
          room = room - expired * #(redis.call('ZRANGE', keys[i], 0, 0)[1] or '')
        end
        count = count + expired
        is_gone, gone_keys[#gone_keys + 1] = true, times
      else
        local step = 1
        while count < most and room > 0 do
          local some = redis.call('ZRANGE', times, '-inf', until_now, 'BYSCORE', 'LIMIT', 0, step)
          if #some == 0 then
            break
          end
          redis.call('ZREM', keys[i], unpack(some))
          redis.call('ZREM', times, unpack(some))
          count = count + #some
          for _, payload in ipairs(some) do
            room = room - #payload
          end
          step = #some[#some] > 65536 and 1 or math.min(2 * step, 32)
        end
        index_expiry(prefix, id)
        is_gone = redis.call('EXISTS', keys[i]) == 0
      end
    end
    if count > before then
      found[#found + 1], found[#found + 2] = id, count - before
    end
    if is_gone then
      gone[#gone + 1], gone_keys[#gone_keys + 1] = id, keys[i]
      if not in_flight[i] then -- what is known of one in flight is its flight's
        over[#over + 1] = id
      end
    end
  end
  if #gone > 0 then
    redis.call('HDEL', prefix .. 'payloads', unpack(gone))
    redis.call('UNLINK', unpack(gone_keys))
    redis.call('ZREM', prefix .. 'due', unpack(gone))
    redis.call('ZREM', prefix .. 'expires', unpack(gone))
    redis.call('ZREM', prefix .. 'retries', unpack(gone))
    redis.call('ZREM', prefix .. 'debounced', unpack(gone))
    if uses(features, 'traces') then
      forget_traces(prefix, 'traces:', gone)
    end
    announce_room(prefix, features)
  end
  if #over > 0 then
    redis.call('HDEL', prefix .. 'errors', unpack(over))
    redis.call('SREM', prefix .. 'solo', unpack(over))
    redis.call('HDEL', prefix .. 'crashes', unpack(over))
  end
  add_to_meta(prefix, 'expired', count)
  return count, found, count < most and room > 0, room
end

-- Removes what has expired of waiting payloads, about `most` of them, those that expired first. Returns how many that
-- are, ids as `expire` has them, and whether more may have expired.
local function sweep_expired(prefix, now, most)
  local until_now = string.format('%.17g', now)
  local ids = redis.call('ZRANGE', prefix .. 'expires', '-inf', until_now, 'BYSCORE', 'LIMIT', 0, most)
  if #ids == 0 or redis.call('HGET', prefix .. 'meta', 'sealed') then
    return 0, {}, false -- sealed: its jobs are being moved, step by step, and a sweep would change them
  end
  local count, found, all = expire(prefix, ids, now, most, 4194304) -- bytes that are read or freed in some 10 ms
  return count, found, not all or #ids == most
end

-- Before payloads join those that wait for an id, the first of which has expired: equal ones that have expired go, or a
-- payload would take the score and the time of a dead one. Others may be any number, and stay; but with the policy
-- `latest`, where the highest would win, all go. Returns whether nothing lives: then nothing was changed.
local function expire_equal(prefix, id, payloads, now, is_latest)
  local key, times = prefix .. 'payloads:' .. id, prefix .. 'expires:' .. id
  local dead = redis.call('ZCOUNT', times, '-inf', string.format('%.17g', now))
  if redis.call('HEXISTS', prefix .. 'payloads', id) == 1 or redis.call('ZCARD', key) == dead then
    return true
  end
  local count = is_latest and drop_expired(key, times, now) or 0
  for start = 1, is_latest and 0 or #payloads, 100 do
    local some, gone = { unpack(payloads, start, math.min(start + 99, #payloads)) }, {}
    for i, at in ipairs(redis.call('ZMSCORE', times, unpack(some))) do
      if at and tonumber(at) <= now then
        gone[#gone + 1] = some[i]
      end
    end
    if #gone > 0 then
      redis.call('ZREM', key, unpack(gone))
      redis.call('ZREM', times, unpack(gone))
      count = count + #gone
    end
  end
  if count > 0 then
    redis.call('HINCRBY', prefix .. 'meta', 'expired', count)
    index_expiry(prefix, id)
  end
  return false
end

-- The same for one id, whatever waits for it: if nothing of that lives, it goes, and a fresh job has none of its past.
local function expire_joined(prefix, id, payloads, now, is_latest)
  local at = redis.call('ZSCORE', prefix .. 'expires', id)
  if at and tonumber(at) <= now and expire_equal(prefix, id, payloads, now, is_latest) then
    expire(prefix, { id }, now, math.huge, math.huge)
  end
end

-- The same for the ids of a push.
local function expire_pushed(prefix, width, now, is_latest)
  if redis.call('ZCOUNT', prefix .. 'expires', '-inf', string.format('%.17g', now)) == 0 then
    return
  end
  local ids, dead, seen = {}, {}, {}
  for i = 8, #ARGV, width do
    ids[#ids + 1] = ARGV[i]
  end
  for i, at in ipairs(redis.call('ZMSCORE', prefix .. 'expires', unpack(ids))) do
    local id = ids[i]
    if at and tonumber(at) <= now and not seen[id]
      and expire_equal(prefix, id, { ARGV[9 + (i - 1) * width] }, now, is_latest) then
      dead[#dead + 1], seen[id] = id, true
    end
  end
  if #dead > 0 then
    expire(prefix, dead, now, math.huge, math.huge)
  end
end

-- Before what waits for an id goes to the morgue: what has expired of it goes first, as far as the budget of `merge`
-- allows. Returns whether that is all.
local function expire_within(prefix, id, now, budget)
  local at = redis.call('ZSCORE', prefix .. 'expires', id)
  if not at or tonumber(at) > now then
    return true
  end
  local count, _, is_all, room = expire(prefix, { id }, now, budget.payloads, budget.bytes)
  budget.payloads, budget.bytes = budget.payloads - count, room
  return is_all or not has_payloads(prefix .. 'payloads', id)
end

-- The waiting payloads of an id go to the morgue, as far as the budget of `merge` allows. Returns whether all did.
local function merge_into_morgue(prefix, id, budget, has_ttl)
  local place = prefix .. 'payloads'
  local inline = has_ttl and redis.call('HGET', place, id)
  if inline then -- what is buried does not expire
    local payload, score = split_inline(inline)
    redis.call('HSET', place, id, join_inline(payload, score))
  end
  local is_whole = merge(place, prefix .. 'morgue:payloads', id, budget, function(payloads)
    if has_ttl then
      redis.call('ZREM', prefix .. 'expires:' .. id, unpack(payloads))
    end
  end)
  if has_ttl and is_whole then
    forget_expiry(prefix, id)
  elseif has_ttl then
    index_expiry(prefix, id)
  end
  return is_whole
end
