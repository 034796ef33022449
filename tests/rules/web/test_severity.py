"""Is anything wrong? What the first page says of it, and in which order."""

from typing import Any

from starlette.testclient import TestClient

import lowq
from lowq import inspection
from lowq.observe.histories import Flow
from lowq.operate.nodes import StuckBatch
from lowq_web.severity import Problem, find_problems, levels_of
from tests.rows import case
from tests.rules.web.shown import parse


def overview(name: str = "Orders", *, owners: tuple[str | None, ...] = ("a", "a"), **figures: Any) -> Any:
    """A queue of as many shards, each with its part of what is due."""
    zero = {"length": 0, "due": 0, "taken": 0, "retries": 0, "lag": 0.0, "processed": 0, "failed": 0, "buried": 0}
    values: dict[str, Any] = zero | {"scheduled": 0, "fresh": 0, "morgue_length": 0, "paused": False} | figures
    stats = inspection.Stats(name, len(owners), **values)
    shards = [
        inspection.ShardInfo(number, stats.length or stats.due, 0, 0, stats.lag, owner, 1, 1.0, stats.paused, None)
        for number, owner in enumerate(owners)
    ]
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
        ({"due": 5}, None, [stuck], [("stuck", "red")]),
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
            found = find_problems([overview(**figures)], {} if flows is None else {"Orders": flows}, batches)
            assert kinds(*found) == expected


def test_the_worst_come_first_and_their_cells_are_marked() -> None:
    late = [overview(f"late-{number}", due=number, lag=100.0, taken=1) for number in (1, 30)]
    queues = [*late, overview("lost", due=2, owners=(None, None)), overview("slow", due=9, lag=900.0, taken=1)]
    found = find_problems(queues, {}, [])
    assert kinds(*found) == [("late", "red"), ("unworked", "red"), ("late", "amber")]
    assert [(problem.words, problem.jobs, problem.lag) for problem in found] == [
        ("is late", 9, 900.0), ("has no worker", 4, 0.0), ("are late", 31, 100.0),
    ]  # fmt: skip
    assert levels_of(found) == {
        ("slow", "lag"): "red", ("lost", "due"): "red", ("late-1", "lag"): "amber", ("late-30", "lag"): "amber",
    }  # fmt: skip


def test_the_first_page_says_it_in_one_line(client: TestClient, app: lowq.Lowq) -> None:
    app.registrations.enter("Orders", 2)
    page = parse(client.get("/").text)
    (verdict,) = (part for part in page.every("section") if "verdict" in part.attributes.get("class", ""))
    assert verdict.text.startswith(("Nothing is wrong", "1 problem"))  # of Redis, which is not persistent
    assert "0 nodes alive" in verdict.text
