"""Schedules in real nodes: each tick is performed once, through kills, deploys, and a Redis that lost its data."""

import json
import re
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import lowq
from lowq.store.keys import shard_prefix
from tests.integration.support import PATIENCE, NodeProcess, Rig, until
from tests.tiers import often


class ScheduledRig(Rig):
    """Nodes whose code has schedules with ticks every second, or as the test says."""

    queue_name = "report"
    module = "tests.integration.app_scheduled"

    def __init__(self, url: str, folder: Path) -> None:
        self.ticks_path = folder / "ticks"
        super().__init__(url, folder, SCHEDULES_TICKS=self.ticks_path, ORDERS_SHARDS=2)

    def scheduled(self, *names: str, **environment: object) -> NodeProcess:
        """A node whose code has these schedules."""
        return self.node(SCHEDULES=json.dumps(dict.fromkeys(names, 1)), **environment)

    def ticks(self, name: str = "a", pid: int | None = None) -> list[float]:
        """planned_at of what was performed, in order."""
        text = self.ticks_path.read_text() if self.ticks_path.exists() else ""
        lines = [line.split() for line in text.splitlines()]
        return [float(at) for by, job_id, at in lines if job_id == name and pid in (None, int(by))]

    def more(self, count: int, timeout: float = 60.0, name: str = "a") -> list[float]:
        """Waits for so many more ticks."""
        enough = len(self.ticks(name)) + count
        until(lambda: len(self.ticks(name)) >= enough, f"{count} ticks of {name}", timeout)
        return self.ticks(name)

    def pushed_last(self) -> list[float]:
        """planned_at of what the node pushed that was killed at that."""
        found: list[float] = json.loads(Path(f"{self.ticks_path}.last").read_text())
        return found

    def internal(self, key: str) -> str:
        return shard_prefix("lowq", "lowq:schedules:report", 0) + f"{key}"

    def holder(self) -> NodeProcess:
        """The node that performs the schedules."""

        def found() -> NodeProcess | None:
            token = str(self.client.get(self.internal("lease")))
            return next((node for node in self.nodes if token.startswith(node.nonce)), None)

        node = until(found, "a holder of the schedules")
        assert node is not None
        return node


