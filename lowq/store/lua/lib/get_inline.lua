-- "score payload" that the record of an id in flight holds, or nil: its payloads are in a key.
local function get_inline(record)
  return string.match(record, '^%S+ +%S+ %S+ %S+ %S+ ([^ ]* .*)\n$')
end
