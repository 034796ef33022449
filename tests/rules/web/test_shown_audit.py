"""The audit log and the list of tasks: who did what, to how many, and when."""

import re
import time
from datetime import datetime

from starlette.testclient import TestClient

import lowq
from tests.rules.web.confirming import act
from tests.rules.web.conftest import OWN, Open
from tests.rules.web.hand import Hand
from tests.rules.web.shown import Reader, Row
from tests.waiting import until


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
        ("carol", "run now", "Orders", "0", "ids a-1, a-2 more 7"),
        ("bob", "pause", "Refunds", "", ""),
        ("ann", "retry now", "Orders", "1,234", "state morgue match 39* min -5"),
    ]
    for row in rows:
        assert began - 0.01 <= datetime.fromisoformat(row["When"].moment).timestamp() <= time.time()
        assert row["When"].text == "now" or row["When"].text.endswith("ago")


def test_tasks_are_listed_with_what_they_did(app: lowq.Lowq, client: TestClient, reader: Reader) -> None:
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
        ("anonymous", "retry now", "Orders", "done"), ("anonymous", "delete", "Orders", "done"),
    ]  # fmt: skip
    assert [row["Done"].text for row in rows] == ["5 of 5", "7 of 7"]
    page = reader.page(rows[1]["Began"].link)
    assert re.fullmatch("Delete .*scheduled.*", page.find("h1").text)
    assert "7 of 7 jobs deleted" in page.text
    assert "old-*" in [fact.text for fact in page.facts.values()]
    assert page.facts["Started by"].text == "anonymous"


def test_entries_lead_to_what_was_acted_on(app: lowq.Lowq, browse: Open) -> None:
    app.note("ann", "kick", "Orders", 1, {"ids": ["a/b", "x" * 400], "named": 2})
    app.note("ann", "delete", "Orders", 1, {"task": "T1"})
    app.note("ann", "stop", "host:1:ab")
    app.note("ann", "repair", "Orders, Mails")
    app.register("Orders", 1)
    client = browse()
    repair, stop, delete, kick = Reader(client).page("/audit").table("When", "To", "Detail")
    assert kick["To"].link == "/queues/Orders"
    links = [link.link for link in kick["Detail"].every("a")]
    assert links == ["/queues/Orders/job?id=a%2Fb"]  # the other id was cut
    assert delete["Detail"].link == "/tasks/T1"
    assert stop["To"].link.startswith("/nodes#node-")
    assert not list(repair["To"].every("a"))
    assert client.get(kick["To"].link).status_code == 200


def test_entries_are_filtered_and_come_page_by_page(app: lowq.Lowq, browse: Open) -> None:
    for number in range(130):
        app.note("ann", "kick" if number % 2 else "bury", "Orders", number)
    app.note("bob", "pause", "Mails")
    reader = Reader(browse())
    assert len(reader.rows("/audit", "Who", "Jobs")) == 131
    rows = reader.rows("/audit?who=ANN&action=kick&target=Orders&since=-1h", "Who", "Jobs")
    assert [row["Jobs"].number for row in rows] == list(range(129, 0, -2))
    page = reader.page("/audit?who=bob&until=-1h")
    assert not list(page.find("main").every("table"))
    assert next(page.find("form", has="Who").every("input")).attributes["value"] == "bob"
    for query in ("since=soon", "until=1e400", "after=x"):
        reader.page(f"/audit?{query}", 400)


def test_who_acts_is_shown_with_the_address_behind_the_proxy(app: lowq.Lowq, browse: Open) -> None:
    app.register("Orders", 1)
    application = browse(trusted_proxies=["10.0.0.9"], no_auth=True).app
    client = TestClient(application, base_url="http://127.0.0.1", client=("10.0.0.9", 5), follow_redirects=False)
    headers = {**OWN, "x-forwarded-for": "6.6.6.6, 198.51.100.1"}
    assert client.post("/queues/Orders/pause", headers=headers).status_code == 303
    other = TestClient(application, base_url="http://127.0.0.1", client=("192.0.2.1", 5), follow_redirects=False)
    assert other.post("/queues/Orders/resume", headers=headers).status_code == 303
    rows = Reader(client).page("/audit").table("Address", "Did")
    assert [(row["Did"].text, row["Address"].text) for row in rows] == [
        ("resume", "192.0.2.1"), ("pause", "198.51.100.1")
    ]  # fmt: skip
    (entry,) = client.get("/api/v1/audit?action=pause&since=1.5e9").json()["audit"]
    assert (entry["address"], entry["target"]) == ("198.51.100.1", "Orders")
    assert client.get(f"/api/v1/audit?after={entry['cursor']}").json()["audit"] == []
    assert client.get("/api/v1/audit?since=yesterday").status_code == 400
