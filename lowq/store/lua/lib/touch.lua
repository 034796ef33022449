-- In a cluster, touching an absent key of a slot that is being migrated aborts the script there and then, and
-- what it wrote before stays. So one EXISTS asks for every per-id key that a script will need, before its
-- first write: it aborts here, or nowhere.
local function touch(prefix, suffixes, ids)
  local keys = {}
  for _, suffix in ipairs(suffixes) do
    for _, id in ipairs(ids) do
      keys[#keys + 1] = prefix .. suffix .. id
    end
  end
  if #keys > 0 then
    redis.call('EXISTS', unpack(keys))
  end
end
