"""A job that hangs: the page of an id that waits for it says so, and the page of nodes how many ids are with it."""

import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

import lowq
import lowq_web
from tests.waiting import PATIENCE, until


@pytest.fixture
def stuck() -> Iterator[TestClient]:
    """A node whose only shard hangs with five ids in flight, and a sixth that waits for them."""
    app = lowq.Lowq(redis_url=f"memory://{uuid.uuid4().hex}", lease_ttl=0.6)
    over, began = threading.Event(), threading.Event()

    def perform(_self: Any, _payloads_by_id: dict[str, list[Any]]) -> None:
        began.set()
        over.wait(PATIENCE)

    app.worker(shards_count=1, batch_size=5)(type("Orders", (lowq.Worker,), {"perform": perform}))
    app.queue("Orders").push([{"id": f"stuck-{number}"} for number in range(5)])
    node = lowq.Node(app, threads=2)
    node.start()
    try:
        assert began.wait(PATIENCE)
        app.queue("Orders").push({"id": "waiting"})
        yield TestClient(lowq_web.create_app(app), base_url="http://127.0.0.1")
    finally:
        over.set()
        node.stop(5.0)
        app.close()


def answer(client: TestClient, path: str, expected: str) -> Any:
    """The answer, as soon as it says that: which thread it is comes with the next heartbeat."""
    return until(lambda: found if expected in (found := client.get(path)).text else None, f"{expected!r} on {path}")


def test_a_busy_shard_shows_three_of_its_ids_and_how_many_more(stuck: TestClient) -> None:
    began = time.time()
    page = answer(stuck, "/queues/Orders/job?id=waiting", "which thread").text
    assert 'href="/queues/Orders/job?id=stuck-1"' in page
    assert '<a href="/queues/Orders?state=taken">and 2 more</a>' in page
    why = stuck.get("/api/v1/queues/Orders/job?id=waiting").json()["why"]
    assert (why["reason"], why["in_flight"], why["in_flight_ids"]) == ("busy", 5, ["stuck-0", "stuck-1", "stuck-2"])
    assert began - PATIENCE < why["in_flight_since"] <= time.time()
    page = answer(stuck, "/nodes", "and 2 more").text
    assert '<a href="/queues/Orders?state=taken">and 2 more</a>' in page
    (node,) = stuck.get("/api/v1/nodes").json()["nodes"]
    (activity,) = [activity for activity in node["performing"] if activity is not None]
    assert (activity["count"], activity["ids"]) == (5, ["stuck-0", "stuck-1", "stuck-2"])


def test_a_thread_that_was_written_off_is_shown_until_its_handler_comes_back() -> None:
    app = lowq.Lowq(redis_url=f"memory://{uuid.uuid4().hex}", lease_ttl=0.6)
    over = threading.Event()

    def perform(_self: Any, _payloads_by_id: dict[str, list[Any]]) -> None:
        over.wait(PATIENCE)

    app.worker(shards_count=1, ttr=0.1, max_crash_count=1)(type("Orders", (lowq.Worker,), {"perform": perform}))
    app.queue("Orders").push({"id": "stuck"})
    node = lowq.Node(app, threads=3)
    node.start()
    try:
        client = TestClient(lowq_web.create_app(app), base_url="http://127.0.0.1")
        answer(client, "/nodes", "written off: 1")
        (shown,) = client.get("/api/v1/nodes").json()["nodes"]
        assert (shown["written_off"], shown["threads"], len(shown["performing"])) == (1, 3, 3)
        assert node.trouble() == "handlers have exceeded their ttr and still run: 1; the node has 3 threads"
        over.set()
        until(lambda: "written off" not in client.get("/nodes").text, "a page without threads that were written off")
        assert node.trouble() is None
    finally:
        over.set()
        assert node.stop(5.0)
        app.close()
