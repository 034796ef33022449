"""A Redis that hangs: for how long a push waits, whatever else the process does."""

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import lowq
from lowq.errors import PushInterrupted, RedisUnavailable
from lowq.queue import Queue
from lowq.store import Call, Client, caller_limit
from lowq.store.keys import shard_prefix
from tests.batches import within_batch
from tests.processes.support import PATIENCE, ROOT, answered, until
from tests.redis_server import RedisServer
from tests.rows import case


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture
def app(server: RedisServer) -> Iterator[lowq.Lowq]:
    app = lowq.Lowq(redis_url=server.url, push_timeout=0.4)
    yield app
    app.close()


def push_surely(queue: Queue, job: Any) -> None:
    """Pushes it until it is in: a busy machine may need longer for it than a push waits here."""
    until(lambda: answered(lambda: queue.push(job) == 1), "a push")


#: Signals keep coming, as from a sampling profiler: each of them would begin a timeout anew that the kernel keeps.
TICKING = """
    import signal, sys, lowq

    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
    app = lowq.Lowq()
    known, other = app.queue("Known", 3), app.queue("Other", 3)
    accepted = 0
    while not accepted:
        try:
            accepted = known.push({"id": 1})
        except lowq.RedisUnavailable:  # a busy machine may need longer
            pass
    print(accepted, flush=True)
    sys.stdin.readline()  # by now Redis hangs
    def first():
        app.queue("New").push({"id": 4})
    for push in (lambda: known.push({"id": 2}), lambda: other.push({"id": 3}), first):
        try:
            push()
        except lowq.RedisUnavailable as error:
            print(type(error).__name__, flush=True)
"""


def test_a_process_with_a_periodic_signal_notices_that_redis_hangs(server: RedisServer) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(TICKING)],
        cwd=ROOT,
        env={**os.environ, "LOWQ_REDIS_URL": server.url, "LOWQ_PUSH_TIMEOUT": "0.4"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "1\n"
        server.pause()
        out, _ = child.communicate("\n", timeout=PATIENCE)
        assert out.split() == ["PushInterrupted", "RedisUnavailable", "RedisUnavailable"]
    finally:
        child.kill()
        child.communicate()


def test_the_caller_is_told_what_happened_and_what_to_do_and_repeats_are_part_of_the_time(
    server: RedisServer, app: lowq.Lowq, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = app.queue("Orders", 3)
    push_surely(queue, {"id": 1})
    given: list[float] = []
    start = Client.start

    def noted(self: Client, calls: Any, **options: Any) -> Any:
        given.append(options["deadline"].seconds)
        return start(self, calls, **options)

    monkeypatch.setattr(Client, "start", noted)
    server.pause()
    with pytest.raises(PushInterrupted) as caught:
        queue.push({"id": 2})
    assert str(caught.value) == (
        "queue 'Orders': 0 payloads are in, the others are in PushError.rest: "
        f"Redis at {server.url} does not answer: nothing was heard in time, for push_timeout=0.4 s. "
        "Push the rest again when Redis is back."
    )
    assert len(given) == 3
    assert sum(given) == pytest.approx(0.4)
    server.cont()
    push_surely(queue, caught.value.rest)


def test_so_is_the_wait_for_a_connection(server: RedisServer) -> None:
    app = lowq.Lowq(redis_url=server.url, push_timeout=0.4, pool_timeout=PATIENCE * 10, client_pool_size=1)
    queue = app.queue("Orders", 3)
    push_surely(queue, {"id": 1})
    give_back = app.client.start([Call("stats", shard_prefix("lowq", "Orders", 0), [""])])
    with pytest.raises(PushInterrupted, match="all 1 connections are in use"):
        queue.push({"id": 2})
    give_back()
    push_surely(queue, {"id": 2})
    app.close()


def test_so_is_connecting(server: RedisServer, app: lowq.Lowq) -> None:
    server.pause()  # the kernel accepts for it, and nobody answers
    with pytest.raises(RedisUnavailable):
        app.queue("Orders", 3).push({"id": 1})


def test_the_time_that_the_callers_own_code_takes_is_not(
    server: RedisServer, app: lowq.Lowq, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead = 0.0
    clock = time.monotonic
    monkeypatch.setattr("lowq.store.calls.time.monotonic", lambda: clock() + ahead)

    def slow() -> Iterator[dict[str, Any]]:
        nonlocal ahead
        for number in range(60):
            ahead += 2 * PATIENCE
            yield {"id": number}

    monkeypatch.setattr("lowq.push.push.CHUNK_JOBS", 20)
    app.config.push_timeout = PATIENCE
    queue = app.queue("Orders", 3)
    assert queue.push(slow()) == 60


def test_a_call_that_redis_may_have_forgotten_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection was cut while the source rested."""
    ahead = 0.0
    monkeypatch.setattr("lowq.clock.now", lambda: ahead)
    monkeypatch.setattr("lowq.push.push.CHUNK_JOBS", 1)
    with RedisServer(tmp_path / "redis", appendonly="yes", appendfsync="always") as server:
        for rested, is_repeated in ((1.9 * PATIENCE, True), (2.1 * PATIENCE, False)):
            app = lowq.Lowq(redis_url=server.url, push_timeout=PATIENCE)
            queue = app.queue(f"Rested-{rested}", 1)
            queue.push({"id": "first"})

            def source(queue: Queue = queue, rested: float = rested) -> Iterator[dict[str, Any]]:
                nonlocal ahead
                yield {"id": 0}
                until(lambda: queue.peek(0), "it is in")
                assert queue.peek(0)  # so it was answered as well
                server.pause()
                yield {"id": 1}  # is sent, and never read
                server.kill()
                server.start()
                ahead += rested
                yield {"id": 2}

            with case(rested):
                if is_repeated:
                    assert queue.push(source()) == 3
                else:
                    with pytest.raises(PushInterrupted, match="1 payloads are in") as caught:
                        queue.push(source())
                    assert list(caught.value.rest) == [{"id": 1}, {"id": 2}]
                assert (queue.peek(1) is not None) is is_repeated
            app.close()


def test_within_a_batch_a_push_waits_no_longer_than_that_has(server: RedisServer) -> None:
    """Were it to wait for push_timeout, the test would not end."""
    app = lowq.Lowq(redis_url=server.url, push_timeout=1e6)
    queue = app.queue("Orders", 3)
    queue.push({"id": 1})
    server.pause()
    token = caller_limit.set(SimpleNamespace(deadline=time.monotonic() + 0.3))
    with pytest.raises(PushInterrupted, match="the deadline of the batch") as caught:
        queue.push([{"id": 2}])
    assert caught.value.rest == [{"id": 2}]
    with pytest.raises(RedisUnavailable):
        app.queue("Others", 3).push({"id": 3})
    caller_limit.reset(token)
    with within_batch(0.3), pytest.raises(PushInterrupted, match="the deadline of the batch"):
        queue.push({"id": 2}, durability="replicated")
    server.cont()
    assert queue.push({"id": 2}) == 1
    app.close()
