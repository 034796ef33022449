-- A reshard: the jobs of a shard are moved to the shards of another layout. `meta` says how far that is:
--   sealed  "m epoch", of the shard that they leave: pushes go to that layout, nothing is taken, and only the one who
--           moves the jobs gets the lease
--   moved   1: nothing is left in it. What remains of the shard sends on who comes late
--   fed     1, of a shard that they come to: pushes are accepted, nothing is taken, nobody gets the lease who does not
--           know that the reshard has ended

-- Why jobs of the shard can't be changed by hand just now, or nil: half of an id's jobs may be elsewhere.
local function check_whole(sealed, moved, fed)
  if sealed and moved then
    return redis.error_reply('SEALED ' .. sealed)
  elseif sealed or fed then
    return redis.error_reply('RESHARDING the jobs of the shard are being moved to another layout of the queue')
  end
end

-- All jobs that belong to a shard have come: it is open. Which steps have is of no use any more.
local function end_feeding(key_meta)
  local gone = { 'fed' }
  for _, name in ipairs(redis.call('HKEYS', key_meta)) do
    if string.sub(name, 1, 6) == 'moved:' then
      gone[#gone + 1] = name
    end
  end
  for start = 1, #gone, 1000 do
    redis.call('HDEL', key_meta, unpack(gone, start, math.min(start + 999, #gone)))
  end
end
