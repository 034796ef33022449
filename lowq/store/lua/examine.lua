-- examine: some ids of a shard, and what is wrong with them.
--
-- KEYS[1]  prefix of the shard
-- ARGV[1]  now: not used; every script has it first
-- ARGV[2]  what to go by: a set ('due', 'taken', 'morgue', 'retries', 'errors', 'solo', 'crashes', 'expires',
--          'debounced', 'morgue:errors', 'payloads', 'morgue:payloads'), which is walked through; or 'payloads:',
--          'taken:payloads:', 'morgue:payloads:', 'expires:', 'taken:expires:', 'traces:', 'taken:traces:' for ids that
--          have such a key
-- ARGV[3]  cursor of a set: '0' to begin; '' with ids
-- ARGV[4+] ids, at most 1,000
--
-- Reply: {cursor, looked, id, code, id, code...}
--   cursor: '0' at the end; looked: the ids that were looked at; code: as in lib/integrity.lua
--
-- Invariant: nothing changes. What is said of an id was so at one moment. About 500 ids are looked at.
--
--!flags no-writes
local prefix, what = KEYS[1], ARGV[2]
local delivered = tonumber(redis.call('HGET', prefix .. 'meta', 'delivery') or '') or 0

-- Which keys an entry must have, and in which sets something must be, one of them at least.
local needs_key = { due = 'payloads', taken = 'taken:payloads', morgue = 'morgue:payloads' }
local needs_entry = {
  retries = { 'due' }, errors = { 'due', 'taken' }, solo = { 'due', 'taken' }, crashes = { 'due', 'taken' },
  ['morgue:errors'] = { 'morgue' }, expires = { 'due' }, debounced = { 'due' },
  ['taken:expires:'] = { 'taken' }, ['traces:'] = { 'due' },
  ['taken:traces:'] = { 'taken' },
  payloads = { 'due' }, ['morgue:payloads'] = { 'morgue' },
  ['payloads:'] = { 'due' }, ['taken:payloads:'] = { 'taken' }, ['morgue:payloads:'] = { 'morgue' },
}

-- Many at once: of most nothing is wrong, and that is to be cheap. Returns those that are worth a second look.
local function suspects_of(ids, values)
  local found = {}
  if needs_key[what] then
    local place = prefix .. needs_key[what]
    local inlines = what ~= 'taken' and redis.call('HMGET', place, unpack(ids))
    for i, id in ipairs(ids) do
      local fine = (inlines and inlines[i]) or (not inlines and get_inline(values[i]))
        or redis.call('EXISTS', place .. ':' .. id) == 1
      if fine and what == 'taken' then
        local delivery, perform_at, retry_count = parse_taken(values[i])
        delivery = tonumber(delivery)
        fine = delivery and delivery <= delivered and tonumber(perform_at) and retry_count
      end
      if not fine then
        found[#found + 1] = id
      end
    end
    return found
  end
  local rest, unreadable = ids, {}
  local place = string.match(what, '^(.*payloads):?$')
  if place then
    rest = {}
    for i, id in ipairs(ids) do
      local fine = place == what and begins_with_score(values[i]) or place ~= what and is_readable(prefix, place, id)
      local into = fine and rest or unreadable
      into[#into + 1] = id
    end
  end
  if what == 'expires:' then -- in both
    local due, expires = redis.call('ZMSCORE', prefix .. 'due', unpack(ids)),
      redis.call('ZMSCORE', prefix .. 'expires', unpack(ids))
    for i, id in ipairs(ids) do
      if not (due[i] and expires[i]) then
        found[#found + 1] = id
      end
    end
    return found
  end
  for _, set in ipairs(needs_entry[what]) do
    if #rest > 0 then
      local entries = redis.call(set == 'taken' and 'HMGET' or 'ZMSCORE', prefix .. set, unpack(rest))
      found = {}
      for i, id in ipairs(rest) do
        if not entries[i] then
          found[#found + 1] = id
        end
      end
      rest = found
    end
  end
  for _, id in ipairs(unreadable) do
    rest[#rest + 1] = id
  end
  return rest
end

local cursor, ids, values = '0', {}, {}
if ARGV[3] == '' then
  ids = { unpack(ARGV, 4) }
else
  local command = (what == 'solo' and 'SSCAN')
    or (string.find(' due morgue retries expires debounced ', ' ' .. what .. ' ', 1, true) and 'ZSCAN') or 'HSCAN'
  -- The text of an error takes up to 8 KiB, a payload in flight 4 KiB, and they come along.
  local count = command == 'HSCAN' and what ~= 'crashes' and 100 or 500
  local found = redis.call(command, prefix .. what, ARGV[3], 'COUNT', count)
  cursor = found[1]
  local step = what == 'solo' and 1 or 2
  for i = 1, #found[2], step do
    ids[#ids + 1], values[#values + 1] = found[2][i], found[2][i + 1]
  end
end

-- 500 at a time: unpack takes a few thousand at most, and Redis may return more than it was asked for.
local reply = { cursor, ids }
for start = 1, #ids, 500 do
  local some, with = {}, {}
  for i = start, math.min(start + 499, #ids) do
    some[#some + 1], with[#with + 1] = ids[i], values[i]
  end
  for _, id in ipairs(suspects_of(some, with)) do
    local code = find_integrity_error(prefix, what, id, delivered)
    if code then
      reply[#reply + 1], reply[#reply + 2] = id, code
    end
  end
end
return reply
