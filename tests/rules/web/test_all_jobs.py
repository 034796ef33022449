"""Lists over all queues, filters by what is in jobs, and a first page that stays small with hundreds of queues."""

import time

import pytest
from starlette.testclient import TestClient

import lowq
import lowq_web
from lowq.inspection import sifting
from lowq.store.keys import shard_prefix
from tests.rules.web.conftest import OWN, Open
from tests.rules.web.hand import Hand
from tests.rules.web.shown import Element, Reader, parse
from tests.waiting import NEVER

HOSTILE = "<script>alert(1)</script>\u202e"


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


def test_the_first_page_leads_to_each_list(reader: Reader) -> None:
    page = reader.page("/")
    for word, name in (("Retries", "retries"), ("Dead", "dead"), ("Running", "running")):
        (tile,) = (tile for tile in page.every("div") if "tile" in tile.classes and tile.find("dt").text == word)
        assert next(tile.every("a")).link == f"/jobs?list={name}"
        (current,) = (tab.text for tab in reader.page(f"/jobs?list={name}").every("a")
                      if tab.attributes.get("aria-current") == "page" and "/jobs?list" in tab.link)  # fmt: skip
        assert current.startswith(word)


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
    for shard in range(2):
        expected = [f"dead-{n}" for n in (3, 2, 1, 0) if hands["Mail"].queue.shard_of(f"dead-{n}") == shard]
        assert reader.ids(f"{address}&shard={shard}") == expected
    page = reader.page(f"{address}&payload=customer:1")
    assert not [button for button in page.every("button") if "all now" in button.text], (
        "it would be done to others, too"
    )
    for query, reason in (("shard=7", "0 to 1"), ("shard=x", "Shard can't be"), ("payload=x", "Payload can't be")):
        assert reason in reader.page(f"{address}&{query}", 400).text


def test_a_page_says_how_far_it_has_looked(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sifting, "MAX_LOOKED", 5)
    monkeypatch.setattr("lowq.inspection.all_queues.STEP", 5)
    address, seen, looked = "/jobs?list=dead&payload=customer:3", list[tuple[str, str]](), 0
    while address:
        page = reader.page(address)
        seen += [(row["Queue"].text, row["Id"].text) for row in page.table("Id", "Queue") if "Queue" in row]
        looked += next(part for part in page.every("p") if "looked at" in part.text).numbers[0]
        address = next((link.link for link in page.every("a") if link.attributes.get("rel") == "next"), "")
    assert (seen, looked) == ([("Bills", "dead-3"), ("Mail", "dead-3"), ("Orders", "dead-3")], 12)


def test_nobody_finds_a_masked_field(reader: Reader, app: lowq.Lowq) -> None:
    client = TestClient(lowq_web.create_app(app, redact=["customer"]), base_url="http://127.0.0.1", headers=dict(OWN))
    for path in ("/jobs?list=dead&payload=customer:1", "/queues/Mail?state=morgue&payload=customer:1"):
        assert "No job matches." in client.get(path).text
    for path in (
        "/api/v1/jobs?state=morgue&payload=customer:1",
        "/api/v1/queues/Mail/jobs?state=morgue&payload=customer:1",
    ):
        answer = client.get(path).json()
        assert answer.get("found", answer.get("jobs")) == []


def test_the_api_lists_them_too(client: TestClient) -> None:
    first = client.get("/api/v1/jobs?state=morgue&reverse=true&limit=2").json()
    assert [(item["queue"], item["job"]["id"]) for item in first["found"]] == [("Bills", "dead-0"), ("Mail", "dead-0")]
    assert first["looked"] is None
    then = client.get(f"/api/v1/jobs?state=morgue&reverse=true&queue=OR&after={first['cursor']}").json()
    assert [item["queue"] for item in then["found"]] == ["Orders"] * 4
    inside = client.get("/api/v1/jobs?state=morgue&payload=customer:2&error=Mail").json()
    assert ([item["queue"] for item in inside["found"]], inside["looked"], inside["cursor"]) == (["Mail"], 12, None)
    assert client.get("/api/v1/jobs?payload=x:").status_code == 400
    assert client.get("/api/v1/queues/Mail/jobs?state=morgue&shard=9").status_code == 400


def test_hostile_texts_are_shown_as_what_they_are(app: lowq.Lowq, browse: Open) -> None:
    queue = app.queue("Evil", 1)
    queue.push({"id": HOSTILE, "payload": {HOSTILE: HOSTILE}})
    queue.bury(HOSTILE, HOSTILE)
    client = browse()
    for path in ("/jobs?list=dead", "/jobs?list=dead&payload=a:1", "/"):
        for name in ("queue", "error", "payload", "match", "list", "after"):
            text = client.get(path, params={"list": "dead", name: f"a:{HOSTILE}"}).text
            assert "<script>alert" not in text
            assert "\u202e" not in text
    assert "&lt;script&gt;" in client.get("/jobs?list=dead").text


# --- hundreds of queues ---


@pytest.fixture
def many(app: lowq.Lowq, browse: Open, monkeypatch: pytest.MonkeyPatch) -> TestClient:
    monkeypatch.setattr("lowq_web.stats_cache.PATIENCE", NEVER)  # the embedded store is slow
    for number in range(400):
        queue = app.queue(f"tenant-{number:03d}-orders", 1)
        queue.push({"id": str(n), "payload": ""} for n in range(number % 7))
    return browse()


def test_400_queues_fit_into_100_kilobytes(many: TestClient) -> None:
    page = many.get("/")
    assert len(page.content) < 100_000
    rows = parse(page.text).table("Queue", "Queued")
    assert len(rows) == 50
    assert "page 1 of 8, 400 queues" in parse(page.text).text
    totals = {tile.find("dt").text: tile for tile in parse(page.text).every("div") if "tile" in tile.classes}
    assert totals["Queued"].find("dd").number == sum(number % 7 for number in range(400))


def test_all_of_them_come_page_by_page(many: TestClient) -> None:
    reader, address, names = Reader(many), "/", []
    for _ in range(9):
        page = reader.page(address)
        names += [next(row["Queue"].every("a")).link.rpartition("/")[2] for row in page.table("Queue", "Queued")]
        further = [link for link in page.every("a") if link.attributes.get("rel") == "next"]
        if not further:
            break
        address = further[0].link
    assert names == [f"tenant-{number:03d}-orders" for number in range(400)]
    assert len(reader.page("/?page=99").table("Queue", "Queued")) == 50
    for nonsense in ("x", "-1", "0", "9" * 30, "²"):
        assert reader.page(f"/?page={nonsense}").table("Queue", "Queued")


def test_queues_by_a_part_of_their_names(many: TestClient) -> None:
    page = Reader(many).page("/?queue=T-03&sort=length&dir=desc")
    names = [next(row["Queue"].every("a")).link.rpartition("/")[2] for row in page.table("Queue", "Queued")]
    assert sorted(names) == [f"tenant-{number:03d}-orders" for number in range(30, 40)]
    assert names[0] == "tenant-034-orders"
    (field,) = (item for item in page.every("input") if item.attributes.get("name") == "queue")
    assert field.attributes["value"] == "T-03"
    nothing = Reader(many).page("/?queue=nobody")
    assert "No queue has “nobody” in its name." in nothing.text
