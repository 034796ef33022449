"""Schedules on the dashboard and in the API: shown, run now, paused, resumed, and in the audit log."""

import json
import re
import time
from typing import Any

import pytest
from starlette.testclient import TestClient

import lowq
import lowq_web
from lowq.node.schedules import take_turn
from lowq.schedules import Schedule
from lowq.store.keys import nodes_key
from lowq.workers import Worker
from lowq_web.security import TOKEN
from tests.rules.web.conftest import Open
from tests.rules.web.shown import parse

API = "/api/v1/schedules"


@pytest.fixture
def worker(app: lowq.Lowq) -> type[Worker[Any]]:
    """A worker with a schedule that a node knows, and one that nobody knows."""

    @app.worker(queue_name="Report", shards_count=2)
    def report(job_id: str, payloads: list[Any]) -> None: ...

    app.register("Report", 2, report)
    app.register("lowq:schedules:Report", 1)
    weekly, former = Schedule("weekly", "0 8 * * 1", "Europe/Berlin"), Schedule("<former>", 2.5, missed="skip")
    details = json.dumps({"schedules": {"Report": {"weekly": weekly.shown()}}})
    app.client.run("heartbeat", nodes_key("lowq"), "", "host:1:a", "", details, 60)
    for schedule in weekly, former:
        take_turn(app, report.queue, schedule.name, lambda: {weekly.name: weekly, former.name: former})
    return report


def token_of(page: str) -> str:
    found = re.search(rf'name="{TOKEN}" value="([^"]+)"', page)
    assert found is not None
    return found[1]


def planned(worker: type[Worker[Any]], name: str = "weekly") -> list[float]:
    found = worker.queue.peek(name)
    return [] if found is None else [payload["planned_at"] for payload, _ in found.payloads]


def test_the_page_shows_when_each_comes(client: TestClient, worker: type[Worker[Any]]) -> None:
    text = client.get("/schedules").text
    assert "0 8 * * 1 Europe/Berlin" in text
    assert "every 2.5 s" in text
    assert "&lt;former&gt;" in text
    assert "<former>" not in text
    assert text.count("no node knows it") == 1
    assert parse(text) is not None


def test_the_api_says_the_same(client: TestClient, worker: type[Worker[Any]]) -> None:
    former, weekly = client.get(API).json()["schedules"]
    assert (former["name"], former["at"], former["missed"], former["is_known"]) == ("<former>", 2.5, "skip", False)
    assert (weekly["name"], weekly["queue"], weekly["at"], weekly["tz"]) == (
        "weekly", "Report", "0 8 * * 1", "Europe/Berlin",
    )  # fmt: skip
    assert time.time() < weekly["next_at"] < time.time() + 8 * 86400
    assert weekly["paused_at"] is weekly["last_at"] is None


def test_the_buttons_run_pause_and_resume(client: TestClient, worker: type[Worker[Any]], app: lowq.Lowq) -> None:
    def press(action: str) -> str:
        page = client.get("/schedules").text
        form = {"queue": "Report", "name": "weekly", "do": action, TOKEN: token_of(page)}
        answer = client.post("/schedules/act", data=form)
        assert answer.status_code == 303
        return client.get(answer.headers["location"]).text

    for action, paused in (("run", False), ("pause", True), ("pause", True), ("resume", False), ("resume", False)):
        assert "weekly" in parse(press(action)).of_role("status")
        assert (app.schedule("weekly").paused_at is not None) is paused
    assert len(planned(worker)) == 1
    assert [(entry.action, entry.target, entry.detail["schedule"], entry.count) for entry in app.audit()] == [
        ("resume_schedule", "Report", "weekly", None),
        ("resume_schedule", "Report", "weekly", None),
        ("pause_schedule", "Report", "weekly", None),
        ("pause_schedule", "Report", "weekly", None),
        ("run_schedule", "Report", "weekly", 1),
    ]


def test_the_api_runs_pauses_and_resumes(client: TestClient, worker: type[Worker[Any]], app: lowq.Lowq) -> None:
    ran = client.post(f"{API}/run-now", json={"name": "weekly"}).json()
    assert planned(worker) == [ran["planned_at"]]
    given = {"name": "weekly", "queue": "Report"}
    assert client.post(f"{API}/pause", json=given).json() == {"paused": True, "changed": True}
    assert app.schedule("weekly").paused_at is not None
    assert client.post(f"{API}/resume", json=given).json() == {"paused": False, "changed": True}
    assert client.post(f"{API}/resume", json=given).json() == {"paused": False, "changed": False}


@pytest.mark.parametrize("verb", ["run-now", "pause", "resume"])
def test_a_schedule_that_there_is_not_is_404(client: TestClient, worker: type[Worker[Any]], verb: str) -> None:
    answer = client.post(f"{API}/{verb}", json={"name": "dayly"})
    assert (answer.status_code, answer.json()["error"]) == (
        404, "there is no schedule 'dayly'; known are: '<former>', 'weekly'",
    )  # fmt: skip
    assert client.post(f"{API}/{verb}", json={"name": ""}).status_code == 400


def test_an_action_that_there_is_not_is_refused(client: TestClient, worker: type[Worker[Any]], app: lowq.Lowq) -> None:
    token = token_of(client.get("/schedules").text)
    answer = client.post("/schedules/act", data={"queue": "Report", "name": "weekly", "do": "drop", TOKEN: token})
    assert answer.status_code == 400
    assert app.audit() == []


def test_who_may_only_look_has_no_buttons(browse: Open, worker: type[Worker[Any]]) -> None:
    client = browse(auth=lambda _request: lowq_web.User("eve", "read"))
    client.headers.update({"sec-fetch-site": "same-origin"})
    text = client.get("/schedules").text
    assert "weekly" in text
    assert "Run now" not in text
    assert client.post(f"{API}/run-now", json={"name": "weekly"}).status_code == 403
    assert planned(worker) == []


def test_internal_queues_are_in_no_list(client: TestClient, worker: type[Worker[Any]]) -> None:
    for path in ("/", "/nodes", "/jobs", "/api/v1/queues", "/api/v1/stats", "/metrics"):
        assert "lowq:schedules" not in client.get(path).text, path
