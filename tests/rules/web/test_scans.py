"""Listings and counts that look at every id: few at once, and each only as long as somebody waits for it."""

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from starlette.testclient import TestClient

import lowq
import lowq_web
from lowq import inspection
from lowq_web.app import MAX_SCANS
from lowq_web.listing import asked_of
from tests.rules.web.served import connected, get, served
from tests.waiting import until

PAGE, API = "/queues/Orders?match=4*", "/api/v1/queues/Orders/jobs?match=4*"


class Scans:
    """Stands for the store: looks that find nothing and go on until somebody ends them."""

    def __init__(self) -> None:
        #: When each of them last took a step, monotonic. Nobody is told that a look is not gone on with.
        self.steps: list[float] = []
        self.over = threading.Event()
        self._lock = threading.Lock()

    @property
    def running(self) -> int:
        return sum(time.monotonic() - at < 0.5 for at in self.steps)

    def look(self, *_: Any, **__: Any) -> Iterator[inspection.Page]:
        with self._lock:
            number = len(self.steps)
            self.steps.append(time.monotonic())
        while not self.over.wait(0.01):
            self.steps[number] = time.monotonic()
            yield inspection.Page([], None)
        yield inspection.Page([], None)


@pytest.fixture
def scans(monkeypatch: pytest.MonkeyPatch) -> Scans:
    scans = Scans()
    monkeypatch.setattr(lowq.Queue, "jobs_in_steps", scans.look)
    monkeypatch.setattr(lowq.Queue, "count", lambda *_, **__: len(list(scans.look())))
    return scans


@pytest.fixture
def queue(app: lowq.Lowq) -> lowq.Queue:
    queue = app.queue("Orders", 3)
    queue.push({"id": f"job-{number}", "delay": 60} for number in range(3))
    return queue


@pytest.mark.usefixtures("queue")
@pytest.mark.parametrize("path", [PAGE, API])
def test_so_many_at_once_and_each_ends_with_its_viewer(app: lowq.Lowq, scans: Scans, path: str) -> None:
    with served(lowq_web.create_app(app)) as address:
        with ExitStack() as viewers:
            for _ in range(MAX_SCANS):
                viewers.enter_context(connected(address)).request("GET", path)
            until(lambda: scans.running == MAX_SCANS, "looks")
            for other in (PAGE, API):
                status, text = get(address, other)
                assert (status, b"scans of all ids run already" in text) == (429, True)
            assert get(address, "/queues/Orders/shards")[0] == 200  # what looks at no more than it shows goes on
        until(lambda: scans.running == 0, "end of what nobody waits for")
        assert len(scans.steps) == MAX_SCANS
        scans.over.set()
        until(lambda: get(address, path)[0] == 200, "a free place")


@pytest.mark.usefixtures("queue")
def test_counts_are_such_looks(client: TestClient, scans: Scans) -> None:
    slots = client.app.state.context.scans  # type: ignore[attr-defined]  # it is a Starlette
    assert [client.head(path).status_code for path in (PAGE, API) * MAX_SCANS] == [200] * 2 * MAX_SCANS
    assert not scans.steps, "whoever asks for the headers has nothing looked at"
    scans.over.set()
    wanted = {"action": "delete", "all": {"match": "4*"}}
    for expected in [200] * (MAX_SCANS + 1) + [429]:
        if expected == 429:
            for _ in range(MAX_SCANS):
                slots.take()
        assert client.post("/api/v1/queues/Orders/count", json=wanted).status_code == expected
        assert client.post("/queues/Orders/act", data={"do": "delete all", "match": "4*"}).status_code == expected


def test_what_is_not_sorted_already_is_such_a_look() -> None:
    rows = [
        ({"state": "morgue"}, False), ({"order_by": "perform_at", "min": "-2h"}, False),
        ({"order_by": "retry_count", "min": "2"}, False), ({"match": "4*"}, True), ({"order_by": "id"}, True),
        ({"state": "taken"}, True), ({"state": "retrying"}, True), ({"order_by": "retry_count", "max": "1"}, True),
        ({"state": "due", "order_by": "retry_count", "min": "2"}, True),
    ]  # fmt: skip
    for query, scans in rows:
        assert asked_of(query, 1_800_000_000.0).scans is scans, query


def test_what_is_found_is_sent_before_the_end_and_that_nothing_is_only_then(
    client: TestClient, queue: lowq.Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, empty = queue.jobs(), inspection.Page([], None)
    first = inspection.Page(page.jobs[:1], None)

    def bodies(query: str, *pages: inspection.Page) -> list[str]:
        monkeypatch.setattr(lowq.Queue, "jobs_in_steps", lambda *_args, **_options: iter(pages))
        return client.get(f"/queues/Orders?{query}").text.split("<tbody>")[1:]

    found = bodies("order_by=retry_count", empty, empty, first, first, page)
    counts = [body.count('class="id"') for body in found]
    assert (counts[:2], set(counts[2:])) == ([0, 1], {3})
    assert [body.count('type="checkbox"') > 0 for body in found] == [False] * (len(found) - 1) + [True]
    for pages in ([empty], [empty] * 3):
        assert ["No job matches." in body for body in bodies("match=zzz", *pages)] == [False, True]
