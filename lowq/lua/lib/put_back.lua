-- A job in flight waits again: payloads merged back, its own perform_at and retry_count win over those of a
-- job with the same id that arrived meanwhile. `perform_at` overrides when given.
local function put_back(prefix, id, record, perform_at)
  local _, was_due, retry_count = parse_taken(record)
  lay_out(prefix, id, record)
  merge(prefix .. 'taken:payloads:' .. id, prefix .. 'payloads:' .. id)
  redis.call('HDEL', prefix .. 'taken', id)
  redis.call('ZADD', prefix .. 'due', perform_at or was_due, id)
  if retry_count >= 0 then
    redis.call('ZADD', prefix .. 'retries', retry_count, id)
  end
end
