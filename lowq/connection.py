"""From a URL to a client that runs scripts and turns redis-py's errors into ours.

The only module that knows redis-py and fakeredis. Commands go through redis-py's connections directly: packing
and parsing is hiredis's work, and the layers of the full client, which cost more than Redis itself, are left
out. redis-py retries nothing behind our back; whoever calls decides what may be repeated.

A script names the one key that routes it, the prefix of its shard, and so a client also knows which primary of
a cluster a shard lives on.
"""

import itertools
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from urllib.parse import unquote, urlsplit

import hiredis
import redis
import redis.sentinel
from redis import exceptions
from redis.backoff import NoBackoff
from redis.connection import parse_url
from redis.crc import key_slot
from redis.retry import Retry

from lowq.errors import ConfigError, LeaseLost, LowqError, RedisFull, RedisRefused, RedisUnavailable, ScriptError
from lowq.scripts import load_scripts

#: Seconds that a connection attempt, or the wait for one reply, may take.
SOCKET_TIMEOUT = 5.0
#: How often a call is tried anew on a fresh connection when its connection broke.
REPEATS = 2
OLDEST_REDIS = (7, 0)

_pack: Callable[[tuple[Any, ...]], bytes] = hiredis.pack_command  # type: ignore[attr-defined, unused-ignore]  # its stub leaves it out


class Refusal(LowqError):
    """A script refused for a reason that its caller explains: a code, and what follows it."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(f"{code} {detail}")
        self.code = code
        self.detail = detail


class Call:
    """One run of a script. ``key`` routes it; ``args`` may still be changed until it is sent."""

    __slots__ = ("args", "key", "script")

    def __init__(self, script: str, key: str, args: Iterable[str | bytes | int | float]) -> None:
        self.script = script
        self.key = key
        self.args = list(args)


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
            if not connection.is_connected:
                connection.connect()
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

    def _prepare(self, connection: Any) -> None:
        """Checks the server's version and loads all scripts, in one write."""
        sources = [source for source, _ in self.scripts.values()]
        commands = [_pack((b"SCRIPT", b"LOAD", source)) for source in sources]
        if self._shebang:
            commands.insert(0, _pack((b"INFO", b"server")))
        connection.send_packed_command([b"".join(commands)], check_health=False)
        replies = [_read(connection) for _ in commands]
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
        if self._shebang:
            _check_version(parse_info(replies[0]))
        self._prepared = True

    def load(self, connection: Any) -> None:
        """Loads all scripts anew: somebody has flushed them, or the server is another one."""
        self._prepared = False
        self._prepare(connection)

    def close(self) -> None:
        while self._idle:
            self._idle.pop().disconnect()


def _read(connection: Any) -> Any:
    """One reply; an error reply is returned, a broken connection raised."""
    try:
        return connection.read_response()
    except (exceptions.ConnectionError, exceptions.TimeoutError):
        # redis-py has closed the connection, except where the server said no to a command.
        raise
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


class _Flight:
    """Calls that were sent to one server and not answered yet."""

    def __init__(self, pool: Pool, calls: list[tuple[int, Call]]) -> None:
        self.pool = pool
        self.calls = calls
        self.connection: Any = None
        self.error: Exception | None = None

    def send(self) -> None:
        scripts = self.pool.scripts
        try:
            self.connection = self.pool.checkout()
            packed = [
                _pack((b"EVALSHA", scripts[call.script][1], 1, call.key, *call.args)) for _, call in self.calls
            ]
            self.connection.send_packed_command([b"".join(packed)], check_health=False)
        except (exceptions.RedisError, RedisUnavailable) as error:
            self.error = error

    def receive(self, results: list[Any]) -> None:
        for position, _ in self.calls:
            if self.error is None:
                try:
                    results[position] = _read(self.connection)
                    continue
                except exceptions.RedisError as error:
                    self.error = error
            results[position] = self.error

    def close(self, *, whole: bool) -> None:
        if self.connection is not None:
            if not whole:
                self.connection.disconnect()
            self.pool.release(self.connection)
            self.connection = None


