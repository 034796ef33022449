-- fetch_jobs: jobs by their ids, wherever they are.
--
-- KEYS[1]  prefix of the shard
-- ARGV[1]  now: Unix seconds, or '' for the server's clock
-- ARGV[2]  where: 'taken', 'waiting' or 'morgue'; '' = the first of these in which the id is
-- ARGV[3]  max_payloads in the reply
-- ARGV[4]  max_bytes in the reply: of payloads and errors (one payload of one job always fits)
-- ARGV[5+] ids
--
-- Reply: list of, per id, nil (not there) or a job. It ends early when it is full: ask again for the other ids.
--   job: {state, time, retry_count, error, crashes, count, payload, score, payload, score...}
--   time: perform_at, in the morgue the time it was buried, Unix seconds, or nil if that can't be read. Of a job that
--   waits and has a priority or a payload with a ttl both follow: "time level", "time level expires"
--   error, crashes: text or nil
--   count: how many payloads there are, also when the reply holds only the lowest of them
--
-- Invariant: nothing changes.
--
--!flags no-writes
local prefix, where = KEYS[1], ARGV[2]
local due_cutoff = read_due_cutoff(prefix, read_now())
local most, room = tonumber(ARGV[3]), tonumber(ARGV[4])
local has_ttl = uses(redis.call('HGET', prefix .. 'meta', 'features'), 'ttl')

-- Appends to the job how many payloads it has, and the lowest of them; or the inline one. Returns how many more, and
-- how many bytes, the reply has room for.
local function append_payloads(job, key, inline)
  if inline then
    local payload, score = inline, 'nan'
    if string.find(inline, ' ', 1, true) then
      payload, score = split_inline(inline)
    end
    job[6], job[7], job[8] = 1, payload, score
    return most - 1, room - #payload
  end
  job[6] = tonumber((redis.pcall('ZCARD', key)))
  if not job[6] then -- a key of another type: foreign
    job[6] = 0
    return most, room
  end
  local number, bytes, is_all = read_set(job, key, most, room, 0)
  return most - number, (is_all or number == most) and room - bytes or 0
end

local function find(id)
  if where == '' or where == 'taken' then
    local record = redis.call('HGET', prefix .. 'taken', id)
    if record then
      local _, perform_at, retry_count = parse_taken(record)
      return 'taken', perform_at, retry_count, 'taken:payloads', 'errors', get_inline(record)
    end
  end
  if where == '' or where == 'waiting' then
    local perform_at = redis.call('ZSCORE', prefix .. 'due', id)
    if perform_at then
      local retry_count = redis.call('ZSCORE', prefix .. 'retries', id)
      local level, at = split_score(perform_at)
      local state = at <= due_cutoff and 'due' or (retry_count and 'retrying' or 'scheduled')
      local expires = has_ttl and redis.call('ZSCORE', prefix .. 'expires', id)
      if level > 0 or expires then
        perform_at = string.format('%.17g %d', at, level) .. (expires and ' ' .. expires or '')
      end
      local inline = redis.call('HGET', prefix .. 'payloads', id)
      return state, perform_at, tonumber(retry_count or -1), 'payloads', 'errors', inline
    end
  end
  if where == '' or where == 'morgue' then
    local buried_at = redis.call('ZSCORE', prefix .. 'morgue', id)
    if buried_at then
      local inline = redis.call('HGET', prefix .. 'morgue:payloads', id)
      return 'morgue', buried_at, -1, 'morgue:payloads', 'morgue:errors', inline
    end
  end
end

local reply = {}
for i = 5, #ARGV do
  local id = ARGV[i]
  local state, time, retry_count, place, errors, inline = find(id)
  if not state then
    reply[#reply + 1] = false
  else
    local reason = redis.call('HGET', prefix .. errors, id)
    local crashes = state ~= 'morgue' and redis.call('HGET', prefix .. 'crashes', id)
    -- A record in flight that is none of ours has neither time nor retry_count, and no number is beyond 2^53.
    retry_count = retry_count and math.abs(retry_count) <= 2 ^ 53 and retry_count or -1
    crashes = crashes and string.match(crashes, '^%S+')
    local job = { state, time or false, retry_count, reason, crashes }
    local left, space = append_payloads(job, prefix .. place .. ':' .. id, inline)
    space = space - (reason and #reason or 0) - #id
    if #reply > 0 and ((#job - 6) / 2 < math.min(job[6], tonumber(ARGV[3])) or space <= 0) then
      break
    end
    reply[#reply + 1] = job
    most, room = left, space
    if most <= 0 or room <= 0 then
      break
    end
  end
end
return reply
