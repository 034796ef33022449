"""Pushes that one task starts together come in as they were started, also when Redis refuses some of them for now."""

import asyncio
import itertools
import random
from typing import Any

import pytest

import lowq
from lowq.errors import QueueFull
from lowq.observe.events import Observer, PushObservation
from lowq.operate.reshard import reshard
from lowq.queue import Queue
from lowq.store.keys import shard_prefix
from tests.rows import case
from tests.started_threads import live_threads
from tests.waiting import NEVER, until


async def refused(app: lowq.Lowq, queue: Queue) -> None:
    """Waits until a push was refused for want of room."""
    key = shard_prefix("lowq", queue.name, 0) + "meta"
    await asyncio.to_thread(
        until, lambda: app.client.command("HGET", key, "features", key=key) == b" full ", "a refusal"
    )


def received(queue: Queue, job_id: str) -> list[Any]:
    """The payloads of a job that waits, in the order in which it would be performed."""
    with queue.consumer() as consumer:
        while jobs := consumer.take(100, timeout=0):  # those of some shards
            for job in jobs:
                if job.id == job_id:
                    return list(job.payloads)
    raise AssertionError(f"{job_id} is not there")


class TestFullQueue:
    @pytest.fixture
    def queue(self, app: lowq.Lowq) -> Queue:
        queue = app.queue("orders", 1, capacity=1, merge="append")
        queue.push("other")
        return queue

    def test_those_that_wait_for_room_come_in_as_they_were_started(self, app: lowq.Lowq, queue: Queue) -> None:
        async def produce() -> None:
            short = asyncio.ensure_future(queue.apush("42", "short", timeout=0.01))
            pushes = [asyncio.ensure_future(queue.apush("42", n, timeout=NEVER)) for n in range(20)]
            with pytest.raises(QueueFull) as caught:
                await short  # one whose time is over lets the others in
            assert caught.value.rest == [{"id": "42", "payload": "short"}]
            pushes += [asyncio.ensure_future(queue.apush("42", n, timeout=NEVER)) for n in range(20, 30)]
            await asyncio.sleep(0)
            await asyncio.to_thread(queue.delete, "other")
            assert await asyncio.gather(*pushes) == [1] * 30

        asyncio.run(produce())
        assert received(queue, "42") == list(range(30))

    def test_what_comes_later_without_a_timeout_does_not_overtake_them(self, app: lowq.Lowq, queue: Queue) -> None:
        async def produce() -> None:
            waiting = asyncio.ensure_future(queue.apush("42", "first", timeout=NEVER))
            await refused(app, queue)
            with pytest.raises(QueueFull):
                await queue.apush("42", "second")
            assert await queue.apush("other", "merges") == 1  # it needs no room, and waits for nobody
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await asyncio.to_thread(queue.delete, "other")
            assert await queue.apush("42", "third") == 1  # who was cancelled is in nobody's way

        asyncio.run(produce())
        assert received(queue, "42") == ["third"]

    def test_one_that_fits_in_part_is_followed_by_the_others(self, app: lowq.Lowq) -> None:
        queue = app.queue("parts", 1, capacity=2, merge="append")
        queue.push("other")

        async def produce() -> list[Any]:
            together = [{"id": job_id, "payload": 0} for job_id in ("a", "b", "a")]
            pushes = [queue.apush(together), *(queue.apush("a", n) for n in range(1, 6))]
            return await asyncio.gather(*pushes, return_exceptions=True)

        first, *others = asyncio.run(produce())
        assert isinstance(first, QueueFull)
        assert (first.accepted, first.rest) == (2, [{"id": "b", "payload": 0}])
        assert others == [1] * 5
        assert received(queue, "a") == [0, 0, 1, 2, 3, 4, 5]

    def test_many_that_wait_need_no_thread_each(self, app: lowq.Lowq, queue: Queue) -> None:
        before = live_threads()

        async def produce() -> None:
            pushes = [asyncio.ensure_future(queue.apush(f"{n}", timeout=NEVER)) for n in range(300)]
            for _ in range(3):
                assert await queue.apush("other", "comes after them") == 1
            assert live_threads() < before + 100
            for push in pushes:
                push.cancel()
            results = await asyncio.gather(*pushes, return_exceptions=True)
            assert all(isinstance(result, asyncio.CancelledError) for result in results)

        asyncio.run(produce())

    def test_every_job_is_in_or_handed_back_and_those_of_an_id_keep_their_order(self, app: lowq.Lowq) -> None:
        for seed in range(20):
            draw, numbers = random.Random(seed), itertools.count()
            queue = app.queue(f"orders-{seed}", 2, capacity=draw.choice([1, 2, 4, 8]), merge="append")
            pushes = [
                [{"id": draw.choice("abcdefgh"), "payload": next(numbers)} for _ in range(draw.randint(1, 12))]
                for _ in range(draw.randint(1, 8))
            ]

            async def produce(queue: Queue = queue, pushes: list[Any] = pushes) -> list[Any]:
                return await asyncio.gather(*map(queue.apush, pushes), return_exceptions=True)

            with case(seed):
                left: list[dict[str, Any]] = []
                for result, jobs in zip(asyncio.run(produce()), pushes, strict=True):
                    rest = list(result.rest) if isinstance(result, QueueFull) else []
                    assert len(jobs) == len(rest) + (result.accepted if rest else result)
                    left += rest
                found: dict[str, list[int]] = {
                    job.id: [n for n, _ in job.payloads] for job in queue.fetch(list("abcdefgh")).values()
                }
                for job in left:
                    found.setdefault(job["id"], []).append(job["payload"])
                assert all(some == sorted(some) for some in found.values())
                assert sorted(itertools.chain(*found.values())) == list(range(next(numbers)))

    @pytest.mark.parametrize("store_url", ["redis"], indirect=True)
    def test_one_with_an_id_that_waits_takes_its_other_ids_past_nobody(self, app: lowq.Lowq) -> None:
        """Some 200 pushes to other shards are in the same write, so that there is time to overtake it."""
        pad = app.queue("pad", 4)

        async def produce(queue: Queue) -> None:
            waiting = asyncio.ensure_future(queue.apush("x", 0, timeout=NEVER))
            await refused(app, queue)
            begun = [asyncio.ensure_future(queue.apush(job_id, 1)) for job_id in ("other", "42")]
            both = [{"id": "x", "payload": 1}, {"id": "42", "payload": 2}]
            waiting_too = asyncio.ensure_future(queue.apush(both, timeout=NEVER))
            begun += [asyncio.ensure_future(pad.apush(n, "y" * 3000)) for n in range(200)]
            await asyncio.gather(*begun)
            await asyncio.to_thread(queue.delete, "other")
            assert await waiting == 1
            assert await waiting_too == 2

        for number in range(25):
            queue = app.queue(f"orders-{number}", 1, capacity=2, merge="append")
            queue.push([{"id": "other"}, {"id": "42", "payload": 0}])
            asyncio.run(produce(queue))
            assert received(queue, "42") == [0, 1, 2]


