-- session: keeps a session of consumers to one of them at a time.
--
-- KEYS[1]  key of the session
-- ARGV[1]  now: Unix seconds, or '' for the server's clock
-- ARGV[2]  who has it: random, one for each start of a consumer
-- ARGV[3]  milliseconds for which it is to have it; '' gives it up
--
-- Reply: {1 (it has it, or has given it up), 0} | {0 (another one has it), for how many milliseconds more}
--
-- Invariant: the key says who was the last to get it, as long as that one says so often enough.
--
--!flags allow-oom
local key, mine = KEYS[1], ARGV[2]
local holder = redis.call('GET', key)
if holder and holder ~= mine then
  return { 0, redis.call('PTTL', key) }
end
if ARGV[3] == '' then
  redis.call('DEL', key)
else
  redis.call('SET', key, mine, 'PX', ARGV[3])
end
return { 1, 0 }
