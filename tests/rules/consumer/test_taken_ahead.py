"""Consumers that take one job after the other: the acknowledgement of one takes the next."""

import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from typing import Any

import pytest

import lowq
from lowq.clock import now
from lowq.consumer import Consumer, ConsumerJob
from lowq.consumer import takes as module
from lowq.errors import NotTaken, RedisUnavailable, ScriptError
from lowq.queue import Queue
from lowq.store.keys import shard_prefix
from tests.rules.consumer.line import Line, is_take, take
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


def one_by_one(consumer: Consumer, count: int) -> ConsumerJob:
    """Takes so many jobs and acknowledges them, but the last one."""
    for _ in range(count - 1):
        consumer.take(timeout=PATIENCE)[0].ack()
    return consumer.take(timeout=PATIENCE)[0]


def go_on(queue: Queue, consumer: Consumer, **options: Any) -> None:
    """Pushes a job, takes one and acknowledges it. That this brings another one is not certain: a wake-up that comes
    late has the consumer look where there is nothing.
    """
    queue.push({"id": str(uuid.uuid4()), **options})
    for job in consumer.take(timeout=0):  # none where it has expired already
        job.ack()


def taken_ahead(queue: Queue, consumer: Consumer, count: int = 10, **options: Any) -> str:
    """The id of a job that was taken with an acknowledgement, and that nobody has asked for. So many were pushed; those
    that are left have these options.
    """
    queue.push([{"id": n} for n in range(5)])
    job = one_by_one(consumer, 5)
    queue.push([{"id": n, **options} for n in range(5, count)])
    job.ack()
    while not (taken := queue.jobs("taken").jobs):
        go_on(queue, consumer, **options)
    (ahead,) = taken
    return ahead.id


def waiter(consumer: Consumer, got: list[ConsumerJob]) -> threading.Thread:
    return threading.Thread(target=lambda: got.extend(consumer.take(timeout=PATIENCE)))


