-- record_errors: failures that a node has reported lately, in groups of alike errors.
--
-- KEYS[1]  the queue's error groups
-- ARGV[1]  now: Unix seconds, or '' for the server's clock
-- ARGV[2]  most: how many groups are kept
-- ARGV[3]  seconds after which groups are forgotten that nobody adds to
-- ARGV[4+] groups: fingerprint, how many failures, the id that failed last, text...
--
-- Reply: {fingerprint...} of groups that there were not.
--
-- Invariant: a field "count first last hours size sample_id text": times in Unix seconds; hours "n:count;n:count..." of
-- the last 24, n being the hour since 1970; size: bytes of sample_id. Of more groups than `most` those that were seen
-- longest ago go.
--
--!flags allow-oom
local key, now, most = KEYS[1], read_now(), tonumber(ARGV[2])
local hour = math.floor(now / 3600)
local fresh = {}
for i = 4, #ARGV, 4 do
  local name, added = ARGV[i], tonumber(ARGV[i + 1])
  local present = redis.call('HGET', key, name)
  local count, first, _, hours = string.match(present or '', '^(%d+) (%S+) (%S+) (%S+) ')
  if not count then
    count, first, hours = 0, string.format('%.3f', now), ''
    fresh[#fresh + 1] = name
  end
  local counts, total = {}, added
  for n, c in string.gmatch(hours, '(%d+):(%d+)') do
    if tonumber(n) == hour then
      total = total + tonumber(c)
    elseif tonumber(n) > hour - 24 and tonumber(n) < hour then
      counts[#counts + 1] = n .. ':' .. c
    end
  end
  counts[#counts + 1] = string.format('%d:%d', hour, total)
  local head = string.format('%.0f %s %.3f %s %d ', tonumber(count) + added, first, now, table.concat(counts, ';'),
    #ARGV[i + 2])
  redis.call('HSET', key, name, head .. ARGV[i + 2] .. ARGV[i + 3])
end
local over = redis.call('HLEN', key) - most
if over > 0 then
  local all, seen = redis.call('HGETALL', key), {}
  for i = 1, #all, 2 do
    local last = string.match(all[i + 1], '^%S+ %S+ (%S+) ')
    seen[#seen + 1] = { tonumber(last or '') or 0, all[i] }
  end
  table.sort(seen, function(a, b)
    return a[1] < b[1]
  end)
  for i = 1, over do
    redis.call('HDEL', key, seen[i][2])
  end
end
redis.call('EXPIRE', key, ARGV[3])
return fresh
