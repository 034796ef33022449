"""Scripts that are broken on purpose, without a word about how their Lua is written.

A function of a script, or of the library before it, is broken by its name; a command, by what it asks Redis, or by
what it answers to the script. So a script can be rewritten, and its mutants stay.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from lowq.store.calls import Script, load_scripts

#: `redis.call` as all that follows sees it.
_CALL = """\
local real = redis.call
local redis = setmetatable({ call = function(command, ...)
  local args, key = { ... }, ...
%s
  return real(command, unpack(args))
end }, { __index = redis })
"""

#: An outcome counts whatever delivery it is of.
ANY_DELIVERY = """\
local function records_of(prefix, _, ids)
  local found = {}
  for _, id in ipairs(ids) do
    found[id] = redis.call('HGET', prefix .. 'taken', id) or nil
  end
  return found
end"""
#: Whoever had the lease once may write.
NO_FENCE = "local function check_lease() end"
#: The memory of push calls has no token of the call itself.
NEVER_PUSHED = {"LPOS": "if args[2] == ARGV[2] then return false end"}
#: Payloads in flight that had a key of their own outlive their acknowledgement.
ACKED_STAY = {"UNLINK": "if string.find(key, 'taken:payloads:', 1, true) then return 0 end"}


def break_scripts(
    names: Iterable[str], *, function: str = "", calls: Mapping[str, str] | None = None, front: str = ""
) -> dict[str, Script]:
    """All scripts, with these broken.

    `function`: Lua of a function that takes the place of the one with its name, which it may call as `sound`.
    `calls`: command -> Lua that runs in place of it. It sees `args`, of which the first is `key`, and may change them:
    the command is run with them unless the Lua returns something itself. `real` is the unbroken `redis.call`.
    `front`: Lua that runs first.

    Raises:
        AssertionError: a script has no such function or never uses the command: the mutant would show nothing.
    """
    scripts = dict(load_scripts())
    for name in names:
        scripts[name] = _break(scripts[name], function, calls or {}, front)
    return scripts


def having(function: str) -> list[str]:
    """Names of the scripts that have that function."""
    return [name for name, script in load_scripts().items() if _find(script, function)]


def _break(script: Script, function: str, calls: Mapping[str, str], front: str) -> Script:
    source = script.source
    for command in calls:
        assert f"'{command}'" in source, f"{script.name}.lua doesn't use {command}: break it otherwise"
    if function:
        head = re.match(r"local function (\w+)\(", function)
        assert head, "not a function"
        found = _find(script, head[1])
        assert found, f"{script.name}.lua has no function {head[1]}: break it otherwise"
        source = f"{source[: found.end()]}\nlocal sound = {head[1]}\n{function}\n{source[found.end() :]}"
    if calls:
        branches = [f"  if command == '{command}' then\n    {lua}\n  end" for command, lua in calls.items()]
        source = _CALL % "\n".join(branches) + source
    if front:
        source = f"{front}\n{source}"
    assert source != script.source, f"{script.name}.lua is not broken"
    return replace(script, source=source)


def _find(script: Script, function: str) -> re.Match[str] | None:
    return re.search(rf"^local function {function}\(.*?^end$", script.source, re.MULTILINE | re.DOTALL)


# --- bugs that somebody might write: `rules/shards/test_state_machine.py` and the simulator find them ---


@dataclass(frozen=True)
class Mutation:
    """A bug that somebody might write, in these scripts: what it is made of is described at `break_scripts`."""

    name: str
    scripts: Sequence[str]
    function: str
    calls: Mapping[str, str]
    front: str
    #: The merge policies of the stories that show it.
    policies: Sequence[str]
    #: Whether random stories meet it late or hardly ever: then `rules/shards/stories.py` tells one that does.
    rare: bool

    def scripts_with_it(self) -> dict[str, Script]:
        return break_scripts(self.scripts, function=self.function, calls=self.calls, front=self.front)


def bug(
    name: str,
    scripts: str,
    function: str = "",
    *,
    front: str = "",
    policies: str = "collapse",
    rare: bool = False,
    **calls: str,
) -> Mutation:
    return Mutation(name, scripts.split(), function, calls, front, policies.split(), rare)


#: What is done when the payload that is added is the one that is there inline.
ADD_EQUAL = """\
local function add_payload(place, id, payload, score, form, expires)
  if form == nil then
    form = redis.call('HGET', place, id)
  end
  if type(form) == 'string' then
    local present, its_score = split_inline(form)
    if present == payload then
      if %s then
        form = score .. ' ' .. payload
        redis.call('HSET', place, id, form)
      end
      return form
    end
  end
  return sound(place, id, payload, score, form, expires)