def test_every_job_comes_once_and_most_with_the_acknowledgement_of_the_last(
    queue: Queue, consumer: Consumer, line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue.push([{"id": n, "payload": n} for n in range(50)])
    seen: list[int] = []
    while jobs := consumer.take(timeout=0):
        seen.append(jobs[0].payload)
        jobs[0].ack()
    assert sorted(seen) == list(range(50))
    assert sum(len(calls) == 2 for calls in line.writes) >= 25
    assert (queue.stats().taken, queue.stats().processed) == (0, 50)
    monkeypatch.setattr(module, "AHEAD_GAP", -1.0)  # of who does not acknowledge at once
    queue.push([{"id": n} for n in range(10)])
    one_by_one(consumer, 8).ack()
    assert queue.stats().taken == 0


def test_what_was_taken_ahead_and_has_expired_is_not_handed_out(queue: Queue, consumer: Consumer) -> None:
    ahead = taken_ahead(queue, consumer, ttl=0.3)
    expired_at = now() + 0.3
    until(lambda: now() > expired_at, "the end of its time")
    assert ahead not in [job.id for job in consumer.take(10, timeout=0)]
    until(lambda: queue.stats().taken == 0, "the job given back")
    assert queue.stats().expired >= 1


def test_nothing_is_taken_ahead_of_somebody_who_waits(queue: Queue, consumer: Consumer, line: Line) -> None:
    queue.push([{"id": n} for n in range(5)])
    job, got = one_by_one(consumer, 5), list[ConsumerJob]()
    thread = waiter(consumer, got)
    thread.start()
    until(lambda: line.waiting, "somebody who waits")
    queue.push({"id": "late"})
    job.ack()
    thread.join(PATIENCE)
    assert [job.id for job in got] == ["late"]


def test_who_has_come_to_wait_meanwhile_gets_what_was_taken_ahead(queue: Queue, consumer: Consumer, line: Line) -> None:
    queue.push([{"id": n} for n in range(6)])
    job, got = one_by_one(consumer, 5), list[ConsumerJob]()
    thread = waiter(consumer, got)

    def come() -> None:
        if len(line.writes[-1]) == 2:
            thread.start()
            until(lambda: line.waiting, "somebody who waits")
        else:
            line.after.append(come)

    line.after.append(come)
    job.ack()
    while not thread.ident:
        go_on(queue, consumer)
    thread.join(PATIENCE)
    assert len(got) == 1


def test_what_is_acknowledged_on_the_spot_takes_nothing_ahead_in_its_turn(app: lowq.Lowq) -> None:
    """The merge function leaves no payload, so the job is done as it comes."""
    queue = app.queue("merged", 4, merge=lambda payloads: [one for one in payloads if one < 5])
    queue.push([{"id": n, "payload": n, "score": n} for n in range(30)])
    with queue.consumer() as consumer:
        for _ in range(5):
            consumer.take(timeout=PATIENCE)[0].ack()
        until(lambda: consumer.take(timeout=0) == [] and queue.stats().processed == 30, "the end of all jobs")


def test_who_takes_several_at_a_time_gets_what_was_taken_ahead_among_them(queue: Queue, consumer: Consumer) -> None:
    ahead = taken_ahead(queue, consumer)
    jobs = consumer.take(5, timeout=0)
    assert ahead in [job.id for job in jobs]
    while len(jobs) < 5:  # the wake-up of a shard may come late
        jobs += consumer.take(5 - len(jobs), timeout=PATIENCE)
    assert queue.stats().taken == 5


def test_what_nobody_asks_for_waits_again_uncharged(
    queue: Queue, consumer: Consumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "AHEAD_SECONDS", 0.01)
    queue.push([{"id": n} for n in range(10)])
    one_by_one(consumer, 5).ack()
    until(lambda: queue.stats().taken == 0, "what was taken ahead has been given back")
    assert {(job.state, job.retry_count, job.crashes) for job in queue.jobs().jobs} == {("due", -1, 0)}
    assert queue.stats().length == 5


@pytest.mark.parametrize("leave", [Consumer.close, Consumer.detach, Consumer.quiet])
def test_who_leaves_gives_it_back(queue: Queue, consumer: Consumer, leave: Callable[[Consumer], None]) -> None:
    taken_ahead(queue, consumer)
    leave(consumer)
    until(lambda: queue.stats().taken == 0, "what was taken ahead has been given back")
    assert queue.stats().length == 5


def test_ttr_begins_when_it_is_handed_over(queue: Queue) -> None:
    ttr, is_known = 1.0, False
    with queue.consumer(ttr=ttr) as consumer:
        while not is_known:  # until the machine has not stood still just here
            ahead, begun = taken_ahead(queue, consumer), now()
            until(lambda begun=begun: now() > begun + ttr / 2)  # type: ignore[misc]  # a default binds it
            handed_over = now()
            jobs = consumer.take(timeout=0)
            until(lambda begun=begun: now() > begun + ttr * 1.2)  # type: ignore[misc]
            for job in jobs:
                try:
                    job.ack()
                    is_known |= job.id == ahead
                except NotTaken:
                    assert now() > handed_over + ttr


def test_of_a_lease_that_was_lost_nothing_is_handed_over(store_url: str, line: Line) -> None:
    """Not even while it is asked for again: whether it is resumed is not known then."""
    prefix = shard_prefix("lowq", "mail", 0)
    lost = "redis.call('DEL', KEYS[1] .. 'lease') redis.call('HSET', KEYS[1] .. 'meta', 'owner', 'another')"
    app = lowq.Lowq(redis_url=store_url, lease_ttl=6)  # so that its loss is noticed soon
    meanwhile: list[list[ConsumerJob]] = []

    def take_meanwhile(call: Any) -> str:
        if getattr(call, "script", "") == "acquire":
            meanwhile.append(reader.take(timeout=0))
        return ""

    with closing(app), app.queue("mail", 1).consumer() as reader:
        taken_ahead(app.queue("mail"), reader)
        fence = int(app.client.command("HGET", f"{prefix}meta", "fence", key=prefix))
        line.loses = take_meanwhile
        app.client.command("EVAL", lost, 1, prefix)
        until(lambda: meanwhile, "a lease that is asked for again")
        (job,) = reader.take(timeout=PATIENCE)
        assert job.fence > fence
        assert not any(meanwhile)


def test_an_acknowledgement_that_fails_keeps_its_job_in_hand_and_what_came_with_it(
    queue: Queue, consumer: Consumer, line: Line
) -> None:
    queue.push([{"id": n} for n in range(10)])
    job = one_by_one(consumer, 5)
    line.loses = lambda call: "error" if len(line.writes[-1]) == 2 and call is line.writes[-1][0] else ""
    failed: list[ConsumerJob] = []
    while not failed:  # until one brings another job
        try:
            job.ack()
        except ScriptError:
            failed.append(job)
        else:
            go_on(queue, consumer)
            (job,) = take(consumer)
    line.loses = lambda _call: ""
    assert queue.stats().taken == 2
    (ahead,) = consumer.take(timeout=0)
    assert queue.stats().taken == 2
    for one in (*failed, ahead):
        one.ack()


@pytest.mark.parametrize("lost", ["acknowledgement", "take", "both"])
def test_without_an_answer_nothing_is_lost_and_no_id_is_out_twice(
    queue: Queue, consumer: Consumer, lost: str, line: Line
) -> None:
    queue.push([{"id": n, "payload": n} for n in range(30)])
    count = 0

    def loses(call: Any) -> str:
        nonlocal count
        calls = line.writes[-1] if line.writes else []
        if len(calls) != 2 or call not in calls:
            return ""
        count += call is calls[0]
        return "reply" if count % 2 and lost in ("both", "take" if is_take(call) else "acknowledgement") else ""

    line.loses = loses
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
