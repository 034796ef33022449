"""Bulk actions in the background: seen and cancelled from any process of the dashboard, whatever becomes of theirs."""

import itertools
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from starlette.testclient import TestClient

import lowq
import lowq_web
from lowq import admin, inspection
from lowq.queue import Queue
from lowq.store import Call, Client
from lowq_web import background, stats_cache
from lowq_web.background import BackgroundActions
from lowq_web.journal import Actor
from lowq_web.stats_cache import StatsCache
from tests.redis_server import RedisServer
from tests.rows import case
from tests.rules.web.conftest import OWN
from tests.rules.web.shown import parse
from tests.waiting import NEVER, PATIENCE, until

#: Begins an action that never ends, says which task it is, and waits to be killed.
DYING = """
import itertools
import sys
import time

import lowq
import lowq_web
from lowq.admin import Step
from lowq.queue import Queue
from starlette.testclient import TestClient

Queue.bulk = lambda self, *args, **options: (time.sleep(0.05) or Step(n, 1000) for n in itertools.count())
app = lowq.Lowq(redis_url=sys.argv[1])
client = TestClient(lowq_web.create_app(app), base_url="http://127.0.0.1", headers={"sec-fetch-site": "same-origin"})
print(client.post("/api/v1/queues/Orders/actions", json={"action": "delete", "all": {}}).json()["id"], flush=True)
time.sleep(3600)
"""


class Steps:
    """An action of the test's own: one step whenever it says so."""

    def __init__(self) -> None:
        self._go = threading.Semaphore(0)
        self.ends = False

    def __call__(self, *_args: Any, **_options: Any) -> Iterator[admin.Step]:
        for done in itertools.count():
            assert self._go.acquire(timeout=PATIENCE)
            if self.ends:
                return
            yield admin.Step(done, 1000)

    def go(self, count: int = 1) -> None:
        self._go.release(count)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[Steps]:
    steps = Steps()
    monkeypatch.setattr(Queue, "bulk", steps)
    yield steps
    steps.ends = True
    steps.go(1000)
    no_threads()  # a task that is still ending would write into the log of the test after this one


def no_threads() -> None:
    until(lambda: not any(thread.name.startswith("lowq-task-") for thread in threading.enumerate()), "end of tasks")


def browser(url: str) -> TestClient:
    """A dashboard with an application of its own, as another process has it."""
    app = lowq.Lowq(redis_url=url)
    return TestClient(lowq_web.create_app(app), base_url="http://127.0.0.1", headers=OWN, follow_redirects=False)


@pytest.fixture
def pair() -> tuple[TestClient, TestClient]:
    """Two dashboards on one store."""
    url = f"memory://{uuid.uuid4().hex}"
    lowq.Lowq(redis_url=url).queue("Orders", 3).push({"id": n, "delay": 60} for n in range(20))
    return browser(url), browser(url)


def start(client: TestClient, **document: Any) -> str:
    answer = client.post("/api/v1/queues/Orders/actions", json={"action": "delete", "all": {}} | document)
    assert answer.status_code == 202, answer.text
    found: str = answer.json()["id"]
    return found


def seen(client: TestClient, task: str) -> dict[str, Any]:
    found: dict[str, Any] = client.get(f"/api/v1/tasks/{task}").json()
    return found


def in_state(client: TestClient, task: str, state: str) -> dict[str, Any]:
    found = until(lambda: found if (found := seen(client, task))["state"] == state else None, f"state {state}")
    assert found is not None
    return found


def test_all_dashboards_show_the_same(pair: tuple[TestClient, TestClient], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stats_cache, "INTERVAL", NEVER)
    one, other = pair
    assert one.get("/api/v1/stats").json()["total"]["length"] == 20
    task = start(one, all={"match": "1*", "state": "scheduled"}, action="bury", reason="spoilt")
    found = in_state(other, task, "done")
    assert found == seen(one, task)
    assert (found["done"], found["total"], found["reason"]) == (11, 11, "spoilt")
    assert found["filter"] == {"match": "1*", "state": "scheduled"}
    assert one.get("/api/v1/tasks").json() == other.get("/api/v1/tasks").json() == {"tasks": [found]}
    for path in ("/tasks", f"/tasks/{task}"):
        assert "11 of 11" in parse(other.get(path).text).text
    assert one.get("/api/v1/stats").json()["total"]["length"] == 9, "whoever sees the end sees what came of it"


