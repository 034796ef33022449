"""The alerts and the Grafana dashboard in deploy/: every expression is right, and asks for figures that there are."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

import lowq
import lowq.testing
import lowq_web
from lowq.observe.histories import BOUNDS
from lowq.observe.tallies import Counted, record_call
from lowq.store.keys import history_key
from lowq_web.prometheus import AllFigures
from tests.rows import case

DEPLOY = Path(__file__).parents[3] / "deploy"
#: Labels that Prometheus adds itself.
TARGET = {"job", "instance"}
#: Alerts that were promised.
ALERTS = {
    "LowqLatencyHigh", "LowqShardsWithoutOwner", "LowqDeadGrowing", "LowqNoNodes", "LowqPausedTooLong",
    "LowqBatchStuck", "LowqScheduleLate", "LowqScheduleMissed", "LowqLimitReached", "LowqRedisMemoryShort",
    "LowqRedisPersistenceFailing",
}  # fmt: skip


@pytest.fixture
def metrics(app: lowq.Lowq) -> dict[str, set[str]]:
    """Name of each time series -> its labels, as Prometheus gets them; and of its own one."""
    app.queue("Orders", 2, capacity=10).push({"id": 1})

    @lowq.every(60, name="report")
    @app.worker(queue_name="Reports", limit=lowq.Concurrency(2))
    def report(payloads_by_id: dict[str, list[Any]]) -> None: ...

    lowq.testing.drain(report, now=4e9)  # which begins the schedule
    app.queue("lowq:schedules:Reports", 1).push("report")
    nothing = Counted(0, 0, 0.0, (0,) * (len(BOUNDS) + 1))
    app.client.run_many([record_call(history_key("lowq", "Orders"), nothing, nothing, 2.0, None)])
    found, cache = {"up": set[str]()}, lowq_web.create_app(app).state.context.stats_cache
    figures = AllFigures(app, cache.figures(), cache.surroundings(), cache.watched())
    for family in figures.collect():
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
        if not family.samples:  # known only at times
            found[family.name] = {"queue", "schedule"} if "schedule" in family.name else {"queue"}
    return found


def selectors(expression: Any) -> Iterator[Any]:
    """The time series that an expression of PromQL asks for."""
    if isinstance(expression, promql_parser.VectorSelector):
        yield expression
    below = [getattr(expression, name, None) for name in ("expr", "lhs", "rhs", "vector_selector", "param")]
    for part in (*below, *getattr(expression, "args", ())):
        if part is not None:
            yield from selectors(part)


def asked(expression: str, metrics: dict[str, set[str]]) -> set[str]:
    """What it asks for, of which there is everything. Raises ValueError: it is no PromQL."""
    found = list(selectors(promql_parser.parse(expression.replace("$__rate_interval", "5m"))))
    for series in found:
        labels = {matcher.name for matcher in series.matchers.matchers}
        assert labels <= metrics[series.name] | TARGET, expression
    named = re.findall(r"\b(?:by|without|on|ignoring) \(([^)]*)\)", expression)
    of_all = set.union(TARGET, *(metrics[series.name] for series in found))
    assert set(re.findall(r"\w+", " ".join(named))) <= of_all, expression
    return {series.name for series in found}


def test_alerts_ask_for_what_there_is_and_say_how_bad_it_is_and_what_to_do(metrics: dict[str, set[str]]) -> None:
    document = yaml.safe_load((DEPLOY / "alerts.yml").read_text(encoding="utf-8"))
    rules = [rule for group in document["groups"] for rule in group["rules"]]
    assert {rule["alert"] for rule in rules} >= ALERTS
    for rule in rules:
        with case(rule["alert"]):
            assert asked(rule["expr"], metrics)
            assert rule["labels"]["severity"] in ("warning", "critical")
            assert set(rule["annotations"]) == {"summary", "description"}
            used = set(re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values())))
            left = asked(re.split(r"\band\b", rule["expr"])[0], metrics)
            assert used <= set.intersection(*(metrics[name] for name in left)) | TARGET


def test_panels_ask_for_what_there_is(metrics: dict[str, set[str]]) -> None:
    document = json.loads((DEPLOY / "grafana.json").read_text(encoding="utf-8"))
    expressions = [target["expr"] for panel in document["panels"] for target in panel.get("targets", ())]
    shown = " ".join(name for expression in expressions for name in asked(expression, metrics))
    figures = {re.sub("_(bucket|sum|count|created)$", "", name) for name in metrics} - {"up"}
    assert {name for name in figures if name not in shown} == set(), "every figure is on a panel"
