"""Consumers that take list after list: the next one is sent for before the last one is read."""

import asyncio
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

import lowq
from lowq.clock import now
from lowq.consumer import Consumer, ConsumerJob
from lowq.consumer import takes as module
from lowq.errors import NotTaken
from lowq.queue import Queue
from lowq.sharding import shard_of
from lowq.store.keys import shard_prefix
from tests.rows import case
from tests.rules.consumer.line import Line, is_take
from tests.waiting import NEVER, PATIENCE, until

on_redis = pytest.mark.parametrize("store_url", ["redis"], indirect=True)


@pytest.fixture(autouse=True)
def any_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is, the second list is asked for at once, and what was taken ahead is kept."""
    monkeypatch.setattr(module, "AHEAD_AFTER", 1)
    monkeypatch.setattr(module, "AHEAD_GAP", NEVER)
    monkeypatch.setattr(module, "AHEAD_SECONDS", NEVER)


@pytest.fixture
def consumer(queue: Queue) -> Iterator[Consumer]:
    with queue.consumer(session="ann", ttr=NEVER) as consumer:
        yield consumer


def two_lists(queue: Queue, consumer: Consumer, **options: Any) -> tuple[Iterator[list[ConsumerJob]], list[str]]:
    """Lists of five, of which two were handed over, and a third one was taken ahead; and the ids of the second."""
    queue.push([{"id": n, "payload": n, **options} for n in range(40)])
    lists = consumer.batches(5, timeout=PATIENCE)
    next(lists)
    second = [job.id for job in next(lists)]
    until(lambda: queue.stats().taken == 10, "the third list, taken ahead")
    return lists, second


def test_every_job_comes_once_and_in_the_order_of_its_id(queue: Queue, consumer: Consumer) -> None:
    queue.push([{"id": n % 20, "payload": n, "score": n} for n in range(40)])
    seen: dict[str, list[int]] = {}
    pushed = 40
    for jobs in consumer.batches(3, timeout=0):
        for job in jobs:
            seen.setdefault(job.id, []).extend(job.payloads)
            if pushed < 200:  # also while it is in hand
                queue.push({"id": job.id, "payload": pushed, "score": pushed})
                pushed += 1
    assert sorted(one for payloads in seen.values() for one in payloads) == list(range(200))
    assert all(payloads == sorted(payloads) for payloads in seen.values())
    assert (queue.stats().taken, queue.stats().length) == (0, 0)


@on_redis
def test_one_write_acknowledges_a_list_and_takes_the_next_but_one_of_another_shard(
    queue: Queue, consumer: Consumer, line: Line
) -> None:
    lists, second = two_lists(queue, consumer)
    line.writes.clear()
    third = next(lists)
    (write,) = line.writes
    *acks, taken = write
    assert sorted(one.decode() for ack in acks for one in ack.args[7:]) == sorted(second)
    assert is_take(taken)
    assert taken.key not in {shard_prefix("lowq", "mail", shard_of(job.id.encode(), 4)) for job in third}


@on_redis
def test_of_a_single_shard_each_list_comes_with_the_acknowledgement_of_the_last(app: lowq.Lowq) -> None:
    queue = app.queue("one", 1)
    queue.push([{"id": n} for n in range(23)])
    with queue.consumer() as consumer:
        sizes = [len(jobs) for jobs in consumer.batches(5, timeout=0)]
    assert sizes == [5, 5, 5, 5, 3]
    assert (queue.stats().processed, queue.stats().taken) == (23, 0)


@on_redis
def test_who_is_slow_or_asks_beside_others_has_nothing_taken_ahead(
    queue: Queue, consumer: Consumer, line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue.push([{"id": n} for n in range(40)])
    monkeypatch.setattr(module, "AHEAD_GAP", -1.0)
    assert sum(map(len, consumer.batches(5, timeout=0))) == 40
    monkeypatch.setattr(module, "AHEAD_GAP", NEVER)
    got: list[ConsumerJob] = []
    thread = threading.Thread(target=lambda: got.extend(consumer.take(timeout=PATIENCE)))
    thread.start()
    until(lambda: line.waiting, "somebody who waits")
    lists = consumer.batches(5, timeout=0.01)
    assert list(lists) == []
    queue.push({"id": "late"})
    thread.join(PATIENCE)
    assert [job.id for job in got] == ["late"]
    assert line.ahead == 0


@on_redis
def test_who_takes_lists_and_reports_each_job_has_nothing_sent_ahead(
    queue: Queue, consumer: Consumer, line: Line
) -> None:
    queue.push([{"id": n} for n in range(40)])
    while jobs := consumer.take(5, timeout=0):
        for job in jobs:
            job.ack()
    assert line.ahead == 0


@on_redis
@pytest.mark.parametrize("leave", ["nobody asks", Consumer.quiet, Consumer.close, Consumer.detach])
def test_what_nobody_asked_for_waits_again_uncharged(
    queue: Queue, consumer: Consumer, leave: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lists, second = two_lists(queue, consumer)
    if isinstance(leave, str):
        monkeypatch.setattr(module, "AHEAD_SECONDS", 0.01)
        next(lists)  # which acknowledges the second
        lists.close()  # type: ignore[attr-defined]  # a generator
    else:
        leave(consumer)
    kept = 0 if leave is Consumer.close else 5
    until(lambda: queue.stats().taken == kept, "what was taken ahead has been given back")
    waiting = [job for job in queue.jobs().jobs if job.state == "due"]
    assert {(job.retry_count, job.crashes) for job in waiting} == {(-1, 0)}
    assert queue.stats().processed == (10 if isinstance(leave, str) else 5)
    if leave is Consumer.detach:
        assert sorted(job.id for job in queue.jobs("taken").jobs) == sorted(second)


@on_redis
def test_what_is_given_back_calls_nothing_of_the_application_in_the_maintenance_loop(
    app: lowq.Lowq, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It must not wait for that, or the leases run out."""
    threads: set[str] = set()

    def merge(payloads: list[int]) -> list[int]:
        threads.add(threading.current_thread().name)
        return payloads

    queue = app.queue("merged", 4, merge=merge)
    with queue.consumer() as consumer:
        two_lists(queue, consumer)
        monkeypatch.setattr(module, "AHEAD_SECONDS", 0.01)
        consumer._taker._watch_ahead()
        until(lambda: queue.stats().taken == 5, "what was taken ahead has been given back")
    assert "lowq-ahead" in threads
    assert not [name for name in threads if "maintenance" in name]


