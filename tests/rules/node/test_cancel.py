"""Jobs that are cancelled while a node performs them, and those whose run a newer payload cancels."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import Context, copy_context
from typing import Any

import pytest

import lowq
from lowq.node.node import Node
from lowq.operate.actions import Acted
from lowq.store.keys import shard_prefix
from lowq.work import loop
from lowq.work.loop import BatchActivity
from lowq.workers import Worker
from tests.rows import case
from tests.rules.node.conftest import MakeApp
from tests.rules.node.drivers import is_idle, running
from tests.waiting import NEVER, PATIENCE, until

KINDS = ("thread", "loop")
#: What is raised in a handler that is cancelled.
RAISED: dict[str, type[BaseException]] = {"thread": lowq.JobCancelled, "loop": asyncio.CancelledError}
#: Of a worker: batches with and without limits are interrupted in different ways.
LIMITS: list[dict[str, Any]] = [{}, {"time_limit": NEVER, "ttr": 2 * NEVER}]


class Handler:
    """Performs "wait" until `go`, where it can be interrupted, and all else at once."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.begun: list[tuple[str, list[Any]]] = []
        self.ended: list[str] = []
        self.raised: list[type[BaseException]] = []
        #: What it does instead of raising what it was interrupted by.
        self.instead: Callable[[], object] | None = None

    def _steps(self, job_id: str, payloads: list[Any]) -> Iterator[None]:
        self.begun.append((job_id, payloads))
        give_up_at = time.monotonic() + PATIENCE
        while payloads[0] == "wait" and not self.go.is_set() and time.monotonic() < give_up_at:
            yield
        self.ended.append(job_id)

    def _interrupted(self, error: BaseException) -> None:
        self.raised.append(type(error))
        if self.instead is None:
            raise error
        self.instead()

    def perform(self, job_id: str, payloads: list[Any]) -> None:
        try:
            for _ in self._steps(job_id, payloads):
                time.sleep(0.001)
        except BaseException as error:
            self._interrupted(error)

    async def aperform(self, job_id: str, payloads: list[Any]) -> None:
        try:
            for _ in self._steps(job_id, payloads):
                await asyncio.sleep(0.001)
        except BaseException as error:
            self._interrupted(error)

    def worker(self, app: lowq.Lowq, kind: str, *, per_id: bool = False, **options: Any) -> type[Worker[Any]]:
        handler = self

        class InThread(lowq.Worker[Any]):
            def perform(self, payloads_by_id: dict[str, list[Any]]) -> None:
                for job_id, payloads in payloads_by_id.items():
                    handler.perform(job_id, payloads)

        class InThreadById(lowq.Worker[Any]):
            def perform_one(self, job_id: str, payloads: list[Any]) -> None:
                handler.perform(job_id, payloads)

        class InLoop(lowq.Worker[Any]):
            async def perform(self, payloads_by_id: dict[str, list[Any]]) -> None:
                for job_id, payloads in payloads_by_id.items():
                    await handler.aperform(job_id, payloads)

        class InLoopById(lowq.Worker[Any]):
            async def perform_one(self, job_id: str, payloads: list[Any]) -> None:
                await handler.aperform(job_id, payloads)

        made: list[type[Worker[Any]]] = [InThread, InThreadById, InLoop, InLoopById]
        return app.worker(**{"shards_count": 1, "queue_name": "Orders", **options})(made[2 * (kind == "loop") + per_id])


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def begin(handler: Handler, app: lowq.Lowq) -> None:
    """Waits until the handler has begun, and the node hears of cancels: it renews no lease in time."""
    until(lambda: handler.begun, "the beginning")
    until(lambda: is_listened_to(app), "the subscription")


def is_listened_to(app: lowq.Lowq) -> bool:
    """Whether the node hears what is said of the only shard."""
    channel = shard_prefix(app.config.namespace, "Orders", 0) + "wake"
    return bool(app.client.command("PUBSUB", "SHARDNUMSUB", channel)[1])


def counts(worker: type[Worker[Any]]) -> tuple[int, int, int, int]:
    """Processed, cancelled, failed, in the morgue."""
    stats = worker.queue.stats()
    return stats.processed, stats.cancelled, stats.failed, stats.morgue_length


