-- acquire: the right to work a shard, for a while; and what a dead owner left in flight waits again.
--
-- KEYS[1]  prefix of the shard
-- ARGV[1]  now: Unix seconds, or '' for the server's clock
-- ARGV[2]  nonce of the caller: one per start of a process
-- ARGV[3]  lease_ttl, milliseconds
-- ARGV[4]  shards_count of the queue
-- ARGV[5]  max_crash_count of the worker
-- ARGV[6]  seed of the jitter, an integer
-- ARGV[7]  '1' when what is in flight is not to be charged: Redis was away lately, the owner may live
-- ARGV[8]  the last fence that the caller had of this shard; 0: none
-- ARGV[9]  of a consumer its session, which its nonce begins with; otherwise '' or missing
-- ARGV[10] '1': the ids of restored jobs are wanted; otherwise '' or missing
-- ARGV[11] 'moves': the caller moves the jobs of a sealed shard to another layout; 'prepared': it is of a layout that a
--          reshard has made, so `prepare_shard` must have come before; otherwise missing
--
-- Reply: {'sealed'} (its jobs belong to another layout) | {'unsealed'} (for 'moves': it is to be sealed first) |
-- {'fed'} (not all that belong to it have come: `open_shard` says so then; or it is not there, see ARGV[11]) |
-- {'held', PTTL in ms} | {'resumed', fence of the token, fence} | {'adopted', fence} |
-- {'acquired', fence, restored, poisoned id...} | {'restoring', 0, restored, poisoned id...} (call again)
--   restored: how many jobs waited again; with ARGV[10] a list of their ids. The last of the poisoned ids may be a list
--   of ids that were cancelled: nothing of these is left. The token is nonce .. ':' .. fence. A lease that is resumed
--   keeps its token, under which the caller reports what it has in hand; what it takes from then on has a higher fence.
-- Errors: SHARDSCOUNT n: it was made for n shards.
--
-- A call restores at most 100 jobs, or about 500 payloads that join others: it must not hold Redis for long. While any
-- is left in flight nobody gets the lease: nothing is handed out before all that comes first waits again. Any process
-- may make the next call. The first one ends the right of the old owner to resume its lease, as some of its jobs wait.
--
-- What an owner left behind that stopped in the middle of it (`surrender`) waits again uncharged, twice in a row. From
-- the third time on it counts as a crash: a job that never ends in time must not be repeated for ever.
--
-- A consumer that comes back with the session of the last owner, which has detached, adopts what that one left in
-- flight: it stays so, and whoever has the receipts of these jobs may report them. Of one that died nobody has them.
-- The fence grows, so the other one is refused should it still live.
--
-- Who holds a shard when it is sealed keeps it until what is in flight has ended. Then nobody gets it but who moves its
-- jobs.
--
-- A failover to a replica that was behind may lose that a shard was opened (`open_shard`), and that the jobs of others
-- have come to it. So nobody gets it who only remembers that the reshard has ended: the shards are asked first.
--
-- Invariant: one owner at a time, also when Redis evicted the key of a lease. Each reply with a fence has a higher one
-- than all before, also after Redis lost data, as it is at least the server's time in microseconds: so a repeat, or a
-- call that arrives late, only makes the next fence higher. Who resumes can't know whether others had the shard
-- meanwhile: a failover may have lost all that they wrote, but not what the world saw under their fence. Nothing is in
-- flight that the owner doesn't know of.
--
--!flags allow-oom
local prefix, nonce, ttl = KEYS[1], ARGV[2], tonumber(ARGV[3])
local key_lease, key_meta = prefix .. 'lease', prefix .. 'meta'
local session = ARGV[9] ~= '' and ARGV[9]
local meta = redis.call('HMGET', key_meta, 'shards_count', 'fence', 'owner', 'uncharged', 'lease_ttl', 'detached',
  'features', 'sealed', 'fed', 'clock', 'pushed', 'resumed_fence')
local fence, owner, owner_uncharged = tonumber(meta[2]) or 0, meta[3], meta[4]
-- Without these nothing was ever pushed to it: it was leased by a caller with a wrong number.
if meta[1] and meta[1] ~= ARGV[4] and (meta[8] or meta[9] or meta[10] or meta[11]) then
  return redis.error_reply('SHARDSCOUNT ' .. meta[1])
end

local now = read_now()
local holder = redis.call('GET', key_lease) or restore_lease(prefix, now)
local own = owner == nonce
if (meta[9] and ARGV[11] ~= 'moves') or (not meta[1] and ARGV[11] == 'prepared') then
  return { 'fed' }
elseif ARGV[11] == 'moves' and not meta[8] then
  return { 'unsealed' }
