"""The verbs that look back: rates, times, errors, audit."""

from datetime import datetime
from math import isfinite
from typing import Any

import click

from lowq.application import Lowq
from lowq.cli.group import json_option, queue_argument, used_queue, with_app
from lowq.cli.output import bound, echo_json, echo_lines, number, say, server_time, table
from lowq.duration import ago, duration
from lowq.observe.error_groups import most_frequent_first
from lowq.observe.histories import PERCENTILES, SPANS, Histogram, HistoryPoint, Span, StretchTimes, Times, join

#: Lines that a table of rates is drawn together to.
LINES = 24


@click.command
@with_app
@queue_argument
@click.option("--span", type=click.Choice(SPANS), default="hour", show_default=True, help="How far back.")
@json_option
def rates(app: Lowq, queue: str, span: Span, as_json: bool) -> None:
    """How many jobs were performed and failed per second, and the lag, over time."""
    handle = used_queue(app, queue)
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


@click.command
@with_app
@click.argument("queue", required=False)
@click.option("--span", type=click.Choice(SPANS), default="hour", show_default=True, help="How far back.")
@json_option
def times(app: Lowq, queue: str | None, span: Span, as_json: bool) -> None:
    """How long jobs wait and run: of a queue over time, with the slowest batches of the last hour; or of all queues."""
    if queue is None:
        _times_of_all(app, span, as_json)
        return
    handle = used_queue(app, queue)
    found, slowest = handle.times(span), handle.slowest()
    if as_json:
        stretches = [
            {"at": item.at, "wait": _percentiles(item.wait), "run": _percentiles(item.run)} for item in found.stretches
        ]
        echo_json(
            {
                "queue": queue,
                "span": span,
                "step": found.step,
                **_both(found),
                "stretches": stretches,
                "slowest": slowest,
            }
        )
        return
    together = max(len(found.stretches) // LINES, 1)
    now = server_time(app)
    rows = []
    for start in range(0, len(found.stretches), together):
        item = join(found.stretches[start : start + together])
        if item.wait.count or item.run.count:
            rows.append([_clock(item.at, span), ago(item.at, now), *_times_row(item)])
    if not rows:
        say("no node has worked this queue in that time")
        return
    rows.append(["all", "", *_times_row(StretchTimes(0.0, found.wait, found.run))])
    echo_lines(table(("from", "which was", *_TIMES_COLUMNS), rows, right=_TIMES_COLUMNS))
    if slowest:
        say("the slowest batches of the last hour:")
        lines = [
            [duration(item.seconds, fine=True), ago(item.at, now), str(item.shard), number(item.ids_count), item.id]
            for item in slowest
        ]  # fmt: skip
        columns = ("ran", "ended", "shard", "ids", "first id")
        echo_lines(table(columns, lines, right=("ran", "shard", "ids")))


#: The columns of a row of times.
_TIMES_COLUMNS = (
    "jobs", *(f"wait {name}" for name in PERCENTILES), "batches", *(f"run {name}" for name in PERCENTILES)
)  # fmt: skip


def _times_of_all(app: Lowq, span: Span, as_json: bool) -> None:
    """A row for each queue that was worked in that time."""
    found = {info.name: app.queue(info.name, info.shards_count).times(span) for info in app.queues()}
    worked = {name: times for name, times in sorted(found.items()) if times.wait.count or times.run.count}
    if as_json:
        echo_json({"span": span, "queues": [{"queue": name, **_both(times)} for name, times in worked.items()]})
        return
    if not worked:
        say("no node has worked any queue in that time")
        return
    rows = [[name, *_times_row(StretchTimes(0.0, times.wait, times.run))] for name, times in worked.items()]
    echo_lines(table(("queue", *_TIMES_COLUMNS), rows, right=_TIMES_COLUMNS))


def _both(found: Times) -> dict[str, dict[str, float | None]]:
    return {"wait": _percentiles(found.wait), "run": _percentiles(found.run)}


def _percentiles(found: Histogram) -> dict[str, float | None]:
    """None: more than the largest bound."""
    values = {name: found.percentile(share) for name, share in PERCENTILES.items()}
    return {"count": found.count} | {name: value if isfinite(value) else None for name, value in values.items()}


def _times_row(item: StretchTimes) -> list[str]:
    cells = []
    for found in (item.wait, item.run):
        cells += [number(found.count), *(_at_most(found, share) for share in PERCENTILES.values())]
    return cells


def _at_most(found: Histogram, share: float) -> str:
    """A percentile in words."""
    value = found.percentile(share)
    return (
        ""
        if not found.count
        else duration(value, fine=True)
        if isfinite(value)
        else f"> {duration(found.buckets[-2][0])}"
    )


@click.command
@with_app
@click.argument("queue", required=False)
@click.option(
    "--sort", type=click.Choice(["count", "last"]), default="count", show_default=True,
    help="count: most failures in the last 24 hours first; last: latest failure first.",
)  # fmt: skip
@json_option
def errors(app: Lowq, queue: str | None, sort: str, as_json: bool) -> None:
    """What fails: failures of a queue, or of all, in groups of alike errors."""
    found = app.error_groups() if queue is None else used_queue(app, queue).error_groups()
    if sort == "count":
        found = most_frequent_first(found)
    if as_json:
        echo_json({"errors": found})
        return
    if not found:
        say("nothing has failed in the last 30 days, as far as nodes have recorded")
        return
    now = server_time(app)
    rows = [
        [
            number(group.count), number(sum(group.hours)), ago(group.last_seen, now), ago(group.first_seen, now),
            group.queue, group.fingerprint, group.sample_id, group.text,
        ]
        for group in found
    ]  # fmt: skip
    columns = ("count", "24 h", "last", "first", "queue", "group", "id", "error")
    echo_lines(table(columns, rows, right=columns[:2]))


def _clock(at: float, span: Span) -> str:
    """When that was, in the time of this machine."""
    form = {"hour": "%H:%M:%S", "day": "%a %H:%M"}.get(span, "%m-%d %H:%M")
    return datetime.fromtimestamp(at).astimezone().strftime(form)


def _row(some: list[HistoryPoint]) -> list[str]:
    processed = sum(rate.processed or 0.0 for rate in some) / len(some)
    failed = sum(rate.failed or 0.0 for rate in some) / len(some)
    lags = [rate.lag for rate in some if rate.lag is not None]
    return [number(round(processed, 2)), number(round(failed, 2)), duration(max(lags)) if lags else ""]


@click.command
@with_app
@click.option("--limit", type=click.IntRange(1, 1000), default=50, show_default=True)
@click.option("--who", metavar="NAME", help="By somebody whose name has this in it.")
@click.option("--action", metavar="VERB", help="Only this: kick, pause, ...")
@click.option("--to", "target", metavar="NAME", help="To this queue or node.")
@click.option("--since", metavar="TIME", help="From then on: -2h, 2027-01-31T12:00, Unix seconds.")
@click.option("--until", metavar="TIME", help="Up to then.")
@click.option("--after", metavar="CURSOR", help="Those before the entry that has this cursor in --json.")
@json_option
def audit(
    app: Lowq, limit: int, as_json: bool, action: str | None, since: str | None, until: str | None, **wanted: Any
) -> None:
    """What people did on the dashboard and the command line, the latest first."""
    bounds: Any = {name: bound(app, f"--{name}", text, None) for name, text in (("since", since), ("until", until))}
    entries = app.audit(limit, action=action and action.replace("-", "_"), **bounds, **wanted)
    if as_json:
        echo_json({"audit": entries})
        return
    if not entries:
        say("no such entry" if action or since or until or any(wanted.values()) else "nobody did anything yet")
        return
    now = server_time(app)
    rows = [
        [
            ago(entry.at, now),
            entry.who,
            entry.address or "",
            entry.action,
            entry.target,
            "" if entry.count is None else number(entry.count),
            " ".join(f"{name}={value}" for name, value in entry.detail.items()),
        ]
        for entry in entries
    ]
    echo_lines(table(("when", "who", "from", "did", "to", "jobs", "?"), rows, right=("jobs",)))
    if len(entries) == limit:
        say(f"there may be more: --after {entries[-1].cursor}")
