"""What somebody else wrote into Redis: pages show the rest of it."""

import json
import re
import time
from typing import Any

import pytest
from starlette.testclient import TestClient

import lowq
from lowq.store.keys import shard_prefix
from tests.rows import case
from tests.web.conftest import Open, dashboard
from tests.web.shown import Reader, parse

DEEP = "[" * 100_000 + "]" * 100_000
SEAT = {"queue": "Orders", "shard": 1, "ids": ["x"], "seconds": 1.0}


def heartbeat(app: lowq.Lowq, name: str, details: str) -> None:
    app.client.command("HSET", "lowq:v1:nodes", name, f"{time.time()} 60 0 {details}")


def test_the_page_of_nodes_has_its_buttons_whatever_a_node_says() -> None:
    reports: list[dict[str, Any]] = [
        {"performing": ["x"]}, {"performing": [{}]}, {"performing": [5, [], None]},
        {"performing": [SEAT | {"ids": [5, None]}]}, {"performing": [SEAT | {"ids": "abc"}]},
        {"performing": [SEAT | {"queue": "\ud800"}]}, {"performing": [SEAT | {"queue": ""}]},
        {"performing": [SEAT | {"ids": ["\ud800"]}]}, {"performing": [SEAT | {"seconds": float("inf")}]},
        {"performing": [SEAT | {"seconds": "1"}]}, {"performing": [SEAT | {"count": "many"}]},
        {"shards": {"q": 5}}, {"shards": {"q": ["x"]}}, {"shards": {"\ud800": [1]}}, {"queues": [5, None, ["x"]]},
        {"started_at": float("nan")}, {"started_at": 10**3999}, {"memory": 10**3999}, {"pid": 10**3999},
        {"reload_refusal": 5}, {"memory": -5}, {"written_off": -1}, {"written_off": 10**3999},
    ]  # fmt: skip
    for says in reports:
        with case(says), dashboard() as (app, client):
            heartbeat(app, "forged", json.dumps(says))
            heartbeat(app, "honest", json.dumps({"performing": [SEAT], "host": "h", "pid": 7, "queues": ["Orders"]}))
            page = client.get("/nodes")
            assert page.status_code == 200
            assert page.text.count('value="stop"') == 2
            assert 'href="/queues/Orders/job?id=x"' in page.text
            assert client.get("/").status_code == 200
            for what in ("quiet", "stop", "reload"):
                assert "forged" in client.post("/nodes/command", data={"node": "forged", "do": what}).text


def test_a_node_that_says_something_bottomless(client: TestClient, app: lowq.Lowq) -> None:
    heartbeat(app, "deep", DEEP)
    assert "deep" in client.get("/nodes").text


def test_the_log_is_shown_whatever_an_entry_says() -> None:
    entries: list[dict[str, Any]] = [
        {"count": "many"}, {"count": [1]}, {"count": 1.5}, {"detail": ["x"]}, {"detail": "x"}, {"detail": 5},
        {"detail": {"a": {"b": ["c", {}]}}}, {"detail": {"a": [[1], None]}},
    ]  # fmt: skip
    for says in entries:
        with case(says), dashboard() as (app, client):
            entry = {"who": "ann", "action": "kick", "target": "Orders"} | says
            app.client.command("LPUSH", "lowq:v1:audit", f"{time.time()} {json.dumps(entry)}")
            app.note("bob", "delete", "Refunds", 5)
            page = client.get("/audit")
            assert page.status_code == 200
            assert "bob" in page.text
            assert "kick" in page.text


@pytest.mark.parametrize("says", [DEEP, json.dumps({"who": None, "action": "kick", "target": []})])
def test_what_is_no_entry_of_the_log_is_left_out(client: TestClient, app: lowq.Lowq, says: str) -> None:
    app.client.command("LPUSH", "lowq:v1:audit", f"{time.time()} {says}")
    app.note("bob", "delete", "Refunds", 5)
    page = parse(client.get("/audit").text)
    assert [row["Who"].text for row in page.table("Who", "Did", "To")] == ["bob"]


@pytest.mark.parametrize("bound", ["min", "max", "before"])
def test_a_task_with_a_bound_of_nonsense_is_left_out(client: TestClient, app: lowq.Lowq, bound: str) -> None:
    for name, wanted in (("honest", {}), ("forged", {bound: 10**400})):
        facts = json.dumps({"who": "ann", "queue": "Orders", "action": "kick", "filter": wanted, "owner": "here:1"})
        app.client.command("HSET", "lowq:v1:tasks", name, f"done 1 1 1 1 1 0 {len(facts)} {facts}")
    assert [task["id"] for task in client.get("/api/v1/tasks").json()["tasks"]] == ["honest"]
    page = client.get("/tasks")
    assert (page.status_code, "forged" in page.text) == (200, False)
    assert client.get("/api/v1/tasks/forged").status_code == client.get("/tasks/forged").status_code == 404


@pytest.mark.parametrize(("number", "shown"), [("inf", "inf"), ("-inf", "-inf"), ("1e300", "1e+300")])
def test_scores_that_are_no_moments_are_shown_as_numbers(
    client: TestClient, app: lowq.Lowq, number: str, shown: str
) -> None:
    app.register("Orders", 1)
    app.client.command(
        "ZADD", shard_prefix("lowq", "Orders", 0) + "payloads:a", number, b'{"n": 1}', 1_700_000_000, b'{"n": 2}'
    )
    app.client.command("ZADD", shard_prefix("lowq", "Orders", 0) + "due", time.time() + 60, "a")
    payloads = list(Reader(client).page("/queues/Orders/job?id=a").find("ol").every("li"))
    lines = {json.loads(item.find("pre").lines)["n"]: item.find("p").text for item in payloads}
    assert lines[1] == f"score {shown}"
    assert re.fullmatch(r"score 1700000000 · .* ago", lines[2]), "the other one is a moment"


def test_a_deep_payload_is_masked_rather_than_shown(browse: Open, app: lowq.Lowq) -> None:
    app.register("Orders", 1)
    payload = '{"card": 1, "a":' * 900 + "5" + "}" * 900
    app.client.command("ZADD", shard_prefix("lowq", "Orders", 0) + "payloads:a", 1, payload)
    app.client.command("ZADD", shard_prefix("lowq", "Orders", 0) + "due", time.time() + 60, "a")
    client = browse(redact=["card"])
    for path in ("/queues/Orders", "/queues/Orders/job?id=a", "/queues/Orders/payload?id=a&state=scheduled&n=0"):
        answer = client.get(path)
        assert answer.status_code == 200, path
        assert '"card": 1' not in answer.text


def test_a_stretch_of_nonsense_is_a_gap_in_the_charts() -> None:
    for slot in ["inf", "nan", "1e308", "-5", "-1"]:
        with case(slot), dashboard() as (app, client):
            app.register("Orders", 1)
            app.queue("Orders").push({"id": 1})
            last = int(time.time() // 10)
            for number in range(last - 359, last + 1):
                said = slot if last - 240 < number < last - 120 else "3"
                app.client.command("HSET", "lowq:v1:history:Orders", f"10:{number % 360}", f"{number} {said} 0 1")
            for path in ("/", "/queues/Orders"):
                page = client.get(path).text
                assert page.count('class="line processed"') == 2, "before the gap, and after it"
                assert page.count('class="line failed"') == 2
