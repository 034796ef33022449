-- take_permits: counts what a holder has of a limit over all nodes, and gives it more.
--
-- KEYS[1]  the limit; also the channel for those who wait for it
-- ARGV[1]  now: Unix seconds, or '' for the server's clock
-- ARGV[2]  limit: how many permits there are, at once or within `per`
-- ARGV[3]  per: seconds, of a rate; '' of a concurrency
-- ARGV[4]  holder: a queue of a node
-- ARGV[5]  call: grows with each call of the holder; a repeat has the same
-- ARGV[6]  of a concurrency, and of a rate with ARGV[9]: how many the holder still needs of those that it has; of any
--          other rate: what it gives back unused, as "slot count" for each slot, or ''
-- ARGV[7]  want: how many it wants besides; 0: none, and it does not wait any more
-- ARGV[8]  ttl: seconds after which a holder that is silent has nothing
-- ARGV[9]  of a rate whose permits count later than when they are granted: how many of those that the holder had,
--          besides those that it still needs, count from now on; not there: they count when they are granted
--
-- Reply: {granted, waiting, delay, slot, deferred}
--   waiting: how many other holders wait
--   delay: microseconds until it may get one more, when it got less than it wanted; nil when no time is known
--   slot: of a rate, that which the permits count in
--   deferred: microseconds for which nobody gets any, as `defer_limit` says; nil: as many as there are
--
-- Invariant: of a concurrency, what the holders that were heard of within their ttl have is never more than the limit,
-- as long as none needs more than it was granted. Of a rate, no more permits are granted, and not given back, in any
-- stretch of `per`: they are counted in slots of a 400th of it, each until `per` and one slot after its end, in which
-- they may be used. Those that count later are held until then, and when their holder is silent for its ttl, they count
-- from the end of that. Who waits longer comes first: as many permits as others wait longer are left for them, until a
-- few seconds after they were to ask again. A repeat changes nothing; whether what was granted of a rate is too old by
-- now is for the holder to judge.
--
--!flags allow-oom
local key, now, limit, per = KEYS[1], read_now(), tonumber(ARGV[2]), tonumber(ARGV[3])
local holder, call, want, ttl = ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[7]), tonumber(ARGV[8])
local counted = per and tonumber(ARGV[9])
local patience = 3
local width = per and per / 400
local current = per and math.floor(now / width)

-- A record of a holder: call, held, granted, slot; since when it waits, or 0; until when others leave it one; when it
-- asked; ttl. There may be thousands: one match for each, and no table.
local shape = string.gsub('^N (N) N N (N) (N) (N) (N)$', 'N', '[%%d.e+-]+')
local function parse(record)
  local held, since, waits_until, asked, its_ttl = string.match(record, shape)
  return tonumber(held), tonumber(since), tonumber(waits_until), tonumber(asked), tonumber(its_ttl)
end

local used, slots, mine, waiters, gone, silent = 0, {}, nil, {}, {}, {}
local my_field = 'holder:' .. holder
local ahead_of_clock, deferred = 0, false
local fields = redis.call('HGETALL', key)
for i = 1, #fields, 2 do
  local field = fields[i]
  if per and string.match(field, '^slot:%d+$') then
    local slot, count = tonumber(string.sub(field, 6)), tonumber(string.match(fields[i + 1], '^%d+$')) or 0
    if slot > current then -- the server's clock has stepped back
      gone[#gone + 1] = field
      ahead_of_clock = ahead_of_clock + count
    elseif slot <= current - 402 then
      gone[#gone + 1] = field
    else
      slots[slot] = count
    end
    used = used + (slot > current - 402 and count or 0)
  elseif field == 'deferred' then
    deferred = read_deferral(key, fields[i + 1], now)
    gone[#gone + 1] = not deferred and 'deferred' or nil
  else
    local held, since, waits_until, asked, its_ttl
    if string.sub(field, 1, 7) == 'holder:' then
      held, since, waits_until, asked, its_ttl = parse(fields[i + 1])
    end
    if not (held and since and waits_until and asked and its_ttl) then
      gone[#gone + 1] = field
    elseif math.abs(now - asked) >= its_ttl then
      gone[#gone + 1] = field
      silent[#silent + 1] = { held = held, asked = asked, ttl = its_ttl }
    elseif field == my_field then
      local numbered, granted, slot = string.match(fields[i + 1], '^(%S+) %S+ (%S+) (%S+)')
      mine = { held = held, since = since, waits_until = waits_until, call = tonumber(numbered) or 0,
        granted = tonumber(granted) or 0, slot = tonumber(slot) or 0 }
    else
      used = used + held
      if since > 0 and now < waits_until then
        waiters[#waiters + 1] = { since = since, name = string.sub(field, 8) }
      end
    end
  end
end
local deferred_for = deferred and math.ceil(deferred * 1000000)
if mine and call <= mine.call then
  return { call == mine.call and mine.granted or 0, #waiters, false, mine.slot, deferred_for }
end

-- Permits that are given back.
local freed, held, changed = 0, 0, {}
for _, record in ipairs(per and silent or {}) do
  local slot, count = math.floor(math.min(record.asked + record.ttl, now) / width), math.min(record.held, limit)
  if count > 0 and slot > current - 402 then
    slots[slot], changed[slot] = (slots[slot] or 0) + count, true
    used = used + count
  end
end
if counted then
  held = tonumber(ARGV[6])
  freed = mine and mine.held - held - counted or 0
  used = used + held + counted
  if counted > 0 then
    slots[current], changed[current] = (slots[current] or 0) + counted, true
  end
elseif per then
  for slot, count in string.gmatch(ARGV[6], '(%S+) (%S+)') do
    slot = tonumber(slot)
    if slots[slot] then
      local back = math.min(tonumber(count), slots[slot])
      slots[slot], changed[slot] = slots[slot] - back, true
      freed, used = freed + back, used - back
    end
  end
else
  held = tonumber(ARGV[6])
  freed = mine and mine.held - held or 0
  used = used + held
end
if per and ahead_of_clock > 0 then
  slots[current], changed[current] = (slots[current] or 0) + ahead_of_clock, true
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
local granted = deferred and 0 or math.max(0, math.min(want, limit - used - ahead))
if granted > 0 then
  used = used + granted
  is_new = true
  since = granted < want and now or 0 -- behind those who wait already
  if per and not counted then
    slots[current], changed[current] = (slots[current] or 0) + granted, true
  else
    held = held + granted
  end
end

-- When there is more.
local delay = false
if granted < want and deferred then
  delay = deferred
elseif granted < want and per then
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

for i = 1, #gone, 1000 do
  redis.call('HDEL', key, unpack(gone, i, math.min(i + 999, #gone)))
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
redis.call('PEXPIRE', key, string.format('%.0f', 2000 * math.max(per or 0, ttl, deferred or 0) + 1000))

local free = limit - used
local gives_up = want == 0 and mine and mine.since > 0 -- what was left for it is for the next
if free > 0 and (freed > granted or gives_up) and #waiters > 0 and not deferred then
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
return { granted, #waiters, delay and math.ceil(delay * 1000000), current or 0, deferred_for }
