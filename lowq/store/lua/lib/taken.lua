-- Jobs in flight: their records, and how they come back.

-- The record of an id in flight: "delivery perform_at retry_count level taken_at". The level is its priority; behind it
-- may stand a mark (`mark_in`). If an inline payload was taken, that is in there too, "... taken_at score payload\n",
-- and in no key: one place less to look up, of the few that each job of a long queue costs. Behind the delivery there
-- may be more spaces.
local function parse_taken(record)
  local delivery, perform_at, retry_count = string.match(record, '^(%S+) +(%S+) (%S+)')
  return delivery, perform_at, tonumber(retry_count)
end

-- The priority in a record.
local function level_in(record)
  return tonumber(string.match(record, '^%S+ +%S+ %S+ (%d)') or '') or 0
end

-- What the holder of a job in flight is asked to do, a letter behind the priority in its record. 'x': end it; unless it
-- finishes or is buried, nothing of it waits again. 's': end it, and let it wait again. Or nil. It goes with the
-- record. The feature `cancelled` says that there may be some.
local function mark_in(record)
  return string.match(record, '^%S+ +%S+ %S+ %d([xs])')
end

-- Marks a job in flight. Returns the record as it is then.
local function mark_taken(prefix, id, record, mark)
  local marked = string.gsub(record, '^(%S+ +%S+ %S+ %d)[xs]? ', '%1' .. mark .. ' ', 1)
  if marked ~= record then
    redis.call('HSET', prefix .. 'taken', id, marked)
  end
  return marked
end

-- Removes a job in flight that is cancelled. What was pushed since waits, and starts afresh.
local function drop_cancelled(prefix, id, features)
  redis.call('HDEL', prefix .. 'taken', id)
  redis.call('UNLINK', prefix .. 'taken:payloads:' .. id)
  if uses(features, 'ttl') then
    redis.call('UNLINK', prefix .. 'taken:expires:' .. id)
  end
  if uses(features, 'traces') then
    forget_traces(prefix, 'taken:traces:', { id })
  end
  forget(prefix, id)
  redis.call('HINCRBY', prefix .. 'meta', 'cancelled', 1)
end

