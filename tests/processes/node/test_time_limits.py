"""Handlers that run for too long, or for ever, in threads. Those of async workers are in test_event_loop."""

import logging
import threading
import time
from collections import defaultdict
from typing import Any

import pytest

import lowq
from tests.processes.conftest import MakeRig
from tests.processes.node.conftest import MakeApp, Start, is_idle
from tests.waiting import NEVER, PATIENCE, until

#: Seconds that a handler has from then on when it hangs. Workers have NEVER: no other handler exceeds its ttr, however
#: long the machine stands still.
TTR = 0.3


class Handler:
    """What handlers do, by the payload: "hangs" waits for `go` the first time, "always hangs" each time; "spins" runs
    until then.
    """

    def __init__(self) -> None:
        self.go = threading.Event()
        #: Id -> fencing token and thread of each try.
        self.tries: dict[str, list[tuple[int, int]]] = defaultdict(list)
        self.ended: list[str] = []

    def __call__(self, job_id: str, payloads: list[str]) -> None:
        self.tries[job_id].append((lowq.current().fence, threading.get_ident()))
        if payloads[0] == "always hangs" or (payloads[0] == "hangs" and len(self.tries[job_id]) == 1):
            lowq.current().touch(TTR)
            self.go.wait(PATIENCE)
        give_up_at = time.monotonic() + PATIENCE
        while payloads[0] == "spins" and time.monotonic() < give_up_at and not self.go.is_set():
            pass
        self.ended.append(job_id)


@pytest.fixture
def app(make_app: MakeApp) -> lowq.Lowq:
    return make_app(lease_ttl=NEVER, poll_interval=NEVER)


@pytest.fixture
def handler() -> Handler:
    return Handler()


def orders(app: lowq.Lowq, handler: Handler, **options: Any) -> type[lowq.Worker[Any]]:
    class Orders(lowq.Worker[str]):
        def perform_one(self, job_id: str, payloads: list[str]) -> None:
            handler(job_id, payloads)

    return app.worker(**{"shards_count": 1, **options})(Orders)


# --- ttr ---


def test_past_ttr_an_id_is_performed_anew_with_a_higher_fence_and_the_late_outcome_counts_for_nothing(
    app: lowq.Lowq, start: Start, handler: Handler, caplog: pytest.LogCaptureFixture
) -> None:
    worker = orders(app, handler, ttr=NEVER)
    app.worker(queue_name="Others", ttr=NEVER)(lambda _payloads_by_id: None)
    start(threads=3)
    worker.push("a", "hangs")
    until(lambda: handler.tries["a"], "the first try")
    worker.push("b", "quick")
    until(lambda: is_idle(worker), "the end of both")
    (fence, thread), (new_fence, new_thread) = handler.tries["a"]
    assert new_fence > fence
    assert new_thread != thread
    assert handler.tries["b"][0][0] >= new_fence
    assert "written off and replaced" in caplog.text
    worker.push("a", "since", delay=NEVER)
    handler.go.set()
    until(lambda: handler.ended.count("a") == 2, "the end of the handler that hung")
    worker.push("b", "again")
    until(lambda: len(handler.tries["b"]) == 2, "another job")
    job = worker.queue.peek("a")
    assert job is not None
    assert (job.state, job.crashes) == ("scheduled", 0)


def test_an_id_whose_handler_always_hangs_is_buried_and_the_others_of_its_shard_go_on(
    make_app: MakeApp, start: Start, handler: Handler, caplog: pytest.LogCaptureFixture
) -> None:
    app = make_app(lease_ttl=3)  # so that it says soon how many are written off
    worker = orders(app, handler, ttr=NEVER, max_crash_count=3)
    node = start(of=app, threads=8)
    worker.push("hangs", "always hangs")
    until(lambda: handler.tries["hangs"], "the first try")
    worker.push("other")
    until(lambda: worker.queue.stats().morgue_length == 1, "a job in the morgue")
    fences = [fence for fence, _ in handler.tries["hangs"]]
    assert len(set(fences)) == 3
    assert fences == sorted(fences)
    assert handler.ended == ["other"]
    until(lambda: app.nodes()[0].written_off == 3, "three written off in the registry")
    assert (app.nodes()[0].threads, len(app.nodes()[0].performing)) == (8, 8)
    assert "Orders:0 ids hangs for" in caplog.text
    assert "in __call__" in caplog.text
    node.dump()
    assert "written off: it exceeded its ttr with Orders:0 ids hangs" in caplog.text
    # One that comes back is none any more.
    handler.go.set()
    until(lambda: app.nodes()[0].written_off == 0, "none written off in the registry")


def test_a_batch_taken_in_advance_behind_one_that_hangs_is_not_charged(
    app: lowq.Lowq, start: Start, handler: Handler
) -> None:
    worker = orders(app, handler, ttr=NEVER, max_crash_count=1)  # a single crash would bury a job
    start(threads=3)
    for _ in range(3):  # quick jobs teach the node to take several at a time
        worker.perform_async({"id": f"quick {n}"} for n in range(100))
        until(lambda: is_idle(worker), "the quick ones")
    handler.ended.clear()
    worker.perform_async([{"id": "first", "payload": "hangs"}, *({"id": f"more {n}"} for n in range(20))])
    until(lambda: is_idle(worker), "the end of all jobs")
    assert worker.queue.stats().morgue_length == 1
    assert len(handler.ended) == 20
    handler.go.set()


@pytest.mark.threads_only
def test_a_node_with_half_of_its_threads_hanging_drains_and_asks_for_another(make_rig: MakeRig) -> None:
    rig = make_rig(
        ORDERS_SHARDS=2, ORDERS_TTR=TTR, LOWQ_THREADS_PER_NODE=2, LOWQ_LEASE_TTL=NEVER, LOWQ_SHUTDOWN_TIMEOUT=NEVER
    )
    node = rig.node().holds_all()
    rig.push("a", 1, do="wait", once=True)
    assert node.wait() == 75
    assert "handlers hang in 1 threads, and it has 2" in node.log
    assert rig.of_shards("lease") == rig.of_shards("taken") == {}
    rig.node()
    rig.done("a", 1)


def test_a_node_that_is_stopping_writes_off_what_hangs(app: lowq.Lowq, start: Start, handler: Handler) -> None:
    worker = orders(app, handler, ttr=NEVER)
    node = start(threads=1)
    worker.push("a", "hangs")
    until(lambda: handler.tries["a"], "the first try")
    assert node.stop(NEVER)
    assert node.exit_code == 0  # it need not be replaced
    job = worker.queue.peek("a")
    assert job is not None
    assert (job.state, job.crashes) in (("due", 1), ("scheduled", 1))
    assert [shard.owner for shard in app.shards("Orders")] == [None]
    handler.go.set()


# --- warnings ---


def test_a_batch_that_runs_for_long_is_named_in_the_log(
    make_app: MakeApp, start: Start, handler: Handler, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "lowq.node")
    app = make_app(warn_after=0.1)
    worker = orders(app, handler)
    start(of=app, threads=1)
    worker.push("slow", "spins")

    def named() -> list[float]:
        """Seconds of each warning."""
        assert all("thread 0 still performs Orders:0 ids slow for" in record.getMessage() for record in caplog.records)
        return [vars(record)["seconds"] for record in caplog.records]

    first, second = until(lambda: named()[:2] if len(named()) > 1 else [], "two warnings")
    assert first >= 0.1
    assert second >= 0.2  # after twice as long
    handler.go.set()
    until(lambda: is_idle(worker), "the end of the job")
