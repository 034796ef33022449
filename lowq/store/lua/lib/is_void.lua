-- Whether a call of an operator comes after a repeat of itself, out of a connection that was given up meanwhile. Then
-- it has been done, and what has come since is not meant. `attempt`: a random token of this attempt, and behind it
-- those of the earlier attempts of the same call, which are void from now on: "token earlier earlier"; '': it is never
-- repeated. They are kept for an hour, and the latest 1,000 of them: by then no connection holds anything back.
local function is_void(prefix, attempt, now)
  local key = prefix .. 'void'
  local token, earlier = string.match(attempt, '^(%S*) ?(.*)$')
  if redis.call('ZSCORE', key, token) then
    return true
  end
  if earlier ~= '' then
    for each in string.gmatch(earlier, '%S+') do
      redis.call('ZADD', key, now, each)
    end
    redis.call('ZREMRANGEBYRANK', key, 0, -1001)
    redis.call('EXPIRE', key, 3600)
  end
  return false
end
