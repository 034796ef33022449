-- A job in flight waits again: payloads merged back, its own perform_at and retry_count win over those of a
-- job with the same id that arrived meanwhile. `perform_at` overrides when given. Otherwise the job was due when it was
-- taken and is so still, also when the server's clock has stepped back since.
local function put_back(prefix, id, record, now, perform_at)
  local _, was_due, retry_count = parse_taken(record)
  local inline, waiting = get_inline(record), prefix .. 'payloads:' .. id
  if inline and not redis.call('SET', waiting, inline, 'NX') then
    add_payload(waiting, split_inline(inline))
  end
  merge(prefix .. 'taken:payloads:' .. id, waiting)
  redis.call('HDEL', prefix .. 'taken', id)
  redis.call('ZADD', prefix .. 'due', perform_at or math.min(tonumber(was_due), now), id)
  if retry_count >= 0 then
    redis.call('ZADD', prefix .. 'retries', retry_count, id)
  end
end