@pytest.mark.parametrize("options", LIMITS, ids=len)
@pytest.mark.parametrize("per_id", [False, True])
def test_what_runs_is_interrupted_and_removed_and_what_is_pushed_since_is_performed(
    make_app: MakeApp, kind: str, per_id: bool, options: dict[str, Any]
) -> None:
    events: list[str] = []
    app, handler = make_app(), Handler()
    worker = handler.worker(app, kind, per_id=per_id, on_event=lambda event: events.append(event.kind), **options)
    with running(Node(app, threads=1)):
        worker.push("a", "wait", score=1)
        begin(handler, app)
        worker.push("a", "dropped", score=2)
        acted = worker.queue.cancel(["a", "nobody"])
        assert (acted.done, acted.signalled, acted.running, acted.missing) == (1, 1, ("a",), 1)
        until(lambda: handler.raised and is_idle(worker), "the end of it")
        assert counts(worker) == (0, 2, 0, 0)  # what ran, and what waited
        worker.push("a", "newer", score=3)
        until(lambda: handler.ended, "the next run")
        until(lambda: is_idle(worker), "its end")
    assert handler.raised == [RAISED[kind]]
    assert handler.begun == [("a", ["wait"]), ("a", ["newer"])]
    app.flush_events(PATIENCE)
    assert sorted(events) == sorted(["pushed"] * 3 + ["taken"] * 2 + ["cancelled", "acked"])


def test_without_a_message_the_next_renewal_of_the_lease_says_it(make_app: MakeApp, kind: str) -> None:
    app, handler = make_app(lease_ttl=9), Handler()
    worker = handler.worker(app, kind)
    app.client.command("ACL", "SETUSER", "mute", "on", ">mute", "~*", "&*", "+@all", "-spublish")
    mute = lowq.Lowq(
        redis_url=app.config.redis_url.replace("redis://", "redis://mute:mute@"), namespace=app.config.namespace
    )
    with running(Node(app, threads=1)):
        worker.push("a", "wait")
        until(lambda: handler.begun, "its beginning")
        assert mute.queue("Orders").cancel("a").signalled == 1
        until(lambda: handler.raised and is_idle(worker), "its end")
    mute.close()
    assert counts(worker) == (0, 1, 0, 0)


@pytest.mark.parametrize("cancelled", ["a", "b"])
@pytest.mark.parametrize("per_id", [False, True])
def test_the_others_of_a_batch_wait_again_uncharged(make_app: MakeApp, kind: str, per_id: bool, cancelled: str) -> None:
    app, handler = make_app(), Handler()
    worker = handler.worker(app, kind, per_id=per_id, batch_size=3)
    worker.perform_async({"id": name, "payload": "wait", "score": 1} for name in "abc")
    node = Node(app, threads=1)
    with running(node):
        begin(handler, app)
        worker.queue.cancel(cancelled)
        # An id of perform_one that has not begun is left out, and nobody is interrupted for it.
        is_interrupted = not per_id or cancelled == "a"
        if is_interrupted:
            until(lambda: len(handler.begun) == 2, "the batch again")
        else:
            until(lambda: "b" in node.broker.shards[0].stopping, "the news")
        handler.go.set()
        until(lambda: is_idle(worker), "the end of the others")
    assert len(handler.raised) == is_interrupted
    assert set(handler.ended) == {*"abc"} - {cancelled}
    assert counts(worker) == (2, 1, 0, 0)


def fail() -> None:
    raise ValueError("in the clean-up")


#: What a handler does instead of ending as it is told to, and the `counts` then.
INSTEAD: dict[str, tuple[Callable[[], object], tuple[int, int, int, int]]] = {
    "returns": (lambda: None, (1, 0, 0, 0)),
    "raises": (fail, (0, 1, 0, 0)),
    "releases": (lambda: lowq.current().release("a", 100), (0, 1, 0, 0)),
    "fails": (lambda: lowq.current().fail("a", "no"), (0, 1, 0, 0)),
    "buries": (lambda: lowq.current().bury("a", "keep it"), (0, 0, 0, 1)),
}


@pytest.mark.parametrize("what", INSTEAD)
def test_a_handler_that_goes_on_decides_by_how_it_ends(make_app: MakeApp, kind: str, what: str) -> None:
    instead, expected = INSTEAD[what]
    app, handler = make_app(), Handler()
    handler.instead = instead
    worker = handler.worker(app, kind)
    with running(Node(app, threads=1)):
        worker.push("a", "wait")
        begin(handler, app)
        worker.queue.cancel("a")
        until(lambda: handler.raised and not worker.queue.stats().taken, "its end")
    assert worker.queue.stats().length == 0
    assert counts(worker) == expected


