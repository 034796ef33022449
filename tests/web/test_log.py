"""Every action is in the log of what people did, whatever became of it; and what it says is what was done."""

import json
import logging
import threading
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlencode

import pytest
from starlette.testclient import TestClient

import lowq
from lowq.admin import audit
from lowq.store import Client
from lowq.store.keys import shard_prefix
from tests.waiting import PATIENCE, until
from tests.web.confirming import form_on


@pytest.fixture
def queue(app: lowq.Lowq) -> lowq.Queue:
    queue = app.queue("Orders", 50)
    queue.push({"id": number, "delay": 500} for number in range(100))
    return queue


Break = Callable[..., None]


@pytest.fixture
def redis_goes(monkeypatch: pytest.MonkeyPatch) -> Break:
    """Makes Redis answer so many more calls of some scripts, and then none of them."""

    def after(count: int, *scripts: str) -> None:
        left = {"calls": count}
        run_many = Client.run_many  # `run` goes through it, too

        def answers(script: str) -> bool:
            if script not in scripts:
                return True
            left["calls"] -= 1
            return left["calls"] >= 0

        def many(self: Client, calls: Any, **options: Any) -> Any:
            if not all(answers(call.script) for call in calls):
                return [lowq.RedisUnavailable("Redis does not answer") for _ in calls]
            return run_many(self, calls, **options)

        monkeypatch.setattr(Client, "run_many", many)

    return after


def act(client: TestClient, **document: Any) -> Any:
    return client.post("/api/v1/queues/Orders/actions", json=document)


def ended(client: TestClient, task: str) -> dict[str, Any]:
    def document() -> dict[str, Any]:
        found: dict[str, Any] = client.get(f"/api/v1/tasks/{task}").json()
        return {} if found["state"] == "running" else found

    return until(document, "end of the task")


def test_an_action_that_fails_half_way_says_how_far_it_came(
    client: TestClient, app: lowq.Lowq, queue: lowq.Queue, redis_goes: Break
) -> None:
    redis_goes(10, "delete")
    answer = act(client, action="delete", ids=[str(number) for number in range(100)])
    assert answer.status_code == 503
    gone = 100 - queue.stats().length
    assert 0 < gone < 100
    (entry,) = app.audit()
    assert (entry.who, entry.action, entry.target, entry.count) == ("anonymous", "delete", "Orders", gone)
    assert (entry.detail["outcome"], entry.detail["named"]) == ("failed", 100)
    assert "does not answer" in entry.detail["error"]


@pytest.mark.parametrize("path", ["actions", "pause"])
def test_what_is_begun_stays_in_the_log_when_nobody_comes_to_say_how_it_ended(
    client: TestClient, app: lowq.Lowq, queue: lowq.Queue, redis_goes: Break, path: str
) -> None:
    redis_goes(1, "audit_append")
    redis_goes(10, "delete", "pause")
    document = {} if path == "pause" else {"action": "delete", "ids": ["1", "2", "3"]}
    answer = client.post(f"/api/v1/queues/Orders/{path}", json=document)
    assert answer.status_code == (503 if path == "pause" else 200)
    (entry,) = app.audit()
    assert (entry.action, entry.detail["outcome"]) == ("pause" if path == "pause" else "delete", "started")


def test_a_reason_may_be_of_any_bytes(client: TestClient, app: lowq.Lowq, queue: lowq.Queue) -> None:
    asked = client.post("/queues/Orders/act", data={"do": "bury", "id": "1"})
    fields = [(name, value) for name, value in form_on(asked.text) if name != "reason"]
    answer = client.post(
        "/queues/Orders/act",
        content=urlencode(fields).encode() + b"&reason=caf%e9+%00",
        headers={"content-type": "application/x-www-form-urlencoded"},
    )
    assert answer.status_code == 303
    found = queue.peek("1")
    assert found is not None
    assert (found.state, found.error) == ("morgue", "caf\\udce9 \x00")
    (entry,) = app.audit()
    assert (entry.count, "outcome" in entry.detail) == (1, False)


