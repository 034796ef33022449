-- Which of the ids are in flight under exactly that delivery: id -> record. A delivery that differs was handed
-- out anew since, to somebody else or after a lost reply: what is said of the older one is void.
local function records_of(prefix, delivery, ids)
  local found = {}
  if #ids > 0 then
    local records = redis.call('HMGET', prefix .. 'taken', unpack(ids))
    for i, id in ipairs(ids) do
      if records[i] and parse_taken(records[i]) == delivery then
        found[id] = records[i]
      end
    end
  end
  return found
end
