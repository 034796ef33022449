"""Pages: what hostile text may not do to them, what they list, find and do, and who is shown what."""

import html
import re
import time
from typing import Any
from urllib.parse import quote

import pytest
from starlette.testclient import TestClient

import lowq
import lowq_web
from lowq.node.node import Node
from lowq.store.keys import nodes_key, shard_prefix
from lowq_web import text
from lowq_web.stats_cache import StatsCache
from tests.round_trips import counted_round_trips
from tests.rows import case
from tests.rules.web.confirming import act, ended
from tests.rules.web.conftest import OWN, Open, dashboard
from tests.rules.web.hand import Hand, heartbeat
from tests.rules.web.shown import Reader, parse
from tests.waiting import PATIENCE, until

HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "{{ 7*7 }}{% raw %}' onmouseover='alert(1)",
    "a/b/../c?d=e&f#g+ 100%25%2f%",
    "..",
    "\x00\x01\x1b[31m\r\n",
    "right\u202eto\u2066left\u200b 日本語",
]


def add_foreign(app: lowq.Lowq, job_id: str, payload: bytes) -> None:
    """A job as only something foreign can have written it, in a queue "Orders" of one shard."""
    app.registrations.enter("Orders", 1)
    prefix = shard_prefix("lowq", "Orders", 0)
    app.client.command("ZADD", f"{prefix}payloads:{job_id}", 5, payload)
    app.client.command("ZADD", f"{prefix}due", time.time() - 1, job_id)


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

    def test_an_id_of_bytes_that_are_no_text_has_a_page_and_can_be_deleted_there(
        self, client: TestClient, app: lowq.Lowq
    ) -> None:
        prefix = shard_prefix("lowq", "Orders", 0)
        app.registrations.enter("Orders", 1)
        app.client.command("ZADD", prefix.encode() + b"payloads:raw\xff", 5, b'"v"')
        app.client.command("ZADD", prefix + "due", time.time() - 1, b"raw\xff")
        page = Reader(client).page("/queues/Orders/job?id=raw%FF")
        (box,) = (box for box in page.find("form", has="Delete").every("input") if box.attributes.get("name") == "id")
        act(client, "/queues/Orders/act", do="delete selected", id=box.attributes["value"])
        assert app.queue("Orders").stats().length == 0

    def test_payloads_errors_reasons_and_names_are_only_text(self) -> None:
        for word in HOSTILE:
            with case(word), dashboard() as (app, client):
                app.queue("Orders", 3).push({"id": "plain", "payload": {word: [word]}})
                act(client, "/queues/Orders/act", do="bury selected", id="plain", reason=word)
                app.note(word, word, word, 1, {word: [word]})
                for path in ("/queues/Orders?state=morgue", "/queues/Orders/job?id=plain", "/audit",
                             "/jobs?state=morgue", f"/jobs?state=morgue&error={quote(word)}",
                             f"/search?id={quote(word)}"):  # fmt: skip
                    page = client.get(path, follow_redirects=True).text
                    assert not list(parse(page).find("main").every("script", "img", "textarea"))
                    assert not re.search(r"<[^>]*\son\w+\s*=", re.sub(r'"[^"]*"', '""', page))
                    assert not any(char in page for char in "\x00\x1b\u202e\u2066")

    def test_queues_of_any_name_have_pages(self) -> None:
        for name in ["100%", "..", '<b>"q"', "naïve", "a?b#c", "x&y=1", "shards"]:
            with case(name), dashboard() as (app, client):
                app.queue(name, 2).push({"id": 1, "delay": 60})
                (row,) = Reader(client).page("/").table("Queue", "Latency")
                link = row["Queue"].link
                assert name in Reader(client).page(link).find("h1").text
                assert client.get(link + "/shards").status_code == 200
                assert client.post(link + "/pause").status_code == 303
                assert app.queue(name).stats().paused

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
        for path in ("queues/Orders/jobs", "jobs"):
            found = client.get(f"/api/v1/{path}?payload=Password:hunter2").json()
            assert found.get("jobs", found.get("found")) == [], "nobody finds what is masked"
        app.queue("Orders").push({"id": "dead", "payload": payload})
        app.queue("Orders").bury(["dead"])
        for path in ("/queues/Orders?", "/jobs?state=morgue&"):
            assert "No job matches." in client.get(f"{path}payload=Password:hunter2").text, path
        for path in paths:
            answer = client.get(path)
            assert answer.status_code == 200, path
            assert not re.search("42424242|hunter2|77777777|99999999|66666666", answer.text), path

    def test_a_function_decides_and_its_failure_hides_and_the_environment_counts_whatever_else_is(
        self, browse: Open, app: lowq.Lowq, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("LOWQ_WEB_REDACT", "a, token")
        app.queue("Orders", 1).push({"id": "x", "payload": {"token": "hush", "pin": "p1n", "b": "seen"}})
        app.queue("Orders", 1).push({"id": "y", "payload": ["odd"]})
        rows: list[tuple[Any, bool, bool]] = [
            ({}, True, True), ({"redact": ["pin"]}, False, True),
            ({"redact": lambda payload: {"token": payload["token"], "b": payload["b"]}}, False, False),
        ]  # fmt: skip
        for options, shows_pin, shows_odd in rows:
            with case(options):
                page = browse(**options).get("/queues/Orders").text
                assert ("hush" in page, "seen" in page) == (False, True)
                assert ("p1n" in page, "odd" in page) == (shows_pin, shows_odd)
        for nonsense in ("password", [5]):
            with pytest.raises(lowq.ConfigError):
                browse(redact=nonsense)


def test_a_slip_in_a_filter_is_shown_where_it_was_typed(client: TestClient, app: lowq.Lowq) -> None:
    app.queue("Orders", 3).push({"id": "job-0", "delay": 1000})
    page = Reader(client).page("/queues/Orders?state=scheduled&match=job-0*&min=banana&max=%2B1d", 400)
    assert "banana" in page.of_role("alert")
    typed = {box.attributes.get("name", ""): box.attributes.get("value") for box in page.every("input")}
    assert (typed["match"], typed["min"], typed["max"], typed["state"]) == ("job-0*", "banana", "+1d", "scheduled")
    assert not [button for button in page.every("button") if button.text.startswith("Delete")]
    for query in ("state=dead", "order_by=size", "after=%21", "reverse=2"):
        assert client.get(f"/queues/Orders?{query}").status_code == 400, query
    for path in ("/queues/Orders/job?id=", "/queues/Orders/job?id=" + "x" * 513, f"/?{'a=1&' * 101}"):
        assert client.get(path).status_code == 400, path[:50]
    assert client.get("/queues/Nowhere").status_code == 404


class TestActions:
    @pytest.fixture
    def queue(self, app: lowq.Lowq) -> lowq.Queue:
        queue = app.queue("Orders", 3)
        queue.push({"id": f"job-{n}", "payload": n, "delay": 1000} for n in range(10))
        queue.bury(["job-0", "job-1"], "bad")
        return queue

    def post(self, client: TestClient, **form: Any) -> Any:
        return client.post("/queues/Orders/act", data=form)

    def test_nonsense_does_nothing_and_a_slip_leads_back_with_what_was_typed(
        self, client: TestClient, queue: lowq.Queue
    ) -> None:
        before = queue.stats()
        for form in ({}, {"do": "explode selected", "id": "job-1"}, {"do": "kick selected", "id": "x" * 600}):
            with case(form):
                assert self.post(client, **form).status_code == 400
        for form, shown in (
            ({"do": "kick selected"}, "ticked"), ({"do": "delete all", "payload": "a:1"}, "payloads"),
            ({"do": "delete all", "order_by": "id", "min": "job-1", "sure": "1"}, "time"),
            ({"do": "delete all", "min": "banana", "sure": "1"}, "banana"),
        ):  # fmt: skip
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
        for again in (address, "/queues/Orders?did=delete&n=500", "/queues/Orders?said=500+jobs"):
            assert reader.page(again).of_role("status") == ""


def test_the_page_of_an_id_asks_redis_for_the_queue_and_once_for_all_the_rest(
    browse: Open, app: lowq.Lowq, monkeypatch: pytest.MonkeyPatch
) -> None:
    app.queue("Orders", 3).push({"id": "a"})
    # Whether Redis answers is asked by all requests of a while together.
    monkeypatch.setattr(StatsCache, "_measure", lambda _self: None)
    for path in ("/queues/Orders/job?id=a", "/api/v1/queues/Orders/job?id=a", "/queues/Orders/job?id=b"):
        client = browse()  # what it knows of a queue it knows for a moment
        with counted_round_trips() as counted:
            client.get(path)
        assert counted.count == 2, path


class TestSearch:
    def test_one_place_leads_there_several_are_offered(self, client: TestClient, app: lowq.Lowq) -> None:
        app.queue("Orders", 3).push([{"id": "a/1"}, {"id": "both"}, {"id": " a "}, {"id": "b"}])
        app.queue("Refunds", 2).push({"id": "both"})
        for typed, job_id in (("a%2F1", "a%2F1"), ("+a+", "+a+"), ("+b+", "b")):  # spaces may be its own
            assert client.get(f"/search?id={typed}").headers["location"] == f"/queues/Orders/job?id={job_id}"
        links = [link.link for link in Reader(client).page("/search?id=both").find("main").every("a")]
        assert {f"/queues/{name}/job?id=both" for name in ("Orders", "Refunds")} <= set(links)
        assert client.get("/search?id=").headers["location"] == "/"
        page = Reader(client).page("/queues/Orders/job?id=gone", 404)
        assert "/search?id=gone" in [link.link for link in page.find("main").every("a")]

    def test_a_part_of_an_id_leads_to_all_jobs_that_have_it(self, client: TestClient, app: lowq.Lowq) -> None:
        queue, reader = app.queue("Orders", 3), Reader(client)
        queue.push([{"id": "4-gone[1]"}, {"id": "4-gone[1]x"}, {"id": "here"}])
        queue.bury("4-gone[1]")
        for typed, found in (("gone[1]", 2), ("4*", 2), ("gone1", 0)):
            with case(typed):
                (link,) = reader.page(f"/search?id={quote(typed)}").find("main").every("a")
                rows = reader.page(link.link).table("Id", "Payloads")
                assert len([row for row in rows if list(row["Id"].every("a"))]) == found

    def test_a_field_of_a_payload_leads_to_the_jobs_that_have_it(self, client: TestClient, app: lowq.Lowq) -> None:
        app.queue("Orders", 3).push([{"id": "customer:1", "payload": {"customer": 2}}])
        assert client.get("/search?id=customer:1").headers["location"] == "/queues/Orders/job?id=customer%3A1"
        found = client.get("/search?id=customer:2").headers["location"]
        assert found.startswith("/jobs?payload=customer%3A2")
        assert "No job has the id customer:2." in Reader(client).page(found).of_role("status")


def test_queues_and_shards_that_nobody_works_are_warned_of(client: TestClient, app: lowq.Lowq) -> None:
    def banners() -> str:
        client.post("/queues/Orders/resume")  # whoever acts sees the latest figures
        page = parse(client.get("/").text)
        return next(part for part in page.every() if part.attributes.get("id") == "part-banners").text

    hand, now = Hand(app, "Orders", 8), time.time()
    for shard in range(8):
        hand.push(hand.ids(shard, 1)[0], now - 61)
    app.registrations.enter("Empty", 2)
    assert re.search("1 problem .*Orders waits, and no node is running. 8 jobs wait, the oldest for 1 min", banners())
    assert "Empty" not in banners()
    for shard in range(8):
        hand.own(shard, now)
    assert "Orders gets no thread. 8 jobs wait" in banners()
    hand.die(3)
    assert "Orders has shards without an owner: 1 of 8 has none. 1 job waits" in banners()


def test_queues_with_the_same_trouble_share_a_line(client: TestClient, app: lowq.Lowq) -> None:
    for number in range(12):
        app.queue(f"queue-{number:02d}", 1).push({"id": 1})
    page = parse(client.get("/").text)
    (line,) = next(part for part in page.every() if part.attributes.get("id") == "part-banners").every("li")
    assert line.text.startswith("12 queues wait, and no node is running: queue-00, queue-01,")
    assert "and 6 more. 12 jobs wait" in line.text
    assert len(list(line.every("a"))) == 7


class TestNodes:
    def send(self, client: TestClient, node: str, what: str, **more: str) -> Any:
        return client.post("/nodes/command", data={"node": node, "do": what, **more})

    def test_buttons_send_commands_to_the_node(self, client: TestClient, app: lowq.Lowq) -> None:
        app.worker(shards_count=2)(type("Orders", (lowq.Worker,), {"perform": lambda _self, _payloads: None}))
        node = Node(app, threads=2)
        node.start()
        try:
            until(lambda: [one.name for one in app.nodes()] == [node.name], "its first heartbeat")
            channel = nodes_key(app.config.namespace)
            until(lambda: app.client.command("PUBSUB", "SHARDNUMSUB", channel, key=channel)[1], "that it listens")
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
            until(lambda: app.nodes()[0].shards == {}, "no shard of a quiet node")
            app.queue("Orders").push("a")
            assert app.queue("Orders").stats().length == 1
            assert self.send(client, node.name, "unquiet").status_code == 303, "without a question"
            until(lambda: app.queue("Orders").stats().processed == 1, "what came while it was quiet")
            until(lambda: not app.nodes()[0].quiet, "a node that is quiet no more")
            assert self.send(client, node.name, "stop", sure="1").status_code == 303
            assert node.stopping.wait(PATIENCE)
        finally:
            node.stop(5.0)
        assert [entry.action for entry in app.audit()] == ["stop", "unquiet", "quiet"]

    def test_stop_of_a_supervised_node_names_the_supervisor_that_replaces_it(
        self, client: TestClient, app: lowq.Lowq
    ) -> None:
        by = "it is a process of a supervisor: send HUP to that one, pid 4711 on shop-1"  # as `lowq run` says it
        own = {"pid": 4711, "started_at": time.time(), "version": "1.0"}
        heartbeat(app, "a", time.time(), reload_refusal=by, host="shop-1", supervisor=own)
        heartbeat(app, "b", time.time(), reload_refusal=by, host="shop-1", supervisor=own)
        heartbeat(app, "other", time.time(), host="shop-2", supervisor=own)
        heartbeat(app, "c", time.time())
        page = parse(self.send(client, "a", "stop").text).text
        for words in ("process 4711 on shop-1, starts another", "2 nodes", "kill -HUP 4711", "kill -TERM 4711"):
            assert words in page
        assert "can't be started again" not in page
        alone = parse(self.send(client, "c", "stop").text).text
        assert ("supervisor" in alone, "can't be started again" in alone) == (False, True)

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
        refused = self.send(client, "c", "unquiet")
        assert (refused.status_code, "is a consumer, which stays quiet" in html.unescape(refused.text)) == (400, True)
        assert [(entry.action, entry.target) for entry in app.audit()] == [("reload", "a")]

    def test_queues_that_it_alone_works_are_named_before_a_node_goes_quiet(
        self, client: TestClient, app: lowq.Lowq
    ) -> None:
        heartbeat(app, "a", time.time(), queues=["Mail", "Orders"])
        heartbeat(app, "b", time.time(), queues=["Orders"])
        heartbeat(app, "c", time.time(), queues=["Mail"], quiet=True)
        for name, alone in (("a", True), ("b", False)):
            asked = parse(self.send(client, name, "quiet").text).find("main").text
            assert ("Mail" in asked, "Orders" in asked, "last node" in asked) == (alone, False, False)


def test_redis_away_is_said() -> None:
    client = TestClient(lowq_web.create_app(lowq.Lowq(redis_url="redis://127.0.0.1:1/0")), base_url="http://127.0.0.1")
    for path in ("/", "/queues/Orders", "/nodes"):
        assert client.get(path).status_code == 503
    assert client.get("/api/v1/queues").json()["error"]
    assert "does not answer" in client.get("/healthz").json()["error"]
    assert client.post("/queues/Orders/pause", headers=OWN).status_code == 503


def test_running_jobs_are_cancelled_from_their_page_and_from_the_list_after_a_question() -> None:
    with dashboard() as (app, client):
        hand, reader = Hand(app, "Orders"), Reader(client)
        for name in ("one", "two"):
            hand.push(name, time.time() - 1)
        hand.take(["one", "two"], time.time())
        buttons = [button.attributes["value"] for button in reader.page("/queues/Orders/job?id=one").every("button")]
        assert "cancel" in [value for value in buttons if value]
        (box, _) = (row["Select"] for row in reader.page("/queues/Orders?state=taken").table("Id", "Payloads"))
        assert list(box.every("input"))
        for form, expected in (
            ({"do": "cancel", "id": "one"}, "1 job cancelled; 1 running, told to end"),
            ({"do": "cancel selected", "id": ["one", "two"], "state": "taken"}, "2 jobs cancelled; 2 running"),
        ):
            with case(form):
                asked = client.post("/queues/Orders/act", data=form)
                assert "nothing of it runs again" in asked.text
                moved = act(client, "/queues/Orders/act", **form)
                assert expected in reader.page(moved.headers["location"]).of_role("status")
        asked = client.post("/queues/Orders/act", data={"do": "cancel all", "state": "taken"})
        assert "All running jobs of" in asked.text
        moved = act(client, "/queues/Orders/act", do="cancel all", state="taken")
        assert ended(client, moved.headers["location"].rpartition("/")[2])["done"] == 2
        assert "it was cancelled, and has not ended yet" in client.get("/queues/Orders/job?id=one").text
        assert [(entry.action, entry.count) for entry in app.audit()] == [("cancel", 2), ("cancel", 2), ("cancel", 1)]
