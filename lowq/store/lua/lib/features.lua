-- Features that a shard uses and most don't: `features` in `meta`, words with spaces around each, such as
-- " ttl debounce ". It is written with the first push that uses one, and looked at in an HMGET that is made anyway: a
-- shard that uses none pays nothing for them.

-- Whether a shard uses it. `features`: the field of `meta`, or false.
local function uses(features, word)
  return features and string.find(features, ' ' .. word .. ' ', 1, true) ~= nil
end

-- Notes that a shard uses it, or uses it no more. Returns the field as it is then, or false.
local function note_feature(prefix, features, word, is_used)
  local noted = features and string.find(features, ' ' .. word .. ' ', 1, true)
  if is_used and not noted then
    features = (features or ' ') .. word .. ' '
    redis.call('HSET', prefix .. 'meta', 'features', features)
  elseif noted and not is_used then
    features = string.gsub(features, ' ' .. word .. ' ', ' ', 1)
    if features == ' ' then
      redis.call('HDEL', prefix .. 'meta', 'features')
      return false
    end
    redis.call('HSET', prefix .. 'meta', 'features', features)
  end
  return features
end

-- A waiting id is put off no longer by more payloads.
local function end_debounce(prefix, id, features)
  if uses(features, 'debounce') then
    redis.call('ZREM', prefix .. 'debounced', id)
  end
end

-- Adds to a counter of the shard.
local function add_to_meta(prefix, field, count)
  if count > 0 then
    redis.call('HINCRBY', prefix .. 'meta', field, count)
  end
end

-- Tells pushes that wait for room that there is some. A push that did not fit has noted `full`.
local function announce_room(prefix, features)
  if uses(features, 'full') then
    note_feature(prefix, features, 'full', false)
    publish(prefix .. 'room', '')
  end
end

-- Features that the keys of a shard show and its `features` don't say: after `meta` was lost. Words.
local function find_missing_features(prefix, features)
  local missing = {}
  local top = redis.call('ZRANGE', prefix .. 'due', -1, -1, 'WITHSCORES')[2]
  if top and split_score(top) > 0 and not uses(features, 'priority') then
    missing[#missing + 1] = 'priority'
  end
  if redis.call('EXISTS', prefix .. 'expires') == 1 and not uses(features, 'ttl') then
    missing[#missing + 1] = 'ttl'
  end
  if redis.call('EXISTS', prefix .. 'debounced') == 1 and not uses(features, 'debounce') then
    missing[#missing + 1] = 'debounce'
  end
  return missing
end
