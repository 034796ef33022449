-- push: merge payloads into waiting jobs and make their ids due.
--
-- KEYS[1]  prefix of the shard
-- ARGV[1]  now: Unix seconds, or '' for the server's clock
-- ARGV[2]  token: random, one per call
-- ARGV[3]  '1' when this call repeats one whose reply was lost
-- ARGV[4]  shards_count of the queue
-- ARGV[5]  width: how many arguments a job has, 2 to 6; behind it, of a queue that has options which concern pushes,
--          these as words: " merge=append" or " merge=latest" is its policy; " debounce=n max_wait=n" (seconds);
--          " cancel=1": what is in flight of the ids of jobs that are not for later is to end, and waits with them;
--          " capacity=n": ids of the shard that may wait or be taken; " ttl=n" (seconds), " priority=n": of jobs that
--          say none; " ticks=before>after": the jobs are ticks of the schedule that is called like the first of them,
--          and its record in `schedules` changes so; before is empty where there is none;
--          " trace=context": where these jobs come from, see lib/traces.lua; " clock=t" (Unix seconds): what was
--          pushed to the shard that these jobs belonged to before a reshard came before; " anew=1": the registry has
--          just said that the shard is of its queue, even if it is not there
-- ARGV[6]  keep: whole seconds for which the token is to be remembered
-- ARGV[7]  after: the token of the call that must have come before, or ''
-- ARGV[8+] jobs: id, payload, score ('' = the clock), perform_at (Unix seconds, '' = now, '+n' = in n seconds; what is
--          after 2**33 - 1 counts as that), ttl (seconds, '' = it never expires), priority
--          ('0', the most urgent, to '9'; '' = 0); '=' for both: it says none
--
-- Reply: number of jobs accepted; 0: the record of the schedule is another one, and nothing was written.
-- Errors: SHARDSCOUNT n: the queue has n shards; nothing was written. OUTOFTURN token: the call that must have come
-- before did not; nothing was written. SEALED m epoch clock: the jobs belong to a layout of m shards with that epoch,
-- and come after what was pushed here, of which `clock` is the latest (Unix seconds, '' = none): nothing was written.
-- SEALED alone: the shard is not there, as nothing was pushed to it yet, the queue was dropped, or Redis has lost its
-- data; nothing was written.
-- SCORES missing|given position position...: these jobs, counted from 0, have no score, where others of the shard have
-- versions; or a version, where others have the time, which is the score of what has none. Nothing was written.
-- RESHARDING: ticks, whose schedule's record is on its way to this shard; nothing was written.
-- QUEUEFULL position position...: these jobs, counted from 0, don't fit into the capacity;
-- nothing was written but that somebody may wait for room.
--
-- Invariant: every id in `payloads:*` is in `due`. An id that waits already keeps its perform_at and its
-- retry_count, and of two priorities the more urgent; an equal payload its lowest score. With `append` equal payloads
-- stay two: each has a head before it, which is the same for no two of the shard, and grows. With `latest` only the one
-- with the highest score stays. With `debounce` a fresh id that is pushed without a time is due when nothing came for
-- it for so long, and `max_wait` after its first payload at the latest; `debounced` has that moment, as long as it
-- waits so. What is due stays due. A repeat changes nothing when the first call got through, nor does the first call
-- when its repeat got through, also of a shard that was sealed since.
-- Of calls in a sequence none is carried out before the one it comes after. Ticks
-- are pushed and the record of their schedule changes, or neither: each tick is pushed once. The shard's
-- clock never repeats and never steps back. It gives scores, and order to jobs that are due at once, which are not due
-- more than a millisecond after the server's time. Versions and times don't meet in a shard, as times would come
-- last: `scores` of `meta` says which it has. One with times may have versions once it is empty. A score that may be
-- a time in seconds, or is beyond 2**40, goes with both, and so do ticks.
local prefix, token, width = KEYS[1], ARGV[2], string.byte(ARGV[5]) - 48
local accepted = (#ARGV - 7) / width
local options = {}
local has_options = #ARGV[5] > 1 -- what most queues have not costs them no more than to ask for this
if has_options then
  for name, value in string.gmatch(ARGV[5], ' ([^ =]+)=(%S+)') do
    options[name] = value
  end
end
local is_append, is_latest, debounced = options.merge == 'append', options.merge == 'latest', nil

local meta = redis.call('HMGET', prefix .. 'meta', 'shards_count', 'clock', 'slot', 'repeated', 'server_time',
  'server_time_since', 'features', 'pushed', 'sealed', 'fed', 'scores')
--!rarely add_expiring add_latest_expiring add_latest raise_levels note_feature expire_pushed sweep_expired
--!rarely read_pushed_traces add_traces mark_in mark_taken
local add_expiring, add_latest_expiring, add_latest, raise_levels, note_feature, expire_pushed, sweep_expired
local read_pushed_traces, add_traces, mark_in, mark_taken
if meta[7] or has_options or width == 6 then
  add_expiring, add_latest_expiring, add_latest, raise_levels, note_feature, expire_pushed, sweep_expired,
    read_pushed_traces, add_traces, mark_in, mark_taken = rarely()
end
-- A call may arrive after its own repeat, from a connection that was given up: then it finds its token in `repeated`,
-- which costs nothing as long as no call was repeated lately.
if meta[4] and ARGV[3] ~= '1' and redis.call('ZSCORE', prefix .. 'repeated', token) then
  return accepted
end
if ARGV[3] == '1' then
  remember_repeat(prefix, meta[3], token)
  if redis.call('LPOS', prefix .. 'pushed', token) then
    return accepted
  end
end
if meta[9] then
  return redis.error_reply('SEALED ' .. meta[9] .. ' ' .. (meta[2] or ''))
end
if meta[1] and meta[1] ~= ARGV[4] and (meta[10] or meta[2] or meta[8]) then
  return redis.error_reply('SHARDSCOUNT ' .. meta[1])
end
-- A shard is only made for a caller that has just read that its layout is the queue's: others may know one that is long
-- gone. A lease alone, of a caller with a wrong number, makes no shard.
if meta[1] ~= ARGV[4] and not options.anew then
  return redis.error_reply('SEALED')
end
if ARGV[7] ~= '' and not redis.call('LPOS', prefix .. 'pushed', ARGV[7]) then
  return redis.error_reply('OUTOFTURN ' .. ARGV[7])
end

local scores = meta[11]
if not options.ticks then
  local missing, given = {}, {}
  for i = 10, width > 2 and #ARGV or 0, width do
    local score = ARGV[i] ~= '' and tonumber(ARGV[i])
    if not score then
      missing[#missing + 1] = (i - 10) / width
    elseif score < 1099511627776 and not (score >= 1000000000 and score < 8589934592) then
      given[#given + 1] = (i - 10) / width
    end
  end
  if scores == 'clock' and #given > 0 and redis.call('EXISTS', prefix .. 'due', prefix .. 'taken') == 0 then
    scores = false
  end
  scores = scores or #given > 0 and 'explicit' or (width == 2 or #missing > 0) and 'clock'
  if scores == 'clock' and #given > 0 then
    return redis.error_reply('SCORES given ' .. table.concat(given, ' '))
  elseif scores == 'explicit' and (width == 2 or #missing > 0) then
    return redis.error_reply('SCORES missing ' .. table.concat(missing, ' '))
  end
end

local schedule_before, schedule_after
if options.ticks then
  if meta[10] then
    return redis.error_reply('RESHARDING the record of the schedule is being moved to another layout of the queue')
  end
  schedule_before, schedule_after = string.match(options.ticks, '^(.-)>(.+)$')
  if (redis.call('HGET', prefix .. 'schedules', ARGV[8]) or '') ~= schedule_before then
    return 0
  end
end

local now = read_now()
if uses(meta[7], 'ttl') then
  expire_pushed(prefix, width, now, is_latest)
end
if options.capacity then
  local function count_room()
    return tonumber(options.capacity) - redis.call('ZCARD', prefix .. 'due') - redis.call('HLEN', prefix .. 'taken')
  end
  local room = count_room()
  if uses(meta[7], 'ttl') then
    -- Expired payloads take no room. Where room is needed, up to the most jobs of a call are swept.
    sweep_expired(prefix, now, room < accepted and 1000 or 100)
    room = count_room()
  end
  if room < accepted then
    -- A job whose id waits fits, and one whose id comes again in the call does if the first does.
    local ids, known, unfit = {}, {}, {}
    for i = 8, #ARGV, width do
      ids[#ids + 1] = ARGV[i]
    end
    local waiting = redis.call('ZMSCORE', prefix .. 'due', unpack(ids))
    for i, id in ipairs(ids) do
      if not (waiting[i] or known[id]) then
        if room > 0 then
          room, known[id] = room - 1, true
        else
          unfit[#unfit + 1] = i - 1
        end
      end
    end
    if #unfit > 0 then
      -- Read anew: a sweep that made room has announced it, and removed the word.
      note_feature(prefix, redis.call('HGET', prefix .. 'meta', 'features'), 'full', true)
      return redis.error_reply('QUEUEFULL ' .. table.concat(unfit, ' '))
    end
  end
end

if uses(meta[7], 'full') then -- unless what expired just now has made room and removed the word
  meta[7] = redis.call('HGET', prefix .. 'meta', 'features')
end

-- Asks for all per-id keys before the first write, as `touch` does.
local place, ids = prefix .. 'payloads', {}
for i = 8, #ARGV, width do
  ids[#ids + 1] = ARGV[i]
end
local sets = redis.call('EXISTS', unpack(keys_of(place, ':', ids)))
local forms = {} -- id -> what is known of its payloads, see add_payload
for i, inline in ipairs(redis.call('HMGET', place, unpack(ids))) do
  if inline or sets > 0 then
    forms[ids[i]] = inline or sets == #ids
    -- What is foreign makes a call of `append` fail before its first write: the other jobs of a shared call are pushed
    -- again, and would be there twice.
    local key = is_append and place .. ':' .. ids[i]
    if is_append and redis.call('ZCARD', key) == 0 and inline and not begins_with_score(inline) then
      error(key .. ' holds no payload')
    end
  end
end

local traces = options.trace and #options.trace <= 256 and read_pushed_traces(prefix, width)
local settled = shift_due(prefix, now, meta[5], meta[6])
local clock = math.max(now, (tonumber(meta[2]) or 0) + 0.000001, (tonumber(options.clock) or 0) + 0.000001)
local ceiling = now + 0.001 -- what is due now is due now, however far the clock is ahead
local head = redis.call('ZRANGE', prefix .. 'due', 0, 0, 'WITHSCORES')[2]
-- A member of more than 64 bytes makes Redis build a skip list at once, and such a field a hash table. Otherwise it
-- starts compact lists, which are searched for each of the first ids: more than half of the time of such a call. No id
-- is that long.
local filler = not head and accepted > 32 and string.rep(' ', 513)
local first, due = nil, filler and { 0, filler } or {}
-- Where nothing waits for ids, their payloads are written together: id, text, id, text...
local inline = filler and { filler, '' } or {}
local function write_inline()
  if #inline > 0 then
    redis.call('HSET', place, unpack(inline))
    inline = {}
  end
end

-- Of ids that nothing waits for, whose payloads are inline: when they expire, id, time, id...
local features, expiring, is_extended = meta[7], nil, width == 6
local has_ttl, has_levels = uses(features, 'ttl'), uses(features, 'priority')
-- With debounce: when the ids that are put off are due, and until when they may be put off: time, id, time, id...
local put_off, started
if options.debounce then
  put_off, started = {}, {}
  local debounce, max_wait = tonumber(options.debounce), tonumber(options.max_wait)
  local due_at, deadlines = {}, {}
  local waiting = redis.call('ZMSCORE', prefix .. 'due', unpack(ids))
  local entered = redis.call('ZMSCORE', prefix .. 'debounced', unpack(ids))
  for j, id in ipairs(ids) do
    due_at[id] = waiting[j] and tonumber(waiting[j]) or nil
    deadlines[id] = waiting[j] and entered[j] and tonumber(entered[j]) or nil
  end

  -- When an id is due that gets a payload now; without debounce that is `at`. `is_timed`: the job says so.
  debounced = function(id, at, is_timed, level)
    if not due_at[id] then
      if not is_timed then
        deadlines[id] = bounded(now + max_wait)
        started[#started + 1], started[#started + 2] = deadlines[id], id
        at = math.max(at, bounded(now + debounce))
      end
      due_at[id] = level * 8589934592 + at
      return at
    end
    local its_level, perform_at = split_score(due_at[id])
    if deadlines[id] and perform_at > now then
      if deadlines[id] > now + max_wait then -- the server's clock has stepped back, or max_wait is less than it was
        deadlines[id] = now + max_wait
        started[#started + 1], started[#started + 2] = deadlines[id], id
      end
      at = math.max(now, math.min(now + debounce, deadlines[id]))
      due_at[id] = math.min(its_level, level) * 8589934592 + at
      put_off[#put_off + 1], put_off[#put_off + 2] = due_at[id], id
    end
    return at
  end
end

-- Of jobs that say none. A time that many have is printed once, as text.
local function expiry_after(ttl)
  return string.format('%.17g', bounded(now + tonumber(ttl)))
end
local usual_level, usual_expires = tonumber(options.priority) or 0, options.ttl and expiry_after(options.ttl)
local level, expires = usual_level, usual_expires
if expires and not has_ttl then
  features, has_ttl = note_feature(prefix, features, 'ttl', true), true
end
if level > 0 and not has_levels then
  features, has_levels = note_feature(prefix, features, 'priority', true), true
end

local i, text, last = 8, nil, nil
for _, id in ipairs(ids) do
  local payload, score, at = ARGV[i + 1], ARGV[i + 2], ARGV[i + 3]
  text, last = string.format('%.17g', clock), clock
  if width == 2 or score == '' then
    score = text
  end
  local soonest = clock < ceiling and clock or ceiling
  local is_timed = width >= 4 and at ~= ''
  if not is_timed then
    at = soonest
  elseif string.byte(at) == 43 then
    at = math.max(soonest, bounded(now + tonumber(string.sub(at, 2))))
  else
    at = math.max(soonest, bounded(tonumber(at)))
  end
  if is_extended and ARGV[i + 4] == '=' then
    level, expires = usual_level, usual_expires
  elseif is_extended then
    level = tonumber(ARGV[i + 5]) or 0
    expires = ARGV[i + 4] ~= '' and expiry_after(ARGV[i + 4]) or nil
    if expires and not has_ttl then
      features, has_ttl = note_feature(prefix, features, 'ttl', true), true
    end
    if level > 0 and not has_levels then
      features, has_levels = note_feature(prefix, features, 'priority', true), true
    end
  end
  if debounced then
    at = debounced(id, at, is_timed, level)
  end
  if is_append then
    -- The clock in units of 2^-22 s, the distance between two doubles of these decades.
    payload = '\0\0a' .. string.format('%014x', math.floor(clock * 4194304)) .. payload
  end
  if sets > 0 or forms[id] or #payload > 4096 then
    write_inline()
    if has_ttl then
      if expiring then
        redis.call('ZADD', prefix .. 'expires', unpack(expiring))
        expiring = nil
      end
      if is_latest then
        forms[id] = add_latest_expiring(prefix, id, payload, score, forms[id] or false, expires)
      else
        forms[id] = add_expiring(prefix, id, payload, score, forms[id] or false, expires)
      end
    elseif is_latest then
      forms[id] = add_latest(place, id, payload, score, forms[id] or false)
    else
      forms[id] = add_payload(place, id, payload, score, forms[id] or false)
    end
  else
    if expires then
      expiring = expiring or {}
      expiring[#expiring + 1], expiring[#expiring + 2] = expires, id
    end
    forms[id] = join_inline(payload, score, expires)
    inline[#inline + 1] = id
    inline[#inline + 1] = forms[id]
  end
  due[#due + 1] = level > 0 and level * 8589934592 + at or (at == clock and text or at)
  due[#due + 1] = id
  if not first or at < first then
    first = at
  end
  clock = clock + 0.000001
  i = i + width
end

write_inline()
if expiring then
  redis.call('ZADD', prefix .. 'expires', unpack(expiring))
end

local fresh = redis.call('ZADD', prefix .. 'due', 'NX', unpack(due))
if debounced then
  if #put_off > 0 then
    redis.call('ZADD', prefix .. 'due', 'XX', unpack(put_off))
  end
  if #started > 0 then
    redis.call('ZADD', prefix .. 'debounced', unpack(started))
  end
end
if filler then
  redis.call('ZREM', prefix .. 'due', filler)
  redis.call('HDEL', place, filler)
end
if has_levels and 2 * fresh < #due then -- some wait already
  raise_levels(prefix, due, filler and 3 or 1, width, usual_level)
end
local pushed = (tonumber(meta[8]) or 0) + accepted
if ARGV[1] == '' then
  -- `text` is the clock of the last job: a text costs Redis no printing of a number.
  local server_time = now == last and text or now
  if not settled then
    redis.call('HSET', prefix .. 'meta', 'pushed', pushed, 'clock', text)
  elseif now - (tonumber(meta[5] or '') or 0) <= 60 then -- less is no jump: nothing may have been pushed for a while
    redis.call('HSET', prefix .. 'meta', 'pushed', pushed, 'clock', text, 'server_time', server_time)
  else
    redis.call('HSET', prefix .. 'meta', 'pushed', pushed, 'clock', text, 'server_time', server_time,
      'server_time_since', server_time)
  end
elseif is_append then -- heads must differ also where the time is given
  redis.call('HSET', prefix .. 'meta', 'pushed', pushed, 'clock', text)
else
  redis.call('HSET', prefix .. 'meta', 'pushed', pushed)
end
if traces then
  add_traces(traces, options.trace)
  features = note_feature(prefix, features, 'traces', true)
end
if options.cancel then
  local now_due, is_told = {}, false
  for j = 8, #ARGV, width do
    if width < 4 or ARGV[j + 3] == '' then
      now_due[#now_due + 1] = ARGV[j]
    end
  end
  for j, record in ipairs(#now_due > 0 and redis.call('HMGET', prefix .. 'taken', unpack(now_due)) or {}) do
    if record and not mark_in(record) then
      mark_taken(prefix, now_due[j], record, 's')
      is_told = true
    end
  end
  if is_told then
    features = note_feature(prefix, features, 'cancelled', true)
    publish(prefix .. 'wake', 'cancelled')
  end
end
if has_options or features then
  features = note_feature(prefix, features, 'latest', is_latest)
  local waits = debounced
    or (features and string.find(features, ' debounce ') and redis.call('EXISTS', prefix .. 'debounced') == 1)
  features = note_feature(prefix, features, 'debounce', waits)
end
if scores ~= meta[11] then
  redis.call('HSET', prefix .. 'meta', 'shards_count', ARGV[4], 'scores', scores)
elseif meta[1] ~= ARGV[4] then
  redis.call('HSET', prefix .. 'meta', 'shards_count', ARGV[4])
end
if schedule_after then
  redis.call('HSET', prefix .. 'schedules', ARGV[8], schedule_after)
end
next_slot(prefix, meta[3], meta[4], ARGV[6] .. ' ', now)
if redis.call('LPUSH', prefix .. 'pushed', token) > 500000 then
  redis.call('LTRIM', prefix .. 'pushed', 0, 449999)
end
if has_levels then
  -- The head is of the most urgent level, and others may be due before it.
  local urgent = is_extended and 9 or usual_level
  for j = 8, is_extended and #ARGV or 0, 6 do
    urgent = math.min(urgent, ARGV[j + 4] == '=' and usual_level or tonumber(ARGV[j + 5]) or 0)
  end
  wake(prefix, first <= read_due_cutoff(prefix, now, clock) and 0 or first - now, urgent)
elseif not head or first < tonumber(head) or features ~= meta[7] then
  -- Perhaps the first is of an id that waits already and keeps its perform_at: then the head hasn't moved.
  local moved = redis.call('ZRANGE', prefix .. 'due', 0, 0, 'WITHSCORES')[2]
  if moved ~= head or features ~= meta[7] then -- the holder hears what the shard uses now
    wake(prefix, tonumber(moved) <= read_due_cutoff(prefix, now, clock) and 0 or tonumber(moved) - now)
  end
end
return accepted