@on_redis
def test_a_report_of_what_is_being_acknowledged_is_refused(queue: Queue, consumer: Consumer) -> None:
    queue.push([{"id": n} for n in range(40)])
    lists = consumer.batches(5, timeout=PATIENCE)
    next(lists)
    second = next(lists)
    next(lists)
    reports: list[Callable[[ConsumerJob], object]] = [
        ConsumerJob.ack, ConsumerJob.fail, ConsumerJob.bury, ConsumerJob.release, lambda job: job.touch(5),
    ]  # fmt: skip
    for job, report in zip(second, reports, strict=True):
        with pytest.raises(NotTaken):
            report(job)
    assert queue.stats().processed == 10


@on_redis
def test_what_was_reported_by_hand_is_not_acknowledged(queue: Queue, consumer: Consumer) -> None:
    queue.push([{"id": n} for n in range(40)])
    for number, jobs in enumerate(consumer.batches(5, timeout=0)):
        if number % 3 == 0:
            jobs[0].bury("no")
    assert queue.stats().morgue_length > 1
    assert queue.stats().processed + queue.stats().morgue_length == 40


@on_redis
def test_ttr_begins_when_a_list_is_handed_over_and_ends_with_its_acknowledgement(queue: Queue) -> None:
    with queue.consumer(ttr=0.5) as consumer:
        lists, second = two_lists(queue, consumer)
        begun = now()
        until(lambda: now() > begun + 1.0, "the end of all ttr")
        until(lambda: queue.stats().taken == 5, "the release of the second list")
        crashed = {job.id for job in queue.jobs().jobs if job.crashes}
        assert crashed == set(second)
        for job in next(lists):
            assert job.id not in crashed
            job.release()


@on_redis
def test_a_solo_job_comes_alone_and_nothing_else_is_in_flight(app: lowq.Lowq, queue: Queue, consumer: Consumer) -> None:
    ids = [str(number) for number in range(30)]
    solos = set(ids[::5])
    for shard in range(4):
        prefix = shard_prefix("lowq", "mail", shard)
        app.client.command("SADD", f"{prefix}solo", *solos, key=prefix)
    queue.push([{"id": job_id} for job_id in ids])
    seen: list[str] = []
    for jobs in consumer.batches(3, timeout=PATIENCE):
        if solos & {job.id for job in jobs}:
            assert len(jobs) == 1
            assert queue.stats().taken == 1
        seen += [job.id for job in jobs]
        if len(set(seen)) == len(ids):
            break
    assert sorted(seen) == sorted(ids)


@on_redis
@pytest.mark.parametrize("how", ["call", "reply"])
@pytest.mark.parametrize("lost", ["acknowledgement", "take", "both"])
def test_without_an_answer_nothing_is_lost_and_no_id_is_out_twice(
    queue: Queue, consumer: Consumer, lost: str, how: str, line: Line
) -> None:
    queue.push([{"id": n, "payload": n} for n in range(60)])

    def loses(call: Any) -> str:
        is_meant = lost == "both" or is_take(call) == (lost == "take")
        return how if is_meant and line.is_ahead and line.ahead % 2 else ""

    line.loses = loses
    seen = [job.payload for jobs in consumer.batches(5, timeout=0) for job in jobs]
    assert line.ahead > 3
    assert sorted(seen) == list(range(60))
    assert (queue.stats().processed, queue.stats().taken) == (60, 0)


