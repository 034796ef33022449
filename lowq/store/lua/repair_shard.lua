-- repair_shard: what is wrong with a shard's own keys is put right, as far as that is safe.
--
-- KEYS[1]  prefix of the shard
-- ARGV[1]  now: not used; every script has it first
-- ARGV[2]  what: 'lease_endless', 'lease_disagrees', 'counters', 'features_lost' or 'meta_lost'
-- ARGV[3]  milliseconds that a lease without an end is given when its owner's lease_ttl is not known, or shards_count
--          of the queue
--
-- Reply: 1 (put right), 0 (nothing is wrong any more).
--   lease_endless    the lease ends after its owner's lease_ttl; an owner that lives lengthens it before
--   lease_disagrees  owner and fence become those of the lease, which is what all writes are checked by
--   counters         those that are no numbers begin anew
--   features_lost    `features` says what the keys tell; the owner is woken
--   meta_lost        shards_count is what the registry says
--
-- Invariant: no lease changes hands, and the fence never goes back.
--
--!flags allow-oom
local prefix, what = KEYS[1], ARGV[2]
local key_lease, key_meta = prefix .. 'lease', prefix .. 'meta'

if what == 'lease_endless' then
  if redis.call('PTTL', key_lease) ~= -1 then
    return 0
  end
  local whole = redis.call('HGET', key_meta, 'lease_ttl')
  return redis.call('PEXPIRE', key_lease, tonumber(whole or '') and whole or ARGV[3])
elseif what == 'lease_disagrees' then
  local nonce, fence = string.match(redis.call('GET', key_lease) or '', '^(.*):(%d+)$')
  local meta = redis.call('HMGET', key_meta, 'owner', 'fence')
  if not nonce or (meta[1] == nonce and meta[2] == fence) or tonumber(fence) < (tonumber(meta[2] or '') or 0) then
    return 0
  end
  redis.call('HSET', key_meta, 'owner', nonce, 'fence', fence)
  return 1
elseif what == 'counters' then
  local changed = 0
  for _, name in ipairs({ 'pushed',
    'processed', 'failed', 'buried', 'released', 'kicked', 'deleted', 'cancelled', 'expired', 'delivery' }) do
    local value = redis.call('HGET', key_meta, name)
    if value and not string.match(value, '^%d+$') then
      changed = redis.call('HDEL', key_meta, name)
    end
  end
  return changed
elseif what == 'features_lost' then
  local features = redis.call('HGET', key_meta, 'features')
  local missing = find_missing_features(prefix, features)
  for _, word in ipairs(missing) do
    features = note_feature(prefix, features, word, true)
  end
  if #missing > 0 then
    wake(prefix, 0)
  end
  return math.min(#missing, 1)
end
return redis.call('HSETNX', key_meta, 'shards_count', ARGV[3])
