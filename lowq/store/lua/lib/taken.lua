-- The record of an id in flight: "delivery perform_at retry_count level taken_at". If an inline payload was taken, that
-- is in there too, "... taken_at score payload\n", and in no key: one place less to look up, of the few that each job
-- of a long queue costs. Behind the delivery there may be more spaces: `take` fills a record up.
local function parse_taken(record)
  local delivery, perform_at, retry_count = string.match(record, '^(%S+) +(%S+) (%S+)')
  return delivery, perform_at, tonumber(retry_count)
end
