-- The payloads of an id that wait, and those that are buried, are one key each, in one of two forms:
--   inline     STRING "score payload": a single payload of up to 4,096 bytes, which is what most ids have. As a sorted
--            set of one it would take 850 bytes more as soon as it has more than 64.
--   a set    ZSET payload -> score. It may hold a single payload, too: a set never becomes inline again.
-- Only the snippets beside this one, `take` and `look` know that. MGET answers nil for what is no string, so it tells
-- the forms apart without an error.

-- Payload and score (text) of what is inline.
local function split_inline(inline)
  local space = string.find(inline, ' ', 1, true)
  return string.sub(inline, space + 1), string.sub(inline, 1, space - 1)
end
