"""From a URL to the pools behind it: one server, a primary that sentinels name, a cluster, the embedded store."""

import random
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from urllib.parse import parse_qsl, unquote
from weakref import finalize, ref

import redis
from redis import exceptions
from redis.backoff import NoBackoff
from redis.connection import parse_url
from redis.crc import key_slot
from redis.retry import Retry

from lowq.errors import ConfigError, RedisRefused, RedisUnavailable
from lowq.store.deadline import Deadline
from lowq.store.followed_primary import Address, FollowedPrimary, PrimaryConnection, TlsPrimaryConnection, Word
from lowq.store.names import TcpConnection, TlsConnection
from lowq.store.pool import Packer, Pool, pack, read_reply
from lowq.store.translate import without_password

#: Seconds that each node of a cluster has to say which primary serves which slots.
ASK_TIMEOUT = 1.0
#: Seconds before the nodes are asked again, as long as a primary does not answer or serve: at first, and at most. Each
#: time up to half of it less, so that not all clients ask at once.
ASK_PAUSES = (0.1, 0.5)
#: Seconds that a primary has to answer which did not answer before: at first, how much more each time, and at most.
PROBE_TIMEOUTS = (0.1, 0.1, 1.0)
#: What it is asked about, like a key of lowq's, for who may name no others.
PROBE_KEY = b"lowq:v1:nodes"
#: Seconds that a reply of a primary of a cluster is waited for at most, by a call without a deadline of its own: after
#: that the calls to it fail at once until it has answered, so that work on the other primaries goes on.
CLUSTER_SOCKET_TIMEOUT = 1.0

#: What the URL of a Sentinel or a cluster may say of TLS: options of redis-py that are the same in all its releases.
TLS_OPTIONS = (
    "ssl_ca_certs", "ssl_ca_path", "ssl_ca_data", "ssl_cert_reqs", "ssl_check_hostname", "ssl_certfile", "ssl_keyfile",
    "ssl_password", "ssl_ciphers",
)  # fmt: skip
#: And of who asks the sentinels, where they are not open to all.
SENTINEL_OPTIONS = ("sentinel_username", "sentinel_password")
#: Seconds that a sentinel has for an answer. Nobody waits for it who knows a primary.
SENTINEL_TIMEOUT = 2.0


def slot_of(key: str) -> int:
    """The slot of a cluster that a key is in."""
    slot: int = key_slot(key.encode())
    return slot


class _OneServer:
    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def pool_for(self, _key: str, _deadline: Deadline | None = None) -> Pool:
        return self._pool

    def known_primary(self, _key: str) -> Address | None:
        return None

    def known_replicas(self, _key: str) -> int:
        return 0  # it says that itself

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

    def doubt(self, _pool: Pool, _silence: Exception | None) -> None:
        pass  # there is no other one

    def answered(self, _pool: Pool) -> None:
        pass

    @property
    def is_partial(self) -> bool:
        return False

    @property
    def is_known(self) -> bool:
        return False

    def moved(self, _key: str, host: str, port: int, _deadline: Deadline | None) -> Pool:
        return self.pool_at(host, port)

    def started_at(self) -> float:
        return self._pool.started_at

    def reset(self) -> None:
        self._pool.reset()

    def close(self) -> None:
        self._pool.close()


