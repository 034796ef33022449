"""`setup` and `teardown` of the instances of workers in nodes, and `on_server_stop`."""

import asyncio
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest

import lowq
from lowq.node.node import Node
from lowq.workers import Worker
from tests.processes.conftest import MakeRig
from tests.processes.node.conftest import Start
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


def drained(*workers: type[Worker[Any]]) -> Callable[[], bool]:
    return lambda: all(not worker.queue.stats().length and not worker.queue.stats().taken for worker in workers)


def test_once_per_instance_in_its_thread(app: lowq.Lowq, start: Start, calls: Calls) -> None:
    workers = [make_worker(app, calls, name) for name in ("Orders", "Users")]
    for worker in workers:
        worker.perform_async({"id": n} for n in range(20))
    node = start(threads=3)
    assert len(noted(calls, "setup")) == 6  # when it has started, all are set up
    until(drained(*workers), "the end of all jobs")
    assert node.stop(PATIENCE)
    set_up = noted(calls, "setup")
    assert len(set(set_up)) == 6
    assert set(noted(calls, "perform")) <= set(set_up)
    assert sorted(noted(calls, "teardown")) == sorted(set_up)


def test_of_an_async_worker_in_the_loop(app: lowq.Lowq, start: Start, calls: Calls) -> None:
    worker = make_worker(app, calls, is_async=True)
    worker.perform_async({"id": n} for n in range(20))
    node = start()
    until(drained(worker), "the end of all jobs")
    assert node.stop(PATIENCE)
    assert [what for what, *_ in calls] == ["setup", *["perform"] * 20, "teardown"]
    assert {thread for _, _, thread in calls} == {"lowq-loop"}
    assert len({instance for _, instance, _ in calls}) == 1


def test_what_could_not_be_set_up_keeps_the_node_from_starting_and_is_not_torn_down(
    app: lowq.Lowq, calls: Calls
) -> None:
    make_worker(app, calls, "First")
    make_worker(app, calls, "Awaits", is_async=True)

    @app.worker
    class Broken(lowq.Worker[Any]):
        def setup(self) -> None:
            raise ZeroDivisionError("no database")

        def perform(self, payloads_by_id: dict[str, list[Any]]) -> None: ...

        def teardown(self) -> None:
            calls.append(("torn down", 0, ""))

    app.config.shutdown_timeout = PATIENCE
    with pytest.raises(ZeroDivisionError, match="no database") as caught:
        Node(app, threads=2).start()
    assert caught.value.__notes__ == ["raised by Broken.setup, before anything was performed by that instance"]
    until(lambda: sorted(noted(calls, "teardown")) == sorted(noted(calls, "setup")), "the others torn down")
    assert len(noted(calls, "setup")) == 3
    assert noted(calls, "torn down") == []
    assert app.nodes() == []


def test_a_setup_of_an_async_worker_that_fails_does_so_as_well(app: lowq.Lowq) -> None:
    @app.worker
    class Broken(lowq.Worker[Any]):
        async def setup(self) -> None:
            await asyncio.sleep(0)
            raise ZeroDivisionError("no database")

        async def perform(self, payloads_by_id: dict[str, list[Any]]) -> None: ...

    with pytest.raises(ZeroDivisionError, match="no database"):
        Node(app).start()
    assert app.nodes() == []


@pytest.mark.parametrize("is_async", [False, True])
def test_a_setup_that_ends_the_process_is_logged(
    app: lowq.Lowq, caplog: pytest.LogCaptureFixture, is_async: bool
) -> None:
    def leave(self: Any) -> None:
        raise SystemExit(3)

    def perform(payloads_by_id: dict[str, list[Any]]) -> None: ...

    async def aperform(payloads_by_id: dict[str, list[Any]]) -> None: ...

    worker = app.worker(aperform if is_async else perform)
    worker.setup = leave  # type: ignore[method-assign]
    with pytest.raises(SystemExit):
        Node(app, threads=1).start()
    assert "a worker could not be set up: SystemExit(3)" in caplog.text
    assert "in leave" in caplog.text


def test_nothing_is_performed_before_all_are_set_up(app: lowq.Lowq, calls: Calls) -> None:
    go, begun = threading.Event(), threading.Event()
    quick = make_worker(app, calls, "Quick")

    @app.worker
    class Slow(lowq.Worker[Any]):
        def setup(self) -> None:
            begun.set()
            go.wait()

        def perform(self, payloads_by_id: dict[str, list[Any]]) -> None: ...

    quick.push(1)
    node = Node(app, threads=2)
    starts = threading.Thread(target=node.start, daemon=True)
    starts.start()
    try:
        until(begun.is_set, "the setup")
        assert app.nodes() == []
        assert noted(calls, "perform") == []
        go.set()
        until(drained(quick), "the job")
    finally:
        go.set()
        starts.join(PATIENCE)
        node.stop(PATIENCE)


