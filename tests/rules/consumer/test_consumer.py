"""Consumers: take, report, several jobs at once, ttr, sessions."""

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
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


def test_what_is_put_has_an_id_in_the_order_of_time_and_what_else_a_job_has(queue: Queue, consumer: Consumer) -> None:
    ids = [queue.put({"n": n}) for n in range(20)]
    assert ids == sorted(set(ids))
    later = queue.put("later", delay=timedelta(hours=1))
    assert sorted(job.id for job in take(consumer, 20)) == ids
    assert [job.id for job in queue.jobs("scheduled")] == [later]


def test_what_is_wrong_is_not_put(queue: Queue) -> None:
    rows: list[dict[str, Any]] = [{"delay": "soon"}, {"score": float("nan")}, {"perform_at": 5}, {"payload": object()}]
    for wrong in rows:
        with case(wrong), pytest.raises(JobError):
            queue.put(**wrong)
    assert counts(queue) == (0, 0, 0)


# --- take ---


def test_an_id_is_out_once_with_its_payloads_oldest_first(queue: Queue, consumer: Consumer) -> None:
    queue.push([{"id": "a", "payload": n, "score": n} for n in (2, 1, 3)])
    (job,) = take(consumer)
    assert (job.id, job.payloads, job.payload, job.retry_count) == ("a", [1, 2, 3], 3, -1)
    queue.push({"id": "a", "payload": 4, "score": 4})
    assert consumer.take(10, timeout=0) == []
    job.ack()
    assert take(consumer)[0].payloads == [4]


def test_several_are_out_at_once_of_one_shard_and_of_many(queue: Queue, consumer: Consumer, app: lowq.Lowq) -> None:
    queue.push([{"id": n} for n in range(100)])
    lists = [consumer.take(1, timeout=0), *(consumer.take(30, timeout=0) for _ in range(20))]
    assert max(map(len, lists)) <= 30
    assert sorted(int(job.id) for jobs in lists for job in jobs) == list(range(100))
    assert all(info.taken for info in app.shards(queue))
    for jobs in reversed(lists):
        for job in jobs:
            job.ack()
    assert (counts(queue), queue.stats().processed) == ((0, 0, 0), 100)


def test_what_was_pushed_before_is_there_without_waiting(queue: Queue, consumer: Consumer) -> None:
    """Also before the message that wakes the consumer has come."""
    for n in range(50):
        queue.push({"id": n})
        assert [job.id for job in consumer.take(timeout=0)] == [str(n)]
    assert consumer.take(timeout=0) == consumer.take(timeout=timedelta(milliseconds=1)) == []


def test_who_waits_gets_what_comes_or_becomes_due_also_with_jobs_in_hand(queue: Queue, consumer: Consumer) -> None:
    queue.push([{"id": n} for n in range(10)])
    assert len(take(consumer, 10)) == 10
    for options in ({}, {"delay": 0.2}):
        with case(options):
            got: list[ConsumerJob] = []
            thread = threading.Thread(target=lambda got=got: got.extend(take(consumer)))
            thread.start()
            queue.push({"id": f"late{options}", **options})
            thread.join(PATIENCE)
            assert [job.id for job in got] == [f"late{options}"]


def test_a_paused_queue_gives_nothing_until_it_is_resumed(queue: Queue, consumer: Consumer) -> None:
    queue.push({"id": "a"})
    queue.pause()
    assert consumer.take(timeout=0.05) == []
    queue.resume()
    assert [job.id for job in take(consumer)] == ["a"]


