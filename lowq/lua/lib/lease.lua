-- Fencing: whoever doesn't hold the lease any more may not write.
local function check_lease(prefix, token)
  if redis.call('GET', prefix .. 'lease') ~= token then
    return redis.error_reply('LEASELOST the shard is leased to somebody else, or to nobody')
  end
end
