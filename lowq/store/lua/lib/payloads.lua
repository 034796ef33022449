-- The payloads of an id that wait, and those that are buried, have one of two forms. `place` is where they are: the
-- prefix of the shard, and `payloads` or `morgue:payloads`.
--   inline   in the HASH `place`: id -> "score payload", or "score,expires payload" of one with a ttl (lib/expiry.lua): a
--            single payload of up to 4,096 bytes, which is what most ids have. A key of its own would take 60 bytes more,
--            and a sorted set of one 850 bytes more as soon as it has more than 64.
--   a set    ZSET `place:<id>`: payload -> score. It may hold a single payload, too: a set never becomes inline again.
-- In flight, an inline payload is within the record of its id, see lib/taken.lua; otherwise `taken:payloads:<id>` is a
-- set. Beside this file `put_back`, `push`, `ack_and_take`, `fetch_jobs`, `examine` and the moves know the forms.

-- Whether a text begins as one of an inline payload.
local function begins_with_score(inline)
  local score, expires = string.match(inline, '^([^%s,]+),?(%S*) ')
  return tonumber(score or '') ~= nil and (expires == '' or tonumber(expires) ~= nil)
end

-- Payload, score (text), and when it expires (text, nil: never) of an inline payload.
local function split_inline(inline)
  local space = string.find(inline, ' ', 1, true)
  local score, expires = string.sub(inline, 1, space - 1), nil
  local comma = string.find(score, ',', 1, true)
  if comma then
    score, expires = string.sub(score, 1, comma - 1), string.sub(score, comma + 1)
  end
  return string.sub(inline, space + 1), score, expires
end

-- The inline form of a payload. `expires`: text, or nil.
local function join_inline(payload, score, expires)
  return (expires and score .. ',' .. expires or score) .. ' ' .. payload
end

-- The inline payload that the record of an id in flight holds, or nil: its payloads are in a key.
local function get_inline(record)
  return string.match(record, '^%S+ +%S+ %S+ %S+ %S+ ([^ ]* .*)\n$')
end

-- Whether the record of an id in flight holds its payload: only then it ends with a newline, without it with a digit.
local function has_inline(record)
  return string.byte(record, -1) == 10
end

-- Whether an id has any payloads in a place.
local function has_payloads(place, id)
  return redis.call('HEXISTS', place, id) == 1 or redis.call('EXISTS', place .. ':' .. id) == 1
end

-- Removes all payloads that an id has in a place.
local function remove_payloads(place, id)
  if redis.call('HDEL', place, id) == 0 then
    redis.call('UNLINK', place .. ':' .. id)
  end
end

-- Adds a payload with its score (text). Of two equal ones the lowest score stays. `form`: what is known of the id: the
-- text of its inline payload, false (no inline one), true (a set), or nil (nothing). `expires`: of one that becomes
-- inline; `add_expiring` cares for others. Returns the form as it is afterwards.
local function add_payload(place, id, payload, score, form, expires)
  if form == nil then
    form = redis.call('HGET', place, id)
  end
  local key = place .. ':' .. id
  if not form and #payload <= 4096 and redis.call('EXISTS', key) == 0 then
    form = join_inline(payload, score, expires)
    redis.call('HSET', place, id, form)
    return form
  end
  if not form or form == true then
    redis.call('ZADD', key, 'LT', score, payload)
    return true
  end
  local present, its_score = split_inline(form)
  if present ~= payload then
    redis.call('HDEL', place, id)
    redis.call('ZADD', key, its_score, present, score, payload)
    return true
  end
  if tonumber(score) < tonumber(its_score) then
    form = score .. ' ' .. payload
    redis.call('HSET', place, id, form)
  end
  return form
end

-- An inline payload becomes a set of one, so that others can join or leave it. Returns when it expires (text), or nil,
-- and the payload, if there was one.
local function promote_to_zset(place, id)
  local inline = redis.call('HGET', place, id)
  if inline then
    local payload, score, expires = split_inline(inline)
    redis.call('HDEL', place, id)
    redis.call('ZADD', place .. ':' .. id, score, payload)
    return expires, payload
  end
end

