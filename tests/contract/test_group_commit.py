"""Pushes of many coroutines and threads that meet, on both stores: they leave together, and each caller has its own
outcome.
"""

import _thread
import asyncio
import contextvars
import itertools
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

import lowq
from lowq.errors import (
    JobError,
    MiddlewareError,
    PayloadError,
    PushError,
    PushInterrupted,
    RedisUnavailable,
    ScriptError,
    TimeLimitExceeded,
)
from lowq.group_commit import GroupCommit
from lowq.group_commit.requests import Request, SharedCall
from lowq.group_commit.writer import Writer
from lowq.queue import Queue
from lowq.queue_options import QueueOptions
from lowq.routes import Routes
from lowq.sharding import Layouts
from lowq.store import Call, Client, caller_limit
from lowq.store.keys import queues_key
from tests.rows import case
from tests.waiting import PATIENCE, auntil, until


@pytest.fixture
def queue(app: lowq.Lowq) -> Queue:
    queue = app.queue("Orders", 3)
    queue.push({"id": "first"})
    return queue


class Batch:
    """What a limited batch shows to producers: so many seconds from when they ask, however late a busy machine does."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    @property
    def deadline(self) -> float:
        return time.monotonic() + self._seconds


class Slow:
    """A client whose store does not count as embedded: so a loop has a thread send what it pushes."""

    is_embedded = False

    def __init__(self, client: Client) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


class Gate:
    """Counts the writes of threads, and keeps them waiting while it is closed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        #: The pushes' calls of each write.
        self.writes: list[list[Call]] = []
        self.opened = threading.Event()
        self.opened.set()
        start = Client.start

        def waiting(client: Client, calls: Sequence[Call], **options: Any) -> Any:
            if calls and calls[0].script == "push":
                self.writes.append(list(calls))
                assert self.opened.wait(PATIENCE)
            return start(client, calls, **options)

        monkeypatch.setattr(Client, "start", waiting)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.opened.set()


def payloads(queue: Queue, job_id: object) -> list[Any]:
    job = queue.peek(job_id)  # type: ignore[arg-type]
    return [] if job is None else [payload for payload, _ in job.payloads]


async def outcomes(*pushes: Awaitable[int]) -> list[Any]:
    return await asyncio.gather(*pushes, return_exceptions=True)


def spoil(app: lowq.Lowq, queue: Queue, job_id: str) -> None:
    """Somebody else writes a key of that id, of a type that no push can do anything with."""
    prefix = queue._prefixes_of(job_id.encode())[0]
    app.client.command("RPUSH", f"{prefix}payloads:{job_id}", "foreign", key=prefix)


class InThreads:
    """Threads that push, all of which wait for the flusher: it has been given something that it can't get rid of."""

    def __init__(self, queue: Queue, gate: Gate) -> None:
        self.queue = queue
        self.pushes = queue._backend.group.threads
        self.direct = self.pushes.direct()
        assert self.direct is not None
        self.gate = gate
        gate.opened.clear()
        self.results: dict[int, Any] = {}
        self.threads: list[threading.Thread] = []
        self.push(-1, {"id": "ahead"})
        until(lambda: len(gate.writes) == 1, "the flusher has something to do")

    def push(self, number: int, jobs: Any, seconds: float | None = None) -> None:
        """``seconds``: how much time its batch has left."""

        def run() -> None:
            if seconds is not None:
                caller_limit.set(Batch(seconds))
            try:
                self.results[number] = self.queue.push(jobs)
            except Exception as error:
                self.results[number] = error

        self.threads.append(threading.Thread(target=run))
        self.threads[-1].start()

    def wait_for(self, count: int) -> None:
        """Until so many wait."""
        until(lambda: len(self.pushes._waiting) == count, f"{count} wait")

    def finish(self) -> dict[int, Any]:
        """Lets them go when all of them wait."""

        def all_wait() -> bool:
            waiting = sum(not item.abandoned for item in list(self.pushes._waiting))  # of a copy: others are added
            return waiting + len(self.results) == len(self.threads) - 1

        until(all_wait, "all wait")
        self.gate.opened.set()
        for thread in self.threads:
            thread.join()
        assert self.results.pop(-1) == 1
        return self.results


# --- coroutines ---


