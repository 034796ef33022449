"""The alerts and the Grafana dashboard in deploy/: every expression is right, and asks for figures that there are."""

import json
import re
import shutil
import subprocess
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


#: Alert -> series of Prometheus, a value a minute, and the minutes after which the alert is quiet and fires.
FIRES: dict[str, tuple[dict[str, str], int, int]] = {
    "LowqLatencyHigh": (
        {
            'lowq_lag_seconds{queue="A"}': "0x9 301x30", 'lowq_paused{queue="A"}': "0x40",
            'lowq_lag_seconds{queue="B"}': "301x40", 'lowq_paused{queue="B"}': "1x40",
        },
        14, 16,
    ),
    "LowqBacklogGrows": (
        {'lowq_due{queue="A"}': "0+10x150", 'lowq_processed_total{queue="A"}': "0+10x150"}, 60, 80,
    ),
    "LowqShardsWithoutOwner": (
        {'lowq_shards_without_owner{queue="A"}': "0x9 3x9", 'lowq_due{queue="A"}': "1x20"}, 11, 13,
    ),
    "LowqNoNodes": ({"lowq_nodes": "2x9 0x9"}, 10, 12),
    "LowqDeadGrowing": (
        {'lowq_buried_total{queue="A"}': "0x9 5x20", 'lowq_morgue_length{queue="A"}': "0x9 5x20"}, 10, 17,
    ),
    "LowqFailing": (
        {'lowq_failed_total{queue="A"}': "0x9 0+5x40", 'lowq_processed_total{queue="A"}': "0+10x50"}, 15, 40,
    ),
    "LowqPausedTooLong": ({'lowq_paused{queue="A"}': "1x160", 'lowq_length{queue="A"}': "1x160"}, 100, 122),
    "LowqBatchStuck": ({'lowq_stuck_batches{queue="A"}': "0x9 1x20"}, 14, 16),
    "LowqThreadsAllBusy": (
        {"lowq_threads_busy": "5x60", "lowq_threads": "5x60", 'lowq_lag_seconds{queue="A"}': "0x9 61x50"}, 24, 26,
    ),
    "LowqTasksAllBusy": (
        {"lowq_tasks_busy": "5x60", "lowq_tasks": "5x60", 'lowq_lag_seconds{queue="A"}': "0x9 61x50"}, 24, 26,
    ),
    "LowqQueueFull": (
        {'lowq_length{queue="A"}': "0x9 91x20", 'lowq_busy{queue="A"}': "0x30", 'lowq_capacity{queue="A"}': "100x30"},
        14, 16,
    ),
    "LowqScheduleLate": ({'lowq_schedule_next_seconds{queue="A",schedule="s"}': "60x30"}, 7, 9),
    "LowqScheduleMissed": ({'lowq_schedule_missed_total{queue="A",schedule="s"}': "0x9 2x20"}, 9, 11),
    "LowqScheduleUnknown": ({'lowq_schedule_unknown{queue="A",schedule="s"}': "0x9 1x20"}, 19, 21),
    "LowqLimitReached": (
        {'lowq_limit_waiting{queue="A",limit="erp"}': "1x30", 'lowq_lag_seconds{queue="A"}': "70x40"}, 14, 16,
    ),
    "LowqRedisMemoryShort": (
        {"lowq_redis_memory_bytes": "50x9 95x20", "lowq_redis_memory_max_bytes": "100x30"}, 14, 16,
    ),
    "LowqRedisPersistenceFailing": ({"lowq_redis_persistence_failing": "0x9 1x20"}, 10, 12),
    "LowqRedisNotPersistent": ({"lowq_redis_persistence": "1x9 0x20"}, 19, 21),
    "LowqDashboardDown": ({'up{job="lowq"}': "1x9 0x20"}, 14, 16),
}  # fmt: skip


def test_prometheus_accepts_the_alerts_and_each_fires_when_it_should(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("there is no promtool")
    rules = DEPLOY / "alerts.yml"
    names = {rule["alert"] for group in yaml.safe_load(rules.read_text())["groups"] for rule in group["rules"]}
    assert names == FIRES.keys()
    stories = [
        {
            "interval": "1m",
            "input_series": [{"series": name, "values": values} for name, values in series.items()],
            "promql_expr_test": [
                {
                    "expr": f'count(ALERTS{{alertname="{alert}", alertstate="firing"}})', "eval_time": f"{minutes}m",
                    "exp_samples": [{"value": 1}] if minutes == loud else [],
                }
                for minutes in (quiet, loud)
            ],
        }
        for alert, (series, quiet, loud) in FIRES.items()
    ]  # fmt: skip
    file = tmp_path / "alerts.yml"
    file.write_text(yaml.safe_dump({"rule_files": [str(rules)], "evaluation_interval": "1m", "tests": stories}))
    for verb, path in (("check", rules), ("test", file)):
        done = subprocess.run([promtool, verb, "rules", path], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_page_of_monitoring_has_every_metric(metrics: dict[str, set[str]]) -> None:
    page = (DEPLOY.parent / "docs" / "monitoring.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(lowq_\w+)`", page.partition("## Graphite")[0]))
    assert named == {re.sub("_(bucket|sum|count|created)$", "", name) for name in metrics} - {"up"}
