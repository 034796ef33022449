-- Time, in Unix seconds. A number goes to redis.call as it is (Redis writes it with 17 digits); it must never
-- pass through tostring, .. or cjson, which keep 14 digits and lose the microseconds.
local function read_now()
  if ARGV[1] ~= '' then
    return math.min(tonumber(ARGV[1]), 8589934591)
  end
  local time = redis.call('TIME')
  return tonumber(time[1]) + tonumber(time[2]) / 1000000
end
