"""The page of all queues: its table in every order, and that what is behind a number is that many."""

import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from starlette.testclient import TestClient

import lowq
import lowq_web
from tests.rows import case
from tests.rules.web.hand import Hand
from tests.rules.web.shown import Element, Reader, Row


@dataclass(frozen=True)
class Known:
    """What a queue holds. Each figure puts the queues into another order."""

    name: str
    #: Seconds.
    lag: int
    due_fresh: int
    scheduled: int
    due_retries: int
    retrying: int
    taken: int
    morgue: int
    processed: int
    #: Failures of jobs that were performed in the end.
    repaired: int

    @property
    def due(self) -> int:
        return self.due_fresh + self.due_retries

    @property
    def fresh(self) -> int:
        return self.due_fresh + self.scheduled

    @property
    def retries(self) -> int:
        return self.due_retries + self.retrying

    @property
    def length(self) -> int:
        return self.fresh + self.retries

    @property
    def buried(self) -> int:
        return self.morgue + 2  # that were deleted

    @property
    def failed(self) -> int:
        return self.repaired + self.retries


KNOWN = [
    # name, lag, due_fresh, scheduled, due_retries, retrying, taken, morgue, processed, repaired
    Known("Billing", 200, 4, 11, 2, 2, 5, 5, 16, 4),
    Known("Orders", 500, 3, 3, 4, 5, 1, 3, 9, 5),
    Known("Refunds", 7, 1, 2, 3, 3, 3, 2, 8, 3),
    Known("Returns", 90, 5, 7, 0, 1, 4, 4, 13, 1),
    Known("Stock", 4000, 2, 60, 1, 4, 2, 1, 12, 2),
]  # fmt: skip
#: Word above the column -> what of `Known` it shows.
NUMBERS: dict[str, Callable[[Known], int]] = {
    "Due": lambda known: known.due,
    "Running": lambda known: known.taken,
    "Queued": lambda known: known.length,
    "Fresh": lambda known: known.fresh,
    "Retries": lambda known: known.retries,
    "Dead": lambda known: known.morgue,
    "Processed": lambda known: known.processed,
    "Failed": lambda known: known.failed,
}
ORDERS: dict[str, Callable[[Known], Any]] = {
    "Queue": lambda known: known.name,
    "Latency": lambda known: known.lag,
    **NUMBERS,
}


def fill(app: lowq.Lowq, known: Known, now: float) -> None:
    hand, early = Hand(app, known.name), now - 50_000
    hand.push("repaired", early)
    for n in range(known.repaired):
        hand.fail("repaired", early, early, retry_count=n)
    hand.perform(["repaired"], early)
    for n in range(known.processed - 1):
        hand.push(f"done-{n}", early)
    hand.perform([f"done-{n}" for n in range(known.processed - 1)], early)
    for n in range(known.retries):
        hand.push(f"failed-{n}", early)
        hand.fail(f"failed-{n}", early, now - 5 if n < known.due_retries else now + 3600)
    for n in range(known.buried):
        hand.push(f"buried-{n}", early)
        hand.queue.bury(f"buried-{n}", now=early)
    hand.queue.delete([f"buried-{n}" for n in range(known.morgue, known.buried)])
    for n in range(known.taken):
        hand.push(f"taken-{n}", early)
    hand.take([f"taken-{n}" for n in range(known.taken)], early)
    for n in range(known.due_fresh):
        hand.push(f"due-{n}", now - known.lag if n == 0 else now - 1)
    for n in range(known.scheduled):
        hand.push(f"later-{n}", now + 3600 + n)


@pytest.fixture(scope="module")
def reader() -> Iterator[Reader]:
    app, began = lowq.Lowq(redis_url=f"memory://{uuid.uuid4().hex}"), time.monotonic()
    for known in KNOWN:
        fill(app, known, time.time())
    yield Reader(TestClient(lowq_web.create_app(app), base_url="http://127.0.0.1"), began)
    app.close()


def queues(page: Element) -> list[Row]:
    return page.table("Queue", "Latency", "Dead")


def name_of(row: Row) -> str:
    return next(row["Queue"].every("a")).text


def test_no_two_columns_put_the_queues_into_the_same_order() -> None:
    # Or the tests of the order below could not distinguish them.
    orders = {word: tuple(known.name for known in sorted(KNOWN, key=key)) for word, key in ORDERS.items()}
    assert len({*orders.values(), *(order[::-1] for order in orders.values())}) == 2 * len(orders), orders
    assert all(len({key(known) for known in KNOWN}) == len(KNOWN) for key in ORDERS.values())


