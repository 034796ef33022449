"""A consumer has at most 1,000 jobs of a shard in hand."""

import threading

import pytest

import lowq
from lowq.consumer import ConsumerJob
from lowq.errors import RedisUnavailable
from lowq.queue import Queue
from lowq.store.keys import shard_prefix
from tests.leases import run_out
from tests.rules.consumer.line import Line, take
from tests.tiers import real_redis_often
from tests.waiting import PATIENCE, until

#: Jobs of a shard that one consumer may have in hand.
MOST = 1000


@pytest.fixture
def queue(app: lowq.Lowq) -> Queue:
    """One shard, and more jobs than a consumer may have of it."""
    queue = app.queue("mail", 1)
    queue.push([{"id": n} for n in range(MOST + 10)])
    return queue


def test_what_it_has_in_flight_and_was_never_given_is_still_handed_out(queue: Queue, line: Line) -> None:
    """The reply that brought the last of what it may have was lost."""
    with queue.consumer() as consumer:
        seen = {job.id for job in consumer.take(MOST // 2, timeout=PATIENCE)}
        line.loses = lambda _call: "reply"
        with pytest.raises(RedisUnavailable):
            consumer.take(MOST // 2, timeout=0)
        line.loses = lambda _call: ""
        while len(seen) < MOST:
            jobs = consumer.take(10, timeout=PATIENCE)
            assert jobs
            seen |= {job.id for job in jobs}
        assert consumer.take(timeout=0) == []


@real_redis_often
def test_no_more_is_taken_until_something_is_reported(queue: Queue, line: Line) -> None:
    with queue.consumer() as consumer:
        jobs = take(consumer, MOST)
        line.writes.clear()
        assert consumer.take(10, timeout=0.3) == []
        assert len(line.writes) <= 3, "it waits, and does not ask all the time"
        more: list[ConsumerJob] = []
        thread = threading.Thread(target=lambda: more.extend(consumer.take(10, timeout=PATIENCE)))
        thread.start()
        until(lambda: line.waiting, "the take of another thread")
        jobs.pop().release(delay=60)
        thread.join(PATIENCE)
        assert len(more) == 1
        assert consumer.take(timeout=0) == []
        assert queue.stats().taken == MOST


@pytest.mark.parametrize("store_url", ["redis"], indirect=True)
def test_lists_go_on_however_many_jobs_there_are(queue: Queue) -> None:
    with queue.consumer() as consumer:
        sizes = [len(jobs) for jobs in consumer.batches(10_000, timeout=0)]
    assert sum(sizes) == MOST + 10
    assert max(sizes) <= MOST
    assert queue.stats().processed == MOST + 10


@real_redis_often
def test_all_of_it_goes_to_the_session_or_to_who_takes_over(app: lowq.Lowq, queue: Queue) -> None:
    one = queue.consumer(session="ann")
    jobs = take(one, MOST)
    one.detach()
    two = queue.consumer(session="ann")
    two.ack(jobs[0].receipt)
    assert len(two.take(10_000, timeout=PATIENCE)) == 1
    two.detach()
    run_out(app.client, shard_prefix("lowq", "mail", 0))  # so that no part of it is in flight any more
    with queue.consumer() as other:
        assert len({job.id for job in take(other, MOST)}) == MOST
        assert queue.stats().taken == MOST
    stats = queue.stats()
    assert (stats.length, stats.taken, stats.processed) == (MOST + 9, 0, 1)
