"""The alerts and the Grafana dashboard in deploy/: every expression is right, and asks for figures that there are."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

import lowq
import lowq_web
from lowq.metrics.counters import BOUNDS, Counted, record_call
from lowq.store.keys import history_key
from lowq_web.context import AppContext
from lowq_web.metrics import AllFigures
from tests.rows import case

DEPLOY = Path(__file__).parents[3] / "deploy"
#: Labels that Prometheus adds itself, and metrics of its own.
TARGET, OWN = {"job", "instance"}, {"up": {"job", "instance"}}
#: Alerts that were promised.
ALERTS = {
    "LowqLatencyHigh", "LowqShardsWithoutOwner", "LowqDeadGrowing", "LowqNoNodes", "LowqPausedTooLong",
    "LowqBatchStuck",
}  # fmt: skip


@pytest.fixture
def metrics(app: lowq.Lowq) -> dict[str, set[str]]:
    """Name of each time series -> its labels, as Prometheus gets them."""
    app.queue("Orders", 2, capacity=10).push({"id": 1})
    nothing = Counted(0, 0, 0.0, (0,) * (len(BOUNDS) + 1))
    app.client.run_many([record_call(history_key("lowq", "Orders"), nothing, nothing, 2.0, None)])
    context: AppContext = lowq_web.create_app(app).state.context
    found: dict[str, set[str]] = {}
    cache = context.stats_cache
    for family in AllFigures(app, cache.figures(), cache.surroundings()).collect():
        assert family.documentation
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
        if not family.samples:  # known only at times
            found[family.name] = {"queue"}
    return found


def problems(expression: str, metrics: Mapping[str, set[str]]) -> list[str]:
    """What is wrong with an expression of PromQL."""
    for variable, value in (("$__rate_interval", "5m"), ("$queue", ".*")):
        expression = expression.replace(variable, value)
    try:
        parsed = promql_parser.parse(expression)
    except ValueError as error:
        return [f"{expression}: {error}"]
    known = {**metrics, **OWN}
    found = []
    asked: set[str] = set()
    labels: set[str] = set()
    for part in parts(parsed):
        if isinstance(part, promql_parser.VectorSelector):
            if part.name not in known:
                found.append(f"{expression}: there is no metric {part.name}")
                continue
            asked |= known[part.name] | TARGET
            wrong = {matcher.name for matcher in part.matchers.matchers} - known[part.name] - TARGET
            found += [f"{expression}: {part.name} has no label {name}" for name in sorted(wrong)]
        elif isinstance(part, promql_parser.AggregateExpr) and part.modifier is not None:
            labels |= set(part.modifier.labels)
        elif isinstance(part, promql_parser.BinaryExpr) and part.modifier is not None and part.modifier.matching:
            labels |= set(part.modifier.matching.labels)
    return found + [f"{expression}: nothing in it has a label {name}" for name in sorted(labels - asked)]


def parts(expression: Any) -> Iterator[Any]:
    """An expression and all that it is made of."""
    yield expression
    for name in ("expr", "lhs", "rhs", "vector_selector", "param"):
        below = getattr(expression, name, None)
        if below is not None:
            yield from parts(below)
    for argument in getattr(expression, "args", ()):
        yield from parts(argument)


def alerts() -> list[dict[str, Any]]:
    document = yaml.safe_load((DEPLOY / "alerts.yml").read_text(encoding="utf-8"))
    return [rule for group in document["groups"] for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    return [
        panel
        for panel in json.loads((DEPLOY / "grafana.json").read_text(encoding="utf-8"))["panels"]
        if panel["type"] != "row"
    ]


def test_alerts_ask_for_what_there_is(metrics: dict[str, set[str]]) -> None:
    assert [problem for rule in alerts() for problem in problems(rule["expr"], metrics)] == []


def test_every_alert_says_how_long_how_bad_and_what_to_do(metrics: dict[str, set[str]]) -> None:
    names = [rule["alert"] for rule in alerts()]
    assert len(set(names)) == len(names)
    assert set(names) >= ALERTS
    for rule in alerts():
        assert set(rule) == {"alert", "expr", "for", "labels", "annotations"}, rule
        assert re.fullmatch(r"[1-9]\d*[smh]", rule["for"])
        assert rule["labels"] == {"severity": rule["labels"]["severity"]}
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert set(rule["annotations"]) == {"summary", "description"}
        used = set(re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values())))
        assert used <= {"queue"}
        left = re.split(r"\band\b", rule["expr"])[0]
        names = [part.name for part in parts(promql_parser.parse(left)) if hasattr(part, "matchers")]
        assert used <= set.intersection(*({**metrics, **OWN}[name] for name in names)), rule["alert"]


def test_panels_ask_for_what_there_is(metrics: dict[str, set[str]]) -> None:
    expressions = [target["expr"] for panel in panels() for target in panel["targets"]]
    assert [problem for expression in expressions for problem in problems(expression, metrics)] == []
    shown = {
        part.name
        for expression in expressions
        for part in parts(promql_parser.parse(expression.replace("$__rate_interval", "5m")))
        if isinstance(part, promql_parser.VectorSelector)
    }
    histograms = {name.removesuffix("_bucket") for name in metrics if name.endswith("_bucket")}
    lacking = {name for name in metrics if not any(name.startswith(one) for one in histograms)} - shown
    assert {name for name in lacking if not name.endswith("_created")} == set(), "every figure is on a panel"


def test_panels_do_not_overlap() -> None:
    document = json.loads((DEPLOY / "grafana.json").read_text(encoding="utf-8"))
    taken: set[tuple[int, int]] = set()
    for panel in document["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert max(x for x, _ in cells) < 24
        assert not taken & cells, panel["title"]
        taken |= cells


def test_what_is_wrong_is_found(metrics: dict[str, set[str]]) -> None:
    rows: list[tuple[str, str]] = [
        ("sum(", "unclosed"),
        ("rate(lowq_processed_total)", "expected type matrix"),
        ("nosuch(lowq_due)", "unknown function"),
        ("lowq_dead > 1", "there is no metric lowq_dead"),
        ("rate(lowq_processed[5m])", "there is no metric lowq_processed"),
        ('lowq_due{name="a"}', "lowq_due has no label name"),
        ("sum by (node) (lowq_due)", "nothing in it has a label node"),
        ("lowq_due and on (shard) lowq_paused", "nothing in it has a label shard"),
        ("histogram_quantile(0.9, lowq_run_seconds_bucket)", "there is no metric lowq_run_seconds_bucket"),
        ("-(lowq_nodes + (lowq_nods))", "there is no metric lowq_nods"),
    ]
    for expression, problem in rows:
        with case(expression, problem):
            (found,) = problems(expression, metrics)
            assert problem in found
