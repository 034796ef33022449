"""What all async workers of a process share: `on_loop_start`, `on_loop_stop`, and `lowq.current().state`."""

import asyncio
import os
import threading
from types import SimpleNamespace
from typing import Any

import pytest

import lowq
import lowq.testing
from lowq.node import performers
from lowq.node.node import Node
from tests.processes.node.conftest import Start, is_idle
from tests.rows import case
from tests.waiting import NEVER, PATIENCE, until

Payloads = dict[str, list[Any]]


@pytest.fixture
def calls() -> list[str]:
    return []


def declare(app: lowq.Lowq, calls: list[str]) -> None:
    """Two functions for the start, and two for the stop."""

    @app.on_loop_start
    async def connect(state: SimpleNamespace) -> None:
        await asyncio.sleep(0)
        state.loop = asyncio.get_running_loop()
        calls.append("connect")

    @app.on_loop_start
    async def warm_up() -> None:
        calls.append("warm_up")

    @app.on_loop_stop
    async def disconnect(state: SimpleNamespace) -> None:
        assert state.loop is asyncio.get_running_loop()
        calls.append("disconnect")

    @app.on_loop_stop
    async def cool_down() -> None:
        calls.append("cool_down")


def add_worker(app: lowq.Lowq, calls: list[str], name: str, found: list[Any]) -> Any:
    class Awaits(lowq.Worker[Any]):
        async def setup(self) -> None:
            calls.append("setup")

        async def perform(self, payloads_by_id: Payloads) -> None:
            found.append(lowq.current().state)

        async def teardown(self) -> None:
            calls.append("teardown")

    return app.worker(queue_name=name, shards_count=2)(Awaits)


#: The calls around the jobs of two async workers.
AROUND = ["connect", "warm_up", "setup", "setup", "teardown", "teardown", "cool_down", "disconnect"]


def test_all_async_workers_of_a_node_share_what_was_opened_before_their_setup(
    app: lowq.Lowq, start: Start, calls: list[str]
) -> None:
    found: list[Any] = []
    declare(app, calls)
    workers = [add_worker(app, calls, name, found) for name in ("Orders", "Users")]
    refused: list[str] = []

    @app.worker
    def plain(payloads_by_id: Payloads) -> None:
        with pytest.raises(lowq.LowqError) as error:
            _ = lowq.current().state
        refused.append(str(error.value))

    for worker in [*workers, plain]:
        worker.push(1)
    node = start(threads=1)
    assert calls == AROUND[:4]
    until(lambda: all(map(is_idle, [*workers, plain])), "the end of all jobs")
    assert len(found) == 2
    assert found[0] is found[1]
    assert "plain is a plain def, which has its setup instead" in refused[0]
    assert node.stop(PATIENCE)
    assert calls == AROUND


def test_what_the_start_has_begun_works_until_the_stop_has_returned(app: lowq.Lowq, start: Start) -> None:
    """As the sender of a client that gathers messages, which its close waits for."""
    sent: list[str] = []

    @app.on_loop_start
    async def connect(state: SimpleNamespace) -> None:
        state.gathered = asyncio.Queue()

        async def send() -> None:
            while True:
                sent.append(await state.gathered.get())
                state.gathered.task_done()

        state.sender = asyncio.create_task(send())

    @app.on_loop_stop
    async def disconnect(state: SimpleNamespace) -> None:
        await state.gathered.put("the last")
        await asyncio.wait_for(state.gathered.join(), PATIENCE / 10)
        sent.append("closed")

    add_worker(app, [], "Orders", [])
    assert start(threads=1).stop(PATIENCE)
    assert sent == ["the last", "closed"]


def test_a_node_without_async_workers_opens_nothing(app: lowq.Lowq, start: Start, calls: list[str]) -> None:
    declare(app, calls)

    @app.worker
    def plain(payloads_by_id: Payloads) -> None: ...

    assert start(threads=1).stop(PATIENCE)
    assert calls == []


def test_what_can_not_be_opened_keeps_the_node_from_starting(app: lowq.Lowq, calls: list[str]) -> None:
    app.config.shutdown_timeout = PATIENCE
    declare(app, calls)

    @app.on_loop_start
    async def fail() -> None:
        raise ZeroDivisionError("no database")

    worker = add_worker(app, calls, "Orders", [])
    worker.push(1)
    with pytest.raises(ZeroDivisionError, match="no database") as raised:
        Node(app).start()
    assert raised.value.__notes__ == [f"raised by {__name__}.{fail.__qualname__}, before anything was performed"]
    with pytest.raises(ZeroDivisionError):
        Node(app).rehearse()  # as new code is, before a reload
    assert calls == ["connect", "warm_up"] * 2  # nothing was complete, so nothing is closed
    assert app.nodes() == []
    assert worker.queue.stats().length == 1


