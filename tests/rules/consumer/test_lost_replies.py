"""Consumers whose calls get no answer: nothing is left in hand of nobody, no id is out twice."""

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from math import inf
from typing import Any

import pytest

import lowq
from lowq.consumer import Consumer, ConsumerJob
from lowq.consumer.hand import Hand
from lowq.errors import ConsumerClosed, NotTaken, RedisUnavailable
from lowq.queue import Queue
from lowq.sharding import shard_of
from lowq.store import Client
from lowq.store.keys import shard_prefix
from tests.rows import case
from tests.rules.consumer.line import Line, is_take, take
from tests.waiting import NEVER, PATIENCE, until

pytestmark = pytest.mark.parametrize("store_url", ["redis"], indirect=True)


@pytest.mark.parametrize("how", ["call", "reply"])
def test_what_came_before_a_round_trip_without_an_answer_is_handed_over(
    queue: Queue, consumer: Consumer, line: Line, how: str
) -> None:
    queue.push([{"id": n} for n in range(40)])
    takes: list[str] = []

    def loses(call: Any) -> str:
        if is_take(call) and call.key not in takes:
            takes.append(call.key)
        return how if is_take(call) and len(takes) > 1 else ""

    line.loses = loses
    jobs = consumer.take(1000, timeout=PATIENCE)
    assert 0 < len(jobs) < 40
    line.loses = lambda _call: ""
    jobs += take(consumer, 40 - len(jobs))
    for job in jobs:
        job.ack()
    assert sorted(int(job.id) for job in jobs) == list(range(40))
    assert queue.stats().processed == 40


def test_a_report_that_is_repeated_when_the_id_is_out_again_does_not_let_it_out_twice(
    queue: Queue, consumer: Consumer, line: Line
) -> None:
    rows: list[tuple[str, Callable[[ConsumerJob], None]]] = [
        ("release", lambda job: job.release()),
        ("fail", lambda job: job.fail("no", delay=0)),
        ("ack_and_take", lambda job: job.ack()),
    ]
    for script, report in rows:
        with case(script):
            queue.push({"id": "a", "payload": 1})
            (first,) = take(consumer)
            queue.push({"id": "a", "payload": 2})
            line.loses = lambda call: "reply" if call.script == script and not is_take(call) else ""  # noqa: B023
            with pytest.raises(RedisUnavailable):
                report(first)
            line.loses = lambda _call: ""
            (second,) = take(consumer)
            with suppress(NotTaken):
                report(first)
            assert consumer.take(timeout=0) == []
            second.ack()
            assert (queue.stats().taken, queue.stats().length) == (0, 0)


def test_an_acknowledgement_without_an_answer_may_be_repeated(queue: Queue, consumer: Consumer, line: Line) -> None:
    for how in ("call", "reply"):
        queue.push({"id": how})
        (job,) = take(consumer)
        line.loses = lambda call, how=how: "" if is_take(call) else how  # type: ignore[misc]  # a default binds it
        with pytest.raises(RedisUnavailable):
            job.ack()
        line.loses = lambda _call: ""
        job.ack()
    assert queue.stats().processed == 2


@pytest.mark.parametrize("how", ["call", "reply"])
def test_a_batch_is_acknowledged_though_the_first_attempt_gets_no_answer(
    queue: Queue, consumer: Consumer, line: Line, how: str
) -> None:
    queue.push([{"id": n} for n in range(30)])
    attempts: list[str] = []

    def loses(call: Any) -> str:
        if call.script == "ack_and_take" and not is_take(call) and len(call.args) > 7:
            attempts.append(call.key)
            return how if len(attempts) % 2 else ""
        return ""

    line.loses = loses
    seen: list[str] = []
    thread = threading.Thread(target=lambda: seen.extend(job.id for jobs in consumer.batches(5) for job in jobs))
    thread.start()
    # Without a timeout: when it has passed, a batch that is without an answer is not repeated.
    until(lambda: queue.stats().processed == 30, "the acknowledgement of all batches")
    line.loses = lambda _call: ""
    consumer.close()
    thread.join(PATIENCE)
    assert sorted(map(int, seen)) == list(range(30))
    assert queue.stats().processed == 30


