"""Errors of nodes in Sentry: handlers that run at the same time share nothing."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import sentry_sdk
from sentry_sdk.envelope import Envelope
from sentry_sdk.integrations.logging import LoggingIntegration
from sentry_sdk.transport import Transport

import lowq
import lowq.contrib.sentry
from tests.integration.support import PATIENCE, id_of_shard, until

SHARDS = 3


@pytest.fixture
def events() -> Iterator[list[Any]]:
    found: list[Any] = []

    class Memory(Transport):
        def capture_envelope(self, envelope: Envelope) -> None:
            event = envelope.get_event()
            if event is not None:
                found.append(event)

    sentry_sdk.init(
        dsn="http://key@localhost/1", transport=Memory, default_integrations=False, integrations=[LoggingIntegration()]
    )
    yield found
    sentry_sdk.get_global_scope().set_client(None)


def note(job_id: str) -> None:
    sentry_sdk.set_tag(f"saw.{job_id}", "yes")
    sentry_sdk.add_breadcrumb(message=f"crumb of {job_id}")


class Plain(lowq.Worker[Any]):
    together = threading.Barrier(SHARDS)

    def perform(self, payloads_by_id: dict[str, list[Any]]) -> None:
        (job_id,) = payloads_by_id
        note(job_id)
        self.together.wait(PATIENCE)
        raise ValueError(job_id)


class Awaits(lowq.Worker[Any]):
    begun = 0

    async def perform(self, payloads_by_id: dict[str, list[Any]]) -> None:
        (job_id,) = payloads_by_id
        note(job_id)
        Awaits.begun += 1
        while Awaits.begun < SHARDS:
            await asyncio.sleep(0)
        await asyncio.to_thread(sentry_sdk.add_breadcrumb, message=f"from a thread, {job_id}")
        raise ValueError(job_id)


@pytest.mark.parametrize("kind", [Plain, Awaits])
def test_handlers_at_the_same_time_have_scopes_of_their_own(
    redis_url: str, events: list[Any], kind: type[lowq.Worker[Any]]
) -> None:
    app = lowq.Lowq(redis_url=redis_url)
    lowq.contrib.sentry.instrument(app)
    worker = app.worker(shards_count=SHARDS)(kind)
    ids = [id_of_shard(shard, SHARDS) for shard in range(SHARDS)]
    worker.perform_async({"id": job_id} for job_id in ids)
    node = lowq.Node(app, threads=SHARDS)
    node.start()
    until(lambda: len(events) == SHARDS, "an event of each")
    node.stop()
    app.close()
    assert sorted(event["contexts"]["lowq"]["ids"][0] for event in events) == sorted(ids)
    for event in events:
        (job_id,) = event["contexts"]["lowq"]["ids"]
        assert event["exception"]["values"][0]["value"] == job_id
        assert [tag for tag in event["tags"] if tag.startswith("saw.")] == [f"saw.{job_id}"]
        crumbs = [crumb["message"] for crumb in event["breadcrumbs"]["values"]]
        assert [crumb for crumb in crumbs if "crumb of" in crumb] == [f"crumb of {job_id}"]
        assert all(job_id in crumb for crumb in crumbs if "from a thread" in crumb)
    assert len(events) == SHARDS, "what the node has logged of it is no event"
