"""Pushes that meet, when something happens to Redis, to the process or to one of the callers: on a real server."""

import _thread
import asyncio
import contextvars
import gc
import json
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
from redis.crc import key_slot

import lowq
from lowq.errors import PushInterrupted, RedisUnavailable
from lowq.push import event_loop
from lowq.queue import Queue
from lowq.sharding import shard_of
from lowq.store import Client, Deadline, LoopConnection
from lowq.store.keys import shard_prefix
from tests.batches import within_batch
from tests.redis_cluster import RedisCluster
from tests.redis_server import RedisServer
from tests.round_trips import counted_round_trips
from tests.rows import case
from tests.started_threads import started_threads
from tests.waiting import NEVER, PATIENCE, auntil, until

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
    """With all its shards: the first push to one is refused, and makes it when it is sent again."""
    queue = app.queue("Orders", 3)
    ids = [str(number) for number in range(30)]
    queue.push([{"id": job_id} for job_id in ids])
    queue.delete(ids)
    queue.push({"id": "first"})
    return queue


class TimePasses:
    """Has ``time.monotonic`` jump: nobody has to wait, and no machine can be too slow, until a push gives up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._ahead, clock = 0.0, time.monotonic
        monkeypatch.setattr(time, "monotonic", lambda: clock() + self._ahead)

    def __call__(self) -> None:
        """All pushes have waited for longer than their push_timeout."""
        self._ahead += 2 * PATIENCE


@pytest.fixture
def time_passes(monkeypatch: pytest.MonkeyPatch) -> TimePasses:
    return TimePasses(monkeypatch)


async def connect(queue: Queue) -> None:
    """Pushes until the loop sends by itself, on a connection of its own: no thread is started for it any more."""
    give_up_at = time.monotonic() + PATIENCE
    with started_threads() as started:
        while True:
            started.clear()
            assert await queue.apush({"id": "connects"}) == 1
            if not started:
                return
            assert time.monotonic() < give_up_at, "no connection"
            await asyncio.sleep(0.005)


def together(queue: Queue, count: int, start: int = 0) -> "list[asyncio.Task[int]]":
    return [asyncio.create_task(queue.apush({"id": "x", "payload": n})) for n in range(start, start + count)]


async def outcomes(tasks: "list[asyncio.Task[int]]") -> list[Any]:
    return await asyncio.gather(*tasks, return_exceptions=True)


def order(queue: Queue) -> list[Any]:
    """The payloads of the id of `together`."""
    job = queue.peek("x")
    return [] if job is None else [payload for payload, _ in job.payloads]


def connections(app: lowq.Lowq) -> int:
    """Of the server, besides the one that asks."""
    return len(app.client.command("CLIENT", "LIST").splitlines()) - 1


def counted(app: lowq.Lowq) -> tuple[int, int]:
    """How often the server has read so far, also for these figures, and how many scripts were called."""
    info = app.client.server_info()
    calls = dict(item.split("=") for item in info["cmdstat_evalsha"].split(","))["calls"]
    return int(info["total_reads_processed"]), int(calls)


# --- how much is written, and by whom ---


def test_those_that_meet_leave_in_one_write_with_one_call_per_shard_and_need_no_thread(
    app: lowq.Lowq, queue: Queue
) -> None:
    async def produce() -> None:
        await connect(queue)
        with started_threads() as started:
            reads, calls = counted(app)
            assert await asyncio.gather(*(queue.apush({"id": number}) for number in range(101))) == [1] * 101
            # The first one alone, then all the others for three shards; and a read for the figures.
            assert counted(app) == (reads + 2 + 1, calls + 4)
            for number in range(20):  # what pushes of a thread cost
                assert await queue.apush({"id": number}) == 1
            assert counted(app) == (reads + 3 + 20 + 1, calls + 4 + 20)
        assert started == []

    asyncio.run(produce())


def test_what_does_not_fit_into_a_socket_at_once_is_written_bit_by_bit(queue: Queue) -> None:
    async def produce() -> None:
        await connect(queue)
        jobs = ({"id": number, "payload": "x" * 60_000} for number in range(60))
        assert await asyncio.gather(*map(queue.apush, jobs)) == [1] * 60

    asyncio.run(produce())


# --- the connection of a loop ---


def test_loops_that_are_gone_leave_no_connection(app: lowq.Lowq, queue: Queue) -> None:
    async def produce() -> None:
        await connect(queue)
        together(queue, 3)  # one is under way when the loop ends
        await asyncio.sleep(0)

    for _ in range(3):
        asyncio.run(produce())
    gc.collect()
    app.close()
    until(lambda: connections(app) == 0, "no connection is left")


def test_a_connection_ends_with_its_loop_whoever_refers_to_it(app: lowq.Lowq, queue: Queue) -> None:
    """A socket that is garbage before its connection would be one that nobody has closed."""
    app.client.command("CLIENT", "KILL", "TYPE", "normal")
    connection = app.client.connect_for_loop(Deadline(PATIENCE))
    assert connection is not None

    async def use() -> None:
        answered = asyncio.get_running_loop().create_future()
        connection.send(b"PING\r\n", 1, lambda replies, _: answered.set_result(replies))
        assert await answered == [b"PONG"]
        assert connections(app) == 1

    asyncio.run(use())
    gc.collect()
    until(lambda: connections(app) == 0, "no connection is left")


def test_a_push_does_not_wait_for_the_connection_of_its_loop(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """As behind a proxy that lets no more connections in: then it is tried again after a pause."""
    attempts, is_refused = [], threading.Event()
    connect_for_loop = Client.connect_for_loop

    def refuse(client: Client, *args: Any) -> LoopConnection | None:
        attempts.append(args)
        if len(attempts) == 4:
            return connect_for_loop(client, *args)
        assert is_refused.wait(PATIENCE)
        raise RedisUnavailable("no more connections")

    async def produce() -> None:
        for number in range(10):
            assert await queue.apush({"id": number}) == 1
            if number == 5:
                await auntil(lambda: attempts, "it is being made")
                is_refused.set()

    monkeypatch.setattr(Client, "connect_for_loop", refuse)
    monkeypatch.setattr(event_loop, "CONNECT_PAUSES", (NEVER, NEVER))
    asyncio.run(produce())
    assert len(attempts) == 1
    monkeypatch.setattr(event_loop, "CONNECT_PAUSES", (0.0, 0.0))
    asyncio.run(connect(queue))
    assert len(attempts) == 4


def test_closing_the_application_closes_the_connections_of_loops(app: lowq.Lowq, queue: Queue) -> None:
    async def produce() -> None:
        for _ in range(2):
            await connect(queue)
            with app.embedded():  # in between it leaves what there is
                assert await queue.apush({"id": 1}) == 1
            app.close()
            await auntil(lambda: connections(app) == 0, "the connection is closed")

    asyncio.run(produce())


def test_an_application_that_is_closed_meanwhile_keeps_no_new_connection(
    app: lowq.Lowq, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()
    made: list[LoopConnection] = []
    connect_for_loop = Client.connect_for_loop

    def late(client: Client, deadline: Deadline, address: tuple[str, int] | None) -> LoopConnection | None:
        connection = connect_for_loop(client, deadline, address)
        assert connection is not None
        made.append(connection)
        assert goes_on.wait(PATIENCE)
        return connection

    async def produce() -> None:
        for number in range(2):
            assert await queue.apush({"id": number}) == 1
        await auntil(lambda: made, "it is being made")
        app.close()
        await asyncio.sleep(0)
        goes_on.set()
        await auntil(lambda: not made[0].is_open, "it is closed")

    monkeypatch.setattr(Client, "connect_for_loop", late)
    asyncio.run(produce())


def test_what_the_context_of_a_caller_refers_to_is_not_kept(queue: Queue) -> None:
    class Request:
        pass

    current: contextvars.ContextVar[Request] = contextvars.ContextVar("current")
    requests: list[weakref.ref[Request]] = []

    async def handle(number: int) -> None:
        request = Request()
        requests.append(weakref.ref(request))
        current.set(request)
        if number == 3:
            await connect(queue)
        assert await queue.apush({"id": number}) == 1

    async def produce() -> None:
        for number in range(8):
            await asyncio.create_task(handle(number))
        await asyncio.sleep(0)  # the loop itself still refers to the last one
        gc.collect()
        assert [request for request in requests if request() is not None] == []

    asyncio.run(produce())


# --- Redis goes away, breaks connections, forgets scripts, is full ---


def test_connections_that_break_and_scripts_that_are_gone_cost_nobody_anything(
    queue: Queue, server: RedisServer
) -> None:
    killer = lowq.Lowq(redis_url=server.url).client
    troubles = [("SCRIPT", "FLUSH"), ("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")]

    async def produce() -> None:
        for start in range(0, 400, 40):
            await connect(queue)
            tasks = together(queue, 40, start)
            await asyncio.sleep(0)
            killer.command(*troubles[start // 40 % 2])
            assert await outcomes(tasks) == [1] * 40

    asyncio.run(produce())
    assert order(queue) == list(range(400))


def test_without_an_answer_each_has_its_own_error_and_its_own_rest(
    queue: Queue, server: RedisServer, time_passes: TimePasses
) -> None:
    async def produce() -> list[Any]:
        await connect(queue)
        server.pause()
        tasks = together(queue, 20)
        await asyncio.sleep(0)
        time_passes()
        return await outcomes(tasks)

    first, *others = asyncio.run(produce())
    server.cont()
    assert f"nothing was heard in time, for push_timeout={PATIENCE:g} s" in str(first)
    for number, error in enumerate([first, *others]):
        assert type(error) is PushInterrupted
        assert (error.accepted, error.rest) == (0, [{"id": "x", "payload": number}])
        assert queue.push(error.rest) == 1  # what was under way may be in; pushing it again does no harm
    assert sorted(order(queue)) == list(range(20))


def test_who_waits_behind_a_write_without_end_gives_up_in_its_own_time(
    queue: Queue, monkeypatch: pytest.MonkeyPatch, time_passes: TimePasses
) -> None:
    """The write before hangs for good, whatever was to end it: only its own patience helps."""
    begun, over = threading.Event(), threading.Event()

    def hang(*_args: Any, **_options: Any) -> Any:
        begun.set()
        over.wait(PATIENCE)

    async def produce() -> list[Any]:
        with monkeypatch.context() as patched:
            patched.setattr(Client, "start", hang)
            tasks = together(queue, 3)
            await auntil(begun.is_set, "a write that hangs")
            time_passes()
            try:
                return await outcomes(tasks)
            finally:
                over.set()

    assert [type(result) for result in asyncio.run(produce())] == [PushInterrupted] * 3
    assert queue.push({"id": "later"}) == 1
    assert queue.peek("x") is None


def test_redis_is_not_blamed_for_what_a_blocked_loop_did_not_send_in_time(
    queue: Queue, time_passes: TimePasses
) -> None:
    async def produce() -> list[Any]:
        await connect(queue)
        tasks = together(queue, 3)
        await asyncio.sleep(0)
        time_passes()  # in a handler that blocks
        until(lambda: queue.peek("x") is not None, "it is in")
        queue.peek("x")  # Redis may have answered the first look before the push that it saw, but not this one
        return await outcomes(tasks)

    sent, *waited = asyncio.run(produce())
    assert sent == 1
    for error in waited:
        assert isinstance(error, PushInterrupted)
        assert "was not sent: those before it had no answer, or this process was busy" in str(error)


# --- batches that have to end in time ---


def test_who_performs_a_batch_waits_until_its_deadline_and_the_others_as_long_as_ever(
    queue: Queue, server: RedisServer
) -> None:
    async def produce() -> list[Any]:
        await connect(queue)
        server.pause()
        tasks = together(queue, 3)
        with within_batch(0.1):
            limited = together(queue, 2, start=3)
        tasks += together(queue, 1, start=5)
        errors = await outcomes(limited)
        assert not any(task.done() for task in tasks)
        server.cont()
        assert await asyncio.gather(*tasks) == [1] * 4
        return errors

    for number, error in enumerate(asyncio.run(produce()), 3):
        assert isinstance(error, PushInterrupted)
        assert str(error.__cause__).startswith("the push waited until the deadline of the batch and was not sent")
        assert error.rest == [{"id": "x", "payload": number}]
    assert order(queue) == [0, 1, 2, 5]  # what it gave up before it was sent is not sent any more


def test_an_attempt_is_given_up_in_time_for_a_repeat_however_late_the_next_check_was_to_be(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = lowq.Lowq(redis_url=server.url, push_timeout=NEVER)
    queue = app.queue("Orders", 1)
    queue.push("first")

    async def main() -> None:
        await connect(queue)  # and a check is due in half of NEVER
        loop, checks = asyncio.get_running_loop(), []
        call_later = loop.call_later

        def noted(seconds: float, *args: Any, **options: Any) -> asyncio.TimerHandle:
            checks.append(seconds)
            return call_later(seconds, *args, **options)

        monkeypatch.setattr(loop, "call_later", noted)
        with within_batch(NEVER / 8):
            assert await queue.apush({"id": "x"}) == 1
        assert min(checks) <= NEVER / 16

    asyncio.run(main())
    app.close()


def test_the_first_one_who_uses_a_queue_does_not_pass_its_deadline_on(app: lowq.Lowq, server: RedisServer) -> None:
    app.client.command("PING")
    queue = app.queue("Fresh", 3)

    async def produce() -> None:
        server.pause()
        with within_batch(0.1):
            limited = asyncio.create_task(queue.apush({"id": "limited"}))
        others = together(queue, 3)
        with pytest.raises(RedisUnavailable, match="until the deadline of the batch"):
            await limited
        assert not any(task.done() for task in others)
        server.cont()
        assert await asyncio.gather(*others) == [1] * 3

    asyncio.run(produce())
    assert queue.peek("limited") is None


# --- cancelled pushes ---


def test_who_gave_up_is_not_in_a_repeat(app: lowq.Lowq, queue: Queue, server: RedisServer) -> None:
    """What it pushes afterwards for the same id would otherwise be overtaken by what it gave up."""

    async def produce() -> None:
        await connect(queue)
        server.pause()
        tasks = together(queue, 1)
        await asyncio.sleep(0)
        tasks += together(queue, 20, 1)
        await asyncio.sleep(0)
        tasks[0].cancel()
        server.kill()  # it never got to see it
        server.start()
        app.registrations.forget()
        assert (await outcomes(tasks))[1:] == [1] * 20

    asyncio.run(produce())
    assert order(queue) == list(range(1, 21))


def test_cancelling_what_is_under_way_leaves_the_connection_in_order(queue: Queue, server: RedisServer) -> None:
    async def produce() -> None:
        await connect(queue)
        for start in range(0, 50, 5):
            server.pause()
            tasks = together(queue, 5, start)
            await asyncio.sleep(0)
            for task in tasks[:3]:
                task.cancel()
            server.cont()
            results = await outcomes(tasks)
            assert results[3:] == [1, 1]
            assert all(isinstance(result, asyncio.CancelledError) for result in results[:3])

    asyncio.run(produce())
    found = order(queue)
    assert found == sorted(found)
    # The first of each five was under way, and may be in. The second and the third were not sent.
    assert [n for n in found if n % 5] == [n for n in range(50) if n % 5 > 2]


def test_what_was_cancelled_while_it_waited_for_a_connection_is_not_sent(server: RedisServer) -> None:
    """In a thread, as the first pushes of a loop are."""
    app = lowq.Lowq(redis_url=server.url, push_timeout=PATIENCE, client_pool_size=1)
    queue = app.queue("Orders", 3)
    queue.push({"id": "first"})

    async def produce(jobs: int) -> None:
        server.pause()
        with counted_round_trips() as round_trips:
            holds = threading.Thread(target=queue.push, args=({"id": "first"},))
            holds.start()
            await auntil(lambda: round_trips.count == 1, "the only connection is in use")
            task = asyncio.create_task(queue.apush([{"id": number} for number in range(jobs)]))
            await auntil(lambda: round_trips.count == 2, "it waits for that")
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            server.cont()
            await asyncio.to_thread(holds.join)
        assert await queue.apush({"id": "next"}) == 1

    for jobs in (1, 101):
        asyncio.run(produce(jobs))
        assert queue.stats().length == 2
    app.close()


def test_what_was_cancelled_is_not_sent_when_scripts_were_gone(
    app: lowq.Lowq, queue: Queue, server: RedisServer
) -> None:
    """Redis has refused it as it did not know the script, so it was not carried out before, either."""

    async def produce() -> None:
        await connect(queue)
        app.client.command("SCRIPT", "FLUSH")
        server.pause()
        task = asyncio.create_task(queue.apush({"id": "cancelled"}))
        await asyncio.sleep(0)  # it was sent
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        server.cont()
        assert await queue.apush({"id": "next"}) == 1

    asyncio.run(produce())
    assert queue.peek("cancelled") is None


# --- a cluster ---


@pytest.fixture(scope="module")
def cluster() -> Iterator[RedisCluster]:
    with RedisCluster(primaries=2, replicas=0) as cluster:
        yield cluster


def test_a_primary_that_hangs_delays_pushes_to_no_other_one(cluster: RedisCluster) -> None:
    app = lowq.Lowq(redis_url=cluster.url, push_timeout=2 * PATIENCE)
    queue = app.queue("Hanging", 8)
    ids = [str(number) for number in range(200)]
    assert queue.push([{"id": job_id} for job_id in ids]) == 200
    slots = {n: key_slot(shard_prefix("lowq", "Hanging", shard_of(n.encode(), 8)).encode()) for n in ids}
    stuck = [job_id for job_id in ids if slots[job_id] < 8192]
    others = [job_id for job_id in ids if slots[job_id] >= 8192]
    hangs = cluster.primary_of(0)
    # One of them is for both.
    jobs: list[Any] = [{"id": stuck[0]}, {"id": stuck[1]}, [{"id": stuck[2]}, {"id": others[-1]}]]
    some = [{"id": job_id} for job_id in others[:20]]

    def push_in_threads() -> None:
        waiting = [threading.Thread(target=queue.push, args=(each,)) for each in jobs]
        with counted_round_trips() as round_trips:
            for thread in waiting:
                thread.start()
            until(lambda: round_trips.count >= 2, "some wait")
        assert [queue.push(job) for job in some] == [1] * 20
        assert queue.push(some) == 20
        hangs.cont()
        for thread in waiting:
            thread.join(PATIENCE)
        assert not any(thread.is_alive() for thread in waiting)

    async def push_in_coroutines() -> None:
        tasks = [asyncio.create_task(queue.apush(each)) for each in jobs]
        await asyncio.sleep(0)
        assert [await queue.apush(job) for job in some] == [1] * 20
        assert await queue.apush(some) == 20
        assert not any(task.done() for task in tasks)
        hangs.cont()
        assert await asyncio.gather(*tasks) == [1, 1, 2]

    for push in (push_in_threads, lambda: asyncio.run(push_in_coroutines())):
        hangs.pause()
        try:
            push()
        finally:
            hangs.cont()
    app.close()


def test_a_push_to_several_primaries_waits_for_all_of_them_at_once(cluster: RedisCluster) -> None:
    app = lowq.Lowq(redis_url=cluster.url, push_timeout=NEVER)
    queue = app.queue("Spread", 8)
    jobs = [{"id": str(number)} for number in range(30)]
    assert queue.push(jobs) == 30
    results: list[int] = []
    pushing = threading.Thread(target=lambda: results.append(queue.push(jobs)), daemon=True)
    primaries = cluster.primaries()
    for primary in primaries:
        primary.pause()
    try:
        with counted_round_trips() as round_trips:
            pushing.start()
            until(lambda: round_trips.count == len(primaries), "it waits for each of them")
    finally:
        for primary in primaries:
            primary.cont()
    pushing.join(PATIENCE)
    assert results == [30]
    app.close()


def test_an_event_loop_has_a_connection_to_each_primary_of_a_cluster(cluster: RedisCluster) -> None:
    """Once it has them no thread sends for it. When a slot moves its pushes keep their order all the same."""
    app = lowq.Lowq(redis_url=cluster.url, push_timeout=PATIENCE)
    queue = app.queue("Orders", 8)

    async def push_all() -> bool:
        """Whether no thread was needed."""
        with started_threads() as started:
            assert await asyncio.gather(*(queue.apush({"id": number}) for number in range(100))) == [1] * 100
            return not started

    async def produce() -> None:
        give_up_at = time.monotonic() + PATIENCE
        while not await push_all():
            assert time.monotonic() < give_up_at
        slot = key_slot(shard_prefix("lowq", "Orders", shard_of(b"1", 8)).encode())
        (target,) = set(cluster.primaries()) - {cluster.primary_of(slot)}
        tasks = [asyncio.create_task(queue.apush("1", number)) for number in range(30)]
        await asyncio.sleep(0)
        cluster.move_slot(slot, target)
        while not all(task.done() for task in tasks[:30]):  # others come before, and while, the move is found out
            tasks.append(asyncio.create_task(queue.apush("1", len(tasks))))
            await asyncio.sleep(0)
        assert set(await asyncio.gather(*tasks)) == {1}

    asyncio.run(produce())
    job = queue.peek("1")
    assert job is not None
    order = [payload for payload, _ in job.payloads if payload != ""]
    assert order == list(range(len(order)))
    app.close()


# --- forks and signals ---


def run_script(script: str, *args: str) -> Any:
    """What the script prints, which is JSON."""
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-W", "ignore", "-c", textwrap.dedent(script), *args],
        cwd=ROOT, env={**os.environ}, capture_output=True, text=True, timeout=4 * PATIENCE, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


FORKING = """
    import asyncio, json, os, sys, threading, lowq

    app = lowq.Lowq(redis_url=sys.argv[1])
    queue = app.queue("Orders", 3)
    queue.push({"id": "first"})

    def produce(name):
        def push(number):
            accepted.extend(queue.push({"id": f"{name}-{number}-{i}"}) for i in range(20))
        async def push_together():
            for start in range(3):
                ids = [f"{name}-a-{start}-{i}" for i in range(20)]
                accepted.extend(await asyncio.gather(*(queue.apush({"id": job_id}) for job_id in ids)))
        accepted = []
        threads = [threading.Thread(target=push, args=(number,)) for number in range(4)]
        [thread.start() for thread in threads]
        asyncio.run(push_together())
        [thread.join() for thread in threads]
        return sum(accepted)

    def push_all_the_time():
        while not enough.is_set():
            queue.push({"id": "busy"})

    produce("before")
    enough, children = threading.Event(), []
    threads = [threading.Thread(target=push_all_the_time) for _ in range(4)]
    [thread.start() for thread in threads]
    for number in range(3):  # in the middle of that
        child = os.fork()
        if child == 0:
            os._exit(0 if produce(f"child-{number}") == 140 else 1)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    enough.set()
    [thread.join() for thread in threads]
    print(json.dumps([codes, produce("after")]))
