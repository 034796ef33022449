-- bulk_bounds: what waits, or is buried, at this moment: where a bulk action ends that must not go on forever.
--
-- KEYS[1]  prefix of the shard
-- ARGV[1]  now: Unix seconds, or '' for the server's clock
-- ARGV[2]  set: 'due' or 'morgue'
-- ARGV[3]  lowest score that matters; '-inf', or '(' in front to leave it out
-- ARGV[4]  highest, likewise
--
-- Reply: {now, due_cutoff, clock, highest, upto_now, due, total}
--   now, due_cutoff: Unix seconds, text; clock: the shard's, '' before the first push
--   highest: the highest score there is, text, or nil
--   upto_now, due, total: how many scores within the bounds are not after now, not after due_cutoff, there at all
--
-- Invariant: nothing changes.
--
--!flags no-writes
local prefix = KEYS[1]
local key = prefix .. ARGV[2]
local now = read_now()
local due_cutoff, clock = read_due_cutoff(prefix, now)
local total = redis.call('ZCOUNT', key, ARGV[3], ARGV[4])
local function count_upto(time)
  return math.max(total - redis.call('ZCOUNT', key, string.format('(%.17g', time), ARGV[4]), 0)
end
local highest = redis.call('ZRANGE', key, -1, -1, 'WITHSCORES')[2] or false
return {
  string.format('%.17g', now), string.format('%.17g', due_cutoff), clock, highest,
  count_upto(now), count_upto(due_cutoff), total,
}