-- Which of the ids are in flight under exactly that delivery: id -> record. A delivery that differs was handed
-- out anew since, to another owner or after a lost reply: an outcome that cites the older one is ignored.
local function records_of(prefix, delivery, ids)
  local found = {}
  if #ids > 0 then
    local records = redis.call('HMGET', prefix .. 'taken', unpack(ids))
    local head = delivery .. ' '
    for i, record in ipairs(records) do
      if record and string.sub(record, 1, #head) == head then
        found[ids[i]] = record
      end
    end
  end
  return found
end

-- How a script begins that reports jobs in flight. Each job has as many arguments as `width`, of which the
-- first is its id, from ARGV[first] on. Returns an error when the lease is not that of `token`; otherwise nil, the
-- time, the records of those that are in flight under the delivery, what the shard uses (lib/features.lua), and which
-- ids were cancelled: nothing of these is in flight any more.
local function begin_report(prefix, token, delivery, first, width)
  local lost = check_lease(prefix, token)
  if lost then
    return lost
  end
  check_types(prefix)
  local now = read_now()
  -- First, as a delay counts from now, and could fall into a time before the server's clock stepped back.
  local meta = redis.call('HMGET', prefix .. 'meta', 'server_time', 'server_time_since', 'features')
  shift_due(prefix, now, meta[1], meta[2])
  local ids = {}
  for i = first, #ARGV, width do
    ids[#ids + 1] = ARGV[i]
  end
  local records, cancelled = records_of(prefix, delivery, ids), {}
  touch_payloads(prefix, ids, meta[3])
  if uses(meta[3], 'cancelled') then
    for _, id in ipairs(ids) do
      if records[id] and mark_in(records[id]) == 'x' then
        drop_cancelled(prefix, id, meta[3])
        records[id], cancelled[id] = nil, true
      end
    end
  end
  return nil, now, records, meta[3], cancelled
end

-- Asks for the per-id keys of payloads before the first write, see `touch`.
local function touch_payloads(prefix, ids, features)
  touch(prefix, { 'payloads:', 'taken:payloads:', 'morgue:payloads:' }, ids)
  if uses(features, 'ttl') then
    touch(prefix, { 'expires:', 'taken:expires:' }, ids)
  end
  if uses(features, 'traces') then
    touch(prefix, { 'traces:', 'taken:traces:' }, ids)
  end
end

-- Before those of an id in flight join them: of the payloads that wait what has expired goes. `inline`: what its record
-- holds, or nil.
local function expire_before_merge(prefix, id, inline, now, features)
  local at = uses(features, 'ttl') and redis.call('ZSCORE', prefix .. 'expires', id)
  if at and tonumber(at) <= now then
    local payloads
    if inline then
      payloads = { (split_inline(inline)) }
    else
      payloads = redis.call('ZRANGE', prefix .. 'taken:payloads:' .. id, 0, -1)
    end
    expire_joined(prefix, id, payloads, now, uses(features, 'latest'))
  end
end

-- The payloads of an id in flight, if they have a key, join those that wait, as the queue's policy has it. `room`: a
-- budget of `merge` that holds more than all of them, in which what was done is counted; or nil.
local function merge_taken(prefix, id, features, now, room)
  local source = prefix .. 'taken:payloads:' .. id
  if uses(features, 'ttl') and has_payloads(prefix .. 'payloads', id) then
    expire_in_flight(prefix, id, now, room) -- a dead payload does not join one that lives
  end
  if uses(features, 'latest') then
    if uses(features, 'ttl') then
      merge_latest_expiring(prefix, id, source, prefix .. 'taken:expires:' .. id)
    else
      merge_latest(source, prefix .. 'payloads', id)
    end
    return
  end
  if uses(features, 'ttl') and redis.call('EXISTS', source) == 1 then
    merge_expiries(prefix, id)
  end
  merge_set(source, prefix .. 'payloads', id, room)
end

-- A job in flight waits again: payloads merged back, its own perform_at and retry_count win over those of a
-- job with the same id that arrived meanwhile. `perform_at` overrides when given. Otherwise the job was due when it was
-- taken and is so still, also when the server's clock has stepped back since. `features`: of the shard. `room`: see
-- `merge_taken`.
local function put_back(prefix, id, record, now, perform_at, features, room)
  local _, was_due, retry_count = parse_taken(record)
  local inline, place = get_inline(record), prefix .. 'payloads'
  expire_before_merge(prefix, id, inline, now, features)
  if uses(features, 'latest') then
    materialize(prefix, id, record)
  elseif inline and uses(features, 'ttl') then
    local payload, score, at = split_inline(inline)
    if at and tonumber(at) <= now and has_payloads(place, id) then
      redis.call('HINCRBY', prefix .. 'meta', 'expired', 1) -- a dead payload does not join one that lives
    else
      add_expiring(prefix, id, payload, score, redis.call('HGET', place, id), at)
    end
  elseif inline and has_payloads(place, id) then
    local payload, score = split_inline(inline)
    add_payload(place, id, payload, score)
  elseif inline then
    redis.call('HSET', place, id, inline)
  end
  merge_taken(prefix, id, features, now, room)
  if uses(features, 'traces') then
    put_back_traces(prefix, id)
  end
  redis.call('HDEL', prefix .. 'taken', id)
  perform_at = perform_at or math.min(tonumber(was_due), now)
  redis.call('ZADD', prefix .. 'due', score_again(prefix, id, level_in(record), perform_at), id)
  end_debounce(prefix, id, features)
  if retry_count >= 0 then
    redis.call('ZADD', prefix .. 'retries', retry_count, id)
  end
end

-- Clears what is known of the past of ids: their next payloads start afresh.
local function forget(prefix, ...)
  redis.call('ZREM', prefix .. 'retries', ...)
  redis.call('HDEL', prefix .. 'errors', ...)
  redis.call('SREM', prefix .. 'solo', ...)
  redis.call('HDEL', prefix .. 'crashes', ...)
end
