-- A reshard: the jobs of a shard are moved to the shards of another layout. `meta` says how far that is:
--   sealed  "m epoch", of the shard that they leave: pushes go to that layout, nothing is taken, and only the one who
--           moves the jobs gets the lease
--   moved   1: nothing is left in it. What remains of the shard sends on who comes late
--   fed     1, of a shard that they come to: pushes are accepted, nothing is taken, nobody gets the lease

-- Why jobs of the shard can't be changed by hand just now, or nil: half of an id's jobs may be elsewhere.
local function check_whole(sealed, moved, fed)
  if sealed and moved then
    return redis.error_reply('SEALED ' .. sealed)
  elseif sealed or fed then
    return redis.error_reply('RESHARDING the jobs of the shard are being moved to another layout of the queue')
  end
end
