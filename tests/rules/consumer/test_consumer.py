"""Consumers: take, report, several jobs at once, ttr, sessions."""

import itertools
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from datetime import timedelta
from typing import Any

import pytest

import lowq
from lowq.consumer import Consumer, ConsumerJob
from lowq.errors import ConfigError, ConsumerClosed, JobError, NotTaken, SessionInUse, UnknownQueueError
from lowq.queue import Queue
from lowq.sharding import shard_of
from lowq.store.keys import shard_prefix
from tests.rows import case
from tests.rules.consumer.line import Line, take
from tests.waiting import NEVER, PATIENCE, until

pytestmark = pytest.mark.parametrize("store_url", ["redis"], indirect=True)

Open = Callable[..., Consumer]


@pytest.fixture
def open_consumer(queue: Queue) -> Iterator[Open]:
    """Makes consumers of the queue, which are closed in the end."""
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(queue.consumer(**options))


def counts(queue: Queue) -> tuple[int, int, int]:
    """How many wait, are in flight, are buried."""
    stats = queue.stats()
    return stats.length, stats.taken, stats.morgue_length


# --- put ---


def test_what_is_put_has_ids_in_the_order_of_time(queue: Queue) -> None:
    ids = [queue.put({"n": n}) for n in range(20)]
    assert ids == sorted(ids)
    assert len(set(ids)) == 20
    assert queue.stats().length == 20


def test_put_takes_what_a_job_has(queue: Queue, consumer: Consumer) -> None:
    later = queue.put("later", delay=timedelta(hours=1), score=7)
    now = queue.put(score=8)
    assert [job.id for job in consumer.take(10, timeout=PATIENCE)] == [now]
    assert queue.jobs("scheduled").jobs[0].id == later


def test_what_is_wrong_is_not_put(queue: Queue) -> None:
    rows: list[dict[str, Any]] = [{"delay": "soon"}, {"score": float("nan")}, {"perform_at": 5}, {"payload": object()}]
    for wrong in rows:
        with case(wrong):
            with pytest.raises(JobError):
                queue.put(**wrong)
            assert counts(queue) == (0, 0, 0)


# --- take ---


def test_a_job_has_its_payloads_oldest_first(queue: Queue, consumer: Consumer) -> None:
    queue.push([{"id": "a", "payload": n, "score": n} for n in (2, 1, 3)])
    (job,) = take(consumer)
    assert (job.id, job.payloads, job.payload, job.retry_count) == ("a", [1, 2, 3], 3, -1)


def test_no_id_is_out_twice(queue: Queue, consumer: Consumer) -> None:
    queue.push({"id": "a", "payload": 1})
    (job,) = take(consumer)
    queue.push({"id": "a", "payload": 2})
    assert consumer.take(10, timeout=0) == []
    job.ack()
    assert take(consumer)[0].payloads == [2]


def test_several_are_out_at_once_of_one_shard_and_of_many(queue: Queue, consumer: Consumer) -> None:
    queue.push([{"id": n, "payload": n} for n in range(40)])
    jobs = [job for _ in range(40) for job in consumer.take(1, timeout=0)]
    assert sorted(int(job.id) for job in jobs) == list(range(40))
    assert counts(queue) == (0, 40, 0)
    for job in reversed(jobs):
        job.ack()
    assert counts(queue) == (0, 0, 0)
    assert queue.stats().processed == 40


def test_one_take_brings_up_to_its_limit_over_all_shards(app: lowq.Lowq, queue: Queue, consumer: Consumer) -> None:
    queue.push([{"id": n} for n in range(100)])
    lengths = [len(consumer.take(30, timeout=0)) for _ in range(20)]
    assert max(lengths) <= 30
    assert sum(lengths) == 100
    assert all(info.taken for info in app.shards(queue))


def test_what_was_pushed_before_is_there_without_waiting(queue: Queue, consumer: Consumer) -> None:
    """Also before the message that wakes the consumer has come."""
    for n in range(50):
        queue.push({"id": n})
        assert [job.id for job in consumer.take(timeout=0)] == [str(n)]


def test_nothing_comes_in_time(consumer: Consumer) -> None:
    assert consumer.take(timeout=0) == consumer.take(timeout=timedelta(milliseconds=1)) == []


def test_who_waits_is_woken_by_a_push_also_with_jobs_in_hand(queue: Queue, open_consumer: Open) -> None:
    consumer = open_consumer()
    queue.push([{"id": n} for n in range(10)])
    assert len(take(consumer, 10)) == 10
    got: list[ConsumerJob] = []
    thread = threading.Thread(target=lambda: got.extend(take(consumer)))
    thread.start()
    queue.push({"id": "late"})
    thread.join(PATIENCE)
    assert [job.id for job in got] == ["late"]