def test_many_quick_jobs_are_performed_or_cancelled_and_nothing_else_is_hit(
    make_app: MakeApp, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    app = make_app()
    number, performed = 3000, []

    class InThread(lowq.Worker[Any]):
        def perform_one(self, job_id: str, _payloads: list[Any]) -> None:
            performed.append(job_id)

    class InLoop(lowq.Worker[Any]):
        async def perform_one(self, job_id: str, _payloads: list[Any]) -> None:
            await asyncio.sleep(0)
            performed.append(job_id)

    worker = app.worker(shards_count=2, batch_size=20)(InThread if kind == "thread" else InLoop)
    worker.perform_async({"id": n, "payload": n} for n in range(number))
    caplog.set_level(logging.WARNING)
    with running(Node(app, threads=2)):
        cancelled = Acted()
        while not is_idle(worker):
            ids = [job.id for job in worker.queue.jobs(state="taken", limit=50).jobs]
            cancelled += worker.queue.cancel(ids[::7])
    processed, removed, failed, buried = counts(worker)
    assert (processed + removed, failed, buried) == (number, 0, 0)
    assert len(set(performed)) >= processed
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_what_is_cancelled_just_before_its_handler_is_called_is_not_begun(
    make_app: MakeApp, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, handler, stops = make_app(), Handler(), list[BaseException]()
    app.config.last_words = stops.append
    worker = handler.worker(app, kind)
    heard = threading.Event()
    interrupt = BatchActivity.interrupt_stopping

    def interrupt_stopping(activity: BatchActivity) -> None:
        interrupt(activity)
        heard.set()

    def cancel_first() -> Context:
        if not heard.is_set():
            worker.queue.cancel("a")
            until(heard.is_set, "the renewal that says it")
            time.sleep(0.01)
        return copy_context()

    monkeypatch.setattr(BatchActivity, "interrupt_stopping", interrupt_stopping)
    monkeypatch.setattr(loop, "copy_context", cancel_first)
    with running(Node(app, threads=1)):
        until(lambda: is_listened_to(app), "the subscription")
        worker.push("a", "wait")
        until(lambda: heard.is_set() and is_idle(worker), "its end")
        worker.push("b", "other")
        until(lambda: handler.ended == ["b"], "the next")
    assert (handler.begun, stops) == ([("b", ["other"])], [])


# --- on_push="cancel_running" ---


@pytest.mark.parametrize("options", LIMITS, ids=len)
def test_a_newer_payload_cancels_the_run_and_both_are_performed_together_in_order(
    make_app: MakeApp, kind: str, options: dict[str, Any]
) -> None:
    app, handler = make_app(), Handler()
    worker = handler.worker(app, kind, on_push="cancel_running", **options)
    with running(Node(app, threads=1)):
        worker.push("a", "wait", score=1)
        worker.push("b", "other", score=1)
        begin(handler, app)
        worker.push("a", "later", score=2, delay=NEVER)  # not its turn yet: it cancels nothing
        worker.push("a", "newer", score=3)
        until(lambda: len(handler.begun) == 2, "the second run")
        handler.go.set()
        until(lambda: is_idle(worker), "its end")
    assert handler.begun[:2] == [("a", ["wait"]), ("a", ["wait", "later", "newer"])]
    assert handler.raised == [RAISED[kind]]
    assert counts(worker) == (2, 0, 0, 0)


def test_it_is_refused_where_it_makes_no_sense(make_app: MakeApp) -> None:
    rows: list[tuple[dict[str, Any], str]] = [
        ({"on_push": "cancel_running", "batch_size": 2}, "would end whole batches"),
        ({"on_push": "cancel"}, "on_push='cancel' must be 'cancel_running'; or None"),
        ({"on_push": True}, "must be 'cancel_running'"),
    ]
    for options, said in rows:
        with case(options), pytest.raises(lowq.ConfigError, match=said):
            Handler().worker(make_app(), "thread", **options)
    Handler().worker(make_app(), "thread", per_id=True, on_push="cancel_running", batch_size=2)