def test_arguments_that_make_no_sense_are_refused(app: lowq.Lowq, queue: Queue, consumer: Consumer) -> None:
    limits: list[Any] = [0, 10_001, True, 1.5, None]
    timeouts: list[Any] = [-1, float("nan"), float("inf"), True, "5"]
    options: list[dict[str, Any]] = [{"ttr": 0}, {"ttr": "60"}, {"ttr": True}, {"session": ""}, {"session": "x" * 513}]
    rows: list[tuple[str, Callable[[], object]]] = [
        *(("limit=", lambda limit=limit: consumer.take(limit, timeout=0)) for limit in limits),
        *(("timeout=", lambda timeout=timeout: consumer.take(timeout=timeout)) for timeout in timeouts),
        *((next(iter(some)), lambda some=some: queue.consumer(**some)) for some in options),
    ]
    for name, call in rows:
        with case(name), pytest.raises(ConfigError, match=name):
            call()
    with pytest.raises(UnknownQueueError, match="'nobody'"):
        app.queue("nobody").consumer()


def test_what_can_not_be_decoded_goes_to_the_morgue(queue: Queue, consumer: Consumer, app: lowq.Lowq) -> None:
    queue.push([{"id": "a", "payload": "spoilt"}, {"id": "b"}])
    prefix = shard_prefix("lowq", "mail", shard_of(b"a", 4))
    app.client.command("HSET", f"{prefix}payloads", "a", "1 {", key=prefix)
    taken = [job for _ in range(3) for job in consumer.take(10, timeout=0)]
    assert [job.id for job in taken] == ["b"]
    assert counts(queue) == (0, 1, 1)
    assert "can't be decoded" in (queue.jobs("morgue").jobs[0].error or "")


# --- report ---


def test_a_job_becomes_what_is_reported(queue: Queue, consumer: Consumer) -> None:
    queue.push({"id": "a", "payload": 1})
    take(consumer)[0].release()
    (job,) = take(consumer)
    assert (job.payloads, job.retry_count) == ([1], -1)
    job.fail(ValueError("out of stock"), delay=0)
    (job,) = take(consumer)
    assert job.retry_count == 0
    job.release(NEVER)
    assert (consumer.take(timeout=0), queue.stats().scheduled) == ([], 1)
    queue.perform_now("a")
    take(consumer)[0].fail("again")
    (waiting,) = queue.jobs("retrying").jobs
    assert (waiting.retry_count, waiting.error, queue.stats().failed) == (1, "again", 2)
    queue.perform_now("a")
    take(consumer)[0].bury("no such address")
    (buried,) = queue.jobs("morgue").jobs
    assert (buried.error, counts(queue)) == ("no such address", (0, 0, 1))


def test_what_a_worker_says_of_its_queue_holds_also_where_only_the_name_is_known(
    app: lowq.Lowq, store_url: str
) -> None:
    """Without a retry left the oldest payload is buried."""

    @app.worker(shards_count=2, max_retry_count=0, max_payloads=1, queue_name="strict")
    def strict(payloads_by_id: dict[str, list[Any]]) -> None: ...

    strict.perform_async([{"id": "a", "payload": n, "score": n} for n in (1, 2, 3)])
    call = app.registrations.call("strict", 2, strict)
    app.client.call(call)  # as a node enters it
    other = lowq.Lowq(redis_url=store_url)
    for number, queue in enumerate((strict.queue, other.queue("strict")), 1):
        with case(number), queue.consumer() as consumer:
            (job,) = take(consumer)
            assert job.payloads == [number]
            job.fail("no")
            (buried,) = queue.jobs("morgue").jobs
            assert [payload for payload, _ in buried.payloads] == [*range(1, number + 1)]
    other.close()


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


def test_a_receipt_that_is_forged_or_of_another_consumer_is_refused(queue: Queue, open_consumer: Open) -> None:
    queue.push([{"id": n} for n in range(20)])
    one, consumer = open_consumer(), open_consumer()
    (job,) = take(one)
    before = counts(queue)
    rows: list[Any] = ["", "mail:0:1:a", "mail:99:1:a", None, b"mail:0:1:a", job.receipt]
    for receipt in rows:
        with case(receipt):
            for report in (consumer.ack, consumer.release, consumer.bury, consumer.fail):
                with pytest.raises(NotTaken):
                    report(receipt)
            with pytest.raises(NotTaken):
                consumer.touch(receipt, 5)
    assert counts(queue) == before
    job.ack()


