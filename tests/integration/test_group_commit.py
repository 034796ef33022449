"""Pushes that meet, when something happens to Redis, to the process or to one of the callers: on a real server."""

import asyncio
import contextvars
import gc
import json
import math
import os
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.crc import key_slot

import lowq
from lowq.errors import PushInterrupted, RedisFull, RedisUnavailable
from lowq.group_commit.loops import LoopPushes
from lowq.group_commit.writer import Writer
from lowq.queue import Queue
from lowq.sharding import shard_of
from lowq.store import Client, Deadline, LoopConnection, caller_limit
from tests.integration.support import answered
from tests.redis_server import RedisServer
from tests.waiting import PATIENCE, auntil, until

ROOT = Path(__file__).parents[2]


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture
def app(server: RedisServer) -> Iterator[lowq.Lowq]:
    app = lowq.Lowq(redis_url=server.url, push_timeout=PATIENCE)
    yield app
    app.close()


@pytest.fixture
def queue(app: lowq.Lowq) -> Queue:
    queue = app.queue("Orders", 3)
    make_shards(queue)
    queue.push({"id": "first"})
    return queue


def make_shards(queue: Queue) -> None:
    """The first push to a shard is refused, and makes it when it is sent again."""
    ids = [str(number) for number in range(30)]
    queue.push([{"id": job_id} for job_id in ids])
    queue.delete(ids)


@pytest.fixture
def impatient(server: RedisServer) -> Iterator[Queue]:
    """A queue whose pushes wait for 0.4 s."""
    app = lowq.Lowq(redis_url=server.url, push_timeout=0.4)
    queue = app.queue("Orders", 3)
    for number in range(30):
        push_surely(queue, {"id": number})
    queue.delete([str(number) for number in range(30)])
    push_surely(queue, {"id": "first"})
    yield queue
    app.close()


def push_surely(queue: Queue, job: Any) -> None:
    """Pushes it until it is in: a busy machine may need longer for it than an impatient push waits."""
    until(lambda: answered(lambda: queue.push(job) == 1), "a push")


async def apush_surely(queue: Queue, job: Any) -> None:
    """`push_surely` in a coroutine."""
    give_up_at = time.monotonic() + PATIENCE
    while True:
        try:
            assert await queue.apush(job) == 1
            return
        except RedisUnavailable:
            assert time.monotonic() < give_up_at


class Batch:
    """What a limited batch shows to producers."""

    def __init__(self, seconds: float) -> None:
        self.deadline: float | None = time.monotonic() + seconds


def order(queue: Queue, job_id: str) -> list[int]:
    key = f"{queue._prefixes_of(job_id.encode())[0]}payloads:{job_id}"
    return [int(payload) for payload in queue._client.command("ZRANGE", key, 0, -1)]


async def connect(queue: Queue) -> None:
    """Has the loop make its connection."""
    pushes, pushed, give_up_at = pushes_of_loop(queue), 0, time.monotonic() + PATIENCE
    while pushed < 2 or pushes._connection is None:
        if pushes._connecting is None:  # or it was not made in time: another push tries again
            await apush_surely(queue, {"id": f"connects-{pushed % 2}"})
            pushed += 1
        assert time.monotonic() < give_up_at, "no connection"
        await asyncio.sleep(0.005)


def pushes_of_loop(queue: Queue) -> Any:
    return queue._backend.group.of_loop(asyncio.get_running_loop())


def together(queue: Queue, count: int, start: int = 0) -> "list[asyncio.Task[int]]":
    return [asyncio.create_task(queue.apush({"id": "x", "payload": n})) for n in range(start, start + count)]


async def outcomes(tasks: "list[asyncio.Task[int]]") -> list[Any]:
    return await asyncio.gather(*tasks, return_exceptions=True)


