"""Is anything wrong? What the first page says of it, and in which order."""

from typing import Any

import pytest
from starlette.testclient import TestClient

import lowq
from lowq import inspection
from lowq.observe.histories import Flow
from lowq.operate.nodes import StuckBatch
from lowq.store.keys import shard_prefix
from lowq_web.severity import Problem, find_problems, level_of_redis, levels_of
from lowq_web.stats_cache import StatsCache
from tests.rows import case
from tests.rules.web.shown import Reader, parse
from tests.waiting import until


def overview(
    name: str = "Orders", *, owners: tuple[str | None, ...] = ("a", "a"), sealed: float | None = None, **figures: Any
) -> Any:
    """A queue of as many shards, each with its part of what is due. ``sealed``: the lag of one that is being moved."""
    zero = {"length": 0, "due": 0, "taken": 0, "retries": 0, "lag": 0.0, "processed": 0, "failed": 0, "buried": 0}
    values: dict[str, Any] = zero | {"scheduled": 0, "fresh": 0, "morgue_length": 0, "paused": False} | figures
    stats = inspection.Stats(name, len(owners), **values)
    shards = [
        inspection.ShardInfo(number, stats.length or stats.due, 0, 0, stats.lag, owner, 1, 1.0, stats.paused, None)
        for number, owner in enumerate(owners)
    ]
    if sealed is not None:  # the jobs of one more are being moved: nobody is to hold it
        last = inspection.ShardInfo(len(owners), 5, 0, 0, sealed, None, 1, 1.0, stats.paused, None, sealed=True)
        shards.append(last)
    return inspection.QueueOverview(stats, shards)


def kinds(*found: Problem) -> list[tuple[str, str]]:
    return [(problem.kind, problem.level) for problem in found]


def test_each_trouble_is_found_and_nothing_else_is() -> None:
    def flow(failed: float, processed: float) -> Flow:
        return Flow(300.0, 100.0, processed, 0.0, None, failed)

    stuck = StuckBatch("Orders", 0, ("1",), 1, "a", 0, 125.0, 60.0, 7)
    rows: list[tuple[dict[str, Any], Flow | None, list[StuckBatch], list[tuple[str, str]]]] = [
        ({}, None, [], []),
        ({"due": 5, "lag": 59.0, "taken": 1}, flow(4, 0), [], []),
        ({"length": 5, "due": 5, "owners": (None, None)}, None, [], [("unworked", "red")]),
        ({"length": 5, "owners": (None, None)}, None, [], [("unworked", "amber")]),
        ({"length": 5, "due": 5, "owners": (None, None), "paused": True}, None, [], [("unworked", "amber")]),
        ({"due": 5, "lag": 11.0, "taken": 1, "owners": (None, "a")}, None, [], [("unowned", "amber")]),
        ({"due": 5, "lag": 9.0, "owners": (None, "a")}, None, [], []),
        ({"due": 5, "lag": 601.0, "owners": (None, None)}, None, [], [("unworked", "red")]),
        (
            {"retries": 9, "length": 9, "due": 9, "owners": (None,)},
            flow(9, 1),
            [],
            [("failing", "red"), ("unworked", "red")],
        ),
        ({"retries": 9, "length": 9, "owners": (None,)}, flow(9, 1), [], [("failing", "red"), ("unworked", "amber")]),
        (
            {"due": 5, "lag": 61.0, "taken": 1, "owners": (None, None, "a")},
            None,
            [],
            [("unowned", "amber"), ("late", "amber")],
        ),
        ({"due": 5, "lag": 601.0, "owners": (None, "a"), "latency_goal": 6000.0}, None, [], [("unowned", "amber")]),
        ({"due": 5, "lag": 601.0, "owners": (None, "a"), "paused": True}, None, [], [("unowned", "amber")]),
        (
            {"due": 5, "lag": 11.0, "taken": 1, "owners": (None, "a"), "sealed": 700.0},
            None,
            [],
            [("late", "red"), ("unowned", "amber")],
        ),
        ({"due": 5}, None, [stuck], [("stuck", "red")]),
        ({"due": 5, "lag": 61.0, "taken": 1, "owners": ("a",)}, None, [stuck], [("stuck", "red")]),
        ({"due": 5, "lag": 61.0, "taken": 1}, None, [stuck], [("stuck", "red"), ("late", "amber")]),
        ({"retries": 9}, flow(5, 45), [], [("failing", "amber")]),
        ({"retries": 9}, flow(5, 46), [], []),
        ({"retries": 9}, flow(50, 50), [], [("failing", "red")]),
        ({"due": 5, "lag": 61.0, "taken": 1}, None, [], [("late", "amber")]),
        ({"due": 5, "lag": 601.0, "taken": 1}, None, [], [("late", "red")]),
        ({"due": 5, "lag": 61.0}, None, [], [("starved", "amber")]),
        ({"due": 5, "lag": 61.0, "taken": 1, "latency_goal": 3600.0}, None, [], []),
        ({"due": 5, "lag": 3.0, "taken": 1, "latency_goal": 2.0}, None, [], [("late", "amber")]),
        ({"due": 5, "lag": 4000.0, "paused": True}, None, [], []),
    ]
    for figures, flows, batches, expected in rows:
        with case(figures):
            found = find_problems([overview(**figures)], {} if flows is None else {"Orders": flows}, batches, {})
            assert kinds(*found) == expected


