"""A consumer for coroutines: every verb of `Consumer`, awaitable.

What waits for Redis runs in a thread, so the event loop goes on meanwhile.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

from lowq.clock import Lock
from lowq.consumer.consumer import Consumer
from lowq.consumer.takes import Caller
from lowq.coroutines import resolve, run_in_own_thread, running_loop
from lowq.errors import ConsumerClosed
from lowq.job import ConsumerJob

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class AsyncConsumerJob:
    """As `ConsumerJob`; its verbs are awaited."""

    id: str
    #: Oldest (lowest score) first.
    payloads: list[Any]
    #: -1 fresh, n: failed n + 1 times.
    retry_count: int
    #: Reports the job in any process that has the session: ``await consumer.ack(receipt)``.
    receipt: str
    #: As of `ConsumerJob`.
    fence: int
    _job: ConsumerJob = field(repr=False)

    @property
    def payload(self) -> Any:
        """The newest of the payloads; None if somebody has removed them by hand."""
        return self._job.payload

    @property
    def is_cancelled(self) -> bool:
        """As of `ConsumerJob`."""
        return self._job.is_cancelled

    async def ack(self) -> None:
        """As of `ConsumerJob`, like those below."""
        await in_thread(self._job.ack)

    async def release(self, delay: float | timedelta | None = None) -> None:
        await in_thread(lambda: self._job.release(delay))

    async def bury(self, reason: str = "") -> None:
        await in_thread(lambda: self._job.bury(reason))

    async def fail(self, error: BaseException | str = "", delay: float | timedelta | None = None) -> None:
        await in_thread(lambda: self._job.fail(error, delay))

    async def touch(self, seconds: float | timedelta) -> None:
        await in_thread(lambda: self._job.touch(seconds))


class AsyncConsumer:
    """As `Consumer`, for one event loop. It starts where ``async with`` begins, or with `start`."""

    def __init__(self, make: Callable[[], Consumer]) -> None:
        self._make = make
        self._made: Consumer | None = None
        self._starting = asyncio.Lock()

    async def start(self) -> None:
        """Becomes a member, and gets shards. It raises what `Consumer` does."""
        async with self._starting:
            if self._made is None:
                self._made = await in_thread(self._make, Consumer.close)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def _consumer(self) -> Consumer:
        if self._made is None:
            raise ConsumerClosed("the consumer has not started; write: async with queue.aconsumer() as consumer")
        return self._made

    @property
    def session(self) -> str:
        """As of `Consumer`."""
        return self._consumer.session

    async def take(self, limit: int = 1, timeout: float | timedelta | None = None) -> list[AsyncConsumerJob]:
        """As of `Consumer`. When it is cancelled, what it would have returned waits again."""
        return await self._take(lambda consumer, caller: consumer._taker.take_for(caller, limit, timeout, []))

    async def _take(self, take: Callable[[Consumer, Caller], list[ConsumerJob]]) -> list[AsyncConsumerJob]:
        consumer, caller = self._consumer, Caller()
        while True:
            try:
                jobs = await in_thread(lambda: take(consumer, caller), consumer._taker.give_back)
            except asyncio.CancelledError:
                consumer._taker.cancel(caller)
                raise
            held = consumer._taker.receive(jobs)
            if held or not jobs:
                return [_awaitable(job) for job in held]

    async def batches(
        self, limit: int, timeout: float | timedelta | None = None
    ) -> AsyncIterator[list[AsyncConsumerJob]]:
        """As of `Consumer`."""
        finished: list[str] = []

        def take(consumer: Consumer, caller: Caller) -> list[ConsumerJob]:
            return consumer._taker.next_batch(caller, limit, timeout, finished)

        while jobs := await self._take(take):
            finished += [job.receipt for job in jobs]
            yield jobs

    async def ack(self, receipt: str) -> None:
        """As of `Consumer`, like those below."""
        await in_thread(lambda: self._consumer.ack(receipt))

    async def release(self, receipt: str, delay: float | timedelta | None = None) -> None:
        await in_thread(lambda: self._consumer.release(receipt, delay))

    async def bury(self, receipt: str, reason: str = "") -> None:
        await in_thread(lambda: self._consumer.bury(receipt, reason))

    async def fail(self, receipt: str, error: BaseException | str = "", delay: float | timedelta | None = None) -> None:
        await in_thread(lambda: self._consumer.fail(receipt, error, delay))

    async def touch(self, receipt: str, seconds: float | timedelta) -> None:
        await in_thread(lambda: self._consumer.touch(receipt, seconds))

    async def detach(self) -> None:
        await in_thread(self._consumer.detach)

    async def close(self) -> None:
        if self._made is not None:
            await in_thread(self._made.close)


def _awaitable(job: ConsumerJob) -> AsyncConsumerJob:
    return AsyncConsumerJob(job.id, job.payloads, job.retry_count, job.receipt, job.fence, job)


async def in_thread(work: Callable[[], T], discard: Callable[[T], object] | None = None) -> T:
    """Runs it in a thread of its own, as those of the loop's executor may all be waiting. ``discard``: called in a
    thread with the result if the caller was cancelled before it got that; also when the loop has ended.
    """
    future: asyncio.Future[T] = running_loop().create_future()
    lock = Lock()
    results: list[T] = []
    is_abandoned = False

    def run() -> T:
        result = work()
        with lock:
            results.append(result)
            is_unwanted = is_abandoned
        if is_unwanted and discard is not None:
            discard(result)
        return result

    run_in_own_thread(run, partial(resolve, future))
    try:
        return await future
    except BaseException:
        with lock:
            is_abandoned = True
            left = list(results)
        if left and discard is not None:
            threading.Thread(target=discard, args=left, daemon=True).start()
        raise
