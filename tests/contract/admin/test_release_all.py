"""`release_all`: jobs of holders that are gone wait again; nobody who lives loses any."""

from collections.abc import Iterator

import pytest

import lowq
from lowq.errors import LeaseLost, NotTaken, UnknownQueueError
from lowq.queue import Queue
from tests.waiting import PATIENCE, until

pytestmark = pytest.mark.parametrize("store_url", ["redis"], indirect=True)


@pytest.fixture
def app(store_url: str) -> Iterator[lowq.Lowq]:
    app = lowq.Lowq(redis_url=store_url, lease_ttl=5)
    yield app
    app.close()


@pytest.fixture
def queue(app: lowq.Lowq) -> Queue:
    queue = app.queue("mail", 4)
    queue.push([{"id": n, "payload": n} for n in range(20)])
    return queue


def take_all(queue: Queue) -> lowq.Consumer:
    consumer = queue.consumer(session="ann")
    until(lambda: bool(consumer.take(20, timeout=0.1)) and queue.stats().taken == 20, "all jobs in hand")
    return consumer


def die(queue: Queue, app: lowq.Lowq) -> None:
    """As Redis is when whoever holds the shards has died more than a lease ago."""
    for prefix in queue._prefixes:
        app.client.command("DEL", f"{prefix}lease", key=prefix)
        app.client.command("HSET", f"{prefix}meta", "leased_until", "1", key=prefix)


def crash(consumer: lowq.Consumer) -> None:
    """It renews nothing any more and gives nothing back, as a process that was killed."""
    consumer._broker.dispatchers[0].close()
    consumer._broker.stop()


def test_jobs_of_a_holder_that_is_gone_wait_again_charged_with_a_crash(app: lowq.Lowq, queue: Queue) -> None:
    consumer = take_all(queue)
    crash(consumer)
    die(queue, app)
    assert queue.release_all() == 20
    stats = queue.stats()
    assert (stats.taken, stats.length) == (0, 20)
    assert {job.crashes for job in queue.jobs(limit=20).jobs} == {1}
    assert queue.release_all() == 0
    with pytest.raises(NotTaken):
        consumer.ack(next(iter(consumer._taken)))
    consumer.close()
    with queue.consumer() as other:  # at once: no lease is left
        assert other.take(20, timeout=PATIENCE)


def test_what_a_living_holder_has_is_left_alone(app: lowq.Lowq, queue: Queue) -> None:
    consumer = take_all(queue)
    assert queue.release_all() == 0
    assert queue.stats().taken == 20
    for receipt in list(consumer._taken):
        consumer.ack(receipt)
    consumer.close()
    assert queue.stats().processed == 20


def test_more_jobs_than_one_call_restores_are_all_counted(app: lowq.Lowq) -> None:
    queue = app.queue("many", 1)
    queue.push([{"id": n} for n in range(250)])
    consumer = queue.consumer()
    until(lambda: bool(consumer.take(250, timeout=0.1)) and queue.stats().taken == 250, "all jobs in hand")
    consumer.detach()
    die(queue, app)
    assert queue.release_all() == 250
    assert queue.stats().taken == 0


def test_what_a_detached_session_has_stays_its_own(queue: Queue) -> None:
    consumer = take_all(queue)
    receipts = list(consumer._taken)
    consumer.detach()
    assert queue.release_all() == 0
    with queue.consumer(session="ann") as again:
        for receipt in receipts:
            again.ack(receipt)
    assert queue.stats().processed == 20


def test_a_holder_that_was_only_slow_is_fenced(app: lowq.Lowq, queue: Queue) -> None:
    consumer = take_all(queue)
    crash(consumer)
    die(queue, app)
    shard = next(iter(consumer._taken.values())).shard
    assert queue.release_all() == 20
    with pytest.raises(LeaseLost):
        shard.in_flight.take(0)
    consumer.close()


def test_poison_is_buried_as_by_any_other_owner(app: lowq.Lowq, queue: Queue) -> None:
    released = []
    for _ in range(3):
        until(lambda: queue.stats().scheduled == 0, "the pause after a crash")
        consumer = take_all(queue)
        crash(consumer)
        die(queue, app)
        released.append(queue.release_all())
        consumer.close()
        app.client.command("DEL", consumer._session._key, key=consumer._session._key)
    assert released == [20, 20, 0]
    assert queue.stats().morgue_length == 20


def test_a_queue_that_nobody_has_used(app: lowq.Lowq) -> None:
    with pytest.raises(UnknownQueueError):
        app.queue("nobody").release_all()
