"""The page of an id: its payloads, errors and crashes, its coming retries, and what may be done to it."""

import itertools
import json
import re
import threading
import time
from datetime import datetime
from typing import Any

import pytest
from starlette.testclient import TestClient

import lowq
from lowq.node.node import Node
from tests.rules.web.hand import Hand, heartbeat
from tests.rules.web.shown import Element, Reader
from tests.waiting import PATIENCE, until

TRACEBACK = """Traceback (most recent call last):
  File "/srv/shop/sync.py", line 48, in perform
TimeoutError: the warehouse did not answer <b>"""
PAGE = "/queues/Orders/job?id=order-7"


@pytest.fixture
def hand(app: lowq.Lowq) -> Hand:
    return Hand(app, "Orders", 3)


def place(page: Element, heading: str) -> Element:
    """The part of the page about the id waiting, in flight, or in the morgue."""
    (found,) = (
        part for part in page.every("section") if any(head.text.startswith(heading) for head in part.every("h2"))
    )
    return found


def payloads(part: Element) -> list[tuple[str, Any]]:
    """Scores and payloads as they are shown."""
    items = [item for item in part.every("li") if list(item.every("pre"))]
    return [(next(item.every("b")).text, json.loads(next(item.every("pre")).lines)) for item in items]


def headings(page: Element) -> list[str]:
    """Of the places that an id is in."""
    return [head.text for head in page.every("h2") if head.text.startswith(("Queued", "Running", "Dead"))]


def buttons(page: Element) -> list[str]:
    (main,) = page.every("main")
    return [button.text for button in main.every("button")]


def at(moment: str) -> float:
    return datetime.fromisoformat(moment).timestamp()


def test_payloads_come_in_the_order_of_their_scores(hand: Hand, reader: Reader) -> None:
    later = time.time() + 500
    for score in (30, -2, 7.5, 1_700_000_000):
        hand.push("order-7", later, {"version": score}, score)
    part = place(reader.page(PAGE), "Queued")
    assert payloads(part) == [
        ("-2", {"version": -2}), ("7.5", {"version": 7.5}), ("30", {"version": 30}),
        ("1700000000", {"version": 1_700_000_000}),
    ]  # fmt: skip
    times = [time.attributes["datetime"][:10] for item in part.every("li") for time in item.every("time")]
    assert times == ["2023-11-14"], "a score that looks like a time is shown as one too"
    assert at(part.facts["Due"].moment) == pytest.approx(later, abs=0.01)
    assert (part.facts["Payloads"].number, part.facts["Attempt"].text) == (4, "1 of 26")


def test_an_id_that_failed_has_its_error_and_its_coming_retries(app: lowq.Lowq, reader: Reader) -> None:
    app.worker(shards_count=3, max_retry_count=7)(type("Orders", (lowq.Worker,), {"perform": lambda *_: None}))
    app.registrations.enter("Orders", 3, app.workers["Orders"])
    hand, now = Hand(app, "Orders", 3), time.time()
    hand.push("order-7", now - 900)
    hand.fail("order-7", now - 900, now + 800, retry_count=2, error=TRACEBACK)
    page = reader.page(PAGE)
    part = place(page, "Queued")
    assert headings(page) == ["Queued retrying"]
    assert part.facts["Attempt"].text == "4 of 8"
    assert next(part.every("pre")).lines == TRACEBACK
    (clock,) = (items for items in part.every("ol") if not list(items.every("pre")))
    times = [at(item.moment) for item in clock.every("li") if list(item.every("time"))]
    # Each follows from the one before: n**4 + 15 + random(0..30) * (n + 1), here in the middle.
    gaps = [later - earlier for earlier, later in itertools.pairwise([now, *times])]
    assert gaps == [pytest.approx(gap, abs=0.01) for gap in (800, *(n**4 + 15 + 15 * (n + 1) for n in (3, 4, 5, 6)))]