def test_a_report_that_is_wrong_leaves_the_job_in_hand(queue: Queue, consumer: Consumer) -> None:
    queue.push({"id": "a"})
    (job,) = take(consumer)
    rows: list[tuple[Callable[..., None], tuple[Any, ...]]] = [
        (job.release, ("soon",)), (job.release, (float("nan"),)), (job.bury, (5,)), (job.fail, (5,)),
        (job.fail, ("x", "soon")), (job.touch, (0,)), (job.touch, (float("nan"),)), (job.touch, ("x",)),
    ]  # fmt: skip
    for report, args in rows:
        with case(report, args), pytest.raises(lowq.LowqError):
            report(*args)
    job.ack()


# --- batches ---


def test_the_next_batch_acknowledges_what_was_not_reported_of_the_last(queue: Queue, consumer: Consumer) -> None:
    queue.push([{"id": n} for n in range(50)])
    seen: list[int] = []
    for jobs in consumer.batches(7, timeout=0):
        assert queue.stats().taken == len(jobs)
        seen += [int(job.id) for job in jobs]
        for job in jobs:
            if int(job.id) % 2:
                job.bury("odd")
    assert sorted(seen) == list(range(50))
    assert (counts(queue), queue.stats().processed) == ((0, 0, 25), 25)


def test_a_batch_that_is_not_finished_waits_again(queue: Queue) -> None:
    queue.push([{"id": n} for n in range(10)])
    with queue.consumer() as consumer, pytest.raises(RuntimeError):  # noqa: PT012  # the loop is what is left
        for _ in consumer.batches(4):
            raise RuntimeError
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


def test_past_ttr_a_job_waits_again_charged_with_a_crash(app: lowq.Lowq) -> None:
    # Where the machine stands still before a job is handed over, that one counts as well.
    queue = app.queue("mail", 4, max_crash_count=6)
    queue.push({"id": "a", "payload": 1})
    with queue.consumer(ttr=0.05) as consumer:
        exceed_ttr(queue, consumer)


def exceed_ttr(queue: Queue, consumer: Consumer) -> None:
    (job,) = take(consumer)
    (again,) = take(consumer)
    assert (again.id, again.payloads) == ("a", [1])
    with pytest.raises(NotTaken):
        job.ack()
    assert again.receipt != job.receipt
    until(lambda: consumer.take(timeout=0) == [] and counts(queue) == (0, 0, 1), "the last crash")
    assert "exceeded ttr" in (queue.jobs("morgue").jobs[0].error or "")


def test_touch_shortens_and_lengthens_ttr(queue: Queue, open_consumer: Open) -> None:
    consumer = open_consumer(ttr=NEVER)
    queue.push([{"id": "a"}, {"id": "b"}])
    jobs = {job.id: job for job in take(consumer, 2)}
    jobs["b"].touch(PATIENCE)
    for job_id, seconds in (("a", PATIENCE), ("b", 0.01), ("a", NEVER)):
        jobs[job_id].touch(seconds)
    assert [job.id for job in take(consumer)] == ["b"]
    jobs["a"].ack()


# --- the end ---


def test_what_is_in_hand_waits_again_when_the_consumer_is_closed(queue: Queue, app: lowq.Lowq) -> None:
    queue.push([{"id": n} for n in range(5)])
    with queue.consumer() as consumer:
        jobs = take(consumer, 5)
        (node,) = app.nodes()
        assert (node.name, node.kind, node.threads, node.queues) == (consumer.name, "consumer", 0, ("mail",))
    assert (counts(queue), app.nodes()) == ((5, 0, 0), [])
    for call in (jobs[0].ack, consumer.take):
        with pytest.raises(ConsumerClosed):
            call()
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
    one.detach()
    with pytest.raises(ConsumerClosed):
        one.ack(jobs[0].receipt)
    other = open_consumer(session="bob")
    with pytest.raises(NotTaken):
        other.ack(jobs[0].receipt)
    assert other.take(timeout=0) == []
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
    two = open_consumer(session="ann", ttr=0.5)
    assert [job.id for job in take(two)] == ["a"]


