-- The right to write to a shard.

-- The lease is a key that expires. `meta` says the same (owner, fence, leased_until), as Redis may evict the key when
-- memory is short: a maxmemory-policy volatile-* takes keys that expire. Such a lease holds on, by the server's clock,
-- and never for longer than a whole one: that clock may have stepped back. Puts the key there again. Returns the token,
-- and the milliseconds that it has left, or nil.
local function restore_lease(prefix, now)
  local meta = redis.call('HMGET', prefix .. 'meta', 'owner', 'fence', 'leased_until', 'lease_ttl')
  local left = ((tonumber(meta[3] or '') or 0) - now) * 1000
  left = math.floor(math.min(left, tonumber(meta[4] or '') or 0))
  -- The key ends up to a millisecond earlier: so little is none.
  if not (meta[1] and meta[2] and left > 1) then
    return nil
  end
  local token = meta[1] .. ':' .. meta[2]
  redis.call('SET', prefix .. 'lease', token, 'PX', left)
  redis.call('HSET', prefix .. 'meta', 'leased_until', now + left / 1000)
  return token, left
end

-- Fencing: without the lease, a caller may not write.
local function check_lease(prefix, token)
  if redis.call('GET', prefix .. 'lease') ~= token then
    if redis.call('EXISTS', prefix .. 'lease') == 1 or restore_lease(prefix, read_now()) ~= token then
      return redis.error_reply('LEASELOST the shard is leased to somebody else, or to nobody')
    end
  end
end
