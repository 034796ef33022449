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
-- ARGV[8]  how many ids to look at, about: 1,000, or fewer where comparing them with the pattern takes long
--
-- Reply: {cursor, due_cutoff, clock, id, value, id, value...}
--   cursor: '0' at the end; due_cutoff: what is due is not after it; clock: the shard's; value: text, '0' for 'id'
--
-- Errors: PATTERN: Redis before 7.0.9 can't be asked that.
--
-- Invariant: nothing changes. An id that is there all the time is found, perhaps
-- more than once.
--
--!flags no-writes
local prefix, set, wanted, when, past = KEYS[1], ARGV[2], ARGV[5], ARGV[6], ARGV[7]
local due_cutoff, clock = read_due_cutoff(prefix, read_now())
local command = set == 'taken' and 'HSCAN' or 'ZSCAN'
local pattern = ARGV[4] == '' and '*' or ARGV[4]
-- Before, a star tries all places for each place of the star before it: with two, minutes for a thousand long ids.
-- The embedded store tells no version.
if (redis.REDIS_VERSION_NUM or 0x070009) < 0x070009 then
  local inner = string.gsub(pattern, '%*+$', '')
  local _, stars = string.gsub(inner, '%*+', '')
  if stars > 1 then
    return redis.error_reply('PATTERN match: Redis before 7.0.9 may stand still over several stars: use one *, or '
      .. 'one and another at the end, or a newer Redis')
  end
end
local found = redis.call(command, prefix .. set, ARGV[3], 'MATCH', pattern, 'COUNT', ARGV[8])
local reply = { found[1], string.format('%.17g', due_cutoff), clock }

if set == 'taken' then
  for i = 2, #found[2], 2 do
    local _, perform_at, retry_count = parse_taken(found[2][i])
    -- A foreign record comes first.
    local time = tonumber(perform_at)
    perform_at = time and time == time and string.format('%.17g', time) or '0'
    retry_count = retry_count and math.abs(retry_count) <= 2 ^ 53 and retry_count or -1
    found[2][i] = wanted == 'retry_count' and string.format('%d', retry_count) or perform_at
  end
  when, past = '', ''
elseif set == 'retries' then
  past = ''
end
-- What is to be looked up elsewhere is looked up for 1,000 ids at a time: unpack takes a few thousand at most, and
-- Redis may return more than it was asked for.
for start = 1, #found[2], 2000 do
  local ids, values = {}, {}
  for i = start, math.min(start + 1999, #found[2]), 2 do
    ids[#ids + 1], values[#values + 1] = found[2][i], found[2][i + 1]
  end
  if set == 'due' then
    for i, score in ipairs(values) do
      local level, at = split_score(score)
      values[i] = level > 0 and string.format('%.17g', at) or score
    end
  end
  local times = set == 'due' and values or nil
  local counts = set == 'retries' and values or nil
  if wanted == 'perform_at' and set == 'retries' then
    times = redis.call('ZMSCORE', prefix .. 'due', unpack(ids))
    for i, score in ipairs(times) do
      local level, at = split_score(score or 0)
      times[i] = level > 0 and string.format('%.17g', at) or score
    end
    values = times
  elseif wanted == 'retry_count' and set == 'due' then
    counts = redis.call('ZMSCORE', prefix .. 'retries', unpack(ids))
    values = counts
  end
  local fit = (when ~= '' or past ~= '') and fits(prefix, ids, when, past, due_cutoff, times, counts)
  local size = #reply
  for i, id in ipairs(ids) do
    if not fit or fit[i] then
      local value = wanted == 'id' and '0' or values[i] or (wanted == 'retry_count' and '-1')
      if value then
        reply[size + 1], reply[size + 2] = id, value
        size = size + 2
      end
    end
  end
end
return reply
