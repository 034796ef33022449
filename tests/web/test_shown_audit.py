"""The audit log and the list of tasks: who did what, to how many, and when."""

import re
import time
from datetime import datetime

import pytest
from starlette.testclient import TestClient

import lowq
from tests.waiting import until
from tests.web.confirming import act
from tests.web.conftest import OWN, Open
from tests.web.hand import Hand
from tests.web.shown import Reader, Row


def cells(rows: list[Row]) -> list[tuple[str, str, str, str, str]]:
    words = ("Who", "Did", "To", "Jobs", "Detail")
    return [tuple(row[word].text for word in words) for row in rows]  # type: ignore[misc]  # there are five


def test_entries_are_shown_newest_first(app: lowq.Lowq, browse: Open) -> None:
    began = time.time()
    app.note("ann", "kick", "Orders", 1234, {"state": "morgue", "match": "39*", "min": -5})
    app.note("bob", "pause", "Refunds")
    app.note("carol", "perform_now", "Orders", 0, {"ids": ["a-1", "a-2"], "more": 7})
    rows = Reader(browse()).page("/audit").table("When", "Who", "Did")
    assert cells(rows) == [
        ("carol", "perform now", "Orders", "0", "ids a-1, a-2 more 7"),
        ("bob", "pause", "Refunds", "", ""),
        ("ann", "kick", "Orders", "1,234", "state morgue match 39* min -5"),
    ]
    for row in rows:
        assert began - 0.01 <= datetime.fromisoformat(row["When"].moment).timestamp() <= time.time()
        assert row["When"].text == "now" or row["When"].text.endswith("ago")


def test_an_empty_log_says_so(browse: Open) -> None:
    assert "Nobody has done anything here yet." in Reader(browse()).page("/audit").text


@pytest.fixture
def client(browse: Open) -> TestClient:
    client = browse()
    client.headers.update(OWN)
    return client


def test_what_is_done_on_pages_is_in_the_log(app: lowq.Lowq, client: TestClient) -> None:
    hand, now = Hand(app, "Orders", 3), time.time()
    for n in range(6):
        hand.push(f"job-{n}", now + 1000)
    reader = Reader(client)
    for form in (
        {"do": "perform_now selected", "id": ["job-0", "job-1"]},
        {"do": "bury selected", "id": ["job-2", "job-3", "gone"], "reason": "out of stock"},
        {"do": "kick selected", "id": ["job-2"]},
        {"do": "delete selected", "id": ["job-4"]},
    ):
        assert act(client, "/queues/Orders/act", **form).status_code == 303
    client.post("/queues/Orders/pause")
    client.post("/queues/Orders/resume")
    rows = reader.page("/audit").table("When", "Who", "Did")
    assert [(row["Did"].text, row["Jobs"].text) for row in rows] == [
        ("resume", ""), ("pause", ""), ("delete", "1"), ("kick", "1"), ("bury", "2"), ("perform now", "2"),
    ]  # fmt: skip
    assert {(row["Who"].text, row["To"].text) for row in rows} == {("anonymous", "Orders")}
    buried = rows[4]["Detail"].text
    assert "job-2" in buried
    assert "out of stock" in buried


def test_tasks_are_listed_with_what_they_did(app: lowq.Lowq, client: TestClient) -> None:
    reader = Reader(client)
    assert "Nothing has run" in reader.page("/tasks").text
    hand, now = Hand(app, "Orders", 3), time.time()
    for n in range(7):
        hand.push(f"old-{n}", now + 1000)
        hand.push(f"new-{n}", now + 1000)
    hand.queue.bury([f"new-{n}" for n in range(5)])
    forms = [
        {"do": "delete all", "match": "old-*", "state": "scheduled"},
        {"do": "kick all", "state": "morgue"},
    ]
    for form in forms:
        address = act(client, "/queues/Orders/act", **form).headers["location"]
        until(lambda at=address: any("done" in line.text for line in reader.page(at).every("p")), "end of the task")  # type: ignore[misc]
    rows = reader.page("/tasks").table("Began", "Does", "Queue")
    assert [(row["Who"].text, row["Does"].text, row["Queue"].text, row["State"].text) for row in rows] == [
        ("anonymous", "kick", "Orders", "done"), ("anonymous", "delete", "Orders", "done"),
    ]  # fmt: skip
    assert [row["Done"].text for row in rows] == ["5 of 5", "7 of 7"]
    page = reader.page(rows[1]["Began"].link)
    assert re.fullmatch("Delete .*scheduled.*", page.find("h1").text)
    assert "7 of 7 jobs deleted" in page.text
    assert "old-*" in [fact.text for fact in page.facts.values()]
    assert page.facts["Started by"].text == "anonymous"
