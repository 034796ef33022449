-- take_permits: counts what a holder has of a limit over all nodes, and gives it more.
--
-- KEYS[1]  the limit; also the channel for those who wait for it
-- ARGV[1]  now: Unix seconds, or '' for the server's clock
-- ARGV[2]  limit: how many permits there are, at once or within `per`
-- ARGV[3]  per: seconds, of a rate; '' of a concurrency
-- ARGV[4]  holder: a queue of a node
-- ARGV[5]  call: grows with each call of the holder; a repeat has the same
-- ARGV[6]  of a concurrency: how many the holder still needs of those that it has; of a rate: what it gives back
--          unused, as "slot count" for each slot, or ''
-- ARGV[7]  want: how many it wants besides; 0: none, and it does not wait any more
-- ARGV[8]  ttl: seconds after which a holder that is silent has nothing
--
-- Reply: {granted, waiting, delay, slot}
--   waiting: how many other holders wait
--   delay: microseconds until it may get one more, when it got less than it wanted; nil when no time is known
--   slot: of a rate, that which the permits count in
--
-- Invariant: of a concurrency, what the holders that were heard of within their ttl have is never more than the limit,
-- as long as none needs more than it was granted. Of a rate, no more permits are granted, and not given back, in any
-- stretch of `per`: they are counted in slots of a 400th of it, each until `per` and one slot after its end, in which
-- they may be used. Who waits longer comes first: as many permits as others wait longer are left for them, until a few
-- seconds after they were to ask again. A repeat changes nothing; whether what was granted of a rate is too old by now
-- is for the holder to judge.
--
--!flags allow-oom
local key, now, limit, per = KEYS[1], read_now(), tonumber(ARGV[2]), tonumber(ARGV[3])
local holder, call, want, ttl = ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[7]), tonumber(ARGV[8])
local patience = 3
local width = per and per / 400
local current = per and math.floor(now / width)

-- call, held, granted, slot; since when it waits, or 0; until when others leave it one; when it asked; ttl
local function parse(record)
  local found = {}
  for word in string.gmatch(record, '%S+') do
    local number = tonumber(word)
    if not number or number ~= number then
      return nil
    end
    found[#found + 1] = number
  end
  return #found == 8 and { call = found[1], held = found[2], granted = found[3], slot = found[4], since = found[5],
    waits_until = found[6], asked = found[7], ttl = found[8] } or nil
end

local used, slots, mine, waiters, gone = 0, {}, nil, {}, {}
local ahead_of_clock = 0
local fields = redis.call('HGETALL', key)
for i = 1, #fields, 2 do
  local kind, name = string.match(fields[i], '^(%a+):(.*)$')
  if kind == 'slot' and per and string.match(name, '^%d+$') then
    local slot, count = tonumber(name), tonumber(string.match(fields[i + 1], '^%d+$')) or 0
    if slot > current then -- the server's clock has stepped back
      gone[#gone + 1] = fields[i]
      ahead_of_clock = ahead_of_clock + count
    elseif slot <= current - 402 then
      gone[#gone + 1] = fields[i]
    else
      slots[slot] = count
    end
    used = used + (slot > current - 402 and count or 0)
  else
    local record = kind == 'holder' and parse(fields[i + 1])
    if not record or math.abs(now - record.asked) >= record.ttl then
      gone[#gone + 1] = fields[i]
    elseif name == holder then
      mine = record
    else
      used = used + record.held
      if record.since > 0 and now < record.waits_until then
        waiters[#waiters + 1] = { since = record.since, name = name }
      end
    end
  end
end
if mine and call <= mine.call then
  return { call == mine.call and mine.granted or 0, #waiters, false, mine.slot }
end

-- Permits that are given back.
local freed, held, changed = 0, 0, {}
if per then
  for slot, count in string.gmatch(ARGV[6], '(%S+) (%S+)') do
    slot = tonumber(slot)
    if slots[slot] then
      local back = math.min(tonumber(count), slots[slot])
      slots[slot], changed[slot] = slots[slot] - back, true
      freed, used = freed + back, used - back
    end
  end
  if ahead_of_clock > 0 then
    slots[current], changed[current] = (slots[current] or 0) + ahead_of_clock, true
  end
else
  held = tonumber(ARGV[6])
  freed = mine and mine.held - held or 0
  used = used + held
end

-- Permits that are granted.
local is_new = not (mine and mine.since > 0 and now < mine.waits_until)
local since = want > 0 and (is_new and now or mine.since) or 0
local ahead = 0
for _, waiter in ipairs(waiters) do
  if waiter.since < since or (waiter.since == since and waiter.name < holder) then
    ahead = ahead + 1
  end
end
local granted = math.max(0, math.min(want, limit - used - ahead))
if granted > 0 then
  used = used + granted
  is_new = true
  since = granted < want and now or 0 -- behind those who wait already
  if per then
    slots[current], changed[current] = (slots[current] or 0) + granted, true
  else
    held = held + granted
  end
end

-- When there is more.
local delay = false
if granted < want and per then
  local missing, order = 1 + ahead - (limit - used), {}
  for slot, count in pairs(slots) do
    if count > 0 then
      order[#order + 1] = slot
    end
  end
  table.sort(order)
  local first = 0 -- when there is one more, be it for who waits longer
  delay = nil
  for _, slot in ipairs(order) do
    if missing > ahead then
      first = math.max((slot + 402) * width - now, 0)
    end
    missing = missing - slots[slot]
    if missing <= 0 then
      delay = math.max((slot + 402) * width - now, 0)
      break
    end
  end
  -- A holder that waits longer may not come or need it: the next look is a second later, not after a whole `per`.
  delay = math.min(delay or per, first + 1)
end

if #gone > 0 then
  redis.call('HDEL', key, unpack(gone))
end
for slot in pairs(changed) do
  local field = string.format('slot:%.0f', slot)
  if slots[slot] > 0 then
    redis.call('HSET', key, field, string.format('%.0f', slots[slot]))
  else
    redis.call('HDEL', key, field)
  end
end
redis.call('HSET', key, 'holder:' .. holder, string.format('%.0f %.0f %.0f %.0f %.17g %.17g %.17g %.17g', call, held,
  granted, current or 0, since, since > 0 and now + (delay or 1) + patience or 0, now, ttl))
redis.call('PEXPIRE', key, string.format('%.0f', 2000 * math.max(per or 0, ttl) + 1000))

local free = limit - used
local gives_up = want == 0 and mine and mine.since > 0 -- what was left for it is for the next
if free > 0 and (freed > granted or gives_up) and #waiters > 0 then
  table.sort(waiters, function(a, b)
    return a.since < b.since or (a.since == b.since and a.name < b.name)
  end)
  local names = {}
  for i = 1, math.min(free, #waiters, 100) do
    names[i] = waiters[i].name
  end
  publish(key, table.concat(names, ' '))
elseif since > 0 and is_new and not per then
  publish(key, '? ' .. holder) -- who has more than it needs is to give it back
end
return { granted, #waiters, delay and math.ceil(delay * 1000000), current or 0 }