def test_in_flight_newly_pushed_and_in_the_morgue_each_have_their_own(hand: Hand, reader: Reader) -> None:
    now = time.time()
    hand.push("order-7", now - 900, "old", 1)
    hand.queue.bury("order-7", TRACEBACK, now=now - 800)
    hand.push("order-7", now - 700, "running", 2)
    hand.take(["order-7"], now - 700)
    hand.push("order-7", now + 700, "new", 3)
    page = reader.page(PAGE)
    assert headings(page) == ["Running", "Queued scheduled", "Dead"]
    assert payloads(place(page, "Running")) == [("2", "running")]
    assert payloads(place(page, "Queued")) == [("3", "new")]
    morgue = place(page, "Dead")
    assert payloads(morgue) == [("1", "old")]
    assert next(morgue.every("pre")).lines == TRACEBACK
    assert at(morgue.facts["Dead since"].moment) == pytest.approx(now - 800, abs=0.01)
    assert not list(place(page, "Queued").every("pre"))[1:], "an error that is not its own"
    assert buttons(page) == ["Run now", "Retry now", "Bury", "Cancel", "Delete"]


def test_its_shard_and_owner_are_shown_and_its_crashes(hand: Hand, reader: Reader) -> None:
    now, index = time.time(), hand.index("order-7")
    for job_id in hand.ids(index, 4):
        hand.push(job_id, now - 300)
    hand.push("order-7", now - 200)
    facts = reader.page(PAGE).facts
    assert (facts["Shard"].text, facts["Owner"].text) == (str(index), "nobody")
    assert "5 queued" in facts["In its shard"].text
    assert facts["In its shard"].lasts(300)
    hand.own(index, now, "zzzzzz999999")
    page = reader.page(PAGE)
    assert page.facts["Owner"].text == "zzzzzz999999"
    assert "behind 4" in page.find("section", has="Why is it not running?").text
    assert "Crashes" not in page.facts
    hand.take(["order-7", *hand.ids(index, 4)], now)
    hand.die(index)
    hand.own(index, now, "cccccccccccc")
    assert place(reader.page(PAGE), "Queued").facts["Crashes"].text == "1"


def test_who_performs_it_and_what_waits_behind_is_shown_with_three_of_its_ids(
    app: lowq.Lowq, reader: Reader, client: TestClient
) -> None:
    hand, now = Hand(app, "Orders"), time.time()
    ids = [f"stuck-{n}" for n in range(5)]
    for job_id in ids:
        hand.push(job_id, now - 100)
    hand.own(0, now - 90)
    hand.take(ids, now - 90)
    hand.push("waits", now)
    batch = {"queue": "Orders", "shard": 0, "ids": ids[:3], "count": 5, "seconds": 44.0}
    heartbeat(app, "shop:4711:aaaaaa", now, host="shop", pid=4711, threads=2, shards={"Orders": [0]},
              performing=[None, batch], written_off=1)  # fmt: skip
    page = reader.page("/queues/Orders/job?id=stuck-0")
    assert "kill -TTIN 4711" in page.text
    (anchor,) = {link.link.partition("#")[2] for link in page.every("a") if "/nodes#" in link.link}
    assert f'id="{anchor}"' in client.get("/nodes").text
    assert "written off: 1" in client.get("/nodes").text
    why = client.get("/api/v1/queues/Orders/job?id=stuck-0").json()["why"]
    assert "thread 1; it performs the batch of stuck-0, stuck-1, stuck-2 and 2 more, for 44 s now" in why["detail"]
    links = {link.text: link.link for link in reader.page("/queues/Orders/job?id=waits").every("a")}
    assert (links["stuck-1"], links["and 2 more"]) == ("/queues/Orders/job?id=stuck-1", "/queues/Orders?state=taken")
    why = client.get("/api/v1/queues/Orders/job?id=waits").json()["why"]
    assert (why["reason"], why["in_flight"], why["in_flight_ids"]) == ("busy", 5, ids[:3])


