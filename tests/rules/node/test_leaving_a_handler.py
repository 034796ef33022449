"""What leaves a handler concerns its job alone: not its thread, not a process that it forked, not the memory."""

import asyncio
import gc
import logging
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import lowq
from lowq.errors import RedisUnavailable
from lowq.testing import drain
from lowq.workers import Worker
from tests.waiting import PATIENCE

on_redis = pytest.mark.parametrize("store_url", ["redis"], indirect=True)

STOPS = (asyncio.CancelledError, GeneratorExit, SystemExit)
Raise = Callable[[str], None]
#: Ways to write a handler.
FORMS = ("plain", "per id", "async", "async per id")


@pytest.fixture
def app(store_url: str) -> Iterator[lowq.Lowq]:
    app = lowq.Lowq(redis_url=store_url)
    yield app
    app.close()


def make_worker(app: lowq.Lowq, form: str, handle: Raise, name: str, **options: Any) -> type[Worker[Any]]:
    """A worker that calls ``handle`` for each id."""

    def perform(payloads_by_id: dict[str, list[Any]]) -> None:
        for job_id in payloads_by_id:
            handle(job_id)

    async def aperform(payloads_by_id: dict[str, list[Any]]) -> None:
        perform(payloads_by_id)

    def perform_one(job_id: str, payloads: list[Any]) -> None:
        handle(job_id)

    async def aperform_one(job_id: str, payloads: list[Any]) -> None:
        handle(job_id)

    handler: Any = dict(zip(FORMS, (perform, perform_one, aperform, aperform_one), strict=True))[form]
    made: type[Worker[Any]] = app.worker(shards_count=1, queue_name=name, **options)(handler)
    return made


@on_redis
def test_what_would_end_a_thread_or_a_process_is_a_failure_of_the_job(app: lowq.Lowq) -> None:
    for form in FORMS:
        for error, grouped in [(error, grouped) for error in STOPS for grouped in (False, True)]:

            def handle(job_id: str, error: type[BaseException] = error, grouped: bool = grouped) -> None:
                if job_id == "bad":
                    raise BaseExceptionGroup("of a task group", [ValueError(), error()]) if grouped else error

            name = f"{form.replace(' ', '-')}-{error.__name__}-{grouped}"
            worker = make_worker(app, form, handle, name, batch_size=10)
            worker.perform_async([{"id": job_id} for job_id in ("good", "bad", "other")])
            drain(worker, raises=False)
            assert worker.queue.stats().length == 1, name
            job = worker.queue.peek("bad")
            assert job is not None
            assert (job.retry_count, job.crashes) == (0, 0), name
            assert "cancelled" in (job.error or "") or error.__name__ in (job.error or ""), name


@on_redis
def test_an_await_that_was_cancelled_in_a_hook_stops_nothing(app: lowq.Lowq) -> None:
    class Orders(lowq.Worker[Any]):
        max_retry_count = 0

        async def perform(self, payloads_by_id: dict[str, list[Any]]) -> None:
            raise ValueError("boom")

        async def retries_exhausted(self, jobs: list[lowq.Job]) -> None:
            future = asyncio.get_running_loop().create_future()
            future.cancel()
            await future

    worker = app.worker(shards_count=1)(Orders)
    worker.push(1)
    drain(worker, raises=False)
    assert worker.queue.stats().morgue_length == 1


@on_redis
def test_an_exit_of_what_surrounds_a_handler_is_a_failure_of_the_batch_or_the_id(store_url: str) -> None:
    def run_argparse(*args: Any) -> Any:
        raise SystemExit(2)

    def merge(payloads: list[Any]) -> list[Any]:
        return run_argparse() if "bad" in payloads else payloads

    class Middleware:
        """For workers of both kinds."""

        def __call__(self, worker: Any, batch: Any, call_next: Callable[[], Any]) -> None:
            if "bad" in batch:
                run_argparse()
            call_next()

        async def acall(self, worker: Any, batch: Any, call_next: Callable[[], Any]) -> None:
            if "bad" in batch:
                run_argparse()
            await call_next()

    def fail(job_id: str) -> None:
        if job_id == "bad":
            raise ValueError

    rows: list[tuple[str, dict[str, Any], Raise, dict[str, Any], str]] = [
        ("middleware", {"server_middlewares": [Middleware()]}, lambda _: None, {}, "a middleware raised SystemExit(2)"),
        ("merge", {}, lambda _: None, {"merge": merge}, "the merge function raised SystemExit(2)"),
        ("retry-in", {"retry_in": run_argparse}, fail, {}, "ValueError"),
        ("format", {"format_error": run_argparse}, fail, {}, "ValueError"),
        ("dump", {"dump_error": run_argparse}, fail, {}, "ValueError"),
    ]
    for form in FORMS:
        for name, settings, handle, options, error in rows:
            app = lowq.Lowq(redis_url=store_url, **settings)
            worker = make_worker(app, form, handle, f"{name}-{form.replace(' ', '-')}", batch_size=10, **options)
            worker.perform_async([{"id": job_id, "payload": job_id} for job_id in ("good", "bad", "other")])
            drain(worker, raises=False)
            assert worker.queue.stats().length == 1, (name, form)
            job = worker.queue.peek("bad")
            assert job is not None
            assert (job.retry_count, job.crashes) == (0, 0), (name, form)
            assert error in (job.error or ""), (name, form)
            app.close()


