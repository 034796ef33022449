-- drop: a part of a shard that nobody works, for good; when nothing is left, all that is known of the shard.
--
-- KEYS[1]  prefix of the shard
-- ARGV[1]  now: Unix seconds, or '' for the server's clock
-- ARGV[2]  the attempt, see lib/repeated_calls.lua; '' when it is never repeated
-- ARGV[3]  how many jobs of each kind at most, up to 1,000
-- ARGV[4]  '1' only asks whether it might be dropped
--
-- Reply: {1 (nothing is left), removed} | {0 (call again), removed} | {2 (somebody holds the lease), 0}
--   removed: how many jobs
--
-- Invariant: nothing of a job that is removed is left in any key. A shard with an owner is not touched.
-- A repeat supersedes the earlier attempts of its call: one that comes later does nothing.
--
--!flags allow-oom
local prefix, most, now = KEYS[1], tonumber(ARGV[3]), read_now()
if is_superseded(prefix, ARGV[2], now) then
  return { 0, 0 }
end
if redis.call('EXISTS', prefix .. 'lease') == 1 or restore_lease(prefix, now) then
  return { 2, 0 }
end
if ARGV[4] == '1' then
  return { 0, 0 }
end
local waiting = redis.call('ZRANGE', prefix .. 'due', 0, most - 1)
local buried = redis.call('ZRANGE', prefix .. 'morgue', 0, most - 1)
local records = redis.call('HSCAN', prefix .. 'taken', '0', 'COUNT', most)[2]
local taken = {}
for i = 1, math.min(#records, 2 * most), 2 do
  taken[#taken + 1] = records[i]
end
check_types(prefix)
touch(prefix, { 'payloads:' }, waiting)
touch(prefix, { 'morgue:payloads:' }, buried)
touch(prefix, { 'taken:payloads:' }, taken)
local features = redis.call('HGET', prefix .. 'meta', 'features')
local has_ttl, has_traces = uses(features, 'ttl'), uses(features, 'traces')

-- Bytes that a call frees at most: it must not hold Redis for long.
local room = 16777216
local function remove(ids, command, key, place, times, traces)
  local gone, keys = {}, {}
  for _, id in ipairs(ids) do
    if room <= 0 then
      break
    end
    gone[#gone + 1] = id
    keys[#keys + 1] = prefix .. place .. ':' .. id
    room = room - weight(keys[#keys])
    if has_ttl and times then
      keys[#keys + 1] = prefix .. times .. id
    end
    if has_traces and traces then
      keys[#keys + 1] = prefix .. traces .. id
    end
  end
  if #gone > 0 then
    redis.call(command, prefix .. key, unpack(gone))
    if key ~= 'taken' then
      redis.call('HDEL', prefix .. place, unpack(gone))
    end
    redis.call('UNLINK', unpack(keys))
    if key == 'due' then
      redis.call('ZREM', prefix .. 'retries', unpack(gone))
      redis.call('ZREM', prefix .. 'expires', unpack(gone))
      redis.call('ZREM', prefix .. 'debounced', unpack(gone))
    end
  end
  return #gone
end
local removed = remove(waiting, 'ZREM', 'due', 'payloads', 'expires:', 'traces:')
  + remove(buried, 'ZREM', 'morgue', 'morgue:payloads')
  + remove(taken, 'HDEL', 'taken', 'taken:payloads', 'taken:expires:', 'taken:traces:')
if #waiting + #buried + #taken > 0 then
  return { 0, removed }
end
local rest = {}
for i, key in ipairs({ 'retries', 'errors', 'solo', 'crashes', 'debounced', 'morgue:errors', 'pushed', 'repeated',
  'expires', 'payloads', 'morgue:payloads', 'schedules', 'finished', 'finished:before', 'meta' }) do
  rest[i] = prefix .. key
end
redis.call('UNLINK', unpack(rest))
return { 1, 0 }
