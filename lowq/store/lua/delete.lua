-- delete: waiting and buried jobs, for good. Or it cancels jobs: what waits is deleted, what is in flight is to end.
--
-- KEYS[1]  prefix of the shard
-- ARGV[1]  now: Unix seconds, or '' for the server's clock
-- ARGV[2]  the attempt, see lib/repeated_calls.lua; '' when it is never repeated
-- ARGV[3]  'waiting', 'morgue', or '' for both; 'cancel': waiting ones, and those in flight
-- ARGV[4]  only jobs whose perform_at, or burial, is not after this (Unix seconds; '' = any)
-- ARGV[5+] ids
--
-- Reply: list of, per id, 1 (deleted), 0 (not there), 2 (not yet: call again),
-- 3 (in flight: not touched; or with 'cancel' marked, and what waited of it is deleted).
-- Errors: SEALED, RESHARDING: the shard is not whole, see lib/reshard.lua; nothing changed.
--
-- Invariant: nothing of a deleted job is left in any key. An id in flight keeps all it has, also what waits; with
-- 'cancel' it keeps what is in flight, until its holder ends it: it never waits again (lib/taken.lua, `mark_in`).
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
local is_cancel, is_told = where == 'cancel', false
local deleted = 0 -- jobs: an id may have one that waits and one that is buried

local function remove(id, set, place)
  local at = redis.call('ZSCORE', prefix .. set, id)
  if not at or (not_after and select(2, split_score(at)) > not_after) then
    return false
  end
  room = room - weight(prefix .. place .. ':' .. id)
  redis.call('ZREM', prefix .. set, id)
  remove_payloads(prefix .. place, id)
  deleted = deleted + 1
  return true
end

-- `in_flight`: what is known of the past of the id is its flight's.
local function remove_waiting(id, in_flight)
  if not remove(id, 'due', 'payloads') then
    return 0
  end
  if not in_flight then
    forget(prefix, id)
  end
  if has_ttl then
    forget_expiry(prefix, id)
  end
  end_debounce(prefix, id, features)
  if has_traces then
    forget_traces(prefix, 'traces:', { id })
  end
  return 1
end

local reply, superseded = {}, is_superseded(prefix, ARGV[2], read_now())
for _, id in ipairs(ids) do
  local state, record = 0, not superseded and redis.call('HGET', prefix .. 'taken', id)
  if superseded then
    state = 0
  elseif room <= 0 then
    state = 2
  elseif record then
    state = 3
    if is_cancel then
      local removed, _, at = remove_waiting(id, true), parse_taken(record)
      if not_after and (tonumber(at) or not_after) > not_after then
        state = removed
      else
        mark_taken(prefix, id, record, 'x')
        is_told = true
      end
    end
  else
    if where ~= 'morgue' then
      state = remove_waiting(id)
    end
    if where ~= 'waiting' and not is_cancel and remove(id, 'morgue', 'morgue:payloads') then
      redis.call('HDEL', prefix .. 'morgue:errors', id)
      state = 1
    end
  end
  reply[#reply + 1] = state
end
add_to_meta(prefix, is_cancel and 'cancelled' or 'deleted', deleted)
if is_told then
  features = note_feature(prefix, features, 'cancelled', true)
  publish(prefix .. 'wake', 'cancelled')
end
announce_room(prefix, features)
return reply
