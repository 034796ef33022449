-- Adds a payload with its score (text). Of two equal ones the lowest score stays. `form`: what is known of the key: the
-- text of an inline payload, false (no inline one), true (a set), or nil (nothing). Returns it as it is afterwards.
local function add_payload(key, payload, score, form)
  if form == nil then
    form = redis.call('MGET', key)[1]
  end
  local inline = not form and #payload <= 4096 and score .. ' ' .. payload
  if inline and redis.call('SET', key, inline, 'NX') then
    return inline
  end
  if not form or form == true then
    redis.call('ZADD', key, 'LT', score, payload)
    return true
  end
  local present, its_score = split_inline(form)
  if present ~= payload then
    redis.call('DEL', key)
    redis.call('ZADD', key, its_score, present, score, payload)
    return true
  end
  if tonumber(score) < tonumber(its_score) then
    form = score .. ' ' .. payload
    redis.call('SET', key, form)
  end
  return form
end
