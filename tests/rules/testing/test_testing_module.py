"""lowq.testing: drain with the real rules on both stores, embedded stores, and current() for direct calls."""

import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

import lowq
import lowq.testing
from lowq.errors import ConfigError, LowqError, QueueInUse
from lowq.job import Job
from lowq.testing import drain, embedded, execution
from lowq.workers import Worker
from tests.rows import case
from tests.waiting import PATIENCE

#: For what handlers and middlewares do in a drain, which no store sees.
on_memory = pytest.mark.parametrize("store_url", ["memory"], indirect=True)

PayloadsById = dict[str, list[Any]]


class Seen:
    """What handlers were given, in order."""

    def __init__(self) -> None:
        self.batches: list[PayloadsById] = []

    @property
    def ids(self) -> list[str]:
        return sorted(job_id for batch in self.batches for job_id in batch)


@pytest.fixture
def seen() -> Seen:
    return Seen()


def worker(
    app: lowq.Lowq, seen: Seen, name: str = "Orders", handler: Callable[[PayloadsById], object] = id, **options: Any
) -> type[Worker[Any]]:
    """A worker that notes what it is given and then does what `handler` does."""

    class Made(lowq.Worker[Any]):
        def perform(self, payloads_by_id: PayloadsById) -> None:
            seen.batches.append(dict(payloads_by_id))
            handler(payloads_by_id)

    Made.__qualname__ = Made.__name__ = name
    return app.worker(**options)(Made)


def boom(payloads_by_id: PayloadsById) -> None:
    raise ValueError("boom")


# --- drain ---


def test_everything_due_is_performed_over_all_shards_in_batches(app: lowq.Lowq, seen: Seen) -> None:
    made = worker(app, seen, shards_count=7, batch_size=4)
    made.perform_async([{"id": number, "payload": number} for number in range(100)])
    drained = drain(made)
    assert (drained.performed, drained.failed, drained.batches) == (100, 0, len(seen.batches))
    assert seen.ids == sorted(map(str, range(100)))
    sizes = [len(batch) for batch in seen.batches]
    assert max(sizes) == 4
    assert len([size for size in sizes if size < 4]) <= 7
    assert made.queue.stats().processed == 100
    assert drain(made).batches == 0
    assert all(shard.owner is None for shard in app.shards("Orders")), "the shards are given up"


def test_now_limit_and_a_pause_bound_what_is_performed(app: lowq.Lowq, seen: Seen) -> None:
    made = worker(app, seen)
    made.perform_async([{"id": "later", "delay": 3600}, *({"id": number} for number in range(9))])
    made.queue.pause()
    assert drain(made).batches == 0
    made.queue.resume()
    assert [drain(made, limit=limit).batches for limit in (0, 3)] == [0, 3]
    assert (made.queue.stats().length, made.queue.stats().taken) == (7, 0)
    later = made.queue.peek("later")
    assert later is not None
    at = later.perform_at or 0
    assert [drain(made, now=now).performed for now in (None, at - 1, at)] == [6, 0, 1]


def test_what_handlers_push_is_performed_too_in_the_workers_that_are_named(app: lowq.Lowq, seen: Seen) -> None:
    def again(payloads_by_id: PayloadsById) -> None:
        ((job_id, (left,)),) = payloads_by_id.items()
        invoices.push(f"of-{left}")
        mails.push(left)
        if left:
            orders.push(job_id, left - 1)

    invoices, mails = worker(app, seen, "Invoices"), worker(app, seen, "Mails")
    orders = worker(app, seen, handler=again)
    orders.push(1, 2)
    # Also what a handler pushes to a worker that was looked at before.
    assert drain(invoices, orders).performed == 6
    assert seen.ids == ["1", "1", "1", "of-0", "of-1", "of-2"]


