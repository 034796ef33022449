"""Pushes of many coroutines and threads that meet, on both stores: they leave together, and each caller has its own
outcome.
"""

import _thread
import asyncio
import contextvars
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import lowq
from lowq.errors import (
    JobError,
    MiddlewareError,
    PushError,
    PushInterrupted,
    RedisUnavailable,
    ScriptError,
    TimeLimitExceeded,
)
from lowq.push.batcher import ThreadPushes
from lowq.push.router import OnDemandThread
from lowq.queue import Queue
from lowq.sharding import shard_of
from lowq.store import Call, Client
from lowq.store.keys import shard_prefix
from tests.batches import within_batch
from tests.rows import case
from tests.started_threads import live_threads, started_threads
from tests.tiers import real_redis_often
from tests.waiting import NEVER, PATIENCE, auntil, until


@pytest.fixture
def queue(app: lowq.Lowq) -> Queue:
    queue = app.queue("Orders", 3)
    ids = [str(number) for number in range(100, 112)]
    queue.push([{"id": job_id} for job_id in ids])  # all shards are there
    queue.delete(ids)
    return queue


def payloads(queue: Queue, job_id: str | int) -> list[Any]:
    job = queue.peek(job_id)
    return [] if job is None else [payload for payload, _ in job.payloads]


async def outcomes(*pushes: Awaitable[int]) -> list[Any]:
    return await asyncio.gather(*pushes, return_exceptions=True)


def spoil(app: lowq.Lowq, queue: str, shards_count: int, job_id: str) -> None:
    """Somebody else writes a key of that id, of a type that no push can do anything with."""
    prefix = shard_prefix("lowq", queue, shard_of(job_id.encode(), shards_count))
    app.client.command("RPUSH", f"{prefix}payloads:{job_id}", "foreign", key=prefix)


def refused(*_args: Any) -> int:
    raise RuntimeError("can't start new thread")


