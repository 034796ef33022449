"""The servers: version, eviction, persistence, memory, clock, replication, and how payloads are stored."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from lowq.backend import Backend
from lowq.duration import duration
from lowq.errors import RedisRefused, RedisUnavailable, ScriptError
from lowq.operate.findings import Finding
from lowq.store import Client, parse_info
from lowq.store.keys import nodes_key
from lowq.store.registry import rights
from lowq.store.scripts import time_of

#: Of maxmemory: above this share a warning is given.
MUCH_MEMORY = 0.9


@dataclass(frozen=True, slots=True)
class RedisInfo:
    """What Redis says of itself. The embedded store says nothing: then version is empty."""

    #: "Redis 7.0.15"; "unknown" where the user may not ask for it, and then all that follows is unknown, too.
    version: str
    #: Bytes; 0: unknown, and of `max_memory` without a limit.
    used_memory: int
    max_memory: int
    clients: int
    #: Seconds.
    uptime: int
    eviction: str
    #: For people: "AOF", "RDB snapshots", "none", "unknown"; "no AOF" where the user may not ask for the rest.
    persistence: str
    #: For people, each a sentence.
    warnings: tuple[str, ...]


def redis_info(backend: Backend) -> RedisInfo:
    """Asks one server; in a cluster, one of its primaries.

    Raises:
        RedisUnavailable
    """
    try:
        info = backend.client.server_info()
    except RedisRefused as error:
        warning = f"Version, memory, persistence and eviction are unknown, as this user may not ask: {error}."
        return RedisInfo("unknown", 0, 0, 0, 0, "unknown", "unknown", (warning,))
    if info and "used_memory" not in info:  # such as an embedded store that listens
        return RedisInfo(f"Redis {info.get('redis_version', '')}", 0, 0, 0, 0, "unknown", "unknown", ())
    version = info.get("valkey_version") or info.get("redis_version", "")
    name = "Valkey " if "valkey_version" in info else "Redis " if version else ""
    used, most = _whole(info, "used_memory"), _whole(info, "maxmemory")
    eviction = info.get("maxmemory_policy", "")
    aof = info.get("aof_enabled") == "1"
    snapshots = _takes_snapshots(backend) if version and not aof else False
    warnings = []
    if eviction not in ("", "noeviction"):
        warnings.append(f"maxmemory-policy is {eviction}: under memory pressure Redis removes keys, and jobs are lost.")
    if snapshots is None:
        warnings.append(
            "appendonly is off, and this user may not ask whether there are snapshots (CONFIG GET): at least what was "
            "pushed since the last one is lost when Redis dies."
        )
    elif snapshots:
        warnings.append("appendonly is off: what was pushed since the last snapshot is lost when Redis dies.")
    elif version and not aof:
        warnings.append("Nothing is persisted: all jobs are lost when Redis ends.")
    if most and used > MUCH_MEMORY * most:
        warnings.append(f"{used / most:.0%} of maxmemory is used: when it is reached, pushes are refused.")
    if info.get("aof_last_write_status", "ok") != "ok" or info.get("rdb_last_bgsave_status", "ok") != "ok":
        warnings.append("The last write of Redis to its disk failed.")
    if info.get("role") == "slave":
        warnings.append("This is a replica: nothing can be written to it.")
    return RedisInfo(
        version=name + version,
        used_memory=used,
        max_memory=most,
        clients=_whole(info, "connected_clients"),
        uptime=_whole(info, "uptime_in_seconds"),
        eviction=eviction,
        persistence=_persistence_in_words(version, aof, snapshots),
        warnings=tuple(warnings),
    )


def _persistence_in_words(version: str, aof: bool, snapshots: bool | None) -> str:
    if not version:
        return ""
    if aof:
        return "AOF"
    return {True: "RDB snapshots", False: "none", None: "no AOF"}[snapshots]


def _takes_snapshots(backend: Backend) -> bool | None:
    """Whether any server is set up to; None: it may not be asked."""
    try:
        replies = backend.client.on_all([("CONFIG", "GET", "save")])
    except (RedisRefused, ScriptError):
        return None
    return any(reply[1] != b"" for (reply,) in replies.values() if len(reply) == 2)


def _whole(info: dict[str, str], name: str) -> int:
    try:
        return int(info.get(name, "0"))
    except ValueError:
        return 0


#: Share of maxmemory that is close to full.
FULL = 0.9
#: Seconds that two clocks may differ.
CLOCK_TOLERANCE = 2.0
#: Payload keys that are looked at for their encoding, and the share of them that matters.
SAMPLE = 100
SAMPLE_SHARE = 0.1
#: Fewer than this are not worth a word; nor are larger ones, in bytes, as the difference is some 850 bytes.
FEW = 10
SMALL = 4096
#: Sorted sets of more members have the large form in any case.
LISTPACK_ENTRIES = 128
#: The codes of what is found here.
SERVER_CODES = frozenset(
    (
        "redis",
        "redis_silent",
        "eviction",
        "persistence",
        "persistence_failing",
        "memory",
        "clock",
        "replica",
        "replication",
        "listpack",
        "rights",
    )
)


def check_channels(client: Client, namespace: str) -> Iterator[Finding]:
    """Whether this user may publish and listen.

    Raises:
        RedisUnavailable, RedisRefused
    """
    channel = nodes_key(namespace)
    refused = [name.decode() for name in client.call(rights(channel, ["SPUBLISH", "SSUBSCRIBE"]))]
    if refused:
        yield Finding(
            "rights",
            "warning",
            f"this user may not run {' and '.join(refused)} on the channels of lowq, such as {channel}",
            "a user of Redis 7 has no channels unless they are named",
            "what it pushes, or waits for, is found up to poll_interval later",
            f"allow +spublish, +ssubscribe and the channels &{channel.rpartition(':')[0]}:*: docs/rights.md",
        )


def check_servers(client: Client, silent: dict[str, RedisUnavailable]) -> Iterator[Finding]:
    """What there is to say of every server. Primaries of a cluster that do not answer are entered in ``silent``.

    Raises:
        RedisUnavailable, RedisRefused
    """
    if client.url.startswith("memory://"):
        yield Finding("redis", "ok", "the embedded store: it is gone when its process ends")
        return
    clocks: dict[str, float] = {}
    try:
        replies = client.on_all([("INFO", "everything")], silent)
    except RedisRefused as error:
        replies = {}
        yield Finding(
            "redis",
            "warning",
            "the server does not show this user its version, and not whether it evicts keys, persists, is short of "
            "memory or is a replica",
            str(error),
            "none of this was checked; when a node dies, its jobs may be charged with a crash though it was Redis",
            "allow the command INFO: docs/rights.md",
        )
    for address, (text,) in replies.items():
        where = f" of {address}" if address else ""
        info = parse_info(text)
        yield _version(info, address)
        yield from _eviction(info, where)
        yield from _persistence(info, _settings(client, silent).get(address, {}), where)
        yield from _memory(info, where)
        yield from _replication(info, address)
    before = time.time()
    for address, (reply,) in client.on_all([("TIME",)], silent).items():
        clocks[address] = time_of(reply)
    yield _clock(clocks, before, time.time())
    for address, failure in silent.items():
        yield Finding(
            "redis_silent",
            "error",
            f"the primary {address} of the cluster does not answer",
            str(failure),
            "its shards rest, pushes to them fail, and queues and jobs were not examined",
            "start it, or see why no replica has its place; then run this again",
        )


def _settings(client: Client, silent: dict[str, RedisUnavailable]) -> dict[str, dict[str, str]]:
    """Per server what CONFIG says; empty where it may not be asked."""
    try:
        replies = client.on_all([("CONFIG", "GET", "save"), ("CONFIG", "GET", "appendfsync")], silent)
    except (RedisRefused, ScriptError):
        return {}
    return {
        address: {pair[0].decode(): pair[1].decode() for pair in pairs if len(pair) == 2}
        for address, pairs in replies.items()
    }


def _version(info: Mapping[str, str], address: str) -> Finding:
    if "valkey_version" in info:
        name = f"Valkey {info['valkey_version']}"
    else:
        name = f"Redis {info.get('redis_version', 'of unknown version')}"
    return Finding("redis", "ok", name + (f" at {address}" if address else ""))


def _eviction(info: Mapping[str, str], where: str) -> Iterator[Finding]:
    policy = info.get("maxmemory_policy")
    if policy is None:
        return
    if policy == "noeviction":
        yield Finding("eviction", "ok", f"maxmemory-policy{where} is noeviction")
        return
    limited = int(info.get("maxmemory", 0)) > 0
    yield Finding(
        "eviction",
        "error" if limited else "warning",
        f"maxmemory-policy{where} is {policy}",
        "the server is set up as a cache",
        "when memory runs short Redis removes keys, and jobs are lost without a word"
        + ("" if limited else "; so far it has no maxmemory"),
        "set maxmemory-policy noeviction, now (CONFIG SET) and in its configuration",
    )


def _persistence(info: Mapping[str, str], settings: Mapping[str, str], where: str) -> Iterator[Finding]:
    if "aof_enabled" not in info:
        return
    for field, what in (
        ("rdb_last_bgsave_status", "the last snapshot"),
        ("aof_last_bgrewrite_status", "the last rewrite of the append-only file"),
        ("aof_last_write_status", "the last write to the append-only file"),
    ):
        if info.get(field, "ok") != "ok":
            yield Finding(
                "persistence_failing",
                "error",
                f"{what}{where} failed",
                "usually the disk is full, or there was no memory to fork",
                "what is not on disk is lost with the server; until it works again Redis may refuse every write",
                "see the server's log, and free disk or memory",
            )
    cause = "the server is set up that way"
    advice = "set appendonly yes and appendfsync everysec, now (CONFIG SET) and in its configuration"
    if info["aof_enabled"] == "1":
        fsync = settings.get("appendfsync")
        if fsync == "always":
            yield Finding("persistence", "ok", f"append-only file{where}, appendfsync always: nothing answered is lost")
        elif fsync == "everysec":
            text = "what was pushed in the last 1 to 2 seconds before its machine dies can be lost"
            yield Finding("persistence", "ok", f"append-only file{where}, appendfsync everysec: {text}")
        elif fsync is None:
            yield Finding("persistence", "ok", f"append-only file{where}; it may not be asked how often it is synced")
        else:
            yield Finding(
                "persistence",
                "warning",
                f"append-only file{where}, appendfsync {fsync}",
                cause,
                "what the kernel has not written yet, often 30 seconds, is lost when the machine dies",
                "set appendfsync everysec, or always",
            )
    elif "save" not in settings:
        yield Finding(
            "persistence",
            "warning",
            f"there is no append-only file{where}; whether there are snapshots may not be asked (CONFIG GET)",
            cause,
            "everything since the last snapshot, or all, is lost when the server ends unexpectedly",
            advice,
        )
    elif settings["save"] == "":
        yield Finding(
            "persistence",
            "warning",
            f"nothing{where} is persisted",
            cause,
            "all jobs are lost when the server ends",
            advice,
        )
    else:
        saved = int(info.get("rdb_last_save_time", 0))
        changes = int(info.get("rdb_changes_since_last_save", 0))
        ago = duration(max(time.time() - saved, 0.0))
        yield Finding(
            "persistence",
            "warning",
            f"there are only snapshots{where}, the last one {ago} ago, {changes:,} changes since",
            cause,
            "everything since the last snapshot is lost when the server ends unexpectedly",
            advice,
        )


def _memory(info: Mapping[str, str], where: str) -> Iterator[Finding]:
    if "used_memory" not in info:
        return
    used, limit = int(info["used_memory"]), int(info.get("maxmemory", 0))
    text = f"{used / 2**20:,.0f} MiB{where} in use"
    if not limit:
        yield Finding("memory", "ok", f"{text}, no maxmemory")
    elif used < FULL * limit:
        yield Finding("memory", "ok", f"{text}, {used / limit:.0%} of maxmemory")
    else:
        full = used >= limit
        yield Finding(
            "memory",
            "error" if full else "warning",
            f"{text}, {used / limit:.0%} of maxmemory",
            "jobs come in faster than they are performed, the morgue has grown, or something else uses this Redis",
            "pushing is refused with RedisFull" + ("" if full else " when it is full") + "; nodes go on draining",
            "see with `lowq stats` where jobs pile up; start more nodes, empty the morgue, or raise maxmemory",
        )


def _replication(info: Mapping[str, str], address: str) -> Iterator[Finding]:
    where = f"the server at {address}" if address else "the server"
    if info.get("role") == "slave":
        primary = f"{info.get('master_host', '?')}:{info.get('master_port', '?')}"
        yield Finding(
            "replica",
            "error",
            f"{where} is a replica, of {primary}",
            "redis_url names the wrong server, or there was a failover",
            "nothing can be pushed and no node can work; what is seen here may be old",
            f"let redis_url name the primary, {primary}, or use redis+sentinel://",
        )
        return
    replicas = [info[f"slave{number}"] for number in range(int(info.get("connected_slaves", 0) or 0))
                if f"slave{number}" in info]  # fmt: skip
    behind = []
    for text in replicas:
        fields = dict(part.partition("=")[::2] for part in text.split(","))
        if fields.get("state") != "online" or int(fields.get("lag", 0)) > 10:
            behind.append(f"{fields.get('ip', '?')}:{fields.get('port', '?')}")
    if behind:
        yield Finding(
            "replication",
            "warning",
            f"replicas do not keep up: {', '.join(behind)}",
            "they are being synchronized, cut off or overloaded",
            "a failover to one of them loses what it has not received",
            "see the log of these servers",
        )
    elif replicas:
        text = "a failover loses what a replica has not received yet"
        yield Finding("replication", "ok", f"{where} is a primary with {len(replicas)} replicas; {text}")


def _clock(clocks: Mapping[str, float], before: float, after: float) -> Finding:
    apart = max(clocks.values()) - min(clocks.values())
    if apart > CLOCK_TOLERANCE + (after - before):
        return Finding(
            "clock",
            "warning",
            f"the clocks of the servers differ by {duration(apart)}",
            "they are not kept in step",
            "each shard is judged by the clock of its own server: scheduled jobs run early or late, and lag is wrong",
            "keep them in step (NTP)",
            count=len(clocks),
        )
    # The server's time was read somewhere between the two.
    server = next(iter(clocks.values()))
    off = server - after if server > after else min(server - before, 0.0)
    if abs(off) <= CLOCK_TOLERANCE:
        return Finding("clock", "ok", "the server's clock agrees with this machine's")
    return Finding(
        "clock",
        "warning",
        f"the server's clock is {duration(abs(off))} {'ahead of' if off > 0 else 'behind'} this machine's",
        "one of the two is not kept in step",
        "lowq goes by the server's clock. A perform_at that this machine computes comes early or late; delays don't",
        "keep both in step (NTP), or push with delay instead of perform_at",
    )


def check_encoding(client: Client, keys: Sequence[tuple[str, bytes]]) -> Iterator[Finding]:
    """Whether payloads take more memory than they need, judged by some of the keys that hold them: (prefix, key)."""
    looked, large = 0, 0
    for prefix, key in keys:
        try:
            (encoding,) = client.commands([("OBJECT", "ENCODING", key)], key=prefix)
            if encoding == b"skiplist":
                count, size = client.commands([("ZCARD", key), ("MEMORY", "USAGE", key)], key=prefix)
                large += count <= LISTPACK_ENTRIES and (size or 0) <= SMALL
        except (RedisRefused, ScriptError):
            continue  # it may not be asked, is no real server, or the key has become another one meanwhile
        looked += encoding is not None
    if large >= max(SAMPLE_SHARE * looked, FEW):
        yield Finding(
            "listpack",
            "warning",
            f"{large} of {looked} payload keys that were looked at are stored in the large form of a sorted set",
            "a payload of theirs is longer than zset-max-listpack-value (64 bytes by default)",
            "none for the work, but such an id takes about three times the memory it could",
            "set zset-max-listpack-value to the size of most of your payloads (256, say), now (CONFIG SET) and in the "
            "server's configuration; it goes for keys that are written from then on",
            count=large,
        )
