-- shard_snapshot: what a shard's own keys say, at one moment.
--
-- KEYS[1]  prefix of the shard
-- ARGV[1]  now: Unix seconds, or '' for the server's clock
--
-- Reply: {now, wrong, lease, ttl, shards_count, clock, owner, fence, delivery, paused, pushed, processed, failed,
--         buried, released, kicked, deleted, cancelled, expired, sealed, moved, fed, step, due, length, taken,
--         morgue_length, entries, missing}
--   now: Unix seconds, text; wrong: names of keys that have another type than they must, and then nothing follows
--   lease: token of the owner or nil; ttl: milliseconds that it still runs, -1: for ever, -2: there is none
--   shards_count ... step: as in `meta`, text or nil
--   due: waiting jobs whose time has come; length, taken, morgue_length: jobs; entries: in all sets of ids together
--   missing: words that `features` should have, as the keys tell
--
-- Invariant: nothing changes.
--
--!flags no-writes
local prefix = KEYS[1]
local now = read_now()
local sets = {
  { 'due', 'zset', 'ZCARD' }, { 'taken', 'hash', 'HLEN' }, { 'morgue', 'zset', 'ZCARD' },
  { 'retries', 'zset', 'ZCARD' }, { 'errors', 'hash', 'HLEN' }, { 'solo', 'set', 'SCARD' },
  { 'crashes', 'hash', 'HLEN' }, { 'morgue:errors', 'hash', 'HLEN' }, { 'expires', 'zset', 'ZCARD' },
  { 'debounced', 'zset', 'ZCARD' }, { 'payloads', 'hash', 'HLEN' }, { 'morgue:payloads', 'hash', 'HLEN' },
}
local others = {
  { 'pushed', 'list' }, { 'repeated', 'zset' }, { 'superseded', 'zset' }, { 'schedules', 'hash' }, { 'meta', 'hash' },
  { 'lease', 'string' }, { 'consumer', 'string' }, { 'finished', 'hash' }, { 'finished:before', 'hash' },
}
local wrong = {}
for _, keys in ipairs({ sets, others }) do
  for _, key in ipairs(keys) do
    local kind = redis.call('TYPE', prefix .. key[1]).ok
    if kind ~= 'none' and kind ~= key[2] then
      wrong[#wrong + 1] = key[1]
    end
  end
end
local text = string.format('%.17g', now)
if #wrong > 0 then
  return { text, wrong }
end

local sizes, entries = {}, 0
for i, set in ipairs(sets) do
  sizes[i] = redis.call(set[3], prefix .. set[1])
  entries = entries + sizes[i]
end
local meta = redis.call('HMGET', prefix .. 'meta', 'shards_count', 'clock', 'owner', 'fence', 'delivery', 'paused',
  'pushed', 'processed', 'failed', 'buried', 'released', 'kicked', 'deleted', 'cancelled', 'expired', 'sealed', 'moved',
  'fed', 'step', 'features')
local reply = { text, wrong, redis.call('GET', prefix .. 'lease'), redis.call('PTTL', prefix .. 'lease') }
for i = 1, 19 do
  reply[#reply + 1] = meta[i]
end
reply[24] = count_due(prefix, meta[20], (read_due_cutoff(prefix, now)))
reply[25], reply[26], reply[27], reply[28] = sizes[1], sizes[2], sizes[3], entries
reply[29] = find_missing_features(prefix, meta[20])
return reply
