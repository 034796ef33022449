"""From a URL to the pools behind it: one server, a primary that sentinels name, a cluster, the embedded store."""

import random
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote

import redis
import redis.sentinel
from redis import exceptions
from redis.backoff import NoBackoff
from redis.connection import parse_url
from redis.crc import key_slot
from redis.retry import Retry

from lowq.errors import ConfigError, RedisRefused, RedisUnavailable
from lowq.store.deadline import Deadline
from lowq.store.pool import Packer, Pool
from lowq.store.translate import without_password

#: Seconds that each node of a cluster has to say which primary serves which slots; and those that pass at least before
#: the nodes are asked again, as long as a primary does not answer.
ASK_TIMEOUT = 1.0
ASK_PAUSE = 1.0

Address = tuple[str, int]


class _OneServer:
    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def pool_for(self, _key: str, _deadline: Deadline | None = None) -> Pool:
        return self._pool

    def known_primary(self, _key: str) -> Address | None:
        return None

    def any_pool(self) -> Pool:
        return self._pool

    def only_pool(self) -> Pool | None:
        return self._pool

    def pools(self) -> dict[str, Pool]:
        return {"": self._pool}

    def pool_at(self, host: str, port: int) -> Pool:
        raise RedisRefused(f"the server is part of a cluster ({host}:{port} was named); use redis+cluster://")

    def refresh(self, _deadline: Deadline | None = None) -> None:
        raise RedisRefused("the server is part of a cluster; use redis+cluster://")

    def doubt(self, _key: str) -> None:
        pass  # there is no other one

    def started_at(self) -> float:
        return self._pool.started_at

    def reset(self) -> None:
        self._pool.reset()

    def close(self) -> None:
        self._pool.close()


class _Cluster:
    """Which primary serves which slots, as one of the nodes says. It is asked at first, when a primary says that a slot
    has moved, and when one does not answer: another one may have its slots by now.
    """

    def __init__(self, seeds: list[Address], make_pool: Callable[[str, int], Pool]) -> None:
        self._seeds = seeds
        self._make_pool = make_pool
        self._pools: dict[Address, Pool] = {}
        self._slots: list[Address | None] = []
        #: Primaries and replicas.
        self._nodes: list[Address] = []
        #: Primaries that did not answer since the nodes were asked.
        self._doubted: set[Address] = set()
        #: When they were asked because of that, monotonic.
        self._asked_at = -float("inf")

    def pool_at(self, host: str, port: int) -> Pool:
        # Without a lock, see `Pool`. When several come at the same moment one of the pools stays, the others are empty.
        pool = self._pools.get((host, port))
        return pool or self._pools.setdefault((host, port), self._make_pool(host, port))

    def pool_for(self, key: str, deadline: Deadline | None = None) -> Pool:
        if not self._slots:
            self.refresh(deadline)
        elif self._doubted and time.monotonic() >= self._asked_at + ASK_PAUSE:
            self._ask_doubting(deadline)
        address = self._slots[key_slot(key.encode())]
        if address is None:
            raise RedisUnavailable(f"no primary of the cluster serves {key}")
        return self.pool_at(*address)

    def known_primary(self, key: str) -> Address | None:
        return self._slots[key_slot(key.encode())] if self._slots else None

    def any_pool(self) -> Pool:
        return self.pool_for("")

    def only_pool(self) -> Pool | None:
        return None  # there may be several

    def pools(self) -> dict[str, Pool]:
        """All primaries, by their addresses."""
        self.refresh()
        addresses = [address for address in dict.fromkeys(self._slots) if address is not None]
        return {f"{host}:{port}": self.pool_at(host, port) for host, port in addresses}

    def doubt(self, key: str) -> None:
        """The primary of the key does not answer."""
        address = self.known_primary(key)
        if address is not None:
            self._doubted.add(address)

    def _ask_doubting(self, deadline: Deadline | None) -> None:
        self._asked_at = time.monotonic()  # before: others need not ask, too
        try:
            self.refresh(deadline)
        except (exceptions.RedisError, RedisUnavailable):
            pass  # what was known may still hold

    def refresh(self, deadline: Deadline | None = None) -> None:
        """Asks the nodes, one after the other, until one answers.

        Raises:
            redis-py's errors, RedisUnavailable: none does.
        """
        # Not always the same one first: it may be cut off from the others. Those that did not answer just now are last.
        known = list(dict.fromkeys([*self._nodes, *self._pools, *self._seeds]))
        random.shuffle(known)
        known.sort(key=lambda address: address in self._doubted)
        failure: Exception | None = None
        for host, port in known:
            pool = self._pools.get((host, port)) or self._make_pool(host, port)
            limit = Deadline(ASK_TIMEOUT if deadline is None else min(deadline.left() / 2, ASK_TIMEOUT))
            try:
                ranges = pool.ask(b"CLUSTER", b"SLOTS", deadline=limit)
            except (exceptions.RedisError, RedisUnavailable) as error:
                failure = error
                continue
            if ranges:
                self._take_ranges(ranges, host)
                return
            failure = RedisUnavailable(f"{host}:{port} knows of no node of a cluster that serves any slot")
        raise failure or RedisUnavailable("the cluster's URL names no node")

    def _take_ranges(self, ranges: list[Any], asked: str) -> None:
        slots: list[Address | None] = [None] * 16384
        found: dict[Address, None] = {}
        for first, last, *nodes in ranges:
            addresses = [((name or b"").decode() or asked, port) for name, port, *_ in nodes]
            slots[first : last + 1] = [addresses[0]] * (last - first + 1)
            found |= dict.fromkeys(addresses)
        self._slots, self._nodes = slots, list(found)
        self._doubted.clear()

    def started_at(self) -> float:
        return max((pool.started_at for pool in list(self._pools.values())), default=-float("inf"))

    def reset(self) -> None:
        for pool in self._pools.values():
            pool.reset()

    def close(self) -> None:
        for pool in list(self._pools.values()):
            pool.close()


