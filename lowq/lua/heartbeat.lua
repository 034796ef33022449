-- heartbeat: a node lives, or says goodbye.
--
-- KEYS[1]  the registry of nodes
-- ARGV[1]  now: Unix seconds, or '' for the server's clock
-- ARGV[2]  node
-- ARGV[3]  what it says of itself, JSON; '' removes it
-- ARGV[4]  seconds after which a silent node is forgotten
--
-- Reply: 1.
--
-- Invariant: the registry holds no node that has been silent for longer than ARGV[4].
--
--!flags allow-oom
--!include clock
local now = read_now()
if ARGV[3] == '' then
  redis.call('HDEL', KEYS[1], ARGV[2])
else
  redis.call('HSET', KEYS[1], ARGV[2], string.format('%.6f ', now) .. ARGV[3])
end
local nodes = redis.call('HGETALL', KEYS[1])
for i = 1, #nodes, 2 do
  local heartbeat_at = tonumber(string.match(nodes[i + 1], '^%S+'))
  if not heartbeat_at or heartbeat_at < now - tonumber(ARGV[4]) then
    redis.call('HDEL', KEYS[1], nodes[i])
  end
end
return 1