class _Silence:
    """A primary of a cluster does not answer or serve."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.probe_timeout = PROBE_TIMEOUTS[0]


class _Cluster:
    """Which primary serves which slots, as one of the nodes says. They are asked at first, when a primary says that a
    slot has moved, and when one does not answer or does not serve: another one may have its slots by now. So that the
    nodes are not asked too often, there is a pause between two times, whoever asks.

    A primary that does not answer or serve is *silent*: calls without a deadline fail at once, until it has answered or
    another one has its slots. Who works shards of several primaries waits for none of them alone. Which of the two it
    is two threads find out, that live as long as one is silent: nobody who works may have to wait for the answer, and
    who asks the nodes does not wait for those that are silent.
    """

    def __init__(self, seeds: list[Address], make_pool: Callable[[str, int], Pool]) -> None:
        self._seeds = seeds
        self._make_pool = make_pool
        self._pools: dict[Address, Pool] = {}
        self._slots: list[Address | None] = []
        #: Primaries and replicas.
        self._nodes: list[Address] = []
        #: How many replicas primaries have.
        self._replicas: dict[Address, int] = {}
        #: Primaries that did not answer or serve since the nodes were asked: these are asked last.
        self._doubted: dict[Address, None] = {}
        #: Primaries that did not answer or serve.
        self._silent: dict[Address, _Silence] = {}
        #: Whether what is known of the slots may be out of date.
        self._is_stale = False
        #: When they may be asked again, monotonic, and the pause after that.
        self._ask_at = -float("inf")
        self._pause = ASK_PAUSES[0]
        self._watchers: dict[Callable[[_Cluster], None], threading.Thread] = {}
        #: Held while watchers are started; reentrant, as a signal handler may push.
        self._starting = threading.RLock()
        self._closed = False

    def pool_at(self, host: str, port: int) -> Pool:
        # Without a lock, see `Pool`. When several come at the same moment one of the pools stays, the others are empty.
        pool = self._pools.get((host, port))
        return pool or self._pools.setdefault((host, port), self._make_pool(host, port))

    def pool_for(self, key: str, deadline: Deadline | None = None) -> Pool:
        slot = key_slot(key.encode())
        if not self._slots:
            self.refresh(deadline)
        elif self._is_stale or self._slots[slot] is None:  # or who was asked did not know it yet
            self._look_again(deadline)
        address = self._slots[slot]
        if address is None:
            raise RedisUnavailable(f"no primary of the cluster serves {key}")
        if deadline is None and (silence := self._silent.get(address)) is not None:
            self._watch()  # it may have ended just when this one became silent
            raise RedisUnavailable(
                f"{address[0]}:{address[1]} of the cluster does not answer or serve: {silence.error}"
            )
        return self.pool_at(*address)

    def known_primary(self, key: str) -> Address | None:
        return self._slots[key_slot(key.encode())] if self._slots else None

    def known_replicas(self, key: str) -> int:
        address = self.known_primary(key)
        return 0 if address is None else self._replicas.get(address, 0)

    def any_pool(self) -> Pool:
        return self.pool_for("")

    def only_pool(self) -> Pool | None:
        return None  # there may be several

    def pools(self) -> dict[str, Pool]:
        """All primaries, by their addresses."""
        self.refresh()
        addresses = [address for address in dict.fromkeys(self._slots) if address is not None]
        return {f"{host}:{port}": self.pool_at(host, port) for host, port in addresses}

    def doubt(self, pool: Pool, silence: Exception | None) -> None:
        """A primary did not answer or serve: ``silence`` says how that was noticed. None: it may have had no time."""
        for address, own in list(self._pools.items()):
            if own is pool:
                self._doubted[address] = None
                self._is_stale = True
                if silence is not None and address in self._slots:
                    self._silent.setdefault(address, _Silence(silence))
                    self._watch()

    def answered(self, pool: Pool) -> None:
        """A primary has answered."""
        for address in list(self._silent):
            if self._pools.get(address) is pool:
                self._silent.pop(address, None)

    @property
    def is_partial(self) -> bool:
        """Whether a primary does not answer or serve: what others answer says nothing about it."""
        return bool(self._silent) or self._is_stale

    @property
    def is_known(self) -> bool:
        """Whether one of the nodes has said which primary serves which slots: the URL is right."""
        return bool(self._slots)

    def moved(self, key: str, host: str, port: int, deadline: Deadline | None) -> Pool:
        """A primary has said that this one serves the key now. Where many slots have moved, each is noted, and the
        nodes are asked for all of them once in a while.
        """
        slot = key_slot(key.encode())
        if not host and (before := self._slots[slot]) is not None:
            host = before[0]  # cluster-preferred-endpoint-type unknown-endpoint: the host of who was asked
        self._slots[slot] = host, port
        self._is_stale = True
        self._look_again(deadline)
        return self.pool_at(host, port)

    def _look_again(self, deadline: Deadline | None) -> None:
        now = time.monotonic()
        if now < self._ask_at:
            return
        self._ask_at = now + self._pause * random.uniform(0.5, 1.0)  # before: others need not ask, too
        self._pause = min(2 * self._pause, ASK_PAUSES[1])
        try:
            self.refresh(deadline)
        except (exceptions.RedisError, RedisUnavailable):
            return  # what was known may still hold
        if not self._silent and None not in self._slots:
            self._pause = ASK_PAUSES[0]

    def _watch(self) -> None:
        """Starts the threads that watch silent primaries, if there are none."""
        with self._starting:
            self._closed = False  # it is used again
            for look in (_Cluster.look_for_others, _Cluster.look_at_silent):
                known = self._watchers.get(look)
                if known is None or not known.is_alive():
                    watcher = threading.Thread(
                        target=_watch_silent, args=[ref(self), look], name="lowq-cluster", daemon=True
                    )
                    try:
                        watcher.start()
                    except RuntimeError:  # the interpreter ends
                        self._silent.clear()
                    else:
                        self._watchers[look] = watcher

    def look_for_others(self) -> None:
        """Asks the nodes whether others have the slots of those that are silent. It blocks."""
        try:
            self.refresh()
        except (exceptions.RedisError, RedisUnavailable):
            pass  # the primaries may answer all the same

    def look_at_silent(self) -> None:
        """Asks those that are silent. It blocks."""
        for address, silence in list(self._silent.items()):
            if self._answers(address, silence):
                self._silent.pop(address, None)

    @property
    def is_watched(self) -> bool:
        """Whether there is something to watch."""
        return bool(self._silent) and not self._closed

    def _answers(self, address: Address, silence: _Silence) -> bool:
        timeout = silence.probe_timeout
        silence.probe_timeout = min(timeout + PROBE_TIMEOUTS[1], PROBE_TIMEOUTS[2])  # the way to it may be long
        try:
            # Of a key: one that is cut off from the others would answer a PING.
            self.pool_at(*address).ask(b"EXISTS", PROBE_KEY, deadline=Deadline(timeout))
        except (
            exceptions.ConnectionError,
            exceptions.TimeoutError,
            exceptions.ClusterDownError,
        ):  # or it loads its data
            return False
        except exceptions.RedisError:
            pass  # that is an answer, too
        return True

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
            failure = RedisUnavailable(
                f"{host}:{port} knows of no node of a cluster that serves any slot; "
                "make the cluster first: redis-cli --cluster create"
            )
        raise failure or RedisUnavailable("the cluster's URL names no node")

    def _take_ranges(self, ranges: list[Any], asked: str) -> None:
        slots: list[Address | None] = [None] * 16384
        found: dict[Address, None] = {}
        replicas: dict[Address, int] = {}
        for first, last, *nodes in ranges:
            addresses = [((name or b"").decode() or asked, port) for name, port, *_ in nodes]
            slots[first : last + 1] = [addresses[0]] * (last - first + 1)
            found |= dict.fromkeys(addresses)
            replicas[addresses[0]] = len(addresses) - 1
        self._slots, self._nodes, self._replicas = slots, list(found), replicas
        self._is_stale = False
        self._doubted = dict.fromkeys(self._silent)
        serving = set(slots)
        for address in list(self._silent):
            if address not in serving:
                self._silent.pop(address, None)

    def started_at(self) -> float:
        return max((pool.started_at for pool in list(self._pools.values())), default=-float("inf"))

    def reset(self) -> None:
        self._watchers.clear()
        self._starting = threading.RLock()
        self._silent.clear()
        for pool in self._pools.values():
            pool.reset()

    def close(self) -> None:
        self._closed = True
        for pool in list(self._pools.values()):
            pool.close()


def _watch_silent(reference: "ref[_Cluster]", look: Callable[[_Cluster], None]) -> None:
    pause = ASK_PAUSES[0]
    while (cluster := reference()) is not None and cluster.is_watched:
        look(cluster)
        del cluster  # nobody else may need it by now
        time.sleep(pause * random.uniform(0.5, 1.0))
        pause = min(2 * pause, ASK_PAUSES[1])


def servers_for(url: str, size: int, timeout: float, socket_timeout: float, store: Any) -> _OneServer | _Cluster:
    options: dict[str, Any] = {
        "protocol": 2,  # unless the URL says 3
        "socket_timeout": socket_timeout,
        "socket_connect_timeout": socket_timeout,
        "socket_keepalive": True,
        "retry": Retry(NoBackoff(), 0),
        "command_packer": Packer,
    }
    scheme, _, rest = url.partition("://")
    base, _, kind = scheme.partition("+")
    if scheme == "memory":
        return _OneServer(_memory_pool(store if store is not None else memory_store(url), size, timeout))
    try:
        if kind == "sentinel":
            return _OneServer(_sentinel_pool(base, rest, options, size, timeout))
        if kind == "cluster":
            options["socket_timeout"] = options["socket_connect_timeout"] = min(socket_timeout, CLUSTER_SOCKET_TIMEOUT)
            hosts, query = _without_options(base, rest)
            login, _, addresses = hosts.partition("/")[0].rpartition("@")
            seeds = [_host_port(item, 6379) for item in addresses.split(",")]

            def make_pool(host: str, port: int) -> Pool:
                name = f"[{host}]" if ":" in host else host  # of IPv6
                node_url = f"{base}://{login + '@' if login else ''}{name}:{port}{query}"
                return _plain_pool(node_url, options, size, timeout, is_of_cluster=True)

            for seed in seeds:
                make_pool(*seed)  # what is wrong with the URL is said now
            return _Cluster(seeds, make_pool)
        return _OneServer(_plain_pool(url, options, size, timeout))
    except ValueError as error:
        if any(mark in rest.rpartition("@")[0] for mark in "/?#"):
            reason = "in a password write %2F for /, %3F for ?, %23 for #; in an option write %40 for @"
        else:
            reason = str(error)
        raise ConfigError(f"redis_url={without_password(url)!r}: {reason}") from None


def _plain_pool(url: str, options: dict[str, Any], size: int, timeout: float, *, is_of_cluster: bool = False) -> Pool:
    settings = {**options, **parse_url(url)}
    settings["protocol"] = _known_protocol(settings["protocol"])
    kind = settings.pop("connection_class", TcpConnection)
    kind = TlsConnection if kind is redis.SSLConnection else kind
    settings.pop("max_connections", None)  # client_pool_size says that
    settings.get("host", "").encode("idna")
    if issubclass(kind, redis.UnixDomainSocketConnection):
        settings.pop("socket_keepalive")
        settings.pop("socket_connect_timeout")
    if settings.pop("decode_responses", False):
        raise ValueError("decode_responses is not for lowq; leave it out")
    connect = partial(kind, **settings)
    _check(connect)
    return Pool(connect, size, timeout, shebang=True, is_of_cluster=is_of_cluster)


def _check(connect: Callable[[], Any]) -> None:
    """Makes a connection, which nobody connects.

    Raises:
        ValueError: redis-py doesn't take one of its options.
    """
    try:
        connect()
    except TypeError as error:
        raise ValueError(f"it has an option that redis-py doesn't know: {error}") from None
    except exceptions.RedisError as error:
        raise ValueError(f"redis-py refuses one of its options: {error}") from None


def _without_options(base: str, rest: str, more: tuple[str, ...] = ()) -> tuple[str, str]:
    """What a URL of several servers says behind its scheme without its options, and these with their question mark, as
    they are for each of the servers. ``base``: the scheme of one server, ``redis`` or ``rediss``; ``more``: options
    that are known besides.
    """
    hosts, mark, options = rest.partition("?")
    if "@" in options or "#" in rest:
        raise ValueError("write %40 for @ and %23 for # in an option")
    for name, value in parse_qsl(options, keep_blank_values=True):
        if name == "protocol":
            _known_protocol(value)
        elif name not in more and (base != "rediss" or name not in TLS_OPTIONS):
            all_known = ("protocol", *(TLS_OPTIONS if base == "rediss" else ()), *more)
            known = ", ".join(all_known) if len(all_known) > 1 else "protocol and no other"
            raise ValueError(f"it has an option that lowq doesn't know: {name}; here it takes {known}")
    return hosts, mark + options


def _known_protocol(value: object) -> int:
    if str(value) not in ("2", "3"):
        raise ValueError(f"protocol={value} is unknown; write protocol=3 for RESP3, or leave it out for RESP2")
    return int(str(value))


def _host_port(text: str, default: int) -> tuple[str, int]:
    host, _, port = text.rpartition(":") if ":" in text else (text, "", str(default))
    return host.strip("[]") or "localhost", int(port)


def _sentinel_pool(base: str, rest: str, options: dict[str, Any], size: int, timeout: float) -> Pool:
    """``h1:p,h2:p/service/db``; a user and password before ``@`` are those of the primary. TLS is for all, or none."""
    rest, query = _without_options(base, rest, SENTINEL_OPTIONS)
    addresses, _, path = rest.partition("/")
    login, _, hosts = addresses.rpartition("@")
    service, _, database = path.partition("/")
    if not service:
        raise ValueError("it names no service; write redis+sentinel://host:port/service/db")
    asked = parse_url(f"{base}://{query}")
    own = {name.removeprefix("sentinel_"): asked.pop(name, None) for name in SENTINEL_OPTIONS}
    _check(partial(asked.pop("connection_class", redis.Connection), **asked))
    tls = {name: value for name, value in asked.items() if name.startswith("ssl_")}
    protocol = _known_protocol(asked.get("protocol", options["protocol"]))
    settings = {**options, **tls, "protocol": protocol, "db": int(database or 0)}
    if login:
        user, _, password = login.partition(":")
        settings |= {"username": unquote(user) or None, "password": unquote(password) or None}
    sentinels = [_host_port(item, 26379) for item in hosts.split(",")]
    timeouts = dict.fromkeys(("socket_timeout", "socket_connect_timeout"), SENTINEL_TIMEOUT)
    ask_kind, kind = (TlsConnection, TlsPrimaryConnection) if base == "rediss" else (TcpConnection, PrimaryConnection)
    asks = [
        partial(_make_ask, partial(ask_kind, **{**options, **tls, **own, **timeouts}, host=host, port=port), service)
        for host, port in sentinels
    ]
    name = base, hosts, service, query
    primary = _followed.setdefault(name, FollowedPrimary(service, asks))
    connect = partial(kind, primary=primary, **settings)
    _check(connect)
    return _SentinelPool(primary, connect, size, timeout)


def _make_ask(connect: Callable[[], Any], service: str) -> Callable[[], Word | None]:
    """How one sentinel is asked, on a connection that is kept. For one thread."""
    opened: list[Any] = []

    def ask() -> Word | None:
        if not opened:
            opened.append(connect())
        (connection,) = opened
        try:
            connection.connect()
            connection.send_packed_command([pack((b"SENTINEL", b"MASTER", service.encode()))], check_health=False)
            said = read_reply(connection)
        except BaseException:
            connection.disconnect()
            raise
        if isinstance(said, exceptions.AuthenticationError | exceptions.NoPermissionError):
            raise said
        if isinstance(said, Exception):
            return None  # it does not know the service
        state = dict(zip(said[::2], said[1::2], strict=True))
        flags = state[b"flags"].split(b",")
        if b"master" not in flags or b"s_down" in flags or b"o_down" in flags:
            return None
        return Word((state[b"ip"].decode(), int(state[b"port"])), int(state.get(b"config-epoch", 0)))

    # Nobody else knows the connection, and the thread that asks ends by itself.
    finalize(ask, lambda: [connection.disconnect() for connection in opened]).atexit = False
    return ask


class _SentinelPool(Pool):
    """Connections to the primary that the sentinels name."""

    def __init__(self, primary: FollowedPrimary, connect: Callable[[], Any], size: int, timeout: float) -> None:
        super().__init__(lambda: primary.followed(connect()), size, timeout, shebang=True)
        self._primary = primary

    def checkout(self, deadline: Deadline | None = None) -> Any:
        self._primary.follow()
        return super().checkout(deadline)

    @property
    def address(self) -> Address | None:
        return self._primary.address

    def follow(self) -> None:
        self._primary.follow(patient=False)


#: By what their URLs say of the sentinels and the service.
_followed: dict[tuple[str, str, str, str], FollowedPrimary] = {}


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