class TestSealedShard:
    def test_those_that_find_it_sealed_go_on_as_they_were_started(self, app: lowq.Lowq) -> None:
        queue = app.queue("orders", 1, merge="append")
        other = lowq.Lowq(redis_url=app.config.redis_url)
        knows_the_old_layout = other.queue("orders", 1, merge="append")
        knows_the_old_layout.push("before")
        list(reshard(app, "orders", 3))

        async def produce() -> None:
            pushes = [knows_the_old_layout.apush("42", n) for n in range(20)]
            pushes[5:5] = [knows_the_old_layout.apush([{"id": "42", "payload": "a"}, {"id": "43"}])]
            await asyncio.gather(*pushes)

        asyncio.run(produce())
        assert received(queue, "42") == [*range(5), "a", *range(5, 20)]
        other.close()


class Traced(Observer):
    """Gives pushes one of two trace contexts in turn: they have script calls of their own."""

    def __init__(self) -> None:
        self.number = 0

    def push_began(self, queue: str, jobs: object) -> PushObservation:
        self.number += 1
        observation = PushObservation()
        observation.trace = f"00-{self.number % 2:032x}-{1:016x}-01"
        return observation


class TestDifferentTraces:
    def test_those_of_one_write_come_in_as_they_were_started_also_after_one_that_is_refused(
        self, app: lowq.Lowq
    ) -> None:
        queue = app.queue("orders", 1, capacity=2, merge="append")
        app.observers.append(Traced())
        queue.push("other")

        async def produce() -> list[Any]:
            pushes = [queue.apush("other", "first of the write")]
            pushes += [
                queue.apush([{"id": "a", "payload": 0}, {"id": "b"}]),
                *(queue.apush("a", n) for n in range(1, 20)),
            ]
            return await asyncio.gather(*pushes, return_exceptions=True)

        results = asyncio.run(produce())
        assert [type(result) for result in results] == [int, QueueFull, *[int] * 19]
        assert received(queue, "a") == list(range(20))
