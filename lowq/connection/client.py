"""The client: scripts and commands, on a server or on the primaries of a cluster."""

import itertools
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from redis import exceptions

from lowq import clock
from lowq.connection.pool import Pool, pack, parse_info, read_reply
from lowq.connection.servers import servers_for
from lowq.connection.subscription import Subscription
from lowq.connection.translate import Call, translate
from lowq.errors import LowqError, RedisUnavailable, ScriptError

#: Seconds that a connection attempt, or the wait for one reply, may take.
SOCKET_TIMEOUT = 5.0
#: How often a call is tried anew on a fresh connection when its connection broke.
REPEATS = 2


class _Flight:
    """Calls that were sent to one server and not answered yet."""

    def __init__(self, pool: Pool, calls: list[tuple[int, Call]]) -> None:
        self.pool = pool
        self.calls = calls
        self.connection: Any = None
        self.error: Exception | None = None
        self.lent = False

    def send(self) -> None:
        scripts = self.pool.scripts
        # Packed first: an argument that can't be packed must not cost a connection.
        packed = [pack((b"EVALSHA", scripts[call.script][1], 1, call.key, *call.args)) for _, call in self.calls]
        try:
            self.connection = self.pool.checkout()
            self.connection.send_packed_command([b"".join(packed)], check_health=False)
        except (exceptions.RedisError, RedisUnavailable) as error:
            self.error = error

    def receive(self, results: list[Any]) -> None:
        for position, _ in self.calls:
            if self.error is None:
                try:
                    results[position] = read_reply(self.connection)
                    continue
                except exceptions.RedisError as error:
                    self.error = error
            results[position] = self.error

    def lend(self) -> None:
        if self.connection is not None:
            self.pool.lend()
            self.lent = True

    def close(self, *, whole: bool) -> None:
        if self.connection is not None:
            if not whole:
                self.connection.disconnect()
            if self.lent:
                self.pool.take_back(self.connection)
            else:
                self.pool.release(self.connection)
            self.connection = None


