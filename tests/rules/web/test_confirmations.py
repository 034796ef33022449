"""Pages that ask: what is answered is what was asked."""

import re
from itertools import product
from typing import Any

import pytest
from starlette.testclient import TestClient

import lowq
from lowq_web import confirmations
from tests.rows import case
from tests.rules.web.confirming import confirm, ended, form_on
from tests.rules.web.conftest import dashboard
from tests.rules.web.shown import Reader, parse
from tests.waiting import until

ACT = "/queues/Orders/act"


@pytest.fixture
def queue(app: lowq.Lowq) -> lowq.Queue:
    return filled(app)


def filled(app: lowq.Lowq) -> lowq.Queue:
    """20 jobs of each kind: due, for later, and buried."""
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
    return parse(client.get(address).text).text


def ids(queue: lowq.Queue, state: Any = None) -> set[str]:
    return {job.id for job in queue.jobs(state, limit=1000)}


def sizes(queue: lowq.Queue) -> tuple[int, int, int]:
    stats = queue.stats()
    return stats.due, stats.scheduled, stats.morgue_length


def head(page: str) -> str:
    return parse(page).find("h1").text


def test_what_came_after_the_question_is_not_touched() -> None:
    rows = [
        ("delete", "", "", 40), ("bury", "due", "*", 20), ("perform_now", "", "", 20), ("kick", "morgue", "*", 20),
    ]  # fmt: skip
    for action, state, match, count in rows:
        with case(action, state), dashboard() as (app, client):
            queue = filled(app)
            page = ask(client, do=f"{action} all", state=state, match=match)
            assert f" {count} jobs" in head(page)
            new = {"new-due", "new-later", "new-buried"}
            queue.push([{"id": "new-due"}, {"id": "new-later", "delay": 60.0}, {"id": "new-buried"}])
            queue.bury("new-buried")
            before = {state: ids(queue, state) & new for state in (None, "due", "scheduled", "morgue")}
            assert f"{count} of {count} jobs" in finished(client, answer(client, page))
            assert {state: ids(queue, state) & new for state in (None, "due", "scheduled", "morgue")} == before


def test_it_asks_again_when_there_are_more_by_a_tenth_or_fewer() -> None:
    rows: list[tuple[int, int | None]] = [(2, None), (3, 23), (500, 520), (-5, 15)]
    for more, asked in rows:
        with case(more), dashboard() as (app, client):
            queue = filled(app)
            page = ask(client, do="delete all", state="due")
            queue.push({"id": f"more-{n}"} for n in range(more))
            queue.delete([f"due-{n}" for n in range(-more)])
            again = answer(client, page)
            if asked is None:
                assert "20 of 20 jobs" in finished(client, again)
                continue
            assert (again.status_code, f" {asked} jobs" in head(again.text)) == (200, True)
            assert {20, asked} <= set(parse(again.text).find("main").numbers)
            assert len(ids(queue, "due")) == 20 + more, "nothing was done"
            assert f"{asked} of {asked} jobs" in finished(client, answer(client, again.text))


