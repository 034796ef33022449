"""`Queue.statistics`: tasks by state and calls by verb."""

from collections.abc import Iterator
from dataclasses import asdict

import pytest

import lowq
from lowq.queue import Queue
from lowq.store.keys import shard_prefix
from lowq.testing import drain


@pytest.fixture
def app(store_url: str) -> Iterator[lowq.Lowq]:
    app = lowq.Lowq(redis_url=store_url, lease_ttl=5)
    yield app
    app.close()


@pytest.fixture
def queue(app: lowq.Lowq) -> Queue:
    queue = app.queue("sites", 3)
    queue.push([])
    return queue


def calls(queue: Queue) -> dict[str, int]:
    """Those that there were."""
    return {name: count for name, count in asdict(queue.statistics().calls).items() if count}


def test_a_queue_without_jobs_has_done_nothing(queue: Queue) -> None:
    found = queue.statistics()
    assert found.name == "sites"
    assert asdict(found.tasks) == dict.fromkeys(("ready", "taken", "delayed", "buried", "total", "done"), 0)
    assert calls(queue) == {}


def test_tasks_are_counted_by_state_over_all_shards(queue: Queue) -> None:
    queue.push([{"id": number} for number in range(12)])
    queue.push([{"id": number, "delay": 3600} for number in range(100, 105)])
    queue.bury([0, 1])
    with queue.consumer() as consumer:
        jobs: list[lowq.ConsumerJob] = []
        while len(jobs) < 4:
            jobs += consumer.take(4 - len(jobs))
        jobs[0].ack()
        tasks = queue.statistics().tasks
        assert asdict(tasks) == {"ready": 6, "taken": 3, "delayed": 5, "buried": 2, "total": 16, "done": 1}


def test_calls_are_counted_by_verb(queue: Queue) -> None:
    queue.push([{"id": number} for number in range(10)])
    with queue.consumer() as consumer:
        jobs: list[lowq.ConsumerJob] = []
        takes = 0
        while len(jobs) < 10:
            jobs += consumer.take(1)
            takes += 1
        for job in jobs[:4]:
            job.ack()
        for job in jobs[4:6]:
            job.release(delay=3600)
        jobs[6].fail("no", delay=3600)
        for job in jobs[7:9]:
            job.bury("no")
        jobs[9].touch(60)
        jobs[9].ack()
    buried = [jobs[7].id, jobs[8].id]
    assert calls(queue) == {"put": 10, "take": takes, "ack": 5, "release": 2, "fail": 1, "bury": 2}
    queue.kick(buried)
    queue.kick(buried)  # they are there no more
    queue.delete([buried[0], "nobody"])
    assert calls(queue) == {
        "put": 10,
        "take": takes,
        "ack": 5,
        "release": 2,
        "fail": 1,
        "bury": 2,
        "kick": 2,
        "delete": 1,
    }
    assert queue.statistics().tasks.done == 6, "acknowledged, or deleted"


def test_what_was_put_is_counted_by_payloads(queue: Queue) -> None:
    for number in range(5):
        queue.put(number)
    queue.push([{"id": "merged", "payload": number} for number in range(3)])
    with queue.consumer() as consumer:
        for jobs in consumer.batches(2, timeout=60):
            assert queue.statistics().calls.put == 8
            if any(job.id == "merged" for job in jobs):
                queue.push({"id": "merged"})
                break
        assert queue.statistics().calls.put == 9
    assert queue.statistics().calls.touch is None


def test_an_id_that_waits_and_is_buried_is_two_jobs(queue: Queue) -> None:
    queue.push({"id": 1})
    queue.bury(1)
    queue.push({"id": 1})
    assert queue.statistics().calls.put == 2
    queue.delete(1)
    assert calls(queue) == {"put": 2, "bury": 1, "delete": 2}


def test_a_job_whose_retries_are_used_up_counts_as_buried(app: lowq.Lowq) -> None:
    @app.worker(max_retry_count=0, shards_count=1)
    def work(payloads_by_id: dict[str, list[object]]) -> None:
        raise ValueError

    work.perform_async([{"id": 1}, {"id": 2}])
    drain(work)
    assert calls(work.queue) == {"put": 2, "take": 2, "fail": 2, "bury": 2}


def test_actions_in_bulk_are_counted(queue: Queue) -> None:
    queue.push([{"id": number} for number in range(1000)])
    queue.bury(range(500))
    assert queue.kick_oldest(100).done == 100
    assert queue.clear() == 1000
    assert calls(queue) == {"put": 1000, "bury": 500, "kick": 100, "delete": 1000}
    assert queue.statistics().tasks.total == 0


def test_counters_that_are_no_numbers_count_as_0(app: lowq.Lowq, queue: Queue) -> None:
    queue.push([{"id": number} for number in range(30)])
    prefix = shard_prefix("lowq", "sites", 0)
    app.client.command("HSET", f"{prefix}meta", "deleted", "many", "released", "-1", "kicked", "x", key=prefix)
    found = queue.statistics().calls
    assert (found.delete, found.kick, found.release) == (0, 0, 0)


def test_a_queue_that_nobody_has_used_is_unknown(app: lowq.Lowq) -> None:
    with pytest.raises(lowq.UnknownQueueError):
        app.queue("nobody").statistics()
