"""Every action is in the log of what people did, whatever became of it; and what it says is what was done."""

import json
import threading
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any

import pytest
from starlette.testclient import TestClient

import lowq
import lowq_web
from lowq import admin
from lowq.operate import audit
from lowq.store import Client
from tests.rows import case
from tests.rules.web.confirming import ended
from tests.rules.web.conftest import OWN, Open, dashboard
from tests.rules.web.shown import Reader
from tests.waiting import PATIENCE


def filled(app: lowq.Lowq) -> lowq.Queue:
    queue = app.queue("Orders", 50)
    queue.push({"id": number, "delay": 500} for number in range(100))
    return queue


@pytest.fixture
def queue(app: lowq.Lowq) -> lowq.Queue:
    return filled(app)


Break = Callable[..., None]


@pytest.fixture
def redis_goes(monkeypatch: pytest.MonkeyPatch) -> Break:
    """Makes Redis answer so many more calls of some scripts together, and then none of them."""
    left: dict[str, list[int]] = {}
    run_many = Client.run_many  # `run` goes through it, too

    def after(count: int, *scripts: str) -> None:
        shared = [count]
        left.update(dict.fromkeys(scripts, shared))

    def answers(script: str) -> bool:
        count = left.get(script, [1])
        count[0] -= 1
        return count[0] >= 0

    def many(self: Client, calls: Any, **options: Any) -> Any:
        if not all(answers(call.script) for call in calls):
            return [lowq.RedisUnavailable("Redis does not answer") for _ in calls]
        return run_many(self, calls, **options)

    monkeypatch.setattr(Client, "run_many", many)
    return after


def act(client: TestClient, **document: Any) -> Any:
    return client.post("/api/v1/queues/Orders/actions", json=document)


def only(app: lowq.Lowq) -> admin.AuditEntry:
    (entry,) = app.audit()
    return entry


def test_an_action_that_fails_half_way_says_how_far_it_came_and_why(redis_goes: Break) -> None:
    documents: list[dict[str, Any]] = [{"ids": [str(number) for number in range(100)]}, {"all": {}}]
    for document in documents:
        with case(document), dashboard() as (app, client):
            queue = filled(app)
            redis_goes(10, "delete")
            answer = act(client, action="delete", **document)
            if "all" in document:
                found = ended(client, answer.json()["id"])
                assert (found["done"], found["error"]) == (only(app).count, only(app).detail["error"])
            else:
                assert (answer.status_code, only(app).detail["named"]) == (503, 100)
            redis_goes(1000, "delete")
            gone = 100 - queue.stats().length
            assert 0 < gone < 100
            entry = only(app)
            assert (entry.who, entry.action, entry.target, entry.count) == ("anonymous", "delete", "Orders", gone)
            assert (entry.detail["outcome"], "does not answer" in entry.detail["error"]) == ("failed", True)


def test_what_is_begun_stays_in_the_log_when_nobody_comes_to_say_how_it_ended(
    redis_goes: Break, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "lowq_web.audit")
    rows: list[tuple[str, dict[str, Any], str, int]] = [
        ("pause", {}, "pause", 503), ("actions", {"action": "delete", "ids": ["1", "2", "3"]}, "delete", 200),
    ]  # fmt: skip
    for path, document, action, status in rows:
        with case(path), dashboard() as (app, client):
            filled(app)
            redis_goes(1, "audit_append")
            redis_goes(10, "delete", "pause")
            assert client.post(f"/api/v1/queues/Orders/{path}", json=document).status_code == status
            assert (only(app).action, only(app).detail["outcome"]) == (action, "started")
            assert ("outcome" in said(caplog)[-1]["detail"]) is (status == 503), "logging was told all the same"


def test_an_action_that_a_fault_ends_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    class OddError(Exception):
        def __repr__(self) -> str:
            raise RuntimeError("the session of this row is closed")

    def fault(*_: object) -> None:
        raise OddError("hunter2")

    rows: list[tuple[dict[str, Any], int]] = [({"ids": ["1"]}, 500), ({"all": {}}, 202)]
    for wanted, status in rows:
        with case(wanted), dashboard() as (app, client), monkeypatch.context() as patch:
            filled(app)
            patch.setattr("lowq.operate.actions.act", fault)
            answer = act(client, action="delete", **wanted)
            assert answer.status_code == status
            if "all" in wanted:
                assert ended(client, answer.json()["id"])["state"] == "failed"
            assert (only(app).detail["outcome"], "OddError" in only(app).detail["error"]) == ("failed", True)
            assert "hunter2" not in only(app).detail["error"]


