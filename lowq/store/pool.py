"""Connections to one server, each prepared before its first use: version checked, scripts loaded.

A signal handler may raise anywhere: the usual timeout by SIGALRM, Ctrl-C. The connection in use is dropped then. A
connection is given back only when it is certain that no reply is left on it, or that it is closed, so no call gets the
reply to another. The pool knows its connections by weak references: a dropped one frees its place when it is garbage.
There is no lock, as a handler that pushes could wait for the code that it has interrupted.
"""

import gc
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from redis import exceptions

from lowq import clock
from lowq.errors import RedisRefused, RedisUnavailable, ScriptError
from lowq.store.calls import Call, Deadline, Rights, Wait, conclude, load_scripts, refusal_of
from lowq.store.connection import ask, pack, parse_info, read_reply, set_timeout
from lowq.store.translate import is_forbidden

#: Bytes of calls that are written at once. Of more, each call has a timeout of its own, as a slow line takes its time.
MAX_WRITE = 2**20
OLDEST_REDIS = (7, 0)
#: Seconds after which a caller that waits for a connection looks for lost ones, which wake no caller.
LOOK_AGAIN = 0.1


class Pool:
    """Connections to one server. At most ``size`` exist; a caller that finds none free waits ``timeout`` seconds.

    Safe for threads. Taking and giving back costs no lock while connections are free: deque's ends are atomic.
    """

    def __init__(
        self, connect: Callable[[], Any], size: int, timeout: float, *, shebang: bool, is_of_cluster: bool = False
    ) -> None:
        self.connect = connect
        self._size = size
        self._timeout = timeout
        self._shebang = shebang
        self._is_of_cluster = is_of_cluster
        self.scripts = {name: item.for_server(shebang=shebang) for name, item in load_scripts().items()}
        #: When the server was started, monotonic, as of the last time that it was prepared.
        self.started_at = -float("inf")
        self.reset()

    def reset(self) -> None:
        """Forgets all connections without touching them: after a fork they are the parent's."""
        self._idle: deque[Any] = deque()
        # The connections that count, in use or not, in the order in which they came: the first ``size`` of them stay. A
        # dict's methods are atomic.
        self._counted: dict[weakref.ref[Any], None] = {}
        #: A connection that was given back wakes a caller that waits.
        self._returned = clock.Waker()
        #: Whether its server has answered, and has the scripts.
        self.is_prepared = False
        #: Whether a connection may have another timeout than its own.
        self._has_limits = False
        self.rights = Rights(self.scripts["rights"][1], is_granted=not self._shebang)
        #: The durabilities that the server was asked for and can confirm.
        self._confirms: set[str] = set()

    def checkout(self, deadline: Deadline | None = None) -> Any:
        """A connection for the caller alone, connected and prepared. Its reads and writes end with the deadline;
        without one, each with the connection's own timeout.

        Raises:
            RedisUnavailable: all are in use for longer than the timeout. redis-py's errors when connecting fails.
        """
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = None  # and out of this block, or it would be the context of the next error
        if connection is None:
            connection = self._make_or_wait(self._timeout if deadline is None else min(self._timeout, deadline.left()))
        try:
            if connection._sock is None:  # redis-py has no public way to it before 8.0
                self._connect(connection, deadline)
            if deadline is not None or self._has_limits:
                self._limit(connection, deadline)
            if not self.is_prepared:
                self._prepare(connection)
                self._limit(connection, deadline)  # that took a part of it
        except BaseException:
            self.release_closed(connection)
            raise
        return connection

    @property
    def address(self) -> tuple[str, int] | None:
        """The server, where it may change and is known."""
        return None

    def follow(self) -> None:
        """A connection of its own is about to be used (`connect_dedicated`): it is to break when another server is to
        be used. It does not block.
        """

    def connect_dedicated(self, deadline: Deadline) -> Any:
        """A connection that is never given back and doesn't count, connected and prepared.

        Raises:
            redis-py's errors when connecting fails.
        """
        connection = self.connect()
        try:
            self._connect(connection, deadline)
            if not self.is_prepared:
                self._prepare(connection)
        except BaseException:
            connection.disconnect()
            raise
        return connection

    def ask(self, *command: bytes, deadline: Deadline) -> Any:
        """The reply to one command, on a connection for that alone, which is not prepared: also while all others are in
        use, and of a server that serves nothing else.

        Raises:
            redis-py's errors
        """
        connection = self.connect()
        try:
            self._connect(connection, deadline)
            reply = ask(connection, *command)
        finally:
            connection.disconnect()
        if isinstance(reply, Exception):
            raise reply
        return reply

    def _connect(self, connection: Any, deadline: Deadline | None) -> None:
        if deadline is None:
            connection.connect()
        else:
            names = [name for name in ("socket_connect_timeout", "socket_timeout") if hasattr(connection, name)]
            own = {name: getattr(connection, name) for name in names}
            try:
                for name in names:
                    setattr(connection, name, deadline.left())
                connection.connect()
            finally:
                for name, seconds in own.items():
                    setattr(connection, name, seconds)
            self._limit(connection, deadline)

    def _limit(self, connection: Any, deadline: Deadline | None) -> None:
        """Sets how long the next read or write may take."""
        if deadline is None:
            set_timeout(connection, getattr(connection, "socket_timeout", None))
        else:
            self._has_limits = True
            set_timeout(connection, deadline.left())

    def limit_confirmation(self, connection: Any, deadline: Deadline | None, wait: Wait) -> None:
        """The same for the answer to a wait: the server has the time of the wait on top."""
        if deadline is not None:
            deadline.restart(wait.seconds)
            self._limit(connection, deadline)
        elif (seconds := getattr(connection, "socket_timeout", None)) is not None:
            self._has_limits = True
            set_timeout(connection, seconds + wait.seconds)

    def _make_or_wait(self, timeout: float) -> Any:
        ends, has_collected = time.monotonic() + timeout, False
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                connection = None
            if connection is None and self._has_room():
                made = self.connect()
                connection = made if self._count(made) else None
            if connection is not None:
                if self._idle:
                    self._returned.set()  # more were given back than there were wake-ups
                return connection
            left = ends - time.monotonic()
            if left <= 0 and not has_collected:
                # A connection that an interrupted caller has left may be in a cycle with the error, and has its place.
                has_collected = True
                gc.collect()
                continue
            if left <= 0:
                raise RedisUnavailable(
                    f"all {self._size} connections are in use for {timeout:.3g} s; "
                    "raise client_pool_size, pool_timeout or push_timeout"
                )
            self._returned.wait(min(left, LOOK_AGAIN))

    def _has_room(self) -> bool:
        for reference in list(self._counted):
            if reference() is None:
                self._counted.pop(reference, None)
        return len(self._counted) < self._size

    def _count(self, connection: Any) -> bool:
        """Makes a connection count, unless there are ``size`` others. Several threads may try at the same moment: each
        enters its own, and the first ones win.
        """
        mine = weakref.ref(connection)
        self._counted[mine] = None
        before = 0
        for reference in list(self._counted):
            if reference is mine:
                break
            before += reference() is not None
        if before < self._size:
            return True
        self._counted.pop(mine, None)
        return False

    def release(self, connection: Any) -> None:
        """Gives a connection back, on which no reply is left to be read."""
        self._idle.append(connection)
        if self._returned.is_clear():
            self._returned.set()

    def release_closed(self, connection: Any) -> None:
        """Gives a connection back that broke, or whose use was interrupted; it connects anew when it is used next."""
        connection.disconnect()
        self.release(connection)  # not when that was interrupted: the next call might read the reply to another

    def lend(self, connection: Any) -> None:
        """The caller's connection doesn't count for a while: it waits for a reply while foreign code runs, which may
        need a connection itself.
        """
        self._counted.pop(weakref.ref(connection), None)
        self._returned.set()

    def take_back(self, connection: Any) -> bool:
        """Makes a lent connection count again, which is still to be released. False: it was closed, as there are enough
        by now.
        """
        self._counted.pop(weakref.ref(connection), None)  # it may have been interrupted while it was being lent
        if self._count(connection):
            return True
        connection.disconnect()
        return False

    def _prepare(self, connection: Any) -> None:
        """Checks the server's version and loads all scripts, in one write."""
        commands = [pack((b"INFO", b"server")), pack((b"SCRIPT", b"EXISTS", self.scripts["acquire"][1]))]
        commands = commands if self._shebang else []
        first = len(commands)
        commands += [pack((b"SCRIPT", b"LOAD", source)) for source, _ in self.scripts.values()]
        connection.send_packed_command([b"".join(commands)], check_health=False)
        answers = [read_reply(connection) for _ in commands]
        # The version first: an old server fails to load the scripts, too.
        if self._shebang:
            self._note_server(*answers[:first])
        for reply in answers[first:]:
            if isinstance(reply, Exception):
                raise reply
        self.is_prepared = True

    def _note_server(self, info: Any, loaded: Any) -> None:
        """``info``: the reply to INFO; ``loaded``: that to SCRIPT EXISTS.

        Raises:
            RedisRefused: it is too old, or part of a cluster that the URL doesn't name. Its error, but for a lack of
                rights.
        """
        if not isinstance(info, Exception):
            fields = parse_info(info)
            version = fields.get("redis_version", "")
            if tuple(int(part) for part in version.split(".")[:2] if part.isdigit()) < OLDEST_REDIS:
                raise RedisRefused(
                    f"the server is Redis {version or 'of unknown version'}; lowq needs Redis 7.0 or Valkey 7.2"
                )
            mode = fields.get("redis_mode") or fields.get("server_mode")  # Valkey's name
            if mode == "cluster" and not self._is_of_cluster:
                # It may serve the first shards that are asked for, and not those that come later.
                raise RedisRefused("the server is part of a cluster; use redis+cluster:// in redis_url")
            self.started_at = clock.now() - float(fields.get("uptime_in_seconds", "inf"))
            return
        if not is_forbidden(info):
            raise info
        # Its age decides whether owners that seem dead have crashed (see `server_age`). Scripts are not persisted: one
        # that has none of ours may have been started just now. One that has them is taken to be old. Were it taken to
        # be young, a job that kills each new process would never be found out.
        self.started_at = clock.now() if loaded == [0] else -float("inf")

    def load(self, connection: Any) -> None:
        """Loads all scripts anew: they were flushed, or the server is another one."""
        self.is_prepared = False
        self._confirms = set()
        self._prepare(connection)

    def check_wait(self, connection: Any, wait: Wait) -> None:
        """Asks the server, once, whether it can give this confirmation: before anything is written.

        Raises:
            RedisRefused: it can't.
        """
        if wait.durability in self._confirms:
            return
        reply = ask(connection, *wait.probe)
        refusal = refusal_of(wait, reply)
        if refusal is not None:
            raise refusal
        if not isinstance(reply, Exception):
            self._confirms.add(wait.durability)

    def close(self) -> None:
        """Closes the connections that are not in use; others are made when needed."""
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                break
            self._counted.pop(weakref.ref(connection), None)
            connection.disconnect()
            self._returned.set()


