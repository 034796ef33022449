"""Where in its code a running job is: its node is asked for the stack of the thread, or the task, that performs it."""

import asyncio
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
from click.testing import CliRunner

import lowq
from lowq.backend import Backend
from lowq.cli import main
from lowq.node.node import Node
from lowq.node.watchdog import MOST_CHARACTERS, STACK_SECONDS
from lowq.operate import queries
from lowq.operate.nodes import send_message
from lowq.operate.queries import Stack
from lowq.store.keys import nodes_key, stack_key
from lowq.workers import Worker
from tests.rows import case
from tests.rules.node.drivers import running
from tests.waiting import PATIENCE, until


class Hanging:
    """Handlers that hang in a function whose name is to be seen, until `go`. The secret is a value in them all."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.begun = threading.Event()

    def hangs_here(self, depth: int = 0) -> None:
        secret = "tr" + "easure"  # noqa: F841 - a local variable of the function that hangs
        if depth:
            self.hangs_here(depth - 1)
        else:
            self.begun.set()
            self.go.wait(PATIENCE)

    async def awaits_here(self) -> None:
        self.begun.set()
        while not self.go.is_set():
            await asyncio.sleep(0.01)

    def worker(self, app: lowq.Lowq, kind: str) -> type[Worker[Any]]:
        hanging = self

        class InThread(lowq.Worker[Any]):
            def perform(self, payloads_by_id: dict[str, list[Any]]) -> None:
                hanging.hangs_here()

        class InThreadById(lowq.Worker[Any]):
            def perform_one(self, job_id: str, payloads: list[Any]) -> None:
                hanging.hangs_here()

        class Deep(lowq.Worker[Any]):
            def perform(self, payloads_by_id: dict[str, list[Any]]) -> None:
                hanging.hangs_here(500)

        class Awaits(lowq.Worker[Any]):
            async def perform(self, payloads_by_id: dict[str, list[Any]]) -> None:
                await hanging.awaits_here()

        class AwaitsById(lowq.Worker[Any]):
            async def perform_one(self, job_id: str, payloads: list[Any]) -> None:
                await hanging.awaits_here()

        class Blocks(lowq.Worker[Any]):
            async def perform(self, payloads_by_id: dict[str, list[Any]]) -> None:
                hanging.hangs_here()

        kinds: dict[str, type[Worker[Any]]] = {
            "thread": InThread, "thread, by id": InThreadById, "deep": Deep, "loop": Awaits, "loop, by id": AwaitsById,
            "blocked loop": Blocks,
        }  # fmt: skip
        return app.worker(shards_count=1, batch_size=2, queue_name="Orders")(kinds[kind])


@contextmanager
def hanging(app: lowq.Lowq, kind: str) -> Iterator[tuple[lowq.Queue, Node]]:
    """A node that hangs in the jobs 1 and 2; 3 waits behind them."""
    handler = Hanging()
    queue = handler.worker(app, kind).queue
    queue.push([{"id": number} for number in (1, 2, 3)])
    node = Node(app, threads=2)
    with running(node):
        try:
            assert handler.begun.wait(PATIENCE)
            # Who asks goes by the heartbeat of the node.
            until(lambda: any(found.name == node.name for found in app.nodes()), "heartbeat of the node")
            yield queue, node
        finally:
            handler.go.set()


def stack_with(queue: lowq.Queue, line: str) -> Stack:
    """That of the job 1, once this is in it: the thread, or the task, may be on its way there, or just awake."""

    def found() -> Stack | None:
        stack = queue.stack(1, timeout=PATIENCE)
        return stack if stack is not None and line in stack.text else None

    stack = until(found, line)
    assert stack is not None
    return stack


@pytest.mark.parametrize("kind", ["thread", "thread, by id", "loop", "loop, by id", "blocked loop"])
def test_it_is_where_the_thread_or_the_task_is(app: lowq.Lowq, kind: str) -> None:
    with hanging(app, kind) as (queue, node):
        found = stack_with(queue, f"in {'awaits_here' if kind.startswith('loop') else 'hangs_here'}\n")
        assert found.node == node.name
        assert (found.thread is None) is ("loop" in kind)
        assert "treasure" not in found.text, "there are no values in it"
        assert queue.stack(3, timeout=PATIENCE) is None, "it waits"
        assert queue.stack("nowhere", timeout=PATIENCE) is None


def test_a_node_that_has_not_heard_the_question_is_asked_again(app: lowq.Lowq, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = list[object]()

    def lose_the_first(backend: Backend, message: Mapping[str, str]) -> None:
        if lost:
            send_message(backend, message)
        lost.append(message)

    monkeypatch.setattr(queries, "send_message", lose_the_first)
    with hanging(app, "thread") as (queue, _):
        stack_with(queue, "in hangs_here\n")
        assert len(lost) > 1


def test_of_a_very_deep_stack_the_innermost_calls_are_shown(app: lowq.Lowq) -> None:
    with hanging(app, "deep") as (queue, _):
        found = stack_with(queue, "self.go.wait")
        assert len(found.text) <= MOST_CHARACTERS


def test_the_answer_is_gone_after_a_while_and_nothing_is_left_behind(app: lowq.Lowq) -> None:
    with hanging(app, "thread") as (queue, node):
        assert queue.stack(1, timeout=PATIENCE).text  # type: ignore[union-attr]
        (key,) = app.client.command("KEYS", stack_key(app.config.namespace, "*"))
        assert 0 < app.client.command("TTL", key) <= STACK_SECONDS
        # What a later release might ask, or somebody else publishes: it is not ours, and the node goes on.
        channel = nodes_key(app.config.namespace)
        for message in ({"do": "stack"}, {"do": "stack", "queue": 1, "id": []}, {"do": ["stack"]}, {}):
            app.client.command("SPUBLISH", channel, json.dumps({"to": node.name, **message}), key=channel)
        assert queue.stack(1, timeout=PATIENCE).text  # type: ignore[union-attr]


def test_what_was_taken_by_hand_is_nowhere_in_the_code_of_a_node(app: lowq.Lowq) -> None:
    queue = app.queue("Orders", 1)
    queue.push({"id": 1})
    with queue.consumer() as consumer:
        (job,) = consumer.take(timeout=PATIENCE)
        assert queue.stack(1, timeout=PATIENCE) is None
        job.ack()


def test_the_command_line_shows_it(app: lowq.Lowq, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lowq.Queue.stack, "__kwdefaults__", {"timeout": PATIENCE})  # the node may stand still

    def run(*args: str) -> Any:
        options = ["--redis-url", app.config.redis_url, "--namespace", app.config.namespace]
        return CliRunner().invoke(main, ["stack", *options, *args])

    with hanging(app, "thread") as (_, node):
        shown = run("Orders", "1")
        assert shown.exit_code == 0
        assert f"{node.name} thread " in shown.stderr
        assert "in hangs_here" in shown.stdout
        document = json.loads(run("Orders", "1", "--json").stdout)
        assert (document["queue"], document["id"], document["stack"]["node"]) == ("Orders", "1", node.name)
        for job_id, says in (("3", "nothing performs 3 now"), ("nowhere", "nothing performs nowhere now")):
            with case(job_id):
                shown = run("Orders", job_id)
                assert (shown.exit_code, shown.stdout) == (1, "")
                assert says in shown.stderr
        assert json.loads(run("Orders", "3", "--json").stdout)["stack"] is None
