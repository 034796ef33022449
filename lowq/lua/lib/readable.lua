-- Whether what a key of payloads holds is in one of their forms, as far as its type and its beginning tell.
local function is_readable(key)
  local kind = redis.call('TYPE', key).ok
  if kind == 'string' then
    return tonumber(string.match(redis.call('GETRANGE', key, 0, 40), '^(%S+) ') or '') ~= nil
  end
  return kind == 'zset' or kind == 'none'
end
