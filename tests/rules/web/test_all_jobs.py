"""Lists over all queues, filters by what is in jobs, and a first page that stays small with hundreds of queues."""

import time

import pytest
from starlette.testclient import TestClient

import lowq
from lowq.store.keys import shard_prefix
from tests.rules.web.confirming import confirm, ended
from tests.rules.web.conftest import OWN, Open
from tests.rules.web.hand import Hand
from tests.rules.web.shown import Element, Reader, id_in, parse
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
    return [(row["Queue"].text, id_in(row["Id"])) for row in page.table("Id", "Queue", "Newest payload")]


def test_the_dead_of_all_queues_come_latest_first(reader: Reader) -> None:
    page = reader.page("/jobs?state=morgue&reverse=1")
    names = ("Bills", "Mail", "Orders")
    assert found(page) == [(name, f"dead-{n}") for n in range(4) for name in names]
    first = page.table("Id", "Queue", "Dead since", "Newest payload")[0]
    assert first["Id"].link == "/queues/Bills/job?id=dead-0"
    assert first["Queue"].link == "/queues/Bills?state=morgue&reverse=1"
    assert "Timeout: Bills" in first["Newest payload"].text
    assert "Jobs" in [link.text for link in page.every("a") if link.attributes.get("aria-current") == "page"]


def test_running_jobs_and_retries(reader: Reader, hands: dict[str, Hand], app: lowq.Lowq, browse: Open) -> None:
    assert sorted(found(reader.page("/jobs?state=taken"))) == [
        ("Bills", "runs-Bills"), ("Mail", "runs-Mail"), ("Orders", "runs-Orders"),
    ]  # fmt: skip
    assert "No job waits for a retry." in reader.page("/jobs?state=retrying").text
    for name, retries in (("Bills", 0), ("Orders", 7)):
        hand = hands[name]
        hand.push("failing", time.time() + 60)
        prefix = shard_prefix("lowq", name, hand.index("failing"))
        app.client.command("ZADD", f"{prefix}retries", retries, "failing")
    page = Reader(browse()).page("/jobs?state=waiting&order_by=retry_count&min=2&reverse=1")
    rows = [(row["Queue"].text, row["Attempt"].text) for row in page.table("Id", "Queue", "Attempt")]
    assert rows == [("Orders", "9"), ("Bills", "2")]


def test_filters(reader: Reader) -> None:
    assert {name for name, _ in found(reader.page("/jobs?state=morgue&reverse=1&queue=ORD"))} == {"Orders"}
    assert found(reader.page("/jobs?state=morgue&reverse=1&payload=customer:2&queue=i")) == [
        ("Bills", "dead-2"),
        ("Mail", "dead-2"),
    ]
    assert {name for name, _ in found(reader.page("/jobs?state=morgue&reverse=1&error=timeout:+mail"))} == {"Mail"}
    page = reader.page("/jobs?state=morgue&reverse=1&payload=customer:77")
    assert "No job matches." in page.text
    assert "12 jobs looked at" in page.text
    assert "it is a field and its value" in reader.page("/jobs?state=morgue&reverse=1&payload=customer", 400).text
    assert "is no cursor" in reader.page("/jobs?state=morgue&reverse=1&after=x", 400).text


def test_in_any_state(reader: Reader, hands: dict[str, Hand]) -> None:
    hands["Mail"].queue.push({"id": "waits", "payload": {"customer": 2}})
    assert found(reader.page("/jobs?payload=customer:2")) == [
        ("Mail", "waits"), ("Orders", "dead-2"), ("Mail", "dead-2"), ("Bills", "dead-2"),
    ]  # fmt: skip
    page = reader.page("/search?id=nobody")
    assert next(link for link in page.every("a") if "*nobody*" in link.text).link == "/jobs?match=%2Anobody%2A"


def test_ticked_jobs_of_several_queues(client: TestClient, hands: dict[str, Hand]) -> None:
    chosen = ["Bills dead-1", "Mail dead-1", "Mail dead-2"]
    said = client.post("/jobs/act", data={"do": "kick selected", "state": "morgue", "id": chosen}, headers=OWN)
    page = parse(client.get(said.headers["location"]).text)
    assert said.headers["location"].startswith("/jobs?state=morgue")
    assert "3 jobs queued again" in page.of_role("status")
    form = {"do": "delete selected", "state": "waiting", "id": chosen}
    asked = client.post("/jobs/act", data=form, headers=OWN)
    assert "Delete 3 jobs?" in asked.text
    hands["Mail"].queue.delete("dead-2")
    hands["Mail"].queue.push({"id": "dead-2"})
    asked = confirm(client, "/jobs/act", asked.text)
    assert "there were 3 jobs when you were asked, and there are 2 now" not in asked.text
    left = {(item.queue, item.job.id) for item in hands["Mail"].app.jobs(match="dead-*")}
    assert left == {("Bills", "dead-1"), ("Mail", "dead-1"), ("Mail", "dead-2")}, "nothing was done"
    done = client.get(confirm(client, "/jobs/act", asked.text).headers["location"])
    assert "3 jobs deleted" in parse(done.text).of_role("status")


def test_the_api_acts_on_what_matches_in_several_queues(client: TestClient, app: lowq.Lowq) -> None:
    client.headers.update(OWN)
    document = {"action": "delete", "all": {"state": "morgue", "error": "timeout"}, "queue": "I"}
    assert client.post("/api/v1/jobs/count", json=document).json()["count"] == 8
    assert client.post("/api/v1/jobs/actions", json={**document, "at_most": 7}).status_code == 409
    started = client.post("/api/v1/jobs/actions", json={**document, "at_most": 8})
    assert started.status_code == 202
    assert ended(client, started.json()["id"])["done"] == 8
    assert {item.queue for item in app.jobs("morgue")} == {"Orders"}
    assert client.post("/api/v1/jobs/actions", json={"action": "delete"}).status_code == 400
    assert client.post("/api/v1/jobs/count", json={"action": "delete", "all": {"shard": 1}}).status_code == 400
    found = client.get("/api/v1/jobs?state=any&limit=2").json()
    assert [item["job"]["state"] for item in found["found"]] == ["taken", "taken"]


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
