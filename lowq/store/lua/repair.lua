-- repair: what is wrong with some ids of a shard is put right, as far as that loses nothing.
--
-- KEYS[1]  prefix of the shard
-- ARGV[1]  now: Unix seconds, or '' for the server's clock
-- ARGV[2]  what to go by, as in examine
-- ARGV[3+] ids, at most 200
--
-- Reply: list of, per id, 1 (put right), 0 (nothing is wrong any more), 2 (not, or in part: call again),
--        3 (left as it is: only a person can tell).
--   orphan_payloads          due now, with what is known of its retries
--   orphan_taken_payloads    merged into what waits, due now unless it waits already
--   orphan_morgue_payloads   in the morgue, buried now
--   due_without_payloads     not due any more, as ack_and_take does it
--   taken_without_payloads   not in flight any more, when the shard has no owner that may report it
--   taken_unreadable         its payloads wait, due now
--   delivery_behind          the counter of deliveries is set to the largest that was handed out
--   expiry_unindexed         entered in `expires`
--   leftovers                removed
--   morgue_without_payloads  left: the entry is the last that is known of it
--   payloads_unreadable      left: only a person can tell what is in it
--
-- Invariant: no payload is removed, and none that is performed comes to be performed by a second thread: what is put
-- back waits in its own shard, which one thread works at a time.
--
--!flags allow-oom
local prefix, what = KEYS[1], ARGV[2]
local now = read_now()
local ids = { unpack(ARGV, 3) }
if redis.call('HEXISTS', prefix .. 'meta', 'sealed') == 1 then
  for i = 1, #ids do
    ids[i] = 3 -- they are being moved to another layout, and nothing else changes them
  end
  return ids
end
touch(prefix, { 'payloads:', 'taken:payloads:', 'morgue:payloads:', 'expires:', 'traces:', 'taken:traces:' }, ids)

-- The bound of a call on merging, over all its ids: it must not hold Redis for long.
local budget = { payloads = 500, bytes = 1048576 }
local is_due = false

-- Payloads in flight without a record wait again. Returns 1 when all of them do, 2 for some, 3 for none.
local has_ttl = uses(redis.call('HGET', prefix .. 'meta', 'features'), 'ttl')
local function wait_again(id)
  if not (is_readable(prefix, 'taken:payloads', id) and is_readable(prefix, 'payloads', id)) then
    return 3
  end
  if has_ttl then -- payloads that nobody knew of are not removed for their age
    forget_expiry(prefix, id)
    redis.call('UNLINK', prefix .. 'taken:expires:' .. id)
  end
  local whole = merge_set(prefix .. 'taken:payloads:' .. id, prefix .. 'payloads', id, budget)
  if has_payloads(prefix .. 'payloads', id) then
    redis.call('ZADD', prefix .. 'due', 'NX', now, id)
    is_due = true
  end
  return whole and 1 or 2
end

local repairs = {}

function repairs.orphan_payloads(id)
  redis.call('ZADD', prefix .. 'due', now, id)
  is_due = true
  return 1
end

function repairs.orphan_taken_payloads(id)
  return wait_again(id)
end

function repairs.orphan_morgue_payloads(id)
  redis.call('ZADD', prefix .. 'morgue', now, id)
  redis.call('HSETNX', prefix .. 'morgue:errors', id, 'put back by lowq doctor: payloads of a buried job without one')
  return 1
end

function repairs.due_without_payloads(id)
  redis.call('ZREM', prefix .. 'due', id)
  redis.call('ZREM', prefix .. 'debounced', id)
  forget_expiry(prefix, id)
  local in_flight = redis.call('HEXISTS', prefix .. 'taken', id) == 1
  if in_flight or redis.call('EXISTS', prefix .. 'taken:payloads:' .. id) == 1 then
    redis.call('ZREM', prefix .. 'retries', id)
  else
    forget(prefix, id)
  end
  return 1
end

function repairs.taken_without_payloads(id)
  if redis.call('EXISTS', prefix .. 'lease') == 1 or restore_lease(prefix, now) then
    return 3
  end
  redis.call('HDEL', prefix .. 'taken', id)
  if not redis.call('ZSCORE', prefix .. 'due', id) and not has_payloads(prefix .. 'payloads', id) then
    forget(prefix, id)
  end
  return 1
end

function repairs.taken_unreadable(id)
  local record = redis.call('HGET', prefix .. 'taken', id)
  if has_inline(record) and not get_inline(record) then
    return 3
  end
  materialize(prefix, id, record)
  local state = wait_again(id)
  if state == 1 then
    redis.call('HDEL', prefix .. 'taken', id)
  end
  return state
end

function repairs.delivery_behind(id)
  redis.call('HSET', prefix .. 'meta', 'delivery', (parse_taken(redis.call('HGET', prefix .. 'taken', id))))
  return 1
end

function repairs.expiry_unindexed(id)
  index_expiry(prefix, id)
  return 1
end

function repairs.leftovers(id)
  local command = { retries = 'ZREM', expires = 'ZREM', debounced = 'ZREM', solo = 'SREM' }
  if string.sub(what, -1) == ':' then
    redis.call('UNLINK', prefix .. what .. id)
  else
    redis.call(command[what] or 'HDEL', prefix .. what, id)
  end
  return 1
end

function repairs.morgue_without_payloads()
  return 3
end
repairs.payloads_unreadable = repairs.morgue_without_payloads

local reply = {}
for _, id in ipairs(ids) do
  if budget.payloads <= 0 or budget.bytes <= 0 then
    reply[#reply + 1] = 2
  else
    local delivered = tonumber(redis.call('HGET', prefix .. 'meta', 'delivery') or '') or 0
    local code = find_integrity_error(prefix, what, id, delivered)
    reply[#reply + 1] = code and repairs[code](id) or 0
  end
end
if is_due then
  wake(prefix, 0)
end
return reply
