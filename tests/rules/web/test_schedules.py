"""Schedules on the dashboard and in the API: shown, run now, paused, resumed, and in the audit log."""

import json
import time
from typing import Any

import pytest
from starlette.testclient import TestClient

import lowq
from lowq.node.schedules import take_turn
from lowq.schedules import Schedule
from lowq.store.keys import nodes_key
from lowq.workers import Worker
from tests.rules.support import run_script
from tests.rules.web.shown import parse

API = "/api/v1/schedules"


@pytest.fixture
def worker(app: lowq.Lowq) -> type[Worker[Any]]:
    """A worker with a schedule that a node knows, and one that nobody knows."""

    @app.worker(queue_name="Report", shards_count=2)
    def report(job_id: str, payloads: list[Any]) -> None: ...

    app.registrations.enter("Report", 2, report)
    app.registrations.enter("lowq:schedules:Report", 1)
    weekly, former = Schedule("weekly", "0 8 * * 1", "Europe/Berlin"), Schedule("<former>", 2.5, missed="skip")
    details = json.dumps({"schedules": {"Report": {"weekly": weekly.shown()}}})
    run_script(app.client, "heartbeat", nodes_key("lowq"), "", "host:1:a", "", details, 60)
    for schedule in weekly, former:
        take_turn(app, report.queue, schedule.name, lambda: {weekly.name: weekly, former.name: former})
    return report


def planned(worker: type[Worker[Any]]) -> list[float]:
    found = worker.queue.peek("weekly")
    return [] if found is None else [payload["planned_at"] for payload, _ in found.payloads]


def test_page_and_api_show_when_each_comes(client: TestClient, worker: type[Worker[Any]]) -> None:
    text = client.get("/schedules").text
    for words in ("0 8 * * 1 Europe/Berlin", "every 2.5 s", "&lt;former&gt;"):
        assert words in text
    assert ("<former>" in text, text.count("no node knows it")) == (False, 1)
    former, weekly = client.get(API).json()["schedules"]
    assert (former["name"], former["at"], former["missed"], former["is_known"]) == ("<former>", 2.5, "skip", False)
    assert (weekly["name"], weekly["queue"], weekly["tz"]) == ("weekly", "Report", "Europe/Berlin")
    assert time.time() < weekly["next_at"] < time.time() + 8 * 86400
    for path in ("/", "/nodes", "/jobs", "/api/v1/queues", "/api/v1/stats", "/metrics"):
        assert "lowq:schedules" not in client.get(path).text, "internal queues are in no list"


def test_the_buttons_run_pause_and_resume(client: TestClient, worker: type[Worker[Any]], app: lowq.Lowq) -> None:
    def press(action: str) -> str:
        answer = client.post("/schedules/act", data={"queue": "Report", "name": "weekly", "do": action})
        assert answer.status_code == 303
        return client.get(answer.headers["location"]).text

    for action, paused in (("run", False), ("pause", True), ("pause", True), ("resume", False), ("resume", False)):
        assert "weekly" in parse(press(action)).of_role("status")
        assert (app.schedule("weekly").paused_at is not None) is paused
    assert len(planned(worker)) == 1
    actions = [(entry.action, entry.target, entry.detail["schedule"]) for entry in reversed(app.audit())]
    assert actions == [
        (f"{action}_schedule", "Report", "weekly") for action in ("run", "pause", "pause", "resume", "resume")
    ]
    assert client.post("/schedules/act", data={"queue": "Report", "name": "weekly", "do": "drop"}).status_code == 400


def test_the_api_runs_pauses_and_resumes(client: TestClient, worker: type[Worker[Any]]) -> None:
    given = {"name": "weekly", "queue": "Report"}
    assert [client.post(f"{API}/run-now", json=given).json()["planned_at"]] == planned(worker)
    for verb, paused, changed in (("pause", True, True), ("resume", False, True), ("resume", False, False)):
        assert client.post(f"{API}/{verb}", json=given).json() == {"paused": paused, "changed": changed}


def test_a_schedule_that_there_is_not_is_404(client: TestClient, worker: type[Worker[Any]]) -> None:
    for verb in ("run-now", "pause", "resume"):
        answer = client.post(f"{API}/{verb}", json={"name": "dayly"})
        error = "there is no schedule 'dayly'; known are: '<former>', 'weekly'"
        assert (answer.status_code, answer.json()["error"]) == (404, error)
        assert client.post(f"{API}/{verb}", json={"name": ""}).status_code == 400
