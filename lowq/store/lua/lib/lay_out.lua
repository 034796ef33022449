-- The payload that a record in `taken` holds gets a key, as others have, for whatever treats all of them alike.
local function lay_out(prefix, id, record)
  local lone = carried_lone(record)
  if lone then
    add_payload(prefix .. 'taken:payloads:' .. id, split_lone(lone))
    redis.call('HSET', prefix .. 'taken', id, string.sub(record, 1, -3 - #lone))
  end
end
