-- Fencing: whoever doesn't hold the lease any more may not write.
local function check_lease(prefix, token)
  if redis.call('GET', prefix .. 'lease') ~= token then
    if redis.call('EXISTS', prefix .. 'lease') == 1 or restore_lease(prefix, read_now()) ~= token then
      return redis.error_reply('LEASELOST the shard is leased to somebody else, or to nobody')
    end
  end
end