def test_where_a_running_id_is_in_its_code_is_asked_of_its_node(app: lowq.Lowq, client: TestClient) -> None:
    begun, go = threading.Event(), threading.Event()

    @app.worker(shards_count=1, queue_name="Orders")
    def orders(payloads_by_id: dict[str, list[Any]]) -> None:
        begun.set()
        go.wait(PATIENCE)

    app.queue("Orders").push([{"id": "<b>7"}, {"id": "waits"}])
    node = Node(app, threads=1)
    node.start()
    try:
        assert begun.wait(PATIENCE)
        until(lambda: any(found.name == node.name for found in app.nodes()), "heartbeat of the node")
        page = Reader(client).page("/queues/Orders/job?id=%3Cb%3E7")
        link = page.find("a", has="Where it is in its code").link
        # Its thread may not be there yet, and its node may take long to answer.
        until(lambda: "go.wait" in client.get(link).text, "the line in which it waits")
        found = Reader(client).page(link)
        calls = re.findall(r"in (\w+)", found.find("pre").text)
        assert calls.index("wait") < calls.index("orders") < calls.index("_bootstrap"), "the innermost comes first"
        assert node.name in found.text
        assert [button.text for button in found.find("main").every("button")] == ["Cancel"]
        stack = client.get("/api/v1/queues/Orders/stack?id=%3Cb%3E7").json()["stack"]
        assert (stack["node"], "go.wait" in stack["text"]) == (node.name, True)
        for job_id in ("waits", "nowhere"):
            assert client.get(f"/api/v1/queues/Orders/stack?id={job_id}").json() == {"stack": None}
            assert "Nothing performs it now" in Reader(client).page(f"/queues/Orders/stack?id={job_id}", 404).text
    finally:
        go.set()
        node.stop(PATIENCE)


def test_a_node_that_does_not_say_where_it_is_is_named(
    app: lowq.Lowq, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its release is older, or what it performs blocks its process."""
    ask = lowq.Queue.stack
    monkeypatch.setattr(lowq.Queue, "stack", lambda queue, job_id: ask(queue, job_id, timeout=0))
    hand, now = Hand(app, "Orders"), time.time()
    hand.push("order-7", now - 100)
    hand.own(0, now - 90)
    hand.take(["order-7"], now - 90)
    heartbeat(app, "shop:4711:aaaaaa", now, host="shop", pid=4711, threads=1)
    page = Reader(client).page("/queues/Orders/stack?id=order-7")
    assert "shop:4711:aaaaaa has not answered" in page.of_role("alert")
    assert client.get("/api/v1/queues/Orders/stack?id=order-7").json()["stack"] == {
        "node": "shop:4711:aaaaaa", "thread": None, "text": ""
    }  # fmt: skip


def test_of_a_job_in_the_hands_of_a_consumer_nothing_is_said_that_would_stop_its_process(
    app: lowq.Lowq, client: TestClient
) -> None:
    """Who has no handler for TTIN is suspended by it."""
    queue = app.queue("mail", shards_count=1)
    queue.push([{"id": "a"}])
    with queue.consumer(session="importer") as consumer:
        (job,) = consumer.take(timeout=PATIENCE)
        page = client.get("/queues/mail/job?id=a").text
        assert re.search(r"(by|which) consumer session:", page)
        assert "TTIN" not in page
        job.ack()


def test_of_many_payloads_the_first_are_shown_and_the_others_folded(client: TestClient, app: lowq.Lowq) -> None:
    for count, folded in ((5, 0), (6, 1), (60, 55)):
        job_id = f"job-{count}"
        app.queue("Many", 1).push({"id": job_id, "payload": {"n": n}, "score": n, "delay": 60} for n in range(count))
        page = Reader(client).page(f"/queues/Many/job?id={job_id}").find("main")
        assert [len(list(details.every("pre"))) for details in page.every("details")] == ([folded] if folded else [])
        assert len(list(page.every("pre"))) == count