class Client:
    """Runs scripts and commands on a server, or on the primaries of a cluster. Safe for threads and forks."""

    def __init__(
        self, url: str, *, size: int, timeout: float, socket_timeout: float = SOCKET_TIMEOUT, store: Any = None
    ) -> None:
        self.url = url
        self._servers = _servers_for(url, size, timeout, socket_timeout, store)
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

    def start(self, calls: Sequence[Call]) -> Callable[[], list[Any]]:
        """Sends scripts; the function returned waits for the replies. It must be called, once."""
        groups: dict[Pool, list[tuple[int, Call]]] = {}
        results: list[Any] = [None] * len(calls)
        for position, call in enumerate(calls):
            try:
                groups.setdefault(self._servers.pool_for(call.key), []).append((position, call))
            except (exceptions.RedisError, RedisUnavailable) as error:
                results[position] = error
        flights = [_Flight(pool, group) for pool, group in groups.items()]
        for flight in flights:
            flight.send()

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
            if isinstance(error, exceptions.NoScriptError):
                retry = self._retry_loaded
            elif isinstance(error, exceptions.AskError | exceptions.MovedError):
                retry = self._retry_redirected
            else:
                break
            try:
                return retry(call, error)
            except (exceptions.RedisError, LowqError) as next_error:
                error = next_error
        return self._translate(error, call)

    def _retry_loaded(self, call: Call, _error: Exception) -> Any:
        pool = self._servers.pool_for(call.key)
        return self._once(pool, call, pool.load)

    def _retry_redirected(self, call: Call, error: Any) -> Any:
        # MOVED and ASK are both subclasses of the same error in redis-py; only ASK is for this once.
        pool = self._servers.pool_at(error.host, error.port)
        if isinstance(error, exceptions.MovedError):
            self._servers.refresh()
            return self._once(pool, call, None)
        return self._once(pool, call, lambda connection: _ask(connection))

    @staticmethod
    def _once(pool: Pool, call: Call, before: Callable[[Any], object] | None) -> Any:
        connection = pool.checkout()
        try:
            if before is not None:
                before(connection)
            packed = _pack((b"EVALSHA", pool.scripts[call.script][1], 1, call.key, *call.args))
            connection.send_packed_command([packed], check_health=False)
            reply = _read(connection)
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
        for attempt in itertools.count():
            try:
                return self._commands_once(commands, key)
            except (exceptions.RedisError, RedisUnavailable) as error:
                translated = self._translate(error, None)
                if isinstance(error, exceptions.MovedError):
                    self._servers.refresh()
                elif type(translated) is not RedisUnavailable:
                    raise translated from error
                if attempt == REPEATS:
                    raise translated from error
        raise AssertionError

    def _commands_once(self, commands: Sequence[Sequence[Any]], key: str | None) -> list[Any]:
        pool = self._servers.pool_for(key) if key else self._servers.any_pool()
        connection = pool.checkout()
        try:
            connection.send_packed_command([b"".join(_pack(tuple(args)) for args in commands)], check_health=False)
            replies = [_read(connection) for _ in commands]
        except BaseException:
            connection.disconnect()
            raise
        finally:
            pool.release(connection)
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
        return replies

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
        return translated


def _ask(connection: Any) -> None:
    connection.send_packed_command([_pack((b"ASKING",))], check_health=False)
    connection.read_response()


def translate(error: Exception, call: Call | None, url: str) -> Exception:
    """One of our errors for one of redis-py's."""
    where = _without_password(url)
    text = str(error)
    if isinstance(error, LowqError):
        return error
    if isinstance(error, exceptions.AuthenticationError) or text.startswith(("NOAUTH", "WRONGPASS")):
        return RedisRefused(f"Redis at {where} refused the user or password: {text}")
    if isinstance(error, exceptions.NoPermissionError) or text.startswith("NOPERM"):
        return RedisRefused(f"Redis at {where} does not allow what lowq needs: {text}")
    if isinstance(error, exceptions.OutOfMemoryError) or text.startswith("OOM"):
        return RedisFull(f"Redis at {where} is full (maxmemory reached); nothing was written: {text}")
    if isinstance(error, exceptions.ReadOnlyError) or text.startswith("READONLY"):
        return RedisUnavailable(f"Redis at {where} is a read-only replica; redis_url must name the primary: {text}")
    if isinstance(error, exceptions.ConnectionError | exceptions.TimeoutError):
        return RedisUnavailable(f"Redis at {where} does not answer: {text}")
    if isinstance(error, exceptions.TryAgainError | exceptions.ClusterDownError | exceptions.AskError):
        return RedisUnavailable(f"the cluster at {where} is being changed: {text}")
    code, _, detail = text.partition(" ")
    if code in ("BUSY", "MASTERDOWN", "MISCONF", "NOREPLICAS", "UNBLOCKED"):
        return RedisUnavailable(f"Redis at {where} can't serve just now: {text}")
    if code == "LEASELOST" and call is not None:
        return LeaseLost(f"{call.key}: {call.script} was refused: {detail}")
    if code == "SHARDSCOUNT":
        return Refusal(code, detail)
    return ScriptError(f"{call.script + ' on ' + call.key if call else 'a command'} failed in Redis: {text}")


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