def stop_at_rest(rig: Rig, node: NodeProcess) -> None:
    """SIGSTOP when it has nothing in hand: what is performed and not yet acknowledged would come again."""

    def rests() -> bool:
        rig.drained()
        node.signal(signal.SIGSTOP)
        until(lambda: Path(f"/proc/{node.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T", "its stop")
        if rig.is_drained():
            return True
        node.signal(signal.SIGCONT)  # a tick has come meanwhile
        return False

    until(rests, "a moment without a tick")


@pytest.fixture
def rig(redis_url: str, tmp_path: Path) -> Iterator[ScheduledRig]:
    rig = ScheduledRig(redis_url, tmp_path)
    yield rig
    rig.close()


def each_once(ticks: list[float]) -> bool:
    return ticks == [ticks[0] + n for n in range(len(ticks))]


@pytest.mark.parametrize("broken", [False, True], ids=["sound", "broken"])
def test_a_kill_between_push_and_release_does_not_repeat_the_tick(rig: ScheduledRig, broken: bool) -> None:
    """A build that writes its record behind the push performs the tick twice, and this test notices."""
    how: dict[str, Any] = {"SCHEDULES_BROKEN": int(broken)}
    node = rig.scheduled("a", SCHEDULES_DIES=1, **how)
    until(lambda: node.process.poll() is not None, "its death")
    rig.scheduled("a", **how)
    ticks = rig.more(3)
    repeated = {number: count for number, count in Counter(ticks).items() if count > 1}
    assert repeated == (dict.fromkeys(rig.pushed_last(), 2) if broken else {})
    assert each_once(sorted(set(ticks)))


def test_each_tick_is_performed_once_whichever_node_is_killed(rig: ScheduledRig) -> None:
    for _ in range(2):
        rig.scheduled("a", "b")
    rig.more(2)
    for _ in often([1, 2, 3], [1]):
        holder = rig.holder()
        stop_at_rest(rig, holder)
        holder.kill()
        rig.scheduled("a", "b")
        rig.more(3)
    rig.more(1, name="b")
    assert each_once(rig.ticks("a"))
    assert each_once(rig.ticks("b"))


def test_a_node_that_was_frozen_repeats_nothing(rig: ScheduledRig) -> None:
    node = rig.scheduled("a")
    rig.more(2)
    stop_at_rest(rig, node)
    node.freeze()
    rig.scheduled("a")
    rig.more(3)
    node.thaw()
    rig.more(2)
    assert each_once(rig.ticks())


def test_what_new_code_does_not_have_ends_when_the_last_old_node_has_ended(rig: ScheduledRig) -> None:
    old = rig.scheduled("a", "former")
    rig.more(1)
    new = rig.scheduled("a", "fresh")
    rig.more(2, name="fresh")
    rig.more(2, name="former")  # it goes on
    assert old.stop() == 0
    rig.drained()
    before = len(rig.ticks("former"))
    rig.more(3)
    assert len(rig.ticks("former")) <= before + 1  # one may have been on its way
    for name in ("a", "former", "fresh"):
        assert each_once(rig.ticks(name)), name
    infos = {info.name: info for info in rig.app.schedules()}
    assert [infos[name].is_known for name in ("a", "former", "fresh")] == [True, False, True]
    assert new.process.poll() is None


def test_nodes_without_any_schedule_left_see_to_what_there_was(rig: ScheduledRig) -> None:
    old = rig.scheduled("a")
    rig.more(1)
    assert old.stop() == 0
    rig.client.zadd(rig.internal("due"), {"a": 1}, xx=True)  # it is looked at at once
    new = rig.scheduled()
    until(lambda: any("unknown_since" in part["a"] for part in rig.of_shards("schedules").values()), "its rest")
    until(lambda: rig.client.zscore(rig.internal("due"), "a"), "its release")
    rig.drained()
    count = len(rig.ticks())
    # An hour has passed.
    (shard, part), *_ = rig.of_shards("schedules").items()
    rig.client.hset(
        f"{rig.prefix(shard)}schedules", "a", re.sub(r'"unknown_since":[0-9.]+', '"unknown_since":1', part["a"])
    )
    rig.client.zadd(rig.internal("due"), {"a": 1}, xx=True)
    rig.client.spublish(rig.internal("wake"), 0)
    new.says("has ended: no node knows it any more")
    assert rig.of_shards("schedules") == {}
    assert new.stop() == 0
    assert rig.client.hexists("lowq:v1:queues", "lowq:schedules:report")
    assert rig.scheduled().holds_all().stop() == 0  # the next one removes what is left
    assert not rig.client.hexists("lowq:v1:queues", "lowq:schedules:report")
    assert rig.client.keys("*schedules*") == []
    assert len(rig.ticks()) == count


def test_schedules_are_back_after_redis_has_lost_its_data(tmp_path: Path, rig: ScheduledRig) -> None:
    rig.scheduled("a")
    rig.more(1)
    rig.client.flushall()
    rig.more(1, timeout=90)
    assert rig.app.queue("report", 2).stats().buried == 0


def test_ticks_come_while_all_threads_are_busy(redis_url: str) -> None:
    """A schedule has a thread of its own. What it pushes waits as any job does."""
    app = lowq.Lowq(redis_url=redis_url)
    waits: list[int] = []

    @app.worker(queue_name="Slow", shards_count=1)
    def slow(job_id: str, payloads: list[Any]) -> None:
        until(lambda: waits or other.queue.stats().length > 0, "a tick")
        waits.append(other.queue.stats().length)

    @lowq.every(1)
    @app.worker(queue_name="Other", shards_count=1)
    def other(job_id: str, payloads: list[Any]) -> None: ...

    node = lowq.Node(app, threads=1)
    slow.push("x")
    node.start()
    try:
        until(lambda: waits, "a tick while its thread was busy")
    finally:
        node.stop(PATIENCE)
        app.close()
    assert waits == [1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_a_node_with_schedules_ends_as_any_other(rig: ScheduledRig, number: signal.Signals) -> None:
    node = rig.scheduled("a")
    rig.more(1)
    node.signal(number)
    assert node.wait() == 0
    assert rig.client.exists(rig.internal("lease")) == 0


def test_the_internal_queue_is_seen_nowhere(rig: ScheduledRig) -> None:
    rig.scheduled("a")
    rig.more(1)
    assert [info.name for info in rig.app.queues()] == ["report"]
    (node,) = rig.app.nodes()
    assert node.schedules == {"report": {"a": {"at": 1, "tz": None, "missed": "all"}}}
    assert len(node.performing) == node.threads == 1
    assert rig.client.keys("lowq:v1:history:lowq*") == []
