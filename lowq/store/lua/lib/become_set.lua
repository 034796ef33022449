-- A lone payload becomes a set of one, so that others can join or leave it.
local function become_set(key)
  local lone = redis.call('MGET', key)[1]
  if lone then
    local payload, score = split_lone(lone)
    redis.call('DEL', key)
    redis.call('ZADD', key, score, payload)
  end
end
