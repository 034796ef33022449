-- Whether what a key of payloads holds is in one of their forms, as far as its type and its beginning tell.
local function begins_with_score(inline)
  return tonumber(string.match(inline, '^(%S+) ') or '') ~= nil
end

local function is_readable(key)
  local kind = redis.call('TYPE', key).ok
  if kind == 'string' then
    return begins_with_score(redis.call('GETRANGE', key, 0, 40))
  end
  return kind == 'zset' or kind == 'none'
end
