-- move_in: jobs that belong to a shard of a new layout come to it: those of one step of `move_out`.
--
-- KEYS[1]  prefix of the shard
-- ARGV[1]  now: Unix seconds, or '' for the server's clock
-- ARGV[2]  from: the number of the shard that they come from
-- ARGV[3]  step
-- ARGV[4]  kind of the items, as move_out has it
-- ARGV[5]  clock of that shard (Unix seconds), '' = it has none
-- ARGV[6]  features of that shard, or '', as move_out has them
-- ARGV[7+] items: id, score, n, then n texts: an inline payload (n = 1 of jobs), or what move_out has in a list
--
-- Reply: 1 (they have come), 0 (they had come before: nothing changed), 2 (the shard is not there, or open and does not
-- know which steps have come: nothing changed, and they must not be taken for moved).
--
-- Invariant: of each step the jobs come once, whoever repeats it and however late: the last step that has come from a
-- shard is remembered, and once this one is open the last of all shards. What comes in a later one to an open shard was
-- pushed after a failover had lost that its shard was sealed. What comes was there before what was pushed to this shard
-- meanwhile: its perform_at, retry_count and error stay, of two priorities the more urgent; payloads merge by the
-- queue's policy, an equal one keeps the lowest score and the earlier end of its ttl. What has expired is left behind,
-- and counted.
--
--!flags allow-oom
local prefix, from, step, kind = KEYS[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]
local key_meta = prefix .. 'meta'
local meta = redis.call('HMGET', key_meta, 'fed', 'moved:' .. from, 'clock', 'features', 'came')
if not (meta[1] or meta[5]) then
  return 2
elseif math.max(tonumber(meta[2] or '') or 0, tonumber(meta[5] or '') or 0) >= step then
  redis.call('HSET', key_meta, meta[5] and 'came' or 'moved:' .. from, meta[5] or meta[2]) -- for `WAIT`, see seal.lua
  return 0
end
check_types(prefix)
local now, features = read_now(), meta[4]

local ids, scores, extras = {}, {}, {} -- of each: "score payload", or a list
local at, last = 7, 0
while at <= #ARGV do
  local count = tonumber(ARGV[at + 2])
  last = last + 1
  ids[last], scores[last] = ARGV[at], ARGV[at + 1]
  extras[last] = count == 1 and ARGV[at + 3] or { unpack(ARGV, at + 3, at + 2 + count) }
  at = at + 3 + count
end
local place = kind == 'morgue' and 'morgue:payloads' or 'payloads'
local is_of_jobs = kind == 'waiting' or kind == 'morgue'
if is_of_jobs then
  touch(prefix, { place .. ':' }, ids)
  if uses(features, 'ttl') or uses(ARGV[6], 'ttl') then
    touch(prefix, { 'expires:' }, ids)
  end
  if uses(features, 'traces') or uses(ARGV[6], 'traces') then
    touch(prefix, { 'traces:' }, ids)
  end
end
place = prefix .. place
local inlines = is_of_jobs and redis.call('HMGET', place, unpack(ids)) or {}

for word in string.gmatch(ARGV[6], '%S+') do
  local kind_of_scores = string.match(word, '^scores=(.+)$')
  if kind_of_scores == 'explicit' then
    redis.call('HSET', key_meta, 'scores', kind_of_scores)
  elseif kind_of_scores then
    redis.call('HSETNX', key_meta, 'scores', kind_of_scores)
  elseif word ~= 'full' then
    features = note_feature(prefix, features, word, true)
  end
end
local has_ttl, is_latest = uses(features, 'ttl'), uses(features, 'latest')
local expired = 0

local function add_waiting(id, payload, score, expires)
  if is_latest then
    local present, its_score = get_highest(place, id)
    if present and present ~= payload and tonumber(its_score) >= tonumber(score) then
      return -- that one came later
    end
    if has_ttl then
      add_latest_expiring(prefix, id, payload, score, nil, expires)
    else
      add_latest(place, id, payload, score)
    end
  elseif has_ttl then
    add_expiring(prefix, id, payload, score, redis.call('HGET', place, id), expires)
  else
    add_payload(place, id, payload, score)
  end
