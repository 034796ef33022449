-- An inline payload becomes a set of one, so that others can join or leave it.
local function promote_to_zset(key)
  local inline = redis.call('MGET', key)[1]
  if inline then
    local payload, score = split_inline(inline)
    redis.call('DEL', key)
    redis.call('ZADD', key, score, payload)
  end
end