def test_a_job_that_is_due_later_ends_the_wait_then(queue: Queue, consumer: Consumer) -> None:
    queue.push({"id": "later", "delay": 0.2})
    assert [job.id for job in take(consumer)] == ["later"]


def test_a_paused_queue_gives_nothing_until_it_is_resumed(queue: Queue, consumer: Consumer) -> None:
    queue.push({"id": "a"})
    queue.pause()
    assert consumer.take(timeout=0.05) == []
    queue.resume()
    assert [job.id for job in take(consumer)] == ["a"]


def test_a_limit_that_is_none(consumer: Consumer) -> None:
    rows: list[Any] = [0, -1, 10_001, True, 1.5, "3", None]
    for limit in rows:
        with case(limit), pytest.raises(ConfigError, match="limit="):
            consumer.take(limit, timeout=0)


def test_a_timeout_that_is_none(consumer: Consumer) -> None:
    rows: list[Any] = [-1, float("nan"), float("inf"), True, "5"]
    for timeout in rows:
        with case(timeout), pytest.raises(ConfigError, match="timeout="):
            consumer.take(timeout=timeout)


def test_an_option_that_is_none(queue: Queue) -> None:
    rows: list[dict[str, Any]] = [
        {"ttr": 0}, {"ttr": -1}, {"ttr": float("nan")}, {"ttr": float("inf")}, {"ttr": "60"}, {"ttr": True},
        {"session": ""}, {"session": 5}, {"session": "x" * 513},
    ]  # fmt: skip
    for options in rows:
        with case(options), pytest.raises(ConfigError, match=next(iter(options))):
            queue.consumer(**options)


def test_a_queue_that_nobody_has_used(app: lowq.Lowq) -> None:
    with pytest.raises(UnknownQueueError, match="'nobody'"):
        app.queue("nobody").consumer()


def test_what_can_not_be_decoded_goes_to_the_morgue(queue: Queue, consumer: Consumer, app: lowq.Lowq) -> None:
    queue.push([{"id": "a", "payload": "spoilt"}, {"id": "b"}])
    prefix = shard_prefix("lowq", "mail", shard_of(b"a", 4))
    app.client.command("SET", f"{prefix}payloads:a", "1 {", key=prefix)
    taken = [job for _ in range(3) for job in consumer.take(10, timeout=0)]
    assert [job.id for job in taken] == ["b"]
    assert counts(queue) == (0, 1, 1)
    assert "can't be decoded" in (queue.jobs("morgue").jobs[0].error or "")


# --- report ---


def test_what_is_released_waits_again_uncharged(queue: Queue, consumer: Consumer) -> None:
    queue.push({"id": "a", "payload": 1})
    take(consumer)[0].release()
    (job,) = take(consumer)
    assert (job.payloads, job.retry_count) == ([1], -1)
    job.release(NEVER)
    assert consumer.take(timeout=0) == []
    assert queue.stats().scheduled == 1


def test_what_fails_is_charged_a_retry(queue: Queue, consumer: Consumer) -> None:
    queue.push({"id": "a", "payload": 1})
    take(consumer)[0].fail(ValueError("out of stock"), delay=0)
    (job,) = take(consumer)
    assert job.retry_count == 0
    job.fail("again")
    (waiting,) = queue.jobs("retrying").jobs
    assert (waiting.retry_count, waiting.error) == (1, "again")
    assert queue.stats().failed == 2


def test_without_a_retry_left_the_oldest_payload_is_buried(app: lowq.Lowq) -> None:
    @app.worker(shards_count=2, max_retry_count=0, queue_name="strict")
    def strict(payloads_by_id: dict[str, list[Any]]) -> None: ...

    strict.perform_async([{"id": "a", "payload": n, "score": n} for n in (1, 2)])
    with strict.queue.consumer() as consumer:
        take(consumer)[0].fail("no")
        (buried,) = strict.queue.jobs("morgue").jobs
        assert [payload for payload, _ in buried.payloads] == [1]
        assert take(consumer)[0].payloads == [2]