def test_a_queue_that_is_being_worked_is_refused(app: lowq.Lowq, seen: Seen) -> None:
    made = worker(app, seen, handler=lambda _: drain(made))
    made.push(1)
    with pytest.raises(QueueInUse, match=r"queue 'Orders': shard . is worked by a node, or by another drain"):
        drain(made, raises=True)


def test_what_is_no_worker_is_refused() -> None:
    item: Any
    for item in (int, "Orders", lowq.Worker):
        with case(item):
            with pytest.raises(ConfigError, match=r"is no worker; decorate it with @lowq\.worker"):
                drain(item)
            with pytest.raises(ConfigError, match="is no worker"):
                embedded(item).__enter__()


def test_ticks_wait_until_a_full_queue_has_room_for_them(app: lowq.Lowq, seen: Seen) -> None:
    for capacity, performed in ((1, ["1", "hourly"]), (None, ["1", "hourly"])):
        made = lowq.every(3600, name="hourly")(worker(app, seen, f"Orders{capacity}", capacity=capacity))
        drain(made)  # the schedule begins
        made.push(1)
        assert drain(made, now=time.time() + 3600).performed == 2
        assert seen.ids == performed
        seen.batches.clear()
    full = lowq.every(3600, name="hourly")(worker(app, seen, "Full", capacity=1))
    drain(full)
    full.push(1, delay=100_000)
    assert drain(full, now=time.time() + 3600).performed == 0  # there will be room in another drain
    full.queue.delete(1)
    assert drain(full, now=time.time() + 3600).performed == 1


# What becomes of a job is tested for nodes and drains alike in tests/rules/node/test_outcomes.py.


@on_memory
def test_raises_hands_on_what_the_handler_raised_after_the_outcome_was_written(app: lowq.Lowq, seen: Seen) -> None:
    @app.worker(shards_count=1)
    async def awaits(payloads_by_id: PayloadsById) -> None:
        raise ValueError("boom")

    for made in (worker(app, seen, handler=boom), awaits):
        made.perform_async([{"id": 1}, {"id": 2}])
        with pytest.raises(ValueError, match="boom") as caught:
            drain(made, raises=True)
        assert caught.value.__context__ is None
        stats = made.queue.stats()
        assert (stats.retries, stats.length, stats.taken) == (1, 2, 0)


# --- embedded ---


def test_a_block_has_an_empty_store_and_what_was_before_is_there_again(app: lowq.Lowq, seen: Seen) -> None:
    made = worker(app, seen)
    made.push("outside")
    with pytest.raises(ConfigError):
        app.config.namespace = "other"  # the settings are frozen
    for _ in range(2):  # two blocks share nothing
        with embedded(made):
            assert app.queues() == []
            made.perform_async([{"id": 1}, {"id": 2}])
            with embedded(made):
                assert app.queues() == []
                made.push("inner")
            assert made.queue.stats().length == 2
            assert drain(made).performed == 2
    with pytest.raises(ZeroDivisionError), embedded(made):
        made.push(int(1 / 0))
    assert [job.id for job in made.queue.jobs().jobs] == ["outside"]
    assert seen.ids == ["1", "1", "2", "2"]


def test_it_needs_no_redis_and_freezes_nothing_of_several_applications(seen: Seen) -> None:
    one, other = (lowq.Lowq(redis_url="redis://127.0.0.1:1") for _ in range(2))
    orders, invoices = worker(one, seen), worker(other, seen, "Invoices")
    with embedded(orders, invoices):
        orders.push(1)
        invoices.push(2)
        assert drain(orders, invoices).performed == 2
    one.config.namespace = "other"
    with pytest.raises(lowq.RedisUnavailable):
        orders.push(1)


# --- execution ---


