"""Pages: what hostile text may not do to them, what they list, find and do, and who is shown what."""

import html
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
from lowq.store.keys import shard_prefix
from lowq_web import text
from lowq_web.stats_cache import StatsCache
from tests.round_trips import counted_round_trips
from tests.rows import case
from tests.rules.web.confirming import act
from tests.rules.web.conftest import OWN, Open, dashboard
from tests.rules.web.hand import Hand, heartbeat
from tests.rules.web.shown import Element, Reader, id_in, parse
from tests.waiting import PATIENCE, until

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


def read_only(browse: Open) -> TestClient:
    client = browse(auth=lambda _request: lowq_web.User("bob", "read"))
    client.headers.update(OWN)
    return client


def add_foreign(app: lowq.Lowq, job_id: str | bytes, payload: bytes = b"1", at: float = -1) -> None:
    """A job as only something foreign can have written it, in a queue "Orders" of one shard."""
    app.register("Orders", 1)
    prefix = shard_prefix("lowq", "Orders", 0)
    if isinstance(job_id, str):
        app.client.command("ZADD", f"{prefix}payloads:{job_id}", 5, payload)
    app.client.command("ZADD", f"{prefix}due", time.time() + at, job_id)


class TestHostileText:
    def test_an_id_is_shown_linked_and_acted_on_as_it_is(self) -> None:
        for job_id in HOSTILE:
            with case(job_id), dashboard() as (app, client):
                queue, reader = app.queue("Orders", 3), Reader(client)
                queue.push({"id": job_id, "payload": job_id, "delay": 60})
                page = reader.page("/queues/Orders")
                (row,) = page.table("Id", "Payloads")
                assert not list(page.find("main").every("script", "img"))
                for shown in (row["Id"], reader.page(row["Id"].link).find("h1")):
                    assert " ".join(text.printable(job_id).split()) in shown.text
                (box,) = (box for box in row["Select"].every("input"))
                form = {"do": "perform_now selected", "id": box.attributes["value"]}
                moved = client.post("/queues/Orders/act", data=form)
                assert re.findall(r"\d+", reader.page(moved.headers["location"]).of_role("status")) == ["1"]
                assert queue.stats().due == 1

    def test_payloads_errors_reasons_and_names_are_only_text(self) -> None:
        for word in HOSTILE:
            with case(word), dashboard() as (app, client):
                app.queue("Orders", 3).push({"id": "plain", "payload": {word: [word]}})
                act(client, "/queues/Orders/act", do="bury selected", id="plain", reason=word)
                app.note(word, word, word, 1, {word: [word]})
                for path in ("/queues/Orders?state=morgue", "/queues/Orders/job?id=plain", "/audit",
                             f"/search?id={quote(word)}"):  # fmt: skip
                    page = client.get(path, follow_redirects=True).text
                    assert not list(parse(page).find("main").every("script", "img", "textarea"))
                    assert not re.search(r"<[^>]*\son\w+\s*=", re.sub(r'"[^"]*"', '""', page))
                    assert not any(char in page for char in "\x00\x1b\u202e\u2066")

    def test_queues_of_any_name_have_pages(self) -> None:
        for name in ["100%", "..", ".", "<b>", "naïve", "a?b#c", "x&y=1", '"q"', "shards"]:
            with case(name), dashboard() as (app, client):
                app.queue(name, 2).push({"id": 1, "delay": 60})
                (row,) = Reader(client).page("/").table("Queue", "Latency")
                link = row["Queue"].link
                assert name in Reader(client).page(link).find("h1").text
                assert client.get(link + "/shards").status_code == 200
                assert client.post(link + "/pause").status_code == 303
                assert app.queue(name).stats().paused

    def test_what_is_no_text_is_shown_as_what_it_is(self, client: TestClient, app: lowq.Lowq) -> None:
        add_foreign(app, "a", b"<b>\xff\x00")
        add_foreign(app, b"raw\xff\xfe", at=60)
        reader = Reader(client)
        assert "raw\\udcff\\udcfe" in reader.page("/queues/Orders").text
        assert "raw\\udcff\\udcfe" in reader.page("/queues/Orders/job?id=raw%FF%FE").text
        assert "undecodable payload: <b>\\\\xff" in reader.page("/queues/Orders/job?id=a").text

    def test_a_megabyte_is_cut_and_can_be_had_whole(self, client: TestClient, app: lowq.Lowq) -> None:
        app.queue("Orders", 3).push({"id": "big", "payload": {"text": "<" * 1_000_000}})
        page = client.get("/queues/Orders/job?id=big").text
        assert len(page) < 60_000
        (link,) = (link.link for link in parse(page).find("main").every("a") if "payload" in link.link)
        whole = client.get(link)
        assert whole.headers["content-type"] == "text/plain; charset=utf-8"
        assert whole.text.count("<") == 1_000_000
        assert len(client.get("/queues/Orders").text) < 60_000


