"""Scripts that are broken on purpose, without a word about how their Lua is written.

A function of a script, or of the library before it, is broken by its name; a command, by what it asks Redis, or by
what it answers to the script. So a script can be rewritten, and its mutants stay.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

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