def test_one_that_can_not_begin_says_why_and_leaves_no_record_nor_takes_a_place(
    app: lowq.Lowq, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_args: Any, **_options: Any) -> Any:
        raise lowq.RedisUnavailable("went away")

    app.queue("Orders", 1).push({"id": 1})
    begin = background.begin
    for name, fails in (("begin", lambda *args: (begin(*args), away())), ("Entry", away)):
        with case(name), monkeypatch.context() as patch:
            patch.setattr(background, name, fails)
            running = BackgroundActions(app, StatsCache(app))
            for _ in range(background.MAX_RUNNING + 1):
                with pytest.raises(lowq.RedisUnavailable, match="went away"):
                    running.start(Actor("ann"), app.queue("Orders"), "delete", inspection.JobFilter())
            assert background.read_actions(app) == []
    assert app.queue("Orders").stats().length == 1


def test_progress_is_seen_and_a_task_is_cancelled_from_another_dashboard(
    pair: tuple[TestClient, TestClient], steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "REPORT_INTERVAL", 0.0)
    one, other = pair
    task = start(one)
    steps.go(8)
    until(lambda: seen(other, task)["done"] == 7, "progress")
    page = other.get(f"/tasks/{task}").text
    assert ("7 of 1,000 jobs" in page, ">Cancel<" in page) == (True, True)
    answer = other.post(f"/tasks/{task}/cancel", data={})
    assert answer.status_code == 303
    assert ">Cancel<" not in other.get(answer.headers["location"]).text
    steps.go()
    found = in_state(one, task, "cancelled")
    assert found["done"] == 8
    assert [entry["action"] for entry in other.get("/api/v1/audit").json()["audit"]] == ["delete", "cancel"]