def header(page: Element, word: str) -> Element:
    return next(cell for cell in page.every("th") if cell.text == word)


def test_a_click_on_a_header_sorts_and_another_one_turns_it_round(reader: Reader) -> None:
    for word, key in ORDERS.items():
        with case(word):
            page = reader.page("/?sort=due" if word == "Queue" else "/?sort=colour")
            orders = []
            for _ in range(2):
                page = reader.page(header(page, word).link)
                orders.append(header(page, word).attributes["aria-sort"])
                expected = [known.name for known in sorted(KNOWN, key=key, reverse=orders[-1] == "descending")]
                assert [name_of(row) for row in queues(page)] == expected
            # Numbers from the top first: who clicks looks for the most.
            assert orders == (["ascending", "descending"] if word == "Queue" else ["descending", "ascending"])


def test_every_figure_of_every_queue(reader: Reader) -> None:
    rows = {name_of(row): row for row in queues(reader.page("/"))}
    for known in KNOWN:
        row = rows[known.name]
        assert {word: row[word].number for word in NUMBERS} == {word: key(known) for word, key in NUMBERS.items()}
        assert row["Latency"].lasts(known.lag, known.lag + reader.age)


def test_the_totals_are_the_sums_and_the_longest_lag(reader: Reader) -> None:
    totals = reader.page("/").facts
    sums = {word: sum(map(key, KNOWN)) for word, key in NUMBERS.items() if word != "Due"}
    assert {word: totals[word].number for word in sums} == sums
    assert totals["Latency"].lasts(4000, 4000 + reader.age)


def test_as_many_rows_are_behind_a_linked_number(reader: Reader) -> None:
    for word in ["Due", "Running", "Queued", "Fresh", "Retries", "Dead"]:
        with case(word):
            for row in queues(reader.page("/")):
                found = reader.ids(row[word].link)
                assert len(found) == len(set(found)) == row[word].number, (name_of(row), row[word].link)


def test_as_many_rows_are_on_a_tab_as_it_counts(reader: Reader) -> None:
    for known in KNOWN:
        page = reader.page(f"/queues/{known.name}")
        (tabs,) = (nav for nav in page.every("nav") if nav.attributes.get("aria-label") == "State")
        counts = {}
        for tab in tabs.every("a"):
            word = tab.text.split()[0]
            counts[word] = next(tab.every("span")).number
            assert len(reader.ids(tab.link)) == counts[word], (known.name, word)
        assert counts == {
            "Queued": known.length, "Due": known.due, "Scheduled": known.scheduled,
            "Retrying": known.retrying, "Running": known.taken, "Dead": known.morgue,
        }  # fmt: skip


def test_the_queues_own_page_shows_the_same_figures(reader: Reader) -> None:
    for known in KNOWN:
        head = reader.page(f"/queues/{known.name}").find("p", has="processed")
        facts = dict(zip(("latency", "processed", "failed", "buried"), head.every("b"), strict=True))
        assert facts["latency"].lasts(known.lag, known.lag + reader.age)
        assert {word: facts[word].number for word in ("processed", "failed", "buried")} == {
            "processed": known.processed, "failed": known.failed, "buried": known.buried,
        }  # fmt: skip


def test_numbers_are_short_and_exact_on_hover(reader: Reader) -> None:
    app = lowq.Lowq(redis_url=f"memory://{uuid.uuid4().hex}")
    app.queue("Orders", 1).push({"id": n, "delay": 9} for n in range(1234))
    reader = Reader(TestClient(lowq_web.create_app(app), base_url="http://127.0.0.1"))
    page = reader.page("/")
    (row,) = queues(page)
    assert (row["Queued"].text, row["Queued"].number) == ("1.2K", 1234)
    assert (page.facts["Queued"].text, page.facts["Queued"].number) == ("1.2K", 1234)
    app.close()


def test_a_paused_queue_says_so(app: lowq.Lowq) -> None:
    app.queue("Orders", 2).push({"id": 1})
    app.queue("Refunds", 2).push({"id": 1})
    app.queue("Refunds").pause(by="ann")
    reader = Reader(TestClient(lowq_web.create_app(app), base_url="http://127.0.0.1"))
    assert {name_of(row): "paused" in row["Queue"].text for row in queues(reader.page("/"))} == {
        "Orders": False, "Refunds": True,
    }  # fmt: skip
    assert "paused" in reader.page("/queues/Refunds").find("h1").text
    assert "paused" not in reader.page("/queues/Orders").find("h1").text
