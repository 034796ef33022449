"""A quiet node takes nothing, and jobs again once it is told so."""

import logging
from typing import Any

import pytest

import lowq
from lowq.node.node import Node
from tests.rules.node.drivers import running
from tests.waiting import until


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
