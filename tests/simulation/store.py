"""The embedded store of a simulated server: fakeredis without a client's connection, each script compiled once.

Measured on stories, fakeredis spent half of their time on what is left out here: it compiles a script at each call,
collects Lua's garbage and looks for global variables after each command, and reads answers back from a queue. Of what
remained half was, for each command of a script, its signature, rights, transactions, events of keys and types of
replies.
"""

import pickle
import time
from collections.abc import Callable
from typing import Any

import redis
from fakeredis import FakeServer
from fakeredis._commands import Key, Signature
from fakeredis._core import CommandItem, Database
from fakeredis._helpers import NoResponse, SimpleError
from fakeredis._msgs import NO_MATCHING_SCRIPT_MSG, SCRIPT_ERROR_MSG, WRONGTYPE_MSG
from fakeredis._socket import FakeSocket
from fakeredis._socket._resp import convert_to_resp2, extract_command
from fakeredis.commands_mixins.scripting_mixin import LUA_MODULE, _convert_redis_arg

from lowq.store.embedded import encode

#: What fakeredis keeps of its Lua interpreter with a server: the same of all, so that no script is compiled twice.
_interpreter: dict[str, Any] = {}
_compiled: dict[bytes, Any] = {}
#: A command as scripts name it -> the name of the method that carries it out, and its signature.
_signatures: dict[bytes, tuple[str, Signature]] = {}
#: Signature, number of arguments -> those that are not taken as they are: their places and kinds.
_kinds: dict[tuple[Signature, int], list[tuple[int, Any]]] = {}
#: What is told to scripts and clients as it is.
_PLAIN = frozenset((bytes, int))

# Nobody watches a key, or waits for one.
Database.notify_watch = lambda *_: None  # type: ignore[method-assign]


def new_store() -> FakeServer:
    """An empty store."""
    store = FakeServer(version=(7, 0))
    vars(store).update(_interpreter)
    return store


def snapshot(store: FakeServer) -> bytes:
    """What it holds, for `restore`."""
    return pickle.dumps([(number, db._dict, db._expiry_heap) for number, db in store.dbs.items()])


def restore(snapshot: bytes) -> FakeServer:
    """A store that holds that."""
    store = new_store()
    for number, items, heap in pickle.loads(snapshot):
        store.dbs[number]._dict, store.dbs[number]._expiry_heap = items, heap
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

    def _process_command(self, fields: list[bytes]) -> None:
        store = self._server
        while store.closed_sockets:
            closed = store.closed_sockets.pop()()
            if closed is not None:
                closed._cleanup(store)
        now = time.time()
        for db in store.dbs.values():
            db.time = now
        name, arguments = extract_command(fields)
        try:
            function, signature = self._name_to_func(name)
            result = self._run_command(function, signature, arguments, False)
        except SimpleError as error:
            result = error
        if not isinstance(result, NoResponse):
            self.put_response(self._decode_result(result))

    def _run_command(
        self, function: Callable[..., Any] | None, signature: Signature, args: list[Any], from_script: bool
    ) -> Any:
        db, arguments, items = self._db, [*args], list[CommandItem]()
        kinds = _kinds.get((signature, len(args)))
        try:
            if kinds is None:
                kinds = _kinds[signature, len(args)] = self._kinds_of(signature, args)
            for place, kind in kinds:
                if not isinstance(kind, Key):
                    arguments[place] = kind.decode(args[place])
                elif kind.missing_return is not Key.UNSPECIFIED and args[place] not in db:
                    return kind.missing_return
            for place, kind in kinds:
                if isinstance(kind, Key):
                    arguments[place] = self._item_of(args[place], kind, signature)
                    items.append(arguments[place])
            assert function is not None
            result = function(*arguments)
            if type(result) not in _PLAIN and "2" not in signature.flags:
                result = convert_to_resp2(result)
        except SimpleError as error:
            result = error
        for item in items:
            item.writeback(remove_empty_val="v" not in signature.flags)
        return result

    def _kinds_of(self, signature: Signature, args: list[Any]) -> list[tuple[int, Any]]:
        signature.check_arity(args, self.version)
        more = len(args) - len(signature.fixed)
        kinds = [*signature.fixed, *(signature.repeat[number % len(signature.repeat)] for number in range(more))]
        return [(place, kind) for place, kind in enumerate(kinds) if kind is not bytes]

    def _item_of(self, name: bytes, kind: Key, signature: Signature) -> CommandItem:
        found, default = self._db.get(name), None
        if kind.type_ is not None:
            if found is not None and type(found.value) is not kind.type_:
                raise SimpleError(WRONGTYPE_MSG)
            if found is None and kind.type_ is not bytes and "i" not in signature.flags:
                default = kind.type_()
        return CommandItem(name, self._db, found, default=default)

    def add_subkey_event(self, *_: object) -> None:
        pass

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
        found = _signatures.get(op)
        if found is None:
            signature = self._name_to_func(op.decode().lower())[1]
            found = _signatures[op] = signature.func_name, signature
        name, signature = found
        arguments = [arg if type(arg) is bytes else _convert_redis_arg(arg) for arg in args]
        result = self._run_command(getattr(self, name), signature, arguments, True)
        if type(result) in _PLAIN:
            return result
        if type(result) is list:
            convert = self._convert_redis_result
            return lua_runtime.table_from(
                [each if type(each) in _PLAIN else convert(lua_runtime, each) for each in result]
            )
        return self._convert_redis_result(lua_runtime, result)

    def _convert_lua_result(self, result: Any, nested: bool = True) -> Any:
        if type(result) in _PLAIN:
            return result
        if LUA_MODULE.lua_type(result) != "table" or result[b"err"] is not None or result[b"ok"] is not None:
            return super()._convert_lua_result(result, nested)
        return [self._convert_lua_result(result[place]) for place in range(1, len(result) + 1)]