class TestCoroutines:
    def test_each_has_its_own_count(self, queue: Queue) -> None:
        async def produce() -> list[Any]:
            return await outcomes(*(queue.apush([{"id": n, "payload": i} for i in range(n % 5)]) for n in range(60)))

        assert asyncio.run(produce()) == [n % 5 for n in range(60)]
        assert queue.stats().length == 1 + sum(n % 5 > 0 for n in range(60))

    def test_a_bad_job_fails_its_own_push_and_no_other(self, queue: Queue) -> None:
        bad: dict[int, tuple[dict[str, Any], type[Exception]]] = {
            3: ({"id": ""}, JobError),
            7: ({"id": 7, "payload": {1}}, PayloadError),
            8: ({"id": 8, "score": "high"}, JobError),
        }

        async def produce() -> list[Any]:
            jobs: list[dict[str, Any]] = [bad[n][0] if n in bad else {"id": n} for n in range(30)]
            return await outcomes(*map(queue.apush, jobs))

        for number, result in enumerate(asyncio.run(produce())):
            if number in bad:
                assert isinstance(result, bad[number][1])
                assert str(result).startswith("queue 'Orders': ")
            else:
                assert result == 1
        assert queue.stats().length == 28

    def test_a_script_that_fails_on_one_id_fails_only_the_push_of_that_id(self, app: lowq.Lowq, queue: Queue) -> None:
        spoil(app, queue, "spoilt")

        async def produce() -> list[Any]:
            jobs: list[dict[str, Any]] = [
                *({"id": n} for n in range(20)),
                {"id": "spoilt"},
                {"id": "x", "score": 2**40},
            ]
            return await outcomes(*map(queue.apush, jobs))

        *good, spoilt, last = asyncio.run(produce())
        assert good == [1] * 20
        assert last == 1
        assert isinstance(spoilt, ScriptError)
        assert queue.fetch(range(20)).keys() == {str(n) for n in range(20)}

    def test_what_the_others_append_beside_a_foreign_key_is_there_once(self, app: lowq.Lowq) -> None:
        queue = app.queue("Appended", 1, merge="append")
        queue.push([{"id": n % 3, "payload": "first"} for n in range(6)])
        spoil(app, queue, "foreign")

        async def produce() -> list[Any]:
            ids = [0, 1, "foreign", 2, 0, "foreign", 1]
            return await outcomes(*(queue.apush({"id": job_id, "payload": "then"}) for job_id in ids))

        results = asyncio.run(produce())
        assert [result if result == 1 else type(result) for result in results] == [
            1, 1, ScriptError, 1, 1, ScriptError, 1
        ]  # fmt: skip
        assert [payloads(queue, job_id).count("then") for job_id in range(3)] == [2, 2, 1]

    def test_pushes_that_say_a_wrong_number_of_shards_follow_what_is_known(self, app: lowq.Lowq, queue: Queue) -> None:
        queue.push([{"id": n} for n in range(20)])
        app.client.command("DEL", queues_key("lowq"))
        app._registered[("Orders", 2)] = QueueOptions("Orders", 2)
        wrong = app.queue("Orders", 2)
        target = wrong._target()
        wrong._last_target = replace(target, routes=Routes(Layouts.plain(2)), prefixes={})

        async def produce() -> list[Any]:
            return await outcomes(*((wrong if n % 2 else queue).apush({"id": 100 + n}) for n in range(20)))

        assert asyncio.run(produce()) == [1] * 20
        assert queue.stats().length == 41

    @pytest.mark.parametrize("known", [True, False])
    def test_no_thread_of_the_loop_is_needed(self, app: lowq.Lowq, known: bool) -> None:
        """All of them may be waiting for pushes: asgiref's ``async_to_sync`` within ``sync_to_async`` does that."""
        queue = app.queue("Orders", 3)
        if known:
            queue.push({"id": "first"})

        async def produce() -> list[int]:
            loop = asyncio.get_running_loop()
            loop.set_default_executor(ThreadPoolExecutor(2))

            def view(number: int) -> int:
                return asyncio.run_coroutine_threadsafe(queue.apush({"id": number}), loop).result()

            views = (asyncio.to_thread(view, number) for number in range(4))
            return await asyncio.wait_for(asyncio.gather(*views), PATIENCE)

        assert asyncio.run(produce()) == [1] * 4

    @pytest.mark.parametrize("known", [True, False])
    def test_pushes_that_one_task_starts_together_keep_their_order(self, app: lowq.Lowq, known: bool) -> None:
        queue = app.queue("Orders", 3)
        if known:
            queue.push({"id": "first"})

        async def produce() -> None:
            for start in (0, 300):
                pushes = (queue.apush({"id": "x", "payload": number}) for number in range(start, start + 300))
                assert await asyncio.gather(*pushes) == [1] * 300

        asyncio.run(produce())
        assert payloads(queue, "x") == list(range(600))

    def test_who_comes_when_the_queue_was_just_registered_does_not_overtake_those_who_waited_for_that(
        self, app: lowq.Lowq
    ) -> None:
        async def produce(queue: Queue) -> None:
            tasks: list[asyncio.Task[int]] = []
            while len(tasks) < 300 or queue._last_target is None:
                tasks.append(asyncio.create_task(queue.apush({"id": "x", "payload": len(tasks)})))
                await asyncio.sleep(0)
            await asyncio.gather(*tasks)

        for _ in range(3):
            queue = app.queue("Orders", 3)
            app.forget_registered()
            asyncio.run(produce(queue))
            found = payloads(queue, "x")
            assert found == sorted(found)
            queue.delete("x")

    def test_scores_and_times_are_each_jobs_own(self, queue: Queue) -> None:
        async def produce() -> None:
            jobs: list[dict[str, Any]] = [{"id": 1, "score": 1e9}, {"id": 2}, {"id": 3, "delay": 3600}, {"id": 4}]
            assert await asyncio.gather(*(queue.apush(job) for job in jobs)) == [1] * 4

        asyncio.run(produce())
        found = queue.fetch([1, 2, 3, 4])
        assert [found[job_id].state for job_id in "1234"] == ["due", "due", "scheduled", "due"]
        assert found["1"].payloads == [("", 1e9)]

    def test_a_loop_that_comes_after_another_one_and_several_at_once(self, queue: Queue) -> None:
        async def produce(start: int) -> None:
            for number in range(start, start + 20):
                assert await queue.apush({"id": number}) == 1

        asyncio.run(produce(0))
        threads = [threading.Thread(target=asyncio.run, args=(produce(n * 100),)) for n in range(1, 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        asyncio.run(produce(900))
        assert queue.stats().length == 121

    def test_any_number_in_any_form(self, app: lowq.Lowq) -> None:
        forms: tuple[Callable[[Any], Any], ...] = (list, tuple, iter)
        for form, count in itertools.product(forms, (0, 1, 100, 101, 12_000)):
            with case(form, count):
                queue = app.queue(f"{form.__name__}{count}", 3)
                queue.push({"id": "first"})
                told: list[int] = []
                assert asyncio.run(queue.apush(form([{"id": n} for n in range(count)]), told.append)) == count
                assert queue.stats().length == 1 + count
                assert told[-1:] == ([count] if count else [])

    @pytest.mark.parametrize("length", [3, 300])
    def test_what_the_source_raises_is_raised(self, queue: Queue, length: int) -> None:
        class Rows(Sequence[Any]):
            def __len__(self) -> int:
                return length

            def __getitem__(self, index: Any) -> Any:
                if index == 2:
                    raise ConnectionResetError("the database is gone")
                return {"id": index}

        with pytest.raises(ConnectionResetError, match="the database is gone"):
            asyncio.run(queue.apush(Rows()))
        assert queue.stats().length == 1

    def test_large_payloads(self, queue: Queue) -> None:
        async def produce() -> list[Any]:
            pushes = [queue.apush({"id": n, "payload": "x" * 500_000}) for n in range(5)]
            return await outcomes(*pushes, queue.apush([{"id": "m", "payload": [n, "y" * 9000]} for n in range(30)]))

        assert asyncio.run(produce()) == [1] * 5 + [30]

    def test_what_is_no_job_is_refused(self, queue: Queue) -> None:
        wrong: Any
        for wrong in (4.2, None, b"id", [1], ["id"], [[{"id": 1}]]):
            with case(wrong), pytest.raises(JobError, match="queue 'Orders': "):
                asyncio.run(queue.apush(wrong))

    def test_a_worker_may_put_something_in_front_of_both_ways(self, app: lowq.Lowq) -> None:
        @app.worker
        class Tenants(lowq.Worker[Any]):
            def perform(self, payloads_by_id: dict[str, list[Any]]) -> None: ...

            @classmethod
            def perform_async(cls, jobs: Any) -> int:  # type: ignore[override]  # as it was before timeout
                return super().perform_async([{**job, "id": f"t-{job['id']}"} for job in jobs])

        assert asyncio.run(Tenants.aperform_async([{"id": 1}])) == 1
        assert Tenants.queue.peek("t-1") is not None


class TestCancellation:
    def test_what_waits_is_withdrawn_and_the_others_go_on(self, queue: Queue) -> None:
        async def produce() -> list[Any]:
            tasks = [asyncio.create_task(queue.apush({"id": n})) for n in range(20)]
            await asyncio.sleep(0)  # all have begun: the first one is under way, at most
            for task in tasks[5:15]:
                task.cancel()
            return await outcomes(*tasks)

        results = asyncio.run(produce())
        assert [result == 1 for result in results] == [n not in range(5, 15) for n in range(20)]
        assert all(isinstance(result, asyncio.CancelledError) for result in results[5:15])
        assert queue.fetch(range(20)).keys() == {str(n) for n in range(20) if n not in range(5, 15)}

    def test_a_task_that_is_cancelled_before_it_began_pushes_nothing(self, queue: Queue) -> None:
        async def produce() -> None:
            task = asyncio.create_task(queue.apush({"id": 1}))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await queue.apush({"id": 2}) == 1

        asyncio.run(produce())
        assert queue.peek(1) is None

    def test_what_waits_for_its_thread_is_withdrawn_and_nothing_older_follows_what_is_newer(
        self, app: lowq.Lowq, queue: Queue, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The machine is busy: the thread that is to send it starts late."""
        writer = app.group.writer
        starts, pushes = threading.Event(), []
        send = Writer.send

        def late(writer: Writer, write: Sequence[Request]) -> None:
            pushes.append(list(write))
            assert starts.wait(PATIENCE)
            send(writer, write)

        async def produce() -> None:
            loop_pushes = app.group.of_loop(asyncio.get_running_loop())
            monkeypatch.setattr(Writer, "send", late)
            monkeypatch.setattr(writer, "client", Slow(writer.client))
            task = asyncio.create_task(queue.apush({"id": "x", "payload": "old"}))
            await auntil(lambda: pushes, "it waits for its thread")
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await asyncio.to_thread(queue.push, {"id": "x", "payload": "new"}) == 1
            starts.set()
            await auntil(lambda: not loop_pushes._under_way, "its write has ended")

        asyncio.run(produce())
        assert payloads(queue, "x") == ["new"]
        assert all(isinstance(outcome, RedisUnavailable) for outcome in pushes[0][0].outcomes)

    def test_a_source_that_is_being_read_is_not_pushed(self, queue: Queue) -> None:
        """Also when threads push meanwhile, so that a push of a thread waits for the flusher."""
        reading, cancelled, ended = threading.Event(), threading.Event(), threading.Event()

        def source() -> Iterator[dict[str, Any]]:
            reading.set()
            assert cancelled.wait(PATIENCE)
            yield {"id": 1}
            ended.set()

        async def produce() -> None:
            task = asyncio.create_task(queue.apush(source()))
            await asyncio.to_thread(reading.wait, PATIENCE)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            cancelled.set()

        direct = queue._backend.group.threads.direct()
        assert direct is not None
        asyncio.run(produce())
        assert ended.wait(PATIENCE)
        assert queue.peek(1) is None

    def test_no_chunk_follows_the_one_that_is_under_way(self, queue: Queue) -> None:
        going_on, cancelled = threading.Event(), threading.Event()
        read = 0

        def source() -> Iterator[dict[str, Any]]:
            nonlocal read
            for number in range(40_000):
                if number == 12_000:
                    going_on.set()
                    assert cancelled.wait(PATIENCE)
                read += 1
                yield {"id": number}

        async def produce() -> None:
            task = asyncio.create_task(queue.apush(source()))
            await asyncio.to_thread(going_on.wait, PATIENCE)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            cancelled.set()

        asyncio.run(produce())
        until(lambda: read >= 15_000 and queue.stats().length >= 10_001, "what was under way")
        assert read == 15_000
        assert queue.stats().length == 10_001


# --- threads ---


class TestThreads:
    def test_those_that_meet_leave_in_one_write_with_one_call_per_shard(self, queue: Queue, gate: Gate) -> None:
        queue.push([{"id": 100 + n} for n in range(12)])  # all shards are there
        del gate.writes[:]
        threads = InThreads(queue, gate)
        for number in range(12):
            threads.push(number, [{"id": n, "payload": number} for n in range(number + 1)])
        assert threads.finish() == {number: number + 1 for number in range(12)}
        assert len(gate.writes) == 2
        assert len(gate.writes[1]) == 3
        assert sorted(payloads(queue, 0)) == list(range(12))

    def test_each_has_its_own_error(self, app: lowq.Lowq, queue: Queue, gate: Gate) -> None:
        spoil(app, queue, "spoilt")
        threads = InThreads(queue, gate)
        threads.push(0, {"id": 0})
        threads.push(1, {"id": 1, "payload": {2}})
        threads.push(2, [{"id": 2}, {"id": "spoilt"}])
        for number in range(3, 9):
            threads.push(number, [{"id": number}, {"id": 100 + number}])
        results = threads.finish()
        assert results.pop(0) == 1
        assert isinstance(results.pop(1), PayloadError)
        spoilt = results.pop(2)
        # Whether the other job is in depends on its shard: it is another one, so it is.
        assert isinstance(spoilt, ScriptError | PushError)
        assert list(results.values()) == [2] * 6
        assert queue.fetch(range(103, 109)).keys() == {str(n) for n in range(103, 109)}

    def test_what_is_left_out_when_calls_are_made_again_does_not_count_as_accepted(
        self, app: lowq.Lowq, gate: Gate, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its time is up, and its caller is still there to see the outcome."""
        monkeypatch.setattr("lowq.group_commit.threads.GRACE", PATIENCE)
        set_outcomes = Writer.set_outcomes

        def late(writer: Writer, calls: Sequence[SharedCall], *rest: Any) -> None:
            if len(calls[0].members) == 3:
                until(calls[0].members[1][0].is_abandoned, "its time is up")
            set_outcomes(writer, calls, *rest)

        monkeypatch.setattr(Writer, "set_outcomes", late)
        single = app.queue("Single", 1)
        single.push({"id": "first"})
        spoil(app, single, "spoilt")
        gate.writes.clear()
        threads = InThreads(single, gate)
        for number, (job_id, seconds) in enumerate([("spoilt", None), ("late", 0.5), ("in time", None)]):
            threads.push(number, {"id": job_id}, seconds)
            threads.wait_for(number + 1)
        results = threads.finish()
        spoilt, left_out, in_time = (results[number] for number in range(3))
        assert isinstance(spoilt, ScriptError)
        assert isinstance(left_out, PushInterrupted)
        assert in_time == 1
        assert single.fetch(["late", "in time"]).keys() == {"in time"}

    def test_a_call_that_is_made_for_one_caller_alone_is_repeated_like_any_other(
        self, app: lowq.Lowq, queue: Queue, gate: Gate, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The connection breaks just then."""
        start = Client.start
        cut: list[bool] = []

        def breaking(client: Client, calls: Sequence[Call], **options: Any) -> Callable[[], list[Any]]:
            finish = start(client, calls, **options)
            if not cut and len(gate.writes) == 3:
                cut.append(True)
                finish()
                return lambda: [RedisUnavailable("cut")] * len(calls)
            return finish

        monkeypatch.setattr(Client, "start", breaking)
        spoil(app, queue, "spoilt")
        threads = InThreads(queue, gate)
        threads.push(0, {"id": "spoilt"})
        for number in range(1, 9):
            threads.push(number, {"id": number})
        results = threads.finish()
        assert cut == [True]
        assert isinstance(results.pop(0), ScriptError)
        assert list(results.values()) == [1] * 8

    def test_a_lone_one_has_nothing_to_do_with_it(self, queue: Queue, gate: Gate) -> None:
        queue.push([{"id": 100 + n} for n in range(12)])  # all shards are there
        del gate.writes[:]
        threads = queue._backend.group.threads
        for number in range(5):
            assert queue.push({"id": number}) == 1
        assert not threads.flusher.is_running
        assert [len(calls) for calls in gate.writes] == [1] * 5

    def test_the_right_to_push_directly_is_free_again_after_an_error(
        self, queue: Queue, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_args: Any, **_options: Any) -> Any:
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(Client, "start", fail)
            with pytest.raises(KeyboardInterrupt) as caught:
                queue.push({"id": 1})
        assert caught.value is not None  # somebody keeps it, and its frames
        assert not queue._backend.group.threads.is_busy

    def test_a_large_push_does_not_go_with_others(self, queue: Queue, gate: Gate) -> None:
        queue.push([{"id": n} for n in range(12)])  # all shards are there
        del gate.writes[:]
        threads = InThreads(queue, gate)
        threads.push(0, {"id": 0})
        threads.push(1, {"id": 1, "payload": "x" * 70_000})
        threads.push(2, [{"id": n} for n in range(101)])
        until(lambda: len(gate.writes) == 3, "the large ones were sent, while the small one waits")
        threads.gate.opened.set()
        for thread in threads.threads:
            thread.join()
        assert threads.results == {-1: 1, 0: 1, 1: 1, 2: 101}
        assert len(gate.writes) == 4

    def test_the_flusher_goes_when_there_is_nothing_to_do_and_comes_back(self, queue: Queue, gate: Gate) -> None:
        pushes = queue._backend.group.threads
        pushes.flusher._idle = 0.01
        for number in range(3):
            threads = InThreads(queue, gate)
            threads.push(0, {"id": number})
            assert threads.finish() == {0: 1}
            del threads
            gate.writes.clear()
            until(lambda: not pushes.flusher.is_running, "no flusher")

    def test_a_signal_handler_that_pushes_while_the_flusher_is_started_does_not_wait_for_what_it_has_interrupted(
        self, queue: Queue, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        start_new_thread = _thread.start_new_thread
        pushed: list[int] = []

        def interrupted(*args: Any) -> int:
            ident = start_new_thread(*args)
            if not pushed:
                pushed.append(0)
                pushed.append(queue.push({"id": "handler"}))
            return ident

        direct = queue._backend.group.threads.direct()
        assert direct is not None
        monkeypatch.setattr("_thread.start_new_thread", interrupted)
        assert queue.push({"id": "interrupted"}) == 1
        assert pushed == [0, 1]

    def test_a_flusher_that_dies_has_a_successor(self, queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
        pushes = queue._backend.group.threads
        died: list[bool] = []

        def die(writer: Writer, waiting: Any, write: Any) -> None:
            died.append(True)
            raise SystemExit

        direct = pushes.direct()
        assert direct is not None
        with monkeypatch.context() as patched:
            patched.setattr(Writer, "take_next", die)
            token = caller_limit.set(Batch(0.1))
            with pytest.raises(PushInterrupted):
                queue.push({"id": "unlucky"})
            caller_limit.reset(token)
            until(lambda: died and not pushes.flusher.is_running, "it is dead")
        assert queue.push({"id": "next"}) == 1

    def test_where_no_thread_can_be_started_each_pushes_for_itself(
        self, queue: Queue, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refused(*_args: Any) -> int:
            raise RuntimeError("can't start new thread")

        def exits(*_args: Any, **_options: Any) -> Any:
            raise SystemExit  # a signal handler does that

        direct = queue._backend.group.threads.direct()
        assert direct is not None
        with monkeypatch.context() as patched:
            patched.setattr("_thread.start_new_thread", refused)
            assert queue.push({"id": "x", "payload": 1}) == 1
            assert queue.push([{"id": "y"}, {"id": "x", "payload": 2}]) == 2
            assert not queue._backend.group.threads._waiting
            monkeypatch.setattr(Client, "start", exits)
            with pytest.raises(SystemExit):
                queue.push({"id": "y"})
        monkeypatch.undo()
        assert queue.push({"id": "x", "payload": 3}) == 1
        assert payloads(queue, "x") == [1, 2, 3]

    def test_where_no_thread_can_be_started_a_coroutine_uses_those_of_the_executor(
        self, app: lowq.Lowq, queue: Queue, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refused(*_args: Any) -> int:
            raise RuntimeError("can't start new thread")

        async def produce(executor: ThreadPoolExecutor) -> list[Any]:
            asyncio.get_running_loop().set_default_executor(executor)
            await asyncio.to_thread(int)
            with monkeypatch.context() as patched:
                patched.setattr("_thread.start_new_thread", refused)
                patched.setattr(threading.Thread, "start", refused)
                app.forget_registered()
                results = [await queue.apush({"id": "x"})]
                executor.shutdown()
                app.forget_registered()
                return results + await outcomes(queue.apush({"id": "y"}))

        with ThreadPoolExecutor(1) as executor:
            accepted, error = asyncio.run(produce(executor))
        assert accepted == 1
        assert isinstance(error, RedisUnavailable)
        assert "no thread could be started" in str(error)

    def test_a_primary_that_is_used_for_the_first_time_meanwhile(self, store_url: str) -> None:
        class OfCluster(Client):
            is_cluster = True

        client = OfCluster(store_url, size=1, timeout=1)
        group = GroupCommit(client, 1)
        group._threads_of(("first", 1))
        # Another thread's first push to a primary, while this one looks whether the first primary is busy.
        group._threads[None]._direct = lambda: (group._threads_of(("second", 1)), None)[1]
        assert not group.is_busy
        assert len(group._threads) == 3

    def test_a_push_within_a_signal_handler_or_a_source_does_not_wait_for_itself(self, queue: Queue) -> None:
        direct = queue._backend.group.threads.direct()
        assert direct is not None
        assert queue.push(job for job in [{"id": 1}, {"id": queue.push({"id": 2})}]) == 2


# --- client middlewares ---


tenant: contextvars.ContextVar[str] = contextvars.ContextVar("tenant", default="nobody")


class TestInsidePerform:
    """A push counts against the deadline of the batch that its caller performs."""

    def test_a_thread_waits_until_then_and_what_it_gave_up_is_not_sent(self, queue: Queue, gate: Gate) -> None:
        others = InThreads(queue, gate)
        others.push(1, {"id": "other"})
        token = caller_limit.set(Batch(0.1))
        with pytest.raises(PushInterrupted, match="until the deadline of the batch") as caught:
            queue.push({"id": "mine"})
        assert (caught.value.accepted, caught.value.rest) == (0, [{"id": "mine"}])
        caller_limit.set(Batch(0.0))
        with pytest.raises(PushInterrupted, match="0 payloads are in") as caught:
            queue.push({"id": "mine"})
        assert isinstance(caught.value.__cause__, TimeLimitExceeded)
        caller_limit.reset(token)
        assert others.finish() == {1: 1}
        assert payloads(queue, "mine") == []

    def test_past_it_a_coroutine_pushes_nothing_and_others_do(self, queue: Queue) -> None:
        async def produce() -> list[Any]:
            token = caller_limit.set(Batch(0.0))
            late = [asyncio.create_task(queue.apush({"id": "late"})) for _ in range(2)]
            caller_limit.reset(token)
            return await outcomes(*late, *(queue.apush({"id": number}) for number in range(3)))

        *late, a, b, c = asyncio.run(produce())
        assert [type(error) for error in late] == [PushInterrupted] * 2
        assert [type(error.__cause__) for error in late] == [TimeLimitExceeded] * 2
        assert [a, b, c] == [1, 1, 1]
        assert payloads(queue, "late") == []


class TestClientMiddlewares:
    async def produce(self, queue: Queue, count: int = 20) -> list[Any]:
        async def one(number: int) -> int:
            tenant.set(f"tenant-{number}")
            return await queue.apush({"id": number})

        return await outcomes(*(one(number) for number in range(count)))

    def test_sync_ones_run_once_per_caller_and_see_its_context(self, store_url: str) -> None:
        met: list[tuple[str, list[Any]]] = []

        def stamp(worker: Any, jobs: list[Any], call_next: Callable[[], None]) -> None:
            met.append((tenant.get(), list(jobs)))
            jobs[:] = [{**job, "payload": tenant.get()} for job in jobs]
            call_next()

        app = lowq.Lowq(redis_url=store_url, client_middlewares=[stamp])
        queue = app.queue("Orders", 3)
        assert asyncio.run(self.produce(queue)) == [1] * 20
        assert sorted(met, key=str) == sorted([(f"tenant-{n}", [{"id": n}]) for n in range(20)], key=str)
        assert all(payloads(queue, n) == [f"tenant-{n}"] for n in range(20))
        app.close()

    @pytest.mark.parametrize("count", [20, 1])
    def test_async_ones_run_in_the_callers_task(self, store_url: str, count: int) -> None:
        met: list[Any] = []

        async def stamp(worker: Any, jobs: list[Any], call_next: Callable[[], Awaitable[None]]) -> None:
            await asyncio.sleep(0)
            met.append(asyncio.current_task())
            jobs[:] = [{**job, "payload": tenant.get()} for job in jobs]
            await call_next()

        app = lowq.Lowq(redis_url=store_url, client_middlewares=[stamp])
        queue = app.queue("Orders", 3)
        assert asyncio.run(self.produce(queue, count)) == [1] * count
        assert len(set(met)) == count
        assert all(payloads(queue, n) == [f"tenant-{n}"] for n in range(count))
        with pytest.raises(MiddlewareError, match="returned a coroutine"):
            queue.push({"id": 1})
        app.close()

    def test_async_ones_are_called_for_each_chunk_of_a_long_push(self, store_url: str) -> None:
        met: list[int] = []

        async def look(worker: Any, jobs: list[Any], call_next: Callable[[], Awaitable[None]]) -> None:
            met.append(len(jobs))
            await call_next()

        app = lowq.Lowq(redis_url=store_url, client_middlewares=[look])
        assert asyncio.run(app.queue("Orders", 3).apush({"id": n} for n in range(5200))) == 5200
        assert met == [5000, 200]
        app.close()

    def test_as_many_long_pushes_as_there_are_threads_wait_for_nobody(self, store_url: str) -> None:
        async def look(worker: Any, jobs: list[Any], call_next: Callable[[], Awaitable[None]]) -> None:
            await asyncio.to_thread(len, jobs)
            await call_next()

        app = lowq.Lowq(redis_url=store_url, client_middlewares=[look])
        queue = app.queue("Orders", 3)

        async def produce() -> list[Any]:
            asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
            pushes = (queue.apush([{"id": f"{n}-{i}"} for i in range(101)]) for n in range(4))
            return await asyncio.wait_for(outcomes(*pushes), PATIENCE)

        assert asyncio.run(produce()) == [101] * 4
        app.close()

    def test_a_loop_that_is_closed_while_they_run_leaves_no_thread(self, store_url: str) -> None:
        async def hang(worker: Any, jobs: list[Any], call_next: Callable[[], Awaitable[None]]) -> None:
            running.set()
            await asyncio.sleep(PATIENCE)

        async def produce() -> "asyncio.Task[int]":
            task = asyncio.create_task(queue.apush({"id": n} for n in range(300)))
            await running.wait()
            return task

        running = asyncio.Event()
        app = lowq.Lowq(redis_url=store_url, client_middlewares=[hang])
        queue = app.queue("Orders", 3)
        before = set(threading.enumerate())
        loop = asyncio.new_event_loop()
        task = loop.run_until_complete(produce())
        task.cancel()
        loop.run_until_complete(asyncio.wait([task]))
        loop.close()
        until(lambda: set(threading.enumerate()) <= before, "its threads have ended")
        app.close()

    def test_one_that_fails_on_a_later_chunk_says_what_is_in_and_what_is_left(self, store_url: str) -> None:
        async def look(worker: Any, jobs: list[Any], call_next: Callable[[], Awaitable[None]]) -> None:
            if len(jobs) < 5000:
                raise PermissionError("closed on Sundays")
            await call_next()

        app = lowq.Lowq(redis_url=store_url, client_middlewares=[look])
        queue = app.queue("Orders", 3)
        with pytest.raises(PushError, match="closed on Sundays") as caught:
            asyncio.run(queue.apush([{"id": n} for n in range(5200)]))
        assert caught.value.accepted == 5000
        assert caught.value.rest == [{"id": n} for n in range(5000, 5200)]
        app.close()

    def test_the_veto_of_one_caller_is_its_own(self, store_url: str) -> None:
        def veto(worker: Any, jobs: list[Any], call_next: Callable[[], None]) -> None:
            if jobs[0]["id"] % 2:
                raise PermissionError("closed on Sundays")
            call_next()

        app = lowq.Lowq(redis_url=store_url, client_middlewares=[veto])
        queue = app.queue("Orders", 3)
        results = asyncio.run(self.produce(queue))
        assert results[::2] == [1] * 10
        assert all(isinstance(result, PermissionError) for result in results[1::2])
        assert queue.stats().length == 10
        app.close()

    def test_one_that_does_not_go_on_is_an_error(self, store_url: str) -> None:
        async def forget(worker: Any, jobs: list[Any], call_next: Callable[[], Awaitable[None]]) -> None:
            pass

        app = lowq.Lowq(redis_url=store_url, client_middlewares=[forget])
        with pytest.raises(MiddlewareError, match="returned without awaiting call_next"):
            asyncio.run(app.queue("Orders", 3).apush({"id": 1}))
        app.close()

    def test_one_with_both_forms_serves_both_ways(self, store_url: str) -> None:
        met: list[str] = []

        class Both:
            def __call__(self, worker: Any, jobs: list[Any], call_next: Callable[[], None]) -> None:
                met.append("thread")
                call_next()

            async def acall(self, worker: Any, jobs: list[Any], call_next: Callable[[], Awaitable[None]]) -> None:
                met.append(f"task {asyncio.current_task() is not None}")
                await call_next()

        def plain(worker: Any, jobs: list[Any], call_next: Callable[[], None]) -> None:
            call_next()

        for middlewares, awaited in (([Both()], "task True"), ([Both(), plain], "thread")):
            met.clear()
            both: list[Any] = middlewares
            app = lowq.Lowq(redis_url=store_url, client_middlewares=both)
            queue = app.queue("Orders", 3)
            assert (queue.push({"id": 1}), asyncio.run(queue.apush({"id": 2}))) == (1, 1)
            assert met == ["thread", awaited]
            app.close()

    def test_a_mix_is_refused(self, store_url: str) -> None:
        async def one(worker: Any, jobs: list[Any], call_next: Callable[[], Awaitable[None]]) -> None:
            await call_next()

        def other(worker: Any, jobs: list[Any], call_next: Callable[[], None]) -> None:
            call_next()

        app = lowq.Lowq(redis_url=store_url, client_middlewares=[one, other])
        with pytest.raises(MiddlewareError, match="all client middlewares must be of one kind"):
            asyncio.run(app.queue("Orders", 3).apush({"id": 1}))
        app.close()

    def test_they_may_make_many_jobs_of_one(self, store_url: str) -> None:
        def multiply(worker: Any, jobs: list[Any], call_next: Callable[[], None]) -> None:
            jobs[:] = [{"id": n} for n in range(3000)]
            call_next()

        app = lowq.Lowq(redis_url=store_url, client_middlewares=[multiply])
        assert asyncio.run(app.queue("Orders", 1).apush({"id": 1})) == 3000
        app.close()
