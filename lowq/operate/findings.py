"""Findings of an examination, and those about the servers: version, eviction, persistence, memory, clocks, encoding.

The texts of each kind of finding are in ``findings.toml``.
"""

import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal, NamedTuple

from lowq.backend import Backend
from lowq.clock import duration
from lowq.errors import RedisRefused, RedisUnavailable, ScriptError
from lowq.store import Client, parse_info
from lowq.store.calls import time_of
from lowq.store.keys import nodes_key
from lowq.store.registry import rights

Severity = Literal["ok", "warning", "error"]
#: Ids that a finding names at most; its count is the number of all.
MAX_NAMED = 10
#: A cause that many kinds share.
_BY_HAND = "keys were removed or written by hand or by another program, evicted by Redis (maxmemory-policy), or lost"
#: Share of maxmemory above which a warning is given.
FULL = 0.9
#: Seconds that a replica may be behind.
REPLICA_LAG = 10
#: Seconds that two clocks may differ.
CLOCK_TOLERANCE = 2.0
#: Payload keys whose encoding is looked at, and the share of them that matters.
SAMPLE = 100
SAMPLE_SHARE = 0.1
#: Fewer keys are not worth a finding, nor are larger ones, in bytes: the difference is some 850 bytes.
FEW, SMALL = 10, 4096
#: Sorted sets of more members have the large form in any case.
LISTPACK_ENTRIES = 128
#: Fields of INFO that say whether a write to the disk failed.
_DISK_WRITES = {
    "rdb_last_bgsave_status": "the last snapshot",
    "aof_last_bgrewrite_status": "the last rewrite of the append-only file",
    "aof_last_write_status": "the last write to the append-only file",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at, or is wrong."""

    #: The kind: a short name that stays the same, such as "orphan_payloads".
    code: str
    #: "ok": as it should be. "warning": it may become a problem. "error": jobs are stuck, lost, or about to be.
    severity: Severity
    #: What is wrong, in a sentence.
    what: str
    #: Possible causes, the effect on jobs, and the remedy. Empty when the severity is "ok".
    cause: str = ""
    effect: str = ""
    advice: str = ""
    queue: str | None = None
    shards: tuple[int, ...] = ()
    #: Some of the ids, at most 10.
    ids: tuple[str, ...] = ()
    #: Nodes that it is about.
    nodes: tuple[str, ...] = ()
    #: How many ids, shards or nodes it is about.
    count: int = 1
    #: Whether a repair can fix it, or a part of it, without risk.
    repairable: bool = False
    #: How many of them this examination has repaired.
    repaired: int = 0

    @property
    def wrong(self) -> bool:
        """Whether a part of it is still wrong."""
        return self.severity != "ok" and self.repaired < self.count


class Kind(NamedTuple):
    """A kind of finding. Its texts are filled in with `str.format`."""

    severity: Severity
    what: str
    cause: str = ""
    effect: str = ""
    advice: str = ""

    @property
    def repairable(self) -> bool:
        return "lowq doctor --repair" in self.advice


@cache
def read_kinds() -> dict[str, Kind]:
    """The kinds by code, or by ``code.variant`` where the texts of one code differ."""
    table = tomllib.loads((resources.files(__package__) / "findings.toml").read_text(encoding="utf-8"))
    kinds: dict[str, Kind] = {}
    for code, entry in table.items():
        for name, fields in {code: entry}.items() if "what" in entry else entry.items():
            kinds[code if name == code else f"{code}.{name}"] = Kind(**fields)
    return kinds


def codes() -> frozenset[str]:
    """The codes of findings."""
    return frozenset(name.partition(".")[0] for name in read_kinds())


def make_finding(
    name: str,
    fields: Mapping[str, Any],
    *,
    severity: Severity | None = None,
    queue: str | None = None,
    shards: Sequence[int] = (),
    nodes: Sequence[str] = (),
    count: int = 1,
) -> Finding:
    """A finding of the kind with this name. ``fields``: of its texts."""
    kind = read_kinds()[name]
    what, cause, effect, advice = (text.format(by_hand=_BY_HAND, queue=queue, **fields) for text in kind[1:])
    return Finding(
        name.partition(".")[0], severity or kind.severity, what, cause, effect, advice, queue=queue,
        shards=tuple(shards), nodes=tuple(nodes), count=count, repairable=kind.repairable,
    )  # fmt: skip


# --- the servers ---


@dataclass(frozen=True, slots=True)
class RedisInfo:
    """A server of Redis, as it describes itself. The embedded store does not: its version is empty."""

    #: "Redis 7.0.15"; "unknown" where the user may not ask: then all that follows is unknown, too.
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
    #: Whether its last writes to the disk worked, as far as it says.
    disk_ok: bool = True
    #: Unix time, seconds: of the last snapshot; None: there is none, or it does not say.
    last_save_at: float | None = None


def redis_info(backend: Backend) -> RedisInfo:
    """Asks one server; in a cluster, one of its primaries.

    Raises:
        RedisUnavailable
    """
    try:
        info = backend.client.server_info()
    except RedisRefused as error:
        warning = _sentence(make_finding("redis.refused", {"error": error}))
        return RedisInfo("unknown", 0, 0, 0, 0, "unknown", "unknown", (warning,))
    settings = _read_settings(backend.client, {}) if "aof_enabled" in info else {}
    state = ServerState(info, next(iter(settings.values()), {}))
    persistence = {"": "unknown" if info else "", "nothing": "none", "snapshots": "RDB snapshots"}
    return RedisInfo(
        version=state.version if info else "",
        used_memory=state.number("used_memory"),
        max_memory=state.number("maxmemory"),
        clients=state.number("connected_clients"),
        uptime=state.number("uptime_in_seconds"),
        eviction=info.get("maxmemory_policy", "unknown" if info else ""),
        persistence=persistence.get(state.persistence, "AOF" if info.get("aof_enabled") == "1" else "no AOF"),
        warnings=tuple(_sentence(finding) for finding in state.findings() if finding.severity != "ok"),
        disk_ok=all(info.get(field, "ok") == "ok" for field in _DISK_WRITES),
        last_save_at=state.number("rdb_last_save_time") or None,
    )


def _sentence(finding: Finding) -> str:
    return f"{finding.what[0].upper()}{finding.what[1:]}: {finding.effect}."


@dataclass(frozen=True, slots=True)
class ServerState:
    """A server, as INFO and CONFIG describe it. CONFIG is empty where this user may not ask."""

    info: Mapping[str, str]
    settings: Mapping[str, str]
    #: "host:port"; "": it is the only one.
    address: str = ""

    def number(self, name: str) -> int:
        """A field of INFO; 0 if there is none, or it is no number."""
        try:
            return int(self.info.get(name, "0"))
        except ValueError:
            return 0

    @property
    def version(self) -> str:
        if "valkey_version" in self.info:
            return f"Valkey {self.info['valkey_version']}"
        return f"Redis {self.info.get('redis_version', 'of unknown version')}"

    @property
    def persistence(self) -> str:
        """The variant of the finding "persistence"; "": not known."""
        if "aof_enabled" not in self.info:
            return ""
        if self.info["aof_enabled"] == "1":
            fsync = self.settings.get("appendfsync", "unknown")
            return fsync if fsync in ("always", "everysec", "unknown") else "no"
        if "save" not in self.settings:
            return "perhaps_snapshots"
        return "snapshots" if self.settings["save"] else "nothing"

    def findings(self) -> Iterator[Finding]:
        """Its findings, as far as it describes itself."""
        at = f" at {self.address}" if self.address else ""
        where = f" of {self.address}" if self.address else ""
        yield make_finding("redis.version", {"version": self.version, "at": at})
        limit = self.number("maxmemory")
        policy = self.info.get("maxmemory_policy")
        if policy is not None:
            variant = "none" if policy == "noeviction" else "limited" if limit else "unlimited"
            yield make_finding(f"eviction.{variant}", {"where": where, "policy": policy})
        for field, what in _DISK_WRITES.items():
            if self.info.get(field, "ok") != "ok":
                yield make_finding("persistence_failing", {"where": where, "what": what})
        if self.persistence:
            yield make_finding(
                f"persistence.{self.persistence}",
                {
                    "where": where,
                    "fsync": self.settings.get("appendfsync"),
                    "ago": duration(max(time.time() - self.number("rdb_last_save_time"), 0.0)),
                    "changes": self.number("rdb_changes_since_last_save"),
                },
            )
        if "used_memory" in self.info:
            used = self.number("used_memory")
            share = used / limit if limit else 0.0
            variant = "full" if share >= 1 else "short" if share >= FULL else "enough" if limit else "unlimited"
            yield make_finding(f"memory.{variant}", {"where": where, "used": used / 2**20, "share": share})
        if self.info.get("role") == "slave":
            primary = f"{self.info.get('master_host', '?')}:{self.info.get('master_port', '?')}"
            yield make_finding("replica", {"at": at, "primary": primary})
            return
        texts = [self.info.get(f"slave{number}", "") for number in range(self.number("connected_slaves"))]
        replicas = [dict(part.partition("=")[::2] for part in text.split(",")) for text in texts if text]
        behind = ", ".join(
            f"{replica.get('ip', '?')}:{replica.get('port', '?')}"
            for replica in replicas
            if replica.get("state") != "online" or int(replica.get("lag", 0)) > REPLICA_LAG
        )
        if replicas:
            variant = "behind" if behind else "primary"
            yield make_finding(f"replication.{variant}", {"at": at, "behind": behind, "replicas": len(replicas)})


def _read_settings(client: Client, silent: dict[str, RedisUnavailable]) -> dict[str, dict[str, str]]:
    """The settings of each server, by its address; empty where the user may not ask."""
    try:
        replies = client.on_all([("CONFIG", "GET", "save"), ("CONFIG", "GET", "appendfsync")], silent)
    except (RedisRefused, ScriptError):
        return {}
    return {
        address: {pair[0].decode(): pair[1].decode() for pair in pairs if len(pair) == 2}
        for address, pairs in replies.items()
    }


def check_servers(client: Client, silent: dict[str, RedisUnavailable]) -> Iterator[Finding]:
    """The findings about all servers. Primaries of a cluster that do not answer are entered in ``silent``.

    Raises:
        RedisUnavailable, RedisRefused
    """
    if client.url.startswith("memory://"):
        yield make_finding("redis.embedded", {})
        return
    try:
        replies = client.on_all([("INFO", "everything")], silent)
    except RedisRefused as error:
        replies = {}
        yield make_finding("redis.refused", {"error": error})
    settings = _read_settings(client, silent)
    for address, (text,) in replies.items():
        yield from ServerState(parse_info(text), settings.get(address, {}), address).findings()
    before = time.time()
    clocks = [time_of(reply) for (reply,) in client.on_all([("TIME",)], silent).values()]
    yield _judge_clocks(clocks, before, time.time())
    for address, failure in silent.items():
        yield make_finding("redis_silent", {"address": address, "error": failure})


def _judge_clocks(clocks: Sequence[float], before: float, after: float) -> Finding:
    apart = max(clocks) - min(clocks)
    if apart > CLOCK_TOLERANCE + (after - before):
        return make_finding("clock.apart", {"apart": duration(apart)}, count=len(clocks))
    # The server's time was read somewhere between the two.
    server = clocks[0]
    off = server - after if server > after else min(server - before, 0.0)
    if abs(off) <= CLOCK_TOLERANCE:
        return make_finding("clock.agrees", {})
    return make_finding("clock.off", {"off": f"{duration(abs(off))} {'ahead of' if off > 0 else 'behind'}"})


def check_channels(client: Client, namespace: str) -> Iterator[Finding]:
    """A finding if this user may not publish or listen.

    Raises:
        RedisUnavailable, RedisRefused
    """
    channel = nodes_key(namespace)
    refused = [name.decode() for name in client.call(rights(channel, ["SPUBLISH", "SSUBSCRIBE"]))]
    if refused:
        yield make_finding(
            "rights", {"commands": " and ".join(refused), "channel": channel, "all": channel.rpartition(":")[0]}
        )


def check_encoding(client: Client, keys: Sequence[tuple[str, bytes]]) -> Iterator[Finding]:
    """A finding if payloads take more memory than they need, judged by some of their keys: (prefix, key)."""
    looked, large = 0, 0
    for prefix, key in keys:
        try:
            (encoding,) = client.commands([("OBJECT", "ENCODING", key)], key=prefix)
            if encoding == b"skiplist":
                count, size = client.commands([("ZCARD", key), ("MEMORY", "USAGE", key)], key=prefix)
                large += count <= LISTPACK_ENTRIES and (size or 0) <= SMALL
        except (RedisRefused, ScriptError):
            continue  # the user may not ask, it is no real server, or the key has become another one meanwhile
        looked += encoding is not None
    if large >= max(SAMPLE_SHARE * looked, FEW):
        yield make_finding("listpack", {"large": large, "looked": looked}, count=large)
