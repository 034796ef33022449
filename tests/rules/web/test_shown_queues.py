"""The page of all queues: its table in every order, and that what is behind a number is that many."""

import time

import pytest
from starlette.testclient import TestClient

import lowq
from tests.rows import case
from tests.rules.web.hand import Hand
from tests.rules.web.shown import Element, Reader, Row
from tests.waiting import PATIENCE

#: Queue -> word above a column, or of a tab -> what it shows.
FIGURES = {
    "Orders": {
        "Due": 7, "Running": 1, "Queued": 26, "Fresh": 16, "Retries": 10, "Dead": 8, "Processed": 9, "Failed": 15,
    },
    "Stock": {
        "Due": 3, "Running": 2, "Queued": 67, "Fresh": 62, "Retries": 5, "Dead": 1, "Processed": 12, "Failed": 10,
    },
}  # fmt: skip
TABS = {"Orders": {"Scheduled": 13, "Retrying": 6}, "Stock": {"Scheduled": 60, "Retrying": 4}}
LAGS = {"Orders": 500, "Stock": 4000}
#: Failures of a job that was performed in the end, and buried jobs that were deleted.
REPAIRED, DELETED = 5, 2


def fill(app: lowq.Lowq, name: str, now: float) -> None:
    figures, tabs, hand, early = FIGURES[name], TABS[name], Hand(app, name), now - 50_000

    def push(word: str, count: int, at: float = early) -> list[str]:
        ids = [f"{word}-{n}" for n in range(count)]
        for job_id in ids:
            hand.push(job_id, at)
        return ids

    (repaired,) = push("repaired", 1)
    for n in range(REPAIRED):
        hand.fail(repaired, early, early, retry_count=n)
    hand.perform([repaired], early)
    hand.perform(push("done", figures["Processed"] - 1), early)
    for n in range(figures["Retries"]):
        hand.push(f"failed-{n}", early)
        hand.fail(f"failed-{n}", early, now + 3600 if n < tabs["Retrying"] else now - 5)
    buried = push("buried", figures["Dead"] + DELETED)
    hand.queue.bury(buried, now=early)
    hand.queue.delete(buried[figures["Dead"] :])
    hand.take(push("taken", figures["Running"]), early)
    push("oldest", 1, now - LAGS[name])
    push("due", figures["Fresh"] - tabs["Scheduled"] - 1, now - 1)
    push("later", tabs["Scheduled"], now + 3600)


@pytest.fixture
def full(app: lowq.Lowq, client: TestClient) -> Reader:
    """Of queues with these figures."""
    began = time.monotonic()
    for name in FIGURES:
        fill(app, name, time.time())
    return Reader(client, began)


def queues(page: Element) -> list[Row]:
    return page.table("Queue", "Latency", "Dead")


def name_of(row: Row) -> str:
    return next(row["Queue"].every("a")).text


def header(page: Element, word: str) -> Element:
    return next(cell for cell in page.every("th") if cell.text == word)


def test_every_figure_leads_to_as_many_rows_and_the_totals_are_sums(full: Reader) -> None:
    page = full.page("/")
    for (name, figures), row in zip(FIGURES.items(), queues(page), strict=True):
        assert {word: row[word].number for word in figures} == figures
        assert row["Latency"].lasts(LAGS[name], LAGS[name] + full.age)
        for word in ("Due", "Running", "Queued", "Fresh", "Retries", "Dead"):
            found = full.ids(row[word].link)
            assert len(found) == len(set(found)) == row[word].number, (name, word)
    sums = {word: sum(figures[word] for figures in FIGURES.values()) for word in FIGURES["Orders"] if word != "Due"}
    assert {word: page.facts[word].number for word in sums} == sums
    assert page.facts["Latency"].lasts(4000, 4000 + full.age)


def test_a_click_on_a_header_sorts_and_another_one_turns_it_round(full: Reader) -> None:
    for word in ("Queue", "Latency", *FIGURES["Orders"]):
        with case(word):
            page, orders = full.page("/?sort=due" if word == "Queue" else "/?sort=colour"), []
            up = ["Stock", "Orders"] if word in ("Due", "Retries", "Dead", "Failed") else ["Orders", "Stock"]
            for _ in range(2):
                page = full.page(header(page, word).link)
                orders.append(header(page, word).attributes["aria-sort"])
                assert [name_of(row) for row in queues(page)] == up[:: -1 if orders[-1] == "descending" else 1]
            # Numbers from the top first: who clicks looks for the most.
            assert orders == (["ascending", "descending"] if word == "Queue" else ["descending", "ascending"])


def test_the_queues_own_page_shows_the_same_figures_and_as_many_rows_on_each_tab(full: Reader) -> None:
    for name, figures in FIGURES.items():
        page = full.page(f"/queues/{name}")
        _, processed, failed, buried = page.find("p", has="processed").every("b")
        shown = (processed.number, failed.number, buried.number)
        assert shown == (figures["Processed"], figures["Failed"], figures["Dead"] + DELETED)
        (tabs,) = (nav for nav in page.every("nav") if nav.attributes.get("aria-label") == "State")
        counts = {tab.text.split()[0]: next(tab.every("span")).number for tab in tabs.every("a")}
        figures = {**figures, **TABS[name], "All": sum(figures[word] for word in ("Queued", "Running", "Dead"))}
        assert counts == {word: figures[word] for word in counts}
        assert len(counts) == 7
        assert [len(full.ids(tab.link)) for tab in tabs.every("a")] == list(counts.values())


def test_numbers_are_short_and_exact_on_hover_and_a_paused_queue_says_so(app: lowq.Lowq, client: TestClient) -> None:
    app.queue("Orders", 1).push({"id": n, "delay": 9} for n in range(1234))
    app.queue("Refunds", 2).push({"id": 1})
    app.queue("Refunds").pause(by="ann")
    reader = Reader(client)
    orders, refunds = queues(reader.page("/"))
    assert (orders["Queued"].text, orders["Queued"].number) == ("1.2K", 1234)
    for row, is_paused in ((orders, False), (refunds, True)):
        assert ("paused" in row["Queue"].text) is is_paused
        assert ("paused" in reader.page(row["Queue"].link).find("h1").text) is is_paused


def test_a_queue_says_how_full_it_is_and_what_has_expired_and_jobs_their_priority(
    app: lowq.Lowq, client: TestClient
) -> None:
    def words(path: str) -> str:
        return Reader(client).page(path).find("main").text

    app.queue("plain", shards_count=2).push({"id": "b"})
    queue = app.queue("mail", shards_count=1, capacity=20)
    queue.push([{"id": str(number)} for number in range(18)])
    for word in ("holds", "capacity", "priority", "expired"):
        assert word not in words("/queues/plain")
    assert "holds 18 of 20" in words("/queues/mail")
    assert "capacity 20" in words("/")
    figures = client.get("/metrics").text
    assert ('lowq_capacity{queue="mail"} 20.0' in figures, figures.count("lowq_capacity{")) == (True, 1)
    queue.put("late", ttl=0.001)
    with queue.consumer() as consumer:
        assert len(consumer.take(100, timeout=PATIENCE)) == 18  # the sweep comes first
        assert "expired 1" in words("/queues/mail")
    queue.push({"id": "a", "priority": 9, "delay": 60})
    assert "a priority 9" in words("/queues/mail?state=scheduled")
    assert "Priority 9" in words("/queues/mail/job?id=a")
