-- range_page: the next ids of a sorted set, in order, from a position on.
--
-- KEYS[1]  prefix of the shard
-- ARGV[1]  now: Unix seconds, or '' for the server's clock
-- ARGV[2]  set: 'due', 'retries' or 'morgue'
-- ARGV[3]  lowest score; '-inf', or '(' in front to leave it out
-- ARGV[4]  highest score, likewise
-- ARGV[5]  '1' from the highest to the lowest
-- ARGV[6]  limit: how many ids
-- ARGV[7]  score of the position after which to go on, '' for the beginning
-- ARGV[8]  id of that position
-- ARGV[9]  when: only waiting jobs that are 'due' or 'later', '' = any
-- ARGV[10] past: only 'fresh' or 'failed' jobs, '' = any
-- ARGV[11] '' or, with when = 'later' in the set 'due', the shard's clock some time ago: while nothing has been
--          pushed since, jobs that became due meanwhile count as later too
-- ARGV[12] of 'due' in a shard that uses priorities the level: all scores here are times, of one level; '' = level 0
--
-- Reply: {state, score, id, id, score, id, score...}
--   state: 1 when nothing follows, else 0, and 2 more when there are other levels to be asked for; score, id: the
--   position to go on from (nil when nothing was looked at)
--
-- Invariant: nothing changes. No more than 1,000 ids are looked at, so a reply may hold none and not be the last.
--
--!flags no-writes
local prefix, set, reverse, limit = KEYS[1], ARGV[2], ARGV[5] == '1', tonumber(ARGV[6])
local when, past = ARGV[9], ARGV[10]
local key = prefix .. set
local due_cutoff, clock = read_due_cutoff(prefix, read_now())
local has_levels = set == 'due' and uses(redis.call('HGET', prefix .. 'meta', 'features'), 'priority')
local level = has_levels and (tonumber(ARGV[12]) or 0)
local base = (level or 0) * 8589934592

-- Ranks of the first and the last member to look at.
local function beyond(bound)
  if string.sub(bound, 1, 1) == '(' then
    return string.sub(bound, 2)
  end
  return '(' .. bound
end
local low, high = ARGV[3], ARGV[4]
if level then
  low, high = score_bound(level, low, false), score_bound(level, high, true)
end
local first = redis.call('ZCOUNT', key, '-inf', beyond(low))
local last = redis.call('ZCOUNT', key, '-inf', high) - 1
if set == 'due' and when ~= '' then
  local split = redis.call('ZCOUNT', key, '-inf', score_bound(level or 0, string.format('%.17g', due_cutoff), true))
  if when == 'due' then
    last = math.min(last, split - 1)
  elseif ARGV[11] == '' or ARGV[11] ~= clock then
    first = math.max(first, split)
  end
  when = ''
end
if ARGV[7] ~= '' then
  local below, upto = '(' .. ARGV[7], ARGV[7]
  if level then
    below, upto = score_bound(level, below, true), score_bound(level, upto, true)
  end
  local rank, there = rank_of(key, below, upto, ARGV[8])
  if reverse then
    last = math.min(last, rank - 1)
  else
    first = math.max(first, there and rank + 1 or rank)
  end
end
local others = has_levels and 2 or 0
if first > last then
  return { others + 1, false, false }
end

-- With nothing to sort out, no more is read than is wanted.
if set == 'retries' then
  past = ''
end
local most = (when == '' and past == '') and math.min(limit, 1000) or 1000
local from, to = first, math.min(last, first + most - 1)
if reverse then
  from, to = math.max(first, last - most + 1), last
end
local part = redis.call('ZRANGE', key, from, to, 'WITHSCORES')
local ids, scores = {}, {}
for i = 1, #part, 2 do
  local at = reverse and (#part - i + 1) / 2 or (i + 1) / 2
  ids[at], scores[at] = part[i], base > 0 and string.format('%.17g', part[i + 1] - base) or part[i + 1]
end
local fit = fits(prefix, ids, when, past, due_cutoff, nil, nil)
local reply, found, looked = { others, false, false }, 0, 0
for i, id in ipairs(ids) do
  if found == limit then
    break
  end
  looked = i
  if fit[i] then
    reply[#reply + 1], reply[#reply + 2] = id, scores[i]
    found = found + 1
  end
end
reply[2], reply[3] = scores[looked], ids[looked]
if looked == last - first + 1 then
  reply[1] = others + 1
end
return reply
