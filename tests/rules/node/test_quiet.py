"""A quiet node takes nothing, and jobs again once it is told so."""

import logging
import threading
from typing import Any

import pytest

import lowq
from lowq.node.node import Node
from lowq.operate import nodes
from lowq.shards.wakeups import Listener
from tests.rules.node.drivers import running
from tests.waiting import PATIENCE, until


def test_a_quiet_node_takes_jobs_again_unless_it_has_finished_for_good(
    app: lowq.Lowq, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "lowq")
    performed: list[str] = []

    @app.worker
    def plain(payloads_by_id: dict[str, list[Any]]) -> None:
        performed.extend(payloads_by_id)

    @app.worker
    async def loops(payloads_by_id: dict[str, list[Any]]) -> None:
        performed.extend(payloads_by_id)

    node = Node(app, threads=1)
    with running(node):
        node.quiet()
        until(lambda: not any(shard.lease.current for shard in node.broker.shards))
        for worker in (plain, loops):
            worker.perform_async({"id": worker.queue_name})
        node.unquiet()
        until(lambda: set(performed) == {"plain", "loops"})
        assert "takes jobs again" in caplog.text
        caplog.clear()
        node.broker.finish()  # as before a change to new code
        node.quiet()
        node.unquiet()
        assert "can't take jobs again" in caplog.text


def test_a_command_waits_until_a_node_that_has_just_started_listens(
    app: lowq.Lowq, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "LISTENS_SECONDS", PATIENCE)
    start, late = Listener.start, list[Listener]()
    monkeypatch.setattr(Listener, "start", lambda listener: late.append(listener))  # noqa: PLW0108  # is bound
    app.worker(queue_name="plain")(lambda _payloads_by_id: None)
    node = Node(app, threads=1)
    with running(node):
        (found,) = until(app.nodes, "its first heartbeat")
        assert not found.listens
        sender = threading.Thread(target=app.send_command, args=(node.name, "quiet"))
        sender.start()
        sender.join(0.2)
        assert sender.is_alive(), "the command would be lost"
        until(lambda: late, "the listener, which is started behind the loop that sends the heartbeats")
        start(late.pop())
        until(lambda: app.nodes()[0].quiet, "a quiet node")
        assert app.nodes()[0].listens
        sender.join()


def test_a_command_is_refused_if_its_node_never_listens(app: lowq.Lowq, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "LISTENS_SECONDS", 0.0)
    monkeypatch.setattr(Listener, "start", lambda _listener: None)
    app.worker(queue_name="plain")(lambda _payloads_by_id: None)
    node = Node(app, threads=1)
    with running(node):
        until(app.nodes, "its first heartbeat")
        with pytest.raises(lowq.ConfigError, match="does not listen"):
            app.send_command(node.name, "stop")
