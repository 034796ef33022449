"""Consumers for coroutines."""

import asyncio

import pytest

from lowq.errors import ConsumerClosed, NotTaken
from lowq.queue import Queue
from tests.rules.consumer.line import Line
from tests.waiting import PATIENCE, auntil


def test_all_verbs_are_awaited(queue: Queue) -> None:
    async def work() -> None:
        consumer = queue.aconsumer(ttr=60, session="ann")
        with pytest.raises(ConsumerClosed, match="async with"):
            await consumer.take()
        await consumer.start()
        await queue.aput("a")
        (job,) = await consumer.take(timeout=PATIENCE)
        assert (job.payload, job.payloads, job.retry_count) == ("a", ["a"], -1)
        await job.touch(60)
        await job.release()
        (job,) = await consumer.take(timeout=PATIENCE)
        await job.fail("no", delay=0)
        (job,) = await consumer.take(timeout=PATIENCE)
        assert job.retry_count == 0
        await consumer.detach()
        async with queue.aconsumer(session="ann") as other:
            assert other.session == "ann"
            await other.ack(job.receipt)
            with pytest.raises(NotTaken):
                await other.ack(job.receipt)
            await queue.aput("b")
            (job,) = await other.take(timeout=PATIENCE)
            await job.bury("no")

    asyncio.run(work())
    stats = queue.stats()
    assert (stats.length, stats.taken, stats.processed, stats.failed, stats.morgue_length) == (0, 0, 1, 1, 1)


def test_many_take_at_once(queue: Queue) -> None:
    seen: list[str] = []

    async def work() -> None:
        async with queue.aconsumer() as consumer:

            async def one(timeout: float | None = None) -> None:
                for job in await consumer.take(5, timeout):
                    seen.append(job.id)
                    await job.ack()

            waiting = [asyncio.create_task(one()) for _ in range(10)]
            await queue.apush([{"id": n} for n in range(50)])
            while len(seen) < 50:
                await one(0.01)
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    asyncio.run(asyncio.wait_for(work(), PATIENCE))
    assert sorted(map(int, seen)) == list(range(50))


def test_batches_acknowledge_the_last_and_end_with_the_consumer(queue: Queue) -> None:
    async def work() -> int:
        count = 0
        async with queue.aconsumer() as consumer:
            async for jobs in consumer.batches(10):
                count += len(jobs)
                if count == 30:
                    await consumer.close()
        return count

    queue.push([{"id": n} for n in range(30)])
    assert asyncio.run(asyncio.wait_for(work(), PATIENCE)) == 30
    assert queue.stats().processed >= 20


def test_what_comes_for_a_take_that_was_cancelled_waits_again(queue: Queue, line: Line) -> None:
    async def work() -> list[str]:
        async with queue.aconsumer() as consumer:
            for _ in range(20):
                taking = asyncio.create_task(consumer.take(10))
                await asyncio.sleep(0)
                pushing = asyncio.create_task(queue.apush({"id": "a"}))
                await asyncio.sleep(0.001)
                taking.cancel()
                await asyncio.gather(taking, pushing, return_exceptions=True)
                if not taking.cancelled() and not isinstance(taking.exception(), asyncio.CancelledError):
                    for job in taking.result():
                        await job.ack()
                else:
                    (job,) = await consumer.take(timeout=PATIENCE)
                    await job.ack()
            await auntil(lambda: not line.waiting, "the end of all callers")
            return [job.id for job in await consumer.take(timeout=0)]

    assert asyncio.run(asyncio.wait_for(work(), PATIENCE)) == []
