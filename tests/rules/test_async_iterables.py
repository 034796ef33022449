"""Pushes of async iterables: streamed in chunks, with a bounded number of jobs in memory."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

import lowq
from lowq.testing import drain
from tests.rows import case

#: Jobs of a chunk here.
CHUNK_JOBS = 100
MANY = 2 * CHUNK_JOBS + 17


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowq.push.push.CHUNK_JOBS", CHUNK_JOBS)


@pytest.fixture
def worker(app: lowq.Lowq) -> Any:
    @app.worker(shards_count=3)
    def orders(payloads_by_id: dict[str, list[Any]]) -> None: ...

    return orders


class Source:
    """Jobs, and how many of them were read."""

    def __init__(self, count: int, fails_after: int | None = None) -> None:
        self.read = 0
        self._count = count
        self._fails_after = fails_after

    async def __aiter__(self) -> AsyncIterator[dict[str, Any]]:
        for number in range(self._count):
            if number % 1000 == 0:
                await asyncio.sleep(0)
            if number == self._fails_after:
                raise ZeroDivisionError("the database is gone")
            self.read += 1
            yield {"id": number, "payload": number}


@pytest.mark.parametrize("store_url", ["memory"], indirect=True)
def test_it_is_streamed_with_a_chunk_in_memory_and_progress_is_told(app: lowq.Lowq, worker: Any) -> None:
    async def watch(worker: Any, batch: Any, call_next: Callable[[], Any]) -> None:
        await call_next()

    def plain(worker: Any, batch: Any, call_next: Callable[[], Any]) -> None:
        call_next()

    for middlewares, push in (
        ([], worker.queue.apush),
        ([], worker.aperform_async),
        ([watch], worker.queue.apush),
        ([plain], worker.queue.apush),
    ):
        with case(middlewares, push):
            other = lowq.Lowq(redis_url=app.config.redis_url, client_middlewares=middlewares)
            if middlewares:
                push = other.queue("others", 3).apush
            source, told = Source(MANY), list[tuple[int, int]]()
            pushed = push(source, on_progress=lambda count, of=source, told=told: told.append((of.read, count)))
            assert asyncio.run(pushed) == MANY
            assert told[-1] == (MANY, MANY)
            assert [count for _, count in told] == [CHUNK_JOBS, 2 * CHUNK_JOBS, MANY]
            assert all(read - count <= CHUNK_JOBS for read, count in told)
            worker.queue.clear()
            other.close()


def test_a_few_jobs_go_as_those_of_a_list(worker: Any) -> None:
    assert asyncio.run(worker.queue.apush(Source(3))) == 3
    assert asyncio.run(worker.aperform_async(Source(0))) == 0
    assert drain(worker).performed == 3


def test_what_came_before_the_source_failed_is_in(worker: Any) -> None:
    with pytest.raises(ZeroDivisionError):
        asyncio.run(worker.aperform_async(Source(MANY, fails_after=CHUNK_JOBS + 5)))
    assert worker.queue.stats().length == CHUNK_JOBS


def test_what_was_not_pushed_is_an_async_iterable_too(worker: Any) -> None:
    async def jobs() -> AsyncIterator[dict[str, Any]]:
        async for job in Source(MANY):
            yield job | ({"score": "wrong"} if job["id"] == CHUNK_JOBS + 5 else {})

    async def push() -> int:
        with pytest.raises(lowq.PushError) as failed:
            await worker.queue.apush(jobs())
        assert failed.value.accepted == CHUNK_JOBS
        rest: Any = failed.value.rest

        async def mended() -> AsyncIterator[dict[str, Any]]:
            async for job in rest:
                yield {"id": job["id"]}

        pushed: int = await worker.queue.apush(mended())
        return pushed

    assert asyncio.run(push()) == MANY - CHUNK_JOBS
    assert worker.queue.stats().length == MANY


def test_cancelling_it_ends_the_reading(worker: Any) -> None:
    async def waits() -> AsyncIterator[dict[str, Any]]:
        async for job in Source(CHUNK_JOBS):
            yield job
        await asyncio.Event().wait()

    async def push() -> None:
        first = asyncio.Event()
        loop = asyncio.get_running_loop()
        task = asyncio.create_task(
            worker.queue.apush(waits(), on_progress=lambda _count: loop.call_soon_threadsafe(first.set))
        )
        await first.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(push())
    assert worker.queue.stats().length == CHUNK_JOBS


def test_where_it_can_not_be_read_it_is_said_what_to_do(app: lowq.Lowq, worker: Any) -> None:
    @app.worker
    class Users(lowq.Worker[Any]):
        @classmethod
        def perform_async(cls, jobs: Any, **options: Any) -> int:
            return super().perform_async(jobs, **options)

        def perform(self, payloads_by_id: dict[str, list[Any]]) -> None: ...

    async def one_job() -> dict[str, Any]:
        return {"id": 1}

    async def progress(count: int) -> None: ...

    for push, said in (
        (lambda: worker.queue.push(Source(1)), "an async iterable is pushed by a coroutine: await queue.apush(jobs)"),
        (lambda: worker.perform_async(Source(1)), "await queue.apush(jobs), or aperform_async(jobs)"),
        (lambda: worker.queue.push(one_job()), "not coroutine; await it first"),
        (lambda: asyncio.run(worker.queue.apush(one_job())), "not coroutine; await it first"),
        (lambda: asyncio.run(Users.aperform_async(Source(1))), "write an aperform_async beside it, too"),
        (lambda: worker.queue.push([{"id": 1}], progress), "on_progress is called, and not awaited"),
        (lambda: asyncio.run(worker.queue.apush(Source(1), progress)), "on_progress is called, and not awaited"),
    ):
        with case(said):
            with pytest.raises(lowq.JobError) as refused:
                push()
            assert said in str(refused.value)
    assert worker.perform_async(({"id": n} for n in range(3)), on_progress=(told := list[int]()).append) == 3
    assert told == [3]
