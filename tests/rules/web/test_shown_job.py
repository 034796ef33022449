"""The page of an id: its payloads, errors and crashes, its coming retries, and what may be done to it."""

import itertools
import json
import time
from datetime import datetime
from typing import Any

import pytest

import lowq
from tests.rows import case
from tests.rules.web.conftest import dashboard
from tests.rules.web.hand import Hand
from tests.rules.web.shown import Element, Reader

TRACEBACK = """Traceback (most recent call last):
  File "/srv/shop/sync.py", line 48, in perform
TimeoutError: the warehouse did not answer <b>"""
PAGE = "/queues/Orders/job?id=order-7"


@pytest.fixture
def hand(app: lowq.Lowq) -> Hand:
    return Hand(app, "Orders", 3)


def place(page: Element, heading: str) -> Element:
    """The part of the page about the id waiting, in flight, or in the morgue."""
    (found,) = (
        part for part in page.every("section") if any(head.text.startswith(heading) for head in part.every("h2"))
    )
    return found


def payloads(part: Element) -> list[tuple[str, Any]]:
    """Scores and payloads as they are shown."""
    items = [item for item in part.every("li") if list(item.every("pre"))]
    return [(next(item.every("b")).text, json.loads(next(item.every("pre")).lines)) for item in items]


def headings(page: Element) -> list[str]:
    """Of the places that an id is in."""
    return [head.text for head in page.every("h2") if head.text.startswith(("Queued", "Running", "Dead"))]


def buttons(page: Element) -> list[str]:
    (main,) = page.every("main")
    return [button.text for button in main.every("button")]


def at(moment: str) -> float:
    return datetime.fromisoformat(moment).timestamp()


def test_payloads_come_in_the_order_of_their_scores(hand: Hand, reader: Reader) -> None:
    later = time.time() + 500
    for score in (30, -2, 7.5, 1_700_000_000):
        hand.push("order-7", later, {"version": score}, score)
    part = place(reader.page(PAGE), "Queued")
    assert payloads(part) == [
        ("-2", {"version": -2}), ("7.5", {"version": 7.5}), ("30", {"version": 30}),
        ("1700000000", {"version": 1_700_000_000}),
    ]  # fmt: skip
    assert part.facts["Payloads"].number == 4
    # A score that looks like a time is shown as one too.
    assert [time.attributes["datetime"][:10] for item in part.every("li") for time in item.every("time")] == [
        "2023-11-14"
    ]
    assert at(part.facts["Due"].moment) == pytest.approx(later, abs=0.01)
    assert part.facts["Due"].lasts(500 - 40, 500)
    assert part.facts["Retries"].text == "fresh"
    assert "Crashes" not in part.facts


def test_an_id_that_failed_has_its_error_and_its_coming_retries(app: lowq.Lowq, reader: Reader) -> None:
    app.worker(shards_count=3, max_retry_count=7)(type("Orders", (lowq.Worker,), {"perform": lambda *_: None}))
    app.register("Orders", 3, app.workers["Orders"])
    hand, now = Hand(app, "Orders", 3), time.time()
    hand.push("order-7", now - 900)
    hand.fail("order-7", now - 900, now + 800, retry_count=2, error=TRACEBACK)
    page = reader.page(PAGE)
    part = place(page, "Queued")
    assert headings(page) == ["Queued retrying"]
    assert part.facts["Retries"].text == "3 of 7"
    assert next(part.every("pre")).lines == TRACEBACK
    (clock,) = (items for items in part.every("ol") if not list(items.every("pre")))
    coming = [item for item in clock.every("li") if list(item.every("time"))]
    assert [next(item.every("b")).text for item in coming] == ["3", "4", "5", "6", "7"]
    times = [at(item.moment) for item in coming]
    assert times[0] == pytest.approx(now + 800, abs=0.01)
    # Each follows from the one before: n**4 + 15 + random(0..30) * (n + 1), here in the middle.
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert gaps == [pytest.approx(n**4 + 15 + 15 * (n + 1), abs=0.01) for n in (3, 4, 5, 6)]
    assert buttons(page) == ["Run now", "Bury", "Delete"]


def test_crashes_are_counted(hand: Hand, reader: Reader) -> None:
    now = time.time()
    hand.push("order-7", now - 900)
    hand.take(["order-7"], now - 900)
    index = hand.index("order-7")
    hand.die(index)
    hand.own(index, now - 800, "bbbbbbbbbbbb")
    hand.take(["order-7"], now - 700)
    hand.die(index)
    hand.own(index, now - 600, "cccccccccccc")
    part = place(reader.page(PAGE), "Queued")
    assert part.facts["Crashes"].text == "2"


def test_in_flight_newly_pushed_and_in_the_morgue_each_have_their_own(hand: Hand, reader: Reader) -> None:
    now = time.time()
    hand.push("order-7", now - 900, "old", 1)
    hand.queue.bury("order-7", TRACEBACK, now=now - 800)
    hand.push("order-7", now - 700, "running", 2)
    hand.take(["order-7"], now - 700)
    hand.push("order-7", now + 700, "new", 3)
    page = reader.page(PAGE)
    assert headings(page) == ["Running", "Queued scheduled", "Dead"]
    assert payloads(place(page, "Running")) == [("2", "running")]
    assert payloads(place(page, "Queued")) == [("3", "new")]
    morgue = place(page, "Dead")
    assert payloads(morgue) == [("1", "old")]
    assert next(morgue.every("pre")).lines == TRACEBACK
    assert at(morgue.facts["Dead since"].moment) == pytest.approx(now - 800, abs=0.01)
    assert not list(place(page, "Queued").every("pre"))[1:], "an error that is not its own"
    assert [word for word in ("running", "scheduled", "dead") if word in page.find("h1").text] == [
        "running", "scheduled", "dead",
    ]  # fmt: skip
    assert buttons(page) == ["Run now", "Retry now", "Bury", "Delete"]


def test_what_may_be_done_depends_on_where_it_is() -> None:
    rows: list[tuple[str, list[str]]] = [
        ("scheduled", ["Run now", "Bury", "Delete"]), ("due", ["Bury", "Delete"]), ("taken", []),
        ("morgue", ["Retry now", "Delete"]),
    ]  # fmt: skip
    for state, expected in rows:
        with case(state), dashboard() as (app, client):
            hand, now = Hand(app, "Orders", 3), time.time()
            hand.push("order-7", now + 500 if state == "scheduled" else now - 500)
            if state == "taken":
                hand.take(["order-7"], now - 500)
            if state == "morgue":
                hand.queue.bury("order-7")
            page = Reader(client).page(PAGE)
            assert {"taken": "running", "morgue": "dead"}.get(state, state) in page.find("h1").text
            assert buttons(page) == expected


def test_its_shard_and_owner_are_shown(hand: Hand, reader: Reader) -> None:
    now, index = time.time(), hand.index("order-7")
    for job_id in hand.ids(index, 4):
        hand.push(job_id, now - 300)
    hand.push("order-7", now - 200)
    page = reader.page(PAGE)
    facts = page.facts
    assert (facts["Shard"].text, facts["Owner"].text) == (str(index), "nobody")
    assert "5 queued" in facts["In its shard"].text
    assert facts["In its shard"].lasts(300)
    hand.own(index, now, "zzzzzz999999")
    page = reader.page(PAGE)
    assert page.facts["Owner"].text == "zzzzzz999999"
    assert "behind 4" in page.find("section", has="Why is it not running?").text