-- The payload that a record in `taken` holds gets a key, as others have, for whatever treats all of them alike.
local function materialize(prefix, id, record)
  local inline = get_inline(record)
  if inline then
    local payload, score, expires = split_inline(inline)
    redis.call('ZADD', prefix .. 'taken:payloads:' .. id, 'LT', score, payload)
    if expires then
      redis.call('ZADD', prefix .. 'taken:expires:' .. id, expires, payload)
    end
    redis.call('HSET', prefix .. 'taken', id, string.sub(record, 1, -3 - #inline))
  end
end

-- Moves the payloads of a set into those that an id has in a place: equal ones collapse, the lowest score wins. All of
-- them, which is for what is in flight, as ack_and_take bounds that; or as many as the budget allows:
-- {payloads = n, bytes = n}, which is used up, also over many ids of one call. At least one payload is moved while the
-- budget is not used up. Returns whether the set is empty now. Reads a few at a time: a payload may be 1 MiB, and its
-- size is not known beforehand. `before` is called with payloads that are about to join others.
local function merge_set(source, place, id, budget, before)
  local target = place .. ':' .. id
  if redis.call('EXISTS', source) == 0 then
    return true
  end
  if not has_payloads(place, id) then
    redis.call('RENAME', source, target)
    return true
  end
  budget = budget or { payloads = math.huge, bytes = math.huge }
  if budget.payloads <= 0 or budget.bytes <= 0 then
    return false
  end
  promote_to_zset(place, id)
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
    if before then
      before(payloads)
    end
    redis.call('ZADD', target, 'LT', unpack(pairs_))
    redis.call('ZREM', source, unpack(payloads))
    budget.payloads = budget.payloads - #payloads
    step = math.max(1, math.min(16, step * 2, math.floor(budget.bytes / largest)))
  end
  return redis.call('EXISTS', source) == 0
end

-- As `merge_set`, from one place to another.
local function merge(source, target, id, budget, before)
  local inline = redis.call('HGET', source, id)
  if inline and not has_payloads(target, id) then
    redis.call('HSET', target, id, inline)
    redis.call('HDEL', source, id)
    return true
  end
  promote_to_zset(source, id)
  return merge_set(source .. ':' .. id, target, id, budget, before)
end

-- Appends the lowest payloads of a set, each with its score, to a list: at most `most`, and beyond the first as many as
-- fit into `room` bytes; each takes its own and `overhead`. Returns how many, their bytes, and whether that is all. In
-- steps of up to 16, as many as should still fit: a payload may be 1 MiB, and its size is not known beforehand.
local function read_set(list, key, most, room, overhead)
  local count, bytes, step = 0, 0, 2
  while true do
    local wanted = math.min(count + step, most)
    local part = redis.call('ZRANGE', key, count, wanted - 1, 'WITHSCORES')
    for i = 1, #part, 2 do
      local size = #part[i] + overhead
      if count > 0 and bytes + size > room then
        return count, bytes, false
      end
      list[#list + 1], list[#list + 2] = part[i], part[i + 1]
      count, bytes = count + 1, bytes + size
    end
    if count < wanted then
      return count, bytes, true
    elseif count >= most then
      return count, bytes, redis.call('ZCARD', key) <= most
    end
    step = math.max(1, math.min(16, math.floor((room - bytes) / (bytes / count)) + 1))
  end
end

-- The payload with the highest score that an id has in a place, and that (text), or nil. `form`: as for add_payload.
local function get_highest(place, id, form)
  if form == nil then
    form = redis.call('HGET', place, id)
  end
  if form and form ~= true then
    return split_inline(form)
  end
  return unpack(redis.call('ZRANGE', place .. ':' .. id, -1, -1, 'WITHSCORES'))
end

-- As add_payload, of a queue with merge = latest: only the payload with the highest score stays; of equal scores the
-- one that is added. However many there were before, as the policy may have been another one.
local function add_latest(place, id, payload, score, form, expires)
  local present, its_score = get_highest(place, id, form)
  if present and tonumber(its_score) > tonumber(score) then
    payload, score = present, its_score
  end
  if present then
    remove_payloads(place, id)
  end
  return add_payload(place, id, payload, score, false, expires)
end

-- As merge_set, of a queue with merge = latest. Of equal scores that in the place stays: it came later.
local function merge_latest(source, place, id)
  local payload, score = unpack(redis.call('ZRANGE', source, -1, -1, 'WITHSCORES'))
  if payload then
    redis.call('UNLINK', source)
    local present, its_score = get_highest(place, id)
    if present and tonumber(its_score) >= tonumber(score) then
      payload, score = present, its_score
    end
    add_latest(place, id, payload, score)
  end
end

-- Whether the payloads of an id in a place have one of their forms, as far as a type and a beginning tell.
local function is_readable(prefix, place, id)
  local kind = redis.call('TYPE', prefix .. place .. ':' .. id).ok
  local inline = redis.call('HGET', prefix .. place, id)
  return (kind == 'zset' or kind == 'none') and (not inline or begins_with_score(inline))
end

-- About how many bytes Redis frees on the spot when it unlinks a set: only sets of more than 64 members are left to its
-- background thread, and 64 payloads of 1 MiB each take milliseconds. 0 where nothing tells.
local function weight(key)
  if redis.call('TYPE', key).ok ~= 'zset' or redis.call('ZCARD', key) > 64 then
    return 0
  end
  local bytes = redis.pcall('MEMORY', 'USAGE', key, 'SAMPLES', 0)
  return type(bytes) == 'number' and bytes or 0
end
