-- take: acknowledge the previous batch and take the next, in one trip.
--
-- KEYS[1]  prefix of the shard
-- ARGV[1]  now: Unix seconds, or '' for the server's clock
-- ARGV[2]  token of the lease
-- ARGV[3]  last delivery that the caller received and has not reported whole; 0 when it holds nothing
-- ARGV[4]  limit: how many jobs to take; 0 only acknowledges and tells the next due time
-- ARGV[5]  max_payloads of one id
-- ARGV[6]  max_bytes of payloads in the reply; each counts 100 on top of its own (one payload always fits)
-- ARGV[7]  delivery that the acknowledged ids were taken under
-- ARGV[8+] acknowledged ids
--
-- Reply: {delivery, delay, paused, acknowledged, job...}
--   delay: microseconds until the oldest waiting job is due, not positive when it is, nil when none waits
--   paused: 1 when the queue is paused (nothing is taken then), else 0
--   job: {id, perform_at, retry_count, payload, score, payload, score...}, lowest score first; or
--        {id, perform_at, retry_count, "score payload"}, of a lone payload
-- Errors: LEASELOST.
--
-- Invariant: an id is handed out by one delivery at a time. What a delivery later than ARGV[3] holds never
-- reached the caller: it is handed out again, first. An id in flight is not taken a second time; its newer
-- payloads wait. Retrying and solo ids come alone. Of an id with more than max_payloads the lowest scores are
-- taken, the rest keeps its place.
--
--!flags allow-oom
--!include clock
--!include lease
--!include touch
--!include taken
--!include records_of
--!include forget
local prefix, token, last, limit = KEYS[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local max_payloads, max_bytes = tonumber(ARGV[5]), tonumber(ARGV[6])
local key_due, key_taken, key_meta = prefix .. 'due', prefix .. 'taken', prefix .. 'meta'

-- What a payload costs beyond its bytes: a score in the reply, and about a microsecond. Without it, a million
-- tiny payloads would fit into one reply.
local overhead = 100

-- The lowest payloads of a key, at most max_payloads of them and, beyond the first, `room` bytes. Returns the
-- flat list, its bytes, and what stopped it: nil (nothing: these are all), 'payloads' or 'bytes'. In steps of
-- up to 16, as many as should still fit: a payload may be 1 MiB and nothing tells its size beforehand.
local function read_payloads(key, room)
  local payloads, bytes, start, step = {}, 0, 0, 2
  while true do
    local stop = math.min(start + step, max_payloads) - 1
    local part = redis.call('ZRANGE', key, start, stop, 'WITHSCORES')
    for i = 1, #part, 2 do
      bytes = bytes + #part[i] + overhead
      if bytes > room and #payloads > 0 then
        return payloads, bytes - #part[i] - overhead, 'bytes'
      end
      payloads[#payloads + 1] = part[i]
      payloads[#payloads + 1] = part[i + 1]
    end
    start = stop + 1
    if #part < 2 or #payloads < 2 * start then
      return payloads, bytes, nil
    elseif start >= max_payloads then
      return payloads, bytes, redis.call('ZCARD', key) > max_payloads and 'payloads' or nil
    end
    step = math.max(1, math.min(16, math.floor((room - bytes) / (bytes / start)) + 1))
  end
end

local lost = check_lease(prefix, token)
if lost then
  return lost
end

-- 1. Read: what is acknowledged, what is to be handed out.
local now = read_now()
local meta = redis.call('HMGET', key_meta, 'clock', 'delivery', 'paused', 'processed')
local horizon = math.max(now, tonumber(meta[1]) or 0)
local paused = meta[3] and 1 or 0
local special = redis.call('EXISTS', prefix .. 'retries', prefix .. 'errors', prefix .. 'solo',
  prefix .. 'crashes') > 0

local cited = {}
for i = 8, #ARGV do
  cited[#cited + 1] = ARGV[i]
end
local acked, acked_ids, acked_payloads = records_of(prefix, ARGV[7], cited), {}, {}
for _, id in ipairs(cited) do
  if acked[id] and acked[id] ~= true then
    acked[id] = true -- an id cited twice counts once
    acked_ids[#acked_ids + 1] = id
    acked_payloads[#acked_payloads + 1] = prefix .. 'taken:payloads:' .. id
  end
end

local jobs, bytes = {}, 0
local records, moved, parted = {}, {}, {}
-- Not one that the caller had already: Redis may have lost its last writes, and with them the count.
local delivery = math.max(tonumber(meta[2]) or 0, tonumber(ARGV[7]) or 0) + 1
local head, tail = string.format('%d ', delivery), string.format(' 0 %.17g', now)
local in_flight = {}

-- Adds a job to the reply unless it has to wait for the next trip. `lone`: its payload, if that is lone. Returns
-- whether further ones may follow.
local function hand_out(id, key, lone, perform_at, retry_count, alone)
  if alone and #jobs > 0 then
    return false
  end
  local payloads, size, stopped
  if lone then
    -- As it is: taking it apart costs more here than where it is read.
    payloads, size = { lone }, #lone - string.find(lone, ' ', 1, true) + overhead
  else
    payloads, size, stopped = read_payloads(key, max_bytes - bytes)
  end
  if #jobs > 0 and (stopped == 'bytes' or bytes + size > max_bytes) then
    return false
  end
  bytes = bytes + size
  records[#records + 1] = id
  records[#records + 1] = head .. perform_at .. ' ' .. retry_count .. tail
  jobs[#jobs + 1] = { id, perform_at, retry_count, unpack(payloads) }
  if key == prefix .. 'payloads:' .. id then
    (stopped and parted or moved)[id] = payloads
  end
  return not alone
end

local next_due
if paused == 1 then
  limit = 0
end
if redis.call('HLEN', key_taken) > #acked_ids then
  local taken = redis.call('HGETALL', key_taken)
  for i = 1, #taken, 2 do
    in_flight[taken[i]] = not acked[taken[i]] and taken[i + 1] or nil
  end
end
local more = true
local lost_ids = {}
for id, record in pairs(in_flight) do
  if tonumber((parse_taken(record))) > last then
    lost_ids[#lost_ids + 1] = id
  end
end
table.sort(lost_ids)
for _, id in ipairs(lost_ids) do
  if #jobs < limit and more then
    local _, perform_at, retry_count = parse_taken(in_flight[id])
    local alone = retry_count >= 0 or (special and redis.call('SISMEMBER', prefix .. 'solo', id) == 1)
    local key = prefix .. 'taken:payloads:' .. id
    more = hand_out(id, key, redis.call('MGET', key)[1], perform_at, tostring(retry_count), alone)
  end
end
if #lost_ids > #jobs then
  more, next_due = false, horizon
end

local skipped = 0
for _ in pairs(in_flight) do
  skipped = skipped + 1
end
local waiting = redis.call('ZRANGE', key_due, 0, limit - #jobs + skipped, 'WITHSCORES')
local orphans = {}

-- What is lone of the ids that come next, read for 16 of them at once.
local lones, upto = {}, 0
local function lone_at(position)
  if position > upto then
    local keys = {}
    upto = math.min(position + 31, #waiting)
    for i = position, upto, 2 do
      keys[#keys + 1] = prefix .. 'payloads:' .. waiting[i]
    end
    for i, lone in ipairs(redis.call('MGET', unpack(keys))) do
      lones[position + 2 * i - 2] = lone
    end
  end
  return lones[position]
end

for i = 1, #waiting, 2 do
  local id, perform_at = waiting[i], waiting[i + 1]
  if not in_flight[id] then
    local takes = more and #jobs < limit and tonumber(perform_at) <= horizon
    if takes then
      local retry_count = special and redis.call('ZSCORE', prefix .. 'retries', id) or '-1'
      -- Of an id that is acknowledged just now, newer payloads wait: it succeeded, so it is solo no more.
      local alone = retry_count ~= '-1'
        or (special and not acked[id] and redis.call('SISMEMBER', prefix .. 'solo', id) == 1)
      local before = #jobs
      more = hand_out(id, prefix .. 'payloads:' .. id, lone_at(i), perform_at, retry_count, alone)
      takes = #jobs > before
      if takes and #jobs[#jobs] == 3 then
        -- No payloads: a key that somebody removed by hand. Such an id must not stop the shard.
        jobs[#jobs], records[#records], records[#records - 1], moved[id] = nil, nil, nil, nil
        orphans[#orphans + 1] = id
        more = true
      end
    end
    if not takes or parted[id] then
      next_due = next_due or tonumber(perform_at)
      if not takes then
        break
      end
    end
  end
end

local per_id = {}
for i = 1, #records, 2 do
  per_id[#per_id + 1] = records[i]
end
touch(prefix, { 'taken:payloads:' }, per_id)

-- 2. Write.
local fields = {}
if #acked_ids > 0 then
  redis.call('HDEL', key_taken, unpack(acked_ids))
  redis.call('UNLINK', unpack(acked_payloads))
  if special then
    redis.call('HDEL', prefix .. 'errors', unpack(acked_ids))
    redis.call('SREM', prefix .. 'solo', unpack(acked_ids))
    redis.call('HDEL', prefix .. 'crashes', unpack(acked_ids))
  end
  fields = { 'processed', (tonumber(meta[4]) or 0) + #acked_ids }
end
if #orphans > 0 then
  redis.call('ZREM', key_due, unpack(orphans))
  for _, id in ipairs(orphans) do
    forget(prefix, id)
  end
  next_due = next_due or horizon -- they took the place of others in what was read: look again
end
if #jobs > 0 then
  local gone = {}
  for id in pairs(moved) do
    redis.call('RENAME', prefix .. 'payloads:' .. id, prefix .. 'taken:payloads:' .. id)
    gone[#gone + 1] = id
  end
  if #gone > 0 then
    redis.call('ZREM', key_due, unpack(gone))
  end
  for id, payloads in pairs(parted) do
    for i = 1, #payloads, 2 do
      redis.call('ZADD', prefix .. 'taken:payloads:' .. id, payloads[i + 1], payloads[i])
    end
    redis.call('ZREMRANGEBYRANK', prefix .. 'payloads:' .. id, 0, #payloads / 2 - 1)
  end
  if special then
    redis.call('ZREM', prefix .. 'retries', unpack(per_id))
  end
  if #jobs > 16 then
    -- A value of more than 64 bytes makes Redis build a hash table at once. Otherwise it starts a compact list, which
    -- is searched from its beginning for each of the first 128 fields: a third of the time of a large trip.
    records[2] = records[2] .. string.rep(' ', 64)
  end
  redis.call('HSET', key_taken, unpack(records))
  fields[#fields + 1] = 'delivery'
  fields[#fields + 1] = delivery
end
if #fields > 0 then
  redis.call('HSET', key_meta, unpack(fields))
end

-- Up to the horizon it is due now, also when the server's clock has stepped back and `now` is far behind.
-- Rounded up, or whoever waits that long could come too early.
local delay = next_due and math.ceil((next_due - (next_due <= horizon and horizon or now)) * 1000000)
return { delivery, delay or false, paused, #acked_ids, unpack(jobs) }
