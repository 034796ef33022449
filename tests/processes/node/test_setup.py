"""`setup` and `teardown` of the instances of workers in nodes, and the hooks of the application beside them."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

import lowq
from lowq.node.node import Node
from lowq.workers import Worker
from tests.processes.node.conftest import Start, is_idle
from tests.waiting import NEVER, PATIENCE, until

#: What was called, with the instance and the thread that called it.
Calls = list[tuple[str, int, str]]


@pytest.fixture
def calls() -> Calls:
    return []


def noted(calls: Calls, what: str) -> list[tuple[int, str]]:
    return [(instance, thread) for name, instance, thread in calls if name == what]


def make_worker(app: lowq.Lowq, calls: Calls, name: str = "Orders", *, is_async: bool = False) -> type[Worker[Any]]:
    def note(what: str, instance: object) -> None:
        calls.append((what, id(instance), threading.current_thread().name))

    class Plain(lowq.Worker[Any]):
        def setup(self) -> None:
            note("setup", self)

        def perform(self, payloads_by_id: dict[str, list[Any]]) -> None:
            note("perform", self)

        def teardown(self) -> None:
            note("teardown", self)

    class Awaits(lowq.Worker[Any]):
        async def setup(self) -> None:
            await asyncio.sleep(0)
            note("setup", self)

        async def perform(self, payloads_by_id: dict[str, list[Any]]) -> None:
            note("perform", self)

        async def teardown(self) -> None:
            await asyncio.sleep(0)
            note("teardown", self)

    return app.worker(queue_name=name)(Awaits if is_async else Plain)


def broken(app: lowq.Lowq, *, is_async: bool) -> None:
    """A worker that can't be set up."""

    def setup(self: Any) -> None:
        raise ZeroDivisionError("no database")

    async def asetup(self: Any) -> None:
        setup(self)

    def perform(payloads_by_id: dict[str, list[Any]]) -> None: ...

    async def aperform(payloads_by_id: dict[str, list[Any]]) -> None: ...

    worker: Any = app.worker(queue_name="Broken")(aperform if is_async else perform)
    worker.setup = asetup if is_async else setup


def test_once_per_instance_in_its_thread_or_in_the_loop(app: lowq.Lowq, start: Start, calls: Calls) -> None:
    workers = [make_worker(app, calls, name) for name in ("Orders", "Users")]
    workers.append(make_worker(app, calls, "Awaits", is_async=True))
    for worker in workers:
        worker.perform_async({"id": n} for n in range(20))
    node = start(threads=3)
    assert len(noted(calls, "setup")) == 2 * 3 + 1  # when it has started, all are set up
    until(lambda: all(map(is_idle, workers)), "the end of all jobs")
    assert node.stop(PATIENCE)
    set_up = noted(calls, "setup")
    assert len(set(set_up)) == 7
    assert [thread for _, thread in set_up].count("lowq-loop") == 1
    assert set(noted(calls, "perform")) <= set(set_up)
    assert sorted(noted(calls, "teardown")) == sorted(set_up)


@pytest.mark.parametrize("is_async", [False, True])
def test_what_could_not_be_set_up_keeps_the_node_from_starting_and_the_others_are_torn_down(
    app: lowq.Lowq, calls: Calls, is_async: bool
) -> None:
    make_worker(app, calls, "First")
    make_worker(app, calls, "Awaits", is_async=True)
    broken(app, is_async=is_async)
    app.config.shutdown_timeout = PATIENCE
    with pytest.raises(ZeroDivisionError, match="no database"):
        Node(app, threads=2).start()
    until(lambda: sorted(noted(calls, "teardown")) == sorted(noted(calls, "setup")), "the others torn down")
    assert noted(calls, "setup")
    assert app.nodes() == []


def test_nothing_is_performed_before_all_are_set_up_and_a_stop_does_not_wait_for_a_setup_that_hangs(
    app: lowq.Lowq, calls: Calls
) -> None:
    go, begun = threading.Event(), threading.Event()
    quick = make_worker(app, calls, "Quick")

    @app.worker
    class Slow(lowq.Worker[Any]):
        def setup(self) -> None:
            begun.set()
            go.wait(PATIENCE)

        def perform(self, payloads_by_id: dict[str, list[Any]]) -> None: ...

    quick.push(1)
    node = Node(app, threads=2)
    starts = threading.Thread(target=node.start, daemon=True)
    starts.start()
    until(begun.is_set, "the setup")
    assert app.nodes() == []
    assert noted(calls, "perform") == []
    node.request_stop()
    starts.join(PATIENCE)
    assert not starts.is_alive()
    assert node.stop(NEVER)  # nothing of it has run
    assert node.exit_code == 0
    go.set()