def test_the_worst_come_first_and_their_cells_are_marked() -> None:
    late = [overview(f"late-{number}", due=number, lag=100.0, taken=1) for number in (1, 30)]
    queues = [*late, overview("lost", due=2, owners=(None, None)), overview("slow", due=9, lag=900.0, taken=1)]
    found = find_problems(queues, {}, [], {})
    assert kinds(*found) == [("late", "red"), ("unworked", "red"), ("late", "amber")]
    assert [(problem.words, problem.jobs, problem.lag) for problem in found] == [
        ("is late", 9, 900.0), ("has no worker", 4, 0.0), ("are late", 31, 100.0),
    ]  # fmt: skip
    assert levels_of(found) == {
        ("", "lag"): "red", ("slow", "lag"): "red", ("", "due"): "red", ("lost", "due"): "red",
        ("late-1", "lag"): "amber", ("late-30", "lag"): "amber",
    }  # fmt: skip


def test_that_no_node_runs_is_said_once_of_all_and_failing_queues_say_how_many_die() -> None:
    queues = [overview(name, due=2, owners=(None,)) for name in ("a", "b")]
    assert kinds(*find_problems(queues, {}, [], {}, any_node=False)) == [("nodeless", "red")]
    flows = {"Orders": Flow(300.0, 100.0, 10, 0.0, None, 90.0)}
    (problem,) = find_problems([overview(morgue_length=2300)], flows, [], {"Orders": 12.0})
    assert problem.troubles[0].detail == "90% of what it performed in the last 5 minutes, and 12 a minute die"
    assert problem.dead == 2300


def test_a_redis_that_loses_jobs_is_red() -> None:
    def redis(eviction: str, *warnings: str, disk_ok: bool = True) -> inspection.RedisInfo:
        return inspection.RedisInfo("Redis 7", 1, 0, 1, 1, eviction, "AOF", warnings, disk_ok)

    assert level_of_redis(redis("noeviction")) is None
    assert level_of_redis(redis("noeviction", "x")) == level_of_redis(redis("volatile-lru", "x")) == "amber"
    assert level_of_redis(redis("allkeys-lru", "x")) == level_of_redis(redis("noeviction", "x", disk_ok=False)) == "red"


def test_deaths_are_counted_over_some_minutes(app: lowq.Lowq, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowq_web.stats_cache.DEATHS_STEP", 0.0)
    queue, cache = app.queue("Orders", 2), StatsCache(app)
    queue.push({"id": n} for n in range(4))
    assert cache.figures().deaths == {}
    queue.bury(["0", "1"])

    def deaths() -> dict[str, float]:
        cache.forget()
        return cache.figures().deaths

    assert until(deaths, "deaths").keys() == {"Orders"}
    monkeypatch.setattr("lowq_web.stats_cache.DEATHS_WINDOW", 0.0)
    assert deaths() == {}, "those of long ago"


def test_a_paused_queue_has_no_part_in_the_latency_of_all(app: lowq.Lowq, client: TestClient) -> None:
    queue, due = app.queue("Orders", 1), shard_prefix("lowq", "Orders", 0) + "due"
    queue.push({"id": 1})
    app.client.command("ZADD", due, 1e9, "1", key=due)
    queue.pause()
    cache = StatsCache(app)
    assert (cache.stats(queue).lag > 1e6, cache.figures().total.lag) == (True, 0.0)
    assert "Hottest" not in client.get("/").text
    queue.resume()
    cache.forget()
    assert cache.figures().total.lag > 1e6


def test_a_kind_of_trouble_leads_to_the_queues_that_have_it(client: TestClient, app: lowq.Lowq) -> None:
    for name in ("a", "b"):
        app.queue(name, 1).push({"id": 1})
    app.queue("idle", 1).push({"id": 1})
    app.queue("idle").delete("1")
    reader = Reader(client)
    link = reader.page("/").find("a", has="2 queues").link
    rows = reader.page(link).table("Queue", "Latency")
    assert [next(row["Queue"].every("a")).text for row in rows] == ["a", "b"]
    assert "No queue has this trouble" in reader.page("/?trouble=late").find("main").text


def test_the_first_page_says_it_in_one_line(client: TestClient, app: lowq.Lowq) -> None:
    app.registrations.enter("Orders", 2)
    page = parse(client.get("/").text)
    (verdict,) = (part for part in page.every("section") if "verdict" in part.attributes.get("class", ""))
    assert verdict.text.startswith(("Nothing is wrong", "1 problem"))  # of Redis, which is not persistent
    assert "0 nodes alive" in verdict.text
