-- Whether the record of an id in flight holds its payload: only then it ends with a newline, without it with a digit.
local function has_inline(record)
  return string.byte(record, -1) == 10
end
