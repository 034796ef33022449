-- The payloads of an id that wait, and those that are buried, are one key each, in one of two forms:
--   inline   STRING "score payload", or "score,expires payload" of one with a ttl (lib/expiry.lua): a single payload of
--            up to 4,096 bytes, which is what most ids have. As a sorted set of one it would take 850 bytes more as soon
--            as it has more than 64.
--   a set    ZSET payload -> score. It may hold a single payload, too: a set never becomes inline again.
-- In flight, an inline payload is within the record of its id, see lib/taken.lua. Beside this file `put_back`, `push`,
-- `ack_and_take`, `fetch_jobs` and `examine` know the forms. MGET answers nil for what is no string, so it tells them
-- apart without an error.

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

-- Raises an error where a key holds no payloads that others can join. `inline`: its value by MGET.
local function check_payloads(key, inline)
  if not inline then
    redis.call('ZCARD', key)
  elseif not begins_with_score(inline) then
    error(key .. ' holds no payload')
  end
end

-- Adds a payload with its score (text). Of two equal ones the lowest score stays. `form`: what is known of the key: the
-- text of an inline payload, false (no inline one), true (a set), or nil (nothing). `expires`: of one that becomes
-- inline; `add_expiring` cares for others. Returns the form as it is afterwards.
local function add_payload(key, payload, score, form, expires)
  if form == nil then
    form = redis.call('MGET', key)[1]
  end
  local inline = not form and #payload <= 4096 and join_inline(payload, score, expires)
  if inline and redis.call('SET', key, inline, 'NX') then
    return inline
  end
  if not form or form == true then
    redis.call('ZADD', key, 'LT', score, payload)
    return true
  end
  local present, its_score = split_inline(form)
  if present ~= payload then
    redis.call('DEL', key)
    redis.call('ZADD', key, its_score, present, score, payload)
    return true
  end
  if tonumber(score) < tonumber(its_score) then
    form = score .. ' ' .. payload
    redis.call('SET', key, form)
  end
  return form
end

-- An inline payload becomes a set of one, so that others can join or leave it.
local function promote_to_zset(key)
  local inline = redis.call('MGET', key)[1]
  if inline then
    local payload, score = split_inline(inline)
    redis.call('DEL', key)
    redis.call('ZADD', key, score, payload)
  end
end

-- The payload that a record in `taken` holds gets a key, as others have, for whatever treats all of them alike.
local function materialize(prefix, id, record)
  local inline = get_inline(record)
  if inline then
    local payload, score, expires = split_inline(inline)
    add_payload(prefix .. 'taken:payloads:' .. id, payload, score)
    if expires then
      redis.call('ZADD', prefix .. 'taken:expires:' .. id, expires, payload)
    end
    redis.call('HSET', prefix .. 'taken', id, string.sub(record, 1, -3 - #inline))
  end
end

-- Moves the payloads of source into target: equal ones collapse, the lowest score wins. All of them, which is for what
-- is in flight, as ack_and_take bounds that; or as many as the budget allows: {payloads = n, bytes = n}, which is used
-- up, also over many ids of one call. At least one payload is moved while the budget is not used up. Returns whether
-- source is empty now. Reads a few at a time: a payload may be 1 MiB, and its size is not known beforehand. `before` is
-- called with payloads that are about to join others in target.
local function merge(source, target, budget, before)
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
    local payload, score = split_inline(inline)
    if before then
      before({ payload })
    end
    add_payload(target, payload, score)
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

-- The payload of a key with the highest score, and that (text), or nil. `form` is as for add_payload.
local function get_highest(key, form)
  if form == nil then
    form = redis.call('MGET', key)[1]
  end
  if form and form ~= true then
    return split_inline(form)
  end
  local highest = redis.call('ZRANGE', key, -1, -1, 'WITHSCORES')
  return highest[1], highest[2]
end

-- As add_payload, of a queue with merge = latest: only the payload with the highest score stays; of equal scores the
-- one that is added. However many there were before, as the policy may have been another one.
local function add_latest(key, payload, score, form, expires)
  local present, its_score = get_highest(key, form)
  if present and tonumber(its_score) > tonumber(score) then
    payload, score = present, its_score
  end
  if present then
    redis.call('UNLINK', key)
  end
  return add_payload(key, payload, score, false, expires)
end

-- As merge, of a queue with merge = latest. Of equal scores that in target stays: it came later.
local function merge_latest(source, target)
  local payload, score = get_highest(source)
  if payload then
    redis.call('UNLINK', source)
    local present, its_score = get_highest(target)
    if present and tonumber(its_score) >= tonumber(score) then
      payload, score = present, its_score
    end
    add_latest(target, payload, score)
  end
end


-- Whether a key of payloads has one of their forms, as far as its type and its beginning tell.
local function is_readable(key)
  local kind = redis.call('TYPE', key).ok
  if kind == 'string' then
    return begins_with_score(redis.call('GETRANGE', key, 0, 40))
  end
  return kind == 'zset' or kind == 'none'
end

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