class Subscription:
    """Channels and their messages, over one connection. One thread reads; any thread may change the channels."""

    def __init__(self, any_pool: Callable[[], Pool], translate: Callable[[Exception, None], Exception]) -> None:
        self._any_pool = any_pool
        self._translate = translate
        self._lock = threading.Lock()
        self._connection: Any = None
        self._channels: set[str] = set()

    def add(self, channels: Iterable[str]) -> None:
        """Subscribes; each channel is confirmed by an event ``subscribe``, anew after every reconnection."""
        self._change(b"SUBSCRIBE", [name for name in channels if name not in self._channels])

    def remove(self, channels: Iterable[str]) -> None:
        self._change(b"UNSUBSCRIBE", [name for name in channels if name in self._channels])

    def _change(self, command: bytes, channels: list[str]) -> None:
        if not channels:
            return
        with self._lock:
            if command == b"SUBSCRIBE":
                self._channels.update(channels)
            else:
                self._channels.difference_update(channels)
            if self._connection is not None:
                try:
                    self._connection.send_packed_command([_pack((command, *channels))], check_health=False)
                except exceptions.RedisError:
                    pass  # The reading thread finds the connection broken and subscribes to all channels anew.

    def get(self, timeout: float) -> tuple[str, str, bytes] | None:
        """The next event, ``(kind, channel, data)``, or None after ``timeout`` seconds. Connects when needed.

        Raises:
            RedisUnavailable, RedisRefused: the connection is gone; the next call connects anew.
        """
        try:
            connection = self._connection or self._open()
            if not connection.can_read(timeout):
                return None
            event = connection.read_response()
        except (exceptions.RedisError, OSError, RedisUnavailable) as error:
            self.close()
            wrapped = error if not isinstance(error, OSError) else exceptions.ConnectionError(str(error))
            raise self._translate(wrapped, None) from error
        kind, channel, data = event[0], event[1], event[2]
        return kind.decode(), channel.decode(), data if isinstance(data, bytes) else b""

    def _open(self) -> Any:
        connection = self._any_pool().connect()
        connection.connect()
        with self._lock:
            self._connection = connection
            if self._channels:
                connection.send_packed_command([_pack((b"SUBSCRIBE", *self._channels))], check_health=False)
        return connection

    def close(self) -> None:
        with self._lock:
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.disconnect()


# --- one server, or a cluster of them ------------------------------------------------------------------------


class _OneServer:
    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def pool_for(self, _key: str) -> Pool:
        return self._pool

    def any_pool(self) -> Pool:
        return self._pool

    def pool_at(self, host: str, port: int) -> Pool:
        raise RedisRefused(f"the server is part of a cluster ({host}:{port} was named); use redis+cluster://")

    def refresh(self) -> None:
        raise RedisRefused("the server is part of a cluster; use redis+cluster://")

    def reset(self) -> None:
        self._pool.reset()

    def close(self) -> None:
        self._pool.close()


class _Cluster:
    """Which primary serves which slots, as one of the nodes says."""

    def __init__(self, seeds: list[tuple[str, int]], make_pool: Callable[[str, int], Pool]) -> None:
        self._seeds = seeds
        self._make_pool = make_pool
        self._pools: dict[tuple[str, int], Pool] = {}
        self._slots: list[tuple[str, int] | None] = []
        self._lock = threading.Lock()

    def pool_at(self, host: str, port: int) -> Pool:
        with self._lock:
            pool = self._pools.get((host, port))
            if pool is None:
                pool = self._pools[host, port] = self._make_pool(host, port)
            return pool

    def pool_for(self, key: str) -> Pool:
        if not self._slots:
            self.refresh()
        address = self._slots[key_slot(key.encode())]
        if address is None:
            raise RedisUnavailable(f"no primary of the cluster serves {key}")
        return self.pool_at(*address)

    def any_pool(self) -> Pool:
        return self.pool_for("")

    def refresh(self) -> None:
        failure: Exception | None = None
        for host, port in [*self._pools, *self._seeds]:
            pool = self.pool_at(host, port)
            try:
                connection = pool.checkout()
                try:
                    connection.send_packed_command([_pack((b"CLUSTER", b"SLOTS"))], check_health=False)
                    ranges = connection.read_response()
                finally:
                    pool.release(connection)
            except (exceptions.RedisError, RedisUnavailable) as error:
                failure = error
                continue
            slots: list[tuple[str, int] | None] = [None] * 16384
            for first, last, primary, *_ in ranges:
                slots[first : last + 1] = [(primary[0].decode() or host, primary[1])] * (last - first + 1)
            self._slots = slots
            return
        raise failure or RedisUnavailable("the cluster's URL names no node")

    def reset(self) -> None:
        self._lock = threading.Lock()
        for pool in self._pools.values():
            pool.reset()

    def close(self) -> None:
        for pool in list(self._pools.values()):
            pool.close()


