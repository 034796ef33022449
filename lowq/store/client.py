"""The client: scripts and commands, on a server or on the primaries of a cluster."""

import os
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from redis import exceptions

from lowq import clock
from lowq.errors import LowqError, RedisRefused, RedisUnavailable, ScriptError
from lowq.store.cluster_pubsub import ClusterSubscription, Nodes
from lowq.store.deadline import Deadline, deadlines
from lowq.store.durability import Wait, conclude
from lowq.store.endpoints import servers_for
from lowq.store.followed_primary import Address
from lowq.store.loop_connection import LoopConnection, fits_loop
from lowq.store.pool import Pool, encode, pack, parse_info, read_reply
from lowq.store.pubsub import ServerSubscription, Subscription
from lowq.store.replies import read
from lowq.store.translate import Call, Command, R_co, may_repeat, translate

#: Seconds that a connection attempt, or the wait for one reply, may take.
SOCKET_TIMEOUT = 5.0
#: Bytes of calls that are written at once. Of more, each call has a timeout of its own, as a slow line takes its time.
MAX_WRITE = 2**20
#: Bytes that a connection without anything on it takes at once, however slow the other side is.
WRITTEN_AT_ONCE = 2**14
#: How often a call is tried anew on a fresh connection when its connection broke.
REPEATS = 2


class _Flight:
    """Calls that were sent to one server and not answered yet."""

    def __init__(
        self, pool: Pool, calls: list[tuple[int, Call[Any]]], deadline: Deadline | None, wait: Wait | None
    ) -> None:
        self.pool = pool
        self.calls = calls
        self.deadline = deadline
        #: What the server is to confirm behind the calls.
        self.wait = wait
        self.connection: Any = None
        self.error: Exception | None = None
        self.lent = False
        #: The positions of calls that nobody wanted any more when they were to be sent.
        self.unwanted: list[int] = []
        #: Whether writing took no time of the deadline's.
        self.written_at_once = False

    def send(self) -> None:
        try:
            self.connection = self.pool.checkout(self.deadline)
            self.pool.check_rights(self.connection, (call for _, call in self.calls))
            if self.wait is not None:
                self.pool.check_wait(self.connection, self.wait)
        except (exceptions.RedisError, RedisUnavailable, RedisRefused) as error:
            self.error = error
            return
        try:
            packed = self._pack()
        except BaseException:
            self.close(whole=True)  # an argument that can't be packed must not cost a connection
            raise
        if packed:
            try:
                self.connection.send_packed_command(packed, check_health=False)
            except exceptions.RedisError as error:
                self.error = error

    def _pack(self) -> list[bytes]:
        # Only now that there is a connection: that may have taken long.
        self.unwanted = [position for position, call in self.calls if not call.is_wanted()]
        if self.unwanted:
            self.calls = [item for item in self.calls if item[0] not in self.unwanted]
        packed = [_packed(self.pool, call) for _, call in self.calls]
        if self.wait is not None and packed:
            packed.append(pack(self.wait.command(self.deadline)))
        if len(packed) > 1 and sum(map(len, packed)) <= MAX_WRITE:
            packed = [b"".join(packed)]
        self.written_at_once = len(packed) == 1 and len(packed[0]) <= WRITTEN_AT_ONCE
        return packed

    def receive(self, results: list[Any], *, at_once: bool) -> None:
        """``at_once``: the replies are waited for right after the calls were sent, and to nobody else's."""
        # Then the connection has still the timeout that it was checked out with.
        fresh = at_once and self.written_at_once and not self.lent
        for position, _ in self.calls:
            if self.error is None:
                try:
                    if self.deadline is not None and not fresh:
                        self.pool.limit(self.connection, self.deadline)
                    results[position] = read_reply(self.connection)
                    if self.deadline is not None:
                        self.deadline.restart()
                    fresh = False
                    continue
                except exceptions.RedisError as error:
                    self.error = error
            results[position] = self.error
        if self.wait is not None and self.calls:
            self._receive_confirmation(results, self.wait)
        for position in self.unwanted:
            results[position] = _not_sent()

    def _receive_confirmation(self, results: list[Any], wait: Wait) -> None:
        if self.error is None:
            # It may take long, and must not keep those from writing who wait for nothing.
            if not self.lent:
                self.lend()
            try:
                self.pool.limit_confirmation(self.connection, self.deadline, wait)
                reply = read_reply(self.connection)
                if self.deadline is not None:
                    self.deadline.restart()
                conclude(results, [position for position, _ in self.calls], wait, reply)
                return
            except exceptions.RedisError as error:
                self.error = error
        # They were carried out, and by whom is lost if that was the end of the server: whoever serves now is asked.
        for position, _ in self.calls:
            if not isinstance(results[position], Exception):
                results[position] = self.error

    def lend(self) -> None:
        if self.connection is not None:
            self.lent = True
            self.pool.lend(self.connection)

    def close(self, *, whole: bool) -> None:
        # Forgotten first, so that it is never given back twice, whatever interrupts this.
        connection, self.connection = self.connection, None
        if connection is None or (self.lent and not self.pool.take_back(connection)):
            return
        if whole:
            self.pool.release(connection)
        else:
            self.pool.release_closed(connection)


