-- stats: how a shard is doing.
--
-- KEYS[1]  prefix of the shard
-- ARGV[1]  now: Unix seconds, or '' for the server's clock
--
-- Reply: {length, due, retries, taken, morgue_length, lag, processed, failed, buried, paused, lease, ttl, oldest_id,
--         oldest_at, expired, pushed, sealed, moved, fed, cancelled}
--   due: waiting jobs whose time has come; lag: seconds since the oldest of them became due, as text
--   processed, failed, buried, expired, pushed, cancelled: text or nil; paused: since when (Unix seconds, text) or nil
--   lease: token of the owner or nil; ttl: milliseconds that it still runs
--   oldest_id, oldest_at: the waiting job that is or was due first, and when (Unix seconds, text), or nil
--   sealed: "m epoch" of the layout that its jobs belong to, moved: 1 when all were moved there, fed: 1 while jobs
--   come to it, or nil: see lib/reshard.lua
--
-- Invariant: nothing changes.
--
--!flags no-writes
local prefix = KEYS[1]
local key_due = prefix .. 'due'
local due_cutoff = read_due_cutoff(prefix, read_now())
local meta = redis.call('HMGET', prefix .. 'meta', 'processed', 'failed', 'buried', 'paused', 'expired',
  'features', 'pushed', 'sealed', 'moved', 'fed', 'cancelled')
local oldest_id, oldest_at = find_oldest(prefix, meta[6])
local lag = oldest_at and math.max(due_cutoff - tonumber(oldest_at), 0) or 0
return {
  redis.call('ZCARD', key_due),
  count_due(prefix, meta[6], due_cutoff),
  redis.call('ZCARD', prefix .. 'retries'),
  redis.call('HLEN', prefix .. 'taken'),
  redis.call('ZCARD', prefix .. 'morgue'),
  string.format('%.6f', lag),
  meta[1], meta[2], meta[3], meta[4],
  redis.call('GET', prefix .. 'lease'),
  redis.call('PTTL', prefix .. 'lease'),
  oldest_id or false, oldest_at or false,
  meta[5],
  meta[7],
  meta[8], meta[9], meta[10], meta[11],
}
