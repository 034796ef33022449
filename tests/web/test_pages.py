"""Pages: what they show, what they do, and what hostile text may not do to them."""

import html
import json
import re
import threading
import time
import uuid
from typing import Any
from urllib.parse import quote

import pytest
from starlette.testclient import TestClient

import lowq
import lowq_web
from lowq.inspection.registry import RunningBatch
from lowq.store.keys import shard_prefix
from lowq_web import text
from lowq_web.pages.nodes import _alone
from lowq_web.pages.search import like
from lowq_web.redaction import MASK, redactor
from lowq_web.retry_clock import coming_retries
from lowq_web.stats_cache import StatsCache
from tests.round_trips import counted_round_trips
from tests.rows import case
from tests.waiting import PATIENCE, until
from tests.web.confirming import act, confirm
from tests.web.conftest import OWN, Open, dashboard

HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "javascript:alert(1)",
    "' onmouseover='alert(1)",
    "{{ 7*7 }}{% raw %}",
    "a/b/../c",
    "100%25%2f%",
    "a b+c&d=e?f#g",
    "..",
    "\x00\x01\x1b[31m\r\n",
    "right\u202eto\u2066left\u200b",
    "日本語 🎉",
    "</textarea></title><svg onload=alert(1)>",
]


def visible(page: str) -> str:
    """What remains of a page without its tags."""
    return html.unescape(re.sub(r"<[^>]*>", " ", page))


def tags(page: str) -> list[str]:
    return re.findall(r"<[^!/][^>]*>", page)


def wait(client: TestClient, location: str) -> str:
    """The page of a task, once it has ended."""

    def page() -> str:
        text = client.get(location).text
        return "" if "http-equiv" in text else text

    return until(page, "end of the task")


def undecodable(app: lowq.Lowq, job_id: str, payload: bytes) -> None:
    """A job as only something foreign can have written it, in a queue "Orders" of one shard."""
    app.register("Orders", 1)
    app.client.command("ZADD", shard_prefix("lowq", "Orders", 0) + f"payloads:{job_id}", 5, payload)
    app.client.command("ZADD", shard_prefix("lowq", "Orders", 0) + "due", time.time() - 1, job_id)


class TestHostileText:
    def test_an_id_is_shown_linked_and_acted_on_as_it_is(self) -> None:
        for job_id in HOSTILE:
            with case(job_id), dashboard() as (app, client):
                queue = app.queue("Orders", 3)
                queue.push({"id": job_id, "payload": job_id, "delay": 60})
                before = client.get("/queues/Orders?state=due").text
                page = client.get("/queues/Orders").text
                assert text.printable(job_id) in visible(page)
                assert len(re.findall(r"<(script|img|svg)", page)) == len(re.findall(r"<(script|img|svg)", before))

                link = re.search(r'class="id" href="([^"]+)"', page)
                assert link
                answer = client.get(html.unescape(link[1]))
                assert answer.status_code == 200
                shown = visible(answer.text)
                assert text.printable(job_id) in shown
                assert "due in" in shown
                assert "Run now" in answer.text

                box = re.search(r'name="id" value="([^"]+)"', page)
                assert box
                moved = client.post(
                    "/queues/Orders/act", data={"do": "perform_now selected", "id": html.unescape(box[1])}
                )
                assert moved.status_code == 303
                assert "1 job made due now." in visible(client.get(moved.headers["location"]).text)
                assert queue.stats().due == 1

    def test_payloads_errors_reasons_and_names_are_only_text(self) -> None:
        for word in HOSTILE:
            with case(word), dashboard() as (app, client):
                queue = app.queue("Orders", 3)
                queue.push({"id": "plain", "payload": {word: [word]}})
                quiet = [tag for path in ("/queues/Orders", "/audit") for tag in tags(client.get(path).text)]
                act(client, "/queues/Orders/act", do="bury selected", id="plain", reason=word)
                app.note(word, word, word, 1, {word: [word]})
                for path in (
                    "/queues/Orders?state=morgue",
                    "/queues/Orders/job?id=plain",
                    "/audit",
                    f"/search?id={quote(word)}",
                ):
                    page = client.get(path, follow_redirects=True).text
                    names = {re.split(r"[\s>]", tag[1:])[0] for tag in tags(page)}
                    assert names <= {re.split(r"[\s>]", tag[1:])[0] for tag in quiet} | {
                        "b",
                        "pre",
                        "ol",
                        "li",
                        "code",
                        "h3",
                        "section",
                        "time",
                        "dl",
                        "dt",
                        "dd",
                        "div",
                        "ul",
                    }
                    assert not re.search(r"<[^>]*\son\w+\s*=", re.sub(r'"[^"]*"', '""', page))
                    assert not any(char in page for char in "\x00\x1b\u202e\u2066")

    def test_queues_of_any_name_have_pages(self) -> None:
        names = ["100%", "..", ".", "<b>", "naïve", "a?b#c", "x&y=1", '"q"', "shards"]
        for name in names:
            with case(name), dashboard() as (app, client):
                app.queue(name, 2).push({"id": 1, "delay": 60})
                links = [
                    html.unescape(link)
                    for link in re.findall(r'<th scope="row"><a href="([^"]+)"', client.get("/").text)
                ]
                assert len(links) == 1
                page = client.get(links[0])
                assert page.status_code == 200
                shown = html.escape(name).replace("&quot;", "&#34;")
                assert f'<h1 data-queue="{shown}">{shown}' in page.text
                assert client.get(links[0] + "/shards").status_code == 200
                assert client.post(links[0] + "/pause").status_code == 303
                assert app.queue(name).stats().paused

    def test_ids_that_are_no_text_are_listed_and_not_mistaken(self, client: TestClient, app: lowq.Lowq) -> None:
        queue = app.queue("Orders", 1)
        queue.push({"id": "fine", "delay": 60})
        app.client.command("ZADD", shard_prefix("lowq", "Orders", 0) + "due", time.time() + 60, b"raw\xff\xfe")
        page = client.get("/queues/Orders")
        assert page.status_code == 200
        assert "raw\\udcff\\udcfe" in visible(page.text)
        assert "raw\\udcff\\udcfe" in visible(client.get("/queues/Orders/job?id=raw%FF%FE").text)

    def test_a_megabyte_is_cut_and_can_be_had_whole(self, client: TestClient, app: lowq.Lowq) -> None:
        app.queue("Orders", 3).push({"id": "big", "payload": {"text": "<" * 1_000_000}})
        page = client.get("/queues/Orders/job?id=big").text
        assert len(page) < 60_000
        link = re.search(r'href="([^"]*payload[^"]*)"', page)
        assert link
        whole = client.get(html.unescape(link[1]))
        assert whole.headers["content-type"] == "text/plain; charset=utf-8"
        assert whole.text.count("<") == 1_000_000
        assert len(client.get("/queues/Orders").text) < 60_000

    def test_undecodable_payloads_are_shown_as_what_they_are(self, client: TestClient, app: lowq.Lowq) -> None:
        undecodable(app, "a", b"<b>\xff\x00")
        assert "undecodable payload: <b>\\\\xff" in visible(client.get("/queues/Orders/job?id=a").text)


