-- register: a queue and its options, in the registry of queues.
--
-- KEYS[1]  the registry of queues
-- ARGV[1]  now: not used; every script has it first
-- ARGV[2]  queue
-- ARGV[3]  shards_count
-- ARGV[4]  its entry: JSON {"shards_count": n, "options": {...}}; '' when the caller only knows shards_count
--
-- Reply: 1.
-- Errors: SHARDSCOUNT n: the queue has n shards; nothing was written.
--
-- Invariant: shards_count is set by whoever uses the queue first and never changes; other options are last-wins.
--
--!flags allow-oom
local entry = redis.call('HGET', KEYS[1], ARGV[2])
if entry then
  local existing = cjson.decode(entry)['shards_count']
  if existing ~= tonumber(ARGV[3]) then
    return redis.error_reply('SHARDSCOUNT ' .. string.format('%d', existing))
  end
end
if ARGV[4] ~= '' then
  redis.call('HSET', KEYS[1], ARGV[2], ARGV[4])
elseif not entry then
  redis.call('HSET', KEYS[1], ARGV[2], string.format('{"shards_count":%d,"options":{}}', tonumber(ARGV[3])))
end
return 1
