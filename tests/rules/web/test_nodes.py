"""What a node reported with its last heartbeat: the page of the nodes, and which batches are stuck."""

import json
import math
import re
import time
from typing import Any

import pytest
from click.testing import CliRunner, Result
from starlette.testclient import TestClient

import lowq
from lowq.cli import main
from lowq.observe.histories import BOUNDS
from lowq.operate.nodes import StuckLimits
from lowq.store.keys import tasks_key
from lowq_web import background
from tests.recorded import record
from tests.rows import case
from tests.rules.web.hand import heartbeat
from tests.rules.web.shown import SLOW, Element, Reader


def node_of(page: Element, name: str) -> Element:
    """The part of the page that is about it."""
    (found,) = (part for part in page.every("section") if any(name in head.text for head in part.every("h2")))
    return found


def test_every_node_is_shown_as_it_reported(app: lowq.Lowq, reader: Reader) -> None:
    now = time.time()
    app.queue("Orders", 8).push({"id": "order-7"})
    heartbeat(app, "gone:1:cccccc", now - 500, silence=499, performing=[runs("Orders", 0, ["order-1"], 3.0)])
    heartbeat(
        app, "shop-1:4711:aaaaaa", now - 90,
        host="shop-1", pid=4711, version="1.2.3", threads=2, started_at=now - 7450, memory=150 * 2**20, quiet=False,
        shards={"Orders": [0, 3, 5], "Refunds": [1]},
        performing=[None, {"queue": "Orders", "shard": 3, "ids": ["order-7", "a/b"], "seconds": 33.0}],
    )  # fmt: skip
    heartbeat(
        app, "shop-2:99:bbbbbb", now - 2, host="shop-2", pid=99, quiet=True, shards={}, performing=[None],
        tasks=12, longest_tasks=[{"queue": "Orders", "shard": 2, "ids": ["order-9"], "count": 1, "seconds": 70.0}],
    )  # fmt: skip
    page = reader.page("/nodes")
    assert "2 alive" in page.text
    assert "1 lost" in page.text
    assert re.search(r"gone:1:cccccc \d+ min( \d+ s)? ago.*; was performing Orders order-1\b", page.text)
    nodes = reader.page("/").facts["Nodes"]
    assert (nodes.link, "2 alive" in nodes.text) == ("/nodes", True)

    busy = node_of(page, "shop-1:4711:aaaaaa")
    facts = busy.facts
    shown = [facts[word].text for word in ("Host", "Process", "Version", "Memory")]
    assert shown == ["shop-1", "4711", "1.2.3", "150.0 MB"]
    assert facts["Up"].lasts(7450)
    assert facts["Heartbeat"].lasts(90)
    assert [link.text for link in facts["Shards"].every("a")] == ["Orders 3", "Refunds 1"]
    assert [button.text for button in busy.every("button")] == ["Quiet", "Reload", "Stop"]
    idle, performs = busy.table("Thread or task", "Performs", "Ids", "For")
    assert (idle["Performs"].text, idle["For"].text) == ("idle", "")
    assert (performs["Thread or task"].text, performs["Performs"].text) == ("1", "Orders shard 3")
    assert [link.text for link in performs["Ids"].every("a")] == ["order-7", "a/b"]
    assert performs["Ids"].link == "/queues/Orders/job?id=order-7"
    # What it reported, whether or not with the time that has passed since then.
    assert performs["For"].lasts(33, 33 + 90 + SLOW)

    other = node_of(page, "shop-2:99:bbbbbb")
    assert "quiet" in other.find("h2").text
    assert [button.text for button in other.every("button")] == ["Unquiet", "Reload", "Stop"]
    assert (other.facts["Memory"].text, other.facts["Shards"].text) == ("unknown", "none")
    tasks = [(row["Thread or task"].text, row["Performs"].text) for row in other.table("Thread or task", "Performs")]
    assert tasks == [("0", "idle"), ("task", "Orders shard 2"), ("tasks", "11 more, started later")]


ODD = 'x"><script>alert(1)</script>'


