-- register: a queue and its options, in the registry of queues.
--
-- KEYS[1]  the registry of queues
-- ARGV[1]  now: not used; every script has it first
-- ARGV[2]  queue
-- ARGV[3]  shards_count, as the caller's code says it
-- ARGV[4]  its entry: JSON {"shards_count": n, "options": {...}}; '' when the caller only knows shards_count
-- ARGV[5]  the entry that this one was made from; '' or missing: it is entered whatever there is
-- ARGV[6]  '1': another number of shards is an error; otherwise '' or missing, and the caller follows the registry
-- ARGV[7]  the layout that the caller knows, as an entry has it up to its options; '' or missing: that of its code
--
-- Reply: 1; or the entry that there was before, if it was another one, or says another number of shards, or an epoch or
-- a reshard. When that is not the one of ARGV[5], nothing was written. Where there was none, and the layout of ARGV[7]
-- was entered: the new entry.
-- Errors: SHARDSCOUNT n: the queue has n shards; nothing was written.
--
-- Invariant: the layout (shards_count, epoch, reshard) is set by whoever uses the queue first, and changed by
-- `set_layout` alone: what is before the options of an entry stays as it is. Other options are last-wins.
-- When Redis has lost the entry, whoever has served a later epoch enters that one: the jobs are in its shards.
--
--!flags allow-oom
local entry = redis.call('HGET', KEYS[1], ARGV[2])
local text, is_plain = ARGV[4], true
if entry then
  local decoded = cjson.decode(entry)
  if type(decoded['shards_count']) ~= 'number' or decoded['shards_count'] < 1 then
    return redis.error_reply('ERR the entry of the queue can not be read')
  end
  if decoded['shards_count'] ~= tonumber(ARGV[3]) and ARGV[6] == '1' then
    return redis.error_reply('SHARDSCOUNT ' .. string.format('%d', decoded['shards_count']))
  end
  is_plain = decoded['shards_count'] == tonumber(ARGV[3]) and not decoded['epoch'] and not decoded['reshard']
  if not is_plain and text ~= '' then
    local head, options = string.match(entry, '^(.-)"options":'), string.match(text, '"options": ?(.*)$')
    text = (head or string.gsub(entry, '}%s*$', ', ', 1)) .. '"options": ' .. options
  end
end
if entry and (ARGV[5] or '') ~= '' and entry ~= ARGV[5] then
  return entry
elseif not entry and (ARGV[7] or '') ~= '' then
  text = ARGV[7] .. '"options": ' .. (string.match(text, '"options": ?(.*)$') or '{}}')
  redis.call('HSET', KEYS[1], ARGV[2], text)
  return text
elseif text ~= '' then
  redis.call('HSET', KEYS[1], ARGV[2], text)
elseif not entry then
  redis.call('HSET', KEYS[1], ARGV[2], string.format('{"shards_count":%d,"options":{}}', tonumber(ARGV[3])))
end
return entry and (not is_plain or entry ~= ARGV[4]) and entry or 1
