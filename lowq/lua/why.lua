-- why: all that decides whether an id is performed now.
--
-- KEYS[1]  prefix of the shard
-- ARGV[1]  now: Unix seconds, or '' for the server's clock
-- ARGV[2]  id
--
-- Reply: {now, horizon, record, perform_at, retry_count, rank, buried_at, paused, lease, ttl, solo,
--         paused_by, leased_until}
--   now, horizon, perform_at, retry_count, buried_at, paused: text, nil where it doesn't apply
--   record: what `taken` says of it, without its payload ('' if that can't be read)
--   rank: how many waiting jobs come before it
--   lease: token of the owner or nil; ttl: milliseconds that it still runs; solo: 1 when it is to be taken alone
--   paused_by: who paused the queue, as far as they said, or nil; leased_until: when the last
--   lease ends or has ended, text or nil
--
-- Invariant: nothing changes.
--
--!flags no-writes
--!include clock
--!include horizon
local prefix, id = KEYS[1], ARGV[2]
local now = read_now()
local horizon = read_horizon(prefix, now)
local record = redis.call('HGET', prefix .. 'taken', id)
return {
  string.format('%.17g', now),
  string.format('%.17g', horizon),
  record and (string.match(record, '^%S+ +%S+ %S+ %S+ %S+') or ''),
  redis.call('ZSCORE', prefix .. 'due', id),
  redis.call('ZSCORE', prefix .. 'retries', id),
  redis.call('ZRANK', prefix .. 'due', id),
  redis.call('ZSCORE', prefix .. 'morgue', id),
  redis.call('HGET', prefix .. 'meta', 'paused'),
  redis.call('GET', prefix .. 'lease'),
  redis.call('PTTL', prefix .. 'lease'),
  redis.call('SISMEMBER', prefix .. 'solo', id),
  redis.call('HGET', prefix .. 'meta', 'paused_by'),
  redis.call('HGET', prefix .. 'meta', 'leased_until'),
}
