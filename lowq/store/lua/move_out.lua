-- move_out: the next jobs of a sealed shard that are to be moved, when those of the step before have been.
--
-- KEYS[1]  prefix of the shard
-- ARGV[1]  now: not used; every script has it first
-- ARGV[2]  token of the lease
-- ARGV[3]  done: the step whose jobs are in the other layout now; 0: none that the caller knows of
--
-- Reply: {step, kind, clock, server_time, server_time_since, features, item...}; after clock texts, '' where there is
-- none, and behind the features the field `scores`, as "scores=explicit". kind says what the items are:
--   waiting    id, score in `due`, then an inline payload as it is, or a list {retry_count, error, solo, crashes,
--              debounced, traces, payload, score, expires, payload, score, expires...}; '' where there is none; an
--              error begins with '='
--   morgue     id, buried_at, then an inline payload or a list {error, '', payload, score...}
--   schedules  schedule, '', {record}
--   rest       name, '', {value}: counters
--   end        no items: all was moved. From then on the shard is `moved`
-- Errors: LEASELOST.
--
-- Invariant: nothing else changes a sealed shard, and how far a step reaches is kept in `page` before anybody learns of
-- it: so a step has the same jobs whenever it is asked for, and they are deleted when the caller says that this very
-- step was done, once. Steps are counted for good. An id with more than fits comes in several steps, lowest scores
-- first, each time with all that is known of it.
--
--!flags allow-oom
local prefix, token, done = KEYS[1], ARGV[2], tonumber(ARGV[3])
local key_meta = prefix .. 'meta'

-- The bounds of a step: ids, and bytes of payloads, each of which counts 100 on top of its own.
local most_ids, most_bytes, overhead = 250, 262144, 100
local counters = { 'pushed', 'processed', 'failed', 'buried', 'expired', 'released', 'kicked', 'deleted', 'cancelled' }
local places = { waiting = 'payloads', morgue = 'morgue:payloads' }
local sets = { waiting = prefix .. 'due', morgue = prefix .. 'morgue' }

local lost = check_lease(prefix, token)
if lost then
  return lost
end
local meta = redis.call('HMGET', key_meta, 'sealed', 'moved', 'step', 'page', 'features', 'clock', 'server_time',
  'server_time_since', 'scores')
if not meta[1] then
  return redis.error_reply('ERR the shard is not sealed')
end
local features = meta[5]
local step = tonumber(meta[3] or '') or 1
local has_ttl, has_traces = uses(features, 'ttl'), uses(features, 'traces')
local is_debounced = uses(features, 'debounce')
local special = redis.call('EXISTS', prefix .. 'retries', prefix .. 'errors', prefix .. 'solo',
  prefix .. 'crashes') > 0

local function read_page(page)
  local kind, ids, payloads = string.match(page, '^(%a+) (%d+) (%d+)$')
  return kind, tonumber(ids), tonumber(payloads)
end

