-- Which of the waiting ids fit: `when` is '' (any time), 'due' or 'later' than the due_cutoff; `past` is '' (any),
-- 'fresh' or 'failed' (in `retries`). Their times and retry counts may be handed in when they are known already.
-- Returns a list of booleans, one per id. At most a few thousand ids: unpack takes no more.
local function fits(prefix, ids, when, past, due_cutoff, times, counts)
  local result = {}
  if #ids == 0 then
    return result
  end
  if when ~= '' and not times then
    times = redis.call('ZMSCORE', prefix .. 'due', unpack(ids))
  end
  if past ~= '' and not counts then
    counts = redis.call('ZMSCORE', prefix .. 'retries', unpack(ids))
  end
  for i = 1, #ids do
    local fit = true
    if when ~= '' then
      local at = times[i] and tonumber(times[i])
      fit = at and (at <= due_cutoff) == (when == 'due')
    end
    if past ~= '' then
      fit = fit and (counts[i] and 'failed' or 'fresh') == past
    end
    result[i] = fit
  end
  return result
end