class Counted:
    """What the server did during a block: how often it read, and the calls of scripts."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self.before = self._figures()

    def _figures(self) -> tuple[int, int]:
        info = self._queue._client.server_info()
        calls = dict(item.split("=") for item in info["cmdstat_evalsha"].split(","))["calls"]
        return int(info["total_reads_processed"]), int(calls)

    def so_far(self) -> tuple[int, int]:
        """Reads, without that for these figures, and calls."""
        reads, calls = self._figures()
        return reads - self.before[0] - 1, calls - self.before[1]


# --- how much is written ---


def test_those_that_meet_leave_in_one_write_with_one_call_per_shard(queue: Queue) -> None:
    async def produce() -> tuple[int, int]:
        await connect(queue)
        counted = Counted(queue)
        assert await asyncio.gather(*(queue.apush({"id": number}) for number in range(101))) == [1] * 101
        return counted.so_far()

    # The first one alone, then all the others for three shards.
    assert asyncio.run(produce()) == (2, 4)


def test_a_lone_one_costs_what_one_of_a_thread_costs(queue: Queue) -> None:
    async def produce() -> tuple[int, int]:
        await connect(queue)
        counted = Counted(queue)
        for number in range(20):
            assert await queue.apush({"id": number}) == 1
        return counted.so_far()

    assert asyncio.run(produce()) == (20, 20)


def test_it_takes_no_thread(queue: Queue) -> None:
    async def produce() -> None:
        await connect(queue)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(asyncio.get_running_loop(), "run_in_executor", None)
            patched.setattr("_thread.start_new_thread", None)
            assert await asyncio.gather(*together(queue, 300)) == [1] * 300

    asyncio.run(produce())


def test_what_does_not_fit_into_a_socket_at_once_is_written_bit_by_bit(queue: Queue) -> None:
    async def produce() -> None:
        await connect(queue)
        jobs = ({"id": number, "payload": "x" * 60_000} for number in range(60))
        assert await asyncio.gather(*map(queue.apush, jobs)) == [1] * 60

    asyncio.run(produce())


def test_a_loop_that_was_closed_leaves_nothing(app: lowq.Lowq, queue: Queue) -> None:
    group = app.group
    connections: list[weakref.ref[Any]] = []

    async def produce() -> None:
        await connect(queue)
        connections.append(weakref.ref(pushes_of_loop(queue)._connection))
        # One is under way when the loop ends.
        together(queue, 3)
        await asyncio.sleep(0)

    for _ in range(5):
        asyncio.run(produce())
        gc.collect()
        assert len(group._loops) <= 1
    assert sum(connection() is not None for connection in connections) <= 1


def test_a_push_does_not_wait_for_the_connection_of_its_loop_which_is_tried_rarely(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As behind a proxy that lets no more connections in."""
    attempts: list[threading.Event] = []

    def fail(_client: Client, _deadline: Deadline, _server: tuple[str, int] | None) -> None:
        attempts.append(threading.Event())
        attempts[-1].wait(PATIENCE)
        raise RedisUnavailable("no more connections")

    async def produce() -> None:
        pushes = pushes_of_loop(queue)
        for number in range(5):
            assert await queue.apush({"id": number}) == 1
        await auntil(lambda: attempts, "it is being made")
        attempts[0].set()
        await auntil(lambda: pushes._connecting is None, "it was not made")
        for number in range(5):
            assert await queue.apush({"id": number}) == 1
        assert pushes._connecting is None
        for expected in (4.0, 8.0):
            pushes._connect_at = -math.inf  # the pause is over
            assert await queue.apush({"id": 1}) == 1
            await auntil(lambda: pushes._connecting is not None, "it is tried again")
            await auntil(lambda: not attempts[-1].is_set(), "it is being made")
            attempts[-1].set()
            await auntil(lambda: pushes._connecting is None, "it was not made")
            assert pushes._connect_pause == expected
        monkeypatch.undo()
        pushes._connect_at = -math.inf
        await connect(queue)

    monkeypatch.setattr(Client, "connect_for_loop", fail)
    asyncio.run(produce())
    assert len(attempts) == 3


