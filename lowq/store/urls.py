"""The `Topology` of a URL: one server, a primary that sentinels name, a cluster, the embedded store."""

from collections.abc import Callable
from functools import partial
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import redis
from redis import exceptions
from redis.backoff import NoBackoff
from redis.connection import parse_url
from redis.retry import Retry

from lowq.errors import ConfigError
from lowq.store.connection import Packer, TcpConnection, TlsConnection
from lowq.store.embedded import memory_pool, memory_store
from lowq.store.pool import Pool
from lowq.store.sentinels import FollowedPrimary, PrimaryConnection, SentinelPool, TlsPrimaryConnection, make_ask
from lowq.store.topology import Address, Cluster, Topology
from lowq.store.translate import without_password

#: Seconds that a reply of a primary of a cluster is waited for at most, by a call without a deadline of its own: after
#: that the calls to it fail at once until it has answered, so that work on the other primaries goes on.
CLUSTER_SOCKET_TIMEOUT = 1.0

#: Options for TLS in the URL of a Sentinel or a cluster: those of redis-py that are the same in all its releases.
TLS_OPTIONS = (
    "ssl_ca_certs", "ssl_ca_path", "ssl_ca_data", "ssl_cert_reqs", "ssl_check_hostname", "ssl_certfile", "ssl_keyfile",
    "ssl_password", "ssl_ciphers",
)  # fmt: skip
#: Options for the login to sentinels.
SENTINEL_OPTIONS = ("sentinel_username", "sentinel_password")
#: Seconds that a sentinel has for an answer. A call waits for it only while no primary is known.
SENTINEL_TIMEOUT = 2.0


def topology_of(url: str, size: int, timeout: float, socket_timeout: float, store: Any) -> Topology:
    """``store``: that of a ``memory://`` URL; None: the one of its name.

    Raises:
        ConfigError: the URL is wrong.
    """
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
    base = base.replace("valkey", "redis")  # valkeys: rediss
    if scheme == "memory":
        return Topology(memory_pool(store if store is not None else memory_store(url), size, timeout))
    try:
        if kind == "sentinel":
            return Topology(_sentinel_pool(base, rest, options, size, timeout))
        if kind == "cluster":
            options["socket_timeout"] = options["socket_connect_timeout"] = min(socket_timeout, CLUSTER_SOCKET_TIMEOUT)
            hosts, query = _without_options(base, rest)
            login, _, addresses = hosts.partition("/")[0].rpartition("@")
            seeds = [_host_port(item, 6379) for item in addresses.split(",")]

            def make_pool(address: Address) -> Pool:
                host, port = address
                name = f"[{host}]" if ":" in host else host  # of IPv6
                node_url = f"{base}://{login + '@' if login else ''}{name}:{port}{query}"
                return _plain_pool(node_url, options, size, timeout, is_of_cluster=True)

            for seed in seeds:
                make_pool(seed)  # raises now what is wrong with the URL
            return Cluster(seeds, make_pool)
        return Topology(_plain_pool(f"{base}://{rest}", options, size, timeout))
    except ValueError as error:
        reason = str(error).replace("Port could not be cast to integer value as", "the port must be a number, not")
        if any(mark in rest.rpartition("@")[0] for mark in "/?#"):
            reason = "in a password write %2F for /, %3F for ?, %23 for #; in an option write %40 for @"
        raise ConfigError(f"redis_url={without_password(url)!r} (LOWQ_REDIS_URL): {reason}") from None


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
    else:
        _number("database", unquote(urlsplit(url).path).strip("/") or "0")  # of another text redis-py makes 0
    if settings.pop("decode_responses", False):
        raise ValueError("decode_responses is not for lowq; leave it out")
    connect = partial(kind, **settings)
    _check(connect)
    return Pool(connect, size, timeout, shebang=True, is_of_cluster=is_of_cluster)


def _check(connect: Callable[[], Any]) -> None:
    """Makes a connection and drops it unconnected.

    Raises:
        ValueError: redis-py doesn't take one of its options.
    """
    try:
        connect()
    except TypeError as error:
        raise ValueError(f"it has an option that redis-py doesn't know: {str(error).split('argument ')[-1]}") from None
    except exceptions.RedisError as error:
        raise ValueError(f"redis-py refuses one of its options: {error}") from None


def _without_options(base: str, rest: str, more: tuple[str, ...] = ()) -> tuple[str, str]:
    """Parts the URL of several servers, behind its scheme: without its options, and these with their question mark, as
    each of the servers has them. ``base``: the scheme of one server, ``redis`` or ``rediss``; ``more``: further options
    that are known.
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
    return host.strip("[]") or "localhost", _number("port", port)


def _number(what: str, text: str) -> int:
    if not (text.isascii() and text.strip().isdecimal()):  # a secret may end with a newline
        raise ValueError(f"the {what} must be a number, not {text!r}")
    return int(text)


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
    settings = {**options, **tls, "protocol": protocol, "db": _number("database", database or "0")}
    if login:
        user, _, password = login.partition(":")
        settings |= {"username": unquote(user) or None, "password": unquote(password) or None}
    sentinels = [_host_port(item, 26379) for item in hosts.split(",")]
    timeouts = dict.fromkeys(("socket_timeout", "socket_connect_timeout"), SENTINEL_TIMEOUT)
    ask_kind, kind = (TlsConnection, TlsPrimaryConnection) if base == "rediss" else (TcpConnection, PrimaryConnection)
    asks = [
        partial(make_ask, partial(ask_kind, **{**options, **tls, **own, **timeouts}, host=host, port=port), service)
        for host, port in sentinels
    ]
    name = base, hosts, service, query
    primary = _followed.setdefault(name, FollowedPrimary(service, asks))
    connect = partial(kind, primary=primary, **settings)
    _check(connect)
    return SentinelPool(primary, connect, size, timeout)


#: By the part of their URLs that names the sentinels and the service.
_followed: dict[tuple[str, str, str, str], FollowedPrimary] = {}