def test_nothing_is_done_that_can_not_be_written_down(
    client: TestClient, app: lowq.Lowq, queue: lowq.Queue, redis_goes: Break
) -> None:
    redis_goes(0, "audit_append")
    assert act(client, action="delete", ids=["1"]).status_code == 503
    assert act(client, action="delete", all={}).status_code == 503
    assert client.post("/api/v1/queues/Orders/pause", json={}).status_code == 503
    stats = queue.stats()
    assert (stats.length, stats.paused) == (100, False)
    assert client.get("/api/v1/tasks").json() == {"tasks": []}


def test_what_was_left_alone_is_logged_and_a_bulk_action_is_one_line_that_ends_as_it_did(
    client: TestClient, app: lowq.Lowq, queue: lowq.Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lowq_web.journal.audit_log", None)  # as broken as a handler of the application may be
    act(client, action="delete", ids=["1", "2", "nope"])
    assert (only(app).count, only(app).detail) == (2, {"ids": ["1", "2", "nope"], "named": 3, "missing": 1})
    task = act(client, action="bury", all={"match": "1*"}, reason="spoilt").json()["id"]
    ended(client, task)
    answer = client.post(f"/api/v1/tasks/{task}/cancel", json={})
    assert answer.json()["state"] == "done", "to cancel what has ended is no action"
    entry, _ = app.audit()
    assert (entry.action, entry.count) == ("bury", 10)
    assert entry.detail == {"match": "1*", "reason": "spoilt", "task": task, "outcome": "done"}


def test_a_task_that_finds_nothing_can_be_cancelled(
    client: TestClient, app: lowq.Lowq, monkeypatch: pytest.MonkeyPatch
) -> None:
    app.queue("Orders", 1).push({"id": f"job-{number}", "delay": 60} for number in range(20_000))
    run_many, cancelled = Client.run_many, threading.Event()

    def waits(self: Client, calls: Any, **options: Any) -> Any:
        if any(call.script == "scan" for call in calls):
            assert cancelled.wait(PATIENCE)  # a million ids take as long
        return run_many(self, calls, **options)

    monkeypatch.setattr(Client, "run_many", waits)
    task = act(client, action="delete", all={"match": "zzz*"}).json()["id"]
    client.post(f"/api/v1/tasks/{task}/cancel", json={})
    cancelled.set()
    assert ended(client, task)["state"] == "cancelled"


def said(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    records = [record for record in caplog.records if record.name == "lowq_web.audit"]
    assert all(record.getMessage().isascii() and record.getMessage().isprintable() for record in records)
    return [json.loads(record.getMessage()) for record in records]


def test_what_rolls_out_of_the_log_was_said_to_logging(
    client: TestClient, app: lowq.Lowq, queue: lowq.Queue, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    caplog.set_level("INFO", "lowq_web.audit")
    monkeypatch.setattr(audit, "KEPT", 3)
    act(client, action="delete", ids=["1", "2", "gone\u202e\n"])
    verbs = ["pause", "pause", "resume", "resume"]
    for verb in verbs:
        assert client.post(f"/api/v1/queues/Orders/{verb}", json={}).status_code == 200
    assert "delete" not in {entry.action for entry in app.audit(1000)}
    begun, done, *rest = said(caplog)
    ids = {"ids": ["1", "2", "gone\u202e\n"], "named": 3}
    entry = {"who": "anonymous", "action": "delete", "target": "Orders", "address": "testclient"}
    assert begun == entry | {"count": None, "detail": ids | {"outcome": "started"}}
    assert done == entry | {"count": 2, "detail": ids | {"missing": 1}}
    ends = [(item["action"], item["detail"]) for item in rest if "outcome" not in item["detail"]]
    again = {"changed": False, "paused_by": "anonymous"}
    assert ends == list(zip(verbs, [{}, again, {}, {"changed": False}], strict=True))


def test_entries_are_shown_newest_first_and_lead_to_what_was_acted_on(app: lowq.Lowq, browse: Open) -> None:
    began = time.time()
    app.registrations.enter("Orders", 1)
    app.note("ann", "kick", "Orders", 1234, {"state": "morgue", "match": "39*", "min": -5})
    app.note("carol", "perform_now", "Orders", 0, {"ids": ["a/b", "x" * 400], "named": 2})
    app.note("ann", "delete", "Orders", 1, {"task": "T1"})
    app.note("ann", "stop", "host:1:ab")
    app.note("ann", "repair", "Orders, Mails")
    client = browse()
    rows = Reader(client).page("/audit").table("When", "Who", "Did", "To", "Jobs", "Detail")
    repair, stop, delete, run, kick = rows
    assert [row["Did"].text for row in rows] == ["repair", "stop", "delete", "run now", "retry now"]
    shown = tuple(kick[word].text for word in ("Who", "To", "Jobs", "Detail"))
    assert shown == ("ann", "Orders", "1,234", "state morgue match 39* min -5")
    assert began - 0.01 <= datetime.fromisoformat(kick["When"].moment).timestamp() <= time.time()
    assert client.get(kick["To"].link).status_code == 200
    links = [link.link for link in run["Detail"].every("a")]
    assert links == ["/queues/Orders/job?id=a%2Fb"]  # the other id was cut
    assert delete["Detail"].link == "/tasks/T1"
    assert stop["To"].link.startswith("/nodes#node-")
    assert not list(repair["To"].every("a"))


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
    app.registrations.enter("Orders", 1)
    application = browse(trusted_proxies=["10.0.0.9"], no_auth=True).app
    headers = {**OWN, "x-forwarded-for": "6.6.6.6, 198.51.100.1"}
    for address, verb in (("10.0.0.9", "pause"), ("192.0.2.1", "resume")):
        one = TestClient(application, base_url="http://127.0.0.1", client=(address, 5), follow_redirects=False)
        assert one.post(f"/queues/Orders/{verb}", headers=headers).status_code == 303
    client = TestClient(application, base_url="http://127.0.0.1")
    rows = Reader(client).page("/audit").table("Address", "Did")
    shown = [(row["Did"].text, row["Address"].text) for row in rows]
    assert shown == [("resume", "192.0.2.1"), ("pause", "198.51.100.1")]
    (entry,) = client.get("/api/v1/audit?action=pause&since=1.5e9").json()["audit"]
    assert (entry["address"], entry["target"]) == ("198.51.100.1", "Orders")
    assert client.get(f"/api/v1/audit?after={entry['cursor']}").json()["audit"] == []
    assert client.get("/api/v1/audit?since=yesterday").status_code == 400


def test_who_paused_when_and_why_is_on_the_page_of_the_queue_and_in_the_log(app: lowq.Lowq, browse: Open) -> None:
    app.registrations.enter("Orders", 1)
    name = ["ann"]
    client = browse(auth=lambda _request: lowq_web.User(name[0]))
    client.headers.update(OWN)
    reader = Reader(client)
    assert client.post("/queues/Orders/pause", data={"reason": "<b>deploy</b> of mails"}).status_code == 303
    name[0] = "bob"
    again = client.post("/queues/Orders/pause", data={"reason": "mine"})
    assert "It was paused already." in client.get(again.headers["location"]).text
    shown = reader.page("/queues/Orders").find("main").text
    assert "by ann" in shown
    assert ": <b>deploy</b> of mails" in shown
    first, second = client.get("/api/v1/audit").json()["audit"][::-1]
    assert (first["who"], first["detail"]) == ("ann", {"reason": "<b>deploy</b> of mails"})
    assert (second["who"], second["detail"]) == ("bob", {"reason": "mine", "changed": False, "paused_by": "ann"})
    rows = [row["Detail"].text for row in reader.page("/audit").table("Who", "Detail")]
    assert "changed nothing" in rows[0]
    assert "paused by ann" in rows[0]
    assert "changed" not in rows[1]
    assert client.post("/queues/Orders/resume").status_code == 303
    assert "by ann" not in reader.page("/queues/Orders").find("main").text
    app.queue("Orders").pause()  # by a program, which says nothing
    assert "Paused" in reader.page("/queues/Orders").find("main").text
    assert client.post("/api/v1/queues/Orders/resume", json={}).status_code == 200
    assert client.post("/api/v1/queues/Orders/pause", json={"reason": "by the API"}).json()["changed"]
    assert "by the API" in reader.page("/queues/Orders").find("main").text
