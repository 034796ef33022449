"""Listings of jobs: every order with either bound and with both, in both directions, and what a row says."""

import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import product
from urllib.parse import urlencode

import pytest
from starlette.testclient import TestClient

import lowq
import lowq_web
from tests.rows import case
from tests.rules.web.conftest import Open
from tests.rules.web.hand import Hand
from tests.rules.web.shown import Reader, Row, id_in


@dataclass(frozen=True)
class Known:
    """A job that waits."""

    id: str
    #: Seconds from the beginning; below 0: due.
    perform_in: int
    #: -1: never failed.
    retry_count: int = -1


WAITING = [
    Known("a-1", 900), Known("a-2", -300), Known("a-3", 400), Known("a-4", -50), Known("b-1", 700, 0),
    Known("b-2", 200, 3), Known("b-3", 500, 1), Known("b-4", -20, 1), Known("b-5", 600, 12), Known("c-1", 300, 2),
]  # fmt: skip
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
    hand, early = Hand(app, "Orders", 3), began - 50_000
    for job_id, buried_at in sorted(BURIED.items(), key=lambda item: item[1]):
        hand.push(job_id, early, {"why": job_id})
        hand.queue.bury(job_id, f"Traceback\n  line\nOutOfStock: {job_id}", now=began + buried_at)
    # Their shards' clocks have gone on to then: all further times are after the last burial.
    for known in sorted(WAITING, key=lambda known: (known.retry_count < 0, known.perform_in)):
        if known.retry_count >= 0:
            hand.push(known.id, began - 90, {"n": 1}, 1e9 + 1)
            hand.fail(
                known.id, began - 90, began + known.perform_in, retry_count=known.retry_count,
                error=f"Traceback\n  line\nTimeoutError: {known.id}",
            )  # fmt: skip
            hand.push(known.id, began - 90, {"n": 2}, 1e9 + 2)
        else:
            hand.push(known.id, began + known.perform_in, {"fresh": known.id})
    yield World(Reader(TestClient(lowq_web.create_app(app), base_url="http://127.0.0.1")), began)
    app.close()


def expected(
    values: dict[str, float], low: float | None, high: float | None, reverse: bool, lowest: float = float("-inf")
) -> list[str]:
    least, most = lowest if low is None else low, float("inf") if high is None else high
    held = [job_id for job_id, value in values.items() if least <= value <= most]
    return sorted(held, key=lambda job_id: (values[job_id], job_id), reverse=reverse)


#: Order -> what each job is ordered by. Which bounds and pages there are is tested with `Queue.jobs`.
VALUES: dict[str, dict[str, float]] = {
    "perform_at": {known.id: known.perform_in for known in WAITING},
    "retry_count": {known.id: known.retry_count + 1 for known in WAITING},  # as the list counts
    "buried_at": dict(BURIED),
}


def test_an_order_with_bounds_in_both_directions(world: World) -> None:
    # Times half a second below and above: scores are microseconds.
    rows: list[tuple[str, str | None, float | None, float | None]] = [
        ("perform_at", None, None, None), ("perform_at", None, 200, None), ("perform_at", None, 200, 500),
        ("perform_at", None, None, -5000), ("retry_count", None, 1, None), ("retry_count", None, None, 0),
        ("retry_count", None, 2, 4), ("retry_count", None, 14, None), ("buried_at", "morgue", None, None),
        ("buried_at", "morgue", -650, -400),
    ]  # fmt: skip
    for (order, state, low, high), reverse in product(rows, (None, "1")):
        with case(order, low, high, reverse):
            begin = 0 if order == "retry_count" else world.began
            found = world.ids(
                order_by=order, state=state, reverse=reverse,
                min=None if low is None else begin + low - (begin > 0) * 0.5,
                max=None if high is None else begin + high + (begin > 0) * 0.5,
            )  # fmt: skip
            assert found == expected(VALUES[order], low, high, bool(reverse))


def test_by_id(world: World) -> None:
    for (low, high), reverse in product([(None, None), ("a-3", None), ("a-2", "b-4")], (None, "1")):
        with case(low, high, reverse):
            for state, ids in ((None, VALUES["perform_at"]), ("morgue", BURIED)):
                held = [job_id for job_id in ids if (low or "") <= job_id <= (high or "~")]
                found = world.ids(state=state, order_by="id", reverse=reverse, min=low, max=high)
                assert found == sorted(held, reverse=bool(reverse))


STATES: dict[str, Callable[[Known], bool]] = {
    "due": lambda known: known.perform_in < 0,
    "scheduled": lambda known: known.perform_in > 0 and known.retry_count < 0,
    "retrying": lambda known: known.perform_in > 0 and known.retry_count >= 0,
}


