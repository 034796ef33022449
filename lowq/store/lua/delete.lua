-- delete: waiting and buried jobs, for good.
--
-- KEYS[1]  prefix of the shard
-- ARGV[1]  now: Unix seconds, or '' for the server's clock
-- ARGV[2]  the attempt, see lib/repeated_calls.lua; '' when it is never repeated
-- ARGV[3]  'waiting', 'morgue', or '' for both
-- ARGV[4]  only jobs whose perform_at, or burial, is not after this (Unix seconds; '' = any)
-- ARGV[5+] ids
--
-- Reply: list of, per id, 1 (deleted), 0 (not there), 2 (not yet: call again),
-- 3 (in flight: not touched).
-- Errors: SEALED, RESHARDING: the shard is not whole, see lib/reshard.lua; nothing changed.
--
-- Invariant: nothing of a deleted job is left in any key. An id in flight keeps all it has, also what waits.
-- A repeat supersedes the earlier attempts of its call: one that comes later does nothing.
--
--!flags allow-oom
local prefix, where, not_after = KEYS[1], ARGV[3], tonumber(ARGV[4])
local closed, features = begin_action(prefix)
if closed then
  return closed
end
local ids = { unpack(ARGV, 5) }
touch(prefix, { 'payloads:', 'morgue:payloads:' }, ids)
local has_ttl, has_traces = uses(features, 'ttl'), uses(features, 'traces')
if has_traces then
  touch(prefix, { 'traces:' }, ids)
end

-- Bytes that a call frees at most: it must not hold Redis for long.
local room = 16777216
local deleted = 0 -- jobs: an id may have one that waits and one that is buried

local function remove(id, set, payloads)
  local at = redis.call('ZSCORE', prefix .. set, id)
  if not at or (not_after and select(2, split_score(at)) > not_after) then
    return false
  end
  room = room - weight(prefix .. payloads .. id)
  redis.call('ZREM', prefix .. set, id)
  redis.call('UNLINK', prefix .. payloads .. id)
  deleted = deleted + 1
  return true
end

local reply, superseded = {}, is_superseded(prefix, ARGV[2], read_now())
for _, id in ipairs(ids) do
  local state = 0
  if superseded then
    state = 0
  elseif room <= 0 then
    state = 2
  elseif redis.call('HEXISTS', prefix .. 'taken', id) == 1 then
    state = 3
  else
    if where ~= 'morgue' and remove(id, 'due', 'payloads:') then
      forget(prefix, id)
      if has_ttl then
        forget_expiry(prefix, id)
      end
      end_debounce(prefix, id, features)
      if has_traces then
        forget_traces(prefix, 'traces:', { id })
      end
      state = 1
    end
    if where ~= 'waiting' and remove(id, 'morgue', 'morgue:payloads:') then
      redis.call('HDEL', prefix .. 'morgue:errors', id)
      state = 1
    end
  end
  reply[#reply + 1] = state
end
add_to_meta(prefix, 'deleted', deleted)
announce_room(prefix, features)
return reply