@on_redis
def test_a_group_is_what_all_of_its_errors_are(app: lowq.Lowq) -> None:
    def group(*errors: Exception) -> Exception:
        return ExceptionGroup("of a task group", errors)

    away = RedisUnavailable("away")
    rows: list[tuple[str, Exception, tuple[str, int]]] = [
        ("bury", group(KeyError("a"), group(KeyError("b"))), ("morgue", -1)),
        ("release", group(TimeoutError(), ConnectionError()), ("scheduled", -1)),
        ("both", group(TimeoutError(), KeyError("a")), ("morgue", -1)),
        ("other", group(TimeoutError(), ValueError("a")), ("retrying", 0)),
        ("away", group(away, group(away)), ("due", -1)),
        ("half away", group(away, ValueError("a")), ("retrying", 0)),
    ]
    errors = {name: error for name, error, _ in rows}

    def handle(job_id: str) -> None:
        raise errors[job_id]

    release_on = {TimeoutError: 30, ConnectionError: 60}
    worker = make_worker(app, "plain", handle, "groups", bury_on=(KeyError,), release_on=release_on)
    for name, _, expected in rows:
        worker.push(name)
        drain(worker, raises=False, limit=1)
        job = worker.queue.peek(name)
        assert job is not None
        assert (job.state, job.retry_count) == expected, name
        worker.queue.delete(name)


class Connection:
    """What a handler holds while it fails: a lock, a connection."""


@on_redis
def test_nothing_refers_to_what_a_failed_handler_held(app: lowq.Lowq) -> None:
    kept: list[tuple[str, weakref.ref[Connection]]] = []
    logging.disable()  # pytest keeps what is logged, and with it what was raised
    gc.collect()
    gc.disable()
    try:
        for form in FORMS:

            def handle(job_id: str, form: str = form) -> None:
                held = Connection()
                kept.append((f"{form} {job_id}", weakref.ref(held)))
                raise ValueError(job_id)

            worker = make_worker(app, form, handle, form.replace(" ", "-"), batch_size=2, max_retry_count=0)
            worker.perform_async([{"id": number} for number in range(3)])
            drain(worker, raises=False)
        assert len(kept) >= 12
        assert [what for what, ref in kept if ref() is not None] == []
    finally:
        gc.enable()
        logging.disable(logging.NOTSET)


FORKS = """
import os, sys
import lowq
from lowq.testing import drain

app = lowq.Lowq(redis_url="memory://")
codes = []

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

class ById(ByBatch):
    perform = lowq.Worker.perform

    def perform_one(self, job_id, payloads):
        self.fork(job_id)

class Awaits(ByBatch):
    async def perform(self, payloads_by_id):
        super().perform(payloads_by_id)

try:
    for kind in (ByBatch, ById, Awaits):
        worker = app.worker(shards_count=1, batch_size=1 if kind is not ById else 3)(kind)
        worker.perform_async([{"id": name} for name in ("exits", "raises", "returns")])
        done = drain(worker, raises=False)
        print(kind.__name__, done.performed, done.failed, worker.queue.stats().processed, flush=True)
finally:
    print(sorted(codes), os.getpid() == int(sys.argv[1] or 0) or "parent", flush=True)
"""


def test_a_forked_child_that_leaves_the_handler_ends_there() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKS, ""], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    codes = [
        (kind, job_id, code)
        for kind in ("Awaits", "ByBatch", "ById")
        for job_id, code in (("exits", 7), ("raises", 1), ("returns", 0))
    ]
    assert done.stdout.splitlines() == [
        "ByBatch 3 0 3", "ById 3 0 3", "Awaits 3 0 3", f"{codes} parent",
    ], done.stderr  # fmt: skip
    assert done.returncode == 0
    assert done.stderr.count("has left the handler") == 9
