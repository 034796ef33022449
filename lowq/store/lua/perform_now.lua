-- perform_now: waiting jobs become due now; their retry_count stays.
--
-- KEYS[1]  prefix of the shard
-- ARGV[1]  now: Unix seconds, or '' for the server's clock
-- ARGV[2]  the attempt, see lib/repeated_calls.lua; '' when it is never repeated
-- ARGV[3]  only jobs whose perform_at is not after this (Unix seconds; '' = any)
-- ARGV[4+] ids
--
-- Reply: list of, per id, 1 (due now), 0 (doesn't wait), 3 (in flight).
-- Errors: SEALED, RESHARDING: the shard is not whole, see lib/reshard.lua; nothing changed.
--
-- Invariant: nothing but perform_at changes, and it never moves later.
-- A repeat supersedes the earlier attempts of its call: one that comes later does nothing.
--
--!flags allow-oom
local prefix, not_after = KEYS[1], tonumber(ARGV[3])
local closed, features = begin_action(prefix)
if closed then
  return closed
end
local now = read_now()
local reply, moved, superseded = {}, false, is_superseded(prefix, ARGV[2], now)
for i = 4, #ARGV do
  local id = ARGV[i]
  local perform_at = not superseded and redis.call('ZSCORE', prefix .. 'due', id)
  local state, level, at = 0, split_score(perform_at or 0)
  if perform_at and (not not_after or at <= not_after) then
    redis.call('ZADD', prefix .. 'due', 'XX', 'LT', level * 8589934592 + now, id)
    end_debounce(prefix, id, features)
    state, moved = 1, true
  elseif not superseded and redis.call('HEXISTS', prefix .. 'taken', id) == 1 then
    state = 3
  end
  reply[#reply + 1] = state
end
if moved then
  wake(prefix, 0)
end
return reply