def test_a_stop_does_not_wait_for_a_setup_that_hangs(app: lowq.Lowq) -> None:
    go, begun = threading.Event(), threading.Event()

    @app.worker
    class Slow(lowq.Worker[Any]):
        def setup(self) -> None:
            begun.set()
            go.wait()

        def perform(self, payloads_by_id: dict[str, list[Any]]) -> None: ...

    node = Node(app, threads=1)
    starts = threading.Thread(target=node.start, daemon=True)
    starts.start()
    until(begun.is_set, "the setup")
    node.request_stop()
    starts.join(PATIENCE)
    assert not starts.is_alive()
    assert not node.stop(0.0)  # it is cut short
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

    node = start(threads=2)
    assert node.stop(PATIENCE)
    assert node.exit_code == 0
    assert len(noted(calls, "teardown")) == 2
    assert caplog.text.count("Broken.teardown failed") == 2


def test_a_thread_that_is_replaced_tears_its_own_down_when_its_handler_comes_back(
    app: lowq.Lowq, start: Start, calls: Calls
) -> None:
    go, hung = threading.Event(), threading.Event()
    other = make_worker(app, calls, "Other")

    class Orders(lowq.Worker[Any]):
        def setup(self) -> None:
            calls.append(("own setup", id(self), str(threading.get_ident())))

        def perform(self, payloads_by_id: dict[str, list[Any]]) -> None:
            if hung.is_set():
                lowq.current().touch(NEVER)  # however long the machine stands still
                return
            hung.set()
            go.wait(PATIENCE)

        def teardown(self) -> None:
            calls.append(("own teardown", id(self), str(threading.get_ident())))

    worker = app.worker(ttr=0.3, shards_count=1)(Orders)
    node = start(threads=3)
    worker.push(1)
    until(hung.is_set, "the handler that hangs")
    until(drained(worker), "its job performed by another thread")
    # The successor has instances of its own, of all workers with a setup.
    until(lambda: len(noted(calls, "own setup")) == 4 and len(noted(calls, "setup")) == 4, "those of the successor")
    assert noted(calls, "own teardown") == []
    go.set()
    until(lambda: len(noted(calls, "own teardown")) == len(noted(calls, "teardown")) == 1, "those of the old thread")
    (torn_down,) = noted(calls, "own teardown")
    assert torn_down in noted(calls, "own setup")[:3]
    other.push(1)
    until(drained(other), "another job")
    assert node.stop(PATIENCE)
    assert sorted(noted(calls, "own teardown")) == sorted(noted(calls, "own setup"))
    assert sorted(noted(calls, "teardown")) == sorted(noted(calls, "setup"))


def test_a_successor_that_can_not_be_set_up_stops_the_node(app: lowq.Lowq, start: Start) -> None:
    go, hung = threading.Event(), threading.Event()

    class Orders(lowq.Worker[Any]):
        def setup(self) -> None:
            if hung.is_set():
                raise ZeroDivisionError("no database")

        def perform(self, payloads_by_id: dict[str, list[Any]]) -> None:
            hung.set()
            go.wait()

    told: list[BaseException] = []
    app.config.last_words = told.append
    worker = app.worker(ttr=0.3, shards_count=1)(Orders)
    node = start(threads=3)
    worker.push(1)
    until(node.stopping.is_set, "the end of the node")
    assert node.exit_code == 1
    assert [type(error) for error in told] == [ZeroDivisionError]
    go.set()


# --- on_server_stop ---


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


def test_one_that_fails_is_logged_and_the_node_stops_as_it_is(
    app: lowq.Lowq, start: Start, calls: Calls, caplog: pytest.LogCaptureFixture
) -> None:
    make_worker(app, calls)
    app.config.on_server_stop = lambda: 1 / 0
    node = start()
    assert node.stop(PATIENCE)
    assert node.exit_code == 0
    assert "on_server_stop failed" in caplog.text


def test_it_is_not_called_while_a_handler_still_runs(app: lowq.Lowq, start: Start, calls: Calls) -> None:
    go, begun = threading.Event(), threading.Event()

    @app.worker
    def orders(payloads_by_id: dict[str, list[Any]]) -> None:
        begun.set()
        go.wait()

    app.config.on_server_stop = lambda: calls.append(("stopped", 0, ""))
    orders.push(1)
    node = start(threads=1)
    until(begun.is_set, "the handler")
    assert not node.stop(0.0)
    assert calls == []
    go.set()


@pytest.mark.threads_only
def test_in_a_process_it_is_called_before_it_ends(make_rig: MakeRig) -> None:
    rig = make_rig()
    node = rig.node()
    rig.push("a", 1)
    rig.done("a", 1)
    node.signal(signal.SIGTERM)
    assert node.wait() == 0
    (stopped,) = rig.events("server_stop")
    assert stopped["pid"] == node.pid
    assert stopped["at"] > rig.performs()[0].start
