"""What a consumer hands over is surely its own, solo jobs come alone, and what nobody received waits again."""

import asyncio
import operator
import signal
import subprocess
import sys
import threading
from contextlib import closing, suppress
from typing import Any

import pytest

import lowq
from lowq.clock import now
from lowq.consumer import Consumer
from lowq.errors import NotTaken, RedisUnavailable, SessionInUse
from lowq.queue import Queue
from lowq.shards.delivery import InFlight
from lowq.store.keys import shard_prefix
from tests.rows import case
from tests.rules.consumer.line import Hook, Line, take
from tests.waiting import NEVER, PATIENCE, until

on_redis = pytest.mark.parametrize("store_url", ["redis"], indirect=True)


@on_redis
def test_what_was_taken_before_a_freeze_longer_than_the_lease_is_not_handed_over(
    queue: Queue, consumer: Consumer, line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor acknowledged by the next batch."""
    ahead = [0.0]
    for part in ("hand", "takes"):
        monkeypatch.setattr(f"lowq.consumer.{part}.monotonic", lambda: now() + ahead[0])

    def skip(seconds: float) -> Hook:
        return lambda: operator.setitem(ahead, 0, seconds)

    queue.push([{"id": n} for n in range(20)])
    line.after, line.before = [skip(1000.0)], [lambda: None, skip(0.0)]
    for job in consumer.take(10, timeout=PATIENCE):
        assert job.fence > 0
        job.release()
    assert not line.after + line.before
    line.after, line.before = [skip(1000.0)], [skip(0.0), skip(0.0)]
    seen: list[str] = []
    for jobs in consumer.batches(5):
        seen += [job.id for job in jobs]
        if len(set(seen)) == 20:
            break
    assert queue.stats().processed + queue.stats().taken == 20
    assert sorted(map(int, seen)) == list(range(20))


@on_redis
def test_a_solo_job_is_handed_over_alone_and_nothing_else_is_in_flight(
    app: lowq.Lowq, queue: Queue, consumer: Consumer
) -> None:
    """It may end the process, which would charge all others with a crash."""
    ids = [str(number) for number in range(12)]
    solos = set(ids[::2])
    for shard in range(4):
        prefix = shard_prefix("lowq", "mail", shard)
        app.client.command("SADD", f"{prefix}solo", *solos, key=prefix)
    queue.push([{"id": job_id} for job_id in ids])
    seen: list[str] = []
    while len(seen) < len(ids):
        jobs = consumer.take(10, timeout=PATIENCE)
        assert jobs
        if solos & {job.id for job in jobs}:
            assert len(jobs) == 1
            assert queue.stats().taken == 1
        seen += [job.id for job in jobs]
        for job in jobs:
            job.ack()
    assert sorted(seen) == sorted(ids)


@on_redis
def test_detach_gives_back_what_takes_without_an_answer_have_taken(
    queue: Queue, consumer: Consumer, line: Line
) -> None:
    queue.push([{"id": n} for n in range(10)])
    (job,) = take(consumer)

    def lose() -> None:
        raise RedisUnavailable("lost")

    line.after = [lose] * 3
    with pytest.raises(RedisUnavailable):
        consumer.take(10, timeout=0)
    line.after = []
    consumer.detach()
    assert queue.stats().taken == 1  # whose receipt the caller has
    with queue.consumer(session=consumer.session) as heir:
        heir.ack(job.receipt)
        rest = take(heir, 9)
        assert len({one.id for one in rest}) == 9


@on_redis
def test_detach_gives_back_what_a_cancelled_take_gets_meanwhile(app: lowq.Lowq, queue: Queue, line: Line) -> None:
    queue.push([{"id": n} for n in range(4)])
    took, goes_on = threading.Event(), threading.Event()

    def hold() -> None:
        took.set()
        assert goes_on.wait(PATIENCE)

    async def scenario() -> None:
        consumer = queue.aconsumer()
        await consumer.start()
        line.after = [hold]
        task = asyncio.create_task(consumer.take(4))
        await asyncio.to_thread(took.wait, PATIENCE)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        detaching = asyncio.create_task(consumer.detach())
        await asyncio.sleep(0)
        goes_on.set()
        await detaching

    asyncio.run(scenario())
    assert queue.stats().taken == 0
    assert queue.stats().length == 4


class Alarm(OSError):
    """As a handler of SIGALRM raises one."""


@on_redis
@pytest.mark.parametrize("error", [KeyboardInterrupt, Alarm])
def test_what_an_exception_of_a_signal_handler_interrupts_is_in_nobodys_hand(
    queue: Queue, consumer: Consumer, line: Line, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    def strike() -> None:
        raise error

    def struck(self: InFlight, reply: Any) -> Any:
        if strikes:
            strikes.pop()()
        return took(self, reply)

    queue.push([{"id": n} for n in range(8)])
    took, strikes = InFlight.read_delivery, list[Hook]()
    monkeypatch.setattr(InFlight, "read_delivery", struck)
    for name, moment in (("before", line.before), ("after", line.after), ("took", strikes)):
        with case(name):
            moment.append(strike)
            with pytest.raises(error):
                consumer.take(8, timeout=PATIENCE)
            for job in take(consumer, 8):
                job.release()
    consumer.detach()
    assert queue.stats().taken == 0


def run(url: str, code: str) -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, "-c", code, url], stdout=subprocess.PIPE, text=True)


OPENS = """
import sys, time
import lowq
app = lowq.Lowq(redis_url=sys.argv[1], lease_ttl={lease_ttl})
consumer = app.queue("mail", 4).consumer(session="s")
print(consumer.take(1, timeout=60)[0].id, flush=True)
"""


def test_a_consumer_left_open_at_a_normal_exit_gives_its_shards_up(redis_url: str) -> None:
    with closing(lowq.Lowq(redis_url=redis_url)) as app:
        queue = app.queue("mail", 4)
        queue.push({"id": "a"})
        with run(redis_url, OPENS.format(lease_ttl=NEVER)) as process:
            assert process.communicate(timeout=PATIENCE)[0] == "a\n"
        assert process.returncode == 0
        with queue.consumer() as consumer:
            assert [job.id for job in consumer.take(1, timeout=PATIENCE)] == ["a"]


def consumer_of(queue: Queue) -> Consumer | None:
    """With the session of the one that was killed, once that is free."""
    try:
        return queue.consumer(session="s")
    except SessionInUse:
        return None


def test_a_consumer_back_with_its_session_after_a_crash_is_woken(redis_url: str, line: Line) -> None:
    with closing(lowq.Lowq(redis_url=redis_url, lease_ttl=2, poll_interval=NEVER)) as app:
        queue = app.queue("mail", 4)
        queue.push({"id": "a"})
        with run(redis_url, OPENS.format(lease_ttl=2) + "time.sleep(600)\n") as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "a\n"
            process.send_signal(signal.SIGKILL)
        consumer = until(lambda: consumer_of(queue), "a free session")
        assert consumer is not None

        def push(job_id: str) -> None:
            until(lambda: line.waiting, "somebody who waits")
            queue.push({"id": job_id})

        with consumer:
            acknowledge(consumer)
            for number in range(8):  # of all shards
                pushing = threading.Thread(target=push, args=[f"b{number}"])
                pushing.start()
                acknowledge(consumer)
                pushing.join()


def acknowledge(consumer: Consumer) -> None:
    """The only job, which comes again if the machine stands still for longer than the lease."""
    is_done = False
    while not is_done:
        with suppress(NotTaken):
            take(consumer)[0].ack()
            is_done = True
