"""Listings and counts that look at every id: few at once, and each only as long as somebody waits for it."""

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
from starlette.testclient import TestClient

import lowq
import lowq_web
from lowq_web.app import MAX_SCANS
from tests.rules.web.served import connected, get, served
from tests.waiting import until

PAGE, API = "/queues/Orders?match=4*", "/api/v1/queues/Orders/jobs?match=4*"


class Scans:
    """Stands for the store: looks that find nothing and go on until somebody ends them."""

    def __init__(self) -> None:
        #: When each of them last took a step, monotonic.
        self.steps: list[float] = []
        self.over = threading.Event()
        self._lock = threading.Lock()

    @property
    def running(self) -> int:
        return sum(time.monotonic() - at < 0.5 for at in self.steps)

    def jobs_in_steps(self, *_: Any, **__: Any) -> Iterator[lowq.Page]:
        with self._lock:
            number = len(self.steps)
            self.steps.append(time.monotonic())
        while not self.over.is_set():
            self.steps[number] = time.monotonic()
            yield lowq.Page([], None)
            time.sleep(0.01)
        yield lowq.Page([], None)

    def are(self, running: int) -> bool:
        return self.running == running

    def count(self, *_: Any, **__: Any) -> int:
        return sum(1 for _ in self.jobs_in_steps())


@pytest.fixture
def scans(monkeypatch: pytest.MonkeyPatch) -> Scans:
    scans = Scans()
    monkeypatch.setattr(lowq.Queue, "jobs_in_steps", lambda _self, *some, **more: scans.jobs_in_steps(*some, **more))
    monkeypatch.setattr(lowq.Queue, "count", lambda _self, *some, **more: scans.count(*some, **more))
    return scans


@pytest.mark.parametrize("path", [PAGE, API])
def test_so_many_at_once_and_each_ends_with_its_viewer(app: lowq.Lowq, scans: Scans, path: str) -> None:
    app.queue("Orders", 3).push({"id": 1, "delay": 60})
    with served(lowq_web.create_app(app)) as address:
        with ExitStack() as viewers:
            for number in range(MAX_SCANS):
                viewers.enter_context(connected(address)).request("GET", path)
                until(partial(scans.are, number + 1), "look")
            for other in (PAGE, API):
                status, text = get(address, other)
                assert (status, b"scans of all ids run already" in text) == (429, True)
            assert get(address, "/queues/Orders/shards")[0] == 200  # what looks at no more than it shows goes on
        until(partial(scans.are, 0), "end of what nobody waits for")
        scans.over.set()
        until(lambda: get(address, path)[0] == 200, "a free place")


def test_counts_are_such_looks(app: lowq.Lowq, scans: Scans) -> None:
    app.queue("Orders", 3).push({"id": 1, "delay": 60})
    client = TestClient(lowq_web.create_app(app), base_url="http://127.0.0.1", headers={"sec-fetch-site": "none"})
    slots = client.app.state.context.scans  # type: ignore[attr-defined]  # it is a Starlette
    scans.over.set()
    wanted = {"action": "delete", "all": {"match": "4*"}}
    for _ in range(MAX_SCANS + 1):
        assert client.post("/api/v1/queues/Orders/count", json=wanted).status_code == 200
        assert client.post("/queues/Orders/act", data={"do": "delete all", "match": "4*"}).status_code == 200
    for _ in range(MAX_SCANS):
        slots.take()
    assert client.post("/api/v1/queues/Orders/count", json=wanted).status_code == 429
    assert client.post("/queues/Orders/act", data={"do": "delete all", "match": "4*"}).status_code == 429


@pytest.mark.parametrize("path", [PAGE, API])
def test_head_looks_at_nothing(app: lowq.Lowq, scans: Scans, path: str) -> None:
    app.queue("Orders", 3).push({"id": 1, "delay": 60})
    client = TestClient(lowq_web.create_app(app), base_url="http://127.0.0.1")
    for _ in range(MAX_SCANS + 1):
        assert client.head(path).status_code == 200
    assert not scans.steps
