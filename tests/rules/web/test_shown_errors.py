"""The page of errors: what fails, over all queues."""

import re
import time
from collections.abc import Sequence
from typing import Any

import pytest
from starlette.testclient import TestClient

import lowq
from lowq.metrics.error_groups import error_fingerprint
from lowq.store import Call
from lowq.store.keys import error_groups_key
from lowq_web.pages.errors import HEIGHT, sparkline
from tests.rules.web.shown import Reader
from tests.waiting import until

ODD = "</th><script>alert('1')</script>"


def record(app: lowq.Lowq, queue: str, name: str, count: int, job_id: str, text: str, ago: float = 0.0) -> None:
    app.queue(queue, 1).push("x")
    now = repr(time.time() - ago)
    app.client.run("record_errors", error_groups_key("lowq", queue), now, 200, 3600, name, count, job_id, text)


def test_groups_of_all_queues_are_shown(app: lowq.Lowq, client: TestClient) -> None:
    record(app, "Orders", "f1", 3, "order 7", "ValueError: no order 7", ago=7200.0)
    record(app, "Mails", "f1", 1200, ODD, f"E: {ODD}")
    page = Reader(client).page("/errors")
    rows = page.table("Error", "Queue", "Count", "Last 24 hours", "Last", "First", "Failed last", "Jobs")
    assert [row["Error"].text for row in rows] == [f"E: {ODD}", "ValueError: no order 7"]
    assert [row["Queue"].text for row in rows] == ["Mails", "Orders"]
    assert [row["Count"].text for row in rows] == ["1,200", "3"]
    assert rows[1]["Failed last"].link == "/queues/Orders/job?id=order+7"
    assert rows[1]["Last"].lasts(7200)
    assert [len(list(row["Last 24 hours"].every("path"))) for row in rows] == [1, 1]

    (only,) = Reader(client).page("/errors?queue=Orders").table("Error")
    assert only["Error"].text == "ValueError: no order 7"
    assert client.get("/errors?queue=nobody").status_code == 404
    assert [group["text"] for group in client.get("/api/v1/errors").json()["errors"]] == [
        f"E: {ODD}", "ValueError: no order 7"
    ]  # fmt: skip
    assert [group["count"] for group in client.get("/api/v1/queues/Orders/errors").json()["errors"]] == [3]


def test_what_fails_most_comes_first_or_what_failed_last(app: lowq.Lowq, reader: Reader) -> None:
    record(app, "Orders", "f1", 1000, "a", "E: yesterday", ago=25 * 3600.0)
    record(app, "Orders", "f2", 7, "a", "E: most", ago=7200.0)
    record(app, "Mails", "f1", 2, "a", "E: latest", ago=60.0)
    record(app, "Orders", "f3", 2, "a", "E: before", ago=3700.0)
    page = reader.page

    def shown(path: str) -> list[str]:
        return [row["Error"].text for row in page(path).table("Error")]

    assert shown("/errors") == ["E: most", "E: latest", "E: before", "E: yesterday"]
    assert shown("/errors?sort=last") == ["E: latest", "E: before", "E: most", "E: yesterday"]
    assert shown("/errors?queue=Orders") == ["E: most", "E: before", "E: yesterday"]
    links = {link.text: link.attributes["href"] for link in page("/errors?queue=Orders").every("a")}
    assert links["Last"] == "/errors?queue=Orders&sort=last"
    assert links["Last 24 hours"] == "/errors?queue=Orders"