def test_so_many_run_on_all_dashboards_together(
    pair: tuple[TestClient, TestClient], steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = pair
    for number in range(background.MAX_RUNNING):
        start(pair[number % 2])
    refused = other.post("/api/v1/queues/Orders/actions", json={"action": "delete", "all": {}})
    assert refused.status_code == 429
    assert "4 tasks are running already" in refused.json()["error"]
    steps.ends = True
    steps.go(4)
    until(lambda: {task["state"] for task in one.get("/api/v1/tasks").json()["tasks"]} == {"done"}, "end of all")
    steps.ends = False
    # In one process no more run either, if Redis holds some of them for interrupted.
    monkeypatch.setattr(background, "TASK_SILENCE", -1.0)
    for _ in range(background.MAX_RUNNING):
        start(one)
    assert one.post("/api/v1/queues/Orders/actions", json={"action": "delete", "all": {}}).status_code == 429
    start(other)


def test_a_task_reports_a_few_times_a_second_whatever_its_steps_take(
    app: lowq.Lowq, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, reports, call = 1000.0, list[str](), Client.call

    def steps(*_args: Any, **_options: Any) -> Iterator[admin.Step]:
        nonlocal now
        for done in range(1000):  # ten seconds
            now += 0.01
            yield admin.Step(done, 1000)

    def counted(self: Client, asked: Call[Any], **options: Any) -> Any:
        reports.append(asked.script)
        return call(self, asked, **options)

    monkeypatch.setattr(Queue, "bulk", steps)
    monkeypatch.setattr(Client, "call", counted)
    app.queue("Orders", 1).push({"id": 1})
    running = BackgroundActions(app, StatsCache(app), clock=lambda: now)
    task = running.start(Actor("ann"), app.queue("Orders"), "delete", inspection.JobFilter())
    until(lambda: (found := background.find_action(app, task.id)) and found.state == "done", "end of the task")
    assert 20 <= reports.count("task_report") <= 22


def test_the_task_of_a_process_that_dies_is_interrupted(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    queue, client = lowq.Lowq(redis_url=redis_url).queue("Orders", 3), browser(redis_url)
    queue.push({"id": 1})
    with subprocess.Popen([sys.executable, "-c", DYING, redis_url], stdout=subprocess.PIPE, text=True) as dying:
        try:
            assert dying.stdout is not None
            task = dying.stdout.readline().strip()
            until(lambda: seen(client, task)["done"] > 0, "progress")
            assert seen(client, task)["state"] == "running"
        finally:
            dying.kill()
    monkeypatch.setattr(background, "TASK_SILENCE", 1.0)
    assert in_state(client, task, "interrupted")["ended_at"] is None
    page = client.get(f"/tasks/{task}").text
    assert ">Cancel<" in page, "it may only hang"
    answer = client.post(f"/api/v1/tasks/{task}/cancel", json={})
    assert (answer.status_code, answer.json()["state"]) == (202, "interrupted")
    assert ">Cancel<" not in client.get(f"/tasks/{task}").text


def test_started_again_it_is_bound_to_the_same_jobs(
    pair: tuple[TestClient, TestClient], steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cancelled where it runs it ends at its next step, however seldom it reports."""
    monkeypatch.setattr(background, "REPORT_INTERVAL", NEVER)
    one, other = pair
    wanted = {"state": "morgue", "match": "1*", "error": "no <order>", "error_group": "0123456789ab", "shard": 2}
    task = start(one, all=wanted)
    steps.go()
    until(lambda: seen(one, task)["total"], "its first report")
    assert one.post(f"/api/v1/tasks/{task}/cancel", json={}).status_code == 202
    steps.go()
    in_state(other, task, "cancelled")
    page = parse(other.get(f"/tasks/{task}").text)
    again = page.find("form", has="Start again")
    form = {field.attributes["name"]: field.attributes["value"] for field in again.every("input")}
    assert {name: value for name, value in form.items() if name in wanted} == {**wanted, "shard": "2"}
    asked = parse(other.post(again.attributes["action"], data={**form, "do": "delete all"}).text).text
    assert "with ids like 1* in shard 2 with the error no <order> that failed like 0123456789ab" in asked


def test_the_end_is_written_when_redis_answers_again_or_given_up(
    app: lowq.Lowq, steps: Steps, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(background, "END_PAUSE", 0.0)
    call, now, tried = Client.call, 1000.0, 0
    app.queue("Orders", 1).push({"id": 1})
    # In the last row each call takes as long as Redis may leave it unanswered.
    unavailable, refused = lowq.RedisUnavailable("Redis does not answer"), lowq.RedisRefused("NOPERM")
    rows: list[tuple[Exception, float, int]] = [(unavailable, 0.1, 6), (refused, 0.1, 1), (unavailable, 20.5, 3)]
    for error, takes, attempts in rows:

        def away(self: Client, asked: Call[Any], row: Any = (error, takes, attempts), **options: Any) -> Any:
            nonlocal now, tried
            if asked.script == "task_report":
                now, tried = now + row[1], tried + 1
                if tried < 6:
                    raise row[0]
            return call(self, asked, **options)

        with case(error, takes), monkeypatch.context() as patch:
            steps.ends, tried = False, 0
            running = BackgroundActions(app, StatsCache(app), clock=lambda: now)
            task = running.start(Actor("ann"), app.queue("Orders"), "delete", inspection.JobFilter()).id
            patch.setattr(Client, "call", away)
            steps.ends = True
            steps.go()
            no_threads()
            assert tried == attempts
            assert (f"task {task}: its end can't be written" in caplog.text) is (attempts < 6)


def test_a_task_whose_record_is_gone_ends(app: lowq.Lowq, client: TestClient, steps: Steps) -> None:
    app.queue("Orders", 1).push({"id": 1})
    task = start(client)
    background.forget(app, task)
    steps.go()
    entry = until(lambda: next((entry for entry in app.audit() if "error" in entry.detail), None), "its end")
    assert entry is not None
    assert (entry.detail["outcome"], "record in Redis is gone" in entry.detail["error"]) == ("failed", True)
    assert client.get(f"/api/v1/tasks/{task}").status_code == 404


def test_a_redis_that_is_full_has_room_for_a_task_that_deletes() -> None:
    with RedisServer(maxmemory_policy="noeviction") as server, closing(lowq.Lowq(redis_url=server.url)) as app:
        app.queue("Orders", 3).push({"id": n, "delay": 60} for n in range(50))
        app.client.command("CONFIG", "SET", "maxmemory", "1")
        with pytest.raises(lowq.PushError):
            app.queue("Orders").push({"id": "more"})
        client = browser(server.url)
        assert in_state(client, start(client), "done")["done"] == 50
