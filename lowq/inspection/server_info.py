"""The server that the jobs are on, in figures, and what an operator should be warned of."""

from dataclasses import dataclass

from lowq.backend import Backend
from lowq.errors import RedisRefused, ScriptError

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
    used, most = _number(info, "used_memory"), _number(info, "maxmemory")
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
        clients=_number(info, "connected_clients"),
        uptime=_number(info, "uptime_in_seconds"),
        eviction=eviction,
        persistence=_persistence(version, aof, snapshots),
        warnings=tuple(warnings),
    )


def _persistence(version: str, aof: bool, snapshots: bool | None) -> str:
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


def _number(info: dict[str, str], name: str) -> int:
    try:
        return int(info.get(name, "0"))
    except ValueError:
        return 0