def test_groups_of_many_queues_are_read_together(app: lowq.Lowq, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(45):
        record(app, f"Q{number}", "f1", 1, "a", f"E: of {number}")
    sent: list[int] = []
    run_many = app.client.run_many

    def counted(calls: Sequence[Call]) -> list[Any]:
        sent.append(len(calls))
        return run_many(calls)

    monkeypatch.setattr(app.client, "run_many", counted)
    assert {group.text for group in app.error_groups()} == {f"E: of {number}" for number in range(45)}
    assert sent == [20, 20, 5]


def test_the_page_of_a_queue_leads_to_its_errors_also_to_those_that_are_too_many_for_one_page(
    app: lowq.Lowq, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lowq_web.pages.errors.MOST", 1)
    record(app, "Orders", "f1", 3, "a", "E: one")
    record(app, "Mails", "f1", 2, "a", "E: other")
    page = reader.page("/errors")
    assert [row["Error"].text for row in page.table("Error")] == ["E: one"]
    assert "1 more group is not shown. The page of a queue leads to its own errors" in page.text
    facts = reader.page("/queues/Mails").find("p", has="times")
    links = {link.text: link.attributes["href"] for link in facts.every("a")}
    (only,) = reader.page(links["errors"]).table("Error")
    assert only["Error"].text == "E: other"


def test_a_sparkline_has_a_bar_for_each_hour_with_failures() -> None:
    assert sparkline([0] * 24) == sparkline([]) == ""
    assert sparkline([0, 1, 4]) == f"M3 12h2v4h-2zM6 0h2v{HEIGHT}h-2z"
    assert sparkline([1, 1000]).startswith("M0 15h2v1h-2z"), "one is seen beside a thousand"


@pytest.fixture
def groups(app: lowq.Lowq, client: TestClient) -> TestClient:
    """A queue with four dead jobs, three of a group, and none that waits for a retry."""
    queue = app.queue("Orders", 2)
    queue.push({"id": str(n)} for n in range(4))
    queue.bury(["0", "1", "2"], f"ValueError: no order {ODD}")
    queue.bury("3", "TimeoutError: too slow")
    name = error_fingerprint(f"ValueError: no order {ODD}")
    app.client.run(
        "record_errors", error_groups_key("lowq", "Orders"), "", 200, 3600, name, 3, "0", f"ValueError: no order {ODD}"
    )
    return client


def test_a_group_leads_to_its_jobs_and_those_to_what_is_done_to_them(app: lowq.Lowq, groups: TestClient) -> None:
    reader = Reader(groups)
    (row,) = reader.page("/errors").table("Error", "Jobs")
    retries, dead = (link.link for link in row["Jobs"].every("a"))
    assert "No job matches." in reader.page(retries).text
    page = reader.page(dead)
    assert [next(item["Id"].every("a")).text for item in page.table("Id", "Dead since")] == ["0", "1", "2"]
    assert f"Failed like ValueError: no order {ODD} any error" in page.text
    fields = {"state": "morgue", "error_group": error_fingerprint(f"ValueError: no order {ODD}")}
    asked = groups.post("/queues/Orders/act", data={**fields, "do": "kick all"})
    assert "Retry 3 jobs now?" in asked.text
    assert "that failed like" in asked.text
    form = dict(re.findall('<input type="hidden" name="([^"]+)" value="([^"]*)"', asked.text))
    assert form["error_group"] == fields["error_group"]
    started = groups.post("/queues/Orders/act", data={**form, "do": "kick all"})
    assert started.status_code == 303, started.text
    until(lambda: app.queue("Orders").stats().morgue_length == 1, "the group to be kicked")
    assert app.queue("Orders").peek("3", "morgue") is not None


def test_the_api_acts_on_a_group(app: lowq.Lowq, groups: TestClient) -> None:
    name = error_fingerprint("ValueError: no order 'x'")
    assert name != error_fingerprint("TimeoutError: too slow")
    group = groups.get("/api/v1/errors").json()["errors"][0]["fingerprint"]
    wanted = {"state": "morgue", "error_group": group}
    count = groups.post("/api/v1/queues/Orders/count", json={"action": "delete", "all": wanted}).json()
    assert count["count"] == 3
    listed = groups.get("/api/v1/queues/Orders/jobs", params=wanted).json()["jobs"]
    assert sorted(job["id"] for job in listed) == ["0", "1", "2"]
    assert len(groups.get("/api/v1/jobs", params=wanted).json()["found"]) == 3
    started = groups.post("/api/v1/queues/Orders/actions", json={"action": "delete", "all": wanted})
    assert started.status_code == 202
    until(lambda: app.queue("Orders").stats().morgue_length == 1, "the group to be deleted")
    for wrong in ("", "x", "A" * 12):
        refused = groups.post("/api/v1/queues/Orders/count", json={"action": "delete", "all": {"error_group": wrong}})
        assert refused.status_code == 400
