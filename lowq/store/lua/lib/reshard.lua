-- A reshard: the jobs of a shard are moved to the shards of another layout. `meta` says how far that is:
--   sealed  "m epoch", of the shard that they leave: pushes go to that layout, nothing is taken, and only the one who
--           moves the jobs gets the lease
--   moved   1: nothing is left in it. What remains of the shard sends on who comes late
--   fed     1, of a shard that they come to: pushes are accepted, nothing is taken, nobody gets the lease who does not
--           know that the reshard has ended
--   came    the last step in which jobs came to it before it was opened

-- How a script begins that people run on jobs. Returns why they can't be changed by hand just now, or nil: half of an
-- id's jobs may be elsewhere; and what the shard uses (lib/features.lua).
local function begin_action(prefix)
  check_types(prefix)
  local meta = redis.call('HMGET', prefix .. 'meta', 'features', 'sealed', 'moved', 'fed')
  local closed
  if meta[2] and meta[3] then
    closed = redis.error_reply('SEALED ' .. meta[2])
  elseif meta[2] or meta[4] then
    closed = redis.error_reply('RESHARDING the jobs of the shard are being moved to another layout of the queue')
  end
  return closed, meta[1]
end

-- All jobs that belong to a shard have come, in steps up to `came`: it is open. What comes in one of these comes late.
local function end_feeding(key_meta, came)
  local gone, fields = { 'fed' }, redis.call('HGETALL', key_meta)
  for i = 1, #fields, 2 do
    if string.sub(fields[i], 1, 6) == 'moved:' then
      gone[#gone + 1] = fields[i]
      came = math.max(came, tonumber(fields[i + 1]) or 0)
    end
  end
  redis.call('HSET', key_meta, 'came', string.format('%.0f', came))
  for start = 1, #gone, 1000 do
    redis.call('HDEL', key_meta, unpack(gone, start, math.min(start + 999, #gone)))
  end
end
