"""Every action is in the log of what people did, whatever became of it; and what it says is what was done."""

import json
import logging
import threading
from collections.abc import Callable
from typing import Any
from urllib.parse import urlencode

import pytest
from starlette.testclient import TestClient

import lowq
from lowq.admin import audit
from lowq.store import Client
from lowq.store.keys import shard_prefix
from tests.rows import case
from tests.rules.web.confirming import form_on
from tests.rules.web.conftest import dashboard
from tests.waiting import PATIENCE, until


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


def ended(client: TestClient, task: str) -> dict[str, Any]:
    def document() -> dict[str, Any]:
        found: dict[str, Any] = client.get(f"/api/v1/tasks/{task}").json()
        return {} if found["state"] == "running" else found

    return until(document, "end of the task")


def only(app: lowq.Lowq) -> lowq.AuditEntry:
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
                assert (found["state"], found["ended_at"] is None) == ("failed", False)
                assert (only(app).count, only(app).detail["error"]) == (found["done"], found["error"])
            else:
                assert (answer.status_code, only(app).detail["named"]) == (503, 100)
            redis_goes(1000, "delete")
            gone = 100 - queue.stats().length
            assert 0 < gone < 100
            entry = only(app)
            assert (entry.who, entry.action, entry.target, entry.count) == ("anonymous", "delete", "Orders", gone)
            assert (entry.detail["outcome"], "does not answer" in entry.detail["error"]) == ("failed", True)


def test_what_is_begun_stays_in_the_log_when_nobody_comes_to_say_how_it_ended(redis_goes: Break) -> None:
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


def test_an_action_that_a_fault_ends_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fault(*_: object) -> None:
        raise OddError

    rows: list[tuple[str, dict[str, Any], int]] = [
        ("lowq.queue.act", {"ids": ["1"]}, 500), ("lowq.admin.bulk.act", {"all": {}}, 202),
    ]  # fmt: skip
    for where, wanted, status in rows:
        with case(where), dashboard() as (app, client), monkeypatch.context() as patch:
            filled(app)
            patch.setattr(where, fault)
            answer = act(client, action="delete", **wanted)
            assert answer.status_code == status
            if "all" in wanted:
                assert ended(client, answer.json()["id"])["state"] == "failed"
            assert (only(app).detail["outcome"], "OddError" in only(app).detail["error"]) == ("failed", True)


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


def test_what_was_left_alone_is_logged_and_a_bulk_action_is_one_line_that_ends_as_it_did(
    client: TestClient, app: lowq.Lowq, queue: lowq.Queue
) -> None:
    act(client, action="delete", ids=["1", "2", "nope"])
    assert (only(app).count, only(app).detail) == (2, {"ids": ["1", "2", "nope"], "named": 3, "missing": 1})
    task = act(client, action="bury", all={"match": "1*"}, reason="spoilt").json()["id"]
    ended(client, task)
    answer = client.post(f"/api/v1/tasks/{task}/cancel", json={})
    assert answer.json()["state"] == "done", "to cancel what has ended is no action"
    entry, _ = app.audit()
    assert (entry.action, entry.count) == ("bury", 10)
    assert entry.detail == {"match": "1*", "reason": "spoilt", "task": task, "outcome": "done"}


def test_what_changed_nothing_says_so(client: TestClient, app: lowq.Lowq, queue: lowq.Queue) -> None:
    verbs = ["pause", "pause", "resume", "resume"]
    for verb in verbs:
        assert client.post(f"/api/v1/queues/Orders/{verb}", json={}).status_code == 200
    logged = [(entry.action, entry.detail) for entry in reversed(app.audit())]
    assert logged == list(zip(verbs, [{}, {"changed": False}] * 2, strict=True))


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