@on_redis
def test_of_a_lease_that_was_lost_nothing_that_was_taken_ahead_is_handed_over(store_url: str) -> None:
    lost = "redis.call('DEL', KEYS[1] .. 'lease') redis.call('HSET', KEYS[1] .. 'meta', 'owner', 'another')"
    app = lowq.Lowq(redis_url=store_url, lease_ttl=6)  # so that its loss is noticed soon
    with closing(app), app.queue("mail", 4).consumer() as consumer:
        queue = app.queue("mail")
        lists, _ = two_lists(queue, consumer)
        fences = {}
        for shard in range(4):
            prefix = shard_prefix("lowq", "mail", shard)
            fences[shard] = int(app.client.command("HGET", f"{prefix}meta", "fence", key=prefix))
            app.client.command("EVAL", lost, 1, prefix)
        until(lambda: all(one.lease.current is None or one.lease.current.fence > fences[one.index]
                          for one in consumer._broker.shards), "that it is noticed")  # fmt: skip
        seen = 0
        for jobs in lists:
            for job in jobs:
                assert job.fence > fences[shard_of(job.id.encode(), 4)]
            seen += len(jobs)
            if queue.stats().processed + queue.stats().taken == 40:
                break
        assert seen


@on_redis
def test_an_interrupt_leaves_nothing_in_nobodys_hand(queue: Queue, line: Line) -> None:
    def strike() -> None:
        raise KeyboardInterrupt

    for name, moment in (("before", line.before), ("after", line.after)):
        before = queue.stats().processed
        with case(name), queue.consumer() as consumer:
            lists, _ = two_lists(queue, consumer)
            moment.append(strike)
            with pytest.raises(KeyboardInterrupt):
                for _ in lists:
                    pass
            until(lambda: queue.stats().taken <= 5, "what nobody got has been given back")
            assert all(consumer.batches(5, timeout=0))
            stats = queue.stats()
            assert (stats.taken + stats.processed - before, stats.taken <= 5) == (40, True)
        queue.clear()


@on_redis
def test_lists_of_async_code_are_taken_ahead(queue: Queue, line: Line) -> None:
    queue.push([{"id": n, "payload": n} for n in range(40)])

    async def scenario() -> list[int]:
        seen: list[int] = []
        async with queue.aconsumer() as consumer:
            async for jobs in consumer.batches(5, timeout=0):
                seen += [job.payload for job in jobs]
                if len(seen) == 20:
                    break
            for job in jobs:
                await job.ack()
            async for jobs in consumer.batches(5, timeout=0):
                seen += [job.payload for job in jobs]
        return seen

    assert sorted(asyncio.run(scenario())) == list(range(40))
    assert line.ahead > 2
    assert (queue.stats().processed, queue.stats().taken) == (40, 0)


KILLED = """
import sys
import lowq
from lowq.consumer import takes
takes.AHEAD_AFTER, takes.AHEAD_GAP, takes.AHEAD_SECONDS = 1, 600.0, 600.0
app = lowq.Lowq(redis_url=sys.argv[1], lease_ttl=2)
for jobs in app.queue("mail", 4).consumer().batches(5, timeout=60):
    print(*(job.id for job in jobs), flush=True)
    sys.stdin.readline()
"""


def test_of_a_process_that_dies_in_between_all_comes_again_but_what_was_acknowledged(redis_url: str) -> None:
    with closing(lowq.Lowq(redis_url=redis_url, lease_ttl=2)) as app:
        queue = app.queue("mail", 4)
        queue.push([{"id": n} for n in range(40)])
        command = [sys.executable, "-c", KILLED, redis_url]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            lists = []
            for _ in range(4):
                lists.append(process.stdout.readline().split())
                process.stdin.write("\n")
                process.stdin.flush()
            lists.append(process.stdout.readline().split())
            acknowledged = [job_id for jobs in lists[:4] for job_id in jobs]
            until(lambda: queue.stats().processed == len(acknowledged), "the acknowledgement of four lists")
            until(lambda: queue.stats().taken > len(lists[4]), "a list that was taken ahead")
            process.send_signal(signal.SIGKILL)
        with queue.consumer() as consumer:
            seen: list[str] = []
            while len(seen) < 40 - len(acknowledged):
                for job in consumer.take(5, timeout=PATIENCE):
                    seen.append(job.id)
                    job.ack()
        assert sorted(map(int, acknowledged + seen)) == list(range(40))
        assert queue.stats().processed == 40