def performed(app: lowq.Lowq, queue: str, seconds: float, count: int = 100) -> None:
    """The history says that so many performs took so long."""
    bound = next((bound for bound in BOUNDS if seconds <= bound), math.inf)
    record(app, queue, processed=count, runs={bound: count}, run_seconds=seconds * count)


def runs(queue: str, shard: int, ids: list[str], seconds: float, count: int | None = None) -> dict[str, Any]:
    return {"queue": queue, "shard": shard, "ids": ids, "count": count or len(ids), "seconds": seconds}


def test_a_batch_is_stuck_after_a_minute_and_ten_times_what_its_queue_takes(app: lowq.Lowq) -> None:
    # Of performs that took so long, so many: beyond what is counted the average counts. It is stuck after so long.
    rows = [(0.2, 100, 60.0), (25.0, 100, 300.0), (1000.0, 100, 10_000.0), (400.0, 1, 4000.0), (0.0, 0, 60.0)]
    for number, (took, count, limit) in enumerate(rows):
        with case(took, count):
            queue = f"queue-{number}"
            if count:
                performed(app, queue, took, count)
            batches = [runs(queue, 0, ["a"], limit - 1), runs(queue, 1, ["b"], limit + 10)]
            tasks = [runs(queue, 2, ["d", "e"], limit + 20)]
            heartbeat(app, "node:1:aaaaaa", time.time(), threads=2, performing=batches, longest_tasks=tasks)
            found = [(batch.queue, batch.shard, batch.ids, batch.thread, batch.limit) for batch in app.stuck()]
            assert found == [(queue, 2, ("d", "e"), None, limit), (queue, 1, ("b",), 1, limit)]


def test_the_first_page_names_it_with_all_its_ids_and_what_waits_behind_it(app: lowq.Lowq, client: TestClient) -> None:
    app.queue("Orders", 1).push([{"id": f"waits {number}"} for number in range(3)] + [{"id": "later", "delay": 60}])
    ids = [ODD, *(f"order-{number}" for number in range(13))]
    heartbeat(
        app, "shop:1:aaaaaa", time.time(), threads=2, performing=[None, runs("Orders", 0, ids, 2640.0, count=20)],
        tasks=7, concurrency=100,
    )  # fmt: skip
    (row,) = Reader(client).page("/").table("Queue", "Ids", "Performed by", "For", "Waiting behind it")
    assert [link.text for link in row["Ids"].every("a")] == [ODD, *ids[1:]]
    assert "10 more" in row["Ids"].text
    assert "6 that its node does not name" in row["Ids"].text
    shown = [row[word].text for word in ("Queue", "Performed by", "For", "Waiting behind it")]
    assert shown == ["Orders shard 0", "shop:1:aaaaaa thread 1", "44 min", "3"]
    (batch,) = client.get("/api/v1/stuck").json()["batches"]
    assert (batch["ids"], batch["count"], batch["thread"], batch["waiting"]) == (ids, 20, 1, 3)
    figures = client.get("/metrics").text
    for line in ('running_seconds_max{queue="Orders"} 2640.0', "threads_busy 1.0", "threads 2.0", "tasks_busy 7.0"):
        assert f"lowq_{line}" in figures
    heartbeat(app, "shop:1:aaaaaa", time.time(), threads=1, performing=[runs("Orders", 0, ["a"], 5.0)])
    assert client.get("/api/v1/stuck").json()["batches"] == []


def deploy_card(reader: Reader, address: str = "/nodes") -> Element:
    return next(part for part in reader.page(address).every("section") if part.attributes.get("id") == "deploy")


def deploy_check(app: lowq.Lowq, *options: str) -> Result:
    return CliRunner().invoke(main, ["deploy-check", "--redis-url", app.config.redis_url, *options])


