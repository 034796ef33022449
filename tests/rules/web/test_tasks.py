"""Bulk actions in the background: seen and cancelled from any process of the dashboard, whatever becomes of theirs."""

import itertools
import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

import lowq
import lowq_web
from lowq.admin import tasks as registry
from lowq.queue import Queue
from lowq.store import Client
from lowq_web import stats_cache, tasks
from lowq_web.journal import Actor
from lowq_web.stats_cache import StatsCache
from lowq_web.tasks import Tasks
from tests.redis_server import RedisServer
from tests.rows import case
from tests.rules.web.confirming import confirm
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
from lowq.queue import Queue
from starlette.testclient import TestClient

Queue.bulk = lambda self, *args, **options: (time.sleep(0.05) or lowq.Step(n, 1000) for n in itertools.count())
app = lowq.Lowq(redis_url=sys.argv[1])
client = TestClient(lowq_web.create_app(app), base_url="http://127.0.0.1", headers={"sec-fetch-site": "same-origin"})
print(client.post("/api/v1/queues/Orders/actions", json={"action": "delete", "all": {}}).json()["id"], flush=True)
time.sleep(3600)
"""


class Steps:
    """An action of the test's own: one step whenever it says so."""

    def __init__(self) -> None:
        self._go = threading.Semaphore(0)
        self.error: Exception | None = None
        self.ends = False
        self.taken = 0

    def __call__(self, *_args: Any, **_options: Any) -> Iterator[lowq.Step]:
        for done in itertools.count():
            assert self._go.acquire(timeout=PATIENCE)
            if self.error is not None:
                raise self.error
            if self.ends:
                return
            self.taken = done + 1
            yield lowq.Step(done, 1000)

    def go(self, count: int = 1) -> None:
        self._go.release(count)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[Steps]:
    steps = Steps()
    monkeypatch.setattr(Queue, "bulk", steps)
    yield steps
    steps.ends = True
    steps.go(1000)
    # A task that is still ending would write into the log of the test after this one.
    until(lambda: not any(thread.name.startswith("lowq-task-") for thread in threading.enumerate()), "end of tasks")


def browser(url: str, **settings: Any) -> TestClient:
    """A dashboard with an application of its own, as another process has it."""
    app = lowq.Lowq(redis_url=url, **settings)
    return TestClient(lowq_web.create_app(app), base_url="http://127.0.0.1", headers=OWN, follow_redirects=False)


@pytest.fixture
def pair() -> tuple[TestClient, TestClient]:
    return pair_on(f"memory://{uuid.uuid4().hex}")


def pair_on(url: str, **settings: Any) -> tuple[TestClient, TestClient]:
    """Two dashboards on one store."""
    app = lowq.Lowq(redis_url=url, **settings)
    app.queue("Orders", 3).push({"id": n, "delay": 60} for n in range(20))
    return browser(url, **settings), browser(url, **settings)


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
    assert in_state(other, task, "done") == seen(one, task)
    found = seen(other, task)
    assert (found["done"], found["total"], found["reason"]) == (11, 11, "spoilt")
    assert found["filter"] == {"match": "1*", "state": "scheduled"}
    assert found["owner"].endswith(f":{os.getpid()}")
    assert one.get("/api/v1/tasks").json() == other.get("/api/v1/tasks").json() == {"tasks": [found]}
    for path in ("/tasks", f"/tasks/{task}"):
        assert other.get(path).status_code == 200
        assert "11 of 11" in " ".join(other.get(path).text.split())
    assert one.get("/api/v1/stats").json()["total"]["length"] == 9, "whoever sees the end sees what came of it"


