-- What is kept of an id whose owners end with it in flight: "crashes", or "crashes uncharged". The first number counts
-- deaths; the second, how often an owner that was told to stop did not wait for it any longer, and it went uncharged.
local function read_crashes(prefix, id)
  local crashes, uncharged = string.match(redis.call('HGET', prefix .. 'crashes', id) or '', '^(%d+) ?(%d*)$')
  return tonumber(crashes) or 0, tonumber(uncharged) or 0
end
local function write_crashes(prefix, id, crashes, uncharged)
  local value = string.format(uncharged > 0 and '%d %d' or '%d', crashes, uncharged)
  redis.call('HSET', prefix .. 'crashes', id, value)
end
