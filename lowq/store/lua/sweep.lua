-- sweep: removes what has expired: waiting payloads past their ttl, and of the morgue what is too old or too much.
--
-- KEYS[1]  prefix of the shard
-- ARGV[1]  now: Unix seconds, or '' for the server's clock
-- ARGV[2]  scan_size: how many payloads, and how many jobs of the morgue, at most
-- ARGV[3]  morgue_ttl: seconds that a buried job is kept; '' = for good
-- ARGV[4]  morgue_max: how many buried jobs the shard keeps; '' = all of them
--
-- Reply: {expired, removed, more, {id, count, id, count...}, {id...}}
--   expired: payloads; removed: jobs of the morgue; more: 1 when there is more to be swept at once, else 0
--   then which ids how many of these payloads are of, and which jobs of the morgue these are
--
-- Invariant: works in the order of time and stops at the first that lives, so a shard of which nothing has expired
-- costs one look-up. A payload that lives is not touched. Whoever sweeps need not hold the lease: it is the clock that
-- says what has expired. A sealed shard is left as it is: its jobs are being moved.
--
--!flags allow-oom
local prefix, most, morgue_ttl, morgue_max = KEYS[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local now = read_now()
local expired, ids, more = sweep_expired(prefix, now, most)

-- Bytes of the morgue that a call frees at most: it must not hold Redis for long.
local room = 16777216
local key_morgue, buried = prefix .. 'morgue', {}
if morgue_ttl then
  local oldest = string.format('%.17g', now - morgue_ttl)
  buried = redis.call('ZRANGE', key_morgue, '-inf', oldest, 'BYSCORE', 'LIMIT', 0, most)
end
if morgue_max and #buried < most then
  local over = redis.call('ZCARD', key_morgue) - morgue_max
  if over > #buried then
    buried = redis.call('ZRANGE', key_morgue, 0, math.min(over, most) - 1)
  end
end
if #buried > 0 and redis.call('HEXISTS', prefix .. 'meta', 'sealed') == 1 then
  buried = {} -- they are being moved to another layout
end
if #buried > 0 then
  check_types(prefix)
  touch(prefix, { 'morgue:payloads:' }, buried)
  local gone, keys = {}, {}
  for i, id in ipairs(buried) do
    if room <= 0 then
      break
    end
    gone[i], keys[i] = id, prefix .. 'morgue:payloads:' .. id
    room = room - weight(keys[i])
  end
  redis.call('ZREM', key_morgue, unpack(gone))
  redis.call('HDEL', prefix .. 'morgue:payloads', unpack(gone))
  redis.call('UNLINK', unpack(keys))
  redis.call('HDEL', prefix .. 'morgue:errors', unpack(gone))
  more = more or #buried == most or #gone < #buried
  buried = gone
end
return { expired, #buried, more and 1 or 0, ids, buried }
