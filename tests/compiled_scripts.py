"""Has the embedded store of the tests' own process compile each script once.

fakeredis compiles a script, collects Lua's garbage and, before each command, looks for global variables at every call:
half of the time of the rules on the embedded store. A script that sets a global variable fails on a real server, where
all of them run, too. Processes that tests start have fakeredis as it is, but for Django's runner.

Touches private names of fakeredis: it has no others for this. Where a version lacks them, nothing is changed.
"""

from typing import Any

from fakeredis.commands_mixins import scripting_mixin


class _Runtime:
    """A Lua interpreter that remembers what it has compiled."""

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self._compiled: dict[str | bytes, Any] = {"collectgarbage()": lambda: None}

    def execute(self, script: str | bytes) -> Any:
        if script not in self._compiled:
            self._compiled[script] = self._runtime.compile(script)
        return self._compiled[script]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)


def compile_scripts_once() -> None:
    """For all embedded stores that this process makes from now on."""
    sockets: Any = scripting_mixin.ScriptingCommandsMixin
    runtime_of = getattr(sockets, "_get_server_runtime", None)
    if runtime_of is None or not hasattr(scripting_mixin, "_check_for_lua_globals"):
        return

    def remembering(socket: Any, store: Any) -> Any:
        runtime = runtime_of(socket, store)
        if not isinstance(runtime, _Runtime):
            runtime = store._lua_runtime = _Runtime(runtime)
        return runtime

    sockets._get_server_runtime = remembering
    scripting_mixin._check_for_lua_globals = lambda *_: None