def servers_for(url: str, size: int, timeout: float, socket_timeout: float, store: Any) -> _OneServer | _Cluster:
    options: dict[str, Any] = {
        "protocol": 2,
        "socket_timeout": socket_timeout,
        "socket_connect_timeout": socket_timeout,
        "socket_keepalive": True,
        "retry": Retry(NoBackoff(), 0),
        "command_packer": Packer,
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
                node_url = f"redis://{login + '@' if login else ''}{host}:{port}"
                return _plain_pool(node_url, options, size, timeout)

            return _Cluster(seeds, make_pool)
        return _OneServer(_plain_pool(url, options, size, timeout))
    except ValueError as error:
        if any(mark in rest.rpartition("@")[0] for mark in "/?#"):
            reason = "in a password write %2F for /, %3F for ?, %23 for #"
        else:
            reason = str(error)
        raise ConfigError(f"redis_url={without_password(url)!r}: {reason}") from None


def _plain_pool(url: str, options: dict[str, Any], size: int, timeout: float) -> Pool:
    settings = {**options, **parse_url(url), "protocol": 2}
    kind = settings.pop("connection_class", redis.Connection)
    settings.pop("max_connections", None)  # client_pool_size says that
    settings.get("host", "").encode("idna")
    if issubclass(kind, redis.UnixDomainSocketConnection):
        settings.pop("socket_keepalive")
        settings.pop("socket_connect_timeout")
    if settings.pop("decode_responses", False):
        raise ValueError("decode_responses is not for lowq; leave it out")
    try:
        kind(**settings)
    except TypeError as error:
        raise ValueError(f"it has an option that redis-py doesn't know: {error}") from None
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
    timeouts = {name: options[name] for name in ("socket_timeout", "socket_connect_timeout", "retry")}
    sentinel = redis.sentinel.Sentinel([_host_port(item, 26379) for item in hosts.split(",")], sentinel_kwargs=timeouts)
    primary = redis.sentinel.SentinelConnectionPool(service, sentinel, **settings)
    return Pool(primary.make_connection, size, timeout, shebang=True)


# --- the embedded store ---

_stores: dict[str, Any] = {}


def new_store() -> Any:
    """An empty embedded store.

    Raises:
        ConfigError: fakeredis is not installed.
    """
    try:
        import lupa  # noqa: F401 - without it fakeredis knows no scripts
        from fakeredis import FakeRedisConnection, FakeServer  # noqa: F401 - the connection is missing before 2.35
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