def test_what_a_worker_says_of_its_queue_holds_where_only_the_name_is_known(app: lowq.Lowq, store_url: str) -> None:
    @app.worker(shards_count=2, max_retry_count=0, max_payloads=1, queue_name="strict")
    def strict(payloads_by_id: dict[str, list[Any]]) -> None: ...

    strict.perform_async([{"id": "a", "payload": n, "score": n} for n in (1, 2)])
    app.client.run(*_registration(app, strict))
    other = lowq.Lowq(redis_url=store_url)
    with other.queue("strict").consumer() as consumer:
        (job,) = take(consumer)
        assert job.payloads == [1]
        job.fail("no")
        assert strict.queue.stats().morgue_length == 1
    other.close()


def _registration(app: lowq.Lowq, worker: type) -> tuple[Any, ...]:
    """As a node enters it."""
    call = app.registration(worker.queue_name, worker.shards_count, worker)  # type: ignore[attr-defined]  # a worker has them
    return call.script, call.key, *call.args


def test_what_is_buried_is_kept_with_the_reason(queue: Queue, consumer: Consumer) -> None:
    queue.push({"id": "a", "payload": 1})
    take(consumer)[0].bury("no such address")
    (buried,) = queue.jobs("morgue").jobs
    assert buried.error == "no such address"
    assert counts(queue) == (0, 0, 1)


VERBS: dict[str, Callable[[ConsumerJob], None]] = {
    "ack": lambda job: job.ack(),
    "release": lambda job: job.release(),
    "bury": lambda job: job.bury("x"),
    "fail": lambda job: job.fail("x"),
    "touch": lambda job: job.touch(5),
}


def test_a_job_is_reported_once(app: lowq.Lowq) -> None:
    for first, second in itertools.product(["ack", "release", "bury", "fail"], VERBS):
        with case(first, second):
            queue = app.queue(f"{first}-{second}", 4)
            queue.push({"id": "a", "payload": 1})
            with queue.consumer(ttr=NEVER) as consumer:
                (job,) = take(consumer)
                VERBS[first](job)
                before = counts(queue)
                with pytest.raises(NotTaken, match="holds no job with the receipt"):
                    VERBS[second](job)
                assert counts(queue) == before


def test_a_forged_receipt(queue: Queue, consumer: Consumer) -> None:
    queue.push({"id": "b"})
    take(consumer)
    before = counts(queue)
    rows: list[Any] = ["", "nonsense", "mail:0:1:a", "mail:99:1:a", None, 5, b"mail:0:1:a"]
    for receipt in rows:
        with case(receipt):
            for report in (consumer.ack, consumer.release, consumer.bury, consumer.fail):
                with pytest.raises(NotTaken):
                    report(receipt)
            with pytest.raises(NotTaken):
                consumer.touch(receipt, 5)
            assert counts(queue) == before


def test_the_receipt_of_another_consumer(queue: Queue, open_consumer: Open) -> None:
    queue.push([{"id": n} for n in range(20)])
    one = open_consumer()
    (job,) = take(one)
    two = open_consumer()
    with pytest.raises(NotTaken):
        two.ack(job.receipt)
    one.ack(job.receipt)


def test_a_report_that_is_wrong_leaves_the_job_in_hand(queue: Queue, consumer: Consumer) -> None:
    rows: list[tuple[str, Callable[[Any], None]]] = [
        ("release, text", lambda job: job.release("soon")),
        ("release, nan", lambda job: job.release(float("nan"))),
        ("bury, number", lambda job: job.bury(5)),
        ("fail, number", lambda job: job.fail(5)),
        ("fail, text", lambda job: job.fail("x", "soon")),
        ("touch, 0", lambda job: job.touch(0)),
        ("touch, -1", lambda job: job.touch(-1)),
        ("touch, nan", lambda job: job.touch(float("nan"))),
        ("touch, text", lambda job: job.touch("x")),
    ]
    for name, wrong in rows:
        with case(name):
            queue.push({"id": name})
            (job,) = take(consumer)
            with pytest.raises(lowq.LowqError):
                wrong(job)
            job.ack()


# --- batches ---


def test_the_next_batch_acknowledges_the_last(queue: Queue, consumer: Consumer) -> None:
    queue.push([{"id": n} for n in range(50)])
    seen: list[str] = []
    for jobs in consumer.batches(7, timeout=0):
        assert queue.stats().taken == len(jobs)
        seen += [job.id for job in jobs]
    assert sorted(map(int, seen)) == list(range(50))
    assert counts(queue) == (0, 0, 0)


def test_of_a_batch_what_was_reported_is_left_alone(queue: Queue, consumer: Consumer) -> None:
    queue.push([{"id": n} for n in range(10)])
    for jobs in consumer.batches(10, timeout=0):
        for job in jobs:
            if int(job.id) % 2:
                job.bury("odd")
    assert counts(queue) == (0, 0, 5)
    assert queue.stats().processed == 5