class Gate:
    """Counts the writes of threads, and keeps some of them waiting."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        #: The pushes' calls of each write.
        self.writes: list[list[Call[Any]]] = []
        #: How many of the next ones wait until it is opened.
        self.holds = 0
        self.opened = threading.Event()
        #: What happens to the write of that number instead.
        self.instead: dict[int, Callable[[Callable[[], list[Any]]], Any]] = {}
        start = Client.start

        def waiting(client: Client, calls: Sequence[Call[Any]], **options: Any) -> Any:
            if not calls or calls[0].script != "push":
                return start(client, calls, **options)
            self.writes.append(list(calls))
            number = len(self.writes) - 1
            if self.holds > 0:
                self.holds -= 1
                assert self.opened.wait(PATIENCE)
            finish = start(client, calls, **options)
            return self.instead[number](finish) if number in self.instead else finish

        monkeypatch.setattr(Client, "start", waiting)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.opened.set()


class Others:
    """Threads that push while the ones before them are under way: a first one by itself, and one by the flusher if
    that is to be ``busy`` as well.
    """

    def __init__(self, queue: Queue, gate: Gate, monkeypatch: pytest.MonkeyPatch, *, busy: bool = True) -> None:
        self.queue, self.gate = queue, gate
        self.results: dict[int, Any] = {}
        self._threads: list[threading.Thread] = []
        self._ahead = 2 if busy else 1
        self._waiting: list[threading.Thread] = []
        wait = ThreadPushes.wait

        def counted(pushes: ThreadPushes, request: Any) -> Any:
            if threading.current_thread() in self._threads:
                self._waiting.append(threading.current_thread())
            return wait(pushes, request)

        monkeypatch.setattr(ThreadPushes, "wait", counted)
        gate.writes.clear()
        gate.opened.clear()
        gate.holds = self._ahead
        for number in range(self._ahead):
            self.push(-1 - number, {"id": f"ahead-{number}"})
            until(lambda number=number: len(gate.writes) == number + 1, "it is under way")  # type: ignore[misc]

    def push(self, number: int, jobs: Any) -> None:
        def run() -> None:
            try:
                self.results[number] = self.queue.push(jobs)
            except Exception as error:
                self.results[number] = error

        self._threads.append(threading.Thread(target=run, daemon=True))
        self._threads[-1].start()

    def finish(self) -> dict[int, Any]:
        """Lets them go when all of them wait that have not failed."""
        until(lambda: len(self._waiting) + 1 + len(self.results) == len(self._threads), "all wait")
        self.gate.opened.set()
        for thread in self._threads:
            thread.join(PATIENCE)
        assert [self.results.pop(-1 - number) for number in range(self._ahead)] == [1] * self._ahead
        return self.results


MakeOthers = Callable[..., Others]


@pytest.fixture
def others(queue: Queue, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> MakeOthers:
    return lambda on=queue, **options: Others(on, gate, monkeypatch, **options)


# --- coroutines ---


class TestCoroutines:
    def test_each_has_its_own_count_or_error_and_its_jobs_their_own_scores_and_times(self, queue: Queue) -> None:
        bad: dict[int, Any] = {3: {"id": ""}, 7: {"id": 7, "payload": {1}}, 8: {"id": 8, "score": "high"}}
        good = {10: {"id": 10, "score": 1e9}, 11: {"id": 11, "delay": 3600}}

        async def produce() -> list[Any]:
            several = (queue.apush([{"id": n, "payload": i} for i in range(n % 5)]) for n in range(100, 160))
            return await outcomes(*(queue.apush((bad | good).get(n, {"id": n})) for n in range(30)), *several)

        results = asyncio.run(produce())
        for number, result in enumerate(results[:30]):
            assert isinstance(result, JobError) if number in bad else result == 1
        assert results[30:] == [n % 5 for n in range(60)]
        found = queue.fetch([9, 10, 11])
        assert [found[job_id].state for job_id in found] == ["due", "due", "scheduled"]
        assert found["10"].payloads == [("", 1e9)]
        assert queue.stats().length == 27 + 48

    def test_a_script_that_fails_on_one_id_fails_only_the_pushes_of_that_id(self, app: lowq.Lowq) -> None:
        queue = app.queue("Appended", 1, merge="append")
        queue.push([{"id": n, "payload": "first"} for n in range(3)])
        spoil(app, "Appended", 1, "foreign")

        async def produce() -> list[Any]:
            ids = [0, 1, "foreign", 2, 0, "foreign", 1]
            return await outcomes(*(queue.apush({"id": job_id, "payload": "then"}) for job_id in ids))

        results = [result if result == 1 else type(result) for result in asyncio.run(produce())]
        assert results == [1, 1, ScriptError, 1, 1, ScriptError, 1]
        assert [payloads(queue, job_id).count("then") for job_id in range(3)] == [2, 2, 1]

    def test_no_thread_of_the_loop_is_needed(self, app: lowq.Lowq) -> None:
        """All of them may be waiting for pushes: asgiref's ``async_to_sync`` within ``sync_to_async`` does that."""
        queue = app.queue("Orders", 3)

        async def produce() -> list[int]:
            loop = asyncio.get_running_loop()
            loop.set_default_executor(ThreadPoolExecutor(2))

            def view(number: int) -> int:
                return asyncio.run_coroutine_threadsafe(queue.apush({"id": number}), loop).result()

            views = (asyncio.to_thread(view, number) for number in range(4))
            return await asyncio.wait_for(asyncio.gather(*views), PATIENCE)

        for _queue_is_known in (False, True):
            assert asyncio.run(produce()) == [1] * 4

    def test_pushes_that_one_task_starts_together_keep_their_order(self, app: lowq.Lowq) -> None:
        queue = app.queue("Orders", 3)

        async def produce(first: int) -> None:
            for start in (first, first + 300):
                pushes = (queue.apush({"id": "x", "payload": number}) for number in range(start, start + 300))
                assert await asyncio.gather(*pushes) == [1] * 300

        for first in (0, 600):  # at first the queue is not known
            asyncio.run(produce(first))
        assert payloads(queue, "x") == list(range(1000))  # as many as are shown

    @real_redis_often
    def test_who_comes_when_the_queue_was_just_registered_does_not_overtake_those_who_waited_for_that(
        self, app: lowq.Lowq
    ) -> None:
        async def produce(queue: Queue) -> None:
            tasks: list[asyncio.Task[int]] = []
            while len(tasks) < 300 or not tasks[0].done():
                tasks.append(asyncio.create_task(queue.apush({"id": "x", "payload": len(tasks)})))
                await asyncio.sleep(0 if len(tasks) < 100 else 0.005)  # threads have their turn, too
            await asyncio.gather(*tasks)

        for _ in range(3):
            queue = app.queue("Orders", 3)
            app.registrations.forget()
            asyncio.run(produce(queue))
            found = payloads(queue, "x")
            assert found == sorted(found)
            queue.delete("x")

    def test_a_loop_that_comes_after_another_one_and_several_at_once(self, queue: Queue) -> None:
        async def produce(start: int) -> list[int]:
            return [await queue.apush({"id": number}) for number in range(start, start + 20)]

        assert asyncio.run(produce(0)) == [1] * 20
        with ThreadPoolExecutor(4) as threads:
            assert list(threads.map(lambda n: asyncio.run(produce(n * 100)), range(1, 5))) == [[1] * 20] * 4
        assert asyncio.run(produce(900)) == [1] * 20
        assert queue.stats().length == 120

    def test_any_number_in_any_form(self, app: lowq.Lowq) -> None:
        forms: list[tuple[Callable[[Any], Any], int]] = [
            (list, 0), (list, 100), (list, 101), (iter, 0), (iter, 101), (iter, 12_000),
        ]  # fmt: skip
        for form, count in forms:
            with case(form, count):
                queue = app.queue(f"{form.__name__}{count}", 3)
                told: list[int] = []
                assert asyncio.run(queue.apush(form([{"id": n} for n in range(count)]), told.append)) == count
                assert queue.stats().length == count
                assert told[-1:] == ([count] if count else [])

    def test_what_the_source_raises_is_raised(self, queue: Queue) -> None:
        def rows() -> Iterator[dict[str, Any]]:
            yield from ({"id": number} for number in range(300))
            raise ConnectionResetError("the database is gone")

        with pytest.raises(ConnectionResetError, match="the database is gone"):
            asyncio.run(queue.apush(rows()))
        assert queue.stats().length == 0

    def test_what_waits_is_withdrawn_when_it_is_cancelled_and_the_others_go_on(self, queue: Queue) -> None:
        async def produce() -> list[Any]:
            tasks = [asyncio.create_task(queue.apush({"id": n})) for n in range(20)]
            await asyncio.sleep(0)  # all have begun: the first one is under way, at most
            for task in tasks[5:15]:
                task.cancel()
            return await outcomes(*tasks)

        results = asyncio.run(produce())
        assert results[:5] + results[15:] == [1] * 10
        assert all(isinstance(result, asyncio.CancelledError) for result in results[5:15])
        assert queue.fetch(range(20)).keys() == {str(n) for n in range(20) if n not in range(5, 15)}

    @pytest.mark.parametrize("chunks", [0, 2])
    def test_when_it_is_cancelled_no_chunk_follows_the_one_that_is_being_read(self, queue: Queue, chunks: int) -> None:
        reading, cancelled, read_on = threading.Event(), threading.Event(), []

        def source() -> Iterator[dict[str, Any]]:
            yield from ({"id": number} for number in range(5000 * chunks))
            reading.set()
            assert cancelled.wait(PATIENCE)
            yield from ({"id": f"late-{number}"} for number in range(5000))
            yield {"id": "not read"}
            read_on.append(True)

        async def produce() -> None:
            task = asyncio.create_task(queue.apush(source()))
            await asyncio.to_thread(reading.wait, PATIENCE)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            cancelled.set()

        asyncio.run(produce())
        until(lambda: queue.stats().length >= 5000 * chunks, "what was under way")
        assert (queue.stats().length, read_on) == (5000 * chunks, [])


