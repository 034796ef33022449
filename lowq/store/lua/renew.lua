-- renew: lengthen the lease of a shard, and say how it is doing.
--
-- KEYS[1]  prefix of the shard
-- ARGV[1]  now: Unix seconds, or '' for the server's clock
-- ARGV[2]  token of the lease
-- ARGV[3]  lease_ttl, milliseconds
-- ARGV[4]  '1' when the holder is a consumer, otherwise missing
--
-- Reply: {pushed, backlog, in_flight, delay, state, marks}; 1 where these can't be read.
--   pushed: payloads that have come in since the shard was created; backlog: jobs that are due or in flight
--   delay: microseconds until the oldest waiting job is due, of whatever priority; not positive when it is, nil when
--   none waits
--   state: as of `ack_and_take`: 1 when the queue is paused, 2 more when payloads of the shard have a ttl, 8 more when
--   the jobs of the shard belong to another layout
--   marks: {id, delivery, mark, id...} of the jobs in flight that are to end (lib/taken.lua); missing without any
-- Errors: LEASELOST.
--
-- Invariant: only the holder lengthens; a lease that has run out is not renewed but acquired again. A holder whose
-- wake-up was lost learns here that there is work.
--
--!flags allow-oom
local lost = check_lease(KEYS[1], ARGV[2])
if lost then
  return lost
end
local prefix, now = KEYS[1], read_now()
redis.call('PEXPIRE', prefix .. 'lease', ARGV[3])
redis.call('HSET', prefix .. 'meta', 'leased_until', now + ARGV[3] / 1000)
local meta = redis.call('HMGET', prefix .. 'meta', 'pushed', 'features', 'clock', 'paused', 'sealed')
local marks
if uses(meta[2], 'cancelled') then
  local is_hash, records = pcall(function()
    return redis.call('HGETALL', prefix .. 'taken')
  end)
  records = is_hash and records or {} -- its key may have the wrong type
  marks = {}
  for i = 1, #records, 2 do
    local mark = mark_in(records[i + 1])
    if mark then
      marks[#marks + 1], marks[#marks + 2], marks[#marks + 3] = records[i], parse_taken(records[i + 1]), mark
    end
  end
  if #marks == 0 then
    meta[2], marks = note_feature(prefix, meta[2], 'cancelled', false), nil
  end
end
if ARGV[4] then
  redis.call('SET', prefix .. 'consumer', '1', 'PX', ARGV[3])
end
-- A key of the wrong type must not keep the lease from being renewed.
local is_known, in_flight, due, delay = pcall(function()
  local taken = redis.call('HLEN', prefix .. 'taken')
  local _, first = find_oldest(prefix, meta[2])
  if not first then
    return taken, 0, false
  end
  local due_cutoff = read_due_cutoff(prefix, now, meta[3] or '')
  local at, count = bounded(tonumber(first)), count_due(prefix, meta[2], due_cutoff)
  if at > due_cutoff and count == 0 then
    return taken, 0, math.ceil((at - now) * 1000000)
  end
  -- Beside a level times are rounded: the count knows what is due. And a bounded time may be after a foreign clock.
  return taken, count, math.ceil(math.min(math.max(at, -8589934591) - due_cutoff, 0) * 1000000)
end)
if not is_known then
  return 1
end
local state = (meta[4] and 1 or 0) + (uses(meta[2], 'ttl') and 2 or 0) + (meta[5] and 8 or 0)
return { tonumber(meta[1] or '') or 0, due + in_flight, in_flight, delay, state, marks }
