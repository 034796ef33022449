"""Listings that take a while: which these are, that they are streamed, and that nobody looks for a viewer who left."""

import time
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from starlette.testclient import TestClient

import lowq
import lowq_web
from lowq.inspection.calls import Position
from lowq_web.listing import asked_of
from tests.rows import case
from tests.rules.web.served import served
from tests.waiting import until

NOW = 1_800_000_000.0


def test_what_is_not_sorted_already_is_streamed() -> None:
    rows: list[tuple[dict[str, str], bool]] = [
        ({}, False),
        ({"reverse": "1"}, False),
        ({"state": "due"}, False),
        ({"state": "morgue"}, False),
        ({"order_by": "perform_at", "min": "-2h"}, False),
        ({"order_by": "retry_count", "min": "1"}, False),
        ({"match": "4*"}, True),
        ({"order_by": "id"}, True),
        ({"state": "morgue", "order_by": "id"}, True),
        ({"state": "taken"}, True),
        ({"state": "scheduled"}, True),
        ({"state": "retrying"}, True),
        ({"order_by": "retry_count"}, True),
        ({"order_by": "retry_count", "reverse": "1"}, True),
        ({"order_by": "retry_count", "min": "0", "max": "3"}, True),
        ({"order_by": "retry_count", "max": "0"}, True),
        ({"state": "due", "order_by": "retry_count", "min": "1"}, True),
    ]
    for query, scans in rows:
        with case(query, scans):
            assert asked_of(query, NOW).scans is scans


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A looking that would take two minutes and finds nothing; counts its steps."""
    looks: list[int] = []

    def look(*_args: Any) -> Iterator[tuple[Sequence[Position], bool]]:
        for number in range(12_000):
            looks.append(number)
            time.sleep(0.01)
            yield [], False

    monkeypatch.setattr("lowq.inspection.queries.find_page_in_steps", look)
    return looks


def test_a_viewer_who_leaves_ends_the_looking(app: lowq.Lowq, slow: list[int]) -> None:
    app.queue("Orders", 1).push({"id": "a"})
    with served(lowq_web.create_app(app)) as address:
        with urllib.request.urlopen(f"{address}/queues/Orders?match=zzz") as stream:
            began = b""
            while b"nothing new yet" not in began:
                began += stream.read1(1000)
        assert b"No job matches" not in began, "that isn't known yet"

        def rests() -> bool:
            before = len(slow)
            time.sleep(0.5)
            return len(slow) == before

        until(rests, "end of a looking that nobody waits for")


def test_what_is_found_is_sent_before_the_end_and_that_nothing_is_only_then(
    client: TestClient, app: lowq.Lowq, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = app.queue("Orders", 1)
    queue.push({"id": f"job-{number}", "delay": 9} for number in range(3))
    page, empty = queue.jobs(), lowq.Page([], None)
    first = lowq.Page(page.jobs[:1], None)

    def bodies(query: str, *pages: lowq.Page) -> list[str]:
        monkeypatch.setattr(lowq.Queue, "jobs_in_steps", lambda *_args, **_options: iter(pages))
        return client.get(f"/queues/Orders?{query}").text.split("<tbody>")[1:]

    found = bodies("order_by=retry_count", empty, empty, first, first, page)
    counts = [body.count('class="id"') for body in found]
    assert (counts[:2], set(counts[2:])) == ([0, 1], {3})
    assert [body.count("nothing new yet") for body in found][:3] == [2, 1, 0]
    for pages in ([empty], [empty] * 3):
        assert ["No job matches." in body for body in bodies("match=zzz", *pages)] == [False, True]
