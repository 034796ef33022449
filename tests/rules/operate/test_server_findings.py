"""What the doctor says of servers, from what they say of themselves."""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lowq.errors import ScriptError
from lowq.operate.findings import Finding, check_servers, codes, read_kinds
from lowq.store import Client
from tests.rows import case

#: What the clock of this machine shows.
NOW = 1_800_000_000

HEALTHY = {
    "redis_version": "7.0.15", "maxmemory_policy": "noeviction", "maxmemory": "0", "used_memory": str(50 * 2**20),
    "aof_enabled": "1", "rdb_last_bgsave_status": "ok", "aof_last_write_status": "ok",
    "aof_last_bgrewrite_status": "ok", "role": "master", "connected_slaves": "0",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _clock_that_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowq.operate.findings.time", SimpleNamespace(time=lambda: NOW))


def servers(infos: Sequence[Mapping[str, str]], config: Mapping[str, str] | None, clocks: Sequence[float]) -> Client:
    """Stands for a client: what INFO and CONFIG say of each server, and how far its clock is off."""
    addresses = [""] if len(infos) == 1 else [f"h{number}:6379" for number in range(len(infos))]

    def reply(number: int, command: Sequence[Any]) -> Any:
        if command[0] == "INFO":
            return "\r\n".join(f"{name}:{value}" for name, value in infos[number].items()).encode()
        if command[0] == "TIME":
            return [b"%d" % part for part in divmod(int((NOW + clocks[number]) * 1e6), 10**6)]
        if config is None:
            raise ScriptError("unknown command 'CONFIG'")
        return [command[2].encode(), config[command[2]].encode()]

    def on_all(commands: Sequence[Sequence[Any]], _silent: object) -> dict[str, list[Any]]:
        return {at: [reply(number, command) for command in commands] for number, at in enumerate(addresses)}

    return cast(Client, SimpleNamespace(url="redis://h", on_all=on_all))


CONFIG = {"save": "", "appendfsync": "everysec"}


def check(*infos: Mapping[str, str], config: Any = CONFIG, clocks: Sequence[float] = (0.0, 0.0)) -> list[Finding]:
    found = list(check_servers(servers(infos or (HEALTHY,), config, clocks), {}))
    assert {finding.code for finding in found} <= codes(), "the documentation has a row for each"
    return found


def wrong(*infos: Mapping[str, str], **more: Any) -> dict[str, str]:
    """code -> severity, of what is not ok."""
    found = [finding for finding in check(*infos, **more) if finding.severity != "ok"]
    assert all(finding.cause and finding.effect and finding.advice for finding in found)
    return {finding.code: finding.severity for finding in found}


def said(code: str, *infos: Mapping[str, str], **more: Any) -> str:
    return next(finding.what for finding in check(*infos, **more) if finding.code == code)


def test_a_healthy_server_is_told_of_in_a_few_lines_and_one_that_says_little_is_not_suspected() -> None:
    assert wrong() == {}
    assert [finding.code for finding in check()] == ["redis", "eviction", "persistence", "memory", "clock"]
    assert wrong({"redis_version": "7.0.0", "redis_mode": "standalone"}, config=None) == {}
    assert said("redis", {**HEALTHY, "valkey_version": "8.0.1"}) == "Valkey 8.0.1"
    assert said("redis", HEALTHY, HEALTHY, clocks=[0.0, 0.0]) == "Redis 7.0.15 at h0:6379"


def test_what_a_server_says_is_judged() -> None:
    lru = {"maxmemory_policy": "allkeys-lru"}
    replica = {"role": "slave", "master_host": "10.0.0.1", "master_port": "6379"}
    online = "ip=10.0.0.2,port=6379,state=online,offset=5,lag=1"
    behind = "ip=10.0.0.3,port=6379,state=wait_bgsave,offset=0,lag=0"
    full = {"maxmemory": str(100 * 2**20)}
    rows: list[tuple[dict[str, str], str, str | None, str]] = [
        (lru, "eviction", "warning", ""),
        ({**lru, "maxmemory": str(2**40)}, "eviction", "error", ""),
        ({"rdb_last_bgsave_status": "err"}, "persistence_failing", "error", ""),
        ({"aof_last_write_status": "err"}, "persistence_failing", "error", ""),
        ({"aof_last_bgrewrite_status": "err"}, "persistence_failing", "error", ""),
        ({**full, "used_memory": str(89 * 2**20)}, "memory", None, "89%"),
        ({**full, "used_memory": str(90 * 2**20)}, "memory", "warning", "90%"),
        ({**full, "used_memory": str(99 * 2**20)}, "memory", "warning", "99%"),
        ({**full, "used_memory": str(100 * 2**20)}, "memory", "error", "100%"),
        (replica, "replica", "error", "the server is a replica, of 10.0.0.1:6379"),
        ({"connected_slaves": "2", "slave0": online, "slave1": online}, "replication", None, "2 replicas"),
        ({"connected_slaves": "2", "slave0": online, "slave1": behind}, "replication", "warning", "10.0.0.3:6379"),
        ({"connected_slaves": "1", "slave0": online.replace("lag=1", "lag=60")}, "replication", "warning", ""),
    ]
    for says, code, severity, text in rows:
        with case(says):
            assert wrong({**HEALTHY, **says}) == ({} if severity is None else {code: severity})
            assert text in said(code, {**HEALTHY, **says})


def test_what_persistence_can_lose() -> None:
    rows: list[tuple[str, Any, str | None, str]] = [
        ("1", {"save": "", "appendfsync": "always"}, None, "nothing answered is lost"),
        ("1", {"save": "", "appendfsync": "everysec"}, None, "1 to 2 seconds"),
        ("1", {"save": "", "appendfsync": "no"}, "warning", "appendfsync no"),
        ("1", None, None, "may not be asked"),
        ("0", {"save": "", "appendfsync": "everysec"}, "warning", "nothing is persisted"),
        ("0", {"save": "3600 1", "appendfsync": "everysec"}, "warning", "only snapshots, the last one 1 d"),
        ("0", None, "warning", "whether there are snapshots may not be asked"),
    ]
    for aof, config, severity, text in rows:
        with case(aof, config, severity, text):
            saved = str(NOW - 86_400)
            info = {**HEALTHY, "aof_enabled": aof, "rdb_last_save_time": saved, "rdb_changes_since_last_save": "7"}
            assert wrong(info, config=config).get("persistence") == severity
            assert text in said("persistence", info, config=config)


def test_clocks_that_differ_from_this_machines_or_from_each_other() -> None:
    for off, text in ((30.0, "30 s ahead of"), (-3700.0, "1 h 1 min behind")):
        with case(off):
            assert wrong(clocks=[off]) == {"clock": "warning"}
            assert text in said("clock", clocks=[off])
    assert wrong(HEALTHY, HEALTHY, clocks=[0.0, 0.5]) == {}
    assert wrong(HEALTHY, HEALTHY, clocks=[0.0, 5.0]) == {"clock": "warning"}


def test_every_kind_explains_itself() -> None:
    for code, kind in read_kinds().items():
        with case(code):
            assert kind.what
            assert kind.severity == "ok" or (kind.cause and kind.effect and kind.advice)


def test_a_finding_is_wrong_until_all_of_it_is_mended() -> None:
    rows: list[tuple[Any, int, int, bool]] = [
        ("ok", 1, 0, False), ("warning", 1, 0, True), ("error", 3, 2, True), ("error", 3, 3, False),
    ]  # fmt: skip
    for severity, count, repaired, is_wrong in rows:
        with case(severity, count, repaired, is_wrong):
            assert Finding("x", severity, "what", count=count, repaired=repaired).wrong is is_wrong