@pytest.mark.parametrize("wanted", [{"ids": ["1"]}, {"all": {}}])
def test_an_action_that_a_fault_ends_has_failed(
    client: TestClient, app: lowq.Lowq, queue: lowq.Queue, monkeypatch: pytest.MonkeyPatch, wanted: dict[str, Any]
) -> None:
    def fault(*_: object) -> None:
        raise OddError

    monkeypatch.setattr("lowq.queue.act" if "ids" in wanted else "lowq.admin.bulk.act", fault)
    answer = act(client, action="delete", **wanted)
    assert answer.status_code == (500 if "ids" in wanted else 202)
    if "all" in wanted:
        assert ended(client, answer.json()["id"])["state"] == "failed"
    (entry,) = app.audit()
    assert entry.detail["outcome"] == "failed"
    assert "OddError" in entry.detail["error"]


class OddError(Exception):
    def __repr__(self) -> str:
        raise RuntimeError("the session of this row is closed")


def test_a_log_that_fails_keeps_nobody_from_acting(
    client: TestClient, app: lowq.Lowq, queue: lowq.Queue
) -> None:  # fmt: skip
    def chat_is_down(_: logging.LogRecord) -> bool:
        raise ConnectionError

    audit_log = logging.getLogger("lowq_web.audit")
    level = audit_log.level
    audit_log.addFilter(chat_is_down)
    audit_log.setLevel("INFO")
    try:
        assert act(client, action="delete", ids=["1"]).status_code == 200
    finally:
        audit_log.removeFilter(chat_is_down)
        audit_log.setLevel(level)
    (entry,) = app.audit()
    assert (entry.count, "outcome" in entry.detail) == (1, False)


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


def test_ids_that_make_no_sense_stop_an_action_before_it_begins(
    client: TestClient, app: lowq.Lowq, queue: lowq.Queue
) -> None:
    assert act(client, action="delete", ids=["1", "ä" * 400]).status_code == 400
    assert queue.stats().length == 100
    assert app.audit() == []


def test_what_was_left_alone_is_logged(client: TestClient, app: lowq.Lowq, queue: lowq.Queue) -> None:
    act(client, action="delete", ids=["1", "2", "nope"])
    (entry,) = app.audit()
    assert (entry.count, entry.detail) == (2, {"ids": ["1", "2", "nope"], "named": 3, "missing": 1})


def test_a_bulk_action_is_one_line_that_ends_as_it_did(client: TestClient, app: lowq.Lowq, queue: lowq.Queue) -> None:
    task = act(client, action="bury", all={"match": "1*"}, reason="spoilt").json()["id"]
    assert ended(client, task)["state"] == "done"
    (entry,) = app.audit()
    assert (entry.action, entry.count) == ("bury", 11)
    assert entry.detail == {"match": "1*", "reason": "spoilt", "task": task, "outcome": "done"}


def test_a_bulk_action_that_fails_says_why(
    client: TestClient, app: lowq.Lowq, queue: lowq.Queue, redis_goes: Break
) -> None:
    redis_goes(10, "delete")
    task = act(client, action="delete", all={}).json()["id"]
    found = ended(client, task)
    assert (found["state"], found["ended_at"] is None) == ("failed", False)
    (entry,) = app.audit()
    assert entry.count == found["done"] == 100 - queue.stats().length
    assert (entry.detail["outcome"], entry.detail["error"]) == ("failed", found["error"])


def test_what_changed_nothing_says_so(client: TestClient, app: lowq.Lowq, queue: lowq.Queue) -> None:
    for path in ("pause", "pause", "resume", "resume"):
        assert client.post(f"/api/v1/queues/Orders/{path}", json={}).status_code == 200
    assert [(entry.action, entry.detail) for entry in reversed(app.audit())] == [
        ("pause", {}),
        ("pause", {"changed": False}),
        ("resume", {}),
        ("resume", {"changed": False}),
    ]


def test_cancelling_what_has_ended_is_no_action(client: TestClient, app: lowq.Lowq, queue: lowq.Queue) -> None:
    task = act(client, action="delete", all={}).json()["id"]
    ended(client, task)
    answer = client.post(f"/api/v1/tasks/{task}/cancel", json={})
    assert answer.json()["state"] == "done"
    assert [entry.action for entry in app.audit()] == ["delete"]


