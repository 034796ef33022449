"""Lists over all queues, filters by what is in jobs, and a first page that stays small with hundreds of queues."""

import time

import pytest
from starlette.testclient import TestClient

import lowq
from lowq.store.keys import shard_prefix
from tests.rules.web.conftest import Open
from tests.rules.web.hand import Hand
from tests.rules.web.shown import Element, Reader
from tests.waiting import NEVER


@pytest.fixture
def hands(app: lowq.Lowq) -> dict[str, Hand]:
    return {name: Hand(app, name, 2) for name in ("Bills", "Mail", "Orders")}


@pytest.fixture
def client(hands: dict[str, Hand], browse: Open) -> TestClient:
    now = time.time()
    for number, (name, hand) in enumerate(hands.items()):
        for n in range(4):
            hand.queue.push({"id": f"dead-{n}", "payload": {"customer": n, "from": name}})
            hand.queue.bury(f"dead-{n}", f"Traceback\nTimeout: {name}", now=now - 100 * n - 10 * number)
        hand.push(f"runs-{name}", now - 5)
        hand.take([f"runs-{name}"], now)
    return browse()


@pytest.fixture
def reader(client: TestClient) -> Reader:
    return Reader(client)


def found(page: Element) -> list[tuple[str, str]]:
    return [(row["Queue"].text, row["Id"].text) for row in page.table("Id", "Queue", "Newest payload")]


def test_the_dead_of_all_queues_come_latest_first(reader: Reader) -> None:
    page = reader.page("/jobs?list=dead")
    names = ("Bills", "Mail", "Orders")
    assert found(page) == [(name, f"dead-{n}") for n in range(4) for name in names]
    first = page.table("Id", "Queue", "Dead since", "Newest payload")[0]
    assert first["Id"].link == "/queues/Bills/job?id=dead-0"
    assert first["Queue"].link == "/queues/Bills?state=morgue"
    assert "Timeout: Bills" in first["Newest payload"].text
    assert "Jobs" in [link.text for link in page.every("a") if link.attributes.get("aria-current") == "page"]


def test_running_jobs_and_retries(reader: Reader, hands: dict[str, Hand], app: lowq.Lowq, browse: Open) -> None:
    assert sorted(found(reader.page("/jobs?list=running"))) == [
        ("Bills", "runs-Bills"), ("Mail", "runs-Mail"), ("Orders", "runs-Orders"),
    ]  # fmt: skip
    assert "No job waits for a retry." in reader.page("/jobs?list=retries").text
    for name, retries in (("Bills", 0), ("Orders", 7)):
        hand = hands[name]
        hand.push("failing", time.time() + 60)
        prefix = shard_prefix("lowq", name, hand.index("failing"))
        app.client.command("ZADD", f"{prefix}retries", retries, "failing")
    page = Reader(browse()).page("/jobs?list=retries")
    rows = [(row["Queue"].text, row["Retry"].text) for row in page.table("Id", "Queue", "Retry")]
    assert rows == [("Orders", "8"), ("Bills", "1")]


def test_filters(reader: Reader) -> None:
    assert {name for name, _ in found(reader.page("/jobs?list=dead&queue=ORD"))} == {"Orders"}
    assert found(reader.page("/jobs?list=dead&payload=customer:2&queue=i")) == [("Bills", "dead-2"), ("Mail", "dead-2")]
    assert {name for name, _ in found(reader.page("/jobs?list=dead&error=timeout:+mail"))} == {"Mail"}
    page = reader.page("/jobs?list=dead&payload=customer:77")
    assert "No job matches." in page.text
    assert "12 jobs looked at" in page.text
    assert "it is a field and its value" in reader.page("/jobs?list=dead&payload=customer", 400).text
    assert "is no cursor" in reader.page("/jobs?list=dead&after=x", 400).text


def test_a_queue_by_payload_error_and_shard(reader: Reader, hands: dict[str, Hand]) -> None:
    address = "/queues/Mail?state=morgue"
    assert reader.ids(f"{address}&payload=customer:1") == ["dead-1"]
    assert reader.ids(f"{address}&error=TIMEOUT&payload=from:Mail") == ["dead-3", "dead-2", "dead-1", "dead-0"]
    assert reader.ids(f"{address}&shard=1") == [
        f"dead-{n}" for n in (3, 2, 1, 0) if hands["Mail"].queue.shard_of(f"dead-{n}") == 1
    ]
    offered = [button.text for button in reader.page(f"{address}&payload=customer:1").every("button")]
    assert not [text for text in offered if "all now" in text], "it would be done to others, too"
    for query, reason in (("shard=7", "0 to 1"), ("shard=x", "Shard can't be"), ("payload=x", "Payload can't be")):
        assert reason in reader.page(f"{address}&{query}", 400).text


def test_the_api_lists_them_too(client: TestClient) -> None:
    first = client.get("/api/v1/jobs?state=morgue&reverse=true&limit=2").json()
    assert [(item["queue"], item["job"]["id"]) for item in first["found"]] == [("Bills", "dead-0"), ("Mail", "dead-0")]
    then = client.get(f"/api/v1/jobs?state=morgue&reverse=true&queue=OR&after={first['cursor']}").json()
    assert [item["queue"] for item in then["found"]] == ["Orders"] * 4
    inside = client.get("/api/v1/jobs?state=morgue&payload=customer:2&error=Mail").json()
    assert ([item["queue"] for item in inside["found"]], inside["looked"], inside["cursor"]) == (["Mail"], 12, None)
    assert client.get("/api/v1/jobs?payload=x:").status_code == 400
    assert client.get("/api/v1/queues/Mail/jobs?state=morgue&shard=9").status_code == 400


def test_hundreds_of_queues_come_page_by_page_and_by_a_part_of_their_names(
    app: lowq.Lowq, browse: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lowq_web.stats_cache.PATIENCE", NEVER)  # the embedded store is slow
    for number in range(120):
        app.queue(f"tenant-{number:03d}-orders", 1).push({"id": str(n)} for n in range(number % 7))
    client = browse()
    reader, address, names, pages = Reader(client), "/", list[str](), 0
    assert len(client.get("/").content) < 100_000
    totals = reader.page("/").facts
    assert totals["Queued"].number == sum(number % 7 for number in range(120))
    while address:
        page = reader.page(address)
        names += [next(row["Queue"].every("a")).link.rpartition("/")[2] for row in page.table("Queue", "Queued")]
        address = next((link.link for link in page.every("a") if link.attributes.get("rel") == "next"), "")
        pages += 1
    assert (pages, names) == (3, [f"tenant-{number:03d}-orders" for number in range(120)])
    for nonsense in ("x", "-1", "99", "9" * 30, "²"):
        assert reader.page(f"/?page={nonsense}").table("Queue", "Queued")
    some = reader.page("/?queue=T-03&sort=length&dir=desc").table("Queue", "Queued")
    assert len(some) == 10
    assert next(some[0]["Queue"].every("a")).link == "/queues/tenant-034-orders"
    assert "No queue has “nobody” in its name." in reader.page("/?queue=nobody").text
