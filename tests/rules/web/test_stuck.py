"""Which batches are stuck: on the first page, in the API, by the command line, the doctor and `why`."""

import math
import time
from typing import Any

import pytest
from starlette.testclient import TestClient

import lowq
from lowq.cli import main
from lowq.inspection.stuck import StuckLimits
from lowq.metrics.counters import BOUNDS
from tests.recorded import record
from tests.rows import case
from tests.rules.web.hand import Hand, heartbeat
from tests.rules.web.shown import Reader

ODD = 'x"><script>alert(1)</script>'


def performed(app: lowq.Lowq, queue: str, seconds: float, count: int = 100) -> None:
    """The history says that so many performs took so long."""
    bound = next((bound for bound in BOUNDS if seconds <= bound), math.inf)
    record(app, queue, processed=count, runs={bound: count}, run_seconds=seconds * count)


def runs(queue: str, shard: int, ids: list[str], seconds: float, count: int | None = None) -> dict[str, Any]:
    return {"queue": queue, "shard": shard, "ids": ids, "count": count or len(ids), "seconds": seconds}


def test_a_batch_is_stuck_after_a_minute_and_ten_times_what_its_queue_takes(app: lowq.Lowq) -> None:
    app.queue("quick", 3).push([{"id": 1}])
    app.queue("slow", 3).push([{"id": 1}])
    performed(app, "quick", 0.2)
    performed(app, "slow", 25.0)  # counts as up to 30 s
    heartbeat(
        app, "node:1:aaaaaa", time.time(), threads=3,
        performing=[runs("quick", 0, ["a"], 61.0), runs("quick", 1, ["b"], 59.0), runs("slow", 0, ["c"], 299.0)],
        longest_tasks=[runs("slow", 1, ["d", "e"], 301.0, count=2)],
    )  # fmt: skip
    found = app.stuck()
    assert [(batch.queue, batch.shard, batch.ids, batch.thread) for batch in found] == [
        ("slow", 1, ("d", "e"), None), ("quick", 0, ("a",), 0),
    ]  # fmt: skip
    assert [batch.limit for batch in found] == [300.0, 60.0]


def test_without_a_history_a_minute_counts_and_beyond_what_is_counted_the_average(app: lowq.Lowq) -> None:
    rows: list[tuple[float, int, float, float]] = [
        # Of performs that took so long, so many: what is stuck after so many seconds, and is not after so many.
        (1000.0, 100, 10_000.0, 9_990.0), (400.0, 1, 4000.0, 3990.0), (0.0, 0, 60.0, 59.0),
    ]  # fmt: skip
    for number, (took, count, limit, less) in enumerate(rows):
        with case(took, count):
            queue = f"queue-{number}"
            if count:
                performed(app, queue, took, count)
            batches = [runs(queue, 0, ["a"], less), runs(queue, 1, ["b"], limit + 10)]
            heartbeat(app, "node:1:aaaaaa", time.time(), threads=2, performing=batches)
            assert [(batch.ids, batch.limit) for batch in app.stuck()] == [(("b",), limit)]


def test_the_first_page_names_it_with_all_its_ids_and_what_waits_behind_it(app: lowq.Lowq, client: TestClient) -> None:
    queue = app.queue("Orders", 1)
    queue.push([{"id": f"waits {number}"} for number in range(3)] + [{"id": "later", "delay": 60}])
    ids = [ODD, *(f"order-{number}" for number in range(13))]
    heartbeat(
        app, "shop:1:aaaaaa", time.time(), threads=2, performing=[None, runs("Orders", 0, ids, 2640.0, count=20)],
        tasks=7, concurrency=100,
    )  # fmt: skip
    page = Reader(client).page("/")
    (row,) = page.table("Queue", "Ids", "Performed by", "For", "Waiting behind it")
    assert row["Queue"].text == "Orders shard 0"
    assert [link.text for link in row["Ids"].every("a")] == [
        ODD if len(ODD) <= 40 else ODD[:39] + "…", *ids[1:]
    ]  # fmt: skip
    assert "10 more" in row["Ids"].text
    assert "6 that its node does not name" in row["Ids"].text
    assert row["Performed by"].text == "shop:1:aaaaaa thread 1"
    assert row["For"].text == "44 min"
    assert row["Waiting behind it"].text == "3"

    (batch,) = client.get("/api/v1/stuck").json()["batches"]
    assert (batch["ids"], batch["count"], batch["thread"], batch["waiting"]) == (ids, 20, 1, 3)
    figures = client.get("/metrics").text
    assert 'lowq_running_seconds_max{queue="Orders"} 2640.0' in figures
    assert "lowq_threads_busy 1.0" in figures
    assert "lowq_threads 2.0" in figures
    assert "lowq_tasks_busy 7.0" in figures
    assert "lowq_tasks 100.0" in figures


def test_the_first_page_says_nothing_of_it_while_nothing_is(app: lowq.Lowq, client: TestClient) -> None:
    app.queue("Orders", 1).push("a")
    heartbeat(app, "shop:1:aaaaaa", time.time(), threads=1, performing=[runs("Orders", 0, ["a"], 5.0)])
    assert "Stuck" not in Reader(client).page("/").text
    assert client.get("/api/v1/stuck").json()["batches"] == []


def test_all_threads_are_stuck_when_each_is_and_their_queues_are_known(app: lowq.Lowq) -> None:
    clock = [1000.0]
    limits = StuckLimits(app, lambda: clock[0])
    performed(app, "quick", 0.2)
    performed(app, "seldom", 0.2, count=19)
    assert limits.seconds_stuck([("quick", 70.0), ("quick", 90.0)]) == 70.0
    assert limits.seconds_stuck([("quick", 70.0), None]) == 0.0
    assert limits.seconds_stuck([("quick", 70.0), ("quick", 59.0)]) == 0.0
    assert limits.seconds_stuck([("seldom", 70.0)]) == 0.0, "its first jobs may well take long"
    assert limits.seconds_stuck([]) == 0.0
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
    lines = capsys.readouterr().out.splitlines()
    assert lines[-3:] == [
        "Batches that have been running for more than 10 s:",
        "  shop:1:aaaaaa thread 0: Orders shard 3, ids a, b\\x1b[1m, c and 6 more, for 1 min 15 s",
        "  shop:1:aaaaaa task: Mails shard 0, id m, for 12 s",
    ]


def test_why_names_the_batch_that_an_id_is_in(app: lowq.Lowq) -> None:
    hand = Hand(app, "Orders")
    hand.push("order 42", time.time() - 100)
    shard = hand.own(0, time.time(), nonce="aaaaaaaaaaaa")
    shard.in_flight.take(1)
    heartbeat(
        app, "shop:1:aaaaaa", time.time(), threads=1, shards={"Orders": [0]},
        performing=[runs("Orders", 0, ["order 17", "order 42", "order 3", "x"], 2640.0)],
    )  # fmt: skip
    detail = hand.queue.why("order 42").detail
    assert ", thread 0; it performs the batch of order 17, order 42, order 3 and 1 more, for 44 min now" in detail
