-- why: all that decides whether an id is performed now.
--
-- KEYS[1]  prefix of the shard
-- ARGV[1]  now: Unix seconds, or '' for the server's clock
-- ARGV[2]  id
--
-- Reply: {now, due_cutoff, record, perform_at, retry_count, rank, buried_at, paused, lease, ttl, solo,
--         paused_by, leased_until, in_flight, level, expires, expired, debounced, full,
--         sealed, moved, fed, finished}
--   now, due_cutoff, perform_at, retry_count, buried_at, paused: text, nil where it doesn't apply
--   record: what `taken` says of it, without its payload ('' if that can't be read)
--   rank: how many waiting jobs come before it
--   lease: token of the owner or nil; ttl: milliseconds that it still runs; solo: 1 when it is to be taken alone
--   paused_by: who paused the queue, as far as they said, or nil; leased_until: when the last
--   lease ends or has ended, text or nil
--   in_flight: nil, but if the id is due and others of the shard are in flight:
--   {how many, when the first of them was taken, up to three of their ids, first those taken first}
--   level: its priority while it waits; expires: when the first of its payloads that wait expires, text or nil;
--   expired: 1 when all of them have, else 0
--   debounced: until when it may be put off by more payloads, text or nil
--   sealed: "m epoch" of the layout that the jobs of the shard belong to, moved: 1 when all were moved there,
--   fed: 1 while jobs come to it, or nil: see lib/reshard.lua
--   finished: what is kept of when it finished last, see lib/kept.lua, or nil
--   full: 1 when a push did not fit into the queue's capacity, and nothing has made room in this shard since
--
-- Invariant: nothing changes.
--
--!flags no-writes
local prefix, id = KEYS[1], ARGV[2]
local now = read_now()
local due_cutoff = read_due_cutoff(prefix, now)
local record = redis.call('HGET', prefix .. 'taken', id)
local score = redis.call('ZSCORE', prefix .. 'due', id)
local level, at, perform_at = 0, false, score
if score then
  level, at = split_score(score)
  perform_at = level > 0 and string.format('%.17g', at) or score
end

-- A few of them tell, as all jobs of a delivery have one time. So only some hundred are looked at, of 500 or so.
local function look_at_flight()
  local count = redis.call('HLEN', prefix .. 'taken')
  if count == 0 then
    return false
  end
  local some, cursor, rounds = {}, '0', 0
  repeat
    local found = redis.call('HSCAN', prefix .. 'taken', cursor, 'COUNT', 100)
    for i = 1, #found[2], 2 do
      local taken_at = string.match(found[2][i + 1], '^%S+ +%S+ %S+ %S+ (%S+)')
      some[#some + 1] = { tonumber(taken_at) or now, taken_at, found[2][i] }
    end
    cursor, rounds = found[1], rounds + 1
  until cursor == '0' or #some >= 3 or rounds == 10
  table.sort(some, function(a, b)
    return a[1] < b[1] or a[1] == b[1] and a[3] < b[3]
  end)
  local reply = { count, some[1] and some[1][2] or false }
  for i = 1, math.min(#some, 3) do
    reply[i + 2] = some[i][3]
  end
  return reply
end

local expires = redis.call('ZSCORE', prefix .. 'expires', id)
local expired = 0
if expires and tonumber(expires) <= now then
  local key = prefix .. 'payloads:' .. id
  local past = redis.call('ZCOUNT', prefix .. 'expires:' .. id, '-inf', string.format('%.17g', now))
  expired = (redis.call('HEXISTS', prefix .. 'payloads', id) == 1 or past == redis.call('ZCARD', key)) and 1 or 0
end

local meta = redis.call('HMGET', prefix .. 'meta', 'paused', 'paused_by', 'leased_until', 'features', 'sealed',
  'moved', 'fed')
return {
  string.format('%.17g', now),
  string.format('%.17g', due_cutoff),
  record and (string.match(record, '^%S+ +%S+ %S+ %S+ %S+') or ''),
  perform_at,
  redis.call('ZSCORE', prefix .. 'retries', id),
  redis.call('ZRANK', prefix .. 'due', id),
  redis.call('ZSCORE', prefix .. 'morgue', id),
  meta[1],
  redis.call('GET', prefix .. 'lease'),
  redis.call('PTTL', prefix .. 'lease'),
  redis.call('SISMEMBER', prefix .. 'solo', id),
  meta[2],
  meta[3],
  not record and at and at <= due_cutoff and look_at_flight(),
  level,
  expires,
  expired,
  redis.call('ZSCORE', prefix .. 'debounced', id),
  uses(meta[4], 'full') and 1 or 0,
  meta[5], meta[6], meta[7],
  redis.call('HGET', prefix .. 'finished', id) or redis.call('HGET', prefix .. 'finished:before', id),
}