def test_a_batch_that_is_not_finished_waits_again(queue: Queue) -> None:
    queue.push([{"id": n} for n in range(10)])

    def work() -> None:
        with queue.consumer() as consumer:
            for jobs in consumer.batches(4):
                if len(jobs) == 4:
                    raise RuntimeError

    with pytest.raises(RuntimeError):
        work()
    assert counts(queue) == (10, 0, 0)


def test_batches_end_when_the_consumer_is_closed(queue: Queue, consumer: Consumer) -> None:
    queue.push({"id": "a"})
    begun = threading.Event()
    seen: list[str] = []

    def work() -> None:
        for jobs in consumer.batches(4):
            seen.extend(job.id for job in jobs)
            begun.set()

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert begun.wait(PATIENCE)
    until(lambda: queue.stats().taken == 0, "the acknowledgement of the batch, with the next take")
    consumer.close()
    for thread in threads:
        thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in threads)
    assert seen == ["a"]


# --- ttr ---


def test_past_ttr_a_job_waits_again_charged_with_a_crash(queue: Queue, open_consumer: Open) -> None:
    consumer = open_consumer(ttr=0.05)
    queue.push({"id": "a", "payload": 1})
    (job,) = take(consumer)
    (again,) = take(consumer)
    assert (again.id, again.payloads) == ("a", [1])
    with pytest.raises(NotTaken):
        job.ack()
    assert again.receipt != job.receipt
    until(lambda: consumer.take(timeout=0) == [] and counts(queue) == (0, 0, 1), "the last crash")
    assert "exceeded ttr" in (queue.jobs("morgue").jobs[0].error or "")


def test_touch_lengthens_ttr(queue: Queue, open_consumer: Open) -> None:
    consumer, touched = open_consumer(ttr=1), list[ConsumerJob]()
    while not touched:  # unless the machine stands still just before
        a, b = str(uuid.uuid4()), str(uuid.uuid4())
        queue.push([{"id": a}, {"id": b}])
        jobs: dict[str, ConsumerJob] = {}
        while not {a, b} <= jobs.keys():
            jobs |= {job.id: job for job in consumer.take(10, timeout=PATIENCE)}
        with suppress(NotTaken):
            jobs[a].touch(NEVER)
            touched.append(jobs[a])
    until(lambda: b in [job.id for job in consumer.take(10, timeout=0.05)], "b again")  # past the ttr of both
    touched[0].ack()


def test_touch_shortens_ttr(queue: Queue, open_consumer: Open) -> None:
    consumer = open_consumer(ttr=NEVER)
    queue.push({"id": "a"})
    (job,) = take(consumer)
    job.touch(0.01)
    assert [job.id for job in take(consumer)] == ["a"]


# --- the end ---


def test_what_is_in_hand_waits_again_when_the_consumer_is_closed(queue: Queue, app: lowq.Lowq) -> None:
    queue.push([{"id": n} for n in range(5)])
    with queue.consumer() as consumer:
        jobs = take(consumer, 5)
        assert [node.name for node in app.nodes()] == [consumer.name]
    assert counts(queue) == (5, 0, 0)
    assert app.nodes() == []
    with pytest.raises(ConsumerClosed):
        jobs[0].ack()
    with pytest.raises(ConsumerClosed):
        consumer.take()
    consumer.close()
    with queue.consumer() as other:
        assert len(other.take(5, timeout=PATIENCE)) == 5  # at once: no lease is left


def test_a_closed_consumer_lets_go_of_who_waits(consumer: Consumer, line: Line) -> None:
    got: list[Any] = []
    threads = [threading.Thread(target=lambda: got.append(consumer.take())) for _ in range(3)]
    for thread in threads:
        thread.start()
    until(lambda: line.waiting == 3, "three who wait")
    consumer.close()
    for thread in threads:
        thread.join(PATIENCE)
    assert got == [[], [], []]


def test_after_detach_the_same_session_goes_on(queue: Queue, open_consumer: Open) -> None:
    queue.push([{"id": n} for n in range(6)])
    one = open_consumer(session="ann")
    jobs = take(one, 6)
    assert len(jobs) == 6
    one.detach()
    with pytest.raises(ConsumerClosed):
        one.ack(jobs[0].receipt)
    two = open_consumer(session="ann")
    two.ack(jobs[0].receipt)
    two.release(jobs[1].receipt, NEVER)
    two.bury(jobs[2].receipt)
    with pytest.raises(NotTaken):
        two.ack(jobs[0].receipt)
    assert counts(queue) == (1, 3, 1)
    assert two.take(10, timeout=0) == []  # nobody gets the others, which are in hand still
    two.close()
    assert counts(queue) == (4, 0, 1)


