-- The faults that the doctor looks for.

-- The fault of an id as far as one kind of key tells: a code, or nil when there is none. `what` is the name of a set in
-- which the id was found, or the beginning of its payloads key. An id may wait, be in flight and be buried at once; a
-- fault is a state that no transition leaves behind. Looks at everything anew, so a job that moved meanwhile has none.
-- `delivered` is the shard's counter of deliveries.
local function find_integrity_error(prefix, what, id, delivered)
  local function in_set(set)
    return redis.call('ZSCORE', prefix .. set, id) ~= false
  end
  local function has(suffix)
    return redis.call('EXISTS', prefix .. suffix .. id) == 1
  end
  local record = redis.call('HGET', prefix .. 'taken', id)
  local waits, is_buried = has_payloads(prefix .. 'payloads', id), has_payloads(prefix .. 'morgue:payloads', id)

  local place = string.match(what, '^(.*payloads):?$')
  if place and not is_readable(prefix, place, id) then
    return 'payloads_unreadable'
  end
  if what == 'due' then
    return in_set('due') and not waits and 'due_without_payloads' or nil
  elseif what == 'morgue' then
    return in_set('morgue') and not is_buried and 'morgue_without_payloads' or nil
  elseif place == 'payloads' then
    return waits and not in_set('due') and 'orphan_payloads' or nil
  elseif place == 'taken:payloads' then
    return has('taken:payloads:') and not record and 'orphan_taken_payloads' or nil
  elseif place == 'morgue:payloads' then
    return is_buried and not in_set('morgue') and 'orphan_morgue_payloads' or nil
  elseif what == 'taken' then
    if not record then
      return nil
    end
    local delivery, perform_at, retry_count = parse_taken(record)
    if not (tonumber(delivery) and tonumber(perform_at) and retry_count) then
      return 'taken_unreadable'
    elseif not get_inline(record) and not has('taken:payloads:') then
      return 'taken_without_payloads'
    end
    return tonumber(delivery) > delivered and 'delivery_behind' or nil
  end

  -- When payloads expire is known of those that are there.
  if what == 'expires:' then
    if not waits then
      return has(what) and 'leftovers' or nil
    end
    return has(what) and not in_set('expires') and 'expiry_unindexed' or nil
  elseif what == 'taken:expires:' then
    return has(what) and not has('taken:payloads:') and 'leftovers' or nil
  elseif what == 'traces:' then
    return has(what) and not in_set('due') and not waits and 'leftovers' or nil
  elseif what == 'taken:traces:' then
    return has(what) and not record and 'leftovers' or nil
  end

  -- The past of an id: of one that waits (`retries`), waits or is in flight, or is buried. That of
  -- payloads which only an entry is missing for is kept: it is theirs again once they are put right.
  local there, kept
  if what == 'morgue:errors' then
    there = redis.call('HEXISTS', prefix .. what, id) == 1
    kept = in_set('morgue') or is_buried
  else
    if what == 'retries' or what == 'expires' or what == 'debounced' then
      there = in_set(what)
    elseif what == 'solo' then
      there = redis.call('SISMEMBER', prefix .. what, id) == 1
    else
      there = redis.call('HEXISTS', prefix .. what, id) == 1
    end
    kept = in_set('due') or waits
    if record then
      kept = kept or (what ~= 'retries' and what ~= 'expires' and what ~= 'debounced')
    elseif what ~= 'expires' and what ~= 'debounced' then
      kept = kept or has('taken:payloads:')
    end
  end
  return there and not kept and 'leftovers' or nil
end
