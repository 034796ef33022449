"""Pages that ask: what is answered is what was asked."""

import re
from itertools import product
from typing import Any

import pytest
from starlette.testclient import TestClient

import lowq
from lowq_web import confirmations
from tests.rows import case
from tests.rules.web.confirming import confirm, form_on
from tests.rules.web.conftest import dashboard
from tests.rules.web.shown import parse
from tests.waiting import until

ACT = "/queues/Orders/act"


@pytest.fixture
def queue(app: lowq.Lowq) -> lowq.Queue:
    return filled(app)


def filled(app: lowq.Lowq) -> lowq.Queue:
    """Of each kind 20 jobs: due, for later, and buried."""
    queue = app.queue("Orders", 3)
    queue.push({"id": f"due-{n}"} for n in range(20))
    queue.push({"id": f"later-{n}", "delay": 3600.0} for n in range(20))
    queue.push({"id": f"buried-{n}"} for n in range(20))
    queue.bury(f"buried-{n}" for n in range(20))
    return queue


def ask(client: TestClient, **form: Any) -> str:
    """The page that asks."""
    answer = client.post(ACT, data=form)
    assert answer.status_code == 200, answer.text
    return answer.text


def answer(client: TestClient, page: str, **more: str | None) -> Any:
    """What comes of saying yes."""
    return confirm(client, ACT, page, **more)


def finished(client: TestClient, response: Any) -> str:
    """The page of the task that was started, when it has ended."""
    assert response.status_code == 303, response.text
    address = response.headers["location"]
    until(lambda: 'data-refresh="0"' in client.get(address).text, "end of the task")
    return " ".join(re.sub(r"<[^>]+>", " ", client.get(address).text).split())


def ids(queue: lowq.Queue, state: Any = None) -> set[str]:
    return {job.id for job in queue.jobs(state, limit=1000)}


def sizes(queue: lowq.Queue) -> tuple[int, int, int]:
    stats = queue.stats()
    return stats.due, stats.scheduled, stats.morgue_length


def head(page: str) -> str:
    return re.sub(r"<[^>]+>", "", page.partition("<h1>")[2].partition("</h1>")[0])


def test_what_came_after_the_question_is_not_touched() -> None:
    rows: list[tuple[str, str, int]] = [
        ("delete", "", 40), ("bury", "", 40), ("bury", "due", 20), ("delete", "scheduled", 20),
        ("perform_now", "", 20), ("kick", "morgue", 20), ("delete", "morgue", 20),
    ]  # fmt: skip
    for match, (action, state, count) in product(["", "*"], rows):
        with case(match, action, state, count), dashboard() as (app, client):
            queue = filled(app)
            page = ask(client, do=f"{action} all", state=state, match=match)
            assert f" {count} jobs" in head(page)
            new = {"new-due", "new-later", "new-buried"}
            queue.push([{"id": "new-due"}, {"id": "new-later", "delay": 60.0}, {"id": "new-buried"}])
            queue.bury("new-buried")
            before = {state: ids(queue, state) & new for state in (None, "due", "scheduled", "morgue")}
            shown = finished(client, answer(client, page))
            assert f"{count} of {count} jobs" in shown
            assert {state: ids(queue, state) & new for state in (None, "due", "scheduled", "morgue")} == before


def test_it_asks_again_when_there_are_many_more_or_fewer() -> None:
    rows: list[tuple[str, str, str]] = [
        ("delete", "", "due"), ("kick", "morgue", "buried"), ("bury", "scheduled", "later"),
    ]  # fmt: skip
    for action, state, prefix in rows:
        with case(action, state), dashboard() as (app, client):
            queue = filled(app)
            page = ask(client, do=f"{action} all", state=state, match=f"{prefix}*")
            assert " 20 jobs" in head(page)
            more = [f"{prefix}-more-{n}" for n in range(500)]
            queue.push({"id": item, "delay": 60.0 if prefix == "later" else 0.0} for item in more)
            if state == "morgue":
                queue.bury(more)
            stats = sizes(queue)
            again = answer(client, page)
            assert (again.status_code, " 520 jobs" in head(again.text), sizes(queue)) == (200, True, stats)
            assert {20, 520} <= set(parse(again.text).find("main").numbers)
            assert "520 of 520 jobs" in finished(client, answer(client, again.text))
    with dashboard() as (app, client):
        queue = filled(app)
        page = ask(client, do="delete all", state="due")
        queue.delete(f"due-{n}" for n in range(5))
        assert " 15 jobs" in head(answer(client, page).text)