class Client:
    """Runs scripts and commands on a server, or on the primaries of a cluster. Safe for threads and forks."""

    def __init__(
        self,
        url: str,
        *,
        size: int,
        timeout: float,
        socket_timeout: float = SOCKET_TIMEOUT,
        store: Any = None,
    ) -> None:
        self.url = url
        self._servers = servers_for(url, size, timeout, socket_timeout, store)
        _clients.add(self)

    # --- scripts ---

    def run(self, script: str, key: str, *args: str | bytes | int | float) -> Any:
        """Runs one script. A call whose connection breaks is repeated, so the script must allow that.

        Raises:
            RedisUnavailable, RedisRefused, LeaseLost, Refusal, ScriptError
        """
        (result,) = self.run_many([Call(script, key, args)])
        if isinstance(result, Exception):
            raise result
        return result

    def run_many(self, calls: Sequence[Call], repeats: int = REPEATS) -> list[Any]:
        """Runs several scripts in one write per server; they don't wait for each other's replies.

        Returns each call's reply, or the exception (of ours) that it ended with. Calls without an answer are
        repeated on a fresh connection.
        """
        results = self.start(calls)()
        for _ in range(repeats):
            again = [i for i, result in enumerate(results) if type(result) is RedisUnavailable]
            if not again:
                break
            for i, result in zip(again, self.start([calls[i] for i in again])(), strict=True):
                results[i] = result
        return results

    def start(self, calls: Sequence[Call], *, lend: bool = False) -> Callable[[], list[Any]]:
        """Sends scripts; the function returned waits for the replies. It must be called, once. ``lend``: foreign code
        runs meanwhile, so the connections don't count as in use.
        """
        groups: dict[Pool, list[tuple[int, Call]]] = {}
        results: list[Any] = [None] * len(calls)
        for position, call in enumerate(calls):
            try:
                groups.setdefault(self._servers.pool_for(call.key), []).append((position, call))
            except (exceptions.RedisError, RedisUnavailable) as error:
                results[position] = error
        flights = [_Flight(pool, group) for pool, group in groups.items()]
        try:
            for flight in flights:
                flight.send()
                if lend:
                    flight.lend()
        except BaseException:
            for flight in flights:
                flight.close(whole=False)
            raise

        def finish() -> list[Any]:
            for flight in flights:
                whole = False
                try:
                    flight.receive(results)
                    whole = flight.error is None
                finally:
                    flight.close(whole=whole)
            for position, result in enumerate(results):
                if isinstance(result, Exception):
                    results[position] = self._mend(calls[position], result)
            return results

        return finish

    def _mend(self, call: Call, error: Exception) -> Any:
        """What can be put right at once is: scripts flushed, a slot moved. Otherwise the error as one of ours."""
        for _ in range(5):
            if not isinstance(error, exceptions.NoScriptError | exceptions.AskError | exceptions.MovedError):
                break
            # A shard is many keys, and its prefix is none of them: while its slot is being moved they are on both
            # sides, and the importing one would let a script see those that are not there yet as absent, and write
            # them anew. So the shard rests until the slot has moved. A registry is one key, which is here or there.
            moved = isinstance(error, exceptions.MovedError)  # which redis-py makes a kind of AskError
            if isinstance(error, exceptions.AskError) and not moved and call.key.endswith(":"):
                break
            try:
                if isinstance(error, exceptions.NoScriptError):
                    return self._retry_loaded(call)
                return self._retry_redirected(call, error)
            except (exceptions.RedisError, LowqError) as next_error:
                error = next_error
        return self._translate(error, call)

    def _retry_loaded(self, call: Call) -> Any:
        pool = self._servers.pool_for(call.key)
        return self._once(pool, call, pool.load)

    def _retry_redirected(self, call: Call, error: Any) -> Any:
        # MOVED and ASK are both subclasses of the same error in redis-py; only ASK is for this once.
        pool = self._servers.pool_at(error.host, error.port)
        if isinstance(error, exceptions.MovedError):
            self._servers.refresh()
            return self._once(pool, call, None)
        return self._once(pool, call, _ask)

    @staticmethod
    def _once(pool: Pool, call: Call, before: Callable[[Any], object] | None) -> Any:
        connection = pool.checkout()
        try:
            if before is not None:
                before(connection)
            packed = pack((b"EVALSHA", pool.scripts[call.script][1], 1, call.key, *call.args))
            connection.send_packed_command([packed], check_health=False)
            reply = read_reply(connection)
        except BaseException:
            connection.disconnect()
            raise
        finally:
            pool.release(connection)
        if isinstance(reply, Exception):
            raise reply
        return reply

    # --- plain commands ---

    def command(self, *args: str | bytes | int | float, key: str | None = None) -> Any:
        """Runs one Redis command, reading or otherwise fit to be repeated. ``key`` routes it in a cluster.

        Raises:
            RedisUnavailable, RedisRefused, ScriptError
        """
        return self.commands([args], key=key)[0]

    def commands(self, commands: Sequence[Sequence[Any]], key: str | None = None) -> list[Any]:
        """Runs several commands in one write, all on the server of ``key``.

        Raises:
            RedisUnavailable, RedisRefused, ScriptError: the first error among the replies.
        """
        try:
            return self._repeated(commands, lambda: self._servers.pool_for(key) if key else self._servers.any_pool())
        except ScriptError as error:
            error.key = key
            raise

    def _repeated(self, commands: Sequence[Sequence[Any]], find_pool: Callable[[], Pool]) -> list[Any]:
        for attempt in itertools.count():
            try:
                return self._commands_once(commands, find_pool())
            except (exceptions.RedisError, RedisUnavailable) as error:
                translated = self._translate(error, None)
                if isinstance(error, exceptions.MovedError):
                    self._servers.refresh()
                elif type(translated) is not RedisUnavailable:
                    raise translated from error
                if attempt == REPEATS:
                    raise translated from error
        raise AssertionError

    @staticmethod
    def _commands_once(commands: Sequence[Sequence[Any]], pool: Pool) -> list[Any]:
        connection = pool.checkout()
        try:
            connection.send_packed_command([b"".join(pack(tuple(args)) for args in commands)], check_health=False)
            replies = [read_reply(connection) for _ in commands]
        except BaseException:
            connection.disconnect()
            raise
        finally:
            pool.release(connection)
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
        return replies

    # --- every server ---

    def on_all(self, commands: Sequence[Sequence[Any]]) -> dict[str, list[Any]]:
        """The replies to commands of every primary, by its address; "" is the only one there is.

        Raises:
            RedisUnavailable, RedisRefused, ScriptError: the first error among the replies.
        """
        return {address: self._repeated(commands, _always(pool)) for address, pool in self._pools().items()}

    def scan(self, match: str, count: int) -> Iterator[list[bytes]]:
        """The keys like ``match``, of all primaries, a step of about ``count`` keys at a time. A key that is there all
        the time comes, perhaps more than once. A step may be empty.

        Raises:
            RedisUnavailable, RedisRefused
        """
        for pool in self._pools().values():
            cursor = b"0"
            while True:
                command = ("SCAN", cursor, "MATCH", match, "COUNT", count)
                ((cursor, keys),) = self._repeated([command], _always(pool))
                yield keys
                if int(cursor) == 0:
                    break

    def _pools(self) -> dict[str, Pool]:
        try:
            return self._servers.pools()
        except (exceptions.RedisError, RedisUnavailable) as error:
            raise self._translate(error, None) from error

    def server_info(self) -> dict[str, str]:
        """What INFO says of a server; empty for the embedded store.

        Raises:
            RedisUnavailable, RedisRefused
        """
        return parse_info(self.command("INFO", "everything")) if not self.url.startswith("memory://") else {}

    def server_age(self) -> float:
        """Seconds since the youngest server that this client has talked to was started; infinite when unknown."""
        return clock.now() - self._servers.started_at()

    def subscribe(self) -> "Subscription":
        """A connection of its own for wake-ups."""
        return Subscription(self._servers.any_pool, self._translate)

    def close(self) -> None:
        """Closes the connections that are not in use."""
        self._servers.close()

    def reset(self) -> None:
        """Forgets all connections: they belong to the parent of this process."""
        self._servers.reset()

    def _translate(self, error: Exception, call: Call | None) -> Exception:
        translated = translate(error, call, self.url)
        translated.__cause__ = error if translated is not error else None
        if isinstance(translated, ScriptError) and call is not None:
            translated.key = call.key
        return translated


def _always(pool: Pool) -> Callable[[], Pool]:
    return lambda: pool


def _ask(connection: Any) -> None:
    connection.send_packed_command([pack((b"ASKING",))], check_health=False)
    connection.read_response()


# --- forks ---

_clients: "weakref.WeakSet[Client]" = weakref.WeakSet()


def _forget_connections() -> None:
    for client in list(_clients):
        client.reset()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_connections)
