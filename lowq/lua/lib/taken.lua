-- The record of an id in flight: "delivery perform_at retry_count level taken_at".
local function parse_taken(record)
  local delivery, perform_at, retry_count = string.match(record, '^(%S+) (%S+) (%S+)')
  return delivery, perform_at, tonumber(retry_count)
end
