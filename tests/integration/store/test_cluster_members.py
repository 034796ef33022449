"""Nodes, consumers and dashboards that start before, during and after the failover of a primary of a cluster."""

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from redis.crc import key_slot

import lowq
from lowq.errors import PushInterrupted, RedisNotReady, RedisUnavailable
from lowq.sharding import shard_of
from tests.integration.conftest import MakeRig
from tests.integration.support import PATIENCE, Rig, until
from tests.redis_cluster import RedisCluster
from tests.redis_server import RedisServer

SHARDS = 6


@pytest.fixture
def cluster() -> Iterator[RedisCluster]:
    with RedisCluster() as cluster:
        yield cluster


class Failover:
    """A primary ends, and its replica takes its place when the test says so."""

    def __init__(self, cluster: RedisCluster, key: str) -> None:
        self.cluster = cluster
        self.victim = cluster.primary_of(key_slot(key.encode()))

    def begin(self) -> None:
        self.cluster.replicated()
        self.victim.kill()

    def end(self) -> None:
        assert not self.cluster.leads(self.victim)()
        self.cluster.replaced(self.victim)


@pytest.fixture(params=["lowq:v1:queues", "lowq:v1:nodes"])
def failover(request: pytest.FixtureRequest, cluster: RedisCluster) -> Failover:
    """Of the primary with one of the two registries, and with shards."""
    return Failover(cluster, request.param)


class Pushes:
    """Pushes a next version of an id of each shard, again and again until it is in."""

    def __init__(self, rig: Rig, url: str) -> None:
        rig.app.close()
        rig.app = lowq.Lowq(redis_url=url)
        self._rig = rig
        self._queue = rig.app.queue("Orders", SHARDS)
        self._ids = {shard_of(str(number).encode(), SHARDS): str(number) for number in range(100)}
        self._version = 0

    def performed(self) -> None:
        """Waits until all shards have done something that was pushed after this was called."""
        self._version += 1
        for job_id in self._ids.values():
            until(lambda job_id=job_id: self._is_in(job_id), "a push")  # type: ignore[misc]
        for job_id in self._ids.values():
            self._rig.done(job_id, self._version)

    def _is_in(self, job_id: str) -> bool:
        try:
            self._rig.push(job_id, self._version)
        except RedisUnavailable:
            return False
        return True


@pytest.mark.threads_only
@pytest.mark.parametrize("kind", ["node", "consumer"])
def test_members_go_on_whenever_they_start(
    kind: str, make_rig: MakeRig, cluster: RedisCluster, failover: Failover
) -> None:
    more = {"ORDERS_CONSUMER": "1"} if kind == "consumer" else {}
    with RedisServer() as unused:  # the rig's own looks are at one server
        rig = make_rig(url=unused.url, LOWQ_REDIS_URL=cluster.url, ORDERS_SHARDS=SHARDS, **more)
        pushes = Pushes(rig, cluster.url)
        before = rig.node()
        before.says(" starts: ")
        pushes.performed()
        failover.begin()
        during = rig.node()
        until(lambda: "trying until it is back" in during.log, "a node without that primary")
        failover.end()
        during.says(" starts: ")
        pushes.performed()
        after = rig.node()
        after.says(" starts: ")
        pushes.performed()
        # Each of them alone does the work of all shards.
        for one in (before, during):
            assert one.stop() == 0
            pushes.performed()
        assert after.stop() == 0


@contextmanager
def dashboard(folder: Path, url: str) -> Iterator[str]:
    """`lowq web` in a process of its own; gives where it is."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LOWQ_")}
    running = subprocess.Popen(
        [sys.executable, "-m", "lowq", "web", "--bind", "127.0.0.1:0"], cwd=folder, env=kept | {"LOWQ_REDIS_URL": url},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    try:
        assert running.stdout is not None
        at = next(line for line in running.stdout if line.startswith("the dashboard is at "))
        yield at.split()[4].rstrip(";")
    finally:
        running.kill()
        running.communicate()


def length_shown(at: str) -> int | None:
    """Of the queue, by the dashboard; None: it has no answer now."""
    try:
        with urllib.request.urlopen(f"{at}/api/v1/queues/Orders", timeout=PATIENCE) as answer:
            return int(json.load(answer)["stats"]["length"])
    except urllib.error.HTTPError as error:
        with error:
            if error.code != 503:
                raise
        return None


@pytest.mark.threads_only
def test_dashboards_answer_whenever_they_start(cluster: RedisCluster, failover: Failover, tmp_path: Path) -> None:
    app = lowq.Lowq(redis_url=cluster.url)
    app.queue("Orders", SHARDS).push([{"id": str(number), "delay": 3600} for number in range(50)])
    with ExitStack() as stack:
        before = stack.enter_context(dashboard(tmp_path, cluster.url))
        until(lambda: length_shown(before) == 50, "figures")
        failover.begin()
        until(lambda: length_shown(before) is None, "an answer that a primary is away")
        during = stack.enter_context(dashboard(tmp_path, cluster.url))
        assert length_shown(during) is None
        failover.end()
        after = stack.enter_context(dashboard(tmp_path, cluster.url))
        for at in (before, during, after):
            until(lambda at=at: length_shown(at) == 50, "figures")  # type: ignore[misc]
    app.close()


def test_a_primary_without_its_replica_takes_no_pushes(cluster: RedisCluster) -> None:
    """`min-replicas-to-write`: what a primary that is cut off accepts after the lag would be lost. It does not notice
    by itself here that it is cut off.
    """

    app = lowq.Lowq(redis_url=cluster.url)
    queue = app.queue("Orders", 1)

    def refusal(job_id: str) -> PushInterrupted | None:
        try:
            queue.push({"id": job_id, "payload": 1})
        except PushInterrupted as error:
            return error
        return None

    assert refusal("before") is None
    cluster.replicated()
    cluster.configure(min_replicas_to_write=1, min_replicas_max_lag=1)
    victim = cluster.primary_of(key_slot(queue._prefixes_of(b"before")[0].encode()))
    cluster.cut_off(victim)
    until(lambda: refusal("within the lag"), "a push that is refused")
    late = [f"after the lag {number}" for number in range(10)]
    errors = [refusal(job_id) for job_id in late]
    assert [error.accepted for error in errors if error is not None] == [0] * len(late)
    assert all(isinstance(error.__cause__, RedisNotReady) for error in errors if error is not None)
    assert "takes no writes, as it has too few replicas" in str(errors[0])
    cluster.replaced(victim)
    cluster.heal(victim)  # before that the next one has no replica either
    for job_id in late:
        until(lambda job_id=job_id: refusal(job_id) is None, "a push to the next primary")  # type: ignore[misc]
    cluster.replicated()
    assert all(queue.peek(job_id) is not None for job_id in ("before", *late))
    app.close()