def test_a_state_and_a_pattern(world: World) -> None:
    matches: list[str | None] = [None, "b-*", "?-[12]"]
    for state, match in product(STATES, matches):
        with case(state, match):
            first, second = {None: ("abc", "12345"), "b-*": ("b", "12345"), "?-[12]": ("abc", "12")}[match]
            values: dict[str, float] = {
                known.id: known.perform_in
                for known in WAITING
                if STATES[state](known) and known.id[0] in first and known.id[2] in second
            }
            assert world.ids(state=state, match=match) == expected(values, None, None, False)
            bounded = world.ids(state=state, match=match, min=world.began + 350, max=world.began + 650)
            assert bounded == expected(values, 350, 650, False)


def rows(world: World, address: str) -> dict[str, Row]:
    return {id_in(row["Id"]): row for row in world.reader.rows(address, "Id", "Payloads")}


def at(moment: str) -> float:
    return datetime.fromisoformat(moment).timestamp()


def test_a_row_shows_its_job(world: World) -> None:
    found = rows(world, "/queues/Orders")
    age = time.time() - world.began
    assert len(found) == len(WAITING)
    for known in WAITING:
        row = found[known.id]
        assert row["Id"].link == f"/queues/Orders/job?id={known.id}"
        assert at(row["Due"].moment) == pytest.approx(world.began + known.perform_in, abs=0.01)
        if known.perform_in < 0:
            assert row["Due"].text.endswith("ago")
            assert row["Due"].lasts(-known.perform_in, -known.perform_in + age)
        else:
            assert row["Due"].text.startswith("in ")
            assert row["Due"].lasts(known.perform_in - age, known.perform_in)
        assert row["Retry"].text == ("" if known.retry_count < 0 else str(known.retry_count + 1))
        assert row["Payloads"].number == (1 if known.retry_count < 0 else 2)
        newest = row["Newest payload"].text
        if known.retry_count < 0:
            assert newest == f'{{"fresh": "{known.id}"}}'
        else:
            assert newest.startswith('{"n": 2}')
            assert newest.endswith(f"TimeoutError: {known.id}")
        for state, holds in STATES.items():
            assert (state in row["Id"].text) == (holds(known) and state != "due")


def test_a_row_of_the_morgue_shows_when_and_why(world: World) -> None:
    found = rows(world, "/queues/Orders?state=morgue")
    for job_id, buried_at in BURIED.items():
        assert at(found[job_id]["Dead since"].moment) == pytest.approx(world.began + buried_at, abs=0.01)
        assert found[job_id]["Newest payload"].text.endswith(f"OutOfStock: {job_id}")


def test_headers_sort_and_turn_round(world: World) -> None:
    values = {"Due": VALUES["perform_at"], "Retry": VALUES["retry_count"]}
    for word, value in values.items():
        page = world.reader.page("/queues/Orders?order_by=id")
        orders = []
        for _ in range(2):
            link = next(cell for cell in page.every("th") if cell.text == word).link
            page = world.reader.page(link)
            orders.append(next(cell for cell in page.every("th") if cell.text == word).attributes["aria-sort"])
            assert world.reader.ids(link) == expected(value, None, None, orders[-1] == "descending"), word
        assert sorted(orders) == ["ascending", "descending"]


def test_a_filter_stays_in_the_form_and_on_the_next_page(browse: Open, app: lowq.Lowq) -> None:
    hand, now = Hand(app, "Orders", 2), time.time()
    for n in range(130):
        hand.push(f"{'old' if n % 2 else 'new'}-{n:03d}", now + 1000 + n)
    reader = Reader(browse())
    address = f"/queues/Orders?{urlencode({'match': 'old-*', 'min': now + 1010, 'max': now + 1119.5, 'reverse': '1'})}"
    assert reader.ids(address) == [f"old-{n:03d}" for n in range(119, 10, -2)]
    page = reader.page(address)
    (form,) = (form for form in page.every("form") if "filter" in form.classes)
    fields = {field.attributes["name"]: field.attributes for field in form.every("input")}
    assert fields["match"]["value"] == "old-*"
    assert float(fields["min"]["value"]) == pytest.approx(now + 1010)
    assert "checked" in fields["reverse"]


def test_each_tab_offers_what_can_be_done_there(world: World) -> None:
    rows: list[tuple[str, list[str]]] = [
        ("", ["Run {} now", "Bury {}", "Delete {}"]),
        ("?state=due", ["Bury {}", "Delete {}"]),
        ("?state=scheduled", ["Run {} now", "Bury {}", "Delete {}"]),
        ("?state=retrying", ["Run {} now", "Bury {}", "Delete {}"]),
        ("?state=taken", []),
        ("?state=morgue", ["Retry {} now", "Delete {}"]),
    ]
    for query, buttons in rows:
        with case(query, buttons):
            page = world.reader.page(f"/queues/Orders{query}")
            offered = [button.text for button in page.every("button")]
            for what in ("selected", "all"):
                assert [text for text in offered if what in text.split()] == [button.format(what) for button in buttons]
            boxes = [
                box for box in page.every("input") if box.attributes.get("name") == "id" and "value" in box.attributes
            ]
            ticks = [box for box in boxes if box.attributes.get("type") == "checkbox"]
            assert len(ticks) == (len(world.reader.ids(f"/queues/Orders{query}")) if buttons else 0)
