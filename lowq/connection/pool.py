"""Connections to one server, each prepared before its first use: version checked, scripts loaded."""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import hiredis
from redis import exceptions

from lowq import clock
from lowq.connection.kernel import is_connected, keeps_timeout
from lowq.errors import RedisRefused, RedisUnavailable
from lowq.scripts import load_scripts

OLDEST_REDIS = (7, 0)

#: A command and its arguments as Redis's protocol has them.
pack: Callable[[tuple[Any, ...]], bytes] = hiredis.pack_command  # type: ignore[attr-defined, unused-ignore]  # its stub leaves it out


class Pool:
    """Connections to one server. At most ``size`` exist; whoever finds none free waits ``timeout`` seconds.

    Safe for threads. Taking and giving back costs no lock while connections are free: deque's ends are atomic.
    """

    def __init__(self, connect: Callable[[], Any], size: int, timeout: float, *, shebang: bool) -> None:
        self.connect = connect
        self._size = size
        self._timeout = timeout
        self._shebang = shebang
        self.scripts = {name: item.for_server(shebang=shebang) for name, item in load_scripts().items()}
        #: When the server was started, monotonic, as of the last time that it was prepared.
        self.started_at = -float("inf")
        self.reset()

    def reset(self) -> None:
        """Forgets all connections without touching them: after a fork they are the parent's."""
        self._idle: deque[Any] = deque()
        self._made = 0
        self._waiting = 0
        self._prepared = False
        self._freed = threading.Condition()

    def checkout(self) -> Any:
        """A connection for the caller alone, connected and prepared.

        Raises:
            RedisUnavailable: all are in use for longer than the timeout. redis-py's errors when connecting fails.
        """
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = self._make_or_wait()
        try:
            if not is_connected(connection):
                connection.connect()
                keeps_timeout(connection, getattr(connection, "socket_timeout", None))
            if not self._prepared:
                self._prepare(connection)
        except BaseException:
            connection.disconnect()
            self.release(connection)
            raise
        return connection

    def _make_or_wait(self) -> Any:
        deadline = time.monotonic() + self._timeout
        with self._freed:
            self._waiting += 1
            try:
                while True:
                    try:
                        return self._idle.pop()
                    except IndexError:
                        pass
                    if self._made < self._size:
                        self._made += 1
                        return self.connect()
                    if not self._freed.wait(deadline - time.monotonic()):
                        raise RedisUnavailable(
                            f"all {self._size} connections are in use for {self._timeout} s; "
                            "raise client_pool_size or pool_timeout"
                        )
            finally:
                self._waiting -= 1

    def release(self, connection: Any) -> None:
        """Gives a connection back; one that broke connects anew when it is used next."""
        self._idle.append(connection)
        if self._waiting:
            with self._freed:
                self._freed.notify()

    def lend(self) -> None:
        """The caller's connection doesn't count for a while: it waits for a reply while foreign code runs, which may
        need a connection itself.
        """
        with self._freed:
            self._made -= 1
            self._freed.notify()

    def take_back(self, connection: Any) -> None:
        """Gives a lent connection back."""
        with self._freed:
            if self._made >= self._size:
                connection.disconnect()
                return
            self._made += 1
        self.release(connection)

    def _prepare(self, connection: Any) -> None:
        """Checks the server's version and loads all scripts, in one write."""
        sources = [source for source, _ in self.scripts.values()]
        commands = [pack((b"SCRIPT", b"LOAD", source)) for source in sources]
        if self._shebang:
            commands.insert(0, pack((b"INFO", b"server")))
        connection.send_packed_command([b"".join(commands)], check_health=False)
        replies = [read_reply(connection) for _ in commands]
        # The version first: an old server fails to load the scripts, too.
        if self._shebang and not isinstance(replies[0], Exception):
            info = parse_info(replies[0])
            _check_version(info)
            self.started_at = clock.now() - float(info.get("uptime_in_seconds", "inf"))
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
        self._prepared = True

    def load(self, connection: Any) -> None:
        """Loads all scripts anew: somebody has flushed them, or the server is another one."""
        self._prepared = False
        self._prepare(connection)

    def close(self) -> None:
        """Closes the connections that nobody uses; others are made when needed."""
        with self._freed:
            while True:
                try:
                    self._idle.pop().disconnect()
                except IndexError:
                    break
                self._made -= 1
            self._freed.notify_all()


def read_reply(connection: Any) -> Any:
    """One reply; an error reply is returned, a broken connection raised."""
    try:
        return connection.read_response()
    except (exceptions.ConnectionError, exceptions.TimeoutError):
        # redis-py has closed the connection, except where the server said no to a command.
        raise
    except exceptions.ReadOnlyError as error:
        # The primary became a replica. A fresh connection may find the new one behind the same name.
        connection.disconnect()
        return error
    except exceptions.ResponseError as error:
        return error


def parse_info(text: bytes) -> dict[str, str]:
    """The reply to INFO."""
    lines = (line.partition(":") for line in text.decode().splitlines() if ":" in line)
    return {name: value for name, _, value in lines}


def _check_version(info: dict[str, str]) -> None:
    version = info.get("redis_version", "")
    parts = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if parts < OLDEST_REDIS:
        raise RedisRefused(f"the server is Redis {version or 'of unknown version'}; lowq needs Redis 7.0 or Valkey 7.2")
