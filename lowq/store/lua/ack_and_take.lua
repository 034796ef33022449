-- ack_and_take: how a job is acknowledged, and how one is taken: the previous batch and the next, in one round trip.
--
-- KEYS[1]  prefix of the shard
-- ARGV[1]  now: Unix seconds, or '' for the server's clock
-- ARGV[2]  token of the lease
-- ARGV[3]  last delivery that the caller received and has not reported whole; 0 when it holds nothing
-- ARGV[4]  limit: how many jobs to take; 0 only acknowledges and returns the next due time
-- ARGV[5]  max_payloads of one id
-- ARGV[6]  max_bytes of payloads in the reply; each counts 100 on top of its own (one payload always fits)
-- ARGV[7]  delivery that the acknowledged ids were taken under; with ids perhaps with what is kept of them, see
--          lib/kept.lua
-- ARGV[8+] acknowledged ids
--
-- Reply: {delivery, delay, paused, acknowledged, item...}
--   delay: microseconds until the oldest waiting job is due, not positive when it is, nil when none waits; never more
--   than 2**53
--   paused: 1 when the queue is paused (nothing is taken then), else 0; 2 more when payloads of the shard have a ttl,
--   so that it wants to be swept; 8 more when the shard was sealed (nothing is taken then, and delay is nil): its jobs
--   are being moved to another layout; 4 more when the last item is none, but {id, text, id, text...}: the trace
--   contexts of some of the jobs, each followed by a newline; 16 more when the last one, but for that, is
--   {now, id, time, id, time...}: when the first payload of a job expires, of those in a list that have a ttl, and what
--   the time is now (texts, Unix seconds);
--   32 more when the job is a solo one; 64 more when behind all these is {level, delay, level, delay...}: of each
--   priority, when the shard uses them, when its oldest waiting job is due, as `delay`; and 128 more when 1,000 jobs or
--   more are in flight: none is taken before some of them are reported
--   item: a job {id, perform_at, retry_count, payload, score, payload, score...}, lowest score first; or three items in
--     a row, for a fresh job with an inline payload: id, perform_at, "score payload" or "score,expires payload". Most
--     are such, and to Redis a list within the reply costs as much as taking the job did
-- Errors: LEASELOST.
--
-- Invariant: an id is handed out by one delivery at a time. What a delivery later than ARGV[3] holds never
-- reached the caller: it is handed out again, first. An id in flight is not taken a second time; its newer
-- payloads wait. Retrying and solo ids come alone. Of an id with more than max_payloads the lowest scores are
-- taken, the rest keeps its place. No job is taken that would make it more than 1,000 in flight: when replies were lost
-- a call reads all of them.
--
--!flags allow-oom
local prefix, token, last, limit = KEYS[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local max_payloads, max_bytes = tonumber(ARGV[5]), tonumber(ARGV[6])
local key_due, key_taken, key_meta = prefix .. 'due', prefix .. 'taken', prefix .. 'meta'
local place, payloads, taken_payloads = prefix .. 'payloads', prefix .. 'payloads:', prefix .. 'taken:payloads:'

-- The cost of a payload beyond its bytes: a score in the reply, and about a microsecond. Without it, a million
-- tiny payloads would fit into one reply.
local overhead = 100

local lost = check_lease(prefix, token)
if lost then
  return lost
end

-- 1. Read: the jobs that are acknowledged, and those to be handed out.
local now = read_now()
local meta = redis.call('HMGET', key_meta, 'clock', 'delivery', 'paused', 'processed', 'server_time',
  'server_time_since', 'features', 'sealed')
local has_ttl, has_levels, has_traces = uses(meta[7], 'ttl'), uses(meta[7], 'priority'), uses(meta[7], 'traces')
--!rarely sweep_expired expire_taken take_expiries expiry_in read_levels announce_room touch
--!rarely read_taken_traces take_traces forget_traces describe_finished touch_finished write_finished
local sweep_expired, expire_taken, take_expiries, expiry_in, read_levels, announce_room, touch
local read_taken_traces, take_traces, forget_traces, describe_finished, touch_finished, write_finished
local cited_delivery, kept = read_cited(ARGV[7])
if meta[7] or kept then
  sweep_expired, expire_taken, take_expiries, expiry_in, read_levels, announce_room, touch,
    read_taken_traces, take_traces, forget_traces, describe_finished, touch_finished, write_finished = rarely()
end
shift_due(prefix, now, meta[5], meta[6])
local due_cutoff = read_due_cutoff(prefix, now, meta[1] or '')
local paused = meta[3] and 1 or 0
local special = redis.call('EXISTS', prefix .. 'retries', prefix .. 'errors', prefix .. 'solo',
  prefix .. 'crashes') > 0
if special then -- these are read or written below, some of them only after the first write
  redis.call('ZCARD', prefix .. 'retries')
  redis.call('HLEN', prefix .. 'errors')
  redis.call('HLEN', prefix .. 'crashes')
  redis.call('SISMEMBER', prefix .. 'solo', '')
end
-- Whether more may have expired: then the jobs to be handed out are looked at once more, below.
local is_unswept = false
if has_ttl then
  is_unswept = select(3, sweep_expired(prefix, now, 100))
end

local cited = { unpack(ARGV, 8) }
local acked, acked_ids, acked_payloads = records_of(prefix, cited_delivery, cited), {}, {}
local finished = {} -- id, entry, id...: what is kept of them
for _, id in ipairs(cited) do
  if acked[id] and acked[id] ~= true then
    acked_ids[#acked_ids + 1] = id
    if kept then
      finished[#finished + 1], finished[#finished + 2] = id, describe_finished(prefix, id, acked[id], now, kept)
    end
    if not has_inline(acked[id]) then
      acked_payloads[#acked_payloads + 1] = taken_payloads .. id
    end
    acked[id] = true -- an id cited twice counts once
  end
end

local items, last_item, count, bytes = {}, 0, 0, 0 -- items of the reply; of how many jobs
-- Not one that the caller has had: Redis may have lost its last writes, and with them the count.
local delivery = math.max(tonumber(meta[2]) or 0, tonumber(cited_delivery)) + 1
local head, tail = string.format('%d ', delivery), string.format(' %.17g', now)
local records = {} -- for `taken`: id, record, id, record...
local in_flight = {}
local inline_ids = {} -- whose payloads are in the records now

-- Of jobs in a list of their own: when the first payload of each expires, id, time (text), id...
local ends = has_ttl and { string.format('%.17g', now) }

-- Adds a job to the reply unless it has to wait for the next delivery. `inline`: its payload, if that is inline, else
-- false: they are a set, whose key begins with `head_of_set`; `level`: text; `expires`: when the first of a set does
-- (text), or nil. Returns whether further ones may follow, and what stopped its payloads: nil (nothing: these are all),
-- 'payloads' or 'bytes'.
local function hand_out(id, head_of_set, inline, perform_at, retry_count, alone, level, expires)
  if alone and count > 0 then
    return false
  end
  local job, size, stopped
  if inline then
    size = #inline - string.find(inline, ' ', 1, true) + overhead
  else
    local number, is_all
    job = { id, perform_at, retry_count }
    number, size, is_all = read_set(job, head_of_set .. id, max_payloads, max_bytes - bytes, overhead)
    stopped = not is_all and (number == max_payloads and 'payloads' or 'bytes') or nil
  end
  if count > 0 and (stopped == 'bytes' or bytes + size > max_bytes) then
    return false
  end
  local record = head .. perform_at .. ' ' .. retry_count .. ' ' .. level .. tail
  records[2 * count + 1], records[2 * count + 2] = id, inline and record .. ' ' .. inline .. '\n' or record
  bytes, count = bytes + size, count + 1
  if inline and retry_count == '-1' then
    items[last_item + 1], items[last_item + 2], items[last_item + 3] = id, perform_at, inline
    last_item = last_item + 3
  else
    last_item = last_item + 1
    if inline then
      local payload, score, at = split_inline(inline)
      job, expires = { id, perform_at, retry_count, payload, score }, at
    end
    items[last_item] = job
    if expires then
      ends[#ends + 1], ends[#ends + 2] = id, expires
    end
  end
  return not alone, stopped
end

local next_due
local rest = has_levels and {} -- level (text) -> when the oldest job of it that stays is due
if paused == 1 or meta[8] then
  limit = 0
end
local most_in_flight = 1000
local skipped = redis.call('HLEN', key_taken) - #acked_ids -- how many stay in flight
-- Otherwise the caller has received all of it, and only waiting ids are looked up in `taken`.
local is_read = skipped > 0 and last < (tonumber(meta[2]) or 0)
if is_read then
  local taken = redis.call('HGETALL', key_taken)
  for i = 1, #taken, 2 do
    in_flight[taken[i]] = not acked[taken[i]] and taken[i + 1] or nil
  end
end
local more, solo = true, 0
local lost_ids = {}
if has_ttl and limit > 0 then
  for id, record in pairs(in_flight) do
    -- Jobs that were never received have not been handed out.
    if tonumber((parse_taken(record))) > last and expire_taken(prefix, id, record, now, meta[7]) then
      in_flight[id] = nil
      skipped = skipped - 1
    end
  end
end
for id, record in pairs(in_flight) do
  if tonumber((parse_taken(record))) > last then
    lost_ids[#lost_ids + 1] = id
  end
end
table.sort(lost_ids)
for _, id in ipairs(lost_ids) do
  if count < limit and more then
    local _, perform_at, retry_count = parse_taken(in_flight[id])
    local is_solo = special and redis.call('SISMEMBER', prefix .. 'solo', id) == 1
    local alone = retry_count >= 0 or is_solo
    local inline, before = get_inline(in_flight[id]), count
    local level, expires = string.match(in_flight[id], '^%S+ +%S+ %S+ (%S+)'), nil
    if has_ttl and not inline then
      expires = redis.call('ZRANGE', prefix .. 'taken:expires:' .. id, 0, 0, 'WITHSCORES')[2]
    end
    more = hand_out(id, taken_payloads, inline, perform_at, tostring(retry_count), alone, level, expires)
    if is_solo and count > before then
      solo = 32
    end
  end
end
-- Of those the rest waits for the next delivery. The caller will name this one as received by then, perhaps with some
-- of it in hand: so they get a number behind it, by which they are known as not received.
local top = delivery
if #lost_ids > count then
  more, next_due = false, due_cutoff
  top = delivery + 1
end
local unsent = count > 0 and { unpack(lost_ids, count + 1) } or {}
if rest then
  for i = count + 1, #lost_ids do
    rest[string.match(in_flight[lost_ids[i]], '^%S+ +%S+ %S+ (%d)')] = due_cutoff
  end
end

local again = count -- so many were in flight before
limit = math.min(limit, again + math.max(most_in_flight - skipped, 0))

-- How many of the ids that wait are in flight, too.
local function find_in_flight(waiting)
  local found = 0
  for start = 1, #waiting, 2000 do
    local ids = {}
    for i = start, math.min(start + 1998, #waiting), 2 do
      ids[#ids + 1] = waiting[i]
    end
    for i, record in ipairs(redis.call('HMGET', key_taken, unpack(ids))) do
      if record and not acked[ids[i]] then
        in_flight[ids[i]], found = record, found + 1
      end
    end
  end
  return found
end

-- Waiting ids that are not in flight: as many as are taken, and one more, which says when to come again.
local waiting, levels, latest
local wanted, beyond = limit - count + 1, (is_read or has_levels) and skipped or 0
while true do
  if has_levels then
    waiting, levels, latest = read_levels(prefix, delivery, wanted + beyond)
  else
    waiting = redis.call('ZRANGE', key_due, 0, wanted + beyond - 1, 'WITHSCORES')
  end
  local found = not is_read and skipped > 0 and #waiting > 0 and find_in_flight(waiting) or 0
  if found <= beyond or beyond == skipped or #waiting < 2 * (wanted + beyond) then
    break
  end
  beyond = math.min(2 * found, skipped)
end

-- Looks up the next ids, 16 at once: their payloads, if inline, and their past.
local inlines, retry_counts, solos, expiries, upto = {}, {}, {}, {}, 0
local function look_up(position)
  local ids = {}
  upto = math.min(position + 31, #waiting)
  for i = position, upto, 2 do
    ids[#ids + 1] = waiting[i]
  end
  local found = redis.call('HMGET', place, unpack(ids))
  local counts = special and redis.call('ZMSCORE', prefix .. 'retries', unpack(ids))
  local alone = special and redis.call('SMISMEMBER', prefix .. 'solo', unpack(ids))
  for i, id in ipairs(ids) do
    local at = position + 2 * i - 2
    inlines[at] = found[i]
    if special then
      retry_counts[at], solos[at] = counts[i], alone[i] == 1
    end
    if is_unswept and found[i] then
      expiries[at] = expiry_in(found[i])
    elseif has_ttl and not found[i] then
      expiries[at] = redis.call('ZSCORE', prefix .. 'expires', id) or nil
    end
  end
end

local all_due = #waiting > 0 and (latest or tonumber(waiting[#waiting])) <= due_cutoff
local orphans, parted, expiring, unswept = {}, {}, {}, {}
local gone = {} -- ids that are taken whole
local leaving, arriving = {}, {} -- keys of sets that are, and what they become
local full -- the level of which nothing more is taken
local is_known = next_due ~= nil -- it is what was lost, and comes first
for i = 1, #waiting, 2 do
  local id, perform_at = waiting[i], waiting[i + 1]
  if not in_flight[id] and not (full and levels[i] == full) then
    local takes = more and count < limit and (all_due or tonumber(perform_at) <= due_cutoff)
    if takes then
      if i > upto then
        look_up(i)
      end
    end
    if takes and expiries[i] and tonumber(expiries[i]) <= now then
      next_due = math.min(next_due or due_cutoff, due_cutoff) -- there is more to be swept than one call does
      unswept[#unswept + 1], unswept[#unswept + 2] = expiries[i], id
    elseif takes then
      local retry_count = retry_counts[i] or '-1'
      -- Of an id that is acknowledged just now, newer payloads wait: it succeeded, so it is solo no more.
      local is_solo = solos[i] and not acked[id]
      local alone = retry_count ~= '-1' or is_solo
      local before = count
      local level = has_levels and levels[i] or '0'
      local further, stopped =
        hand_out(id, payloads, inlines[i], perform_at, retry_count, alone, level, expiries[i])
      more, takes = further, count > before
      if takes and is_solo then
        solo = 32
      end
      if takes and not inlines[i] and #items[last_item] == 3 then
        -- No payloads: the key was removed by hand. Such an id must not stop the shard.
        items[last_item], records[2 * count], records[2 * count - 1] = nil, nil, nil
        last_item, count = last_item - 1, count - 1
        orphans[#orphans + 1] = id
        more = true
      elseif takes and inlines[i] then
        gone[#gone + 1], inline_ids[#inline_ids + 1] = id, id
      elseif takes then
        arriving[#arriving + 1] = taken_payloads .. id
        if expiries[i] then
          expiring[#expiring + 1] = id
        end
        if stopped then
          parted[id] = items[last_item]
        else
          gone[#gone + 1], leaving[#arriving] = id, payloads .. id
        end
      end
    end
    if not takes or parted[id] then
      if rest then
        rest[levels[i]] = math.min(rest[levels[i]] or math.huge, tonumber(perform_at))
      end
      if not next_due or (has_levels and not is_known and tonumber(perform_at) < next_due) then
        next_due = tonumber(perform_at)
      end
      if not takes then
        if not has_levels then
          break
        end
        full = levels[i]
      end
    end
  end
end

if #arriving > 0 then
  redis.call('EXISTS', unpack(arriving)) -- before the first write, as `touch` does
  if #expiring > 0 then
    touch(prefix, { 'expires:', 'taken:expires:' }, expiring)
  end
end

local traces, taken_traces
if has_traces then
  traces, taken_traces = read_taken_traces(prefix, records, in_flight, acked_ids)
end

local finished_before = #finished > 0 and touch_finished(prefix)

-- 2. Write.
local fields = {}
if #unswept > 0 then
  redis.call('ZADD', prefix .. 'expires', unpack(unswept)) -- where they are, unless somebody has changed it by hand
end
if #acked_ids > 0 then
  if finished_before then
    write_finished(prefix, finished, finished_before, kept)
  end
  redis.call('HDEL', key_taken, unpack(acked_ids))
  if has_traces then
    forget_traces(prefix, 'taken:traces:', acked_ids)
  end
  if #acked_payloads > 0 then
    redis.call('UNLINK', unpack(acked_payloads))
    if has_ttl then
      for i, key in ipairs(acked_payloads) do
        acked_payloads[i] = prefix .. 'taken:expires:' .. string.sub(key, #taken_payloads + 1)
      end
      redis.call('UNLINK', unpack(acked_payloads))
    end
  end
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
  if has_ttl then
    redis.call('ZREM', prefix .. 'expires', unpack(orphans))
  end
  if uses(meta[7], 'debounce') then
    redis.call('ZREM', prefix .. 'debounced', unpack(orphans))
  end
  if has_traces then
    forget_traces(prefix, 'traces:', orphans)
  end
  next_due = math.min(next_due or due_cutoff, due_cutoff) -- they took the place of others in what was read
end
if count > 0 then
  if traces then
    take_traces(prefix, taken_traces, in_flight, parted)
  end
  for _, id in ipairs(expiring) do
    take_expiries(prefix, id, parted[id])
  end
  for i, key in pairs(leaving) do
    redis.call('RENAME', key, arriving[i])
  end
  if #gone > 0 then
    redis.call('ZREM', key_due, unpack(gone))
    if has_ttl then
      redis.call('ZREM', prefix .. 'expires', unpack(gone))
    end
  end
  if uses(meta[7], 'debounce') then
    for id in pairs(parted) do
      gone[#gone + 1] = id
    end
    if #gone > 0 then
      redis.call('ZREM', prefix .. 'debounced', unpack(gone))
    end
  end
  for id, job in pairs(parted) do
    for i = 4, #job, 2 do
      redis.call('ZADD', taken_payloads .. id, job[i + 1], job[i])
    end
    redis.call('ZREMRANGEBYRANK', payloads .. id, 0, (#job - 3) / 2 - 1)
  end
  if special then
    local ids = {}
    for i = 1, #records, 2 do
      ids[#ids + 1] = records[i]
    end
    redis.call('ZREM', prefix .. 'retries', unpack(ids))
  end
  for _, id in ipairs(unsent) do
    records[#records + 1] = id
    records[#records + 1] = string.gsub(in_flight[id], '^%S+', string.format('%d', top), 1)
  end
  redis.call('HSET', key_taken, unpack(records))
  if #inline_ids > 0 then
    redis.call('HDEL', place, unpack(inline_ids)) -- only now that the records have what is in them
  end
  fields[#fields + 1] = 'delivery'
  fields[#fields + 1] = top
end
if #fields > 0 then
  redis.call('HSET', key_meta, unpack(fields))
end
if #acked_ids + #orphans > 0 then
  if meta[7] then
    announce_room(prefix, meta[7])
  end
end

-- Up to the due_cutoff it is due now. Rounded up, or a caller that waits that long could come too early. Bounded, as a
-- foreign score may be anything.
local function delay_until(time)
  time = math.max(bounded(time), -8589934591)
  return math.ceil((time - (time <= due_cutoff and due_cutoff or now)) * 1000000)
end
local delay = next_due and delay_until(next_due)
if ends and count > 0 then
  last_item = last_item + 1
  items[last_item], paused = ends, paused + 16
end
if traces and #traces > 0 then
  items[last_item + 1], paused = traces, paused + 4
end
if meta[8] then
  delay, paused = false, paused + 8
elseif rest and next(rest) then
  local each = {}
  for level, time in pairs(rest) do
    each[#each + 1], each[#each + 2] = tonumber(level), delay_until(time)
  end
  last_item = #items + 1
  items[last_item], paused = each, paused + 64
end
if skipped + count - again >= most_in_flight and again >= #lost_ids then
  paused = paused + 128
end
return { delivery, delay or false, (has_ttl and paused + 2 or paused) + solo, #acked_ids, unpack(items) }
