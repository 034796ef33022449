-- Trace contexts: where payloads were pushed from, for tracing. Only shards that have some
-- (`features`, see lib/features.lua) come here. A context is the id's, not a payload's: it is kept as long as the id
-- waits or is in flight, whatever its payloads merge to.
--   traces:<id>        STRING: "context\n" each, oldest first, of what waits: the latest 32, of up to 256 bytes
--   taken:traces:<id>  the same of what is in flight
-- Both expire a week after the last context: so nothing stays for ever of an id whose other keys were removed by hand.

-- Writes the contexts of a key, the latest of them.
local function write_traces(key, text)
  local ends, at = {}, string.find(text, '\n', 1, true)
  while at do
    ends[#ends + 1] = at
    at = string.find(text, '\n', at + 1, true)
  end
  redis.call('SET', key, #ends > 32 and string.sub(text, ends[#ends - 32] + 1) or text, 'EX', 604800)
end

-- Some contexts with others behind them, each once. A text that is longer than 32 can be is foreign, and not read: it
-- would hold Redis for long.
local function join_traces(text, others)
  text, others = #text > 8224 and '' or text, #others > 8224 and '' or others
  for context in string.gmatch(others, '[^\n]+') do
    local line = context .. '\n'
    if string.sub(text, 1, #line) ~= line and not string.find(text, '\n' .. line, 1, true) then
      text = text .. line
    end
  end
  return text
end

-- Reads the contexts of the ids of a push, before its first write: in a cluster it aborts here, or nowhere. Returns
-- key -> text or false.
local function read_pushed_traces(prefix, width)
  local keys, found = {}, {}
  for i = 8, #ARGV, width do
    keys[#keys + 1] = prefix .. 'traces:' .. ARGV[i]
  end
  for i, text in ipairs(redis.call('MGET', unpack(keys))) do
    found[keys[i]] = text
  end
  return found
end

-- The context of a push joins those of its ids. `present`: as above.
local function add_traces(present, context)
  for key, text in pairs(present) do
    local joined = join_traces(text or '', context)
    if joined ~= text then
      write_traces(key, joined)
    end
  end
end

-- The contexts of an id in flight join those of the waiting one.
local function put_back_traces(prefix, id)
  local taken, waiting = prefix .. 'taken:traces:' .. id, prefix .. 'traces:' .. id
  local texts = redis.call('MGET', taken, waiting)
  if texts[1] then
    write_traces(waiting, join_traces(texts[1], texts[2] or ''))
    redis.call('UNLINK', taken)
  end
end

-- Of the ids that are handed out, before the first write: what the reply says, id, text, id, text... with 64 KiB of
-- text at most; and all that there is, id -> text. `records` are as for `taken`, `in_flight` says of which ids the
-- contexts are taken already. Asks for the keys of the ids that are acknowledged as well, as `touch` does.
local function read_taken_traces(prefix, records, in_flight, acked_ids)
  local ids, keys, found, all, room = {}, {}, {}, {}, 65536
  for i = 1, #records, 2 do
    ids[#ids + 1] = records[i]
    keys[#keys + 1] = prefix .. (in_flight[records[i]] and 'taken:traces:' or 'traces:') .. records[i]
  end
  local touched = { unpack(acked_ids) }
  for _, id in ipairs(ids) do
    touched[#touched + 1] = id
  end
  touch(prefix, { 'taken:traces:' }, touched)
  for i, text in ipairs(#keys > 0 and redis.call('MGET', unpack(keys)) or {}) do
    all[ids[i]] = text or nil
    if text and #text <= room then
      room = room - #text
      found[#found + 1], found[#found + 2] = ids[i], text
    end
  end
  return found, all
end

-- The contexts of ids that are taken, id -> text, are in flight from now on. Of an id that is taken in part they are
-- those of what waits as well.
local function take_traces(prefix, all, in_flight, parted)
  for id, text in pairs(all) do
    if not in_flight[id] and parted[id] then
      write_traces(prefix .. 'taken:traces:' .. id, join_traces(text, ''))
    elseif not in_flight[id] then
      redis.call('RENAME', prefix .. 'traces:' .. id, prefix .. 'taken:traces:' .. id)
    end
  end
end

-- Nothing is kept of these any more. `head`: 'traces:' or 'taken:traces:'.
local function forget_traces(prefix, head, ids)
  if #ids > 0 then
    redis.call('UNLINK', unpack(keys_of(prefix, head, ids)))
  end
end
