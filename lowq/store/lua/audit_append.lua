-- audit_append: an entry in the log of what people did.
--
-- KEYS[1]  the log
-- ARGV[1]  now: Unix seconds, or '' for the server's clock
-- ARGV[2]  the entry: JSON, with a token in it that no other entry has
-- ARGV[3]  how many entries are kept
-- ARGV[4]  token of the entry that this one replaces, if it is still there; '' or absent = none
--
-- Reply: 1.
--
-- Invariant: newest first, and never more than ARGV[3]. A repeated call leaves one entry.
--
--!flags allow-oom
for _, entry in ipairs(redis.call('LRANGE', KEYS[1], 0, 19)) do
  if string.match(entry, '^%S+ (.*)$') == ARGV[2] then
    return 1
  end
end
local replaced = ARGV[4] and ARGV[4] ~= '' and '"token": "' .. ARGV[4] .. '"'
for first = 0, replaced and tonumber(ARGV[3]) - 1 or -1, 100 do
  for _, entry in ipairs(redis.call('LRANGE', KEYS[1], first, first + 99)) do
    if replaced and string.find(entry, replaced, 1, true) then
      redis.call('LREM', KEYS[1], 1, entry)
      replaced = false
    end
  end
  if not replaced then
    break
  end
end
redis.call('LPUSH', KEYS[1], string.format('%.6f ', read_now()) .. ARGV[2])
redis.call('LTRIM', KEYS[1], 0, ARGV[3] - 1)
return 1