# --- threads ---


class TestThreads:
    def test_those_that_meet_leave_in_one_write_with_one_call_per_shard(self, gate: Gate, others: MakeOthers) -> None:
        made = others()
        for number in range(12):
            made.push(number, [{"id": n, "payload": number} for n in range(number + 1)])
        assert made.finish() == {number: number + 1 for number in range(12)}
        assert [len(calls) for calls in gate.writes] == [1, 1, 3]
        assert sorted(payloads(made.queue, 0)) == list(range(12))

    def test_a_lone_one_has_a_write_of_its_own_and_no_thread(self, queue: Queue, gate: Gate) -> None:
        def fail(_finish: Any) -> Any:
            raise KeyboardInterrupt

        gate.instead[0] = fail
        with pytest.raises(KeyboardInterrupt) as caught:
            queue.push({"id": 1})
        assert caught.value is not None  # somebody keeps it, and its frames: others push directly all the same
        with started_threads() as started:
            assert [queue.push({"id": number}) for number in range(5)] == [1] * 5
        assert started == []
        assert [len(calls) for calls in gate.writes[1:]] == [1] * 5

    def test_a_call_that_is_made_for_one_caller_alone_is_repeated_like_any_other(
        self, app: lowq.Lowq, gate: Gate, others: MakeOthers
    ) -> None:
        """The connection breaks just then, behind the answer that one of them has failed."""

        def cut(finish: Callable[[], list[Any]]) -> Callable[[], list[Any]]:
            return lambda: [reply if isinstance(reply, Exception) else RedisUnavailable("cut") for reply in finish()]

        spoil(app, "Orders", 3, "spoilt")
        made = others()
        made.push(0, {"id": "spoilt"})
        for number in range(1, 9):
            made.push(number, {"id": number})
        gate.instead[3] = cut
        results = made.finish()
        assert len(gate.writes) > 4
        assert isinstance(results.pop(0), ScriptError)
        assert list(results.values()) == [1] * 8

    def test_a_large_push_does_not_go_with_others(self, gate: Gate, others: MakeOthers) -> None:
        made = others()
        made.push(0, {"id": 0})
        made.push(1, {"id": 1, "payload": "x" * 70_000})
        made.push(2, [{"id": n} for n in range(101)])
        until(lambda: {1, 2} <= made.results.keys(), "the large ones are in, while the small one waits")
        assert made.finish() == {0: 1, 1: 1, 2: 101}
        assert len(gate.writes) == 5

    def test_the_flusher_goes_when_there_is_nothing_to_do_and_comes_back(
        self, store_url: str, gate: Gate, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = live_threads()
        monkeypatch.setattr(OnDemandThread.__init__, "__defaults__", (0.01,))
        app = lowq.Lowq(redis_url=store_url, push_timeout=PATIENCE)
        queue = app.queue("Orders", 1)
        queue.push({"id": "first"})
        for number in range(3):
            with monkeypatch.context() as patched:
                made = Others(queue, gate, patched)
                made.push(0, {"id": number})
                assert made.finish() == {0: 1}
            until(lambda: live_threads() <= before, "no flusher")
        app.close()

    def test_a_signal_handler_that_pushes_while_the_flusher_is_started_does_not_wait_for_what_it_has_interrupted(
        self, queue: Queue, others: MakeOthers, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        start_new_thread = _thread.start_new_thread
        pushed: list[int] = []

        def interrupted(*args: Any) -> int:
            ident = start_new_thread(*args)
            if not pushed:
                pushed.append(0)
                pushed.append(queue.push({"id": "handler"}))
            return ident

        made = others(busy=False)
        monkeypatch.setattr("_thread.start_new_thread", interrupted)
        assert queue.push({"id": "interrupted"}) == 1
        assert pushed == [0, 1]
        assert made.finish() == {}

    def test_a_flusher_that_dies_has_a_successor(self, queue: Queue, gate: Gate, others: MakeOthers) -> None:
        def die(_finish: Any) -> Any:
            raise SystemExit

        made = others(busy=False)
        gate.instead[1] = die
        with pytest.raises(PushInterrupted):
            queue.push({"id": "unlucky"})
        assert queue.push({"id": "next"}) == 1
        assert made.finish() == {}

    def test_what_is_added_while_the_flusher_dies_is_for_its_successor(self) -> None:
        calls, succeeded = 0, threading.Event()

        def work() -> None:
            nonlocal calls
            calls += 1
            if calls == 1:
                flusher.wake()
                raise SystemExit  # which ends a thread without a word
            succeeded.set()

        flusher = OnDemandThread(work, idle=0.0)
        flusher.wake()
        assert succeeded.wait(PATIENCE)

    def test_where_no_thread_can_be_started_each_pushes_for_itself(
        self, queue: Queue, gate: Gate, others: MakeOthers, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def exits(_finish: Any) -> Any:
            raise SystemExit  # a signal handler does that

        made = others(busy=False)
        with monkeypatch.context() as patched:
            patched.setattr("_thread.start_new_thread", refused)
            assert queue.push({"id": "x", "payload": 1}) == 1
            assert queue.push([{"id": "y"}, {"id": "x", "payload": 2}]) == 2
            gate.instead[len(gate.writes)] = exits
            with pytest.raises(SystemExit):
                queue.push({"id": "y"})
        assert queue.push({"id": "x", "payload": 3}) == 1
        assert payloads(queue, "x") == [1, 2, 3]
        assert made.finish() == {}

    def test_where_no_thread_can_be_started_a_coroutine_uses_those_of_the_executor(
        self, app: lowq.Lowq, queue: Queue, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def produce(executor: ThreadPoolExecutor) -> list[Any]:
            asyncio.get_running_loop().set_default_executor(executor)
            await asyncio.to_thread(int)
            with monkeypatch.context() as patched:
                patched.setattr("_thread.start_new_thread", refused)
                patched.setattr(threading.Thread, "start", refused)
                app.registrations.forget()
                results = [await queue.apush({"id": "x"})]
                executor.shutdown()
                app.registrations.forget()
                return results + await outcomes(queue.apush({"id": "y"}))

        with ThreadPoolExecutor(1) as executor:
            accepted, error = asyncio.run(produce(executor))
        assert accepted == 1
        assert isinstance(error, RedisUnavailable)
        assert "no thread could be started" in str(error)

    def test_a_push_within_a_source_does_not_wait_for_itself(self, queue: Queue, others: MakeOthers) -> None:
        made = others(busy=False)
        assert queue.push(job for job in [{"id": 1}, {"id": queue.push({"id": 2})}]) == 2
        assert made.finish() == {}


class TestInsidePerform:
    """A push counts against the deadline of the batch that its caller performs."""

    def test_a_thread_waits_until_then_and_what_it_gave_up_is_not_sent(self, queue: Queue, others: MakeOthers) -> None:
        made = others()
        made.push(1, {"id": "other"})
        with within_batch(0.1) as batch:
            with pytest.raises(PushInterrupted, match="until the deadline of the batch") as caught:
                queue.push({"id": "mine"})
            assert (caught.value.accepted, caught.value.rest) == (0, [{"id": "mine"}])
            batch.seconds = 0.0
            with pytest.raises(PushInterrupted, match="0 payloads are in") as caught:
                queue.push({"id": "mine"})
            assert isinstance(caught.value.__cause__, TimeLimitExceeded)
        assert made.finish() == {1: 1}
        assert payloads(queue, "mine") == []

    def test_past_it_a_coroutine_pushes_nothing_and_others_do(self, queue: Queue) -> None:
        async def produce() -> list[Any]:
            with within_batch(0.0):
                late = [asyncio.create_task(queue.apush({"id": "late"})) for _ in range(2)]
            return await outcomes(*late, *(queue.apush({"id": number}) for number in range(3)))

        *late, a, b, c = asyncio.run(produce())
        assert [(type(error), type(error.__cause__)) for error in late] == [(PushInterrupted, TimeLimitExceeded)] * 2
        assert [a, b, c] == [1, 1, 1]
        assert payloads(queue, "late") == []


# --- client middlewares ---

tenant: contextvars.ContextVar[str] = contextvars.ContextVar("tenant", default="nobody")
MakeQueue = Callable[..., Queue]


@pytest.fixture
def make_queue() -> Iterator[MakeQueue]:
    """Makes a queue with these client middlewares. What they do concerns no store."""
    made: list[lowq.Lowq] = []

    def make(*middlewares: Any, shards_count: int = 3, capacity: int | None = None) -> Queue:
        made.append(lowq.Lowq(redis_url="memory://", client_middlewares=list(middlewares)))
        return made[-1].queue("Orders", shards_count, capacity=capacity)

    yield make
    for app in made:
        app.close()


async def produce(queue: Queue, count: int) -> list[Any]:
    """Each push in a context of its own."""

    async def one(number: int) -> int:
        tenant.set(f"tenant-{number}")
        return await queue.apush({"id": number})

    return await outcomes(*(one(number) for number in range(count)))


class TestClientMiddlewares:
    def test_sync_ones_run_once_per_caller_and_see_its_context(self, make_queue: MakeQueue) -> None:
        met: list[tuple[str, list[Any]]] = []

        def stamp(worker: Any, jobs: list[Any], call_next: Callable[[], None]) -> None:
            met.append((tenant.get(), list(jobs)))
            if jobs[0]["id"] % 2:
                raise PermissionError("closed on Sundays")
            jobs[:] = [{**job, "payload": tenant.get()} for job in jobs for _ in range(2)]
            call_next()

        queue = make_queue(stamp)
        results = asyncio.run(produce(queue, 20))
        assert results[::2] == [2] * 10
        assert all(isinstance(result, PermissionError) for result in results[1::2])
        assert sorted(met, key=str) == sorted([(f"tenant-{n}", [{"id": n}]) for n in range(20)], key=str)
        assert [payloads(queue, n) for n in range(20)] == [[] if n % 2 else [f"tenant-{n}"] for n in range(20)]

    def test_many_that_wait_for_room_behind_sync_ones_need_no_thread_each(self, make_queue: MakeQueue) -> None:
        wrapped: list[Any] = []

        def look(worker: Any, jobs: list[Any], call_next: Callable[[], None]) -> None:
            call_next()
            wrapped.extend(jobs)

        queue = make_queue(look, shards_count=1, capacity=1)
        queue.push("other")
        before = live_threads()

        async def produce() -> None:
            pushes = [asyncio.create_task(queue.apush(f"{number}", timeout=NEVER)) for number in range(100)]
            pushes.append(asyncio.create_task(queue.apush(iter([{"id": "listed"}]), timeout=NEVER)))
            await auntil(lambda: len(wrapped) == 102, "all are encoded")
            await auntil(lambda: live_threads() < before + 20, "they need no threads")
            for push in pushes:
                push.cancel()
            results = await outcomes(*pushes)
            assert all(isinstance(result, asyncio.CancelledError) for result in results)

        asyncio.run(produce())

    def test_async_ones_run_in_the_callers_task(self, make_queue: MakeQueue) -> None:
        met: list[Any] = []

        async def stamp(worker: Any, jobs: list[Any], call_next: Callable[[], Awaitable[None]]) -> None:
            await asyncio.sleep(0)
            met.append(asyncio.current_task())
            jobs[:] = [{**job, "payload": tenant.get()} for job in jobs]
            await call_next()

        queue = make_queue(stamp)
        assert asyncio.run(produce(queue, 20)) == [1] * 20
        assert len(set(met)) == 20
        assert all(payloads(queue, n) == [f"tenant-{n}"] for n in range(20))
        with pytest.raises(MiddlewareError, match="returned a coroutine"):
            queue.push({"id": 1})

    def test_async_ones_are_called_for_each_chunk_and_say_what_is_in_when_one_fails(
        self, make_queue: MakeQueue
    ) -> None:
        met: list[int] = []

        async def look(worker: Any, jobs: list[Any], call_next: Callable[[], Awaitable[None]]) -> None:
            met.append(len(jobs))
            if len(jobs) == 100:
                raise PermissionError("closed on Sundays")
            await call_next()

        queue = make_queue(look)
        assert asyncio.run(queue.apush({"id": n} for n in range(5200))) == 5200
        assert met == [5000, 200]
        with pytest.raises(PushError, match="closed on Sundays") as caught:
            asyncio.run(queue.apush([{"id": n} for n in range(5100)]))
        assert (caught.value.accepted, caught.value.rest) == (5000, [{"id": n} for n in range(5000, 5100)])

    def test_as_many_long_pushes_as_there_are_threads_wait_for_nobody(self, make_queue: MakeQueue) -> None:
        async def look(worker: Any, jobs: list[Any], call_next: Callable[[], Awaitable[None]]) -> None:
            await asyncio.to_thread(len, jobs)
            await call_next()

        queue = make_queue(look)

        async def produce() -> list[Any]:
            asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
            pushes = (queue.apush([{"id": f"{n}-{i}"} for i in range(101)]) for n in range(4))
            return await asyncio.wait_for(outcomes(*pushes), PATIENCE)

        assert asyncio.run(produce()) == [101] * 4

    def test_a_loop_that_is_closed_while_they_run_leaves_no_thread(self, make_queue: MakeQueue) -> None:
        running = asyncio.Event()

        async def hang(worker: Any, jobs: list[Any], call_next: Callable[[], Awaitable[None]]) -> None:
            running.set()
            await asyncio.sleep(PATIENCE)

        queue = make_queue(hang)

        async def produce() -> "asyncio.Task[int]":
            task = asyncio.create_task(queue.apush({"id": n} for n in range(300)))
            await running.wait()
            return task

        before = set(threading.enumerate())
        loop = asyncio.new_event_loop()
        task = loop.run_until_complete(produce())
        task.cancel()
        loop.run_until_complete(asyncio.wait([task]))
        loop.close()
        until(lambda: set(threading.enumerate()) <= before, "its threads have ended")

    def test_one_with_both_forms_serves_both_ways_and_all_must_be_of_one_kind(self, make_queue: MakeQueue) -> None:
        met: list[str] = []

        class Both:
            def __call__(self, worker: Any, jobs: list[Any], call_next: Callable[[], None]) -> None:
                met.append("thread")
                call_next()

            async def acall(self, worker: Any, jobs: list[Any], call_next: Callable[[], Awaitable[None]]) -> None:
                met.append("task")
                await call_next()

        def plain(worker: Any, jobs: list[Any], call_next: Callable[[], None]) -> None:
            call_next()

        async def forgets(worker: Any, jobs: list[Any], call_next: Callable[[], Awaitable[None]]) -> None:
            pass

        for middlewares, way in (([Both()], "task"), ([Both(), plain], "thread")):
            met.clear()
            queue = make_queue(*middlewares)
            assert (queue.push({"id": 1}), asyncio.run(queue.apush({"id": 2}))) == (1, 1)
            assert met == ["thread", way]
        for wrong, message in (
            ([forgets, plain], "all client middlewares must be of one kind"),
            ([forgets], "returned without awaiting call_next"),
        ):
            with pytest.raises(MiddlewareError, match=message):
                asyncio.run(make_queue(*wrong).apush({"id": 1}))