def test_whether_a_deploy_is_safe_goes_by_what_a_stop_waits_for(
    app: lowq.Lowq, reader: Reader, client: TestClient
) -> None:
    assert "Yes: no node is running" in deploy_card(reader).text
    performed(app, "slow", 50.0)
    performed(app, "endless", 5000.0)
    performed(app, "seldom", 50.0, count=19)
    performed(app, "Orders", 0.2)
    for batch, is_safe in (
        (runs("Orders", 0, ["a"], 24.0), True),
        (runs("Orders", 0, ["a"], 26.0), False),  # it is longer than that already
        (runs("slow", 0, ["a"], 12.0), False),  # those of its queue often are
        (runs("seldom", 0, ["a"], 12.0), True),  # nobody knows
        (runs("endless", 0, ["a"], 12.0), False),  # they are longer than what is measured
    ):
        with case(batch):
            heartbeat(app, "shop:1:aaaaaa", time.time(), shutdown_timeout=25.0, performing=[None, batch])
            card = deploy_card(reader)
            assert ("Yes: " in card.text) is is_safe
            assert ("then it is cut off, and performed again" in card.text) is not is_safe
            answer = client.get("/api/v1/deploy").json()
            assert answer["is_safe"] is is_safe
            assert [(item["node"], item["batch"]["seconds"]) for item in answer["interruptions"]] == (
                [] if is_safe else [("shop:1:aaaaaa", batch["seconds"])]
            )
            shown = deploy_check(app)
            assert shown.exit_code == (0 if is_safe else 1)
            says = f"  shop:1:aaaaaa thread 1: {batch['queue']} shard 0, id a, for {batch['seconds']:.0f} s; a stop"
            assert (says in shown.stdout) is not is_safe
            assert json.loads(deploy_check(app, "--json").stdout) == answer
            longest = card.find("p", has="Longest running batch").text
            assert f"{batch['seconds']:.0f} s, {batch['queue']} on shop:1:aaaaaa" in longest
            assert "shutdown_timeout of 25 s" in longest
    heartbeat(app, "shop:1:aaaaaa", time.time(), performing=[runs("Orders", 0, ["a"], 3600.0)])
    assert "Yes: " in deploy_card(reader).text, "an older release does not say how long it waits"
    heartbeat(app, "hand:1:bbbbbb", time.time(), kind="consumer", taken=3)
    assert "has 3 jobs in hand" in deploy_card(reader).text
    answer = client.get("/api/v1/deploy").json()
    assert (answer["is_safe"], answer["consumers"], answer["tasks"]) == (False, ["hand:1:bbbbbb"], 0)
    assert deploy_check(app).stdout == "  hand:1:bbbbbb: consumer, taken: 3\n"


def test_an_action_in_the_dashboard_makes_a_deploy_unsafe_while_it_is_reported(
    app: lowq.Lowq, reader: Reader, client: TestClient
) -> None:
    heartbeat(app, "shop:1:aaaaaa", time.time(), version="1.1")
    heartbeat(app, "shop:2:bbbbbb", time.time(), version="1.2")
    shown = deploy_check(app)
    assert (shown.exit_code, shown.stdout) == (0, "")
    assert "versions: 1 of 1.1, 1 of 1.2" in shown.stderr
    action = background.BackgroundAction("a", "ann", "Orders", "kick", lowq.inspection.JobFilter(), "me:1", 0.0, 0.0)
    background.begin(app, action)
    assert client.get("/api/v1/deploy").json()["tasks"] == 1
    assert "1 task would stop" in deploy_card(reader).text
    shown = deploy_check(app)
    assert (shown.exit_code, shown.stdout) == (1, "  actions in the dashboard: 1\n")
    background.report(app, "a", "done", 1, 1)
    app.client.command("HSET", tasks_key(app.config.namespace), "b", "running x")  # no record of ours
    assert deploy_check(app).exit_code == 0