def test_its_jobs_return_when_ttr_passes_though_nobody_has_their_receipts(queue: Queue, open_consumer: Open) -> None:
    queue.push({"id": "a"})
    one = open_consumer(session="ann")
    take(one)
    one.detach()
    two = open_consumer(session="ann", ttr=0.05)
    assert [job.id for job in take(two)] == ["a"]


def test_a_session_is_for_one_at_a_time(queue: Queue, open_consumer: Open) -> None:
    one = open_consumer(session="ann")
    with pytest.raises(SessionInUse, match="'ann'"):
        queue.consumer(session="ann")
    open_consumer(session="bob")
    one.close()
    open_consumer(session="ann")


def test_another_session_does_not_get_what_a_detached_one_has(queue: Queue, open_consumer: Open) -> None:
    queue.push({"id": "a"})
    one = open_consumer(session="ann")
    (job,) = take(one)
    one.detach()
    two = open_consumer(session="bob")
    with pytest.raises(NotTaken):
        two.ack(job.receipt)
    assert two.take(timeout=0) == []


# --- with others ---


def test_two_consumers_share_the_shards(queue: Queue, open_consumer: Open, app: lowq.Lowq) -> None:
    one, two = open_consumer(), open_consumer()
    until(
        lambda: [sum(map(len, node.shards.values())) for node in app.nodes()] == [2, 2], "two shards for each of them"
    )
    queue.push([{"id": n} for n in range(100)])
    mine, others = ({job.id for _ in range(9) for job in each.take(100, timeout=0)} for each in (one, two))
    assert mine
    assert others
    assert not mine & others
    assert len(mine) + len(others) == 100


def test_a_shard_with_jobs_in_hand_is_not_given_up_before_they_are_reported(
    queue: Queue, open_consumer: Open, app: lowq.Lowq
) -> None:
    queue.push([{"id": n} for n in range(40)])
    one = open_consumer()
    jobs = take(one, 40)
    two = open_consumer()
    assert two.take(timeout=0) == []
    assert [len(node.shards.get("mail", ())) for node in app.nodes() if node.name == one.name] == [4]
    for job in jobs:
        job.ack()
    until(lambda: {len(node.shards.get("mail", ())) for node in app.nodes()} == {2}, "two shards for each")


def test_the_registry_says_that_it_is_a_consumer(consumer: Consumer, app: lowq.Lowq, queue: Queue) -> None:
    (node,) = app.nodes()
    assert (node.kind, node.threads, node.queues) == ("consumer", 0, ("mail",))


# --- payloads that expire ---


def test_what_expires_while_nobody_takes_is_swept(queue: Queue) -> None:
    with queue.consumer():
        for n in range(300):
            queue.put(n, ttl=0.01)
        kept = queue.put("kept", ttl=3600)
        until(lambda: queue.stats().expired == 300)
        stats = queue.stats()
    assert (stats.length, stats.due) == (1, 1)
    assert [job.id for job in queue.jobs()] == [kept]


def test_the_queues_ttl_is_that_of_jobs_which_say_none(app: lowq.Lowq) -> None:
    queue = app.queue("news", 2, ttl=0.01)
    with queue.consumer() as consumer:
        queue.put("expires")
        queue.push({"id": "never", "ttl": None})
        mine = [queue.put("own", ttl=timedelta(hours=1)), "never"]
        queue.push({"id": "pushed", "payload": "expires"})
        queue.push([{"id": number, "payload": "expires"} for number in range(200)])
        until(lambda: queue.stats().expired == 202)
        assert sorted(job.id for job in take(consumer, 2)) == sorted(mine)


def test_the_morgue_is_bounded(app: lowq.Lowq) -> None:
    queue = app.queue("letters", 2, morgue_max=6)
    for n in range(50):
        queue.push({"id": n})
    queue.bury(range(50))
    with queue.consumer():
        until(lambda: queue.stats().morgue_length == 6)  # three of each shard
    short = app.queue("short", 2, morgue_ttl=0.01)
    short.push([{"id": n} for n in range(50)])
    short.bury(range(50))
    with short.consumer():
        until(lambda: short.stats().morgue_length == 0)
