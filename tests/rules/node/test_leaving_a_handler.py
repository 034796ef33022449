"""What leaves a handler concerns its job alone: not a process that it forked, not the memory."""

import asyncio
import gc
import itertools
import logging
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest

import lowq
import lowq.testing
from lowq.node.node import Node
from lowq.testing import drain
from tests.rows import case
from tests.rules.node.conftest import MakeApp
from tests.rules.node.drivers import Driver, job_of, running, states
from tests.waiting import PATIENCE, until


class Connection:
    """What a handler holds while it fails: a lock, a connection."""


@pytest.mark.parametrize("per_id", [False, True], ids=["perform", "perform_one"])
def test_nothing_refers_to_what_a_failed_handler_held(app: lowq.Lowq, driver: Driver, per_id: bool) -> None:
    kept: list[weakref.ref[Connection]] = []

    def handler(*_: Any) -> None:
        held = Connection()
        kept.append(weakref.ref(held))
        raise ValueError

    logging.disable()  # pytest keeps what is logged, and with it what was raised
    gc.collect()
    gc.disable()
    try:
        worker = driver.worker(app, handler, per_id=per_id, batch_size=2, max_retry_count=0)
        worker.perform_async([{"id": number} for number in range(3)])
        if driver.is_node:
            with running(Node(app, threads=1)):
                until(lambda: worker.queue.stats().morgue_length == 3, "the end of all retries")
                until(lambda: not any(ref() for ref in kept), "the end of what the handlers held")
        drain(worker)
        assert len(kept) >= 3
        assert [ref for ref in kept if ref() is not None] == []
    finally:
        gc.enable()
        logging.disable(logging.NOTSET)


def test_nothing_of_a_task_that_has_ended_waits_for_the_garbage_collector(app: lowq.Lowq) -> None:
    kept: list[weakref.ref[asyncio.Task[Any]]] = []

    @app.worker(shards_count=1, batch_size=2, max_retry_count=0)
    async def orders(payloads_by_id: dict[str, list[Any]]) -> None:
        task = asyncio.current_task()
        assert task is not None
        kept.append(weakref.ref(task))
        if "3" in payloads_by_id:
            raise ValueError

    logging.disable()  # as above
    gc.collect()
    gc.disable()
    try:
        orders.perform_async([{"id": number} for number in range(5)])
        with running(Node(app)):
            until(lambda: orders.queue.stats().morgue_length == 1 and not orders.queue.stats().length, "the end of all")
            until(lambda: not any(ref() for ref in kept), "the end of the tasks")
        assert len(kept) >= 3
    finally:
        gc.enable()
        logging.disable(logging.NOTSET)


def test_a_garbage_collection_waits_for_as_many_objects_as_the_tasks_of_a_node_have(app: lowq.Lowq) -> None:
    """Otherwise each wave of tasks sets off dozens, which find nothing."""

    @app.worker
    async def orders(payloads_by_id: dict[str, list[Any]]) -> None:
        pass

    app.config.concurrency = 200
    before = gc.get_threshold()
    try:
        for row in [(700, 10_000), (0, 0), (20_000, 20_000)]:
            with case(row):
                gc.set_threshold(row[0], *before[1:])
                with running(Node(app)):
                    until(app.nodes, "a node")
                    assert gc.get_threshold() == (row[1], *before[1:])
    finally:
        gc.set_threshold(*before)