class Client:
    """Runs scripts and commands on a server, or on the primaries of a cluster. Safe for threads and forks.

    ``size``: connections to a server; ``timeout``: seconds to wait for a free one; ``socket_timeout``: seconds for one
    connection attempt, or one reply.
    """

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
        self.is_cluster = url.startswith(("redis+cluster://", "rediss+cluster://"))
        self._servers = servers_for(url, size, timeout, socket_timeout, store)
        _clients.add(self)

    # --- scripts ---

    def run(self, script: str, key: str, *args: str | bytes | int | float, timeout: float | None = None) -> Any:
        """Runs one script. A call whose connection breaks is repeated, so the script must allow that. ``timeout`` is as
        for `run_many`.

        Raises:
            RedisUnavailable, RedisRefused, LeaseLost, Refusal, ScriptError
        """
        return self.call(Call[Any](script, key, args), timeout=timeout)

    def call(self, call: Call[R_co], *, timeout: float | None = None) -> R_co:
        """Runs one script and names what it replies. ``timeout``, and what is raised: as of `run`."""
        (result,) = self.run_many([call], timeout=timeout)
        if isinstance(result, Exception):
            raise result
        return call.read(result)

    def run_many(self, calls: Sequence[Call[Any]], repeats: int = REPEATS, timeout: float | None = None) -> list[Any]:
        """Runs several scripts, and plain commands if there are any among them, in one write per server; they don't
        wait for each other's replies.

        Returns each call's reply, or the exception (of ours) that it ended with. Calls without an answer are
        repeated on a fresh connection. ``timeout``: seconds without an answer after which that ends, repeats and all.
        """
        return self._begin(calls, deadlines(timeout, repeats + 1))()

    def begin_many(self, calls: Sequence[Call[Any]]) -> Callable[[], list[Any]]:
        """As `run_many`, in two steps: it sends the calls, and the function returned, which must be called once, waits
        for their replies.
        """
        return self._begin(calls, deadlines(None, REPEATS + 1))

    def _begin(self, calls: Sequence[Call[Any]], attempts: Iterator[Deadline | None]) -> Callable[[], list[Any]]:
        finish = self.start(calls, deadline=next(attempts))

        def wait() -> list[Any]:
            results = finish()
            for deadline in attempts:
                again = [i for i, result in enumerate(results) if may_repeat(result)]
                if not again:
                    break
                for i, result in zip(again, self.start([calls[i] for i in again], deadline=deadline)(), strict=True):
                    results[i] = result
            return results

        return wait

    def start(
        self,
        calls: Sequence[Call[Any]],
        *,
        lend: bool = False,
        deadline: Deadline | None = None,
        wait: Wait | None = None,
    ) -> Callable[[], list[Any]]:
        """Sends scripts; the function returned waits for the replies. It must be called, once. ``lend``: foreign code
        runs meanwhile, so the connections don't count as in use, and the time doesn't count for the deadline.
        ``wait``: what each server is to confirm once it has carried out its calls, see `lowq.store.durability`; those
        of a server that did not get a `NotConfirmed`.
        """
        groups: dict[Pool, list[tuple[int, Call[Any]]]] = {}
        results: list[Any] = [None] * len(calls)
        for position, call in enumerate(calls):
            try:
                groups.setdefault(self._servers.pool_for(call.key, deadline), []).append((position, call))
            except (exceptions.RedisError, RedisUnavailable) as error:
                results[position] = error
        flights = [_Flight(pool, group, deadline, wait) for pool, group in groups.items()]

        def give_up() -> None:
            for flight in flights:
                flight.close(whole=False)

        try:
            for flight in flights:
                flight.send()
                if lend:
                    flight.lend()
        except BaseException:
            give_up()
            raise

        def finish() -> list[Any]:
            if lend and deadline is not None:
                deadline.restart()
            try:
                for flight in flights:
                    flight.receive(results, at_once=len(flights) == 1)
                    flight.close(whole=flight.error is None)
            except BaseException:
                give_up()
                raise
            for flight in flights:
                self._note_answers(flight, results)
            self.repair(calls, results, deadline, wait)
            return results

        return finish

    def repair(
        self, calls: Sequence[Call[Any]], results: list[Any], deadline: Deadline | None, wait: Wait | None = None
    ) -> None:
        """Puts right what can be put right at once, and leaves an error of ours for everything else that went wrong."""
        for position, result in enumerate(results):
            if isinstance(result, Exception):
                results[position] = self._repair(calls[position], result, deadline, wait)

    def _repair(self, call: Call[Any], error: Exception, deadline: Deadline | None, wait: Wait | None) -> Any:
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
                    return self._retry_loaded(call, deadline, wait)
                return self._retry_redirected(call, error, deadline, wait)
            except (exceptions.RedisError, LowqError) as next_error:
                error = next_error
        translated = self._translate(error, call)
        if isinstance(translated, RedisRefused):
            with suppress(exceptions.RedisError, LowqError):
                self._servers.pool_for(call.key, deadline).forget_rights()
        return translated

    def _note_answers(self, flight: _Flight, results: list[Any]) -> None:
        """Whoever comes next for a primary that did not answer asks the cluster first who has its slots now."""
        if flight.error is not None:
            self._doubt(flight.pool, flight.error, flight.deadline)
        elif self._servers.is_partial:
            self._servers.answered(flight.pool)
        for position, _ in flight.calls if self.is_cluster else ():
            if isinstance(results[position], exceptions.ClusterDownError):
                self._doubt(flight.pool, results[position], flight.deadline)

    def _doubt(self, pool: Pool, error: Exception, deadline: Deadline | None = None) -> None:
        if isinstance(error, exceptions.TimeoutError) and deadline is not None:
            self._servers.doubt(pool, None)  # its caller may have had very little time
        elif isinstance(error, exceptions.ConnectionError | exceptions.TimeoutError | exceptions.ClusterDownError):
            self._servers.doubt(pool, error)

    @property
    def is_partial(self) -> bool:
        """Whether one of the primaries of a cluster does not answer or serve, while others may."""
        return self._servers.is_partial

    @property
    def is_known(self) -> bool:
        """Whether the URL is known to lead to a cluster: a primary of it that does not answer may be replaced soon."""
        return self._servers.is_known

    def _retry_loaded(self, call: Call[Any], deadline: Deadline | None, wait: Wait | None) -> Any:
        pool = self._servers.pool_for(call.key, deadline)
        return self._once(pool, call, pool.load, deadline, wait)

    def _retry_redirected(self, call: Call[Any], error: Any, deadline: Deadline | None, wait: Wait | None) -> Any:
        # MOVED and ASK are both subclasses of the same error in redis-py; only ASK is for this once.
        if isinstance(error, exceptions.MovedError):
            pool = self._servers.moved(call.key, error.host, error.port, deadline)
            return self._once(pool, call, None, deadline, wait)
        pool = self._servers.pool_at(error.host, error.port)
        return self._once(pool, call, _ask, deadline, wait)

    @staticmethod
    def _once(
        pool: Pool,
        call: Call[Any],
        before: Callable[[Any], object] | None,
        deadline: Deadline | None,
        wait: Wait | None,
    ) -> Any:
        connection = pool.checkout(deadline)
        try:
            if before is not None:
                before(connection)
            pool.check_rights(connection, [call])
            if wait is not None:
                pool.check_wait(connection, wait)
            if not call.is_wanted():
                raise _not_sent()
            connection.send_packed_command([_packed(pool, call)], check_health=False)
            reply = read_reply(connection)
            if wait is not None and not isinstance(reply, Exception):
                reply = _confirmed(pool, connection, reply, wait, deadline)
        except BaseException:
            pool.release_closed(connection)
            raise
        pool.release(connection)
        if isinstance(reply, Exception):
            raise reply
        return reply

    # --- event loops, group commit ---

    def primary_of(self, key: str) -> tuple[str, int] | None:
        """The primary of a cluster that serves the key, as far as that is known without asking."""
        return self._servers.known_primary(key)

    def address_of(self, key: str) -> Address | None:
        """The server that serves the key, as far as that is known without asking. None: it is not, or it is always the
        same URL.
        """
        only = self._servers.only_pool()
        return self._servers.known_primary(key) if only is None else only.address

    @property
    def is_embedded(self) -> bool:
        """Whether it is the embedded store, which answers at once."""
        return self.url.startswith("memory://")

    def connect_for_loop(self, deadline: Deadline, server: tuple[str, int] | None = None) -> LoopConnection | None:
        """A connection of its own for an event loop, besides the ``size`` that there are for threads. It blocks.
        ``server``: a primary of a cluster. None: there is none for this kind of URL, or no primary was named.

        Raises:
            redis-py's errors, RedisUnavailable, RedisRefused
        """
        pool = self._servers.only_pool() if server is None else self._servers.pool_at(*server)
        if pool is None or self.is_embedded or sys.platform == "win32":  # whose loop watches no sockets
            return None
        connection = pool.connect_dedicated(deadline)
        if fits_loop(connection):
            return LoopConnection(connection)
        connection.disconnect()
        return None

    def allows(self, script: str, server: tuple[str, int] | None = None) -> bool:
        """Whether the user is known to have what a script needs on that server. What `pack` makes is not checked."""
        pool = self._servers.any_pool() if server is None else self._servers.pool_at(*server)
        return pool.allows(script)

    def follow(self) -> None:
        """For those who send on connections of their own: these break as others do when sentinels name another primary.
        It does not block.
        """
        pool = self._servers.only_pool()
        if pool is not None:
            pool.follow()

    def pack(
        self,
        calls: Sequence[Call[Any]],
        server: tuple[str, int] | None = None,
        wait: Wait | None = None,
        deadline: Deadline | None = None,
    ) -> bytes:
        """Calls as one server gets them, on a cluster that primary, and what it is to confirm behind them."""
        pool = self._servers.any_pool() if server is None else self._servers.pool_at(*server)
        packed = [_packed(pool, call) for call in calls]
        if wait is not None:
            packed.append(pack(wait.command(deadline)))
        return b"".join(packed)

    # --- plain commands ---

    def command(self, *args: str | bytes | int | float, key: str | None = None, timeout: float | None = None) -> Any:
        """Runs one Redis command, reading or otherwise fit to be repeated. ``key`` routes it in a cluster.

        Raises:
            RedisUnavailable, RedisRefused, ScriptError
        """
        return self.commands([args], key=key, timeout=timeout)[0]

    def commands(
        self, commands: Sequence[Sequence[Any]], key: str | None = None, timeout: float | None = None
    ) -> list[Any]:
        """Runs several commands in one write, all on the server of ``key``. ``timeout`` is as for `run_many`.

        Raises:
            RedisUnavailable, RedisRefused, ScriptError: the first error among the replies.
        """
        try:
            return self._repeated(commands, key or "", timeout)
        except ScriptError as error:
            error.key = key
            raise

    def _repeated(
        self, commands: Sequence[Sequence[Any]], where: str | Pool, timeout: float | None = None
    ) -> list[Any]:
        """``where``: a key that the server serves, or the server's pool."""
        for attempt, deadline in enumerate(deadlines(timeout, REPEATS + 1)):
            pool: Pool | None = None
            try:
                pool = where if isinstance(where, Pool) else self._servers.pool_for(where, deadline)
                try:
                    return self._commands_once(commands, pool, deadline)
                except exceptions.AskError as ask:
                    # Not those of a shard, see `_repair`; redis-py makes MOVED a kind of ASK.
                    if isinstance(ask, exceptions.MovedError) or not isinstance(where, str) or where.endswith(":"):
                        raise
                    asked = self._servers.pool_at(ask.host, ask.port)
                    return self._commands_once(
                        [word for command in commands for word in (("ASKING",), command)], asked, deadline
                    )[1::2]
            except (exceptions.RedisError, RedisUnavailable) as error:
                if pool is not None:
                    self._doubt(pool, error, deadline)
                translated = self._translate(error, None)
                if isinstance(error, exceptions.MovedError):
                    self._refresh(deadline)
                elif not may_repeat(translated):
                    raise translated from error
                if attempt == REPEATS:
                    raise translated from error
        raise AssertionError

    def _refresh(self, deadline: Deadline | None) -> None:
        try:
            self._servers.refresh(deadline)
        except (exceptions.RedisError, RedisUnavailable) as error:
            raise self._translate(error, None) from error

    @staticmethod
    def _commands_once(commands: Sequence[Sequence[Any]], pool: Pool, deadline: Deadline | None) -> list[Any]:
        packed = b"".join([pack(tuple(encode(args))) for args in commands])
        connection = pool.checkout(deadline)
        try:
            connection.send_packed_command([packed], check_health=False)
            replies = [read_reply(connection) for _ in commands]
        except BaseException:
            pool.release_closed(connection)
            raise
        pool.release(connection)
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
        return replies

    # --- every server ---

    def on_all(
        self, commands: Sequence[Sequence[Any]], silent: dict[str, RedisUnavailable] | None = None
    ) -> dict[str, list[Any]]:
        """The replies to commands of every primary, by its address; "" is the only one there is. ``silent``: primaries
        of a cluster that do not answer are entered there, and not asked if they are there already.

        Raises:
            RedisUnavailable, RedisRefused, ScriptError: the first error among the replies.
        """
        replies = {}
        for address, pool in self._pools().items():
            if silent is not None and address in silent:
                continue
            try:
                replies[address] = self._repeated(commands, pool)
            except RedisUnavailable as error:
                if silent is None or not self.is_cluster:
                    raise
                silent[address] = error
        return replies

    def replicas_of(self, keys: Sequence[str]) -> list[int]:
        """How many replicas the primary of each of these keys has. In a cluster one counts also while its connection is
        broken, as long as the others don't say that it has failed.

        Raises:
            RedisUnavailable. RedisRefused: the user may not have them confirm anything.
        """
        if self.is_embedded:
            return [0] * len(keys)
        try:
            infos = self.on_all([("INFO", "replication")])
            connected = {at: int(parse_info(info).get("connected_slaves", 0)) for at, (info,) in infos.items()}
        except RedisRefused:  # then those count that answer within a second
            connected = {at: count for at, (count,) in self.on_all([("WAIT", 1000, 1000)]).items()}
        found = []
        for key in keys:
            primary = self._servers.known_primary(key)
            at = "" if primary is None else f"{primary[0]}:{primary[1]}"
            found.append(max(connected.get(at, 0), self._servers.known_replicas(key)))
        if any(found):
            self.on_all([("WAIT", 0, 1)])
        return found

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
                ((cursor, keys),) = self._repeated([command], pool)
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
            RedisUnavailable. RedisRefused: the user may not ask for it, for one.
        """
        return {} if self.is_embedded else parse_info(self.command("INFO", "everything"))

    def server_age(self) -> float:
        """Seconds since the youngest server that this client has talked to was started; infinite when unknown. Where
        the user may not ask for INFO it is that since a server was found without lowq's scripts, if it was.
        """
        return clock.now() - self._servers.started_at()

    def subscribe(self) -> Subscription:
        """A connection of its own for wake-ups; on a cluster one to each primary that has some of the channels."""

        def fail(error: Exception) -> Exception:
            return self._translate(error, None)

        if not self.is_cluster:
            return ServerSubscription(self._servers.any_pool, fail)

        def ask(key: str, at_once: bool) -> None:
            if at_once:
                self._servers.refresh()
            else:
                self._servers.pool_for(key)

        def connect(address: tuple[str, int]) -> Any:
            connection = self._servers.pool_at(*address).connect()
            connection.connect()
            return connection

        def doubt(address: tuple[str, int], error: Exception) -> None:
            self._doubt(self._servers.pool_at(*address), error)

        return ClusterSubscription(Nodes(self.primary_of, ask, connect, doubt, fail))

    def close(self) -> None:
        """Closes the connections that are not in use."""
        self._servers.close()

    def reset(self) -> None:
        """Forgets all connections: they belong to the parent of this process."""
        self._servers.reset()

    def _translate(self, error: Exception, call: Call[Any] | None) -> Exception:
        translated = translate(error, call, self.url)
        if translated is not error:
            # What it was, without where: the frames of the connection are many, and say nothing to whoever pushes.
            translated.__cause__, error.__context__ = error.with_traceback(None), None
        if isinstance(translated, ScriptError) and call is not None:
            translated.key = call.key
        return translated


def _confirmed(pool: Pool, connection: Any, reply: Any, wait: Wait, deadline: Deadline | None) -> Any:
    """Asks for the confirmation of a call that was carried out on the connection, and waits for it."""
    results = [reply]
    connection.send_packed_command([pack(wait.command(deadline))], check_health=False)
    pool.limit_confirmation(connection, deadline, wait)
    conclude(results, [0], wait, read_reply(connection))
    return results[0]


def _not_sent() -> RedisUnavailable:
    return RedisUnavailable("it was given up before it was sent")


def _packed(pool: Pool, call: Call[Any]) -> bytes:
    if type(call) is Command:
        return pack((call.script.encode(), *encode(call.args)))
    return pack((b"EVALSHA", pool.scripts[call.script][1], b"1", call.key.encode(), *encode(call.args), *call.data))


def _ask(connection: Any) -> None:
    connection.send_packed_command([pack((b"ASKING",))], check_health=False)
    read(connection)


# --- forks ---

_clients: "weakref.WeakSet[Client]" = weakref.WeakSet()


def _forget_connections() -> None:
    for client in list(_clients):
        client.reset()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_connections)
