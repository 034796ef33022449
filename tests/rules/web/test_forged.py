"""What somebody else wrote into Redis: pages show the rest of it."""

import json
import re
import time
from typing import Any

import lowq
from lowq.store.keys import shard_prefix
from tests.rows import case
from tests.rules.web.conftest import dashboard
from tests.rules.web.shown import Reader

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
        {"performing": [SEAT | {"shard": 99999, "seconds": 1e300}], "threads": "many", "longest_tasks": SEAT},
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
            for path in ("/", "/metrics", "/api/v1/stuck"):
                assert client.get(path).status_code == 200
            for what in ("quiet", "stop", "reload"):
                assert "forged" in client.post("/nodes/command", data={"node": "forged", "do": what}).text


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
    for text in (DEEP, json.dumps({"who": None, "action": "kick", "target": []})):  # no entries
        with dashboard() as (app, client):
            app.client.command("LPUSH", "lowq:v1:audit", f"{time.time()} {text}")
            app.note("bob", "delete", "Refunds", 5)
            assert [row["Who"].text for row in Reader(client).page("/audit").table("Who", "Did")] == ["bob"]


def test_scores_that_are_no_moments_are_shown_as_numbers() -> None:
    for number, shown in (("inf", "inf"), ("-inf", "-inf"), ("1e300", "1e+300")):
        with case(number), dashboard() as (app, client):
            app.register("Orders", 1)
            prefix = shard_prefix("lowq", "Orders", 0)
            app.client.command("ZADD", f"{prefix}payloads:a", number, b'{"n": 1}', 1_700_000_000, b'{"n": 2}')
            app.client.command("ZADD", f"{prefix}due", time.time() + 60, "a")
            payloads = list(Reader(client).page("/queues/Orders/job?id=a").find("ol").every("li"))
            lines = {json.loads(item.find("pre").lines)["n"]: item.find("p").text for item in payloads}
            assert lines[1] == f"score {shown}"
            assert re.fullmatch(r"score 1700000000 · .* ago", lines[2]), "the other one is a moment"