def test_a_task_that_finds_nothing_can_be_cancelled(
    client: TestClient, app: lowq.Lowq, monkeypatch: pytest.MonkeyPatch
) -> None:
    app.queue("Orders", 1)
    app.register("Orders", 1)
    pairs = [part for number in range(20_000) for part in (2e9 + number, f"job-{number}")]
    app.client.command("ZADD", shard_prefix("lowq", "Orders", 0) + "due", *pairs)
    run_many, cancelled = Client.run_many, threading.Event()

    def waits(self: Client, calls: Any, **options: Any) -> Any:
        if any(call.script == "scan" for call in calls):
            assert cancelled.wait(PATIENCE)  # a million ids take as long
        return run_many(self, calls, **options)

    monkeypatch.setattr(Client, "run_many", waits)
    task = act(client, action="delete", all={"match": "zzz*"}).json()["id"]
    assert client.get(f"/api/v1/tasks/{task}").json()["total"] is None
    client.post(f"/api/v1/tasks/{task}/cancel", json={})
    cancelled.set()
    assert ended(client, task)["state"] == "cancelled"


def said(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    records = [record for record in caplog.records if record.name == "lowq_web.audit"]
    assert {record.levelname for record in records} <= {"INFO"}
    assert all(record.getMessage().isascii() and record.getMessage().isprintable() for record in records)
    return [json.loads(record.getMessage()) for record in records]


def test_what_rolls_out_of_the_log_was_said_to_logging(
    client: TestClient, app: lowq.Lowq, queue: lowq.Queue, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    caplog.set_level("INFO", "lowq_web.audit")
    monkeypatch.setattr(audit, "KEPT", 3)
    act(client, action="delete", ids=["1", "2", "gone\u202e\n"])
    for _ in range(4):
        client.post("/api/v1/queues/Orders/resume")
    assert "delete" not in {entry.action for entry in app.audit(1000)}
    begun, done, *rest = said(caplog)
    ids = {"ids": ["1", "2", "gone\u202e\n"], "named": 3}
    entry = {"who": "anonymous", "action": "delete", "target": "Orders", "address": "testclient"}
    assert begun == entry | {"count": None, "detail": ids | {"outcome": "started"}}
    assert done == entry | {"count": 2, "detail": ids | {"missing": 1}}
    assert [item["detail"] for item in rest] == [{"outcome": "started"}, {"changed": False}] * 4


def test_all_that_people_do_is_said_to_logging(
    client: TestClient, app: lowq.Lowq, queue: lowq.Queue, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "lowq_web.audit")
    app.client.command("HSET", "lowq:v1:nodes", "a", f"{time.time()} 60 0 {{}}")
    task = act(client, action="delete", all={"match": "4*"}).json()
    ended(client, task["id"])
    client.post("/api/v1/queues/Orders/pause")
    client.post("/api/v1/nodes/command", json={"node": "a", "do": "quiet"})
    logged = [
        (entry["action"], entry["target"], entry["count"], entry["detail"].get("outcome")) for entry in said(caplog)
    ]
    assert logged == [
        ("delete", "Orders", None, "started"), ("delete", "Orders", 11, "done"),
        ("pause", "Orders", None, "started"), ("pause", "Orders", None, None), ("quiet", "a", None, None),
    ]  # fmt: skip


def test_what_could_not_be_written_was_said_all_the_same(
    client: TestClient, queue: lowq.Queue, caplog: pytest.LogCaptureFixture, redis_goes: Break
) -> None:
    caplog.set_level("INFO", "lowq_web.audit")
    redis_goes(1, "audit_append")
    assert act(client, action="delete", ids=["1"]).json()["done"] == 1
    assert [entry["count"] for entry in said(caplog)] == [None, 1]
    # Nothing is done without an entry: so there is nothing to say.
    assert act(client, action="delete", ids=["2"]).status_code == 503
    assert len(said(caplog)) == 2