def test_what_was_opened_is_closed_when_a_worker_can_not_be_set_up(app: lowq.Lowq, calls: list[str]) -> None:
    app.config.shutdown_timeout = PATIENCE
    declare(app, calls)

    @app.worker
    class Broken(lowq.Worker[Any]):
        async def setup(self) -> None:
            raise ZeroDivisionError("no database")

        async def perform(self, payloads_by_id: Payloads) -> None: ...

    with pytest.raises(ZeroDivisionError):
        Node(app).start()
    assert calls == ["connect", "warm_up", "cool_down", "disconnect"]


def test_new_code_is_checked_with_it(app: lowq.Lowq, calls: list[str]) -> None:
    declare(app, calls)
    add_worker(app, calls, "Orders", [])
    Node(app).rehearse()
    assert calls == ["connect", "warm_up", "setup", "teardown", "cool_down", "disconnect"]


def test_while_it_hangs_the_node_says_so_and_takes_no_jobs(
    app: lowq.Lowq, calls: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(performers, "SLOW_SETUP", 0.0)

    @app.on_loop_start
    async def connect() -> None:
        await asyncio.sleep(NEVER)

    worker = add_worker(app, calls, "Orders", [])
    worker.push(1)
    node = Node(app)
    starts = threading.Thread(target=node.start, daemon=True)
    starts.start()
    name = f"{__name__}.{connect.__qualname__}"
    until(lambda: f"{name} has not returned" in caplog.text, "the warning")
    assert node.trouble() == f"the node takes no jobs yet: it waits for {name}"
    assert app.nodes() == []
    assert worker.queue.stats().length == 1
    node.request_stop()
    starts.join(PATIENCE)
    assert not starts.is_alive()
    assert node.stop(NEVER)  # which does not wait for it
    assert node.exit_code == 0


def test_what_closing_raises_is_logged_and_the_rest_is_closed(
    app: lowq.Lowq, start: Start, calls: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    declare(app, calls)

    @app.on_loop_stop
    async def fail() -> None:
        raise SystemExit("no database")

    add_worker(app, calls, "Orders", [])
    node = start()
    assert node.stop(PATIENCE)
    assert node.exit_code == 0
    assert calls[-2:] == ["cool_down", "disconnect"]
    assert f"{fail.__qualname__} failed" in caplog.text


def test_each_drain_opens_and_closes_it_once_for_its_async_workers(app: lowq.Lowq, calls: list[str]) -> None:
    found: list[Any] = []
    declare(app, calls)
    workers = [add_worker(app, calls, name, found) for name in ("Orders", "Users")]

    @app.worker
    def plain(payloads_by_id: Payloads) -> None: ...

    for worker in [*workers, plain]:
        worker.push(1)
    assert lowq.testing.drain(*workers, plain).performed == 3
    assert calls == AROUND
    assert len({id(state) for state in found}) == 1
    calls.clear()
    workers[0].push(2)
    assert asyncio.run(lowq.testing.adrain(workers[0])).performed == 1
    assert calls == AROUND[:3] + AROUND[5:]
    assert found[2] is not found[0]  # that loop was another one
    calls.clear()
    lowq.testing.drain(plain)
    assert calls == []


def test_a_test_of_a_handler_gives_it_what_it_likes() -> None:
    worker: Any = lowq.Worker
    with lowq.testing.execution(worker, state=SimpleNamespace(http="a fake")):
        assert lowq.current().state.http == "a fake"
    with lowq.testing.execution(worker), pytest.raises(lowq.LowqError, match=r"execution\(\.\.\., state=\.\.\.\)"):
        _ = lowq.current().state


def test_it_does_not_belong_to_a_process_that_a_handler_forks(app: lowq.Lowq, calls: list[str]) -> None:
    declare(app, calls)
    codes: list[int] = []

    @app.worker
    async def forks(payloads_by_id: Payloads) -> None:
        child = os.fork()
        if not child:
            try:
                _ = lowq.current().state
            except lowq.LowqError as error:
                os._exit(7 if "this one is a fork of it" in str(error) else 1)
            os._exit(0)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    forks.push(1)
    assert lowq.testing.drain(forks).performed == 1
    assert codes == [7]


def test_what_is_no_function_for_it_is_refused_with_the_right_form(app: lowq.Lowq) -> None:
    async def with_two(state: Any, other: Any) -> None: ...

    def plain(state: Any) -> None: ...

    async def yields(state: Any) -> Any:
        yield state

    for wrong, said in (
        (plain, "plain: on_loop_start is for the event loop of async workers: write @app.on_loop_start, and below it"),
        (yields, "yields: on_loop_start is for"),
        (42, "42: on_loop_start is for"),
        (with_two, "with_two(state: Any, other: Any) -> None: write @app.on_loop_start"),
    ):
        with case(said):
            declare: Any = app.on_loop_start
            with pytest.raises(lowq.ConfigError) as refused:
                declare(wrong)
            assert said in str(refused.value)
    assert app.loop_start == []