class TestRedaction:
    def test_fields_are_masked_wherever_they_are(self, browse: Open, app: lowq.Lowq) -> None:
        nested = [{"card_cvc": 77777777, "n": 5}]
        payload = {"card_number": "42424242", "Password": "hunter2", "items": nested}
        app.queue("Orders", 1).push({"id": "a", "payload": payload})
        add_foreign(app, "b", b'{"card_number": "99999999"')
        add_foreign(app, "deep", b'{"card_cvc": 66666666, "a":' * 900 + b"5" + b"}" * 900)
        client = browse(redact=["card_*", "password"])
        paths = ["/queues/Orders", "/api/v1/queues/Orders/jobs"]
        for job_id in ("a", "b", "deep"):
            paths += [f"{base}/queues/Orders/job?id={job_id}" for base in ("", "/api/v1")]
            paths.append(f"/queues/Orders/payload?id={job_id}&state=due&n=0")
        for path in paths:
            answer = client.get(path)
            assert answer.status_code == 200, path
            assert not re.search("42424242|hunter2|77777777|99999999|66666666", answer.text), path

    def test_a_function_decides_and_its_failure_hides(self, browse: Open, app: lowq.Lowq) -> None:
        app.queue("Orders", 1).push([{"id": "a", "payload": {"keep": 11}}, {"id": "b", "payload": ["secret"]}])
        page = browse(redact=lambda payload: {"keep": payload["keep"]}).get("/queues/Orders").text
        assert ("11" in page, "secret" in page) == (True, False)

    def test_the_fields_of_the_environment_are_masked_whatever_else_is(
        self, browse: Open, app: lowq.Lowq, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("LOWQ_WEB_REDACT", "a, token")
        app.queue("Orders", 1).push({"id": "x", "payload": {"token": "hush", "pin": 4711, "b": "seen"}})
        rows: list[tuple[Any, bool]] = [
            ({}, True), ({"redact": []}, True), ({"redact": ["pin"]}, False),
            ({"redact": lambda payload: {"token": payload.get("token"), "b": payload["b"]}}, False),
        ]  # fmt: skip
        for options, shows_pin in rows:
            with case(options):
                page = browse(**options).get("/queues/Orders").text
                assert ("hush" in page, "seen" in page, "4711" in page) == (False, True, shows_pin)

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

    def ids(self, page: Element) -> list[str]:
        return [id_in(row["Id"]) for row in page.table("Id", "Payloads")]

    def test_pages_hold_every_job_once_while_jobs_move(self, client: TestClient, queue: lowq.Queue) -> None:
        found, address, turn = list[str](), "/queues/Orders?state=scheduled", 0
        while address:
            page = Reader(client).page(address)
            found += self.ids(page)
            queue.push({"id": f"new-{turn}", "delay": 1})  # comes in before what was seen
            queue.delete(f"job-{turn:03d}")  # was seen already
            address = next((link.link for link in page.every("a") if link.attributes.get("rel") == "next"), "")
            turn += 1
        assert found == [f"job-{n:03d}" for n in range(120)]

    def test_a_slip_is_shown_where_it_was_typed(self, client: TestClient, queue: lowq.Queue) -> None:
        page = Reader(client).page("/queues/Orders?state=scheduled&match=job-0*&min=banana&max=%2B1d", 400)
        assert "banana" in page.of_role("alert")
        typed = {box.attributes.get("name", ""): box.attributes.get("value") for box in page.every("input")}
        assert (typed["match"], typed["min"], typed["max"], typed["state"]) == ("job-0*", "banana", "+1d", "scheduled")
        assert not list(page.find("main").every("tbody"))
        assert not [button for button in page.every("button") if button.text.startswith("Delete")]

    def test_what_makes_no_sense_is_answered(self, client: TestClient, queue: lowq.Queue) -> None:
        for path, status in (
            ("/queues/Orders?state=dead", 400), ("/queues/Orders?order_by=size", 400),
            ("/queues/Orders?after=%21", 400), ("/queues/Orders?reverse=2", 400), ("/queues/Nowhere", 404),
            ("/queues/Orders/job?id=", 400), ("/queues/Orders/job?id=" + "x" * 513, 400),
            *((f"{path}?{'a=1&' * 101}", 400) for path in ("/", "/queues/Orders", "/search")),
        ):  # fmt: skip
            with case(path):
                assert client.get(path).status_code == status

    def test_the_number_of_fresh_jobs_leads_to_just_these(self, client: TestClient, app: lowq.Lowq) -> None:
        hand, now = Hand(app, "Mixed", 2), time.time()
        hand.push("failed", now - 60)
        hand.fail("failed", now - 60, now + 60)
        hand.push("due", now)
        hand.push("later", now + 60)
        (row,) = Reader(client).page("/").table("Queue", "Fresh")
        assert row["Fresh"].number == 2
        assert sorted(self.ids(Reader(client).page(row["Fresh"].link))) == ["due", "later"]

    def test_a_scan_sends_what_it_has_found_again_and_again_and_only_the_last_rows_can_be_ticked(
        self, client: TestClient, app: lowq.Lowq
    ) -> None:
        app.queue("Many", 1).push({"id": f"{n:05d}", "delay": 9} for n in range(5000))
        page = client.get("/queues/Many?match=*9&reverse=1").text
        bodies = page.split("<tbody>")[1:]
        assert len(bodies) > 2
        assert [body.count('type="checkbox"') for body in bodies] == [0] * (len(bodies) - 1) + [50]
        assert bodies[-2].count('class="id"') > 0
        assert self.ids(parse(page))[0] == "04999"

    def test_a_pattern_that_fits_nothing_here_says_where_else_to_look(
        self, client: TestClient, queue: lowq.Queue
    ) -> None:
        def elsewhere(address: str) -> list[str]:
            cells = [cell for cell in Reader(client).page(address).every("td") if "empty" in cell.classes]
            return [link.link for link in cells[-1].every("a")]

        queue.bury(["job-000", "job-001"])
        assert elsewhere("/queues/Orders?min=2040-01-01") == []
        (there,) = elsewhere("/queues/Orders?match=gone-*")
        assert ("state=morgue" in there, "match=gone-" in there) == (True, True)
        (back,) = elsewhere(there)
        assert ("state=" in back, "match=gone-" in back) == (False, True)


class TestActions:
    @pytest.fixture
    def queue(self, app: lowq.Lowq) -> lowq.Queue:
        queue = app.queue("Orders", 3)
        queue.push({"id": f"job-{n}", "payload": n, "delay": 1000} for n in range(10))
        queue.bury(["job-0", "job-1"], "bad")
        return queue

    def post(self, client: TestClient, **form: Any) -> Any:
        return client.post("/queues/Orders/act", data=form)

    def test_what_destroys_asks_first_with_the_number(self, client: TestClient, queue: lowq.Queue) -> None:
        before = queue.stats()
        for form, number in (
            ({"do": "bury selected", "id": ["job-2", "job-3"]}, 2), ({"do": "delete all"}, 8),
            ({"do": "delete selected", "id": ["job-5", "job-5"]}, 1), ({"do": "delete all", "state": "morgue"}, 2),
        ):  # fmt: skip
            with case(form):
                asked = self.post(client, **form)
                assert (asked.status_code, parse(asked.text).find("h1").numbers) == (200, [number])
        assert queue.stats() == before
        assert act(client, "/queues/Orders/act", do="delete selected", id=["job-2", "job-3"]).status_code == 303
        assert queue.stats().length == before.length - 2

    def test_nonsense_does_nothing(self, client: TestClient, queue: lowq.Queue) -> None:
        before = queue.stats()
        for form in (
            {}, {"do": "explode selected", "id": "job-1"}, {"do": "kick everything"},
            {"do": "kick selected", "id": "x" * 600},
        ):  # fmt: skip
            with case(form):
                assert self.post(client, **form).status_code == 400
                assert queue.stats() == before

    def test_a_slip_leads_back_with_what_was_typed(self, client: TestClient, queue: lowq.Queue) -> None:
        before = queue.stats()
        for form, shown in (
            ({"do": "kick selected"}, "ticked"),
            ({"do": "delete all", "order_by": "id", "min": "job-1", "sure": "1"}, "time"),
            ({"do": "delete all", "min": "banana", "sure": "1"}, "banana"),
            ({"do": "delete all", "payload": "a:1"}, "payloads"),
        ):
            with case(form):
                answer = self.post(client, match="job-*", **form)
                page = parse(client.get(answer.headers["location"]).text)
                assert shown in page.of_role("alert")
                typed = {box.attributes.get("name", ""): box.attributes.get("value") for box in page.every("input")}
                assert (typed["match"], typed["min"]) == ("job-*", form.get("min", ""))
        assert queue.stats() == before

    def test_what_was_done_is_said_once_and_by_no_address_that_somebody_made_up(
        self, client: TestClient, queue: lowq.Queue
    ) -> None:
        reader, kicked = Reader(client), ["job-0", "job-1", "job-7"]
        address = self.post(client, do="kick selected", id=kicked, state="morgue").headers["location"]
        assert queue.stats().morgue_length == 0
        assert re.findall(r"\d+", reader.page(address).of_role("status")) == ["2", "1"], "done, and no longer there"
        for again in (
            address,
            *(f"/queues/Orders?{forged}" for forged in ("did=delete&n=500", "said=500+jobs", "said=")),
        ):
            assert reader.page(again).of_role("status") == ""

    def test_a_paused_queue_says_so_and_is_resumed_from_an_id(
        self, client: TestClient, browse: Open, app: lowq.Lowq, queue: lowq.Queue
    ) -> None:
        queue.push({"id": "a/b c"})
        client.post("/queues/Orders/pause")
        page = Reader(client).page("/queues/Orders/job?id=a/b+c")
        assert "by anonymous" in page.find("p", has="paused for").text
        form = page.find("form", has="Resume")
        fields = {box.attributes["name"]: box.attributes["value"] for box in form.every("input")}
        answer = client.post(form.attributes["action"], data=fields)
        assert answer.headers["location"].startswith("/queues/Orders/job?id=a%2Fb+c")
        assert not queue.stats().paused
        queue.pause()
        assert not list(Reader(read_only(browse)).page("/queues/Orders/job?id=a/b+c").find("main").every("form"))


class TestTheIdPage:
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

            def why() -> Any:
                found = client.get("/api/v1/queues/Orders/job?id=a").json()["why"]
                return found if found["thread"] is not None else None

            detail = until(why, "thread, which comes with the next heartbeat")["detail"]
            by = rf"node {re.escape(node.name)}, thread [0-2]"
            assert re.fullmatch(rf"taken \S+ s ago by {by}; it performs the batch of a, for .+ now", detail)
            page = Reader(client).page("/queues/Orders/job?id=a")
            assert f"kill -TTIN {app.nodes()[0].pid}" in page.text
            (anchor,) = {link.link.partition("#")[2] for link in page.every("a") if "/nodes#" in link.link}
            assert f'id="{anchor}"' in client.get("/nodes").text
        finally:
            over.set()
            node.stop(5.0)
            app.close()

    def test_an_id_that_is_nowhere_is_404_and_leads_to_other_queues(self, client: TestClient, app: lowq.Lowq) -> None:
        app.queue("Orders", 3).push({"id": "b"})
        page = Reader(client).page("/queues/Orders/job?id=a", 404)
        assert "/search?id=a" in [link.link for link in page.find("main").every("a")]

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

    def test_a_retry_that_is_due_already_is_called_due_and_the_others_follow_from_now(
        self, client: TestClient, app: lowq.Lowq
    ) -> None:
        hand, began = Hand(app, "Orders"), time.time()
        hand.push("a", began - 900)
        hand.fail("a", began - 900, began - 300)
        retries = client.get("/api/v1/queues/Orders/job?id=a").json()["retries"]
        assert [retry["number"] for retry in retries] == [1, 2, 3, 4, 5]
        assert retries[0]["earliest"] == pytest.approx(began - 300, abs=0.01)
        assert began + 16 <= retries[1]["earliest"] <= time.time() + 16
        assert retries[2]["earliest"] == pytest.approx(retries[1]["earliest"] + 31)
        clock = next(items for items in Reader(client).page("/queues/Orders/job?id=a").every("ol"))
        assert clock.text.startswith("1 due 2 about in ")
        assert "ago" not in clock.text


class TestSearch:
    def test_one_place_leads_there_several_are_offered(self, client: TestClient, app: lowq.Lowq) -> None:
        app.queue("Orders", 3).push([{"id": "a/1"}, {"id": "both"}, {"id": " a "}, {"id": "b"}])
        app.queue("Refunds", 2).push({"id": "both"})
        for typed, job_id in (("a%2F1", "a%2F1"), ("+a+", "+a+"), ("+b+", "b")):  # spaces may be its own
            assert client.get(f"/search?id={typed}").headers["location"] == f"/queues/Orders/job?id={job_id}"
        links = [link.link for link in Reader(client).page("/search?id=both").find("main").every("a")]
        assert {f"/queues/{name}/job?id=both" for name in ("Orders", "Refunds")} <= set(links)
        assert client.get("/search?id=").headers["location"] == "/"

    def test_a_part_of_an_id_leads_to_all_states_that_have_any_and_shows_no_totals_as_hits(
        self, client: TestClient, app: lowq.Lowq
    ) -> None:
        queue, reader = app.queue("Orders", 3), Reader(client)
        queue.push([{"id": "4-gone[1]"}, {"id": "4-gone[1]x"}, *({"id": f"here-{n}"} for n in range(35))])
        queue.bury(["4-gone[1]", "4-gone[1]x"])
        app.register("Empty", 2)
        for typed, found in (("gone[1]", 2), ("4*", 2), ("gone1", 0)):
            with case(typed):
                main = reader.page(f"/search?id={quote(typed)}").find("main")
                assert not {35, 37} & set(main.numbers)
                links = {link.text: link.link for link in main.every("a")}
                assert not [link for link in links.values() if "/queues/Empty" in link]
                page = reader.page(links["dead"])
                assert len([row for row in page.table("Id", "Payloads") if list(row["Id"].every("a"))]) == found
                assert "queued" in links
        assert not [link for link in reader.page(f"/search?id={'x' * 100}").find("main").every("a") if "?" in link.link]


class TestUnworked:
    """A warning at the top of the dashboard when nobody works a queue that has jobs."""

    def banners(self, client: TestClient) -> str:
        page = parse(client.get("/").text)
        return next(part for part in page.every() if part.attributes.get("id") == "part-banners").text

    def test_a_queue_without_a_node(self, client: TestClient, app: lowq.Lowq) -> None:
        app.queue("Orders", 2).push([{"id": 1}, {"id": 2, "delay": 60}])
        app.register("Empty", 2)
        assert re.search("Orders.* 2 jobs wait", self.banners(client))
        assert "Empty" not in self.banners(client)

    def test_shards_without_an_owner_for_longer_than_a_deploy_takes(self, client: TestClient, app: lowq.Lowq) -> None:
        hand, now = Hand(app, "Orders", 8), time.time()
        for shard in range(8):
            hand.push(hand.ids(shard, 1)[0], now - 61)
            hand.own(shard, now)
        assert "Orders" not in self.banners(client)
        hand.die(3)
        client.post("/queues/Orders/pause")  # whoever acts sees the latest figures
        assert re.search(r"1 of 8 shards of Orders has no owner: 1 job", self.banners(client))


class TestNodes:
    def send(self, client: TestClient, node: str, what: str, **more: str) -> Any:
        return client.post("/nodes/command", data={"node": node, "do": what, **more})

    def test_buttons_send_commands_to_the_node(self, client: TestClient, app: lowq.Lowq) -> None:
        app.worker(shards_count=2)(type("Orders", (lowq.Worker,), {"perform": lambda _self, _payloads: None}))
        node = lowq.Node(app, threads=2)
        node.start()
        try:
            until(lambda: [one.name for one in app.nodes()] == [node.name], "its first heartbeat")
            assert self.send(client, "nobody", "quiet").status_code == 404
            assert self.send(client, node.name, "explode").status_code == 400
            for what in ("stop", "quiet"):
                asked = self.send(client, node.name, what)
                assert (asked.status_code, what in parse(asked.text).find("h1").text.lower()) == (200, True)
            assert "last node" in parse(self.send(client, node.name, "quiet").text).text
            assert not node.stopping.is_set()
            assert not app.nodes()[0].quiet
            quiet = self.send(client, node.name, "quiet", sure="1")
            assert node.name in parse(client.get(quiet.headers["location"]).text).of_role("status")
            until(lambda: app.nodes()[0].quiet, "a quiet node")
            until(lambda: "1 quiet" in Reader(client).page("/").facts["Nodes"].text, "a quiet node on the first page")
            assert self.send(client, node.name, "stop", sure="1").status_code == 303
            assert node.stopping.wait(PATIENCE)
        finally:
            node.stop(5.0)
        assert [entry.action for entry in app.audit()] == ["stop", "quiet"]

    def test_a_node_is_reloaded_after_a_question_unless_it_can_not_be(self, client: TestClient, app: lowq.Lowq) -> None:
        heartbeat(app, "a", time.time())
        heartbeat(app, "b", time.time(), reload_refusal="ask its supervisor")
        heartbeat(app, "c", time.time(), kind="consumer")
        assert client.get("/nodes").text.count('value="reload"') == 1
        assert self.send(client, "a", "reload").status_code == 200
        assert app.audit() == []
        assert self.send(client, "a", "reload", sure="1").status_code == 303
        for name, why in (("b", "ask its supervisor"), ("c", "consumer")):
            refused = self.send(client, name, "reload", sure="1")
            assert (refused.status_code, why in html.unescape(refused.text)) == (400, True)
        assert [(entry.action, entry.target) for entry in app.audit()] == [("reload", "a")]

    def test_a_node_that_alone_works_a_queue_is_named_before_it_goes_quiet(
        self, client: TestClient, app: lowq.Lowq
    ) -> None:
        heartbeat(app, "a", time.time(), queues=["Mail", "Orders"])
        heartbeat(app, "b", time.time(), queues=["Orders"])
        heartbeat(app, "c", time.time(), queues=["Mail"], quiet=True)
        for name, alone in (("a", True), ("b", False)):
            asked = parse(self.send(client, name, "quiet").text).find("main").text
            assert ("Mail" in asked, "Orders" in asked, "last node" in asked) == (alone, False, False)

    def test_a_node_that_waits_is_marked(self, client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(lowq.Lowq, "nodes", lambda _app: [lowq.NodeInfo("a", 0.0, 90.0, waiting=True)])
        assert "waiting" in [element.text for element in Reader(client).page("/nodes").every()]
        assert client.get("/api/v1/nodes").json()["nodes"][0]["waiting"] is True


def test_redis_away_is_said() -> None:
    client = TestClient(lowq_web.create_app(lowq.Lowq(redis_url="redis://127.0.0.1:1/0")), base_url="http://127.0.0.1")
    for path in ("/", "/queues/Orders", "/nodes"):
        assert client.get(path).status_code == 503
    assert client.get("/api/v1/queues").json()["error"]
    assert "does not answer" in client.get("/healthz").json()["error"]
    assert client.post("/queues/Orders/pause", headers=OWN).status_code == 503