"""


def test_a_child_of_a_fork_has_a_flusher_and_connections_of_its_own(server: RedisServer) -> None:
    assert run_script(FORKING, server.url) == [[0, 0, 0], 140]
    assert lowq.Lowq(redis_url=server.url).queue("Orders").stats().length == 5 * 140 + 2


#: Each push gets a signal after a time of its own, half of them more while they clean up; other threads may push
#: meanwhile. Whoever is interrupted harms nobody else, and a connection on which an answer was left would show.
HAMMER = """
    import json, random, signal, sys, threading, lowq
    from lowq.store import Call
    from lowq.store.keys import shard_prefix

    url, count, others, name = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    kind = {"Interrupted": type("Interrupted", (Exception,), {}), "KeyboardInterrupt": KeyboardInterrupt}[name]
    armed = False

    def interrupt(*_):
        if armed:
            raise kind

    size = 3 if others else 2
    app = lowq.Lowq(redis_url=url, client_pool_size=size, pool_timeout=60 if others else 1)
    queue = app.queue("Orders", 3)
    queue.push({"id": "first"})
    stop, wrong, pushed = threading.Event(), [], [0] * others

    def push(number):
        while not stop.is_set():
            try:
                pushed[number] += 1
                if queue.push([{"id": f"{number}-{pushed[number]}"}, {"id": "x"}]) != 2:
                    wrong.append("a wrong count")
            except BaseException as error:
                wrong.append(repr(error))

    threads = [threading.Thread(target=push, args=(number,)) for number in range(others)]
    [thread.start() for thread in threads]
    signal.signal(signal.SIGALRM, interrupt)
    chance, interrupted, strange = random.Random(1), 0, 0
    for number in range(count):
        try:
            try:
                armed = True
                longest = 2e-3 if others else 6e-4
                signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-6, longest), chance.choice([0, 5e-5]))
                strange += queue.push({"id": number, "payload": number}) != 1
                if not others:
                    strange += app.client.command("ECHO", number + 7) != b"%d" % (number + 7)
            finally:
                armed = False  # a signal that came before the timer ends may be handled after it
                signal.setitimer(signal.ITIMER_REAL, 0)
        except (kind, lowq.PushError, UnboundLocalError) as error:
            # A push that has more to prepare says what is in, and why it ended. When redis-py 6 is interrupted while it
            # makes a connection it raises an UnboundLocalError of its own instead.
            hidden = error.__context__ if isinstance(error, UnboundLocalError) else error.__cause__
            assert isinstance(error, kind) or isinstance(hidden, kind), repr(error)
            interrupted += 1
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    stop.set()
    [thread.join() for thread in threads]
    missing = [name for n in range(others) for i in range(1, pushed[n] + 1) if queue.peek(name := f"{n}-{i}") is None]
    # All connections are to be had, at the same time.
    finish = [app.client.start([Call("stats", shard_prefix("lowq", "Orders", 0), [""])]) for _ in range(size)]
    wrong += [repr(reply) for done in finish for reply in done() if isinstance(reply, Exception)]
    print(json.dumps([interrupted > 0, strange, wrong, missing, queue.push({"id": "last"})]))