def test_a_shard_without_an_answer_keeps_no_other_from_being_given_back(
    app: lowq.Lowq, queue: Queue, line: Line
) -> None:
    with queue.consumer(ttr=NEVER) as consumer:
        queue.push([{"id": n} for n in range(40)])
        jobs = {job.id: job for job in take(consumer, 40)}
        lost = shard_prefix("lowq", "mail", 0)
        line.loses = lambda call: "reply" if call.script == "release" and call.key == lost else ""
        for job in jobs.values():
            job.touch(0.001)
        until(lambda: not any(info.taken for info in app.shards(queue)[1:]), "what others have given back")
        again = [job for _ in range(60) for job in consumer.take(timeout=0.02)]
        ids = [job.id for job in again]
        assert len(ids) == len(set(ids))


def test_what_can_not_be_decoded_and_not_be_buried_comes_again(queue: Queue, line: Line, app: lowq.Lowq) -> None:
    shard = shard_of(b"spoilt", 4)
    prefix = shard_prefix("lowq", "mail", shard)
    sound = next(str(n) for n in range(1000) if shard_of(str(n).encode(), 4) == shard)
    queue.push([{"id": sound}, {"id": "spoilt"}])
    app.client.command("HSET", f"{prefix}payloads", "spoilt", "1 {", key=prefix)
    line.loses = lambda call: "call" if call.script == "bury" else ""
    with queue.consumer() as consumer:
        assert [job.id for job in take(consumer)] == [sound]
        line.loses = lambda _call: ""
        until(lambda: consumer.take(timeout=0.05) == [] and queue.stats().morgue_length == 1, "the payload's burial")


def test_a_session_whose_consumer_could_not_start_is_free_and_its_jobs_wait_for_the_next_attempt(
    queue: Queue, line: Line
) -> None:
    queue.push([{"id": n} for n in range(40)])
    one = queue.consumer(session="ann")
    jobs = take(one, 40)
    one.detach()
    last = shard_prefix("lowq", "mail", 3)
    for lost in ("HGET", "acquire"):
        line.loses = lambda call, lost=lost: "call" if (call.key, call.script) == (last, lost) else ""  # type: ignore[misc]
        with pytest.raises(RedisUnavailable):
            queue.consumer(session="ann")
    line.loses = lambda _call: ""
    with queue.consumer(session="ann") as two:
        for job in jobs:
            two.ack(job.receipt)
    assert queue.stats().processed == 40


