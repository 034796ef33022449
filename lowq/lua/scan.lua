-- scan: some of the ids of a shard, in no order, by a pattern.
--
-- KEYS[1]  prefix of the shard
-- ARGV[1]  now: Unix seconds, or '' for the server's clock
-- ARGV[2]  set: 'due', 'retries', 'morgue' or 'taken'
-- ARGV[3]  cursor: '0' to begin
-- ARGV[4]  pattern of ids (a glob), '' = any
-- ARGV[5]  value wanted: 'perform_at', 'retry_count', 'buried_at' or 'id'
-- ARGV[6]  when: only waiting jobs that are 'due' or 'later', '' = any
-- ARGV[7]  past: only 'fresh' or 'failed' waiting jobs, '' = any
--
-- Reply: {cursor, horizon, clock, id, value, id, value...}
--   cursor: '0' at the end; horizon: what is due is not after it; clock: the shard's; value: text, '0' for 'id'
--
-- Invariant: nothing changes. About 1,000 ids are looked at. An id that is there all the time is found, perhaps
-- more than once.
--
--!flags no-writes
--!include clock
--!include horizon
--!include state
--!include taken
local prefix, set, wanted, when, past = KEYS[1], ARGV[2], ARGV[5], ARGV[6], ARGV[7]
local horizon, clock = read_horizon(prefix, read_now())
local command = set == 'taken' and 'HSCAN' or 'ZSCAN'
local pattern = ARGV[4] == '' and '*' or ARGV[4]
local found = redis.call(command, prefix .. set, ARGV[3], 'MATCH', pattern, 'COUNT', 1000)
local reply = { found[1], string.format('%.17g', horizon), clock }

-- A small set is one block for Redis and comes whole: never more than a few hundred ids.
local ids, values = {}, {}
for i = 1, #found[2], 2 do
  ids[#ids + 1], values[#values + 1] = found[2][i], found[2][i + 1]
end
if set == 'taken' then
  for i, record in ipairs(values) do
    local _, perform_at, retry_count = parse_taken(record)
    values[i] = wanted == 'retry_count' and string.format('%d', retry_count) or perform_at
  end
  when, past = '', ''
elseif set == 'retries' then
  past = ''
end
-- unpack takes a few thousand at most, and Redis may return more than it was asked for.
for start = 1, #ids, 1000 do
  local some, known = {}, {}
  for i = start, math.min(start + 999, #ids) do
    some[#some + 1], known[#known + 1] = ids[i], values[i]
  end
  local times = set == 'due' and known or nil
  local counts = set == 'retries' and known or nil
  if #some > 0 and wanted == 'perform_at' and set == 'retries' then
    times = redis.call('ZMSCORE', prefix .. 'due', unpack(some))
    known = times
  elseif #some > 0 and wanted == 'retry_count' and set == 'due' then
    counts = redis.call('ZMSCORE', prefix .. 'retries', unpack(some))
    known = counts
  end
  local fit = fits(prefix, some, when, past, horizon, times, counts)
  for i, id in ipairs(some) do
    if fit[i] then
      local value = wanted == 'id' and '0' or known[i] or (wanted == 'retry_count' and '-1')
      if value then
        reply[#reply + 1], reply[#reply + 2] = id, value
      end
    end
  end
end
return reply
