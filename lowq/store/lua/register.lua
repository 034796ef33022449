-- register: a queue and its options, in the registry of queues.
--
-- KEYS[1]  the registry of queues
-- ARGV[1]  now: not used; every script has it first
-- ARGV[2]  queue
-- ARGV[3]  shards_count
-- ARGV[4]  its entry: JSON {"shards_count": n, "options": {...}}; '' when the caller only knows shards_count
-- ARGV[5]  the entry that this one was made from; '' or missing: it is entered whatever there is
--
-- Reply: 1; or the entry that there was before, if it was another one. When that is not the one of ARGV[5], nothing was
-- written.
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
if entry and (ARGV[5] or '') ~= '' and entry ~= ARGV[5] then
  return entry
elseif ARGV[4] ~= '' then
  redis.call('HSET', KEYS[1], ARGV[2], ARGV[4])
elseif not entry then
  redis.call('HSET', KEYS[1], ARGV[2], string.format('{"shards_count":%d,"options":{}}', tonumber(ARGV[3])))
end
return entry and entry ~= ARGV[4] and entry or 1
