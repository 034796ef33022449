-- Which of the ids are in flight under exactly that delivery: id -> record. A delivery that differs was handed
-- out anew since, to somebody else or after a lost reply: what is said of the older one is void.
local function records_of(prefix, delivery, ids)
  local found = {}
  if #ids > 0 then
    local records = redis.call('HMGET', prefix .. 'taken', unpack(ids))
    local head = delivery .. ' '
    for i, record in ipairs(records) do
      if record and string.sub(record, 1, #head) == head then
        found[ids[i]] = record
      end
    end
  end
  return found
end
