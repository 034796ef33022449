"""Another number of shards for a queue, by its page and by the API: asked about before, and seen by all."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
from starlette.testclient import TestClient

import lowq
from lowq.admin import ReshardProgress
from lowq.operate.reshard import reshard
from tests.rows import case
from tests.rules.web.confirming import ended
from tests.rules.web.shown import parse


def form_on(page: str) -> dict[str, str]:
    """The form that leads to a reshard, as a browser sends it."""
    forms = [each for each in parse(page).every("form") if each.attributes.get("action", "").endswith("/reshard")]
    return {each.attributes["name"]: each.attributes.get("value", "") for each in forms[0].every("input")}


@pytest.fixture
def queue(app: lowq.Lowq) -> lowq.Queue:
    queue = app.queue("Orders", 4)
    queue.push([{"id": str(number), "payload": number} for number in range(40)])
    return queue


@pytest.fixture
def under_way(app: lowq.Lowq, queue: lowq.Queue) -> Iterator[Iterator[ReshardProgress]]:
    """A reshard to 8 shards, by another program: the first of four classes is moved."""
    progress = reshard(app, "Orders", 8, by="ada")
    while next(progress).shards_moved < 1:
        pass
    yield progress
    progress.close()  # type: ignore[attr-defined]  # it is a generator


def send(client: TestClient, shards_count: object, **more: str) -> Any:
    """Sends the form that the page has, with this number."""
    fields = form_on(client.get("/queues/Orders/reshard").text)
    return client.post("/queues/Orders/reshard", data=fields | {"shards_count": str(shards_count), **more})


def test_it_is_asked_before_and_done_in_the_background(client: TestClient, app: lowq.Lowq, queue: lowq.Queue) -> None:
    assert "/queues/Orders/reshard" in client.get("/queues/Orders").text
    asked = send(client, 8)
    assert asked.status_code == 200
    assert {4, 8, 40} <= set(parse(asked.text).find("main").numbers)
    assert app.queue("Orders").layouts.next is None, "nothing was done yet"
    started = client.post("/queues/Orders/reshard", data=form_on(asked.text))
    assert started.status_code == 303
    task = ended(client, started.headers["location"].rpartition("/")[2])
    assert (task["state"], task["action"], task["shards_count"]) == ("done", "reshard", 8)
    assert (task["done"], task["total"]) == (4, 4)
    stats = app.queue("Orders").stats()
    assert (stats.shards_count, stats.epoch, stats.length) == (8, 1, 40)
    entry = app.audit(action="reshard")[0]
    assert (entry.target, entry.detail["to"], entry.detail["outcome"]) == ("Orders", 8, "done")


def test_what_no_queue_can_have_is_refused_beside_the_field(
    client: TestClient, app: lowq.Lowq, queue: lowq.Queue
) -> None:
    for typed, sure in product(("0", "", "1.5", "9" * 5000, "٣", "4"), ("", "1")):
        with case(typed, sure):
            answer = send(client, typed, sure=sure)
            assert answer.status_code == 400
            page = parse(answer.text)
            said = next(each for each in page.every("span") if each.attributes.get("id") == "why-not")
            assert ("4 already" in said.text) is (typed == "4")
    assert app.queue("Orders").layouts.next is None
    assert app.audit(action="reshard") == []


@pytest.mark.usefixtures("under_way")
def test_how_far_it_is_is_seen_whoever_does_it(client: TestClient, app: lowq.Lowq) -> None:
    text = parse(client.get("/queues/Orders").text).text
    for words in ("from 4 to 8 shards", "by ada", "1 of 4 shards", "of 40 jobs"):
        assert words in text
    assert "being resharded" in parse(client.get("/").text).text
    found = client.get("/api/v1/queues/Orders/reshard").json()
    assert (found["shards_count"], found["to"], found["shards_moved"], found["by"]) == (4, 8, 1, "ada")
    assert 0 < found["jobs_left"] < 40
    assert client.get("/api/v1/overview").json()["queues"]["Orders"]["reshard_to"] == 8
    rows = [row for row in parse(client.get("/queues/Orders/shards").text).every("tr") if row.attributes.get("id")]
    assert len({row.attributes["id"] for row in rows}) == len(rows) == 4 + 8
    assert (sum("new" in row.text for row in rows), "moved" in rows[0].text) == (8, True)
    queue = app.queue("Orders")
    resting = [str(number) for number in range(40) if queue.why(str(number)).reason == "resharding"]
    text = parse(client.get(f"/queues/Orders/job?id={resting[0]}").text).text
    assert "its queue is being given another number of shards" in text


@pytest.mark.usefixtures("under_way")
def test_what_another_has_begun_is_gone_on_with_to_that_number_alone(client: TestClient, app: lowq.Lowq) -> None:
    answer = send(client, 6, sure="1")
    assert answer.status_code == 400
    assert "being resharded to 8 shards" in parse(answer.text).text
    answer = client.post("/api/v1/queues/Orders/reshard", json={"shards_count": 6})
    assert (answer.status_code, "lowq reshard Orders 8" in answer.json()["error"]) == (409, True)
    task = ended(client, send(client, 8).headers["location"].rpartition("/")[2])
    assert (task["state"], task["done"]) == ("done", 4)
    assert app.queue("Orders").stats().length == 40


def test_a_task_that_is_cancelled_says_that_the_queue_is_between(
    client: TestClient, app: lowq.Lowq, queue: lowq.Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    def endless(*_args: Any, **_options: Any) -> Iterator[ReshardProgress]:
        progress = next(reshard(app, "Orders", 8))
        while True:
            yield progress

    monkeypatch.setattr("lowq_web.background.reshard", endless)
    started = client.post("/api/v1/queues/Orders/reshard", json={"shards_count": 8}).json()["id"]
    client.post(f"/api/v1/tasks/{started}/cancel", json={})
    assert ended(client, started)["state"] == "cancelled"
    page = client.get(f"/tasks/{started}").text
    assert "stays between two numbers of shards" in parse(page).text
    monkeypatch.undo()
    again = client.post("/queues/Orders/reshard", data=form_on(page))
    assert ended(client, again.headers["location"].rpartition("/")[2])["state"] == "done"
