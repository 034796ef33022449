-- fail: the outcome of taken jobs that failed, in one step.
--
-- KEYS[1]  prefix of the shard
-- ARGV[1]  now: Unix seconds, or '' for the server's clock
-- ARGV[2]  token of the lease
-- ARGV[3]  delivery that the ids were taken under, and perhaps what is kept of attempts, see lib/kept.lua
-- ARGV[4+] per id five arguments: id, verdict, retry_count, delay (seconds), error
--            retry      charged: waits for `delay` with the new retry_count
--            exhausted  the lowest of its taken payloads that live to the morgue, the rest starts afresh, due now
--            solo       not charged: it failed in company, and is to be taken alone
--
-- Reply: list of, per id, 1 (done), 4 (it was cancelled: nothing of it is left) or 0 (no longer in flight under that
-- delivery: nothing changed).
-- Errors: LEASELOST.
--
-- Invariant: each payload of the id is in exactly one of `payloads`, `taken:payloads`, `morgue:payloads`
-- afterwards, and none is gone but those that the merge policy `latest` drops. The failed job's perform_at and
-- retry_count win over those of a newer job.
--
--!flags allow-oom
local prefix = KEYS[1]
local delivery, kept = read_cited(ARGV[3])
local lost, now, records, features, cancelled = begin_report(prefix, ARGV[2], delivery, 4, 5)
if lost then
  return lost
end

local function exhaust(id, record, reason)
  materialize(prefix, id, record)
  local taken, has_ttl = prefix .. 'taken:payloads:' .. id, uses(features, 'ttl')
  if has_ttl then
    expire_in_flight(prefix, id, now)
  end
  local lowest = redis.call('ZRANGE', taken, 0, 0, 'WITHSCORES')
  if lowest[1] then -- or a key was removed by hand: that must not stop the shard
    add_payload(prefix .. 'morgue:payloads', id, lowest[1], lowest[2])
    redis.call('ZREM', taken, lowest[1])
    if has_ttl then
      redis.call('ZREM', prefix .. 'taken:expires:' .. id, lowest[1])
    end
    redis.call('ZADD', prefix .. 'morgue', now, id)
    redis.call('HSET', prefix .. 'morgue:errors', id, reason)
  end
  local goes_on = redis.call('EXISTS', taken) == 1
  if uses(features, 'traces') and goes_on then
    put_back_traces(prefix, id)
  elseif uses(features, 'traces') then
    forget_traces(prefix, 'taken:traces:', { id })
  end
  if goes_on then
    expire_before_merge(prefix, id, nil, now, features)
    merge_taken(prefix, id, features, now)
    redis.call('ZADD', prefix .. 'due', score_again(prefix, id, level_in(record), now), id)
    end_debounce(prefix, id, features)
  end
  redis.call('HDEL', prefix .. 'taken', id)
  forget(prefix, id)
  return lowest[1] and 1 or 0
end

local reply, failed, buried = {}, 0, 0
for i = 4, #ARGV, 5 do
  local id, verdict, retry_count, delay, reason = ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3], ARGV[i + 4]
  local record = records[id]
  reply[#reply + 1] = record and 1 or cancelled[id] and 4 or 0
  if record then
    records[id] = nil
    if kept then
      reason = add_attempt(prefix, id, record, reason, now, kept)
    end
    if verdict == 'exhausted' then
      failed, buried = failed + 1, buried + exhaust(id, record, reason)
    elseif verdict == 'retry' then
      put_back(prefix, id, record, now, bounded(now + tonumber(delay)), features)
      redis.call('ZADD', prefix .. 'retries', retry_count, id)
      redis.call('HSET', prefix .. 'errors', id, reason)
      redis.call('SREM', prefix .. 'solo', id)
      failed = failed + 1
    else
      put_back(prefix, id, record, now, nil, features)
      redis.call('HSET', prefix .. 'errors', id, reason)
      redis.call('SADD', prefix .. 'solo', id)
    end
  end
end
add_to_meta(prefix, 'failed', failed)
add_to_meta(prefix, 'buried', buried)
announce_room(prefix, features)
return reply