def _servers_for(url: str, size: int, timeout: float, socket_timeout: float, store: Any) -> _OneServer | _Cluster:
    options: dict[str, Any] = {
        "protocol": 2,
        "socket_timeout": socket_timeout,
        "socket_connect_timeout": socket_timeout,
        "socket_keepalive": True,
        "retry": Retry(NoBackoff(), 0),
    }
    scheme, _, rest = url.partition("://")
    if scheme == "memory":
        return _OneServer(_memory_pool(store if store is not None else memory_store(url), size, timeout))
    try:
        if scheme == "redis+sentinel":
            return _OneServer(_sentinel_pool(rest, options, size, timeout))
        if scheme == "redis+cluster":
            addresses, _, _ = rest.partition("/")
            login, _, hosts = addresses.rpartition("@")
            seeds = [_host_port(item, 6379) for item in hosts.split(",")]

            def make_pool(host: str, port: int) -> Pool:
                return _plain_pool(f"redis://{login + '@' if login else ''}{host}:{port}", options, size, timeout)

            return _Cluster(seeds, make_pool)
        return _OneServer(_plain_pool(url, options, size, timeout))
    except ValueError as error:
        raise ConfigError(f"redis_url={_without_password(url)!r}: {error}") from None


def _plain_pool(url: str, options: dict[str, Any], size: int, timeout: float) -> Pool:
    settings = {**options, **parse_url(url)}
    kind = settings.pop("connection_class", redis.Connection)
    if issubclass(kind, redis.UnixDomainSocketConnection):
        settings.pop("socket_keepalive")
        settings.pop("socket_connect_timeout")
    return Pool(lambda: kind(**settings), size, timeout, shebang=True)


def _host_port(text: str, default: int) -> tuple[str, int]:
    host, _, port = text.rpartition(":") if ":" in text else (text, "", str(default))
    return host.strip("[]") or "localhost", int(port)


def _sentinel_pool(rest: str, options: dict[str, Any], size: int, timeout: float) -> Pool:
    """``h1:p,h2:p/service/db``; a user and password before ``@`` are those of the primary."""
    addresses, _, path = rest.partition("/")
    login, _, hosts = addresses.rpartition("@")
    service, _, database = path.partition("/")
    if not service:
        raise ValueError("it names no service; write redis+sentinel://host:port/service/db")
    settings = {**options, "db": int(database or 0)}
    if login:
        user, _, password = login.partition(":")
        settings |= {"username": unquote(user) or None, "password": unquote(password) or None}
    timeouts = {name: options[name] for name in ("socket_timeout", "socket_connect_timeout")}
    sentinel = redis.sentinel.Sentinel([_host_port(item, 26379) for item in hosts.split(",")], sentinel_kwargs=timeouts)
    primary = redis.sentinel.SentinelConnectionPool(service, sentinel, **settings)
    return Pool(primary.make_connection, size, timeout, shebang=True)


# --- the embedded store --------------------------------------------------------------------------------------

_stores: dict[str, Any] = {}


def new_store() -> Any:
    """An empty embedded store.

    Raises:
        ConfigError: fakeredis is not installed.
    """
    try:
        import lupa  # noqa: F401 - without it fakeredis knows no scripts
        from fakeredis import FakeServer
    except ImportError as error:
        raise ConfigError(
            f"the embedded store needs fakeredis with lua ({error}); install it: pip install 'lowq[embedded]'"
        ) from None
    return FakeServer(version=(7, 0))


def memory_store(url: str) -> Any:
    """The store of a ``memory://name`` URL, one per name and process; ``memory://`` is a new one each time."""
    name = url.removeprefix("memory://")
    if not name:
        return new_store()
    if name not in _stores:
        _stores[name] = new_store()
    return _stores[name]


def _memory_pool(store: Any, size: int, timeout: float) -> Pool:
    from fakeredis import FakeRedisConnection

    return Pool(lambda: FakeRedisConnection(server=store, protocol=2), size, timeout, shebang=False)


# --- forks ---------------------------------------------------------------------------------------------------

_clients: "weakref.WeakSet[Client]" = weakref.WeakSet()


def _forget_connections() -> None:
    for client in list(_clients):
        client.reset()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_connections)
