-- login_failed: counts a failed login of a user from an address, for all processes of the dashboard.
--
-- KEYS[1]  the failed logins
-- ARGV[1]  now: Unix seconds, or '' for the server's clock
-- ARGV[2]  digest of the address and the user
-- ARGV[3]  attempt: random
-- ARGV[4]  seconds after which a failure is forgotten
-- ARGV[5]  how many digests are kept, the latest
--
-- Reply: how many have failed in a row.
--
-- Invariant: at most ARGV[5] digests are kept; when there are more, the older half goes. What is no record counts for
--   nothing. A repeated call counts once.
--
--!flags allow-oom
local key, digest, now, kept = KEYS[1], ARGV[2], read_now(), tonumber(ARGV[5])

local function parse(record)
  local count, last, attempt = string.match(record or '', '^(%d+) (%S+) (%S+)$')
  count, last = tonumber(count), tonumber(last)
  if count and last and last == last then  -- no NaN, which nothing can be sorted with
    return { count = count, last = last, attempt = attempt }
  end
end

local record = redis.call('HGET', key, digest)
local known = parse(record)
if known and known.attempt == ARGV[3] then
  return known.count
end
if not record and redis.call('HLEN', key) >= kept then
  local all, records = {}, redis.call('HGETALL', key)
  for i = 1, #records, 2 do
    local other = parse(records[i + 1])
    all[#all + 1] = { other and other.last or -1, records[i] }
  end
  table.sort(all, function(a, b) return a[1] < b[1] end)
  for i = 1, math.max(math.floor(#all / 2), #all - kept + 1) do
    redis.call('HDEL', key, all[i][2])
  end
end
local count = 1
-- The clock may have stepped back.
if known and math.abs(now - known.last) < tonumber(ARGV[4]) then
  count = known.count + 1
end
redis.call('HSET', key, digest, string.format('%d %.6f %s', count, now, ARGV[3]))
redis.call('EXPIRE', key, ARGV[4])
return count
