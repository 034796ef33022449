"""The verbs that look back: rates, audit."""

from datetime import datetime

import click

from lowq.application import Lowq
from lowq.cli.group import json_option, queue_argument, with_app
from lowq.cli.look import server_time
from lowq.cli.output import echo_json, echo_lines, number, say, table
from lowq.duration import ago, duration
from lowq.metrics.counters import Span
from lowq.metrics.history import SPANS, Rate

#: Lines that a table of rates is drawn together to.
LINES = 24


@click.command
@with_app
@queue_argument
@click.option("--span", type=click.Choice(SPANS), default="hour", show_default=True, help="How far back.")
@json_option
def rates(app: Lowq, queue: str, span: Span, as_json: bool) -> None:
    """How many jobs were performed and failed per second, and the lag, over time."""
    handle = app.queue(queue, app.queue(queue).shards_count)
    found = handle.rates(span)
    if as_json:
        echo_json({"queue": queue, "span": found.span, "step": found.step, "rates": found.rates})
        return
    together = max(len(found.rates) // LINES, 1)
    now = server_time(app)
    rows = []
    for start in range(0, len(found.rates), together):
        some = [rate for rate in found.rates[start : start + together] if rate.processed is not None]
        if some:
            rows.append([_clock(some[0].at, span), ago(some[0].at, now), *_row(some)])
    if not rows:
        say("no node has worked this queue in that time")
        return
    columns = ("from", "which was", "performed/s", "failed/s", "lag")
    echo_lines(table(columns, rows, right=columns[2:]))


def _clock(at: float, span: Span) -> str:
    """When that was, in the time of this machine."""
    form = {"hour": "%H:%M:%S", "day": "%a %H:%M"}.get(span, "%m-%d %H:%M")
    return datetime.fromtimestamp(at).astimezone().strftime(form)


def _row(some: list[Rate]) -> list[str]:
    processed = sum(rate.processed or 0.0 for rate in some) / len(some)
    failed = sum(rate.failed or 0.0 for rate in some) / len(some)
    lags = [rate.lag for rate in some if rate.lag is not None]
    return [number(round(processed, 2)), number(round(failed, 2)), duration(max(lags)) if lags else ""]


@click.command
@with_app
@click.option("--limit", type=click.IntRange(1, 1000), default=50, show_default=True)
@json_option
def audit(app: Lowq, limit: int, as_json: bool) -> None:
    """What people did on the dashboard, the latest first."""
    entries = app.audit(limit)
    if as_json:
        echo_json({"audit": entries})
        return
    if not entries:
        say("nobody did anything on the dashboard yet")
        return
    now = server_time(app)
    rows = [
        [
            ago(entry.at, now),
            entry.who,
            entry.action,
            entry.target,
            "" if entry.count is None else number(entry.count),
            " ".join(f"{name}={value}" for name, value in entry.detail.items()),
        ]
        for entry in entries
    ]
    echo_lines(table(("when", "who", "did", "to", "jobs", "?"), rows, right=("jobs",)))