def test_a_teardown_that_fails_is_logged_and_the_others_go_on(
    app: lowq.Lowq, start: Start, calls: Calls, caplog: pytest.LogCaptureFixture
) -> None:
    make_worker(app, calls, "First")

    @app.worker
    class Broken(lowq.Worker[Any]):
        def perform(self, payloads_by_id: dict[str, list[Any]]) -> None: ...

        def teardown(self) -> None:
            raise SystemExit("no database")

    app.config.on_server_stop = lambda: 1 / 0
    node = start(threads=2)
    assert node.stop(PATIENCE)
    assert node.exit_code == 0
    assert len(noted(calls, "teardown")) == 2
    assert caplog.text.count("Broken.teardown failed") == 2
    assert "on_server_stop failed" in caplog.text


def hanging(
    app: lowq.Lowq,
    hung: threading.Event,
    go: threading.Event,
    setup: Callable[[], object] = lambda: None,
    ttr: float | None = NEVER,
) -> Any:
    """A worker whose handler hangs the first time, and exceeds its ttr then."""

    class Hanging(lowq.Worker[Any]):
        def setup(self) -> None:
            setup()

        def perform(self, payloads_by_id: dict[str, list[Any]]) -> None:
            if hung.is_set():
                return
            hung.set()
            lowq.current().touch(0.3)  # not before: the machine may stand still
            go.wait(PATIENCE)

    return app.worker(ttr=ttr, shards_count=1)(Hanging)


def test_a_thread_that_is_replaced_tears_its_own_down_when_its_handler_comes_back(
    app: lowq.Lowq, start: Start, calls: Calls
) -> None:
    go, hung = threading.Event(), threading.Event()
    make_worker(app, calls)
    worker = hanging(app, hung, go)
    node = start(threads=3)
    worker.push(1)
    until(hung.is_set, "the handler that hangs")
    until(lambda: is_idle(worker), "its job performed by another thread")
    # The successor has instances of its own, of all workers with a setup.
    until(lambda: len(noted(calls, "setup")) == 4, "that of the successor")
    assert noted(calls, "teardown") == []
    go.set()
    until(lambda: len(noted(calls, "teardown")) == 1, "that of the old thread")
    assert noted(calls, "teardown")[0] in noted(calls, "setup")[:3]
    assert node.stop(PATIENCE)
    assert sorted(noted(calls, "teardown")) == sorted(noted(calls, "setup"))


def test_a_successor_that_can_not_be_set_up_stops_the_node(app: lowq.Lowq, start: Start) -> None:
    go, hung = threading.Event(), threading.Event()

    def setup() -> None:
        if hung.is_set():
            raise ZeroDivisionError("no database")

    told: list[BaseException] = []
    app.config.last_words = told.append
    worker = hanging(app, hung, go, setup)
    node = start(threads=3)
    worker.push(1)
    until(node.stopping.is_set, "the end of the node")
    assert node.exit_code == 1
    assert [type(error) for error in told] == [ZeroDivisionError]
    go.set()


# --- hooks of the application ---


def test_on_server_init_is_called_first_and_on_server_stop_once_when_all_have_ended(
    app: lowq.Lowq, start: Start, calls: Calls
) -> None:
    make_worker(app, calls)
    app.config.on_server_init = lambda: calls.append(("begun", 0, ""))
    app.config.on_server_stop = lambda: calls.append(("stopped", 0, ""))
    node = start(threads=2)
    assert noted(calls, "stopped") == []
    node.stop(PATIENCE)
    node.stop(PATIENCE)
    assert [what for what, *_ in calls] == ["begun", "setup", "setup", "teardown", "teardown", "stopped"]


def test_on_server_stop_is_not_called_while_a_handler_still_runs(app: lowq.Lowq, start: Start) -> None:
    go, hung, stopped = threading.Event(), threading.Event(), threading.Event()
    worker = hanging(app, hung, go, ttr=None)
    app.config.on_server_stop = stopped.set
    node = start(threads=1)
    worker.push(1)
    until(hung.is_set, "the handler")
    assert not node.stop(0.0)
    assert not stopped.is_set()
    go.set()