def test_a_form_that_no_page_has_made_is_refused(
    client: TestClient, queue: lowq.Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    forgeries: list[dict[str, str | None]] = [
        {"count": None}, {"at": None}, {"count": "-1"}, {"count": "٣"}, {"at": "nan"}, {"at": "-5"},
        {"at": "99999999999"},
    ]  # fmt: skip
    before = sizes(queue)
    for what, forged in product(["all", "selected", ""], forgeries):
        with case(what, forged):
            page = ask(client, do=f"delete {what}".strip(), id=["due-1"], state="due" if what == "all" else "")
            assert answer(client, page, **forged).status_code == 400
    for seen in (None, "", "x y", "1.0 - -"):
        with case(seen):
            page = ask(client, do="delete selected", id="due-1")
            assert answer(client, page, seen=seen).status_code == 400
    assert sizes(queue) == before
    page = ask(client, do="delete all")
    queue.push({"id": f"more-{n}"} for n in range(400))
    assert answer(client, page, count="440").status_code == 400, "a number that no page has shown"
    assert queue.stats().length == 440
    page = ask(client, do="delete all")
    monkeypatch.setattr(confirmations, "MAX_AGE", -1.0)
    assert (answer(client, page).status_code, queue.stats().length) == (200, 440), "it asks again after an hour"


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

    def test_of_one_it_asks_again_and_keeps_the_reason(self, client: TestClient, queue: lowq.Queue) -> None:
        for place in ("due-1", "later-1"):
            with case(place):
                page = ask(client, do="bury", id=place)
                queue.delete(place)
                queue.push({"id": place, "delay": 60.0 if place == "later-1" else 0.0})
                again = answer(client, page, reason='out of "stock"')
                assert (again.status_code, queue.peek(place, "morgue")) == (200, None)
                assert answer(client, again.text).status_code == 303
                job = queue.peek(place, "morgue")
                assert (job and job.error) == 'out of "stock"'

    def test_ids_that_were_put_in_are_not_touched(self, client: TestClient, queue: lowq.Queue) -> None:
        page = ask(client, do="delete selected", id=["due-1"])
        form = [*form_on(page), ("id", "due-2"), ("seen", "1.0 -")]
        again = client.post(ACT, data={name: [v for n, v in form if n == name] for name, _ in form})
        assert (again.status_code, queue.stats().length) == (200, 40)


class TestApi:
    PATH = "/api/v1/queues/Orders"

    def act(self, client: TestClient, status: int, **document: Any) -> Any:
        response = client.post(f"{self.PATH}/actions", json={"action": "delete", **document})
        assert response.status_code == status, response.text
        return ended(client, response.json()["id"]) if status == 202 else response.json()

    def test_what_came_after_the_count_is_not_touched(self, client: TestClient, queue: lowq.Queue) -> None:
        counted = client.post(f"{self.PATH}/count", json={"action": "delete", "all": {"state": "due"}}).json()
        assert counted["count"] == 20
        queue.push([{"id": "new"}])
        refused = self.act(client, 409, all={"state": "due"}, at_most=19, before=counted["at"])
        assert ("20" in refused["error"], len(ids(queue, "due"))) == (True, 21)
        self.act(client, 409, all={"state": "due"}, at_most=20)
        for nonsense in ({"all": {}, "before": 99999999999.0}, {"ids": ["due-1"], "at_most": 1}):
            self.act(client, 400, **nonsense)
        done = self.act(client, 202, all={"state": "due"}, at_most=20, before=counted["at"])
        assert (done["state"], done["done"], done["filter"]["before"]) == ("done", 20, counted["at"])
        assert ids(queue, "due") == {"new"}


def test_jobs_of_a_priority_are_listed_counted_and_deleted(client: TestClient, queue: lowq.Queue) -> None:
    queue.push({"id": f"old-{number}", "priority": 9} for number in range(3))
    assert Reader(client).ids("/queues/Orders?priority=9&min=-2h") == ["old-0", "old-1", "old-2"]
    found = client.get("/api/v1/queues/Orders/jobs?priority=9&newer_than=7200&older_than=0").json()["jobs"]
    assert [job["id"] for job in found] == ["old-0", "old-1", "old-2"]
    wanted = {"priority": 9, "newer_than": 7200}
    assert client.post(f"{TestApi.PATH}/count", json={"action": "delete", "all": wanted}).json()["count"] == 3
    page = ask(client, do="delete all", priority="9")
    assert re.search(r"of Orders of priority 9: 3, counted", parse(page).text)
    done = TestApi().act(client, 202, all=wanted)
    assert (done["done"], done["filter"]["priority"], "newer_than" in done["filter"]) == (3, 9, False)
    assert ids(queue, "due") == {f"due-{number}" for number in range(20)}
    for query, said in (("priority=12", "from 0, the most urgent, to 9"), ("priority=x", "from 0, the most urgent"),
                        ("priority=9&state=morgue", "jobs in the morgue have none")):  # fmt: skip
        with case(query):
            refused = client.get(f"/queues/Orders?{query}")
            assert refused.status_code == 400
            assert said in parse(refused.text).text


def test_so_many_snapshots_and_jobs_are_remembered(
    app: lowq.Lowq, queue: lowq.Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = confirmations.Snapshots(app)
    names = [kept.keep(queue.snapshot("delete")) for _ in range(confirmations.MAX_WAITING + 5)]
    assert [kept.get(name) is not None for name in names] == [False] * 5 + [True] * confirmations.MAX_WAITING
    monkeypatch.setattr(confirmations, "MAX_REMEMBERED", 2 * len(queue.snapshot("delete")))
    monkeypatch.setattr(confirmations, "MAX_SHARED", 0)
    kept = confirmations.Snapshots(app)
    names = [kept.keep(queue.snapshot("delete")) for _ in range(4)]
    assert [kept.get(name) is not None for name in names] == [False, False, True, True]