def test_jobs_of_a_session_are_adopted_though_the_first_attempt_gets_no_answer(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue.push({"id": "a"})
    one = queue.consumer(session="ann")
    (job,) = take(one)
    one.detach()
    run_many = Client.run_many

    def repeated(client: Client, calls: Sequence[Any], *args: Any, **options: Any) -> list[Any]:
        run_many(client, [call for call in calls if getattr(call, "script", "") == "acquire"])
        return run_many(client, calls, *args, **options)

    monkeypatch.setattr(Client, "run_many", repeated)
    with queue.consumer(session="ann") as two:
        two.ack(job.receipt)
    assert queue.stats().processed == 1


def test_a_report_that_fails_leaves_those_of_other_shards_to_be_noted(queue: Queue, line: Line) -> None:
    with queue.consumer(ttr=NEVER) as consumer:
        queue.push([{"id": n} for n in range(12)])
        jobs = take(consumer, 12)
        failing = shard_of(jobs[0].id.encode(), 4)
        others = [job for job in jobs if shard_of(job.id.encode(), 4) != failing]
        key = shard_prefix("lowq", "mail", failing)
        line.loses = lambda call: "error" if call.script == "release" and call.key == key else ""
        for job in jobs:  # those that can't be released first
            job.touch(1e-6)
        until(lambda: queue.stats().taken == 12 - len(others), "the release of those of the other shards")
        for job in others:
            with pytest.raises(NotTaken):
                job.ack()
        line.loses = lambda _call: ""


# --- cancelled ---


def test_what_nobody_gets_is_given_back_once_redis_answers(queue: Queue, line: Line) -> None:
    with queue.consumer() as consumer:
        queue.push({"id": "a"})
        line.loses = lambda call: "call" if call.script == "release" else ""
        consumer._taker.give_back(take(consumer))  # as for a take that was cancelled
        assert consumer.take(timeout=0.1) == []
        line.loses = lambda _call: ""
        assert [job.id for job in take(consumer)] == ["a"]


def test_a_start_that_is_cancelled_leaves_no_consumer(
    queue: Queue, app: lowq.Lowq, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[Consumer] = []
    close = Consumer.close

    def noted(consumer: Consumer) -> None:
        close(consumer)
        closed.append(consumer)

    monkeypatch.setattr(Consumer, "close", noted)

    async def work() -> None:
        for delay in (0.0, 0.001, 0.01):
            consumer = queue.aconsumer()
            starting = asyncio.create_task(consumer.start())
            await asyncio.sleep(delay)
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            if not starting.cancelled():  # it was quicker
                await consumer.close()

    asyncio.run(work())  # the loop ends before they have started
    until(lambda: len(closed) == 3, "the end of each")
    assert app.nodes() == []


# --- processes ---


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes fork on Unix")
def test_a_forked_process_has_no_part_in_it(queue: Queue, consumer: Consumer) -> None:
    queue.push({"id": "a"})
    (job,) = take(consumer)
    pid = os.fork()
    if pid == 0:
        refused = 0
        try:
            for call in (job.ack, partial(consumer.take, timeout=0)):
                with suppress(ConsumerClosed):
                    call()
                    break
                refused += 1
            consumer.close()
        finally:
            os._exit(refused)  # whatever happens: it must not go on as a second test process
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 2
    job.ack()
    assert queue.stats().processed == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes fork on Unix")
def test_a_forked_process_does_not_wait_for_a_lock_that_a_thread_of_its_parent_had(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    holds, go = threading.Event(), threading.Event()

    def release_due(_hand: Hand, _now: float, _client: Client) -> float:
        holds.set()
        go.wait(PATIENCE)
        return inf

    queue.push({"id": "a"})
    with queue.consumer(ttr=NEVER) as consumer:
        (job,) = take(consumer)
        with monkeypatch.context() as patched:
            patched.setattr(Hand, "release_due", release_due)
            job.touch(NEVER / 2)  # has the maintenance loop look
            assert holds.wait(PATIENCE)
            if (pid := os.fork()) == 0:
                refused = 0
                try:
                    signal.alarm(int(PATIENCE))  # rather than to hang
                    calls = (
                        job.ack,
                        job.fail,
                        partial(job.touch, 5),
                        partial(consumer.take, timeout=0),
                        consumer.detach,
                    )
                    for call in calls:
                        with suppress(ConsumerClosed):
                            call()
                            break
                        refused += 1
                finally:
                    os._exit(refused)
            status = os.waitpid(pid, 0)[1]
            go.set()
        assert os.waitstatus_to_exitcode(status) == 5
        job.ack()
    assert queue.stats().processed == 1


def test_one_that_an_operator_has_made_quiet_waits_and_takes_nothing(
    queue: Queue, consumer: Consumer, app: lowq.Lowq, caplog: pytest.LogCaptureFixture, line: Line
) -> None:
    queue.push([{"id": n} for n in range(5)])
    (job,) = take(consumer)

    def is_quiet() -> bool:
        app.send_command(consumer.name, "quiet")  # sent once: perhaps before the consumer listens
        return caplog.text.count("has received a command") > 1  # so it has done what the first one says

    until(is_quiet, "the command")
    line.writes.clear()
    assert consumer.take(timeout=0.3) == []
    assert len(line.writes) <= 2, "it waits, and does not go round and round"
    job.ack()
    assert queue.stats().length == 4