"""


def test_who_is_interrupted_by_a_signal_harms_nobody_else(server: RedisServer) -> None:
    for count, others, kind in ((300, 4, "Interrupted"), (1000, 0, "KeyboardInterrupt")):
        with case(count, others, kind):
            assert run_script(HAMMER, server.url, str(count), str(others), kind) == [True, 0, [], [], 1]


class Interrupted(Exception):
    """What a signal handler raises."""


def test_a_signal_handler_that_raises_while_a_connection_is_used_first_leaves_no_reader(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched: list[int] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        add_reader = loop.add_reader

        def interrupted_late(fd: int, *args: Any) -> None:
            add_reader(fd, *args)
            watched.append(fd)
            raise Interrupted

        monkeypatch.setattr(loop, "add_reader", interrupted_late)
        with pytest.raises(Interrupted):
            await connect(queue)
        monkeypatch.undo()
        assert [loop.remove_reader(fd) for fd in watched] == [False]
        assert await queue.apush({"id": "next"}) == 1

    asyncio.run(main())


def test_a_signal_handler_that_raises_while_a_connection_is_begun_keeps_the_loop_from_none(queue: Queue) -> None:
    raised: list[Any] = []
    start_new_thread = _thread.start_new_thread

    def start(*args: Any) -> int:
        raised.append(args)
        if len(raised) == 3:  # those before send two pushes
            raise Interrupted
        return start_new_thread(*args)

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)  # the loop goes on
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("_thread.start_new_thread", start)
            for number in range(2):
                assert await queue.apush({"id": number}) == 1
            await auntil(lambda: len(raised) >= 3, "the connection is begun")
        await connect(queue)

    asyncio.run(main())


#: The handler raises in the middle of our callbacks: the loop goes on, and so must those who wait.
INTERRUPTED = """
    import asyncio, json, random, signal, sys, lowq

    kind = type("Interrupted", (Exception,), {})
    raised = 0
    def interrupt(_, frame):
        # Elsewhere asyncio would lose the callback that it is about to run.
        global raised
        name = frame.f_code.co_filename
        ours = "/push/" in name or frame.f_code.co_qualname.startswith("LoopConnection")
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


def test_a_signal_handler_that_raises_in_the_loop_leaves_nobody_waiting(server: RedisServer) -> None:
    assert run_script(INTERRUPTED, server.url, "60") == [True, 600, ["1"] * 10]
