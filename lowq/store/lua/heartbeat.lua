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
-- hour, of the latest 50 and 256 KiB at most, for people: each heartbeat reads it. Whatever changes who has a part is
-- published, with the name of the node that called.
--
--!flags allow-oom
local key, me = KEYS[1], ARGV[2]
local now = read_now()
local kept_seconds, most_kept, most_bytes = 3600, 50, 262144

-- An entry: "heartbeat_at silence bytes-of-part part details". Returns also where its part begins and where it ends.
-- The details may be long, and are not copied.
local function parse(entry)
  local at, silence, size, start = string.match(entry, '^(%S+) (%S+) (%d+) ()')
  if tonumber(at) and tonumber(silence) then
    local stop = start + tonumber(size)
    return tonumber(at), tonumber(silence), string.sub(entry, start, stop - 1), start, stop
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
local lost = {}
local nodes = redis.call('HGETALL', key)
for i = 1, #nodes, 2 do
  local node, entry = nodes[i], nodes[i + 1]
  local at, silence, its_part, start, stop = parse(entry)
  if not at or at + silence < now then
    changed = changed or its_part ~= ''
    if not at or at + silence + kept_seconds < now then
      redis.call('HDEL', key, node)
    else
      lost[#lost + 1] = { name = node, at = at, size = #entry }
      if its_part ~= '' then
        write(node, at, string.format('%.17g', silence), '0', string.sub(entry, stop))
      end
    end
  else
    if at > now then -- the clock stepped back: its silence is counted from now on
      at = now
      write(node, at, string.format('%.17g', silence), tostring(#its_part), string.sub(entry, start))
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
table.sort(lost, function(one, other)
  return one.at > other.at
end)
local bytes = 0
for i, node in ipairs(lost) do
  bytes = bytes + node.size
  if i > most_kept or bytes > most_bytes then
    redis.call('HDEL', key, node.name)
  end
end
if first then
  reply[1] = string.format('%.6f', first - now)
end
if changed then
  publish(key, me)
end
return reply