local function schedules_of(count)
  local names = redis.call('HKEYS', prefix .. 'schedules')
  table.sort(names)
  return { unpack(names, 1, math.min(count, #names)) }
end

-- Removes the items of a page.
local function delete_page(page)
  local kind, count, part = read_page(page)
  if kind == 'schedules' then
    redis.call('HDEL', prefix .. 'schedules', unpack(schedules_of(count)))
    return
  elseif kind == 'rest' then
    redis.call('HDEL', key_meta, unpack(counters))
    return
  end
  local ids = redis.call('ZRANGE', sets[kind], 0, count - 1)
  local place = prefix .. places[kind]
  touch(prefix, { places[kind] .. ':' }, ids)
  if has_ttl then
    touch(prefix, { 'expires:' }, ids)
  end
  if has_traces then
    touch(prefix, { 'traces:' }, ids)
  end
  if part > 0 then
    local key, id = place .. ':' .. ids[1], ids[1]
    if has_ttl and kind == 'waiting' then
      local payloads = redis.call('ZRANGE', key, 0, part - 1)
      for start = 1, #payloads, 1000 do
        redis.call('ZREM', prefix .. 'expires:' .. id, unpack(payloads, start, math.min(start + 999, #payloads)))
      end
      index_expiry(prefix, id)
    end
    redis.call('ZREMRANGEBYRANK', key, 0, part - 1)
    return
  end
  if redis.call('HDEL', place, unpack(ids)) < #ids then
    redis.call('UNLINK', unpack(keys_of(place, ':', ids)))
  end
  redis.call('ZREMRANGEBYRANK', sets[kind], 0, count - 1)
  if kind == 'morgue' then
    redis.call('HDEL', prefix .. 'morgue:errors', unpack(ids))
    return
  end
  if special then
    forget(prefix, unpack(ids))
  end
  if has_ttl then
    redis.call('ZREM', prefix .. 'expires', unpack(ids))
    redis.call('UNLINK', unpack(keys_of(prefix, 'expires:', ids)))
  end
  if is_debounced then
    redis.call('ZREM', prefix .. 'debounced', unpack(ids))
  end
  if has_traces then
    forget_traces(prefix, 'traces:', ids)
  end
end

local page = meta[4]
if page and done == step then
  delete_page(page)
  if read_page(page) == 'rest' then -- which comes last
    meta[2] = '1'
    redis.call('HSET', key_meta, 'moved', 1)
    -- Repeats of pushes that came in before are still known for a while.
    redis.call('EXPIRE', prefix .. 'pushed', 3600)
    redis.call('EXPIRE', prefix .. 'repeated', 3600)
    redis.call('UNLINK', prefix .. 'retries', prefix .. 'errors', prefix .. 'solo', prefix .. 'crashes',
      prefix .. 'expires', prefix .. 'debounced', prefix .. 'morgue:errors', prefix .. 'finished',
      prefix .. 'finished:before')
  end
  step, page = step + 1, nil
  redis.call('HSET', key_meta, 'step', string.format('%.0f', step))
  redis.call('HDEL', key_meta, 'page')
end

-- The items of jobs: as many as `count` (false: as fit), of the only one `part` payloads (0: all of them). Returns the
-- items, how many jobs these are, and the payloads of the only one that does not fit whole, or 0.
local function read_jobs(kind, count, part)
  local jobs = redis.call('ZRANGE', sets[kind], 0, (count or most_ids) - 1, 'WITHSCORES')
  local ids, lookups = {}, {}
  for i = 1, #jobs, 2 do
    ids[#ids + 1] = jobs[i]
  end
  if #ids == 0 then
    return {}, 0, 0
  end
  local place = prefix .. places[kind]
  local inlines = redis.call('HMGET', place, unpack(ids))
  local of_waiting = kind == 'waiting'
  lookups.error = of_waiting and special and redis.call('HMGET', prefix .. 'errors', unpack(ids))
    or not of_waiting and redis.call('HMGET', prefix .. 'morgue:errors', unpack(ids))
  if of_waiting and special then
    lookups.retries = redis.call('ZMSCORE', prefix .. 'retries', unpack(ids))
    lookups.solo = redis.call('SMISMEMBER', prefix .. 'solo', unpack(ids))
    lookups.crashes = redis.call('HMGET', prefix .. 'crashes', unpack(ids))
  end
  if of_waiting and is_debounced then
    lookups.debounced = redis.call('ZMSCORE', prefix .. 'debounced', unpack(ids))
  end
  if of_waiting and has_traces then
    lookups.traces = redis.call('MGET', unpack(keys_of(prefix, 'traces:', ids)))
  end
  local function found(name, i)
    return lookups[name] and lookups[name][i] or ''
  end

  -- Returns a job as the reply has it; its bytes; and how many of its payloads these are if `room` is too small.
  local function describe(i, id, room)
    local item
    local reason = lookups.error and lookups.error[i] and '=' .. lookups.error[i] or ''
    if of_waiting then
      local solo = lookups.solo and lookups.solo[i] == 1 and '1' or ''
      item = { found('retries', i), reason, solo, found('crashes', i), found('debounced', i), found('traces', i) }
    else
      item = { reason, '' }
    end
    local size = #reason
    if inlines[i] then
      local is_plain = true
      for j = 1, #item do
        is_plain = is_plain and item[j] == ''
      end
      size = size + #inlines[i] + overhead
      if is_plain then
        return inlines[i], size
      end
      local payload, score, expires = split_inline(inlines[i])
      item[#item + 1], item[#item + 2] = payload, score
      if of_waiting then
        item[#item + 1] = expires or ''
      end
      return item, size
    end
    local times = prefix .. 'expires:' .. id
    local limit = part > 0 and part or (count and math.huge) or 2000
    local set = {}
    local number, read, all = read_set(set, place .. ':' .. id, limit, room, overhead)
    for j = 1, #set, 2 do
      item[#item + 1], item[#item + 2] = set[j], set[j + 1]
      if of_waiting then
        item[#item + 1] = has_ttl and redis.call('ZSCORE', times, set[j]) or ''
      end
    end
    return item, size + read, not count and not all and number or nil
  end

  local items, bytes, taken = {}, 0, 0
  -- Most jobs are one payload, and nothing else is known of them.
  local are_plain = of_waiting and not (special or has_traces or is_debounced)
  for i, id in ipairs(ids) do
    local item, size, part_of_it
    if are_plain and inlines[i] then
      item, size = inlines[i], #inlines[i] + overhead
    else
      item, size, part_of_it = describe(i, id, count and math.huge or most_bytes - bytes)
    end
    if not count and taken > 0 and (part_of_it or bytes + size > most_bytes) then
      break -- a job that does not fit whole comes alone, in steps of its own
    end
    items[3 * taken + 1], items[3 * taken + 2], items[3 * taken + 3] = id, jobs[2 * i], item
    taken, bytes = taken + 1, bytes + size
    if part_of_it then
      return items, 1, part_of_it
    end
  end
  return items, taken, 0
end

local function read_items(kind, count, part)
  if kind == 'schedules' then
    local names, items = schedules_of(count or 100), {}
    for _, name in ipairs(names) do
      items[#items + 1], items[#items + 2] = name, ''
      items[#items + 1] = { redis.call('HGET', prefix .. 'schedules', name) }
    end
    return items, #names, 0
  elseif kind == 'rest' then
    local items = {}
    for i, value in ipairs(redis.call('HMGET', key_meta, unpack(counters))) do
      if value then
        items[#items + 1], items[#items + 2], items[#items + 3] = counters[i], '', { value }
      end
    end
    return items, 1, 0
  end
  return read_jobs(kind, count, part)
end

local kind, items, count, part = 'end', {}, 0, 0
if page then
  kind, count, part = read_page(page)
  items = read_items(kind, count, part)
  redis.call('HSET', key_meta, 'page', page) -- for `WAIT`, see seal.lua
elseif not meta[2] then
  for _, each in ipairs({ 'schedules', 'waiting', 'morgue' }) do
    items, count, part = read_items(each, nil, 0)
    if count > 0 then
      kind = each
      break
    end
  end
  if kind == 'end' then
    kind, count, part = 'rest', 1, 0
    items = read_items(kind)
  end
  redis.call('HSET', key_meta, 'page', string.format('%s %d %d', kind, count, part))
end
local words = (features or '') .. (meta[9] and ' scores=' .. meta[9] or '')
local reply = { step, kind, meta[6] or '', meta[7] or '', meta[8] or '', words }
for i = 1, #items do
  reply[6 + i] = items[i]
end
return reply
