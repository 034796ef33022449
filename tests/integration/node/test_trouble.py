"""One part in trouble: the others go on."""

import threading
from collections.abc import Iterator
from functools import partial
from typing import Any
from zlib import crc32

import pytest

import lowq
from lowq.producer import CHUNK_BYTES
from lowq.store.keys import shard_prefix
from tests.integration.support import NEVER, PATIENCE, until


def _more_than(items: list[str], count: int) -> bool:
    return len(items) > count


@pytest.fixture
def app(redis_url: str) -> lowq.Lowq:
    return lowq.Lowq(redis_url=redis_url, lease_ttl=2, poll_interval=NEVER)  # whoever polls comes too late


def ids_per_shard(shards_count: int) -> dict[int, str]:
    found: dict[int, str] = {}
    for number in range(1000):
        found.setdefault(crc32(str(number).encode()) % shards_count, str(number))
    return found


def break_shard(app: lowq.Lowq, queue: str, shard: int, key: str) -> None:
    name = shard_prefix(app.config.namespace, queue, shard) + key
    app.client.command("DEL", name)
    app.client.command("SET", name, "not what lowq writes")


@pytest.mark.parametrize("key", ["meta", "solo"])
def test_a_shard_whose_keys_were_spoilt_stops_no_other(app: lowq.Lowq, key: str) -> None:
    performed: list[str] = []

    @app.worker(shards_count=5)
    def work(payloads_by_id: dict[str, list[Any]]) -> None:
        performed.extend(payloads_by_id)

    ids = ids_per_shard(5)
    work.perform_async([{"id": job_id} for job_id in ids.values()])
    break_shard(app, "work", 1, key)
    node = lowq.Node(app, threads=2)
    node.start()
    try:
        until(lambda: len(performed) == 4, "the jobs of the four sound shards")
        until(lambda: bool(app.nodes()), "the node's heartbeat")
        for number in range(20):
            work.perform_async({"id": ids[0], "payload": number})
            until(partial(_more_than, performed, 4 + number), "a later job")
    finally:
        assert node.stop()
    assert ids[1] not in performed


def test_a_lone_node_has_all_its_shards_back_at_once_after_redis_lost_its_data(app: lowq.Lowq) -> None:
    performed: list[str] = []

    @app.worker(shards_count=20)
    def work(payloads_by_id: dict[str, list[Any]]) -> None:
        performed.extend(payloads_by_id)

    node = lowq.Node(app)
    node.start()
    try:
        until(lambda: sum(shard.owner is not None for shard in app.shards("work")) == 20, "all leases")
        app.client.command("FLUSHALL")
        work.perform_async([{"id": number} for number in range(100)])
        until(lambda: len(performed) == 100, "all jobs")
    finally:
        assert node.stop()


def test_a_closed_application_makes_new_connections(redis_url: str) -> None:
    app = lowq.Lowq(redis_url=redis_url, client_pool_size=2, pool_timeout=0.5)
    for number in range(6):
        app.queue("Orders", 1).push({"id": number})
        app.close()
    assert app.queue("Orders").stats().length == 6


def test_large_payloads_are_pushed_in_chunks_of_bounded_bytes(redis_url: str) -> None:
    app = lowq.Lowq(redis_url=redis_url)
    read = 0
    most_ahead = 0
    size = 2**18

    def source() -> Iterator[dict[str, Any]]:
        nonlocal read
        for number in range(200):
            read += 1
            yield {"id": number, "payload": "x" * size}

    def note(accepted: int) -> None:
        nonlocal most_ahead
        most_ahead = max(most_ahead, accepted)
        steps.append(accepted)

    steps: list[int] = []
    assert app.queue("Orders", 2).push(source(), note) == 200
    largest = max(after - before for before, after in zip([0, *steps], steps, strict=False))
    assert largest * size <= CHUNK_BYTES + size
    assert app.queue("Orders").stats().length == 200


def test_what_can_not_be_packed_costs_no_connection(redis_url: str) -> None:
    app = lowq.Lowq(redis_url=redis_url, client_pool_size=1, pool_timeout=0.3)
    queue = app.queue("Orders", 1)
    queue.push({"id": 1})
    for _ in range(3):
        with pytest.raises((UnicodeEncodeError, lowq.LowqError)):
            queue.jobs(match="\ud800*")
    assert queue.stats().length == 1


def test_a_failure_is_logged_with_what_becomes_of_the_id(app: lowq.Lowq, caplog: pytest.LogCaptureFixture) -> None:
    done = threading.Event()

    @app.worker(shards_count=1, max_retry_count=1)
    class Work(lowq.Worker[Any]):
        def perform(self, payloads_by_id: dict[str, list[Any]]) -> None:
            raise ValueError("no good")

        def retry_in(self, retry_count: int) -> float:
            return 0.0

        def retries_exhausted(self, jobs: list[lowq.Job]) -> None:
            done.set()

    node = lowq.Node(app)
    node.start()
    Work.perform_async({"id": "a"})
    assert done.wait(PATIENCE)
    assert node.stop()
    said = [record for record in caplog.records if getattr(record, "event", "") == "failed"]
    assert "id a: retry 1 of 1 in 0 s" in said[0].getMessage()
    assert "id a: no retries left, its oldest payload is in the morgue now" in said[1].getMessage()
    assert said[0].__dict__["ids"] == ["a"]


def test_an_unknown_environment_variable_is_warned_about(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("LOWQ_LEASE_TLL", "3")
    app = lowq.Lowq(redis_url="memory://")
    app.queue("Orders", 1).push({"id": 1})
    assert "LOWQ_LEASE_TLL is no setting of lowq; did you mean LOWQ_LEASE_TTL?" in caplog.text


def test_a_misspelt_option_among_the_class_attributes_is_refused() -> None:
    app = lowq.Lowq(redis_url="memory://")
    with pytest.raises(lowq.ConfigError, match="shard_count: did you mean the worker option 'shards_count'"):

        @app.worker
        class Work(lowq.Worker[Any]):
            shard_count = 7

            def perform(self, payloads_by_id: dict[str, list[Any]]) -> None: ...
