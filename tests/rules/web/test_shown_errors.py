"""The page of errors: what fails, over all queues."""

import time

import pytest
from starlette.testclient import TestClient

import lowq
from lowq.observe.error_groups import error_fingerprint
from lowq.store.keys import error_groups_key
from tests.rules.support import run_script
from tests.rules.web.confirming import confirm, ended
from tests.rules.web.shown import Reader
from tests.waiting import until

ODD = "</th><script>alert('1')</script>"


def record(app: lowq.Lowq, queue: str, name: str, count: int, job_id: str, text: str, ago: float = 0.0) -> None:
    app.queue(queue, 1).push("x")
    now = repr(time.time() - ago)
    run_script(app.client, "record_errors", error_groups_key("lowq", queue), now, 200, 3600, name, count, job_id, text)


def test_groups_of_all_queues_are_shown_by_what_fails_most_or_failed_last(app: lowq.Lowq, reader: Reader) -> None:
    record(app, "Orders", "f1", 1000, "order 7", "E: yesterday", ago=25 * 3600.0)
    record(app, "Orders", "f2", 7, "a", "E: most", ago=7200.0)
    record(app, "Mails", "f4", 2, ODD, f"E: {ODD}", ago=60.0)
    record(app, "Orders", "f3", 2, "a", "E: before", ago=3700.0)

    def shown(path: str) -> list[str]:
        return [row["Error"].text for row in reader.page(path).table("Error")]

    assert shown("/errors") == ["E: most", f"E: {ODD}", "E: before", "E: yesterday"]
    assert shown("/errors?sort=last") == [f"E: {ODD}", "E: before", "E: most", "E: yesterday"]
    assert shown("/errors?queue=Orders") == ["E: most", "E: before", "E: yesterday"]
    reader.page("/errors?queue=nobody", 404)
    rows = reader.page("/errors").table("Error", "Queue", "Count", "Last 24 hours", "Last", "First", "Failed last")
    assert (rows[1]["Queue"].text, rows[3]["Count"].text) == ("Mails", "1,000")
    assert rows[3]["Failed last"].link == "/queues/Orders/job?id=order+7"
    assert rows[0]["Last"].lasts(7200)
    assert [len(list(row["Last 24 hours"].every("path"))) for row in rows] == [1] * 4


def test_the_page_of_a_queue_leads_to_its_errors_also_to_those_that_are_too_many_for_one_page(
    app: lowq.Lowq, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lowq_web.pages.errors.MOST", 1)
    record(app, "Orders", "f1", 3, "a", "E: one")
    record(app, "Mails", "f2", 2, "a", "E: other")
    page = reader.page("/errors")
    assert [row["Error"].text for row in page.table("Error")] == ["E: one"]
    assert "1 more group is not shown" in page.text
    links = {link.text: link.attributes["href"] for link in reader.page("/queues/Mails").every("a")}
    assert [row["Error"].text for row in reader.page(links["errors"]).table("Error")] == ["E: other"]


def test_an_error_of_several_queues_is_one_row_and_its_dead_are_retried_in_all(
    app: lowq.Lowq, client: TestClient, reader: Reader
) -> None:
    error = "TimeoutError: the bank did not answer"
    name = error_fingerprint(error)
    for number, queue in enumerate(("Bills", "Mails", "Orders"), 1):
        record(app, queue, name, number, f"job-{number}", error, ago=3600.0 * number)
        app.queue(queue).push({"id": n} for n in range(5))
        app.queue(queue).bury(range(4), error)
        app.queue(queue).bury(4, "KeyError: 'x'")
    (row,) = reader.page("/errors").table("Error", "Queue", "Count", "Failed last", "Last", "First")
    assert (row["Queue"].text, row["Count"].text, row["Failed last"].text) == ("Bills, Mails, Orders", "6", "job-1")
    assert row["Last"].lasts(3600)
    assert row["First"].lasts(3 * 3600)
    asked = client.post("/jobs/act", data={"state": "morgue", "error_group": name, "do": "kick all"})
    assert "Retry 12 jobs now?" in asked.text
    app.queue("Mails").push({"id": "new"})
    app.queue("Mails").bury("new", error)
    task = confirm(client, "/jobs/act", asked.text).headers["location"].rpartition("/")[2]
    found = ended(client, task)
    assert (found["done"], found["queue"], found["part"]) == (12, None, "")
    assert {(item.queue, item.job.id) for item in app.jobs("morgue")} == {
        ("Bills", "4"), ("Mails", "4"), ("Mails", "new"), ("Orders", "4")
    }  # fmt: skip
    assert "all queues" in reader.page("/tasks").text
    assert "all queues" in reader.page(f"/tasks/{task}").text
    assert "all queues" in reader.page("/audit").text


TEXT = f"ValueError: no order {ODD}"


@pytest.fixture
def group(app: lowq.Lowq) -> str:
    """Of a queue with four dead jobs, and none that waits for a retry, three jobs: their fingerprint."""
    queue, name = app.queue("Orders", 2), error_fingerprint(TEXT)
    queue.push({"id": str(n)} for n in range(4))
    queue.bury(["0", "1", "2"], TEXT)
    queue.bury("3", "TimeoutError: too slow")
    run_script(app.client, "record_errors", error_groups_key("lowq", "Orders"), "", 200, 3600, name, 3, "0", TEXT)
    return name


def test_a_group_leads_to_its_jobs_and_those_to_what_is_done_to_them(
    app: lowq.Lowq, client: TestClient, reader: Reader, group: str
) -> None:
    (row,) = reader.page("/errors").table("Error", "Jobs")
    retries, dead = (link.link for link in row["Jobs"].every("a"))
    assert "No job matches." in reader.page(retries).text
    page = reader.page(dead)
    assert [next(item["Id"].every("a")).text for item in page.table("Id", "Dead since")] == ["0", "1", "2"]
    assert f"Failed like {TEXT} any error" in page.text
    asked = client.post("/queues/Orders/act", data={"state": "morgue", "error_group": group, "do": "kick all"})
    assert "Retry 3 jobs now?" in asked.text
    assert confirm(client, "/queues/Orders/act", asked.text).status_code == 303
    until(lambda: app.queue("Orders").stats().morgue_length == 1, "the group to be kicked")
    assert app.queue("Orders").peek("3", "morgue") is not None


def test_the_api_acts_on_a_group(app: lowq.Lowq, client: TestClient, group: str) -> None:
    (found,) = client.get("/api/v1/errors").json()["errors"]
    assert (found["fingerprint"], found["text"], found["count"]) == (group, TEXT, 3)
    wanted = {"state": "morgue", "error_group": group}
    document = {"action": "delete", "all": wanted}
    assert client.post("/api/v1/queues/Orders/count", json=document).json()["count"] == 3
    listed = client.get("/api/v1/queues/Orders/jobs", params=wanted).json()["jobs"]
    assert sorted(job["id"] for job in listed) == ["0", "1", "2"]
    assert len(client.get("/api/v1/jobs", params=wanted).json()["found"]) == 3
    assert client.post("/api/v1/queues/Orders/actions", json=document).status_code == 202
    until(lambda: app.queue("Orders").stats().morgue_length == 1, "the group to be deleted")
    wrong = {"action": "delete", "all": {"error_group": "A" * 12}}
    assert client.post("/api/v1/queues/Orders/count", json=wrong).status_code == 400