class Pipeline:
    """Calls to one server in one write, and their replies. The caller that has sent it receives it, or closes it.

    ``calls``: each with its position among the ``results``; ``wait``: the confirmation to wait for behind them.
    """

    __slots__ = ("_calls", "_connection", "_is_lent", "_results", "_wait", "deadline", "error", "has_errors", "pool")

    def __init__(
        self, pool: Pool, calls: list[tuple[int, Call[Any]]], results: list[Any], deadline: Deadline | None,
        wait: Wait | None,
    ) -> None:  # fmt: skip
        self.pool = pool
        self.deadline = deadline
        #: Why the server did not answer: redis-py's error, or one of ours.
        self.error: Exception | None = None
        #: Whether there is any error among the results.
        self.has_errors = False
        self._calls = calls
        self._results = results
        self._wait = wait
        self._connection: Any = None
        self._is_lent = False

    def send(self, *, prelude: Callable[[Any], object] | None = None, lend: bool = False) -> None:
        """Writes the calls. An error is kept for `receive`. ``prelude``: is called with the connection before anything
        is sent; ``lend``: the connection does not count as in use until `receive`, as foreign code runs.
        """
        pool, wait = self.pool, self._wait
        try:
            connection = self._connection = pool.checkout(self.deadline)
            if prelude is not None:
                prelude(connection)
            if pool.rights.may_lack:
                pool.rights.check(connection, [call for _, call in self._calls])
            if wait is not None:
                pool.check_wait(connection, wait)
            # Only now that there is a connection: that may have taken long.
            wanted = [item for item in self._calls if (only_if := item[1].only_if) is None or only_if(item[1])]
            if len(wanted) < len(self._calls):
                for position in {position for position, _ in self._calls}.difference(at for at, _ in wanted):
                    self._results[position] = RedisUnavailable("it was given up before it was sent")
                self._calls, self.has_errors = wanted, True
            packed = [call.pack(pool.scripts) for _, call in wanted]
            if wait is not None and packed:
                packed.append(pack(wait.command(self.deadline)))
            if packed:
                if len(packed) > 1 and sum(map(len, packed)) <= MAX_WRITE:
                    packed = [b"".join(packed)]
                connection.send_packed_command(packed, check_health=False)
        except (exceptions.RedisError, RedisUnavailable, RedisRefused) as error:
            self.error = error
        if lend:
            self._lend()

    def receive(self) -> None:
        """Puts the replies, with their fields named, into their places among the results, and gives the connection
        back. A call without a reply gets the error.
        """
        results, deadline = self._results, self.deadline
        for position, call in self._calls:
            if self.error is None:
                try:
                    if deadline is not None:
                        set_timeout(self._connection, deadline.left())
                    reply = read_reply(self._connection)
                    if deadline is not None:
                        deadline.restart()
                except exceptions.RedisError as error:
                    self.error = error
                else:
                    if isinstance(reply, Exception):
                        self.has_errors = True
                    elif call.read is not None:
                        try:
                            reply = call.read(reply)
                        # Of this call alone: the others' replies are behind it. Errors of signal handlers pass.
                        except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
                            reply = ScriptError(f"{call.script} on {call.key}: its reply can't be read: {error!r:.200}")
                            self.has_errors = True
                    results[position] = reply
                    continue
            results[position] = self.error
        if self._wait is not None and self._calls:
            self._receive_confirmation(self._wait)
        if self.error is not None:
            self.has_errors = True
        self.close(is_whole=True)

    def _receive_confirmation(self, wait: Wait) -> None:
        self.has_errors = True  # perhaps: `NotConfirmed` is one
        if not self._is_lent:
            self._lend()  # it may take long, and must not keep others from writing
        positions = [position for position, _ in self._calls]
        if self.error is None:
            try:
                self.pool.limit_confirmation(self._connection, self.deadline, wait)
                conclude(self._results, positions, wait, read_reply(self._connection))
                if self.deadline is not None:
                    self.deadline.restart()
                return
            except exceptions.RedisError as error:
                self.error = error
        # They were carried out, but are lost if the server has ended: the calls are repeated where its successor is.
        for position in positions:
            if not isinstance(self._results[position], Exception):
                self._results[position] = self.error

    def _lend(self) -> None:
        if self._connection is not None:
            self._is_lent = True
            self.pool.lend(self._connection)

    def close(self, *, is_whole: bool) -> None:
        """Gives the connection back. ``is_whole``: no reply is left on it; otherwise it is closed."""
        # Forgotten first, so that it is never given back twice, whatever interrupts this.
        connection, self._connection = self._connection, None
        if connection is None or (self._is_lent and not self.pool.take_back(connection)):
            return
        if is_whole and self.error is None:
            self.pool.release(connection)
        else:
            self.pool.release_closed(connection)
