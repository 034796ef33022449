-- Whether the record of an id in flight holds its payload: only then it ends with a newline, without it with a digit.
local function carries_lone(record)
  return string.byte(record, -1) == 10
end