def test_supervisors_and_nodes_are_sorted_by_what_they_are_asked_for(app: lowq.Lowq, reader: Reader) -> None:
    now = time.time()
    supervisor = {"pid": 4711, "started_at": now - 9000, "version": "1.0"}
    for name, host, version, up, seconds in (
        ("a:1:aaaaaa", "a", "1.1", 100, 5.0), ("a:2:bbbbbb", "a", "1.2", 200, 9.0), ("b:1:cccccc", "b", "1.1", 50, 1.0),
    ):  # fmt: skip
        heartbeat(
            app, name, now, host=host, version=version, started_at=now - up, shutdown_timeout=25.0,
            performing=[runs("Orders", 0, ["x"], seconds)], supervisor=supervisor if host == "a" else {},
        )  # fmt: skip
    columns = ("Process", "Version", "Up", "Longest batch", "shutdown_timeout")
    for query, names in (
        ("", ["a:1:aaaaaa", "a:2:bbbbbb", "a:4711", "b:1:cccccc"]),
        ("?sort=version", ["a:4711", "a:1:aaaaaa", "b:1:cccccc", "a:2:bbbbbb"]),
        ("?sort=up", ["b:1:cccccc", "a:1:aaaaaa", "a:2:bbbbbb", "a:4711"]),
        ("?sort=longest&dir=desc", ["a:2:bbbbbb", "a:1:aaaaaa", "b:1:cccccc", "a:4711"]),
        ("?sort=nonsense&dir=desc", ["b:1:cccccc", "a:4711", "a:2:bbbbbb", "a:1:aaaaaa"]),
    ):
        with case(query):
            rows = deploy_card(reader, f"/nodes{query}").table(*columns)
            assert [row["Process"].text.split()[0] for row in rows] == names
    rows = deploy_card(reader).table(*columns)
    (row,) = (row for row in rows if row["Process"].text == "a:4711 supervisor of 2")
    assert row["Version"].text == "1.0"
    assert row["Up"].lasts(9000)
    assert "2 of version 1.1, 1 of version 1.2" in deploy_card(reader).text


def test_all_threads_are_stuck_when_each_is_and_their_queues_are_known(app: lowq.Lowq) -> None:
    clock = [1000.0]
    limits = StuckLimits(app, lambda: clock[0])
    performed(app, "quick", 0.2)
    performed(app, "seldom", 0.2, count=19)
    assert limits.seconds_stuck([("quick", 70.0), ("quick", 90.0)]) == 70.0
    assert limits.seconds_stuck([("quick", 70.0), None]) == 0.0
    assert limits.seconds_stuck([("quick", 70.0), ("quick", 59.0)]) == 0.0
    assert limits.seconds_stuck([("seldom", 70.0)]) == 0.0, "its first jobs may well take long"
    performed(app, "seldom", 0.2)
    assert limits.seconds_stuck([("seldom", 70.0)]) == 0.0, "it is known for a while"
    clock[0] += 31
    assert limits.seconds_stuck([("seldom", 70.0)]) == 70.0


def test_the_doctor_names_nodes_all_of_whose_threads_are_busy(app: lowq.Lowq) -> None:
    app.queue("Orders", 1).push("a")
    now = time.time()
    heartbeat(app, "free:1:aaaaaa", now, threads=2, performing=[runs("Orders", 0, ["a"], 99.0), None])
    heartbeat(app, "busy:1:bbbbbb", now, threads=1, performing=[runs("Orders", 0, ["a"], 99.0)])
    heartbeat(app, "idle:1:cccccc", now, threads=0, performing=[])
    (found,) = (finding for finding in app.examine(patience=0) if finding.code == "threads_busy")
    assert found.nodes == ("busy:1:bbbbbb",)
    assert "1 min 39 s" in found.what


def test_lowq_nodes_names_what_runs_for_long(app: lowq.Lowq, capsys: pytest.CaptureFixture[str]) -> None:
    heartbeat(
        app, "shop:1:aaaaaa", time.time(), threads=2,
        performing=[runs("Orders", 3, ["a", "b\x1b[1m", "c", "d"], 75.0, count=9), runs("Orders", 4, ["e"], 5.0)],
        longest_tasks=[runs("Mails", 0, ["m"], 12.0)],
    )  # fmt: skip
    with pytest.raises(SystemExit):
        main(["nodes", "--redis-url", app.config.redis_url])
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "  shop:1:aaaaaa thread 0: Orders shard 3, ids a, b\\x1b[1m, c and 6 more, for 1 min 15 s",
        "  shop:1:aaaaaa task: Mails shard 0, id m, for 12 s",
    ]
