"""`release_all`: jobs of holders that are gone wait again; nobody who lives loses any."""

import math
import secrets
from collections.abc import Iterator
from contextlib import closing

import pytest

import lowq
from lowq.consumer import ConsumerJob
from lowq.errors import LeaseLost, UnknownQueueError
from lowq.options import QueueOptions
from lowq.queue import Queue
from lowq.shards.lease import Lease
from lowq.shards.shard import Shard, shards_of
from tests.waiting import NEVER, PATIENCE, until

pytestmark = pytest.mark.parametrize("store_url", ["redis"], indirect=True)


@pytest.fixture
def app(store_url: str) -> Iterator[lowq.Lowq]:
    with closing(lowq.Lowq(redis_url=store_url, lease_ttl=PATIENCE)) as app:
        app.client.server_age = lambda: math.inf  # type: ignore[method-assign]  # older than any lease
        yield app


@pytest.fixture
def queue(app: lowq.Lowq) -> Queue:
    queue = app.queue("mail", 4)
    queue.push([{"id": n, "payload": n} for n in range(20)])
    return queue


def held_by_the_dead(queue: Queue, app: lowq.Lowq) -> list[Shard]:
    """As when whoever holds the shards, with all jobs in hand, has died more than a lease ago. Returns what it had."""
    options = QueueOptions(queue.name, queue.shards_count)
    shards = shards_of(app.client, app.config, options, secrets.token_hex(8))
    for shard in shards:
        assert isinstance(shard.lease.acquire(NEVER), Lease)
        while shard.in_flight.take(500).jobs:  # a solo job comes alone
            pass
    assert queue.stats().length == 0
    for prefix in (shard.prefix for shard in shards):
        app.client.command("DEL", f"{prefix}lease", key=prefix)
        app.client.command("HSET", f"{prefix}meta", "leased_until", "1", key=prefix)
    return shards


def test_jobs_of_a_holder_that_is_gone_wait_again_charged_with_a_crash_and_it_is_fenced(
    app: lowq.Lowq, queue: Queue
) -> None:
    shards = held_by_the_dead(queue, app)
    assert queue.release_all() == 20
    assert (queue.stats().taken, queue.stats().length) == (0, 20)
    assert {job.crashes for job in queue.jobs(limit=20).jobs} == {1}
    assert queue.release_all() == 0
    for shard in shards:
        with pytest.raises(LeaseLost):
            shard.in_flight.take(0)
    with queue.consumer() as other:  # at once: no lease is left
        assert other.take(20, timeout=PATIENCE)


def test_what_a_living_holder_or_a_detached_session_has_is_left_alone(queue: Queue) -> None:
    consumer, jobs = queue.consumer(session="ann"), list[ConsumerJob]()
    while len(jobs) < 20:
        jobs += consumer.take(20, timeout=PATIENCE)
    assert queue.release_all() == 0
    jobs[0].ack()
    consumer.detach()
    assert queue.release_all() == 0
    with queue.consumer(session="ann") as again:
        for job in jobs[1:]:
            again.ack(job.receipt)
    assert queue.stats().processed == 20


def test_more_jobs_than_one_call_restores_are_all_counted(app: lowq.Lowq) -> None:
    with pytest.raises(UnknownQueueError):
        app.queue("many").release_all()
    queue = app.queue("many", 1)
    queue.push([{"id": n} for n in range(250)])
    held_by_the_dead(queue, app)
    assert queue.release_all() == 250
    assert queue.stats().taken == 0


def test_poison_is_buried_as_by_any_other_owner(app: lowq.Lowq, queue: Queue) -> None:
    released = []
    for _ in range(3):
        until(lambda: queue.stats().scheduled == 0, "the pause after a crash")
        held_by_the_dead(queue, app)
        released.append(queue.release_all())
    assert released == [20, 20, 0]
    assert queue.stats().morgue_length == 20


def test_jobs_of_a_holder_that_may_wait_for_redis_are_not_charged(app: lowq.Lowq, queue: Queue) -> None:
    """As after an outage: it may be there again, and not have renewed its leases yet."""
    held_by_the_dead(queue, app)
    app.client.server_age = lambda: app.config.lease_ttl / 2  # type: ignore[method-assign]
    assert queue.release_all() == 20
    assert {job.crashes for job in queue.jobs(limit=20).jobs} == {0}
