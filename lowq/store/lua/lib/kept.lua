-- What a shard keeps of jobs beyond their end: of queues with `keep_finished`, whose reports cite a delivery as
-- "delivery keep form node": for how many milliseconds; "text" when errors are UTF-8, else "data"; and who reports.
--   finished         HASH: id -> "finished_at seconds payloads node". What finished since the key was made: it is
--   finished:before  replaced when it is older than `keep`, or has 5,000 ids. So an id is kept for `keep` at least,
--                    unless more finish meanwhile, and nothing has to walk through what is too old.
-- The latest attempts of an id that failed are behind its error, in `errors` and `morgue:errors`, and go where that goes:
-- attempts, oldest first, each "time seconds node bytes\n" and so many bytes of its error; eight digits, how many bytes
-- that are; and '\0attempts'.

-- A delivery as reports cite it: its number, as text, and what is to be kept, or nil.
local function read_cited(cited)
  if not string.find(cited, ' ', 1, true) then
    return cited
  end
  local delivery, keep, form, node = string.match(cited, '^(%S+) (%d+) (%a+) (%S+)$')
  return delivery, { milliseconds = tonumber(keep), is_text = form == 'text', node = node }
end

-- Seconds for which an id has been in flight, by its record.
local function seconds_in_flight(record, now)
  local taken_at = tonumber(string.match(record, '^%S+ +%S+ %S+ %S+ (%S+)') or '')
  return math.max(now - (taken_at or now), 0)
end

-- The entry in `finished` of an id that is acknowledged; its payloads are still there.
local function describe_finished(prefix, id, record, now, kept)
  -- A key of another type goes with the job: what is kept must not stop an acknowledgement.
  local count = has_inline(record) and 1 or tonumber((redis.pcall('ZCARD', prefix .. 'taken:payloads:' .. id))) or 0
  return string.format('%.3f %.3f %d %s', now, seconds_in_flight(record, now), count, kept.node)
end

-- Asks for the keys before the first write, see `touch`. Returns how many ids there are.
local function touch_finished(prefix)
  redis.call('EXISTS', prefix .. 'finished:before')
  return redis.call('HLEN', prefix .. 'finished')
end

-- Writes entries: id, entry, id... `count`: of `touch_finished`.
local function write_finished(prefix, entries, count, kept)
  local key, before = prefix .. 'finished', prefix .. 'finished:before'
  local left = count > 0 and redis.call('PTTL', key) or 0
  if count > 0 and (count >= 5000 or left <= kept.milliseconds or left > 2 * kept.milliseconds) then
    redis.call('UNLINK', before)
    redis.call('RENAME', key, before)
    redis.call('PEXPIRE', before, kept.milliseconds)
    count = 0
  end
  redis.call('HSET', key, unpack(entries))
  if count == 0 then
    redis.call('PEXPIRE', key, 2 * kept.milliseconds)
  end
end

-- The attempts behind an error: their text, '' where there are none.
local function attempts_of(text)
  if not text or string.sub(text, -9) ~= '\0attempts' then
    return ''
  end
  local size = tonumber(string.match(string.sub(text, -17, -10), '^%d+$') or '') or 0
  return size > 0 and size <= #text - 17 and string.sub(text, -17 - size, -18) or ''
end

local function without_attempts(text)
  local attempts = attempts_of(text)
  return attempts == '' and text or string.sub(text, 1, -18 - #attempts)
end

local function with_attempts(reason, attempts)
  if attempts == '' then
    return reason
  end
  return reason .. attempts .. string.format('%08d', #attempts) .. '\0attempts'
end

-- An error of an id in flight as it is kept: with the attempts before, and this one. Of the error of an attempt that is
-- a text the last line is kept; another one whole, if it is short. `shown`: the error, where that is an earlier one.
local function add_attempt(prefix, id, record, reason, now, kept, shown)
  local brief = #reason <= 1024 and reason or ''
  if kept.is_text then
    -- Not '%s+$', whose time grows with the square of the spaces within.
    local text = string.match(string.sub(reason, -8192), '^.*%S') or ''
    local back = string.find(string.reverse(text), '\n', 1, true)
    text = back and string.sub(text, 1 - back) or text
    brief = #text > 200 and string.gsub(string.sub(text, 1, 200), '[\192-\255][\128-\191]*$', '') or text
  end
  local attempts = attempts_of(redis.call('HGET', prefix .. 'errors', id))
  local starts, position = {}, 1
  while position <= #attempts do
    local _, stop, size = string.find(attempts, '^%S+ %S+ %S+ (%d+)\n', position)
    if not stop then
      attempts, starts = '', {} -- written by somebody else
      break
    end
    starts[#starts + 1] = position
    position = stop + tonumber(size) + 1
  end
  if #starts > 4 then
    attempts = string.sub(attempts, starts[#starts - 3])
  end
  local head = string.format('%.3f %.3f %s %d\n', now, seconds_in_flight(record, now), kept.node, #brief)
  return with_attempts(shown or reason, attempts .. head .. brief)
end