def test_one_that_began_without_an_answer_leaves_no_record(
    pair: tuple[TestClient, TestClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Client.run

    def unanswered(self: Client, script: str, *args: Any, **options: Any) -> Any:
        reply = run(self, script, *args, **options)
        if script == "task_begin":
            raise lowq.RedisUnavailable("Redis does not answer")
        return reply

    monkeypatch.setattr(Client, "run", unanswered)
    one, other = pair
    assert one.post("/api/v1/queues/Orders/actions", json={"action": "delete", "all": {}}).status_code == 503
    assert other.get("/api/v1/tasks").json() == {"tasks": []}


def test_one_that_can_not_begin_says_why_although_its_record_can_not_be_removed(
    app: lowq.Lowq, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(why: str) -> Callable[..., Any]:
        def call(*_args: Any, **_options: Any) -> Any:
            raise lowq.RedisUnavailable(why)

        return call

    app.queue("Orders", 1).push({"id": 1})
    for module, name in ((registry, "begin"), (tasks, "Entry")):
        with case(name), monkeypatch.context() as patch:
            patch.setattr(module, name, fail("went away"))
            patch.setattr(registry, "forget", fail("is still away"))
            background = Tasks(app, StatsCache(app))
            for _ in range(tasks.MAX_RUNNING + 1):  # none takes a place in this process
                with pytest.raises(lowq.RedisUnavailable, match="went away"):
                    background.start(Actor("ann"), "Orders", "delete", lowq.JobFilter())
                for task in background.all():  # Redis counts the records that stayed
                    app.client.command("HDEL", "lowq:v1:tasks", task.id)
    assert app.queue("Orders").stats().length == 1


def test_progress_is_seen_and_a_task_is_cancelled_from_another_dashboard(
    pair: tuple[TestClient, TestClient], steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "REPORT_INTERVAL", 0.0)
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
    assert (found["done"], steps.taken) == (8, 9)
    assert [entry["action"] for entry in other.get("/api/v1/audit").json()["audit"]] == ["delete", "cancel"]


def test_where_it_runs_it_is_cancelled_at_its_next_step(
    pair: tuple[TestClient, TestClient], steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "REPORT_INTERVAL", NEVER)
    one, _ = pair
    task = start(one)
    steps.go()
    until(lambda: steps.taken == 1, "a step")
    assert one.post(f"/tasks/{task}/cancel", data={}).status_code == 303
    steps.go()
    in_state(one, task, "cancelled")


def test_so_many_run_on_all_dashboards_together(pair: tuple[TestClient, TestClient], steps: Steps) -> None:
    one, other = pair
    for number in range(tasks.MAX_RUNNING):
        start(pair[number % 2])
    refused = other.post("/api/v1/queues/Orders/actions", json={"action": "delete", "all": {}})
    assert refused.status_code == 429
    assert "4 tasks are running already" in refused.json()["error"]
    steps.ends = True
    steps.go(4)
    until(lambda: {task["state"] for task in one.get("/api/v1/tasks").json()["tasks"]} == {"done"}, "end of all")
    steps.ends = False
    start(other)


def test_so_many_run_in_a_process_also_of_those_that_redis_holds_for_interrupted(
    pair: tuple[TestClient, TestClient], steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "SILENCE", -1.0)
    one, other = pair
    for _ in range(tasks.MAX_RUNNING):
        start(one)
    assert one.post("/api/v1/queues/Orders/actions", json={"action": "delete", "all": {}}).status_code == 429
    start(other)


def test_a_task_reports_a_few_times_a_second_whatever_its_steps_take(
    app: lowq.Lowq, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0

    def steps(*_args: Any, **_options: Any) -> Iterator[lowq.Step]:
        nonlocal now
        for done in range(1000):  # ten seconds
            now += 0.01
            yield lowq.Step(done, 1000)

    reports: list[str] = []
    run = Client.run

    def counted(self: Client, script: str, *args: Any, **options: Any) -> Any:
        reports.extend([script] if script == "task_report" else [])
        return run(self, script, *args, **options)

    monkeypatch.setattr(Queue, "bulk", steps)
    monkeypatch.setattr(Client, "run", counted)
    app.queue("Orders", 1).push({"id": 1})
    background = Tasks(app, StatsCache(app), clock=lambda: now)
    task = background.start(Actor("ann"), "Orders", "delete", lowq.JobFilter())
    until(lambda: (found := background.get(task.id)) and found.state == "done", "end of the task")
    assert 20 <= len(reports) <= 22


class Dying:
    """A process that has begun a task."""

    def __init__(self, folder: Path, url: str) -> None:
        (folder / "dying.py").write_text(DYING)
        command = [sys.executable, str(folder / "dying.py"), url]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.task = self._process.stdout.readline().strip()

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(PATIENCE)
        assert self._process.stdout is not None
        self._process.stdout.close()


def test_the_task_of_a_process_that_dies_is_interrupted(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lowq.Lowq(redis_url=redis_url).queue("Orders", 3).push({"id": 1})
    client = browser(redis_url)
    dying = Dying(tmp_path, redis_url)
    try:
        until(lambda: seen(client, dying.task)["done"] > 0, "progress")
        assert seen(client, dying.task)["state"] == "running"
    finally:
        dying.kill()
    monkeypatch.setattr(registry, "SILENCE", 1.0)
    found = in_state(client, dying.task, "interrupted")
    assert (found["ended_at"], found["done"] > 0) == (None, True)
    page = client.get(f"/tasks/{dying.task}").text
    assert ">Cancel<" in page, "it may only hang"
    # Started anew, for what is left: it asks first.
    again = parse(page).find("form", has="Start again")
    form = {field.attributes["name"]: field.attributes["value"] for field in again.every("input", "button")}
    answer = confirm(client, again.attributes["action"], client.post(again.attributes["action"], data=form).text)
    fresh = in_state(client, answer.headers["location"].rpartition("/")[2], "done")
    assert (fresh["done"], lowq.Lowq(redis_url=redis_url).queue("Orders").stats().length) == (1, 0)
    answer = client.post(f"/api/v1/tasks/{dying.task}/cancel", json={})
    assert (answer.status_code, answer.json()["state"]) == (202, "interrupted")
    assert ">Cancel<" not in client.get(f"/tasks/{dying.task}").text


def test_started_again_it_is_bound_to_the_same_jobs(
    pair: tuple[TestClient, TestClient], steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "REPORT_INTERVAL", 0.0)
    one, other = pair
    wanted = {"state": "morgue", "match": "1*", "error": "no <order>", "error_group": "0123456789ab", "shard": 2}
    task = start(one, all=wanted)
    assert one.post(f"/api/v1/tasks/{task}/cancel", json={}).status_code == 202
    steps.go()
    in_state(other, task, "cancelled")
    page = parse(other.get(f"/tasks/{task}").text)
    for fact in ("Id like 1*", "Shard 2", "Error no <order>", "Failed like 0123456789ab"):
        assert fact in page.text
    again = page.find("form", has="Start again")
    form = {field.attributes["name"]: field.attributes["value"] for field in again.every("input")}
    assert {name: value for name, value in form.items() if name in wanted} == {**wanted, "shard": "2"}
    asked = parse(other.post(again.attributes["action"], data={**form, "do": "delete all"}).text).text
    assert "with ids like 1* in shard 2 with the error no <order> that failed like 0123456789ab" in asked


def test_a_task_that_can_not_go_on_has_failed_with_the_reason(
    pair: tuple[TestClient, TestClient], steps: Steps
) -> None:
    one, other = pair
    rows = [
        (lowq.RedisUnavailable("Redis does not answer"), "Redis does not answer"),
        (lowq.RedisFull("Redis is full"), "Redis is full"),
        (ValueError("secret"), "ValueError; the log of the dashboard says more"),
    ]
    for error, said in rows:
        with case(error):
            steps.error, steps.taken = None, 0
            task = start(one)
            steps.go(3)
            until(lambda: steps.taken == 3, "steps")
            steps.error = error
            steps.go()
            found = in_state(other, task, "failed")
            assert (found["error"], found["done"]) == (said, 2)


def test_the_end_is_written_when_redis_answers_again(
    app: lowq.Lowq, client: TestClient, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "END_PAUSE", 0.01)
    app.queue("Orders", 1).push({"id": 1})
    task = start(client)
    steps.go()
    until(lambda: steps.taken == 1, "a step")
    run, refused = Client.run, itertools.count()

    def away(self: Client, script: str, *args: Any, **options: Any) -> Any:
        if script == "task_report" and next(refused) < 5:
            raise lowq.RedisUnavailable("Redis does not answer")
        return run(self, script, *args, **options)

    monkeypatch.setattr(Client, "run", away)
    steps.error = lowq.RedisUnavailable("Redis went away")
    steps.go()
    assert in_state(client, task, "failed")["error"] == "Redis went away"


def test_an_end_that_can_not_be_written_is_given_up(
    app: lowq.Lowq, steps: Steps, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tasks, "END_PAUSE", 0.0)
    run, now, tried = Client.run, 1000.0, 0
    app.queue("Orders", 1).push({"id": 1})
    # Each call takes the 20 s for which Redis may leave it unanswered.
    for error, attempts in ((lowq.RedisUnavailable("Redis does not answer"), 3), (lowq.RedisRefused("NOPERM"), 1)):

        def away(self: Client, script: str, *args: Any, fails: Exception = error, **options: Any) -> Any:
            nonlocal now, tried
            if script != "task_report":
                return run(self, script, *args, **options)
            now, tried = now + 20.5, tried + 1
            raise fails

        with case(error), monkeypatch.context() as patch:
            steps.ends, tried = False, 0
            background = Tasks(app, StatsCache(app), clock=lambda: now)
            task = background.start(Actor("ann"), "Orders", "delete", lowq.JobFilter())
            patch.setattr(Client, "run", away)
            steps.ends = True
            steps.go()
            until(lambda task=task: f"task {task.id}: its end can't be written" in caplog.text, "word of it")  # type: ignore[misc]
            assert tried == attempts


def test_a_task_whose_record_is_gone_ends(app: lowq.Lowq, client: TestClient, steps: Steps) -> None:
    app.queue("Orders", 1).push({"id": 1})
    task = start(client)
    registry.forget(app, task)
    steps.go()
    entry = until(lambda: next((entry for entry in app.audit() if "error" in entry.detail), None), "its end")
    assert entry is not None
    assert (entry.detail["outcome"], "record in Redis is gone" in entry.detail["error"]) == ("failed", True)
    assert client.get(f"/api/v1/tasks/{task}").status_code == 404


def test_a_redis_that_is_full_has_room_for_a_task_that_deletes(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "redis", maxmemory_policy="noeviction") as server:
        app = lowq.Lowq(redis_url=server.url)
        app.queue("Orders", 3).push({"id": n, "delay": 60} for n in range(50))
        app.client.command("CONFIG", "SET", "maxmemory", "1")
        with pytest.raises(lowq.PushError):
            app.queue("Orders").push({"id": "more"})
        client = browser(server.url)
        assert in_state(client, start(client), "done")["done"] == 50
        app.close()


def test_tasks_without_redis_are_an_answer(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_args: Any, **_options: Any) -> Any:
        raise lowq.RedisUnavailable("Redis does not answer")

    monkeypatch.setattr(registry, "all_tasks", away)
    assert [client.get(path).status_code for path in ("/tasks", "/api/v1/tasks")] == [503, 503]
