-- Clears what is known of an id's past: its next payloads start afresh.
local function forget(prefix, id)
  redis.call('ZREM', prefix .. 'retries', id)
  redis.call('HDEL', prefix .. 'errors', id)
  redis.call('SREM', prefix .. 'solo', id)
  redis.call('HDEL', prefix .. 'crashes', id)
end