class TestRedaction:
    def test_fields_are_masked_wherever_they_are(self, browse: Open, app: lowq.Lowq) -> None:
        app.queue("Orders", 1).push(
            {
                "id": "a",
                "payload": {
                    "card_number": "42424242",
                    "Password": "hunter2",
                    "items": [{"card_cvc": 77777777, "n": 5}],
                },
            }
        )
        undecodable(app, "b", b'{"card_number": "99999999"')
        client = browse(redact=["card_*", "password"])
        for path in ("/queues/Orders", "/queues/Orders/job?id=a", "/api/v1/queues/Orders/job?id=a",
                     "/api/v1/queues/Orders/jobs", "/queues/Orders/job?id=b",
                     "/queues/Orders/payload?id=a&state=due&n=0",
                     "/queues/Orders/payload?id=b&state=due&n=0"):  # fmt: skip
            answer = client.get(path)
            assert answer.status_code == 200
            assert not re.search("42424242|hunter2|77777777|99999999", answer.text), path

    def test_a_function_decides_and_its_failure_hides(self, browse: Open, app: lowq.Lowq) -> None:
        app.queue("Orders", 1).push([{"id": "a", "payload": {"keep": 11}}, {"id": "b", "payload": ["secret"]}])
        client = browse(redact=lambda payload: {"keep": payload["keep"]})
        page = client.get("/queues/Orders").text
        assert "11" in page
        assert "secret" not in page

    def test_the_environment_names_fields(self, browse: Open, app: lowq.Lowq, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("LOWQ_WEB_REDACT", "a, token")
        app.queue("Orders", 1).push({"id": "x", "payload": {"token": "hush", "b": 1}})
        assert "hush" not in browse().get("/queues/Orders").text

    @pytest.mark.parametrize(
        "redact", [["pin"], lambda payload: {"token": payload.get("token"), "b": payload["b"]}, []]
    )
    def test_the_fields_of_the_environment_are_masked_whatever_else_is(
        self, browse: Open, app: lowq.Lowq, monkeypatch: pytest.MonkeyPatch, redact: Any
    ) -> None:
        monkeypatch.setenv("LOWQ_WEB_REDACT", "token")
        app.queue("Orders", 1).push({"id": "x", "payload": {"token": "hush", "pin": 4711, "b": "seen"}})
        page = browse(redact=redact).get("/queues/Orders").text
        assert ("hush" in page, "seen" in page, "4711" in page) == (False, True, redact == [])

    def test_what_is_nested_too_deep_is_masked_whole(self) -> None:
        payload: Any = {"card": "4242"}
        for _ in range(5000):
            payload = [payload]
        assert redactor(["card"])(payload) == MASK

    def test_nonsense_is_refused(self, browse: Open) -> None:
        for nonsense in ("password", 5, [5]):
            with pytest.raises(lowq.ConfigError):
                browse(redact=nonsense)


class TestListings:
    @pytest.fixture
    def queue(self, app: lowq.Lowq) -> lowq.Queue:
        queue = app.queue("Orders", 3)
        queue.push({"id": f"job-{n:03d}", "payload": n, "delay": 1000 + 100 * n} for n in range(120))
        return queue

    def ids(self, page: str) -> list[str]:
        last = page.rpartition("<tbody>")[2]
        return re.findall(r'<a class="id"[^>]*>([^<]+)</a>', last)

    def test_pages_hold_every_job_once_while_jobs_move(self, client: TestClient, queue: lowq.Queue) -> None:
        found, address = [], "/queues/Orders?state=scheduled"
        for turn in range(10):
            page = client.get(address).text
            found += self.ids(page)
            queue.push({"id": f"new-{turn}", "delay": 1})  # comes in before what was seen
            queue.delete(f"job-{turn:03d}")  # was seen already
            link = re.search(r'href="([^"]+)" rel="next"', page)
            if link is None:
                break
            address = html.unescape(link[1])
        assert found == [f"job-{n:03d}" for n in range(120)]

    def test_filters_and_orders(self, client: TestClient, queue: lowq.Queue) -> None:
        rows: list[tuple[str, list[str]]] = [
            ("order_by=id&reverse=1", ["job-119", "job-118"]),
            ("order_by=id&min=job-050", ["job-050", "job-051"]),
            ("match=*7", ["job-007", "job-017"]),
            ("match=job-01?&reverse=1", ["job-019", "job-018"]),
            ("reverse=1", ["job-119", "job-118"]),
            ("min=%2B5950s", ["job-050", "job-051"]),
            ("order_by=retry_count", ["job-000", "job-001"]),
        ]
        for query, expected in rows:
            with case(query, expected):
                page = client.get(f"/queues/Orders?{query}").text
                assert self.ids(page)[:2] == expected

    def test_what_makes_no_sense_is_answered(self, client: TestClient, queue: lowq.Queue) -> None:
        for query in ("state=dead", "order_by=size", "min=tomorrow", "after=%21", "reverse=2"):
            answer = client.get(f"/queues/Orders?{query}")
            assert answer.status_code == 400, query
        assert client.get("/queues/Nowhere").status_code == 404
        assert client.get("/queues/Orders/job?id=").status_code == 400

    def test_a_slip_is_shown_where_it_was_typed(self, client: TestClient, queue: lowq.Queue) -> None:
        answer = client.get("/queues/Orders?state=scheduled&match=job-0*&min=banana&max=%2B1d")
        assert answer.status_code == 400
        page = answer.text
        assert "From can't be 'banana': it is a time" in visible(page)
        for typed in ('name="match" value="job-0*"', 'name="min" value="banana"', 'name="max" value="+1d"'):
            assert typed in page
        assert re.search('state=scheduled" title="[^"]*" aria-current="page"', page)
        assert self.ids(page) == []
        assert "Delete all" not in page

    def test_too_many_fields_are_answered(self, client: TestClient, queue: lowq.Queue) -> None:
        for path in ("/", "/queues/Orders", "/search"):
            answer = client.get(f"{path}?{'a=1&' * 101}")
            assert answer.status_code == 400
            assert "too many fields" in answer.text

    def test_the_number_of_fresh_jobs_leads_to_just_these(self, client: TestClient, app: lowq.Lowq) -> None:
        queue = app.queue("Mixed", 2)
        queue.push([{"id": "due"}, {"id": "later", "delay": 60}, {"id": "failed", "delay": 60}])
        prefix = shard_prefix("lowq", "Mixed", queue.shard_of("failed"))
        app.client.command("ZADD", f"{prefix}retries", 0, "failed")
        link = re.search(r'href="([^"]+)" data-field="fresh">(\d+)<', client.get("/").text)
        assert link
        assert link[2] == "2"
        assert sorted(self.ids(client.get(html.unescape(link[1])).text)) == ["due", "later"]

    def test_only_the_last_rows_of_a_scan_can_be_ticked(self, client: TestClient, app: lowq.Lowq) -> None:
        queue = app.queue("Many", 1)
        queue.push({"id": f"{n:05d}", "delay": 9} for n in range(5000))
        bodies = client.get("/queues/Many?match=*9&reverse=1").text.split("<tbody>")
        assert len(bodies) > 3
        assert [body.count('type="checkbox"') for body in bodies[1:]] == [0] * (len(bodies) - 2) + [50]
        assert bodies[-2].count('class="id"') > 0

    def test_a_pattern_that_fits_nothing_here_says_where_else_to_look(
        self, client: TestClient, queue: lowq.Queue
    ) -> None:
        queue.bury(["job-000", "job-001"])
        assert "Look" not in visible(client.get("/queues/Orders?min=2040-01-01").text)
        page = client.get("/queues/Orders?match=gone-*").text
        found = re.search(r'No job matches.\s+Look <a href="([^"]+)">dead</a>\.', page)
        assert found
        assert "running</a>" not in page
        address = html.unescape(found[1])
        assert "state=morgue" in address
        assert "match=gone-" in address
        # From there back: the words name what isn't here.
        assert re.search(r"Look <a [^>]+>queued</a>\.", client.get(address).text)

    def test_a_reader_has_a_column_less(self, browse: Open, queue: lowq.Queue) -> None:
        page = browse(auth=lambda _request: lowq_web.User("bob", "read")).get("/queues/Orders?state=morgue").text
        assert 'colspan="5"' in page
        assert len(re.findall("<th[ >]", page.partition('<table class="jobs')[2])) == 5

    def test_every_state_has_a_tab_with_its_count(self, client: TestClient, queue: lowq.Queue) -> None:
        queue.bury(["job-000", "job-001"])
        queue.perform_now(["job-002", "job-003", "job-004"])
        counts = re.findall(r'(\w+) <span class="count" [^>]*title="([^"]*)"', client.get("/queues/Orders").text)
        assert dict(counts) == {
            "Queued": "118", "Due": "3", "Scheduled": "115", "Retrying": "0", "Running": "0", "Dead": "2",
        }  # fmt: skip

    def test_a_scan_sends_what_it_has_found_again_and_again(self, client: TestClient, app: lowq.Lowq) -> None:
        queue = app.queue("Many", 1)
        queue.push({"id": f"{n:05d}", "delay": 9} for n in range(5000))
        page = client.get("/queues/Many?match=*9&reverse=1").text
        bodies = page.split("<tbody>")[1:]
        assert len(bodies) >= 2
        assert "Looking through" in bodies[0]
        assert self.ids(page)[0] == "04999"
        assert "No job matches" not in page
        assert "No job matches" in client.get("/queues/Many?match=zzz").text


class TestActions:
    @pytest.fixture
    def queue(self, app: lowq.Lowq) -> lowq.Queue:
        queue = app.queue("Orders", 3)
        queue.push({"id": f"job-{n}", "payload": n, "delay": 1000} for n in range(10))
        queue.bury(["job-0", "job-1"], "bad")
        return queue

    def act(self, client: TestClient, **form: Any) -> Any:
        return client.post("/queues/Orders/act", data=form)

    def confirmed(self, client: TestClient, **form: Any) -> Any:
        return act(client, "/queues/Orders/act", **form)

    def test_kick_some(self, client: TestClient, queue: lowq.Queue) -> None:
        answer = self.act(client, do="kick selected", id=["job-0", "job-1", "job-7"], state="morgue")
        assert answer.status_code == 303
        page = client.get(answer.headers["location"]).text
        assert "2 jobs queued again; 1 no longer there." in visible(page).replace("  ", " ")
        assert queue.stats().morgue_length == 0

    @pytest.mark.parametrize("verb", ["bury", "delete"])
    def test_what_destroys_asks_first_with_the_number(self, client: TestClient, queue: lowq.Queue, verb: str) -> None:
        before = queue.stats()
        for what, number in (("selected", 2), ("all", 8)):
            page = self.act(client, do=f"{verb} {what}", id=["job-2", "job-3"])
            assert page.status_code == 200
            assert f"{verb.capitalize()} {number} jobs?" in page.text
        assert queue.stats() == before
        assert self.confirmed(client, do=f"{verb} selected", id=["job-2", "job-3"]).status_code == 303
        assert queue.stats().length == before.length - 2

    def test_all_that_match_run_in_the_background(self, client: TestClient, queue: lowq.Queue, app: lowq.Lowq) -> None:
        app.queue("Orders").push({"id": f"more-{n}", "delay": 500} for n in range(40))
        page = self.act(client, do="delete all", match="more-*", state="scheduled").text
        assert "Delete 40 jobs?" in page
        answer = self.confirmed(client, do="delete all", match="more-*", state="scheduled")
        page = wait(client, answer.headers["location"])
        assert "40 of 40 jobs deleted" in visible(page)
        assert queue.stats().length == 8
        last = app.audit()[0]
        assert (last.who, last.action, last.target, last.count) == ("anonymous", "delete", "Orders", 40)
        assert (last.detail["match"], last.detail["outcome"]) == ("more-*", "done")

    def test_a_task_can_be_cancelled(self, client: TestClient, app: lowq.Lowq, monkeypatch: pytest.MonkeyPatch) -> None:
        queue = app.queue("Long", 1)
        queue.push({"id": n, "delay": 500} for n in range(2000))
        bulk, cancelled = lowq.Queue.bulk, threading.Event()

        def waits(self: lowq.Queue, *args: Any, **options: Any) -> Any:
            for step in bulk(self, *args, **options):
                yield step
                assert cancelled.wait(PATIENCE)

        monkeypatch.setattr(lowq.Queue, "bulk", waits)
        answer = act(client, "/queues/Long/act", do="delete all")
        task = answer.headers["location"]
        assert "Cancel" in client.get(task).text
        client.post(task + "/cancel")
        cancelled.set()
        page = wait(client, task)
        assert "cancelled" in page
        assert 0 < queue.stats().length < 2000

    def test_too_many_tasks_are_refused(
        self, client: TestClient, app: lowq.Lowq, queue: lowq.Queue, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        bulk, over = lowq.Queue.bulk, threading.Event()

        def stuck(self: lowq.Queue, *args: Any, **options: Any) -> Any:
            for step in bulk(self, *args, **options):
                yield step
                over.wait(PATIENCE)

        monkeypatch.setattr(lowq.Queue, "bulk", stuck)
        page = self.act(client, do="kick all", state="morgue").text
        answers = [confirm(client, "/queues/Orders/act", page) for _ in range(5)]
        over.set()
        assert [answer.status_code for answer in answers] == [303] * 4 + [429]
        for answer in answers[:4]:
            wait(client, answer.headers["location"])

    def test_pause_and_resume(self, client: TestClient, queue: lowq.Queue, app: lowq.Lowq) -> None:
        assert "Pause" in client.get("/queues/Orders").text
        client.post("/queues/Orders/pause")
        assert "Resume" in client.get("/queues/Orders").text
        queue.perform_now("job-5")
        assert "paused for" in visible(client.get("/queues/Orders/job?id=job-5").text)
        assert "by anonymous" in visible(client.get("/queues/Orders/job?id=job-5").text)
        client.post("/queues/Orders/resume")
        assert not queue.stats().paused
        assert [entry.action for entry in app.audit()] == ["resume", "pause"]

    def test_nonsense_does_nothing(self, client: TestClient, queue: lowq.Queue) -> None:
        forms: list[dict[str, str]] = [
            {}, {"do": "explode selected", "id": "job-1"}, {"do": "kick everything"},
            {"do": "kick selected", "id": "x" * 600},
        ]  # fmt: skip
        for form in forms:
            with case(form):
                before = queue.stats()
                assert self.act(client, **form).status_code == 400
                assert queue.stats().length == before.length

    @pytest.mark.parametrize(
        ("form", "shown"),
        [
            ({"do": "kick selected"}, "no job is ticked"),
            ({"do": "delete all", "order_by": "id", "min": "job-1", "sure": "1"}, "can be bounded by time"),
            ({"do": "delete all", "min": "banana", "sure": "1"}, "From can't be 'banana'"),
        ],
    )
    def test_a_slip_leads_back_with_what_was_typed(
        self, client: TestClient, queue: lowq.Queue, form: dict[str, str], shown: str
    ) -> None:
        before = queue.stats()
        answer = self.act(client, match="job-*", **form)
        assert answer.status_code == 303
        page = client.get(answer.headers["location"]).text
        assert shown in visible(page.partition('role="alert">')[2].partition("</p>")[0])
        assert 'name="match" value="job-*"' in page
        assert f'name="min" value="{form.get("min", "")}"' in page
        assert queue.stats() == before

    def test_an_id_that_is_named_twice_is_one(self, client: TestClient, queue: lowq.Queue) -> None:
        assert "Delete 1 job?" in self.act(client, do="delete selected", id=["job-5", "job-5"]).text

    def test_what_was_done_is_said_once_and_by_no_address_that_somebody_made_up(
        self, client: TestClient, queue: lowq.Queue
    ) -> None:
        address = self.act(client, do="kick selected", id="job-0", state="morgue").headers["location"]
        assert "1 job queued again." in client.get(address).text.partition('role="status"')[2].partition("</p>")[0]
        assert 'role="status"' not in client.get(address).text
        for forged in ("did=delete&n=500", "said=500+jobs+deleted", "said="):
            page = client.get(f"/queues/Orders?{forged}").text
            assert 'role="status"' not in page
            assert "500 jobs" not in page

    def test_buried_jobs_are_called_that(self, client: TestClient, queue: lowq.Queue) -> None:
        page = self.act(client, do="delete all", state="morgue").text
        assert "All dead jobs of Orders" in " ".join(visible(page).split())
        answer = self.confirmed(client, do="delete all", state="morgue", min="1700000000")
        page = visible(wait(client, answer.headers["location"]))
        assert "Delete dead jobs" in page
        assert "ago" in page.partition("From")[2]
        assert "1700000000" not in page


class TestTheIdPage:
    def test_a_buried_id_and_newer_payloads_of_it_stand_side_by_side(self, client: TestClient, app: lowq.Lowq) -> None:
        queue = app.queue("Orders", 3)
        queue.push({"id": "a", "payload": {"v": 1}, "score": 1})
        queue.bury("a", "no stock")
        queue.push([{"id": "a", "payload": {"v": n}, "score": n} for n in (3, 2)])
        page = visible(client.get("/queues/Orders/job?id=a").text)
        assert "no stock" in page
        assert page.index('"v": 2') < page.index('"v": 3') < page.index('"v": 1')
        assert "leased to nobody" in page

    def test_the_retry_clock_shows_the_coming_times(self, client: TestClient, app: lowq.Lowq) -> None:
        import lowq.testing

        class Orders(lowq.Worker[Any]):
            max_retry_count = 9

            def perform(self, payloads_by_id: dict[str, list[Any]]) -> None:
                raise TimeoutError("the other side is down")

        worker = app.worker(shards_count=2)(Orders)
        app.register("Orders", 2, worker)
        worker.perform_async({"id": "a", "payload": {"v": 1}})
        lowq.testing.drain(worker)
        page = visible(client.get("/queues/Orders/job?id=a").text)
        assert "Retry 1 of 9, due in".lower() in page.lower()
        assert "the other side is down" in page
        assert "Traceback" in page
        assert "Retry clock" in page
        document = client.get("/api/v1/queues/Orders/job?id=a").json()
        assert [retry["number"] for retry in document["retries"]] == [1, 2, 3, 4, 5]
        assert document["retries"][1]["earliest"] == pytest.approx(document["retries"][0]["latest"] + 16)

    def test_who_performs_it_and_for_how_long(self) -> None:
        app = lowq.Lowq(redis_url=f"memory://{uuid.uuid4().hex}", lease_ttl=15)
        over, began = threading.Event(), threading.Event()

        def perform(_self: Any, _payloads_by_id: dict[str, list[Any]]) -> None:
            began.set()
            over.wait(PATIENCE)

        app.worker(shards_count=2)(type("Orders", (lowq.Worker,), {"perform": perform}))
        app.queue("Orders").push({"id": "a", "payload": 1})
        node = lowq.Node(app, threads=3)
        node.start()
        try:
            assert began.wait(PATIENCE)
            client = TestClient(lowq_web.create_app(app), base_url="http://127.0.0.1")

            def detail_with_a_thread() -> str:
                found: str = client.get("/api/v1/queues/Orders/job?id=a").json()["why"]["detail"]
                return found if "thread" in found else ""

            detail = until(detail_with_a_thread, "thread, which comes with the next heartbeat")
            by = rf"node {re.escape(node.name)}, thread [0-2]"
            assert re.fullmatch(rf"taken \S+ s ago by {by}; it performs the batch of a, for .+ now", detail)
            assert "Yes: taken" in " ".join(visible(client.get("/queues/Orders/job?id=a").text).split())
            assert re.search(r"Orders\s+shard [01]", visible(client.get("/nodes").text))
            page = client.get("/queues/Orders/job?id=a").text
            assert f"kill -TTIN {app.nodes()[0].pid}" in page
            anchor = re.search(r'href="/nodes#([^"]+)"', page)
            assert anchor
            assert f'id="{anchor[1]}"' in client.get("/nodes").text
        finally:
            over.set()
            node.stop(5.0)
            app.close()

    def test_an_id_that_is_nowhere_is_404_and_may_have_been_performed(self, client: TestClient, app: lowq.Lowq) -> None:
        app.queue("Orders", 3).push({"id": "b"})
        answer = client.get("/queues/Orders/job?id=a")
        assert answer.status_code == 404
        assert "It may have been performed" in answer.text
        assert 'href="/search?id=a"' in answer.text

    def test_it_asks_redis_for_the_queue_and_once_for_all_the_rest(
        self, browse: Open, app: lowq.Lowq, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        app.queue("Orders", 3).push({"id": "a"})
        # Whether Redis answers is asked by all requests of a while together.
        monkeypatch.setattr(StatsCache, "_measure", lambda _self: None)
        for path in ("/queues/Orders/job?id=a", "/api/v1/queues/Orders/job?id=a", "/queues/Orders/job?id=b"):
            client = browse()  # what it knows of a queue it knows for a moment
            with counted_round_trips() as counted:
                client.get(path)
            assert counted.count == 2, path

    def test_a_retry_that_is_due_already_is_called_due_and_the_others_follow_from_now(self, app: lowq.Lowq) -> None:
        queue = app.queue("Orders", 1)
        queue.push({"id": "a", "perform_at": 1_900_000_000})
        app.client.command("ZADD", shard_prefix("lowq", "Orders", 0) + "retries", 0, "a")
        now = 1_900_000_900.0
        retries = coming_retries(queue.describe("a", now=now))
        assert retries[0].earliest == 1_900_000_000
        assert retries[1].earliest == now + 16
        assert [retry.earliest for retry in retries] == sorted(retry.earliest for retry in retries)
        assert coming_retries(queue.describe("a", now=1_800_000_000.0))[1].earliest == 1_900_000_016

    def test_the_clock_of_an_overdue_retry_says_due(self, client: TestClient, app: lowq.Lowq) -> None:
        app.queue("Orders", 1).push({"id": "a", "perform_at": time.time() - 300})
        app.client.command("ZADD", shard_prefix("lowq", "Orders", 0) + "retries", 0, "a")
        clock = client.get("/queues/Orders/job?id=a").text.partition('<ol class="retries">')[2].partition("</ol>")[0]
        assert " ".join(visible(clock).split()).startswith("1 due 2 about in ")
        assert "ago" not in clock

    def test_a_paused_queue_is_resumed_from_here(self, client: TestClient, browse: Open, app: lowq.Lowq) -> None:
        queue = app.queue("Orders", 3)
        queue.push({"id": "a/b c"})
        queue.pause(by="ann")
        page = client.get("/queues/Orders/job?id=a/b+c").text
        assert "Resume Orders" in page
        box = re.search(r'name="id" value="([^"]+)"', page.partition("/resume")[2])
        assert box
        answer = client.post("/queues/Orders/resume", data={"id": html.unescape(box[1])})
        assert answer.headers["location"].startswith("/queues/Orders/job?id=a%2Fb+c")
        assert "Resumed." in client.get(answer.headers["location"]).text
        assert not queue.stats().paused
        queue.pause()
        reader = browse(auth=lambda _request: lowq_web.User("bob", "read"))
        assert "Resume" not in reader.get("/queues/Orders/job?id=a/b+c").text


class TestSearch:
    def test_one_place_leads_there_several_are_offered(self, client: TestClient, app: lowq.Lowq) -> None:
        app.queue("Orders", 3).push([{"id": "a/1"}, {"id": "both"}])
        app.queue("Refunds", 2).push({"id": "both"})
        assert client.get("/search?id=a%2F1").headers["location"] == "/queues/Orders/job?id=a%2F1"
        page = client.get("/search?id=both").text
        assert "Found in 2 queues" in page
        assert "Not found" in client.get("/search?id=c").text
        assert client.get("/search?id=").headers["location"] == "/"

    def test_blanks_around_an_id_may_be_its_own(self, client: TestClient, app: lowq.Lowq) -> None:
        app.queue("Orders", 3).push([{"id": " a "}, {"id": "b"}])
        assert client.get("/search?id=+a+").headers["location"] == "/queues/Orders/job?id=+a+"
        assert client.get("/search?id=+b+").headers["location"] == "/queues/Orders/job?id=b"

    def test_a_part_of_an_id_leads_to_all_states_that_have_any(self, client: TestClient, app: lowq.Lowq) -> None:
        queue = app.queue("Orders", 3)
        queue.push([{"id": "gone-1"}, {"id": "gone-2"}, {"id": "here"}])
        queue.bury(["gone-1", "gone-2"])
        app.register("Empty", 2)
        page = client.get("/search?id=gone").text
        assert "Orders: queued, dead" in " ".join(visible(page).split()).replace(" ,", ",")
        assert "Empty" not in page
        link = re.search(r'<a href="([^"]+)">dead</a>', page)
        assert link
        assert client.get(html.unescape(link[1])).text.count('class="id"') >= 2

    def test_the_pattern_that_a_search_is_turned_into(self) -> None:
        rows: list[tuple[str, str | None]] = [
            ("4*", "4*"), ("gone", "*gone*"), ("a[1]", r"*a\[1\]*"), ("x" * 100, None),
        ]  # fmt: skip
        for typed, pattern in rows:
            with case(typed, pattern):
                assert like(typed) == pattern


class TestUnworked:
    """A warning at the top of the dashboard when nobody works a queue that has jobs."""

    def test_a_queue_without_a_node(self, client: TestClient, app: lowq.Lowq) -> None:
        app.queue("Orders", 2).push([{"id": 1}, {"id": 2, "delay": 60}])
        app.register("Empty", 2)
        words = " ".join(visible(client.get("/").text.partition("<dl")[0]).split())
        assert "No worker for Orders : 2 jobs wait for one, the oldest for" in words
        assert "0 nodes alive" in words
        assert "Empty" not in words

    def test_shards_without_an_owner_for_longer_than_a_deploy_takes(self, client: TestClient, app: lowq.Lowq) -> None:
        app.register("Orders", 8)
        for shard in range(8):
            app.client.command("SET", shard_prefix("lowq", "Orders", shard) + "lease", "abcdef:1", "EX", 3600)
            app.client.command("ZADD", shard_prefix("lowq", "Orders", shard) + "due", time.time() - 61, f"job-{shard}")
        assert "no owner" not in visible(client.get("/").text.partition("<dl")[0])
        app.client.command("DEL", shard_prefix("lowq", "Orders", 3) + "lease")
        client.post("/queues/Orders/pause")  # whoever acts sees the latest figures
        words = " ".join(visible(client.get("/").text.partition("<dl")[0]).split())
        assert re.search(r"1 of 8 shards of Orders has no owner: 1 job waits there, the oldest for 1 min", words)


class TestNodes:
    def test_buttons_send_commands_to_the_node(self, client: TestClient, app: lowq.Lowq) -> None:
        assert client.post("/nodes/command", data={"node": "nobody", "do": "quiet"}).status_code == 404
        app.worker(shards_count=2)(type("Orders", (lowq.Worker,), {"perform": lambda _self, _payloads: None}))
        node = lowq.Node(app, threads=2)
        node.start()
        try:
            until(lambda: [one.name for one in app.nodes()] == [node.name], "its first heartbeat")
            page = client.get("/nodes").text
            assert node.name in page
            assert "idle" in page
            stop = client.post("/nodes/command", data={"node": node.name, "do": "stop"}).text
            assert "Stop this node?" in stop
            assert "cut off, and performed again" in stop
            assert not node.stopping.is_set()
            assert client.post("/nodes/command", data={"node": node.name, "do": "explode"}).status_code == 400
            quiet = client.post("/nodes/command", data={"node": node.name, "do": "quiet"})
            assert "Let this node go quiet?" in quiet.text
            assert "can't be undone here" in quiet.text
            assert "It is the last node that isn't quiet" in html.unescape(quiet.text)
            assert not app.nodes()[0].quiet
            quiet = client.post("/nodes/command", data={"node": node.name, "do": "quiet", "sure": "1"})
            assert f"Sent quiet to {node.name}." in client.get(quiet.headers["location"]).text
            until(lambda: "badge amber" in client.get("/nodes").text, "a quiet node on its page")
            assert "1 alive, 1 quiet" in client.get("/nodes").text
            assert "1 alive, 1 quiet" in " ".join(visible(client.get("/").text).split())
            assert client.post("/nodes/command", data={"node": node.name, "do": "stop", "sure": "1"}).status_code == 303
            assert node.stopping.wait(PATIENCE)
        finally:
            node.stop(5.0)
        assert [entry.action for entry in app.audit()] == ["stop", "quiet"]

    def test_a_node_is_reloaded_after_a_question_unless_it_can_not_be(self, client: TestClient, app: lowq.Lowq) -> None:
        for name, says in (("a", {}), ("b", {"reload_refusal": "ask its supervisor"}), ("c", {"kind": "consumer"})):
            app.client.command("HSET", "lowq:v1:nodes", name, f"{time.time()} 60 0 {json.dumps(says)}")
        assert client.get("/nodes").text.count('value="reload"') == 1
        question = client.post("/nodes/command", data={"node": "a", "do": "reload"}).text
        assert "Reload this node?" in question
        assert "It is the last node" not in question
        done = client.post("/nodes/command", data={"node": "a", "do": "reload", "sure": "1"})
        assert "Sent reload to a." in client.get(done.headers["location"]).text
        for name, why in (("b", "ask its supervisor"), ("c", "it is a consumer")):
            refused = client.post("/nodes/command", data={"node": name, "do": "reload", "sure": "1"})
            assert refused.status_code == 400
            assert f"{name} can't be reloaded: {why}" in html.unescape(refused.text)
        assert [(entry.action, entry.target) for entry in app.audit()] == [("reload", "a")]

    def test_a_node_that_waits_is_marked(
        self, client: TestClient, app: lowq.Lowq, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(type(app), "nodes", lambda _app: [lowq.NodeInfo("a", 0.0, 90.0, waiting=True)])
        assert re.search(r'class="badge red"[^>]*>waiting<', client.get("/nodes").text)
        assert client.get("/api/v1/nodes").json()["nodes"][0]["waiting"] is True

    def test_a_node_that_alone_works_a_queue_is_named_before_it_goes_quiet(self) -> None:
        mine = lowq.NodeInfo("a", 0.0, 0.0, queues=("Mail", "Orders"))
        other = lowq.NodeInfo("b", 0.0, 0.0, queues=("Orders",))
        assert _alone(mine, [other]) == ["Mail"]
        assert _alone(other, [mine]) == []

    def test_the_time_of_a_perform_is_as_of_the_heartbeat(
        self, client: TestClient, app: lowq.Lowq, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        activities = tuple(
            RunningBatch(queue="Orders", shard=1, ids=["x"], count=1, seconds=seconds) for seconds in (0.5, 400.0)
        )
        node = lowq.NodeInfo("host:1:abc", time.time() - 4.4, 4.4, threads=2, performing=activities)
        monkeypatch.setattr(lowq.Lowq, "nodes", lambda _self: [node])
        page = client.get("/nodes").text
        assert '<td class="right">0.5 s</td>' in page
        # One that takes very long stands out.
        assert '<td class="right warm">6 min 40 s</td>' in page


def test_redis_away_is_said_and_found_again(browse: Open) -> None:
    client = TestClient(lowq_web.create_app(lowq.Lowq(redis_url="redis://127.0.0.1:1/0")), base_url="http://127.0.0.1")
    for path in ("/", "/queues/Orders", "/nodes"):
        answer = client.get(path)
        assert answer.status_code == 503
        assert "Redis does not answer" in answer.text
    assert client.get("/api/v1/queues").json()["error"]
    assert client.post("/queues/Orders/pause", headers=OWN).status_code == 503


def test_a_search_shows_no_totals_as_if_they_were_hits(client: TestClient, app: lowq.Lowq) -> None:
    queue = app.queue("Orders", 2)
    queue.push({"id": f"job-{n}", "delay": 60} for n in range(37))
    queue.bury(f"job-{n}" for n in range(14))
    for path in ("/search?id=nothing", "/queues/Orders?match=nothing*"):
        page = visible(
            client.get(path).text.partition("<main")[2].rpartition("Nothing here")[0] or client.get(path).text
        )
        shown = page.partition("Look")[2]
        assert "dead" in shown
        assert not re.search(r"\b(23|14|37)\b", shown.partition("lowq")[0]), shown
