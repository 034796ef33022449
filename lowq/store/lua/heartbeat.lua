-- heartbeat: a node lives, or says goodbye; and which nodes live besides.
--
-- KEYS[1]  the registry of nodes; changes are published on the channel of the same name
-- ARGV[1]  now: Unix seconds, or '' for the server's clock
-- ARGV[2]  node
-- ARGV[3]  its part in sharing the work, JSON; '' when it has none
-- ARGV[4]  what else it says of itself, JSON; '' removes the node
-- ARGV[5]  seconds of silence after which the node is to be taken for dead
--
-- Reply: {seconds until the first of the others has been silent for too long, or '', now, node, part, node, part...}:
--   the nodes that live and have a part, the caller among them. now: as above.
--
-- Invariant: no node that has been silent for longer than it said has a part. What such a node said last is kept for an
-- hour, of 50 nodes at most, for people. Whatever changes who has a part is published, with the name of the node that
-- called.
--
--!flags allow-oom
local key, me = KEYS[1], ARGV[2]
local now = read_now()
local kept_seconds, most_kept = 3600, 50

-- An entry: "heartbeat_at silence bytes-of-part part details".
local function parse(entry)
  local at, silence, size, rest = string.match(entry, '^(%S+) (%S+) (%d+) (.*)$')
  if tonumber(at) and tonumber(silence) then
    return tonumber(at), tonumber(silence), string.sub(rest, 1, tonumber(size)), rest, size
  end
end

local function write(node, at, silence, size, rest)
  redis.call('HSET', key, node, string.format('%.6f %s %s ', at, silence, size) .. rest)
end

local before = redis.call('HGET', key, me)
local part_before
if before then
  local _, _, part = parse(before)
  part_before = part
end
local part = ''
if ARGV[4] == '' then
  redis.call('HDEL', key, me)
else
  part = ARGV[3]
  write(me, now, ARGV[5], tostring(#part), part .. ARGV[4])
end
local changed = part ~= (part_before or '')

local reply = { '', string.format('%.6f', now) }
local first
local lost = 0
local nodes = redis.call('HGETALL', key)
for i = 1, #nodes, 2 do
  local node = nodes[i]
  local at, silence, its_part, rest, size = parse(nodes[i + 1])
  if not at or at + silence < now then
    changed = changed or its_part ~= ''
    if not at or at + silence + kept_seconds < now or lost >= most_kept then
      redis.call('HDEL', key, node)
    else
      lost = lost + 1
      if its_part ~= '' then
        write(node, at, string.format('%.17g', silence), '0', string.sub(rest, tonumber(size) + 1))
      end
    end
  else
    if at > now then -- the clock stepped back: its silence is counted from now on
      at = now
      write(node, at, string.format('%.17g', silence), size, rest)
    end
    if its_part ~= '' then
      reply[#reply + 1] = node
      reply[#reply + 1] = its_part
    end
    if node ~= me and (not first or at + silence < first) then
      first = at + silence
    end
  end
end
if first then
  reply[1] = string.format('%.6f', first - now)
end
if changed then
  publish(key, me)
end
return reply
