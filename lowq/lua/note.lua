-- note: an entry in the log of what people did.
--
-- KEYS[1]  the log
-- ARGV[1]  now: Unix seconds, or '' for the server's clock
-- ARGV[2]  the entry: JSON, with a token in it that no other entry has
-- ARGV[3]  how many entries are kept
--
-- Reply: 1.
--
-- Invariant: newest first, and never more than ARGV[3]. A repeated call leaves one entry.
--
--!flags allow-oom
--!include clock
for _, entry in ipairs(redis.call('LRANGE', KEYS[1], 0, 19)) do
  if string.match(entry, '^%S+ (.*)$') == ARGV[2] then
    return 1
  end
end
redis.call('LPUSH', KEYS[1], string.format('%.6f ', read_now()) .. ARGV[2])
redis.call('LTRIM', KEYS[1], 0, ARGV[3] - 1)
return 1
