-- bury: a job, or some payloads of a taken one, to the morgue.
--
-- KEYS[1]  prefix of the shard
-- ARGV[1]  now: Unix seconds, or '' for the server's clock
-- ARGV[2]  token of the lease, or '' to bury waiting jobs
-- ARGV[3]  delivery that the ids were taken under, and perhaps what is kept of attempts, see lib/kept.lua; or ''
-- ARGV[4]  of waiting jobs the attempt, see lib/repeated_calls.lua; '' when it is never repeated
-- ARGV[5]  only waiting jobs whose perform_at is not after this (Unix seconds; '' = any)
-- ARGV[6+] per id: id, reason ('' = its last error), n, then n payloads of a taken job (0 = the whole job)
--
-- Reply: list of, per id, 1 (buried), 0 (not there, or it has expired), 2 (not, or in part: call again), 3 (in flight:
-- not touched).
-- Errors: LEASELOST, when a token is given; otherwise SEALED, RESHARDING: the shard is not whole, see lib/reshard.lua,
-- and nothing changed.
--
-- Invariant: a buried payload is in `morgue:payloads` and nowhere else, its id in `morgue`.
-- A repeat supersedes the earlier attempts of its call: one that comes later does nothing.
--
--!flags allow-oom
local prefix, token, not_after = KEYS[1], ARGV[2], tonumber(ARGV[5])
local delivery, kept = read_cited(ARGV[3])
local lost = token ~= '' and check_lease(prefix, token)
if lost then
  return lost
end
local closed, features = begin_action(prefix)
if closed and token == '' then
  return closed
end
local now = read_now()
local items, ids = {}, {}
local i = 6
while i <= #ARGV do
  local item = { id = ARGV[i], reason = ARGV[i + 1], payloads = {} }
  local count = tonumber(ARGV[i + 2])
  for j = 1, count do
    item.payloads[j] = ARGV[i + 2 + j]
  end
  items[#items + 1] = item
  ids[#ids + 1] = item.id
  i = i + 3 + count
end
local records = token ~= '' and records_of(prefix, delivery, ids) or {}
local has_ttl, has_traces = uses(features, 'ttl'), uses(features, 'traces')
touch_payloads(prefix, ids, features)

-- The bound of a call on merging waiting jobs, over all its ids: it must not hold Redis for long.
local budget = { payloads = 500, bytes = 1048576 }

local function mark_buried(item)
  local reason = item.reason
  if reason == '' then
    reason = redis.call('HGET', prefix .. 'errors', item.id) or ''
  end
  redis.call('ZADD', prefix .. 'morgue', now, item.id)
  redis.call('HSET', prefix .. 'morgue:errors', item.id, reason)
end

local function bury_taken(item)
  if not records[item.id] then
    return 0
  end
  if kept and #item.payloads == 0 then
    local shown = item.reason == '' and without_attempts(redis.call('HGET', prefix .. 'errors', item.id) or '') or nil
    item.reason = add_attempt(prefix, item.id, records[item.id], item.reason, now, kept, shown)
  end
  materialize(prefix, item.id, records[item.id])
  local taken, buried = prefix .. 'taken:payloads:' .. item.id, prefix .. 'morgue:payloads'
  local found = #item.payloads == 0
  if has_ttl and not expire_in_flight(prefix, item.id, now) then
    found = false
  elseif found then
    merge_set(taken, buried, item.id)
  else
    for _, payload in ipairs(item.payloads) do
      local score = redis.call('ZSCORE', taken, payload)
      if score then
        add_payload(buried, item.id, payload, score)
        redis.call('ZREM', taken, payload)
        found = true
      end
    end
    if not found then
      return 0
    end
  end
  if has_ttl then
    if redis.call('EXISTS', taken) == 0 then
      redis.call('UNLINK', prefix .. 'taken:expires:' .. item.id)
    else
      redis.call('ZREM', prefix .. 'taken:expires:' .. item.id, unpack(item.payloads))
    end
  end
  if found then
    mark_buried(item)
    redis.call('HINCRBY', prefix .. 'meta', 'buried', 1)
  end
  if redis.call('EXISTS', taken) == 0 then
    redis.call('HDEL', prefix .. 'taken', item.id)
    -- If all of it has expired, the past of the id belongs to the job that still waits.
    if found or not redis.call('ZSCORE', prefix .. 'due', item.id) then
      forget(prefix, item.id)
    end
    if has_traces then
      forget_traces(prefix, 'taken:traces:', { item.id })
    end
  end
  return found and 1 or 0
end

local superseded = token == '' and is_superseded(prefix, ARGV[4], now)
local function bury_waiting(item)
  if superseded then
    return 0
  end
  if budget.payloads <= 0 or budget.bytes <= 0 then
    return 2
  end
  if redis.call('HEXISTS', prefix .. 'taken', item.id) == 1 then
    return 3
  end
  local is_swept = not has_ttl or expire_within(prefix, item.id, now, budget)
  local perform_at = redis.call('ZSCORE', prefix .. 'due', item.id)
  if not perform_at or (not_after and select(2, split_score(perform_at)) > not_after) then
    return 0
  elseif not is_swept then
    return 2
  end
  local whole = merge_into_morgue(prefix, item.id, budget, has_ttl)
  mark_buried(item)
  if not whole then
    return 2
  end
  redis.call('HINCRBY', prefix .. 'meta', 'buried', 1)
  redis.call('ZREM', prefix .. 'due', item.id)
  end_debounce(prefix, item.id, features)
  forget(prefix, item.id)
  if has_traces then
    forget_traces(prefix, 'traces:', { item.id })
  end
  return 1
end

local reply = {}
for _, item in ipairs(items) do
  reply[#reply + 1] = token ~= '' and bury_taken(item) or (token == '' and bury_waiting(item)) or 0
end
announce_room(prefix, features)
return reply
