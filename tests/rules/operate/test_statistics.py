"""`Queue.statistics`: tasks by state and calls by verb."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict

import pytest

import lowq
from lowq.consumer import ConsumerJob
from lowq.queue import Queue
from lowq.store.keys import shard_prefix
from tests.waiting import PATIENCE


@pytest.fixture
def app(store_url: str) -> Iterator[lowq.Lowq]:
    with closing(lowq.Lowq(redis_url=store_url, lease_ttl=PATIENCE)) as app:
        yield app


@pytest.fixture
def queue(app: lowq.Lowq) -> Queue:
    queue = app.queue("sites", 3)
    queue.push([])
    return queue


def calls(queue: Queue) -> dict[str, int]:
    """Those that there were."""
    return {name: count for name, count in asdict(queue.statistics().calls).items() if count}


def test_a_queue_without_jobs_has_done_nothing_and_one_that_nobody_has_used_is_unknown(queue: Queue) -> None:
    found = queue.statistics()
    assert found.name == "sites"
    assert asdict(found.tasks) == dict.fromkeys(("ready", "taken", "delayed", "buried", "total", "done"), 0)
    assert calls(queue) == {}
    assert found.calls.touch is None
    with pytest.raises(lowq.UnknownQueueError):
        lowq.Lowq(redis_url="memory://nobody").queue("nobody").statistics()


def test_tasks_are_counted_by_state_and_calls_by_verb_over_all_shards(queue: Queue) -> None:
    queue.push([{"id": number} for number in range(10)])
    queue.push([{"id": number, "delay": 3600} for number in range(100, 105)])
    takes, jobs = 0, list[ConsumerJob]()
    with queue.consumer() as consumer:
        while len(jobs) < 10:
            jobs += consumer.take(1, timeout=PATIENCE)
            takes += 1
        jobs[0].ack()
        jobs[1].bury("no")
        tasks = asdict(queue.statistics().tasks)
        assert tasks == {"ready": 0, "taken": 8, "delayed": 5, "buried": 1, "total": 14, "done": 1}
        for job in jobs[2:5]:
            job.ack()
        for job in jobs[5:7]:
            job.release(delay=3600)
        jobs[7].fail("no", delay=3600)
        jobs[8].bury("no")
        jobs[9].touch(60)
        jobs[9].ack()
    done = {"put": 15, "take": takes, "ack": 5, "release": 2, "fail": 1, "bury": 2}
    assert calls(queue) == done
    buried = [jobs[1].id, jobs[8].id]
    queue.kick(buried)
    queue.kick(buried)  # they are there no more
    queue.delete([buried[0], "nobody"])
    assert calls(queue) == {**done, "kick": 2, "delete": 1}
    assert queue.statistics().tasks.done == 6, "acknowledged, or deleted"


def test_what_was_put_is_counted_by_payloads_also_of_an_id_in_flight_or_buried(queue: Queue) -> None:
    queue.push([{"id": "merged", "payload": number} for number in range(3)])
    with queue.consumer() as consumer:
        (job,) = consumer.take(1, timeout=PATIENCE)
        queue.push({"id": "merged"})
        assert queue.statistics().calls.put == 4
        job.bury("no")
    queue.delete("merged")  # two jobs: one that waits, one that is buried
    assert calls(queue) == {"put": 4, "take": 1, "bury": 1, "delete": 2}


def test_counters_that_are_no_numbers_count_as_0(app: lowq.Lowq, queue: Queue) -> None:
    prefix = shard_prefix("lowq", "sites", 0)
    app.client.command("HSET", f"{prefix}meta", "deleted", "many", "released", "-1", "kicked", "x", key=prefix)
    assert calls(queue) == {}