elseif meta[8] and ARGV[11] ~= 'moves'
  and not (own and holder and string.sub(holder, 1, #nonce + 1) == nonce .. ':') then
  return { 'sealed' }
elseif meta[9] then
  end_feeding(key_meta, 0)
end
local adopts = session and owner and owner ~= nonce and string.sub(owner, 1, #session) == session
  and meta[6]
if holder and not adopts and string.sub(holder, 1, #nonce + 1) ~= nonce .. ':' then
  -- A lease never has more than its whole time left, unless the server's clock stepped back: then a dead owner's
  -- would last for as long as the step. A living owner renews it in time.
  local left, whole = redis.call('PTTL', key_lease), tonumber(meta[5])
  if whole and left > whole then
    redis.call('PEXPIRE', key_lease, whole)
    redis.call('HSET', key_meta, 'leased_until', now + whole / 1000)
    left = whole
  end
  return { 'held', left }
end

local last_fence = math.max(fence, tonumber(meta[12]) or 0, tonumber(ARGV[8]))
local next_fence = string.format('%.0f', math.max(last_fence + 1, math.floor(now * 1000000)))

-- Its own lease ran out without another owner since that Redis knows of, or the reply of the call that got it was lost.
-- Jobs in flight stay so: the caller reports those that it has in hand, and its next take hands out the others again.
if own then
  local text = string.format('%.0f', fence)
  if session then
    redis.call('SET', prefix .. 'consumer', '1', 'PX', ttl)
  end
  redis.call('SET', key_lease, nonce .. ':' .. text, 'PX', ttl)
  redis.call('HDEL', key_meta, 'uncharged')
  redis.call('HSET', key_meta, 'lease_ttl', ARGV[3], 'leased_until', now + ttl / 1000, 'shards_count', ARGV[4],
    'resumed_fence', next_fence)
  return { 'resumed', text, next_fence }
end

-- The caller is the owner from now on. Returns the fence.
local function grant()
  redis.call('HSET', key_meta, 'fence', next_fence, 'owner', nonce, 'shards_count', ARGV[4], 'lease_ttl', ARGV[3],
    'leased_until', now + ttl / 1000)
  redis.call('SET', key_lease, nonce .. ':' .. next_fence, 'PX', ttl)
  if session then
    redis.call('SET', prefix .. 'consumer', '1', 'PX', ttl)
  end
  redis.call('HDEL', key_meta, 'uncharged', 'detached', 'resumed_fence')
  return next_fence
end

if adopts then
  return { 'adopted', grant() }
end

-- At random, as neither an order nor a cursor of them is kept.
local records = redis.call('HRANDFIELD', prefix .. 'taken', 100, 'WITHVALUES') or {}
local ids = {}
for i = 1, #records, 2 do
  ids[#ids + 1] = records[i]
  -- Before the first write: a foreign record must not leave the rest half done.
  local _, _, retry_count = parse_taken(records[i + 1])
  if not retry_count then
    return redis.error_reply('ERR the record of an id in `taken` is none of lowq; `lowq doctor` names it')
  end
end
if #ids > 0 then
  check_types(prefix)
end
touch_payloads(prefix, ids, meta[7])

-- '2': an earlier call has found that nothing is to be charged.
local is_uncharged = ARGV[7] == '1' or owner == nonce or owner_uncharged == '2'

-- A job that outlasts the end of its owner. Returns whether that goes uncharged.
local function leave_uncharged(id)
  local crashes, uncharged = read_crashes(prefix, id)
  if uncharged < 2 then
    write_crashes(prefix, id, crashes, uncharged + 1)
    return true
  end
end

local restored, poisoned, cancelled, done = {}, {}, {}, 0
local full = 2 ^ 52 -- a job that is begun is restored whole, so the room never ends within one
local room = { payloads = full, bytes = full }
math.randomseed(tonumber(ARGV[6]))
while done < #ids and room.payloads > full - 500 and room.bytes > full - 1048576 do
  done = done + 1
  local id, record = ids[done], records[2 * done]
  if uses(meta[7], 'cancelled') and mark_in(record) == 'x' then
    drop_cancelled(prefix, id, meta[7])
    cancelled[#cancelled + 1] = id
  elseif is_uncharged or (owner_uncharged and leave_uncharged(id)) then
    put_back(prefix, id, record, now, nil, meta[7], room)
    restored[#restored + 1] = id
  elseif crash(prefix, id, record, now, tonumber(ARGV[5]), 0.05 + math.random() * 0.45, meta[7], room) then
    poisoned[#poisoned + 1] = id
  else
    restored[#restored + 1] = id
  end
end
announce_room(prefix, meta[7])

local reply
if done > 0 and redis.call('EXISTS', prefix .. 'taken') == 1 then
  redis.call('DEL', key_lease) -- an earlier one of the caller's, if it is there
  redis.call('HDEL', key_meta, 'owner', 'detached')
  if is_uncharged then
    redis.call('HSET', key_meta, 'uncharged', '2')
  end
  reply = { 'restoring', 0 }
else
  reply = { 'acquired', grant() }
end
reply[3] = ARGV[10] == '1' and restored or #restored
for _, id in ipairs(poisoned) do
  reply[#reply + 1] = id
end
if #cancelled > 0 then
  reply[#reply + 1] = cancelled
end
return reply
