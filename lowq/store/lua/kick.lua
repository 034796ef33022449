-- kick: buried jobs wait again, due now.
--
-- KEYS[1]  prefix of the shard
-- ARGV[1]  now: Unix seconds, or '' for the server's clock
-- ARGV[2]  the attempt, see lib/repeated_calls.lua; '' when it is never repeated
-- ARGV[3]  only jobs buried not after this (Unix seconds; '' = any)
-- ARGV[4+] ids
--
-- Reply: list of, per id, 1 (kicked), 0 (not in the morgue), 2 (not, or in part: call again).
-- Errors: SEALED, RESHARDING: the shard is not whole, see lib/reshard.lua; nothing changed.
--
-- Invariant: payloads merge with those that wait, as the queue's policy has it; the job starts afresh (retry_count -1,
-- no crashes, not solo) and is due now. What is kicked does not expire. What waited keeps its ttl, and is gone if that
-- has passed.
-- A repeat supersedes the earlier attempts of its call: one that comes later does nothing.
--
--!flags allow-oom
local prefix, not_after = KEYS[1], tonumber(ARGV[3])
local closed, features = begin_action(prefix)
if closed then
  return closed
end
local now, ids = read_now(), { unpack(ARGV, 4) }
touch(prefix, { 'payloads:', 'morgue:payloads:' }, ids)
local has_ttl, is_latest = uses(features, 'ttl'), uses(features, 'latest')
if has_ttl then
  touch(prefix, { 'expires:' }, ids)
end

-- The bound of a call on merging, over all its ids: it must not hold Redis for long.
local budget = { payloads = 500, bytes = 1048576 }
local reply, kicked, superseded = {}, 0, is_superseded(prefix, ARGV[2], now)
local moved = false
local function merge_kicked(id)
  local source, target = prefix .. 'morgue:payloads', prefix .. 'payloads'
  if has_ttl then
    expire_joined(prefix, id, {}, now, is_latest)
  end
  if is_latest then
    promote_to_zset(source, id)
    if has_ttl then
      merge_latest_expiring(prefix, id, source .. ':' .. id, false)
    else
      merge_latest(source .. ':' .. id, target, id)
    end
    return true
  elseif not has_ttl then
    return merge(source, target, id, budget)
  end
  promote_expiring(prefix, id)
  local is_whole = merge(source, target, id, budget, function(payloads)
    expire_equal(prefix, id, payloads, now)
    redis.call('ZREM', prefix .. 'expires:' .. id, unpack(payloads))
  end)
  index_expiry(prefix, id)
  return is_whole
end

for _, id in ipairs(ids) do
  local spent = budget.payloads <= 0 or budget.bytes <= 0
  local buried_at = not spent and not superseded and redis.call('ZSCORE', prefix .. 'morgue', id)
  local state = spent and 2 or 0
  if buried_at and (not not_after or tonumber(buried_at) <= not_after) then
    state = 2
    if merge_kicked(id) then
      state = 1
      redis.call('ZREM', prefix .. 'morgue', id)
      redis.call('HDEL', prefix .. 'morgue:errors', id)
      kicked = kicked + 1
    end
    if has_payloads(prefix .. 'payloads', id) then
      redis.call('ZADD', prefix .. 'due', now, id)
      end_debounce(prefix, id, features)
    end
    if redis.call('HEXISTS', prefix .. 'taken', id) == 0 then
      forget(prefix, id)
    end
    moved = true
  end
  reply[#reply + 1] = state
end
add_to_meta(prefix, 'kicked', kicked)
if moved then
  wake(prefix, 0)
end
return reply
