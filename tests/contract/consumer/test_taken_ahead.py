"""Consumers that take one job after the other: the acknowledgement of one takes the next."""

import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import pytest

import lowq
from lowq.consumer import Consumer, ConsumerJob
from lowq.consumer import consumer as module
from lowq.errors import NotTaken, RedisUnavailable
from lowq.queue import Queue
from lowq.store import Client
from tests.waiting import NEVER, PATIENCE, until

pytestmark = pytest.mark.parametrize("store_url", ["redis"], indirect=True)


@pytest.fixture(autouse=True)
def any_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is, the next job is asked for at once, and is kept."""
    monkeypatch.setattr(module, "AHEAD_AFTER", 3)
    monkeypatch.setattr(module, "AHEAD_GAP", NEVER)
    monkeypatch.setattr(module, "AHEAD_SECONDS", NEVER)


@pytest.fixture
def consumer(queue: Queue) -> Iterator[Consumer]:
    with queue.consumer(session="ann", ttr=NEVER) as consumer:
        yield consumer


def one_by_one(consumer: Consumer, count: int) -> list[ConsumerJob]:
    """Takes and acknowledges so many jobs; the last one is returned as it is."""
    jobs: list[ConsumerJob] = []
    while len(jobs) < count:
        (job,) = consumer.take(timeout=PATIENCE)
        jobs.append(job)
        if len(jobs) < count:
            job.ack()
    return jobs


def go_on(queue: Queue, consumer: Consumer) -> None:
    """Pushes a job, takes one and acknowledges it. That this brings another one is not certain: a wake-up that comes
    late has the consumer look where there is nothing.
    """
    queue.push({"id": str(uuid.uuid4())})
    (job,) = consumer.take(timeout=PATIENCE)
    job.ack()


def taken_ahead(queue: Queue, consumer: Consumer, count: int = 10) -> ConsumerJob:
    """A job that was taken with an acknowledgement, and that nobody has asked for. So many were pushed, or more."""
    queue.push([{"id": n} for n in range(count)])
    one_by_one(consumer, 5)[-1].ack()
    while not consumer._ahead:
        go_on(queue, consumer)
    (job,) = consumer._ahead
    assert queue.stats().taken == 1
    return job


def test_every_job_comes_once_and_most_with_the_acknowledgement_of_the_last(
    queue: Queue, consumer: Consumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    round_trips: Counter[int] = Counter()
    run_many = Client.run_many

    def counted(client: Client, calls: Sequence[Any], *args: Any, **options: Any) -> list[Any]:
        if calls and client is consumer._client and calls[0].script == "ack_and_take":
            round_trips[len(calls)] += 1
        return run_many(client, calls, *args, **options)

    monkeypatch.setattr(Client, "run_many", counted)
    queue.push([{"id": n, "payload": n} for n in range(50)])
    seen: list[int] = []
    while jobs := consumer.take(timeout=0):
        seen.append(jobs[0].payload)
        jobs[0].ack()
    assert sorted(seen) == list(range(50))
    assert round_trips[2] >= 40
    stats = queue.stats()
    assert (stats.length, stats.taken, stats.processed) == (0, 0, 50)


def test_who_does_not_acknowledge_at_once_takes_nothing_ahead(
    queue: Queue, consumer: Consumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "AHEAD_GAP", -1.0)
    queue.push([{"id": n} for n in range(10)])
    one_by_one(consumer, 8)[-1].ack()
    assert consumer._ahead == []
    assert queue.stats().taken == 0


def test_what_was_taken_ahead_and_has_expired_is_not_handed_out(queue: Queue, consumer: Consumer) -> None:
    while not consumer._ahead:
        queue.push([{"id": str(uuid.uuid4()), "ttl": 1.0} for _ in range(2)])
        for job in consumer.take(timeout=0):
            job.ack()
    (ahead,) = consumer._ahead
    time.sleep(1.1)
    assert ahead.id not in [job.id for job in consumer.take(10, timeout=0)]
    until(lambda: queue.stats().taken == 0, "the job given back")
    assert queue.stats().expired >= 1


def test_nothing_is_taken_ahead_of_somebody_who_waits(queue: Queue, consumer: Consumer) -> None:
    queue.push([{"id": n} for n in range(5)])
    (job, *_) = reversed(one_by_one(consumer, 5))
    got: list[ConsumerJob] = []
    thread = threading.Thread(target=lambda: got.extend(consumer.take(timeout=PATIENCE)))
    thread.start()
    until(lambda: bool(consumer._callers), "somebody who waits")
    queue.push({"id": "late"})
    job.ack()
    thread.join(PATIENCE)
    assert [job.id for job in got] == ["late"]


def test_who_has_come_to_wait_meanwhile_gets_what_was_taken_ahead(
    queue: Queue, consumer: Consumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue.push([{"id": n} for n in range(6)])
    (job, *_) = reversed(one_by_one(consumer, 5))
    got: list[ConsumerJob] = []
    thread = threading.Thread(target=lambda: got.extend(consumer.take(timeout=PATIENCE)))
    run_many = Client.run_many

    def slow(client: Client, calls: Sequence[Any], *args: Any, **options: Any) -> list[Any]:
        replies = run_many(client, calls, *args, **options)
        if client is consumer._client and len(calls) == 2 and not thread.ident:
            thread.start()
            until(lambda: bool(consumer._callers), "somebody who waits")
        return replies

    monkeypatch.setattr(Client, "run_many", slow)
    job.ack()
    while not thread.ident:
        go_on(queue, consumer)
    thread.join(PATIENCE)
    assert len(got) == 1


def test_who_waits_gets_what_was_taken_ahead_though_it_claims_a_shard_that_has_nothing(
    queue: Queue, consumer: Consumer
) -> None:
    job = taken_ahead(queue, consumer, 6)
    empty = consumer._shards[0]
    empty.dispatch.claimed_by = 0
    assert consumer._take_ready(1, [], [empty]) == [job]
    assert empty.dispatch.claimed_by is None


def test_what_is_acknowledged_on_the_spot_takes_nothing_ahead_in_its_turn(
    queue: Queue, consumer: Consumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue.push([{"id": n} for n in range(10)])
    (job, *_) = reversed(one_by_one(consumer, 5))
    received = consumer._received

    def acknowledged(shard: Any, delivery: Any) -> list[ConsumerJob]:
        for each in received(shard, delivery):
            each.ack()
        return []

    monkeypatch.setattr(consumer, "_received", acknowledged)
    job.ack()
    assert (queue.stats().processed, queue.stats().taken) == (6, 0)


def test_who_takes_several_at_a_time_gets_what_was_taken_ahead_among_them(queue: Queue, consumer: Consumer) -> None:
    job = taken_ahead(queue, consumer)
    jobs = consumer.take(5, timeout=0)
    assert len(jobs) == 5
    assert job in jobs
    assert queue.stats().taken == 5


def test_what_nobody_asks_for_waits_again_uncharged(
    app: lowq.Lowq, queue: Queue, consumer: Consumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "AHEAD_SECONDS", 0.01)
    queue.push([{"id": n} for n in range(10)])
    one_by_one(consumer, 5)[-1].ack()
    until(lambda: queue.stats().taken == 0, "what was taken ahead has been given back")
    until(lambda: not consumer._taken, "nothing in hand")
    assert queue.stats().length == 5
    assert queue.stats().scheduled == 0
    assert {job.retry_count for job in queue.jobs("due").jobs} == {-1}
    assert not any(app.client.command("EXISTS", f"{prefix}crashes", key=prefix) for prefix in queue._prefixes)


@pytest.mark.parametrize("leave", [Consumer.close, Consumer.detach, Consumer.quiet])
def test_who_leaves_gives_it_back(
    queue: Queue, consumer: Consumer, leave: Callable[[Consumer], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = taken_ahead(queue, consumer)
    leave(consumer)
    until(lambda: queue.stats().taken == 0, "what was taken ahead has been given back")
    assert queue.stats().length == 5
    with pytest.raises(lowq.LowqError):
        job.ack()


def test_ttr_begins_when_it_is_handed_over(queue: Queue, consumer: Consumer) -> None:
    ahead = taken_ahead(queue, consumer)
    before = consumer._taken.deadline(ahead.receipt)
    (job,) = consumer.take(timeout=0)
    assert job is ahead
    assert consumer._taken.deadline(job.receipt) > before


def test_of_a_lease_that_was_lost_nothing_is_handed_over(queue: Queue, consumer: Consumer) -> None:
    job = taken_ahead(queue, consumer)
    held = consumer._taken.get(job.receipt)
    assert held is not None
    held.token = "of an earlier one"
    assert all(other is not job for other in consumer.take(5, timeout=0))


@pytest.mark.parametrize("lost", ["acknowledgement", "take", "both"])
def test_without_an_answer_nothing_is_lost_and_no_id_is_out_twice(
    queue: Queue, consumer: Consumer, lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue.push([{"id": n, "payload": n} for n in range(30)])
    run_many = Client.run_many
    count = 0

    def lossy(client: Client, calls: Sequence[Any], *args: Any, **options: Any) -> list[Any]:
        nonlocal count
        replies = run_many(client, calls, *args, **options)
        if client is consumer._client and len(calls) == 2:
            count += 1
            if count % 2:
                gone = {"acknowledgement": (0,), "take": (1,), "both": (0, 1)}[lost]
                return [RedisUnavailable("lost") if at in gone else reply for at, reply in enumerate(replies)]
        return replies

    monkeypatch.setattr(Client, "run_many", lossy)
    seen: list[int] = []
    while jobs := consumer.take(timeout=0.1):
        seen.append(jobs[0].payload)
        with suppress(NotTaken):
            while True:
                try:
                    jobs[0].ack()
                    break
                except RedisUnavailable:
                    assert lost != "take"
    assert count > 2
    assert sorted(seen) == list(range(30))
    assert (queue.stats().processed, queue.stats().taken) == (30, 0)
    assert not consumer._taken