def test_a_session_is_for_one_at_a_time(queue: Queue, open_consumer: Open) -> None:
    one = open_consumer(session="ann")
    with pytest.raises(SessionInUse, match="'ann'"):
        queue.consumer(session="ann")
    open_consumer(session="bob")
    one.close()
    open_consumer(session="ann")


# --- with others ---


def test_consumers_share_the_shards_but_one_with_jobs_in_hand_is_kept(
    queue: Queue, open_consumer: Open, app: lowq.Lowq
) -> None:
    def held() -> list[int]:
        return sorted(len(node.shards.get("mail", ())) for node in app.nodes())

    queue.push([{"id": n} for n in range(40)])
    one = open_consumer()
    jobs = take(one, 40)
    two = open_consumer()
    assert (two.take(timeout=0), held()) == ([], [0, 4])
    for job in jobs:
        job.ack()
    until(lambda: held() == [2, 2], "two shards for each of them")
    queue.push([{"id": n} for n in range(100)])
    mine, others = ({job.id for _ in range(9) for job in each.take(100, timeout=0)} for each in (one, two))
    assert mine
    assert others
    assert not mine & others
    assert len(mine) + len(others) == 100


# --- what a consumer sweeps ---


def test_what_expires_while_nobody_takes_is_swept(app: lowq.Lowq) -> None:
    queue = app.queue("news", 2, ttl=0.01)
    with queue.consumer() as consumer:
        queue.put("expires")
        queue.push({"id": "never", "ttl": None})
        mine = [queue.put("own", ttl=timedelta(hours=1)), "never"]
        queue.push([{"id": number, "payload": "expires"} for number in range(200)])
        until(lambda: queue.stats().expired == 201)
        assert sorted(job.id for job in take(consumer, 2)) == sorted(mine)


def test_the_morgue_is_bounded(app: lowq.Lowq) -> None:
    for name, options, left in (("letters", {"morgue_max": 6}, 6), ("short", {"morgue_ttl": 0.01}, 0)):
        with case(name):
            queue = app.queue(name, 2, **options)
            queue.push([{"id": n} for n in range(50)])
            queue.bury(range(50))
            with queue.consumer():
                until(lambda: queue.stats().morgue_length == left)  # noqa: B023


# --- jobs that are to end ---


def test_a_job_that_is_cancelled_says_so_and_is_removed_unless_it_is_done(queue: Queue, consumer: Consumer) -> None:
    queue.push([{"id": name} for name in "abc"])
    released, done, other = sorted(take(consumer, 3), key=lambda job: job.id)
    assert queue.cancel(["a", "b"]).running == ("a", "b")
    until(lambda: released.is_cancelled and done.is_cancelled, "the news")
    assert not other.is_cancelled
    released.release(5)
    done.ack()
    other.release()
    stats = queue.stats()
    assert (stats.cancelled, stats.processed, stats.length, stats.taken) == (1, 1, 1, 0)
    assert not released.is_cancelled


def test_a_newer_payload_says_the_same_where_the_queue_has_it_so(app: lowq.Lowq) -> None:
    queue = app.queue("builds", shards_count=1, on_push="cancel_running")
    with queue.consumer() as consumer:
        queue.push("a", "old", score=1)
        (job,) = take(consumer)
        queue.push("a", "new", score=2)
        until(lambda: job.is_cancelled, "the news")
        job.release()
        (job,) = take(consumer)
        assert job.payloads == ["old", "new"]
        job.ack()
