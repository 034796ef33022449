"""Listings of jobs: every order with bounds, in both directions, and what a row says."""

import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import product
from urllib.parse import urlencode

import pytest
from starlette.testclient import TestClient

import lowq
import lowq_web
from tests.rows import case
from tests.rules.web.hand import Hand
from tests.rules.web.shown import Reader, id_in

#: id -> seconds from the beginning at which it becomes due. Those of "b" have failed: `FAILED`. Bounds and pages are
#: tested with `Queue.jobs`.
WAITING = {"a-1": 900, "a-2": -300, "a-3": 400, "b-1": 700, "b-2": 200, "b-3": 500, "b-4": -20, "b-5": 600}
FAILED = {"b-1": 0, "b-2": 3, "b-3": 1, "b-4": 1, "b-5": 12}
#: id -> seconds from the beginning at which it was buried.
BURIED = {"d-1": -400, "d-2": -900, "d-3": -100, "d-4": -650}


@dataclass(frozen=True)
class World:
    reader: Reader
    #: Unix time, seconds.
    began: float

    def ids(self, **query: object) -> list[str]:
        given = {name: value for name, value in query.items() if value is not None}
        return self.reader.ids(f"/queues/Orders?{urlencode(given)}")


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    app, began = lowq.Lowq(redis_url=f"memory://{uuid.uuid4().hex}"), time.time()
    hand = Hand(app, "Orders", 3)
    for job_id, buried_at in sorted(BURIED.items(), key=lambda item: item[1]):
        hand.push(job_id, began - 50_000, {"why": job_id})
        hand.queue.bury(job_id, f"Traceback\n  line\nOutOfStock: {job_id}", now=began + buried_at)
    # Their shards' clocks have gone on to then: all further times are after the last burial.
    for job_id, retry_count in FAILED.items():
        hand.push(job_id, began - 90, {"n": 1}, 1e9 + 1)
        error = f"Traceback\n  line\nTimeoutError: {job_id}"
        hand.fail(job_id, began - 90, began + WAITING[job_id], retry_count=retry_count, error=error)
        hand.push(job_id, began - 90, {"n": 2}, 1e9 + 2)
    for job_id in WAITING.keys() - FAILED.keys():
        hand.push(job_id, began + WAITING[job_id], {"fresh": job_id})
    yield World(Reader(TestClient(lowq_web.create_app(app), base_url="http://127.0.0.1")), began)
    app.close()


def expected(values: dict[str, int], low: float, high: float, reverse: bool = False) -> list[str]:
    held = [job_id for job_id, value in values.items() if low <= value <= high]
    return sorted(held, key=lambda job_id: (values[job_id], job_id), reverse=reverse)


def test_an_order_with_bounds_in_both_directions(world: World) -> None:
    attempts = {job_id: FAILED.get(job_id, -1) + 2 for job_id in WAITING}  # as the list counts
    rows = [("perform_at", None, WAITING, 150, 550), ("retry_count", None, attempts, 3, 5),
            ("buried_at", "morgue", BURIED, -700, -350)]  # fmt: skip
    for (order, state, values, low, high), is_bound, reverse in product(rows, (True, False), (None, "1")):
        with case(order, is_bound, reverse):
            begin = 0 if order == "retry_count" else world.began
            bounds = {"min": begin + low, "max": begin + high} if is_bound else {}
            found = world.ids(order_by=order, state=state, reverse=reverse, **bounds)
            least, most = (low, high) if is_bound else (-1e9, 1e9)
            assert found == expected(values, least, most, bool(reverse))
    assert world.ids(order_by="id", min="a-2", max="b-2") == ["a-2", "a-3", "b-1", "b-2"]


def test_a_state_and_a_pattern(world: World) -> None:
    states = {
        "due": [job_id for job_id, at in WAITING.items() if at < 0],
        "scheduled": [job_id for job_id, at in WAITING.items() if at > 0 and job_id not in FAILED],
        "retrying": [job_id for job_id, at in WAITING.items() if at > 0 and job_id in FAILED],
    }
    for (state, ids), match in product(states.items(), (None, "b-*")):
        with case(state, match):
            values = {job_id: WAITING[job_id] for job_id in ids if match is None or job_id[0] == "b"}
            assert world.ids(state=state, match=match) == expected(values, -1e9, 1e9)
            bounded = world.ids(state=state, match=match, min=world.began + 350, max=world.began + 650)
            assert bounded == expected(values, 350, 650)


def test_a_row_shows_its_job(world: World) -> None:
    for state, column, moments in (("", "Due", WAITING), ("morgue", "Dead since", BURIED)):
        found = {id_in(row["Id"]): row for row in world.reader.rows(f"/queues/Orders?state={state}", "Id", "Payloads")}
        assert set(found) == set(moments)
        for job_id, row in found.items():
            with case(job_id):
                assert row["Id"].link == f"/queues/Orders/job?id={job_id}"
                moment = datetime.fromisoformat(row[column].moment).timestamp()
                assert moment == pytest.approx(world.began + moments[job_id], abs=0.01)
                newest, error = row["Newest payload"].text, {"b": "TimeoutError", "d": "OutOfStock"}.get(job_id[0])
                assert newest.endswith(f"{error}: {job_id}" if error else f'{{"fresh": "{job_id}"}}')
                if state == "":
                    assert row["Attempt"].text == (str(FAILED[job_id] + 2) if job_id in FAILED else "")
                    assert row["Payloads"].number == (2 if job_id in FAILED else 1)
                    assert ("retrying" in row["Id"].text) is (job_id in FAILED and WAITING[job_id] > 0)


def test_each_tab_offers_what_can_be_done_there(world: World) -> None:
    rows: list[tuple[str, list[str]]] = [
        ("", ["Run {} now", "Bury {}", "Delete {}"]), ("due", ["Bury {}", "Delete {}"]),
        ("taken", ["Cancel {}"]), ("morgue", ["Retry {} now", "Delete {}"]),
    ]  # fmt: skip
    for state, buttons in rows:
        with case(state, buttons):
            page = world.reader.page(f"/queues/Orders?state={state}")
            offered = [button.text for button in page.every("button")]
            for what in ("selected", "all"):
                expected = [button.format(what) for button in buttons if "selected" not in button or what == "selected"]
                assert [text for text in offered if what in text.split()] == expected


def test_a_filter_stays_on_the_next_page(app: lowq.Lowq, client: TestClient) -> None:
    hand, now = Hand(app, "Orders", 2), time.time()
    for n in range(130):
        hand.push(f"{'old' if n % 2 else 'new'}-{n:03d}", now + 1000 + n)
    query = urlencode({"match": "old-*", "min": now + 1010, "max": now + 1119.5, "reverse": "1"})
    assert Reader(client).ids(f"/queues/Orders?{query}") == [f"old-{n:03d}" for n in range(119, 10, -2)]
