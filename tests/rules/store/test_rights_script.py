"""What the script `rights` asks the server, whether that looks at the number of arguments (Redis 8) or not."""

from typing import Any

import pytest

from lowq.store.calls import load_scripts

#: What the script finds in place of Redis: a user who may not run SET, HGET and TIME. It counts the questions.
SERVER = """
local strict, names = ...
KEYS, ARGV, asked = { 'lowq:v1:queues' }, {}, 0
for name in string.gmatch(names, '%S+') do ARGV[#ARGV + 1] = name end
local arity = { TIME = 0, GET = 1, HGET = 2, SET = 2, HSET = 3 }
local refused = { TIME = true, HGET = true, SET = true }
redis = {}
function redis.acl_check_cmd(name, ...)
  asked = asked + 1
  if not arity[name] or strict and select('#', ...) ~= arity[name] then
    error('ERR Invalid command passed to redis.acl_check_cmd()')
  end
  return not refused[name]
end
"""


@pytest.mark.parametrize("strict", [True, False])
def test_each_command_is_asked_for_with_as_many_arguments_as_it_takes(strict: bool) -> None:
    lua: Any = pytest.importorskip("lupa.lua51").LuaRuntime()
    lua.execute(SERVER, strict, "TIME GET HGET SET HSET NOBODY")
    refused = lua.execute(load_scripts()["rights"].source)
    assert list(refused.values()) == ["TIME", "HGET", "SET", "NOBODY"]
    if not strict:  # with fewer keys than a command has, an older server may panic
        assert lua.eval("asked") == 5 + 4