def test_a_tenth_more_is_let_pass() -> None:
    for more, asks in ((2, False), (3, True)):
        with case(more), dashboard() as (app, client):
            queue = filled(app)
            page = ask(client, do="delete all", state="due")
            queue.push({"id": f"more-{n}"} for n in range(more))
            assert answer(client, page).status_code == (200 if asks else 303)


def test_it_asks_again_after_an_hour(client: TestClient, queue: lowq.Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    page = ask(client, do="delete all", state="due")
    monkeypatch.setattr(confirmations, "MAX_AGE", -1.0)
    assert answer(client, page).status_code == 200
    assert queue.stats().length == 40


def test_a_form_that_no_page_has_made_is_refused(client: TestClient, queue: lowq.Queue) -> None:
    forgeries: list[dict[str, str | None]] = [
        {"count": None}, {"at": None}, {"count": None, "at": None}, {"count": "-1"}, {"count": "many"}, {"count": ""},
        {"count": "٣"}, {"at": "nan"}, {"at": "inf"}, {"at": "-5"}, {"at": "soon"}, {"at": "99999999999"},
        {"count": "1e3"},
    ]  # fmt: skip
    for what, forged in product(["all", "selected", ""], forgeries):
        with case(what, forged):
            page = ask(client, do=f"delete {what}".strip(), id=["due-1"], state="due" if what == "all" else "")
            before = sizes(queue)
            refused = answer(client, page, **forged)
            assert refused.status_code == 400
            assert sizes(queue) == before
            assert ids(queue, "due") == {f"due-{n}" for n in range(20)}


def test_a_number_that_the_page_has_not_shown_is_refused(client: TestClient, queue: lowq.Queue) -> None:
    page = ask(client, do="delete all")
    queue.push({"id": f"more-{n}"} for n in range(400))
    refused = answer(client, page, count="440")
    assert (refused.status_code, queue.stats().length) == (400, 440)


def test_a_number_alone_gets_nobody_newer_jobs(client: TestClient, queue: lowq.Queue) -> None:
    page = ask(client, do="delete all", state="due")
    queue.push({"id": f"more-{n}"} for n in range(400))
    finished(client, answer(client, page, count="420"))
    assert ids(queue, "due") == {f"more-{n}" for n in range(400)}


def test_without_its_snapshot_what_can_be_new_is_left_alone(client: TestClient, queue: lowq.Queue) -> None:
    page = ask(client, do="delete all")
    queue.push({"id": "new", "delay": 60.0})
    shard = queue.shard_of("new")
    shown = finished(client, answer(client, page, snapshot="dropped"))
    left = {f"later-{n}" for n in range(20) if queue.shard_of(f"later-{n}") == shard}
    assert ids(queue) == {"new", *left}
    assert "what is scheduled for later is left alone" in shown


class TestIds:
    def test_a_job_that_came_in_the_place_of_another_is_not_touched(
        self, client: TestClient, queue: lowq.Queue
    ) -> None:
        chosen = [f"due-{n}" for n in range(15)] + [f"later-{n}" for n in range(15)]
        page = ask(client, do="delete selected", id=chosen)
        assert " 30 jobs" in head(page)
        renewed = {"due-3", "later-4"}
        queue.delete(renewed)
        queue.push([{"id": "due-3"}, {"id": "later-4", "delay": 60.0}])
        done = parse(client.get(answer(client, page).headers["location"]).text).of_role("status")
        assert re.findall(r"\d+", done) == ["28", "2"]
        assert ids(queue) & set(chosen) == renewed

    def test_of_one_it_asks_again(self, client: TestClient, queue: lowq.Queue) -> None:
        for place in ("due-1", "later-1", "buried-1"):
            with case(place):
                page = ask(client, do="delete", id=place)
                if place == "buried-1":
                    queue.kick(place)
                else:
                    queue.delete(place)
                    queue.push({"id": place, "delay": 60.0 if place == "later-1" else 0.0})
                again = answer(client, page)
                assert (again.status_code, queue.peek(place) is not None) == (200, True)
                assert answer(client, again.text).status_code == 303
                assert queue.peek(place) is None

    def test_the_reason_is_kept_when_it_asks_again(self, client: TestClient, queue: lowq.Queue) -> None:
        page = ask(client, do="bury selected", id="due-1")
        queue.delete("due-1")
        queue.push({"id": "due-1"})
        again = answer(client, page, reason='out of "stock"')
        assert answer(client, again.text).status_code == 303
        job = queue.peek("due-1")
        assert job is not None
        assert job.error == 'out of "stock"'

    def test_without_what_was_seen_of_each_it_is_refused(self, client: TestClient, queue: lowq.Queue) -> None:
        all_seen: list[str | None] = [None, "", "1.0", "x y", "1.0 - -"]
        for seen in all_seen:
            with case(seen):
                page = ask(client, do="delete selected", id="due-1")
                refused = answer(client, page, seen=seen)
                assert (refused.status_code, queue.stats().length) == (400, 40)

    def test_ids_that_were_put_in_are_not_touched(self, client: TestClient, queue: lowq.Queue) -> None:
        page = ask(client, do="delete selected", id=["due-1"])
        form = [*form_on(page), ("id", "due-2"), ("seen", "1.0 -")]
        again = client.post(ACT, data={name: [v for n, v in form if n == name] for name, _ in form})
        assert (again.status_code, queue.stats().length) == (200, 40)


class TestApi:
    PATH = "/api/v1/queues/Orders"

    def act(self, client: TestClient, status: int, **document: Any) -> Any:
        response = client.post(f"{self.PATH}/actions", json=document)
        assert response.status_code == status, response.text
        found = response.json()
        if status == 202:
            until(lambda: client.get(f"/api/v1/tasks/{found['id']}").json()["state"] != "running", "end of the task")
            found = client.get(f"/api/v1/tasks/{found['id']}").json()
        return found

    def test_what_came_after_the_count_is_not_touched(self, client: TestClient, queue: lowq.Queue) -> None:
        counted = client.post(f"{self.PATH}/count", json={"action": "delete", "all": {"state": "due"}}).json()
        assert counted["count"] == 20
        queue.push([{"id": "new"}])
        done = self.act(client, 202, action="delete", all={"state": "due"}, before=counted["at"])
        assert (done["state"], done["done"], done["filter"]["before"]) == ("done", 20, counted["at"])
        assert ids(queue, "due") == {"new"}

    def test_no_more_than_so_many(self) -> None:
        for bounded in (False, True):
            with case(bounded), dashboard() as (app, client):
                queue = filled(app)
                counted = client.post(f"{self.PATH}/count", json={"action": "delete", "all": {}}).json()
                bound = {"before": counted["at"]} if bounded else {}
                refused = self.act(client, 409, action="delete", all={}, at_most=39, **bound)
                assert ("40" in refused["error"], queue.stats().length) == (True, 40)
                assert self.act(client, 202, action="delete", all={}, at_most=40, **bound)["done"] == 40

    def test_bounds_that_make_no_sense(self, client: TestClient, queue: lowq.Queue) -> None:
        documents: list[dict[str, Any]] = [
            {"all": {}, "at_most": -1}, {"all": {}, "at_most": 1.5}, {"all": {}, "at_most": "5"},
            {"all": {}, "before": "now"}, {"all": {}, "before": 99999999999.0}, {"ids": ["due-1"], "before": 1.0},
            {"ids": ["due-1"], "at_most": 1}, {"all": {}, "before": 99999999999.0, "at_most": 100},
        ]  # fmt: skip
        for document in documents:
            with case(document):
                self.act(client, 400, action="delete", **document)
                assert queue.stats().length == 40


def test_so_many_snapshots_are_kept(app: lowq.Lowq) -> None:
    queue = app.queue("Orders", 3)
    queue.push({"id": n, "delay": 3600.0} for n in range(10))
    kept = confirmations.Snapshots(app)
    names = [kept.keep(queue.snapshot("delete")) for _ in range(confirmations.MAX_WAITING + 5)]
    assert [kept.get(name) is not None for name in names] == [False] * 5 + [True] * confirmations.MAX_WAITING


def test_so_many_jobs_are_remembered(app: lowq.Lowq, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = app.queue("Orders", 3)
    queue.push({"id": n, "delay": 3600.0} for n in range(10))
    monkeypatch.setattr(confirmations, "MAX_REMEMBERED", 25)
    monkeypatch.setattr(confirmations, "MAX_SHARED", 0)
    kept = confirmations.Snapshots(app)
    names = [kept.keep(queue.snapshot("delete")) for _ in range(4)]
    assert [kept.get(name) is not None for name in names] == [False, False, True, True]