end"""

MUTATIONS = [
    bug("ack by id alone", "ack_and_take", ANY_DELIVERY, rare=True),
    bug("fail by id alone", "fail release", ANY_DELIVERY, rare=True),
    bug("push takes the last score", "push", ZADD="if args[2] == 'LT' then table.remove(args, 2) end"),
    bug("a second payload replaces the inline one", "push release acquire",
        ZADD="if #args == 5 and string.find(key, 'payloads:', 1, true) then args = { key, args[4], args[5] } end"),
    bug("an equal payload of an inline one takes the last score", "push release acquire", ADD_EQUAL % "true",
        rare=True),
    bug("scores of inline payloads are compared as texts", "push release acquire", ADD_EQUAL % "score < its_score",
        rare=True),
    bug("long payloads are kept inline", "push", """\
local function add_payload(place, id, payload, score, form, expires)
  local inline = score .. (expires and ',' .. expires or '') .. ' ' .. payload
  if not form and redis.call('HSETNX', place, id, inline) == 1 then
    return inline
  end
  return sound(place, id, payload, score, form, expires)
end"""),
    bug("push overwrites what waits", "push", HMGET="if string.sub(key, -9) == ':payloads' then return {} end"),
    bug("push overwrites what it wrote itself", "push", front="local written = {}",
        HSET="for i = 2, #args, 2 do written[key .. ':' .. args[i]] = { key, args[i] } end",
        ZADD="""\
    local at = written[key]
    if at then return real('HSET', at[1], at[2], args[#args - 1] .. ' ' .. args[#args]) end"""),
    bug("push writes what is inline too late", "push", front="local held = {}",
        HSET="if string.sub(key, -9) == ':payloads' then held[#held + 1] = args return 0 end",
        ZADD="""\
    while string.sub(key, -3) == 'due' and #held > 0 do real('HSET', unpack(table.remove(held))) end"""),
    bug("an inline payload goes to another id", "ack_and_take", HMGET="""\
    if string.sub(key, -9) == ':payloads' then
      local values, reversed = real(command, unpack(args)), {}
      for i = 1, #args - 1 do reversed[i] = values[#args - i] end
      return reversed
    end"""),
    bug("what comes back alone replaces an inline newer payload", "fail release acquire", """\
local function merge_set(source, place, id, budget)
  if redis.call('ZCARD', source) == 1 and redis.call('HDEL', place, id) == 1 then
    redis.call('RENAME', source, place .. ':' .. id)
    return true
  end
  return sound(source, place, id, budget)
end""", rare=True),
    bug("an inline payload in the way of what comes back", "fail release acquire",
        "local function promote_to_zset() end"),
    bug("an inline payload can't be exhausted", "fail", "local function materialize() end"),
    bug("what comes back forgets the payload in its record", "fail release acquire", """\
local function put_back(prefix, id, record, now, perform_at)
  local inline = get_inline(record)
  sound(prefix, id, inline and string.sub(record, 1, -3 - #inline) or record, now, perform_at)
end"""),
    bug("what goes into a record stays behind", "ack_and_take",
        HDEL="if string.sub(key, -9) == ':payloads' then return 0 end"),
    bug("payloads that were in a key stay there", "ack_and_take", UNLINK=ACKED_STAY["UNLINK"]),
    bug("push overwrites perform_at", "push", ZADD="if args[2] == 'NX' then table.remove(args, 2) end"),
    bug("a repeated push pushes again", "push", LPOS=NEVER_PUSHED["LPOS"]),
    bug("what comes back replaces newer payloads", "fail release acquire", """\
local function merge_set(source, place, id, budget)
  if string.find(source, 'taken:payloads:', 1, true) and redis.call('EXISTS', source) == 1 then
    redis.call('HDEL', place, id)
    redis.call('RENAME', source, place .. ':' .. id)
    return true
  end
  return sound(source, place, id, budget)
end"""),
    bug("what comes back takes the last score", "fail release acquire",
        ZADD="if args[2] == 'LT' then table.remove(args, 2) end", rare=True),
    bug("exhausted buries the highest", "fail",
        ZRANGE="if args[2] == 0 and args[3] == 0 then args[2], args[3] = -1, -1 end"),
    bug("exhausted forgets to start afresh", "fail", """\
local function exhaust(id, record, reason)
  local before = redis.call('ZSCORE', prefix .. 'due', id)
  local buried = sound(id, record, reason)
  redis.call('ZREM', prefix .. 'due', id)
  if before then
    redis.call('ZADD', prefix .. 'due', before, id)
  end
  return buried
end""", rare=True),
    bug("an attempt hides those before it", "fail", "local function attempts_of() return '' end",
        policies="collapse+kept", rare=True),
    bug("what was cancelled waits again", "fail release acquire", "local function mark_in() end"),
    bug("a cancelled job keeps its past", "fail release acquire", """\
local function drop_cancelled(prefix, id, features)
  local errors, crashes = redis.call('HGET', prefix .. 'errors', id), redis.call('HGET', prefix .. 'crashes', id)
  sound(prefix, id, features)
  if errors then
    redis.call('HSET', prefix .. 'errors', id, errors)
  end
  if crashes then
    redis.call('HSET', prefix .. 'crashes', id, crashes)
  end
end"""),
    bug("a newer payload hides a cancel", "push", "local function mark_in() end", policies="cancel", rare=True),
    bug("what a lost reply held stays in flight", "ack_and_take", front="ARGV[3] = ARGV[3] + 1000000"),
    # What the caller has in its hand is not there; what it never got still is.
    bug("an id in flight is taken again", "ack_and_take", "local function find_in_flight() return 0 end", HGETALL="""\
    local records, unknown = real(command, key), {}
    for i = 1, #records, 2 do
      if tonumber(string.match(records[i + 1], '^%d+')) > tonumber(ARGV[3]) then
        unknown[#unknown + 1], unknown[#unknown + 2] = records[i], records[i + 1]
      end
    end
    do return unknown end"""),
    bug("retrying ids come in company", "ack_and_take", """\
local function hand_out(id, key, inline, perform_at, retry_count, alone, ...)
  local more, stopped = sound(id, key, inline, perform_at, retry_count, false, ...)
  return more and not alone, stopped
end""", rare=True),
    bug("the rest of a parted id is dropped", "ack_and_take", ZREMRANGEBYRANK="args[3] = -1"),
    bug("what was handed out stays behind", "ack_and_take", ZREMRANGEBYRANK="args[2] = args[2] + 1"),
    bug("the fence is not looked at", "ack_and_take fail", NO_FENCE),
    # Whose it was isn't known; only `restore_lease` still knows.
    bug("resuming is a crash", "acquire", HMGET="""\
    local values = real(command, unpack(args))
    if string.find(table.concat(args, ' '), 'uncharged', 1, true) then
      for i, field in ipairs(args) do
        if field == 'owner' then values[i - 1] = false end
      end
    end
    do return values end"""),
    bug("crashes are not counted", "acquire", """\
local function write_crashes(prefix, id, _, uncharged)
  sound(prefix, id, (read_crashes(prefix, id)), uncharged)
end"""),
    bug("the owner resumes when some of its jobs wait again", "acquire",
        HDEL="if args[2] == 'owner' then table.remove(args, 2) end", rare=True),
    bug("an acknowledgement makes room, and nobody is told", "ack_and_take", "local function announce_room() end",
        policies="capacity", rare=True),
    bug("the lease is given before all is restored", "acquire",
        EXISTS="if string.sub(key, -5) == 'taken' then return 0 end", rare=True),
    bug("sparing lasts", "acquire", HDEL="if args[2] == 'uncharged' then return 0 end"),
    bug("surrender with jobs in flight", "surrender", EXISTS="if string.sub(key, -5) == 'taken' then return 0 end"),
    bug("a late attempt is done", "kick delete bury perform_now",
        ZSCORE="if string.sub(key, -10) == 'superseded' then return false end"),
    bug("kick keeps the retry_count", "kick", ZREM="if string.sub(key, -7) == 'retries' then return 0 end",
        rare=True),
    bug("what was due waits when the clock has stepped back", "push ack_and_take",
        "local function shift_due() return true end"),
    bug("a retry is due by the shard's clock", "fail", """\
local function put_back(prefix, id, record, now, perform_at)
  local clock = tonumber(redis.call('HGET', prefix .. 'meta', 'clock') or '') or now
  if perform_at and clock ~= now then
    perform_at = clock + (perform_at - now)
  end
  sound(prefix, id, record, now, perform_at)
end"""),
    # Not of the ranges without an upper end: a loop over the levels goes from one to the next by its lower end, and
    # would never end.
    bug("a step back starts what was jumped over", "push ack_and_take",
        ZRANGE="if args[4] == 'BYSCORE' and args[3] ~= '+inf' then args[2] = '(' .. ARGV[1] end"),
    bug("of two equal payloads the later time counts", "push release fail",
        ZADD="if args[2] == 'XX' and args[3] == 'LT' then args[3] = 'GT' end", rare=True),
    bug("what comes back never expires", "fail release acquire", """\
local function split_inline(inline)
  local payload, score = sound(inline)
  return payload, score
end"""),
    bug("payloads that come back as a set forget when they expire", "fail release acquire",
        "local function merge_expiries() return true end", rare=True),
    bug("what has expired is handed out", "ack_and_take", "local function sweep_expired() return 0, {} end"),
    bug("what was lost is handed out though it has expired", "ack_and_take",
        "local function expire_taken() return false end", rare=True),
    bug("an id that waits becomes no more urgent", "push", "local function raise_levels() return true end"),
    bug("what comes back forgets its priority", "fail release", "local function level_in() return 0 end",
        rare=True),
    bug("the least urgent starve", "ack_and_take",
        "local function read_levels(prefix, _, count) return sound(prefix, 1, count) end", rare=True),
    bug("what is kicked expires", "kick", ZREM="if string.find(key, '}:expires:', 1, true) then return 0 end",
        rare=True),
    bug("what has expired is buried", "bury fail release acquire", "local function drop_expired() return 0 end",
        rare=True),
    bug("what comes back joins what has expired", "fail release acquire",
        "local function expire_joined() return true end", rare=True),
    bug("success keeps solo", "ack_and_take", SREM="if string.sub(key, -4) == 'solo' then return 0 end"),
    bug("appended payloads have the same head", "push", """\
local function add_payload(place, id, payload, score, form, expires)
  return sound(place, id, '\\0\\0a00000000000000' .. string.sub(payload, 18), score, form, expires)
end""", policies="append"),
    bug("the latest is the last that came", "push", """\
local function get_highest(place, id, form)
  local payload = sound(place, id, form)
  return payload, payload and '-inf'
end""", policies="latest"),
    bug("what comes back is the latest", "fail release acquire kick", """\
local function merge_latest(source, place, id)
  redis.call('HDEL', place, id)
  redis.call('RENAME', source, place .. ':' .. id)
end""", policies="latest", rare=True),
    bug("what comes back joins the latest", "fail release acquire kick", "local function uses() return false end",
        policies="latest"),
    bug("what is due is put off", "push", ZMSCORE="""\
    local times, now = real(command, unpack(args)), tonumber(ARGV[1])
    for i, at in ipairs(times) do
      if string.sub(key, -3) == 'due' and at and tonumber(at) <= now then times[i] = now + 0.000001 end
    end
    do return times end""", policies="debounce"),
    bug("an id is put off for ever", "push", ZMSCORE="""\
    local times = real(command, unpack(args))
    for i, at in ipairs(times) do
      if string.sub(key, -9) == 'debounced' and at then times[i] = 8000000000 end
    end
    do return times end""", policies="debounce"),
    bug("what comes back may be put off", "fail release acquire kick", "local function uses() return false end",
        policies="debounce"),
    bug("what is taken may be put off when it waits again", "ack_and_take",
        ZREM="if string.sub(key, -9) == 'debounced' then return 0 end", policies="debounce"),
    bug("once latest, always latest", "push", """\
local function note_feature(prefix, features, word, is_used)
  return is_used and sound(prefix, features, word, true) or features
end""", policies="collapse append latest"),
    bug("what is taken takes no room", "push", HLEN="do return 0 end", policies="capacity"),
    # What asks for the same once jobs are written, to make them more urgent, could not go on with that.
    bug("merging needs room", "push", front="local has_written = false", ZADD="has_written = true",
        ZMSCORE="if string.sub(key, -3) == 'due' and not has_written then return {} end", policies="capacity"),
    bug("what has expired takes room", "push", "local function sweep_expired() return 0, {} end",
        policies="capacity"),
]  # fmt: skip

#: Bugs of what only the simulator has.
OF_STORIES = [
    bug("a limit forgets whom else it has let in", "take_permits", HGETALL="""
    local fields, own = real(command, key), {}
    for i = 1, #fields, 2 do
      if fields[i] == 'holder:' .. ARGV[4] then own = { fields[i], fields[i + 1] } end
    end
    do return own end"""),
    bug("a push that comes behind its repeat pushes again", "push",
        ZSCORE="if string.sub(key, -8) == 'repeated' then return false end"),
    bug("who resumes a lease goes on under its fence", "acquire", front="""\
    local before = redis.call('HMGET', KEYS[1] .. 'meta', 'owner', 'fence')
    local string = setmetatable({ format = function(form, ...)
      return form == '%.0f' and before[1] == ARGV[2] and before[2] or string.format(form, ...)
    end }, { __index = string })"""),
]  # fmt: skip
