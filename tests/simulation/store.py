"""The embedded store of a simulated server: fakeredis without a client's connection, each script compiled once.

Measured on stories, fakeredis spent half of their time on what is left out here: it compiles a script at each call,
collects Lua's garbage and looks for global variables after each command, and reads answers back from a queue.
"""

from typing import Any

import redis
from fakeredis import FakeServer
from fakeredis._helpers import SimpleError
from fakeredis._msgs import NO_MATCHING_SCRIPT_MSG, SCRIPT_ERROR_MSG
from fakeredis._socket import FakeSocket
from fakeredis.commands_mixins.scripting_mixin import LUA_MODULE, _convert_redis_arg

from lowq.store.embedded import encode

#: What fakeredis keeps of its Lua interpreter with a server: the same of all, so that no script is compiled twice.
_interpreter: dict[str, Any] = {}
_compiled: dict[bytes, Any] = {}


def new_store() -> FakeServer:
    """An empty store."""
    store = FakeServer(version=(7, 0))
    vars(store).update(_interpreter)
    return store


class Session(FakeSocket):
    """What the store keeps of one connection."""

    def __init__(self, store: FakeServer) -> None:
        #: What it is answered, or has subscribed to, and was not sent yet.
        self.pending: list[Any] = []
        super().__init__(store, 0, client_class=redis.Redis)

    def __hash__(self) -> int:  # subscribers are told in an order that is not that of their addresses
        return int(self._client_info["id"]) if hasattr(self, "_client_info") else 0

    def __eq__(self, other: object) -> bool:
        return self is other

    def answer(self, command: list[bytes]) -> list[bytes]:
        """Carries out a command; what it answers, and what else was to be sent."""
        self._process_command(command)
        return self.take_pending()

    def take_pending(self) -> list[bytes]:
        pending, self.pending = self.pending, []
        return [encode(each) for each in pending]

    def ask(self, *command: bytes) -> Any:
        """What a command answers, as it is."""
        self._process_command([*command])
        return self.pending.pop()

    # --- parts of fakeredis ---

    def put_response(self, msg: Any) -> None:
        self.pending.append(msg)

    def _decode_error(self, error: SimpleError) -> Any:
        return error

    def evalsha(self, sha1: bytes, numkeys: int, *keys_and_args: bytes) -> Any:
        """Runs a script."""
        store: Any = self._server
        if sha1 not in store.script_cache:
            raise SimpleError(NO_MATCHING_SCRIPT_MSG)
        runtime = self._get_server_runtime(store)
        if not _interpreter:
            _interpreter.update({name: value for name, value in vars(store).items() if name.startswith("_lua_")})
        if sha1 not in _compiled:
            _compiled[sha1] = runtime.compile(store.script_cache[sha1])
        store._lua_current_socket[0] = self
        self._script_resp = 2
        arguments = runtime.table_from(keys_and_args[:numkeys]), runtime.table_from(keys_and_args[numkeys:])
        store._lua_set_keys_argv(*arguments)
        try:
            return self._convert_lua_result(_compiled[sha1](), nested=False)
        except LUA_MODULE.LuaError as error:
            raise SimpleError(SCRIPT_ERROR_MSG.format(sha1.decode(), error)) from None
        finally:
            self._script_resp = None

    def _lua_redis_call(self, lua_runtime: Any, _expected_globals: set[Any], op: bytes, *args: Any) -> Any:
        function, signature = self._name_to_func(op.decode().lower())
        result = self._run_command(function, signature, [_convert_redis_arg(each) for each in args], True)
        return self._convert_redis_result(lua_runtime, result)