FORKS = """
import os, sys
import lowq
import lowq.testing
from lowq.testing import drain

app = lowq.Lowq(redis_url="memory://")
codes = []

class Liar(Exception):
    @property
    def __class__(self):
        raise RuntimeError("no class")

class ByBatch(lowq.Worker):
    def perform(self, payloads_by_id):
        for job_id in payloads_by_id:
            self.fork(job_id)

    def fork(self, job_id):
        child = os.fork()
        if child:
            codes.append((type(self).__name__, job_id, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
        elif job_id == "exits":
            sys.exit(7)
        elif job_id == "raises":
            raise ValueError("in the child")
        elif job_id == "lies":
            raise Liar
        elif job_id == "exits far":
            sys.exit(2**70 + 9)

class ById(ByBatch):
    perform = lowq.Worker.perform

    def perform_one(self, job_id, payloads):
        self.fork(job_id)

class Awaits(ByBatch):
    async def perform(self, payloads_by_id):
        super().perform(payloads_by_id)

try:
    for kind in (ByBatch, ById, Awaits):
        worker = app.worker(shards_count=1, batch_size=1 if kind is not ById else 5)(kind)
        worker.perform_async([{"id": name} for name in ("exits", "exits far", "lies", "raises", "returns")])
        done = drain(worker, raises=False)
        print(kind.__name__, done.performed, done.failed, worker.queue.stats().processed, flush=True)
finally:
    print(sorted(codes), flush=True)
"""


def test_a_forked_child_that_leaves_the_handler_ends_there() -> None:
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=PATIENCE, check=False)
    ends = [("exits", 7), ("exits far", 9), ("lies", 1), ("raises", 1), ("returns", 0)]
    codes = [(kind, *end) for kind in ("Awaits", "ByBatch", "ById") for end in ends]
    assert done.stdout.splitlines() == ["ByBatch 5 0 5", "ById 5 0 5", "Awaits 5 0 5", f"{codes}"], done.stderr
    assert done.returncode == 0
    assert done.stderr.count("has left the handler") == 15


def test_what_an_async_handler_returns_and_nobody_runs_fails_its_job_also_behind_a_middleware(
    make_app: MakeApp,
) -> None:
    async def later() -> None:
        raise AssertionError("nobody awaits it")

    async def around(_worker: Any, _batch: Any, call_next: Callable[[], Any]) -> None:
        await call_next()

    async def orders(_payloads_by_id: dict[str, list[Any]]) -> Any:
        return later()

    for middlewares in ([], [around]):
        with case(len(middlewares)):
            worker: Any = make_app(server_middlewares=middlewares).worker(shards_count=1)(orders)
            worker.push("1")
            lowq.testing.drain(worker)
            assert states(worker, "1") == {"1": ("retrying", 0)}
            assert "returned a coroutine, which nobody runs" in (job_of(worker).error or "")


def test_a_stop_iteration_out_of_a_plain_handler_is_itself(make_app: MakeApp) -> None:
    """Python makes another error of one that leaves a coroutine."""
    told: list[type] = []

    def around(_worker: Any, _batch: Any, call_next: Callable[[], Any]) -> None:
        try:
            call_next()
        except StopIteration as error:
            told.append(type(error))
            raise

    def handler(*_args: Any) -> None:
        next(iter(()))

    for middlewares, per_id in itertools.product(([], [around]), (False, True)):
        with case(len(middlewares), per_id):
            driver = Driver("drain")
            app = make_app(server_middlewares=middlewares)
            worker = driver.worker(app, handler, per_id=per_id, bury_on=(StopIteration,))
            worker.push("1")
            driver.perform(app, worker)
            assert states(worker, "1") == {"1": ("morgue", -1)}
    assert told == [StopIteration, StopIteration]


def test_it_is_so_in_the_thread_of_an_async_drain(make_app: MakeApp) -> None:
    """No future takes a StopIteration: who awaits that would wait for ever."""

    @make_app().worker(shards_count=1, bury_on=(StopIteration,))
    class Orders:
        def perform(self, _payloads_by_id: dict[str, list[Any]]) -> None:
            next(iter(()))

    worker: Any = Orders
    worker.push("1")
    asyncio.run(asyncio.wait_for(lowq.testing.adrain(worker), PATIENCE))
    assert states(worker, "1") == {"1": ("morgue", -1)}


def test_a_handler_that_cancels_its_own_task_and_raises_is_charged_and_the_worker_told(make_app: MakeApp) -> None:
    def handler(*_args: Any) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        raise ValueError

    driver, app = Driver("loop"), make_app()
    worker = driver.worker(app, handler, max_retry_count=0)
    worker.push("1")
    driver.perform(app, worker)
    assert states(worker, "1") == {"1": ("morgue", -1)}
    assert [job.id for job in driver.exhausted] == ["1"]
