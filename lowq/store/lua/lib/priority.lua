-- Priority: what waits is in one sorted set, `due`, with level * 2**33 + perform_at as the score. 2**33 is after the
-- latest time that there is, so the scores of a level come before those of the next one. A shard that never saw a level
-- above 0 does not note that it uses `priority` (lib/features.lua), and its scores are plain times.

-- Level and time of a score.
local function split_score(score)
  score = tonumber(score)
  local level = score >= 8589934592 and math.min(math.floor(score / 8589934592), 9) or 0
  return level, score - level * 8589934592
end

-- The bounds of the scores of a level for `ZRANGE ... BYSCORE`, up to a time; or of all of them.
local function bounds_of(level, upto)
  local low = level == 0 and '-inf' or string.format('%.17g', level * 8589934592)
  local high = upto and string.format('%.17g', level * 8589934592 + upto)
    or (level == 9 and '+inf' or string.format('(%.17g', (level + 1) * 8589934592))
  return low, high
end

-- The number of waiting jobs that are due.
local function count_due(prefix, features, due_cutoff)
  local count = redis.call('ZCOUNT', prefix .. 'due', '-inf', due_cutoff)
  for level = 1, uses(features, 'priority') and 9 or 0 do
    count = count + redis.call('ZCOUNT', prefix .. 'due', bounds_of(level, due_cutoff))
  end
  return count
end

-- The waiting job that is or was due first, and when, as text; or nil.
local function find_oldest(prefix, features)
  if not uses(features, 'priority') then
    return unpack(redis.call('ZRANGE', prefix .. 'due', 0, 0, 'WITHSCORES'))
  end
  local oldest, first
  for level = 0, 9 do
    local low, high = bounds_of(level)
    local head = redis.call('ZRANGE', prefix .. 'due', low, high, 'BYSCORE', 'LIMIT', 0, 1, 'WITHSCORES')
    if head[1] then
      local _, at = split_score(head[2])
      if not first or at < first then
        oldest, first = head[1], at
      end
    end
  end
  return oldest, first and string.format('%.17g', first)
end

-- Jobs that were pushed for ids which wait already, and less urgently: they become as urgent. `due` has the scores and
-- ids as they were pushed, from `start` on; `usual` is the level of jobs that say none.
local function raise_levels(prefix, due, start, width, usual)
  local ids = {}
  for i = start + 1, #due, 2 do
    ids[#ids + 1] = due[i]
  end
  local scores, raised = redis.call('ZMSCORE', prefix .. 'due', unpack(ids)), {}
  for i, id in ipairs(ids) do
    local level, at = split_score(scores[i])
    local said = width == 6 and ARGV[8 + (i - 1) * width + 5] or '='
    local wanted = said == '=' and usual or tonumber(said) or 0
    if wanted < level then
      raised[#raised + 1], raised[#raised + 2] = wanted * 8589934592 + at, id
    end
  end
  if #raised > 0 then
    redis.call('ZADD', prefix .. 'due', 'XX', 'LT', unpack(raised))
  end
end

-- The score with which a job waits again that was taken with this level. It merges with what came meanwhile: the more
-- urgent of the two counts.
local function score_again(prefix, id, level, at)
  if level == 0 then
    return at
  end
  local present = redis.call('ZSCORE', prefix .. 'due', id)
  if present then
    level = math.min(level, (split_score(present)))
  end
  return level * 8589934592 + at
end

-- What waits of a shard that uses priorities, so many ids of each level: the levels in the order in which they are
-- served, and within each the ids by their time. Returns id, perform_at (text), id, perform_at..., at which position
-- which level is (text), and the latest of these times. The most urgent comes first, but for two of ten deliveries:
-- one begins with the least urgent, and one with each level in turn, so none of them starves.
local function read_levels(prefix, delivery, count)
  local order = {}
  for i = 0, 9 do
    order[i] = delivery % 10 == 0 and 9 - i or i
  end
  if delivery % 10 == 5 then
    local first = math.floor(delivery / 10) % 10
    for i = first, 1, -1 do
      order[i] = order[i - 1]
    end
    order[0] = first
  end
  -- A call for each level that has jobs, and one more: whatever follows the last of one begins the next.
  local by_level, low, latest = {}, '-inf', -math.huge
  repeat
    local some = redis.call('ZRANGE', prefix .. 'due', low, '+inf', 'BYSCORE', 'LIMIT', 0, count, 'WITHSCORES')
    local first, is_whole = nil, #some < 2 * count
    local score, level, at_text, ids -- many have the same score
    for j = 1, #some, 2 do
      if some[j + 1] ~= score then
        score = some[j + 1]
        local at
        level, at = split_score(score)
        first = first or level
        if level > first and not is_whole then
          break -- there may be more of this one
        end
        ids = by_level[level] or {}
        by_level[level] = ids
        at_text, latest = level == 0 and score or string.format('%.17g', at), math.max(latest, at)
      end
      ids[#ids + 1], ids[#ids + 2] = some[j], at_text
    end
    low = first and bounds_of(first + 1)
  until is_whole or first == 9
  local waiting, levels = {}, {}
  for i = 0, 9 do
    local ids, text = by_level[order[i]] or {}, tostring(order[i])
    for j = 1, #ids, 2 do
      levels[#waiting + 1] = text
      waiting[#waiting + 1], waiting[#waiting + 2] = ids[j], ids[j + 1]
    end
  end
  return waiting, levels, latest
end

-- A bound of times, as ZCOUNT takes it ('-inf', '+inf', '(' in front to leave it out), as one of the scores of a level.
-- Scores of higher levels are coarser: where none stands for this very time, the nearest one is on one side of it, and
-- is within the range or not. `is_highest`: whether it is the upper bound.
local function score_bound(level, bound, is_highest)
  local low, high = bounds_of(level)
  local open, text = string.match(bound, '^(%(?)(.*)$')
  if text == '-inf' then
    return open .. low
  end
  local time = text == '+inf' and math.huge or tonumber(text)
  if time >= 8589934592 then
    return high
  end
  local base = level * 8589934592
  local score = base + time
  local behind = score - base - time
  if behind ~= 0 then
    open = (behind > 0) == is_highest and '(' or ''
  end
  return open .. string.format('%.17g', score)
end
