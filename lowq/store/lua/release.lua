-- release: taken jobs wait again, and nobody is charged a retry.
--
-- KEYS[1]  prefix of the shard
-- ARGV[1]  now: Unix seconds, or '' for the server's clock
-- ARGV[2]  token of the lease
-- ARGV[3]  delivery that the ids were taken under
-- ARGV[4]  max_crash_count of the worker
-- ARGV[5+] per id three arguments: id, delay (seconds; '' keeps its perform_at), '1' when it made its process stop
--
-- Reply: list of 1 (waits again), 2 (buried as poison), 3 (nothing is left of it: it has expired), 4 (the
-- same: it was cancelled) or 0 (no longer in flight under that delivery).
-- Errors: LEASELOST.
--
-- Invariant: payloads and retry_count are those that were taken, merged with what came meanwhile.
--
--!flags allow-oom
local prefix = KEYS[1]
local lost, now, records, features, cancelled = begin_report(prefix, ARGV[2], ARGV[3], 5, 3)
if lost then
  return lost
end

local reply, released = {}, 0
for i = 5, #ARGV, 3 do
  local id, delay, crashed = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  local record = records[id]
  local state = cancelled[id] and 4 or 0
  if record then
    records[id] = nil
    state = 1
    if crashed == '1' then
      if crash(prefix, id, record, now, tonumber(ARGV[4]), bounded(tonumber(delay) or 0), features) then
        state = 2
      end
    elseif uses(features, 'ttl') and expire_taken(prefix, id, record, now, features) then
      state = 3
    else
      put_back(prefix, id, record, now, delay ~= '' and bounded(now + tonumber(delay)) or nil, features)
      released = released + 1
    end
  end
  reply[#reply + 1] = state
end
add_to_meta(prefix, 'released', released)
announce_room(prefix, features)
return reply
