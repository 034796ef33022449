-- bulk_bounds: what waits, or is buried, at this moment: where a bulk action ends that must not go on forever.
--
-- KEYS[1]  prefix of the shard
-- ARGV[1]  now: Unix seconds, or '' for the server's clock
-- ARGV[2]  set: 'due' or 'morgue'
-- ARGV[3]  lowest score that matters; '-inf', or '(' in front to leave it out
-- ARGV[4]  highest, likewise
-- ARGV[5]  of 'due' in a shard that uses priorities the level: all scores here are times, of one level; '' = level 0
--
-- Reply: {now, due_cutoff, clock, highest, upto_now, due, total, levels}
--   now, due_cutoff: Unix seconds, text; clock: the shard's, '' before the first push
--   highest: the highest score there is, text, or nil
--   upto_now, due, total: how many scores within the bounds are not after now, not after due_cutoff, there at all
--   levels: 1 when there are other levels to be asked for, else 0
--
-- Invariant: nothing changes.
--
--!flags no-writes
local prefix = KEYS[1]
local key = prefix .. ARGV[2]
local now = read_now()
local due_cutoff, clock = read_due_cutoff(prefix, now)
local has_levels = ARGV[2] == 'due' and uses(redis.call('HGET', prefix .. 'meta', 'features'), 'priority')
local level = has_levels and (tonumber(ARGV[5]) or 0)
local base, low, high = (level or 0) * 8589934592, ARGV[3], ARGV[4]
if level then
  low, high = score_bound(level, low, false), score_bound(level, high, true)
end
local total = redis.call('ZCOUNT', key, low, high)
local function count_upto(time)
  local after = score_bound(level or 0, string.format('(%.17g', time), false)
  return math.max(total - redis.call('ZCOUNT', key, after, high), 0)
end
local highest
if level then
  local lowest, top = bounds_of(level)
  highest = redis.call('ZRANGE', key, top, lowest, 'BYSCORE', 'REV', 'LIMIT', 0, 1, 'WITHSCORES')[2]
  highest = highest and string.format('%.17g', highest - base)
else
  highest = redis.call('ZRANGE', key, -1, -1, 'WITHSCORES')[2]
end
return {
  string.format('%.17g', now), string.format('%.17g', due_cutoff), clock, highest or false,
  count_upto(now), count_upto(due_cutoff), total, has_levels and 1 or 0,
}
