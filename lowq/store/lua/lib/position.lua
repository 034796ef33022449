-- Whether an id comes before another among equal scores. Byte by byte: Lua's own `<` goes by the collation of
-- the server's locale.
local function precedes(a, b)
  for i = 1, math.min(#a, #b) do
    local x, y = string.byte(a, i), string.byte(b, i)
    if x ~= y then
      return x < y
    end
  end
  return #a < #b
end

-- Where the position (score, id) is in a sorted set: how many ids come before it, and whether its own stands
-- there. The id need not be in the set any more, and a million others may share its score.
local function rank_of(key, score, id)
  local low = redis.call('ZCOUNT', key, '-inf', '(' .. score)
  local high = redis.call('ZCOUNT', key, '-inf', score)
  while low < high do
    local middle = math.floor((low + high) / 2)
    local found = redis.call('ZRANGE', key, middle, middle)[1]
    if found == id then
      return middle, true
    elseif precedes(found, id) then
      low = middle + 1
    else
      high = middle
    end
  end
  return low, false
end