end

-- The waiting job of an id joins the one that waits here. `extra` is as move_out has it, from its 7th text on payloads.
local function join(id, score, extra)
  local lives, payloads = false, {}
  if has_ttl then
    for i = 7, #extra, 3 do
      payloads[#payloads + 1] = extra[i]
    end
    expire_joined(prefix, id, payloads, now, is_latest)
  end
  for i = 7, #extra, 3 do
    local expires = extra[i + 2] ~= '' and extra[i + 2] or nil
    if expires and tonumber(expires) <= now then
      expired = expired + 1
    else
      add_waiting(id, extra[i], extra[i + 1], expires)
      lives = true
    end
  end
  if not lives then
    return
  end
  local level, perform_at = split_score(score)
  redis.call('ZADD', prefix .. 'due', score_again(prefix, id, level, level > 0 and perform_at or score), id)
  if extra[1] ~= '' then
    redis.call('ZADD', prefix .. 'retries', extra[1], id)
  end
  if extra[2] ~= '' then
    redis.call('HSET', prefix .. 'errors', id, string.sub(extra[2], 2))
  end
  if extra[3] ~= '' then
    redis.call('SADD', prefix .. 'solo', id)
  end
  if extra[4] ~= '' then
    redis.call('HSET', prefix .. 'crashes', id, extra[4])
  end
  if extra[5] ~= '' then
    redis.call('ZADD', prefix .. 'debounced', extra[5], id)
  else
    end_debounce(prefix, id, features)
  end
  if extra[6] ~= '' then
    local key = prefix .. 'traces:' .. id
    write_traces(key, join_traces(extra[6], redis.call('MGET', key)[1] or ''))
  end
end

local function join_morgue(id, score, extra)
  for i = 3, #extra, 2 do
    add_payload(place, id, extra[i], extra[i + 1])
  end
  redis.call('ZADD', prefix .. 'morgue', score, id)
  if extra[1] ~= '' then
    redis.call('HSET', prefix .. 'morgue:errors', id, string.sub(extra[1], 2))
  end
end

if kind == 'waiting' then
  -- Ids that do not wait here, as most, are written together.
  local present = redis.call('ZMSCORE', prefix .. 'due', unpack(ids))
  local fresh, due = {}, {}
  for i, id in ipairs(ids) do
    local extra = extras[i]
    local is_inline = type(extra) == 'string'
    if is_inline and not present[i] and not inlines[i] and not (has_ttl and expiry_in(extra)) then
      fresh[#fresh + 1], fresh[#fresh + 2] = id, extra
      due[#due + 1], due[#due + 2] = scores[i], id
    elseif is_inline then
      local payload, score, expires = split_inline(extra)
      join(id, scores[i], { '', '', '', '', '', '', payload, score, expires or '' })
    else
      join(id, scores[i], extra)
    end
  end
  if #fresh > 0 then
    redis.call('HSET', place, unpack(fresh))
    redis.call('ZADD', prefix .. 'due', unpack(due))
  end
elseif kind == 'morgue' then
  for i, id in ipairs(ids) do
    local extra = extras[i]
    if type(extra) == 'string' then
      local payload, score = split_inline(extra)
      extra = { '', '', payload, score }
    end
    join_morgue(id, scores[i], extra)
  end
elseif kind == 'schedules' then
  for i, name in ipairs(ids) do
    redis.call('HSET', prefix .. 'schedules', name, extras[i])
  end
else
  for i, name in ipairs(ids) do
    redis.call('HINCRBY', key_meta, name, extras[i])
  end
end

add_to_meta(prefix, 'expired', expired)
redis.call('HSET', key_meta, 'moved:' .. from, ARGV[3])
if not meta[1] then
  wake(prefix, 0) -- it is worked already
end
if ARGV[5] ~= '' and tonumber(ARGV[5]) > (tonumber(meta[3] or '') or 0) then
  redis.call('HSET', key_meta, 'clock', ARGV[5])
end
return 1