def test_a_handler_may_be_called_directly(app: lowq.Lowq) -> None:
    told: list[Any] = []

    @app.worker(time_limit=1e-6, ttr=1e-5)
    class Orders(lowq.Worker[int]):
        def perform(self, payloads_by_id: dict[str, list[int]]) -> None:
            current = lowq.current()
            told.extend([current.worker, current.shard, current.fence, current.jobs])
            current.done("1")
            with pytest.raises(LowqError, match="no such id"):
                current.done("2")
            deadline = current.deadline
            assert deadline is not None
            assert deadline <= time.monotonic(), "nothing is enforced"
            current.touch(1000)
            assert (current.deadline or 0) > deadline + 900

    with execution(Orders, {1: [5, 6]}, shard=2, fence=9):  # type: ignore[dict-item]  # ids as they are pushed
        Orders().perform({"1": [5, 6]})
    worker_class, shard, fence, (job,) = told
    assert (worker_class, shard, fence) == (Orders, 2, 9)
    assert (job.id, job.state, job.payloads, job.retry_count) == ("1", "taken", [(5, 0.0), (6, 1.0)], -1)
    job = Job("1", "taken", [("x", 7.0)], 1_800_000_000.0, retry_count=3, payloads_count=1)
    with execution(lowq.Worker, [job]):
        assert lowq.current().jobs == [job], "jobs may be given as values"
    Orders.push(1)
    assert drain(Orders, raises=True).performed == 1, "nor in a drain"


def test_afterwards_and_before_there_is_none_and_blocks_nest() -> None:
    with execution(lowq.Worker, {"1": []}) as outer:
        with execution(lowq.Worker, {"2": []}) as inner:
            assert lowq.current() is inner
        with pytest.raises(ZeroDivisionError), execution(lowq.Worker, {"3": []}):
            lowq.current().done(str(1 / 0))
        assert lowq.current() is outer
    with pytest.raises(LowqError, match=r"outside of perform; .* lowq\.testing\.execution"):
        lowq.current()


# --- Django ---

DJANGO = """
import asyncio
import django
from django.conf import settings

settings.configure(
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
    INSTALLED_APPS=["django.contrib.contenttypes"],
)
django.setup()

from django.contrib.contenttypes.models import ContentType
from django.db import transaction
from django.test import TestCase
from django.test.utils import get_runner

import lowq
from lowq.testing import adrain, embedded


class Orders(lowq.Worker):
    def setup(self):
        assert ContentType.objects.filter(model="of-test").exists()

    def perform(self, payloads_by_id):
        assert transaction.get_connection().in_atomic_block
        for job_id in payloads_by_id:
            ContentType.objects.create(app_label=job_id, model="of-job")


lowq.worker(Orders)


class InTransaction(TestCase):
    async def test_async(self):
        await ContentType.objects.acreate(app_label="lowq", model="of-test")
        with embedded(Orders):
            await Orders.apush("a")
            assert (await adrain(Orders, raises=True)).performed == 1
        assert await ContentType.objects.filter(model="of-job").acount() == 1

runner = get_runner(settings)(verbosity=0)
raise SystemExit(runner.run_tests(["__main__"]))
"""


def test_sync_handlers_are_within_the_transaction_of_a_test_of_django() -> None:
    # Of a whole process: several times what one step of a test may take.
    limit = 4 * PATIENCE
    done = subprocess.run([sys.executable, "-c", DJANGO], capture_output=True, text=True, timeout=limit, check=False)
    assert done.returncode == 0, done.stderr
    assert "Ran 1 test" in done.stderr


def test_what_expires_right_after_the_present_of_a_drain_is_performed(app: lowq.Lowq) -> None:
    """The clock of the process goes on meanwhile, and that present does not."""
    performed: list[str] = []

    @app.worker(shards_count=1, ttl=60)
    class Orders:
        def perform(self, payloads_by_id: dict[str, list[Any]]) -> None:
            performed.extend(payloads_by_id)

    worker: Any = Orders
    ids = [str(number) for number in range(20)]
    for job_id in ids:  # the first of them takes longer
        before = time.time()
        worker.push(job_id)
        drain(worker, now=before + 60, limit=10)
    assert performed == ids
