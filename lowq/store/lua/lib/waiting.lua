-- Waiting ids: their order, a choice of them, and the wake-up of their owner.

-- Whether an id comes before another among equal scores. Byte by byte: Lua's own `<` goes by the collation of
-- the server's locale.
local function precedes(a, b)
  for i = 1, math.min(#a, #b) do
    local x, y = string.byte(a, i), string.byte(b, i)
    if x ~= y then
      return x < y
    end
  end
  return #a < #b
end

-- Where a position is in a sorted set: how many ids come before it, and whether its own stands there. `below` and
-- `upto` are the upper bounds, without and with the score of the position. The id need not be in the set any more, and
-- a million others may share its score.
local function rank_of(key, below, upto, id)
  local low = redis.call('ZCOUNT', key, '-inf', below)
  local high = redis.call('ZCOUNT', key, '-inf', upto)
  while low < high do
    local middle = math.floor((low + high) / 2)
    local found = redis.call('ZRANGE', key, middle, middle)[1]
    if found == id then
      return middle, true
    elseif precedes(found, id) then
      low = middle + 1
    else
      high = middle
    end
  end
  return low, false
end

-- Which of the waiting ids fit: `when` is '' (any time), 'due' or 'later' than the due_cutoff; `past` is '' (any),
-- 'fresh' or 'failed' (in `retries`). Their times and retry counts may be handed in when they are known already.
-- Returns a list of booleans, one per id. At most a few thousand ids: unpack takes no more.
local function fits(prefix, ids, when, past, due_cutoff, times, counts)
  local result = {}
  if #ids == 0 then
    return result
  end
  if when ~= '' and not times then
    times = redis.call('ZMSCORE', prefix .. 'due', unpack(ids))
  end
  if past ~= '' and not counts then
    counts = redis.call('ZMSCORE', prefix .. 'retries', unpack(ids))
  end
  for i = 1, #ids do
    local fit = true
    if when ~= '' then
      local at = times[i] and select(2, split_score(times[i]))
      fit = at and (at <= due_cutoff) == (when == 'due')
    end
    if past ~= '' then
      fit = fit and (counts[i] and 'failed' or 'fresh') == past
    end
    result[i] = fit
  end
  return result
end

-- The keys of ids.
local function keys_of(prefix, head, ids)
  local keys = {}
  for i, id in ipairs(ids) do
    keys[i] = prefix .. head .. id
  end
  return keys
end

-- In a cluster, touching an absent key of a slot that is being migrated aborts the script there and then, and
-- what it wrote before stays. So one EXISTS asks for every per-id key that a script will need, before its
-- first write: it aborts here, or nowhere.
local function touch(prefix, suffixes, ids)
  for _, suffix in ipairs(suffixes) do
    for start = 1, #ids, 1000 do -- unpack takes some 8,000, and a consumer may have more in flight
      local keys = {}
      for i = start, math.min(start + 999, #ids) do
        keys[#keys + 1] = prefix .. suffix .. ids[i]
      end
      redis.call('EXISTS', unpack(keys))
    end
  end
end

-- Raises an error, before the first write, when one of the shard's own keys has a foreign type. Otherwise
-- the command that met it would end the script half way, and what it wrote before would stay.
local function check_types(prefix)
  for _, name in ipairs({ 'due', 'retries', 'morgue', 'expires', 'debounced' }) do
    redis.call('ZCARD', prefix .. name)
  end
  for _, name in ipairs({ 'payloads', 'morgue:payloads', 'taken', 'errors', 'crashes', 'morgue:errors', 'meta' }) do
    redis.call('HLEN', prefix .. name)
  end
  redis.call('SISMEMBER', prefix .. 'solo', '')
end

-- Publishes a message. A user without that right does without: listeners poll, too, and a call that ended here would
-- leave its writes behind.
local function publish(channel, message)
  redis.pcall('SPUBLISH', channel, message)
end

-- Tells the owner when the shard's head is due. Not while something is in flight with a node: whoever holds that asks
-- for the next due time anyway when it reports the outcome. A consumer may take more meanwhile: it is told always. Its
-- key counts twice, so that one command tells the two apart. `level`: the most urgent priority of what is due then; nil
-- is that it may be any.
local function wake(prefix, delay, level)
  if redis.call('EXISTS', prefix .. 'taken', prefix .. 'consumer', prefix .. 'consumer') ~= 1 then
    local format = (level or 0) > 0 and '%.6f %d' or '%.6f'
    publish(prefix .. 'wake', string.format(format, math.max(delay, 0), level))
  end
end