def test_a_connection_that_is_being_made_when_the_application_is_closed_is_closed(
    app: lowq.Lowq, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()
    made: list[LoopConnection] = []
    connect_for_loop = Client.connect_for_loop

    def late(client: Client, deadline: Deadline, server: tuple[str, int] | None) -> LoopConnection | None:
        connection = connect_for_loop(client, deadline, server)
        assert connection is not None
        made.append(connection)
        assert goes_on.wait(PATIENCE)
        return connection

    async def produce() -> None:
        for number in range(2):
            assert await queue.apush({"id": number}) == 1
        await auntil(lambda: made, "it is being made")
        app.close()
        await auntil(lambda: pushes_of_loop(queue)._connecting is None, "the application is closed")
        goes_on.set()
        await auntil(lambda: not made[0].is_open, "it is closed")
        assert pushes_of_loop(queue)._connection is None

    monkeypatch.setattr(Client, "connect_for_loop", late)
    asyncio.run(produce())


def test_a_loop_that_is_closed_amid_pushes_ends_quietly(queue: Queue, server: RedisServer) -> None:
    unraisable: list[Any] = []
    gc.collect()  # what other tests have left is not ours
    before, sys.unraisablehook = sys.unraisablehook, unraisable.append

    async def produce() -> "list[asyncio.Task[int]]":
        await connect(queue)
        server.pause()
        tasks = together(queue, 3)
        await asyncio.sleep(0)
        return tasks

    try:
        loop = asyncio.new_event_loop()
        loop.set_exception_handler(lambda *_: None)  # asyncio says of each task that it was pending
        tasks = loop.run_until_complete(produce())
        loop.close()
        server.cont()
        del tasks, loop
        asyncio.run(connect(queue))  # which forgets the loops that were closed
        gc.collect()
    finally:
        sys.unraisablehook = before
    assert [hook.exc_value for hook in unraisable] == []


def test_what_the_context_of_a_caller_refers_to_is_not_kept(queue: Queue) -> None:
    class Request:
        pass

    current: contextvars.ContextVar[Request] = contextvars.ContextVar("current")
    requests: list[weakref.ref[Request]] = []

    async def handle(number: int) -> None:
        request = Request()
        requests.append(weakref.ref(request))
        current.set(request)
        assert await queue.apush({"id": number}) == 1

    async def produce() -> None:
        for number in range(8):
            await asyncio.create_task(handle(number))
            if number == 3:
                await auntil(lambda: pushes_of_loop(queue)._connection is not None, "it is there")
        # What checks the time of pushes belongs to none of them.
        assert pushes_of_loop(queue)._check_due > time.monotonic()
        await asyncio.sleep(0)  # the loop itself still refers to the last one
        gc.collect()
        assert [request for request in requests if request() is not None] == []

    asyncio.run(produce())


def test_a_loop_that_has_gone_keeps_no_connection(app: lowq.Lowq, queue: Queue) -> None:
    asyncio.run(connect(queue))
    gc.collect()
    app.close()
    assert len(app.client.command("CLIENT", "LIST").splitlines()) == 1


def test_an_embedded_store_in_between_leaves_no_connection(app: lowq.Lowq, queue: Queue) -> None:
    async def produce() -> None:
        for _ in range(3):
            await connect(queue)
            before = app.group
            with app.embedded():
                assert await queue.apush({"id": 1}) == 1
            assert app.group is before
        app.close()
        connection = pushes_of_loop(queue)._connection
        await auntil(lambda: not connection.is_open, "it is closed")
        assert len(app.client.command("CLIENT", "LIST").splitlines()) == 1

    asyncio.run(produce())


def test_closing_the_application_closes_the_connections_of_loops(app: lowq.Lowq, queue: Queue) -> None:
    async def produce() -> None:
        await connect(queue)
        connection = pushes_of_loop(queue)._connection
        app.close()
        await auntil(lambda: not connection.is_open, "the connection is closed")
        assert await queue.apush({"id": "later"}) == 1
        await auntil(lambda: pushes_of_loop(queue)._connection.is_open, "there is another one")

    asyncio.run(produce())


# --- Redis goes away, breaks connections, forgets scripts, is full ---


@pytest.mark.parametrize("flush", [False, True], ids=["cut", "scripts flushed"])
def test_a_connection_that_breaks_and_scripts_that_are_gone_cost_nobody_anything(
    queue: Queue, server: RedisServer, flush: bool
) -> None:
    killer = lowq.Lowq(redis_url=server.url).client
    command = ("SCRIPT", "FLUSH") if flush else ("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

    async def produce() -> None:
        await connect(queue)
        for start in range(0, 200, 40):
            tasks = together(queue, 40, start)
            await asyncio.sleep(0)
            killer.command(*command)
            assert await outcomes(tasks) == [1] * 40

    asyncio.run(produce())
    assert order(queue, "x") == list(range(200))


def test_without_an_answer_each_has_its_own_error_and_its_own_rest(impatient: Queue, server: RedisServer) -> None:
    async def produce() -> list[Any]:
        await connect(impatient)
        server.pause()
        return await outcomes(together(impatient, 20))

    results = asyncio.run(produce())
    server.cont()
    assert all(type(result) is PushInterrupted and result.accepted == 0 for result in results)
    assert len({id(result) for result in results}) == 20
    assert [result.rest for result in results] == [[{"id": "x", "payload": n}] for n in range(20)]
    assert "nothing was heard in time, for push_timeout=0.4 s" in str(results[0])
    # What was under way may be in; pushing it again does no harm.
    for result in results:
        push_surely(impatient, result.rest)
    assert sorted(order(impatient, "x")) == list(range(20))


def test_the_same_of_threads(impatient: Queue, server: RedisServer) -> None:
    server.pause()
    results: list[BaseException] = []

    def push(number: int) -> None:
        try:
            impatient.push({"id": number})
        except RedisUnavailable as error:
            results.append(error)

    threads = [threading.Thread(target=push, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    server.cont()
    assert len({id(result) for result in results}) == 20
    rests = [result.rest for result in results if isinstance(result, PushInterrupted)]
    assert sorted(rests, key=str) == sorted([[{"id": number}] for number in range(20)], key=str)
    push_surely(impatient, {"id": "later"})


def test_who_waits_behind_a_batch_without_answer_gives_up_in_its_own_time(
    impatient: Queue, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch before it hangs for good, whatever was to end it: only its own patience helps."""
    hangs = threading.Event()

    async def produce() -> list[Any]:
        pushes = pushes_of_loop(impatient)
        monkeypatch.setattr(pushes._writer, "send", lambda _write: hangs.wait(PATIENCE))
        try:
            results = await outcomes(together(impatient, 3))
        finally:
            hangs.set()
        monkeypatch.undo()
        await apush_surely(impatient, {"id": "later"})
        return results

    results = asyncio.run(produce())
    assert [type(result) for result in results] == [PushInterrupted] * 3
    assert impatient.peek("x") is None


def test_who_performs_a_batch_waits_until_its_deadline_and_the_others_as_long_as_ever(
    queue: Queue, server: RedisServer
) -> None:
    async def produce() -> Any:
        await connect(queue)
        server.pause()
        tasks = together(queue, 3)
        token = caller_limit.set(Batch(0.2))
        limited = [asyncio.create_task(queue.apush({"id": "x", "payload": 3})) for _ in range(2)]
        caller_limit.reset(token)
        tasks += together(queue, 1, 4)
        errors = await outcomes(limited)
        assert not any(task.done() for task in tasks)
        server.cont()
        assert await asyncio.gather(*tasks) == [1] * 4
        return errors

    for error in asyncio.run(produce()):
        assert isinstance(error, PushInterrupted)
        assert str(error.__cause__).startswith("the push waited until the deadline of the batch and was not sent")
        assert error.rest == [{"id": "x", "payload": 3}]
    assert order(queue, "x") == [0, 1, 2, 4]  # what it gave up before it was sent is not sent any more


def test_the_first_one_who_uses_a_queue_does_not_pass_its_deadline_on(app: lowq.Lowq, server: RedisServer) -> None:
    class Batch:
        deadline: float | None

    app.client.command("PING")
    queue = app.queue("Fresh", 3)

    async def produce() -> None:
        server.pause()
        batch = Batch()
        batch.deadline = time.monotonic() + 0.2
        token = caller_limit.set(batch)
        limited = asyncio.create_task(queue.apush({"id": "limited"}))
        caller_limit.reset(token)
        others = [asyncio.create_task(queue.apush({"id": number})) for number in range(3)]
        with pytest.raises(RedisUnavailable, match="until the deadline of the batch"):
            await limited
        assert not any(task.done() for task in others)
        server.cont()
        assert await asyncio.gather(*others) == [1] * 3

    asyncio.run(produce())
    assert queue.peek("limited") is None


def test_a_server_that_comes_back_is_found_again(queue: Queue, server: RedisServer) -> None:
    async def produce() -> None:
        await connect(queue)
        server.stop()
        tasks = together(queue, 10)
        await asyncio.sleep(0)
        results = await outcomes(tasks)
        assert all(isinstance(result, PushInterrupted) for result in results)
        server.start()
        queue._backend.forget_registered()
        assert await outcomes(together(queue, 10)) == [1] * 10
        assert await outcomes(together(queue, 10)) == [1] * 10

    asyncio.run(produce())


def test_a_full_redis_says_so_to_everybody(queue: Queue, app: lowq.Lowq) -> None:
    async def produce() -> list[Any]:
        await connect(queue)
        app.client.command("CONFIG", "SET", "maxmemory-policy", "noeviction")
        app.client.command("CONFIG", "SET", "maxmemory", 1)
        results = await outcomes(together(queue, 10))
        app.client.command("CONFIG", "SET", "maxmemory", 0)
        assert await outcomes(together(queue, 10)) == [1] * 10
        return results

    results = asyncio.run(produce())
    assert all(isinstance(result, PushInterrupted) for result in results)
    assert all(isinstance(result.__cause__, RedisFull) for result in results)


def test_who_gave_up_is_not_in_a_repeat(queue: Queue, server: RedisServer) -> None:
    """What it pushes afterwards for the same id would otherwise be overtaken by what it gave up."""

    async def produce() -> None:
        await connect(queue)
        server.pause()
        tasks = together(queue, 1)
        await asyncio.sleep(0)
        tasks += together(queue, 20, 1)
        await asyncio.sleep(0)
        pushes = pushes_of_loop(queue)
        assert len(pushes._under_way) == 1
        tasks[0].cancel()
        # The server never got to see it.
        server.kill()
        server.start()
        queue._backend.forget_registered()
        pushes._connection.time_out()
        assert (await outcomes(tasks))[1:] == [1] * 20

    asyncio.run(produce())
    assert order(queue, "x") == list(range(1, 21))


def test_cancelling_what_is_under_way_leaves_the_connection_in_order(queue: Queue, server: RedisServer) -> None:
    async def produce() -> None:
        await connect(queue)
        for start in range(0, 50, 5):
            server.pause()
            tasks = together(queue, 5, start)
            await asyncio.sleep(0)
            assert len(pushes_of_loop(queue)._under_way) == 1
            for task in tasks[:3]:
                task.cancel()
            server.cont()
            results = await outcomes(tasks)
            assert results[3:] == [1, 1]
            assert all(isinstance(result, asyncio.CancelledError) for result in results[:3])

    asyncio.run(produce())
    found = order(queue, "x")
    assert found == sorted(found)
    # The first of each five was under way, and may be in. The second and the third were not sent.
    assert {n for n in found if n % 5 > 2} == {n for n in range(50) if n % 5 > 2}
    assert not [n for n in found if n % 5 in (1, 2)]


@pytest.mark.parametrize("jobs", [1, 101], ids=["small", "large"])
def test_what_was_cancelled_while_it_waited_for_a_connection_is_not_sent(server: RedisServer, jobs: int) -> None:
    """In a thread, as the first pushes of a loop are."""
    app = lowq.Lowq(redis_url=server.url, push_timeout=PATIENCE, client_pool_size=1)
    queue = app.queue("Orders", 3)
    queue.push({"id": "first"})
    pool: Any = app.client._servers.only_pool()

    async def produce() -> None:
        held = pool.checkout()
        task = asyncio.create_task(queue.apush([{"id": number} for number in range(jobs)]))
        await auntil(lambda: pool._waiting, "it waits for a connection")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        pool.release(held)
        await auntil(lambda: threading.active_count() == threads or not pool._waiting, "it has one")
        assert await queue.apush({"id": "next"}) == 1

    threads = threading.active_count()
    asyncio.run(produce())
    assert queue.stats().length == 2
    app.close()


def test_what_was_cancelled_is_not_sent_when_scripts_were_gone(queue: Queue, server: RedisServer) -> None:
    """Redis has refused it as it did not know the script, so it was not carried out before, either."""

    async def produce() -> None:
        await connect(queue)
        queue._client.command("SCRIPT", "FLUSH")
        server.pause()
        task = asyncio.create_task(queue.apush({"id": "cancelled"}))
        await auntil(lambda: pushes_of_loop(queue)._under_way, "it was sent")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        server.cont()
        assert await queue.apush({"id": "next"}) == 1

    asyncio.run(produce())
    assert queue.peek("cancelled") is None


def test_nobody_looks_all_the_time_whose_time_is_up(queue: Queue, server: RedisServer) -> None:
    """Of a write some have given up, as their batches have ended, and others wait on."""

    async def produce() -> None:
        await connect(queue)
        pushes = pushes_of_loop(queue)
        server.pause()
        hangs = asyncio.create_task(queue.apush({"id": "x"}))
        token = caller_limit.set(Batch(0.1))
        limited = asyncio.create_task(queue.apush({"id": "x"}))
        caller_limit.reset(token)
        patient = asyncio.create_task(queue.apush({"id": "x"}))
        with pytest.raises(PushInterrupted):
            await limited
        before = pushes._check_number
        await asyncio.sleep(0.3)
        assert pushes._check_number - before < 10
        server.cont()
        assert [*await asyncio.gather(hangs, patient)] == [1, 1]

    asyncio.run(produce())


def test_redis_is_not_blamed_for_what_a_blocked_loop_did_not_send_in_time(impatient: Queue) -> None:
    async def produce() -> list[Any]:
        await connect(impatient)
        tasks = together(impatient, 3)
        await asyncio.sleep(0)
        time.sleep(0.6)  # a handler that blocks
        until(lambda: impatient.peek("x") is not None, "it is in, and answered")
        return await outcomes(tasks)

    sent, *waited = asyncio.run(produce())
    assert sent == 1
    for error in waited:
        assert isinstance(error, PushInterrupted)
        assert "was not sent: those before it had no answer, or this process was busy" in str(error)


def test_an_application_that_is_closed_while_a_thread_sends_makes_no_connection(
    queue: Queue, server: RedisServer
) -> None:
    async def produce() -> None:
        for number in range(2):
            server.pause()
            task = asyncio.create_task(queue.apush({"id": number}))
            await auntil(lambda: pushes_of_loop(queue)._under_way, "a thread sends it")
            queue._backend.group.close()
            await asyncio.sleep(0)
            server.cont()
            await task
            assert pushes_of_loop(queue)._connecting is None

    asyncio.run(produce())


def test_pushes_that_one_task_starts_together_keep_their_order_when_a_slot_moves(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its shard is said to be another primary's each time."""
    primaries = iter(range(10_000))
    app = lowq.Lowq(redis_url=server.url, push_timeout=PATIENCE)
    monkeypatch.setattr(app.group, "_is_cluster", True)
    monkeypatch.setattr(app.client, "primary_of", lambda _key: ("primary", next(primaries) % 3))
    queue = app.queue("Orders", 3)

    async def produce() -> None:
        for start in range(0, 300, 30):
            tasks = []
            for number in range(start, start + 30):
                tasks += together(queue, 1, number)
                await asyncio.sleep(0)
            assert await asyncio.gather(*tasks) == [1] * 30

    asyncio.run(produce())
    assert order(queue, "x") == list(range(300))
    app.close()


def test_pushes_go_to_the_next_primary_though_the_one_before_is_never_idle(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a slot that has moved, as soon as none of its own is under way."""
    app = lowq.Lowq(redis_url=server.url, push_timeout=PATIENCE)
    queue = app.queue("Orders", 2)
    ids = {shard_of(str(number).encode(), 2): str(number) for number in range(20)}
    moves, stays = (queue._prefixes_of(ids[shard].encode())[0] for shard in (0, 1))
    primaries = {moves: ("before", 1), stays: ("before", 1)}
    monkeypatch.setattr(app.group, "_is_cluster", True)
    monkeypatch.setattr(app.client, "primary_of", primaries.__getitem__)

    async def produce() -> None:
        assert await queue.apush({"id": ids[0]}) == 1
        primaries[moves] = "next", 1
        server.pause()
        others = [asyncio.create_task(queue.apush({"id": ids[1]}))]
        await asyncio.sleep(0)
        mine = [asyncio.create_task(queue.apush({"id": ids[0]})) for _ in range(2)]
        await asyncio.sleep(0)
        used = app.group.of_loop(asyncio.get_running_loop(), ("next", 1))
        assert len(used._under_way) + len(used._waiting) == 2
        server.cont()
        assert await asyncio.gather(*others, *mine) == [1] * 3

    asyncio.run(produce())
    app.close()


def test_a_push_that_was_cancelled_is_not_overtaken_when_its_slot_moves(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was sent, and nobody knows whether it is in."""
    app = lowq.Lowq(redis_url=server.url, push_timeout=PATIENCE)
    queue = app.queue("Orders", 1)
    primaries = [("before", 1)]
    monkeypatch.setattr(app.group, "_is_cluster", True)
    monkeypatch.setattr(app.client, "primary_of", lambda _key: primaries[-1])
    start, sent = app.client.start, threading.Event()

    def notes_it(*args: Any, **options: Any) -> Any:
        finish = start(*args, **options)
        sent.set()
        return finish

    monkeypatch.setattr(app.client, "start", notes_it)

    async def produce() -> None:
        assert await queue.apush({"id": "x", "payload": 0}) == 1
        server.pause()
        sent.clear()
        cancelled = asyncio.create_task(queue.apush({"id": "x", "payload": 1}))
        await auntil(sent.is_set, "a thread has sent it")  # one that is cancelled before is not sent
        cancelled.cancel()
        await asyncio.wait([cancelled])
        primaries.append(("next", 1))
        later = asyncio.create_task(queue.apush({"id": "x", "payload": 2}))
        await asyncio.sleep(0)
        assert not app.group.of_loop(asyncio.get_running_loop(), primaries[-1])._under_way
        server.cont()
        assert await later == 1

    asyncio.run(produce())
    assert order(queue, "x") == [0, 1, 2]
    app.close()


@pytest.mark.parametrize("kind", ["threads", "coroutines"])
def test_a_primary_that_hangs_delays_pushes_to_no_other_one(kind: str) -> None:
    hangs, healthy = (RedisServer(cluster_enabled="yes", cluster_node_timeout=60_000) for _ in range(2))
    with hangs, healthy:
        clients = [redis.Redis(port=server.port) for server in (hangs, healthy)]
        for client, slots in zip(clients, [(0, 8191), (8192, 16383)], strict=True):
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", *slots)
        clients[0].execute_command("CLUSTER", "MEET", "127.0.0.1", healthy.port)
        until(lambda: all(client.cluster("INFO")["cluster_state"] == "ok" for client in clients), "cluster in order")
        for client in clients:
            client.close()
        app = lowq.Lowq(redis_url=f"redis+cluster://127.0.0.1:{healthy.port}", push_timeout=2 * PATIENCE)
        queue = app.queue("Orders", 8)
        ids = [str(number) for number in range(200)]
        assert queue.push([{"id": job_id} for job_id in ids]) == 200
        stuck = [job_id for job_id in ids if key_slot(queue._prefixes_of(job_id.encode())[0].encode()) < 8192]
        others = [job_id for job_id in ids if job_id not in stuck]
        hangs.pause()
        try:
            # One of them is for both.
            jobs: list[Any] = [{"id": stuck[0]}, {"id": stuck[1]}, [{"id": stuck[2]}, {"id": others[-1]}]]
            waiting = [threading.Thread(target=queue.push, args=(each,)) for each in jobs]
            if kind == "threads":
                for thread in waiting:
                    thread.start()
                until(lambda: len(app.group._threads) == 3, "some wait")
                assert [queue.push({"id": job_id}) for job_id in others[:20]] == [1] * 20
                assert queue.push([{"id": job_id} for job_id in others[:20]]) == 20
                hangs.cont()
                for thread in waiting:
                    thread.join(PATIENCE)
                assert not any(thread.is_alive() for thread in waiting)
            else:

                async def produce() -> None:
                    tasks = [asyncio.create_task(queue.apush(each)) for each in jobs]
                    await asyncio.sleep(0)
                    for job_id in others[:20]:
                        assert await queue.apush({"id": job_id}) == 1
                    assert await queue.apush([{"id": job_id} for job_id in others[:20]]) == 20
                    assert not any(task.done() for task in tasks)
                    hangs.cont()
                    assert await asyncio.gather(*tasks) == [1, 1, 2]

                asyncio.run(produce())
        finally:
            hangs.cont()
        app.close()


def test_an_event_loop_has_a_connection_to_each_primary_of_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it has them no thread sends for it. When a slot has moved the push is in all the same."""
    servers = [RedisServer(cluster_enabled="yes") for _ in range(2)]
    with servers[0], servers[1]:
        clients = [redis.Redis(port=server.port, decode_responses=True) for server in servers]
        for client, slots in zip(clients, [(0, 8191), (8192, 16383)], strict=True):
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", *slots)
        clients[0].execute_command("CLUSTER", "MEET", "127.0.0.1", servers[1].port)
        until(lambda: all(client.cluster("INFO")["cluster_state"] == "ok" for client in clients), "cluster in order")
        app = lowq.Lowq(redis_url=f"redis+cluster://127.0.0.1:{servers[0].port}", push_timeout=PATIENCE)
        queue = app.queue("Orders", 8)
        by_thread: list[object] = []
        in_thread = LoopPushes._in_thread

        def counted(pushes: LoopPushes, *args: Any) -> None:
            by_thread.append(pushes)
            in_thread(pushes, *args)

        async def push_all(first: int) -> None:
            jobs = [queue.apush({"id": number}) for number in range(first, first + 100)]
            assert await asyncio.gather(*jobs) == [1] * 100

        async def produce() -> None:
            for first in (0, 100, 200):
                await push_all(first)
            primaries = app.group._of_loop(asyncio.get_running_loop()).by_destination.values()
            assert len(primaries) == 2
            for pushes in primaries:
                await auntil(lambda pushes=pushes: pushes._connection is not None, "its connection")  # type: ignore[misc]
            monkeypatch.setattr(LoopPushes, "_in_thread", counted)
            for first in (300, 400):
                await push_all(first)
            assert by_thread == []
            prefix = queue._prefixes_of(b"500")[0]
            slot, owner = key_slot(prefix.encode()), app.client.primary_of(prefix)
            assert owner is not None
            source, target = clients if owner[1] == servers[0].port else clients[::-1]
            source.delete(*source.execute_command("CLUSTER GETKEYSINSLOT", slot, 1000))
            target.execute_command("CLUSTER", "BUMPEPOCH")  # or the other one may take the slot back
            for client in (target, source):
                client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", target.execute_command("CLUSTER MYID"))
            assert await queue.apush({"id": "500"}) == 1
            assert by_thread

        asyncio.run(produce())
        for client in clients:
            client.close()
        app.close()


def test_a_timeout_around_a_push(queue: Queue, server: RedisServer) -> None:
    async def produce() -> None:
        await connect(queue)
        server.pause()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(queue.apush({"id": 1}), 0.05)
        server.cont()
        assert await queue.apush({"id": 2}) == 1

    asyncio.run(produce())


# --- forks and signals ---


def test_a_child_of_a_fork_has_a_flusher_and_connections_of_its_own(server: RedisServer) -> None:
    forking = """
        import asyncio, json, os, sys, threading, lowq

        app = lowq.Lowq(redis_url=sys.argv[1])
        queue = app.queue("Orders", 3)
        queue.push({"id": "first"})

        def produce(name):
            accepted = []
            threads = [threading.Thread(target=lambda n=n: accepted.extend(
                queue.push({"id": f"{name}-{n}-{i}"}) for i in range(40))) for n in range(8)]
            [thread.start() for thread in threads]
            async def main():
                for start in range(3):
                    accepted.extend(await asyncio.gather(
                        *(queue.apush({"id": f"{name}-a-{start}-{i}"}) for i in range(40))))
            asyncio.run(main())
            [thread.join() for thread in threads]
            return sum(accepted)

        produce("before")
        # In the middle of it: others push while the process forks.
        going_on = threading.Event()
        def push_all_the_time():
            while not going_on.is_set():
                queue.push({"id": "busy"})
        threads = [threading.Thread(target=push_all_the_time) for _ in range(4)]
        [thread.start() for thread in threads]
        children = []
        for number in range(3):
            child = os.fork()
            if child == 0:
                os._exit(0 if produce(f"child-{number}") == 440 else 1)
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        going_on.set()
        [thread.join() for thread in threads]
        print(json.dumps([codes, produce("after")]))
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(forking), server.url],
        cwd=ROOT, env={**os.environ}, capture_output=True, text=True, timeout=4 * PATIENCE, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[0, 0, 0], 440]
    assert lowq.Lowq(redis_url=server.url).queue("Orders").stats().length == 5 * 440 + 2


#: As in test_interrupted, while other threads push: whoever is interrupted harms nobody but itself.
HAMMER = """
    import json, random, signal, sys, threading, lowq

    kind = type("Interrupted", (Exception,), {})

    armed = False

    def interrupt(*_):
        if armed:
            raise kind

    app = lowq.Lowq(redis_url=sys.argv[1], client_pool_size=3)
    queue = app.queue("Orders", 3)
    queue.push({"id": "first"})
    stop, wrong, pushed = threading.Event(), [], [0] * 4

    def push(number):
        while not stop.is_set():
            try:
                pushed[number] += 1
                if queue.push([{"id": f"{number}-{pushed[number]}"}, {"id": "x"}]) != 2:
                    wrong.append("a wrong count")
            except BaseException as error:
                wrong.append(repr(error))

    threads = [threading.Thread(target=push, args=(number,)) for number in range(4)]
    [thread.start() for thread in threads]
    signal.signal(signal.SIGALRM, interrupt)
    chance, interrupted, strange = random.Random(1), 0, 0
    for number in range(int(sys.argv[2])):
        try:
            try:
                armed = True
                signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-6, 2e-3), chance.choice([0, 5e-5]))
                strange += queue.push({"id": number, "payload": number}) != 1
            finally:
                armed = False  # a signal that came before the timer ends may be handled after it
                signal.setitimer(signal.ITIMER_REAL, 0)
        except (kind, lowq.PushError) as error:
            assert isinstance(error, kind) or isinstance(error.__cause__, kind), repr(error.__cause__)
            interrupted += 1
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    stop.set()
    [thread.join() for thread in threads]
    missing = [name for n in range(4) for i in range(1, pushed[n] + 1) if queue.peek(name := f"{n}-{i}") is None]
    print(json.dumps([interrupted > 0, strange, wrong, missing, queue.push({"id": "last"})]))
"""


@pytest.mark.parametrize("count", [300, pytest.param(4000, marks=pytest.mark.slow)])
def test_who_is_interrupted_by_a_signal_harms_nobody_else(server: RedisServer, count: int) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", textwrap.dedent(HAMMER), server.url, str(count)],
        cwd=ROOT, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [True, 0, [], [], 1]


class Interrupted(Exception):
    """What a signal handler raises."""


def test_a_signal_handler_that_raises_while_a_write_is_put_together_leaves_nobody_waiting(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_writer: Writer, waiting: Any, write: Any) -> None:
        monkeypatch.undo()
        write.append(waiting[0])
        raise Interrupted

    async def main() -> None:
        monkeypatch.setattr(Writer, "take_next", interrupted)
        with pytest.raises(Interrupted):
            await queue.apush({"id": "interrupted"})
        assert await asyncio.gather(*(queue.apush({"id": n}) for n in range(3))) == [1] * 3

    asyncio.run(main())


def test_a_signal_handler_that_raises_while_a_connection_is_begun_keeps_the_loop_from_none(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        def interrupted(*_args: Any) -> None:
            raise Interrupted

        await queue.apush({"id": "first"})
        pushes = pushes_of_loop(queue)
        with monkeypatch.context() as patched:
            patched.setattr("lowq.group_commit.loops.run_in_own_thread", interrupted)
            with pytest.raises(Interrupted):
                pushes._connect()
        await connect(queue)

    asyncio.run(main())


def test_a_signal_handler_that_raises_while_a_connection_is_used_first_leaves_no_reader(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        await connect(queue)
        loop = asyncio.get_running_loop()
        add_reader, watched = loop.add_reader, []

        def interrupted(fd: int, *args: Any) -> None:
            add_reader(fd, *args)
            watched.append(fd)
            raise Interrupted

        monkeypatch.setattr(loop, "add_reader", interrupted)
        with pytest.raises(Interrupted):
            await queue.apush({"id": "interrupted"})
        monkeypatch.undo()
        assert len(watched) == 1
        assert not loop.remove_reader(watched[0])
        assert await queue.apush({"id": "next"}) == 1

    asyncio.run(main())


def test_an_attempt_is_given_up_in_time_for_a_repeat_however_late_the_next_check_was_to_be(
    queue: Queue, server: RedisServer
) -> None:
    async def main() -> None:
        await connect(queue)
        pushes = pushes_of_loop(queue)
        pushes._check_due = time.monotonic() + PATIENCE  # for what was under way before
        server.pause()
        pushed = asyncio.create_task(queue.apush({"id": "x"}))
        await auntil(lambda: pushes._under_way, "it was sent")
        assert pushes._check_due < pushes._attempt_ends + 1 < time.monotonic() + PATIENCE
        server.cont()
        assert await pushed == 1

    asyncio.run(main())


def test_a_signal_handler_that_raises_in_the_loop_leaves_nobody_waiting(server: RedisServer) -> None:
    """The handler raises in the middle of our callbacks: the loop goes on, and so must those who wait."""
    interrupted = """
        import asyncio, json, random, signal, sys, lowq

        kind = type("Interrupted", (Exception,), {})
        raised = 0
        def interrupt(_, frame):
            # Elsewhere asyncio would lose the callback that it is about to run.
            global raised
            name = frame.f_code.co_filename
            ours = "group_commit" in name or "loop_connection" in name
            if ours and frame.f_code.co_name != "_check":
                raised += 1
                raise kind

        app = lowq.Lowq(redis_url=sys.argv[1], push_timeout=0.5)
        queue = app.queue("Orders", 3)

        def is_first_in():
            try:
                return queue.push({"id": "first"}) == 1
            except lowq.RedisUnavailable:  # a busy machine may need longer than the pushes wait
                return False

        while not is_first_in():
            pass

        async def main():
            asyncio.get_running_loop().set_exception_handler(lambda *_: None)
            signal.signal(signal.SIGALRM, interrupt)
            chance, ended = random.Random(1), 0
            for number in range(int(sys.argv[2])):
                tasks = [asyncio.ensure_future(queue.apush({"id": f"{number}-{i}"})) for i in range(10)]
                signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-5, 1e-3))
                results = await asyncio.gather(*tasks, return_exceptions=True)
                signal.setitimer(signal.ITIMER_REAL, 0)
                ended += len(results)
                strange = [r for r in results if r != 1 and not isinstance(r, (kind, lowq.PushInterrupted))]
                assert not strange, strange
            signal.signal(signal.SIGALRM, signal.SIG_IGN)
            for _ in range(20):  # likewise
                last = [queue.apush({"id": f"last-{i}"}) for i in range(10)]
                accepted = await asyncio.gather(*last, return_exceptions=True)
                if not any(isinstance(one, lowq.PushInterrupted) for one in accepted):
                    break
            return raised > 0, ended, [*map(repr, accepted)]

        print(json.dumps(asyncio.run(main())))
    """
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", textwrap.dedent(interrupted), server.url, "60"],
        cwd=ROOT, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [True, 600, ["1"] * 10]
