"""Connections to one server, each prepared before its first use: version checked, scripts loaded.

A signal handler may raise anywhere: the usual timeout by SIGALRM, Ctrl-C. The connection that was used then is dropped.
It is given back only when it is certain that no reply is left on it, or that it is closed, so nobody ever gets a reply
that was another call's. The pool knows its connections by weak references: one that was dropped frees its place when
nobody refers to it. There is no lock, as a handler that pushes could wait for what it has interrupted.
"""

import gc
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

from lowq import clock
from lowq.errors import RedisRefused, RedisUnavailable
from lowq.store.connection import ask, encode, pack, parse_info, read_reply, set_timeout
from lowq.store.deadline import Deadline, Wait, refusal_of
from lowq.store.scripts import load_scripts
from lowq.store.translate import is_forbidden

OLDEST_REDIS = (7, 0)
#: Seconds after which whoever waits for a connection looks whether one was lost, which wakes nobody.
LOOK_AGAIN = 0.1


class Pool:
    """Connections to one server. At most ``size`` exist; whoever finds none free waits ``timeout`` seconds.

    Safe for threads. Taking and giving back costs no lock while connections are free: deque's ends are atomic.
    """

    def __init__(
        self,
        connect: Callable[[], Any],
        size: int,
        timeout: float,
        *,
        shebang: bool,
        is_of_cluster: bool = False,
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
        #: Something is put here when a connection was given back, for one of those who wait.
        self._returned: SimpleQueue[None] = SimpleQueue()
        self._prepared = False
        #: Whether a connection may have another timeout than its own.
        self._has_limits = False
        #: Whether the user may lack rights that a script needs, as far as is known.
        self.may_lack_rights = self._shebang
        #: script -> commands that it needs and the user may not run; None: that is to be asked (again).
        self._refused: dict[str, list[str]] | None = None
        #: What the server was asked for and can confirm.
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
            connection = None  # and out of this block, or it would be the context of what is raised next
        if connection is None:
            connection = self._make_or_wait(self._timeout if deadline is None else min(self._timeout, deadline.left()))
        try:
            if connection._sock is None:  # redis-py has no public way to it before 8.0
                self._connect(connection, deadline)
            if deadline is not None or self._has_limits:
                self._limit(connection, deadline)
            if not self._prepared:
                self._prepare(connection)
                self._limit(connection, deadline)  # that took a part of it
        except BaseException:
            self.release_closed(connection)
            raise
        return connection

    @property
    def address(self) -> tuple[str, int] | None:
        """Which server it is, where that may change and is known."""
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
            if not self._prepared:
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
                    self._wake()  # more were given back than there were wake-ups
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
            with suppress(Empty):
                self._returned.get(timeout=min(left, LOOK_AGAIN))

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

    def _wake(self) -> None:
        if self._returned.empty():
            self._returned.put(None)

    def release(self, connection: Any) -> None:
        """Gives a connection back, on which no reply is left to be read."""
        self._idle.append(connection)
        if self._returned.empty():
            self._returned.put(None)

    def release_closed(self, connection: Any) -> None:
        """Gives a connection back that broke, or whose use was interrupted; it connects anew when it is used next."""
        connection.disconnect()
        self.release(connection)  # not when that was interrupted: whoever got it might read somebody else's reply

    def lend(self, connection: Any) -> None:
        """The caller's connection doesn't count for a while: it waits for a reply while foreign code runs, which may
        need a connection itself.
        """
        self._counted.pop(weakref.ref(connection), None)
        self._wake()

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
        commands = [pack((b"SCRIPT", b"LOAD", source)) for source, _ in self.scripts.values()]
        first = 0
        if self._shebang:
            known = [pack((b"INFO", b"server")), pack((b"SCRIPT", b"EXISTS", self.scripts["acquire"][1]))]
            commands, first = known + commands, len(known)
        connection.send_packed_command([b"".join(commands)], check_health=False)
        answers = [read_reply(connection) for _ in commands]
        # The version first: an old server fails to load the scripts, too.
        if self._shebang:
            self._note_server(*answers[:first])
        for reply in answers[first:]:
            if isinstance(reply, Exception):
                raise reply
        self._prepared = True

    @property
    def has_answered(self) -> bool:
        """Whether its server has answered: it is the right one."""
        return self._prepared

    def check_rights(self, connection: Any, scripts: Iterable[tuple[str, str]]) -> None:
        """Checks that the user may run all commands of these scripts on their keys: one that Redis refused after its
        first write would leave a transition half done. Redis is asked once, and again after it has refused something.

        Raises:
            RedisRefused: nothing was sent.
        """
        refused = self._refused
        for script, key in scripts:
            if refused is None or script in refused:
                refused = self._ask_rights(connection, key)
                self.may_lack_rights = bool(refused)  # first: another thread that forgets both meanwhile sets it again
                self._refused = refused
            if commands := refused.get(script):
                raise RedisRefused(
                    f"Redis does not allow what lowq needs (docs/rights.md): {script} on {key} needs "
                    f"{' '.join(f'+{name.lower()}' for name in commands)}; nothing was written"
                )

    def _ask_rights(self, connection: Any, key: str) -> dict[str, list[str]]:
        needed = {name: script.commands() for name, script in load_scripts().items()}
        names = sorted(frozenset[str]().union(*needed.values()))
        reply = ask(connection, b"EVALSHA", self.scripts["rights"][1], b"1", key.encode(), *encode(names))
        if isinstance(reply, Exception):
            raise reply
        refused = {name.decode() for name in reply}
        return {name: sorted(commands & refused) for name, commands in needed.items() if commands & refused}

    def allows(self, script: str) -> bool:
        """Whether the user is known to have what a script needs."""
        return not self._shebang or (self._refused is not None and script not in self._refused)

    def forget_rights(self) -> None:
        """Redis has refused the user something: the next call asks it what."""
        self._refused, self.may_lack_rights = None, self._shebang

    def _note_server(self, info: Any, loaded: Any) -> None:
        """``info``: the reply to INFO; ``loaded``: that to SCRIPT EXISTS.

        Raises:
            RedisRefused: it is too old, or part of a cluster that the URL doesn't name. What else than a lack of rights
                keeps it from answering.
        """
        if not isinstance(info, Exception):
            fields = parse_info(info)
            _check_version(fields)
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
        """Loads all scripts anew: somebody has flushed them, or the server is another one."""
        self._prepared = False
        self._confirms = set()
        self._prepare(connection)

    def check_wait(self, connection: Any, wait: Wait) -> None:
        """Asks the server, once, whether it can confirm what is to be waited for: before anything is written.

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
        """Closes the connections that nobody uses; others are made when needed."""
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                break
            self._counted.pop(weakref.ref(connection), None)
            connection.disconnect()
            self._wake()


def _check_version(info: dict[str, str]) -> None:
    version = info.get("redis_version", "")
    parts = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if parts < OLDEST_REDIS:
        raise RedisRefused(f"the server is Redis {version or 'of unknown version'}; lowq needs Redis 7.0 or Valkey 7.2")
