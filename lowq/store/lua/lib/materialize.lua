-- The payload that a record in `taken` holds gets a key, as others have, for whatever treats all of them alike.
local function materialize(prefix, id, record)
  local inline = get_inline(record)
  if inline then
    add_payload(prefix .. 'taken:payloads:' .. id, split_inline(inline))
    redis.call('HSET', prefix .. 'taken', id, string.sub(record, 1, -3 - #inline))
  end
end
