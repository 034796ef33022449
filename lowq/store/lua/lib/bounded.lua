-- A time, or a delay, that is a number and not after the year 2242, which means "never": doubles beyond leave the 64
-- bits of an integer reply, and come back as something long overdue. NaN is neither before nor after anything.
local function bounded(time)
  return time < 8589934591 and time or 8589934591
end
