"""The verbs that count and look back: stats, statistics; rates, times, errors, audit."""

import dataclasses
import re
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from math import isfinite
from typing import Any, TypeVar

import click

from lowq.application import Lowq
from lowq.cli.group import json_option, optional_queue, queue_argument, queues_argument, used_queue, with_app
from lowq.cli.output import answered, bound, echo_json, echo_lines, fail_if, number, say, server_time, shorten, table
from lowq.clock import LONGEST_WAIT, ago, duration
from lowq.errors import RedisUnavailable, ScriptError
from lowq.logs import printable
from lowq.observe.error_groups import most_frequent_first
from lowq.observe.histories import PERCENTILES, SPANS, Histogram, HistoryPoint, Span, StretchTimes, Times, join
from lowq.operate.stats import Forecast, Stats
from lowq.operate.walk import Silent
from lowq.queue import Queue
from lowq.store import untrusted

#: Seconds between two looks of `stats --watch`.
WATCH_SECONDS = 2.0
#: Lines that a table of rates or times is drawn together to.
LINES = 24

#: Figures that are added up over queues.
_SUMS = (
    "length", "due", "scheduled", "fresh", "retries", "taken", "morgue_length", "processed", "failed", "buried",
    "expired", "cancelled", "pushed",
)  # fmt: skip


#: Shown in place of figures.
NO_QUEUE = "no queue has been used yet"


@click.command
@with_app
@queues_argument
@click.option(
    "--watch", is_flag=False, flag_value=str(WATCH_SECONDS), metavar="[SECONDS]", help="Again and again, in place."
)
@json_option
def stats(app: Lowq, queues: tuple[str, ...], watch: str | None, as_json: bool) -> None:
    """Queues in figures: all of them, or those named.

    LENGTH is all that waits: DUE and LATER, which is what the states scheduled and retrying are together. RETRIES are
    those among them that have failed before, due or not. RUNNING are jobs that a node or consumer has taken, DEAD those
    in the morgue. LATENCY is how long the oldest due job has waited; the row of all queues leaves paused ones out.
    BACKLOG says when nothing is due or in flight any more, if it goes on as in the last 5 minutes.
    """
    seconds = None
    if watch is not None:
        seconds = _seconds(watch)
        if seconds is None:  # `stats --watch Orders`
            queues, seconds = (watch, *queues), WATCH_SECONDS
    if seconds is None:
        unanswered: dict[str, str] = {}
        _show_stats(_read_stats(app, queues, unanswered), as_json, unanswered)
        end_without(unanswered)
        return
    if as_json:
        while True:
            _show_stats(_read_stats(app, queues), as_json)
            time.sleep(seconds)
    _watch(app, queues, seconds)


def _seconds(text: str) -> float | None:
    if not re.fullmatch(r"\d*\.?\d+", text):
        return None
    return min(max(float(text), 0.1), LONGEST_WAIT)


def _read_stats(
    app: Lowq, queues: Sequence[str], unanswered: dict[str, str] | None = None
) -> list[tuple[Stats, Forecast]]:
    """Figures of queues. ``unanswered``: gets the shards that do not answer, by queue, which are left out; None: such a
    shard is an error.
    """

    def read(queue: Queue) -> tuple[Stats, Forecast]:
        silent: Silent | None = None if unanswered is None else {}
        found = queue.stats_and_forecast(silent=silent)
        if unanswered is not None and silent:
            unanswered[queue.name] = shards_without(silent, "not counted")
        return found

    if queues:
        return [read(app.queue(name)) for name in dict.fromkeys(queues)]
    found = []
    for info in app.queues():
        try:
            found.append(read(app.queue(info.name, info.shards_count)))
        except ScriptError as error:  # a key of the wrong type
            untrusted.log_skipped("queue", info.name, str(error))
    return found


def shards_without(silent: Silent, state: str) -> str:
    """The shards that are left out, and why."""
    places = ", ".join(map(str, sorted(silent)))
    return f"shard{'s' if len(silent) > 1 else ''} {places} {state}: {next(iter(silent.values()))}"


def end_without(unanswered: Mapping[str, str]) -> None:
    """Names the shards that are left out, as a primary does not answer, and ends the command with exit code 1."""
    for queue, what in unanswered.items():
        click.echo(f"lowq: {queue}: {printable(what)}", err=True)
    fail_if(unanswered)


def _total(figures: Sequence[Stats]) -> dict[str, Any]:
    total: dict[str, Any] = {name: sum(getattr(item, name) for item in figures) for name in _SUMS}
    return total | {"lag": max((item.lag for item in figures if not item.paused), default=0.0)}


def _show_stats(
    found: Sequence[tuple[Stats, Forecast]], as_json: bool, unanswered: Mapping[str, str] | None = None
) -> None:
    figures = [item for item, _ in found]
    forecasts = {item.name: dataclasses.asdict(forecast) | {"text": forecast.text} for item, forecast in found}
    more = {"unanswered": unanswered} if unanswered else {}
    if not answered(
        as_json, {"total": _total(figures), "queues": figures, "forecasts": forecasts, **more}, found, NO_QUEUE
    ):
        echo_lines(_stats_table(found))


@click.command
@with_app
@queues_argument
@json_option
def statistics(app: Lowq, queues: tuple[str, ...], as_json: bool) -> None:
    """Tasks by state and calls by verb.

    In the words of Tarantool's queue module, of all queues or of those named.
    """
    found = []
    for name in list(dict.fromkeys(queues)) or [info.name for info in app.queues()]:
        try:
            found.append(app.queue(name).statistics())
        except ScriptError as error:  # a key of the wrong type: `stats` leaves it out, too
            if queues:
                raise
            untrusted.log_skipped("queue", name, str(error))
    if answered(as_json, {"queues": found}, found, NO_QUEUE):
        return
    for item in found:
        lines = [item.name]
        for title, counts in (("tasks", item.tasks), ("calls", item.calls)):
            counted = dataclasses.asdict(counts).items()
            lines += [f"  {title}:", *(f"    {name}: {'not counted' if n is None else n}" for name, n in counted)]
        echo_lines(lines)


_STATS_COLUMNS = (
    "queue", "length", "due", "later", "retries", "running", "dead", "latency", "processed", "failed", "per s?",
    "backlog?", "?",
)  # fmt: skip


def _note(item: Stats) -> str:
    full = "" if item.fill is None else f"{item.fill:.0%} of capacity {item.capacity:,}"
    return ", ".join(filter(None, ("paused" if item.paused else "", full)))


def _stats_table(found: Sequence[tuple[Stats, Forecast]], rates: dict[str, float] | None = None) -> list[str]:
    def row(name: str, of: dict[str, Any], *notes: str, rate: float | None = None) -> list[str]:
        figures = [number(of[key]) for key in ("length", "due", "scheduled", "retries", "taken", "morgue_length")]
        counters = [number(of["processed"]), number(of["failed"]), "" if rate is None else number(round(rate))]
        return [name, *figures, duration(of["lag"]), *counters, *notes]

    known = rates or {}
    rows = [
        row(
            item.name, dataclasses.asdict(item), forecast.text if forecast.backlog else "", _note(item),
            rate=known.get(item.name),
        )
        for item, forecast in found
    ]  # fmt: skip
    if len(found) > 1:
        total = _total([item for item, _ in found])
        rows.append(row(f"all {len(found)} queues", total, "", "", rate=known.get("")))
    return table(_STATS_COLUMNS, rows, right=[name.rstrip("?") for name in _STATS_COLUMNS[1:-2]])


def _watch(app: Lowq, queues: Sequence[str], seconds: float) -> None:
    """Shows the figures again and again, and writes over what it has written; one table after the other where it can't.
    Ctrl-C ends it.
    """
    before: tuple[float, dict[str, int]] | None = None
    written = 0
    try:
        while True:
            try:
                found = _read_stats(app, queues)
            except RedisUnavailable as error:
                lines = [f"{str(error).rstrip('.')}; trying again"]
            else:
                now, counts = time.monotonic(), {item.name: item.processed for item, _ in found}
                rates: dict[str, float] = {}
                if before is not None:
                    seconds_ago, known = now - before[0], counts.keys() & before[1].keys()
                    rates = {name: (counts[name] - before[1][name]) / seconds_ago for name in known}
                    rates[""] = sum(rates.values())
                before = now, counts
                head = f"{datetime.now().astimezone():%H:%M:%S}  every {seconds:g} s, Ctrl-C ends it"
                lines = [head, *(_stats_table(found, rates) if found else [NO_QUEUE])]
            up = ""
            if sys.stdout.isatty():
                columns, rows = shutil.get_terminal_size()
                lines = [shorten(line, columns) for line in lines[: rows - 1]]
                up = (f"\x1b[{written}F" if written else "") + "\x1b[J"
                written = len(lines)
            click.echo(up + "\n".join(lines))
            sys.stdout.flush()
            time.sleep(seconds)
    except KeyboardInterrupt:
        if sys.stdout.isatty():
            click.echo()


# --- over time ---

span_option = click.option("--span", type=click.Choice(SPANS), default="hour", show_default=True, help="How far back.")
Item = TypeVar("Item")


@click.command
@with_app
@queue_argument
@span_option
@json_option
def rates(app: Lowq, queue: str, span: Span, as_json: bool) -> None:
    """How many jobs were performed and failed per second, and the latency, over time."""
    handle = used_queue(app, queue)
    found = handle.rates(span)
    if as_json:
        echo_json({"queue": queue, "span": found.span, "step": found.step, "rates": found.rates})
        return
    now = server_time(app)
    lines = ([rate for rate in line if rate.processed is not None] for line in _lines_of(found.rates))
    rows = [[_clock(line[0].at, span), ago(line[0].at, now), *_rates_row(line)] for line in lines if line]
    if not rows:
        say("no node has worked this queue in that time")
        return
    columns = ("from", "which was", "performed/s", "failed/s", "latency")
    echo_lines(table(columns, rows, right=columns[2:]))


@click.command
@with_app
@optional_queue
@span_option
@json_option
def times(app: Lowq, queue: str | None, span: Span, as_json: bool) -> None:
    """How long jobs wait and run: of a queue over time, with the slowest batches of the last hour; or of all queues."""
    if queue is None:
        _times_of_all(app, span, as_json)
        return
    handle = used_queue(app, queue)
    found, slowest = handle.times(span), handle.slowest()
    if as_json:
        stretches = [{"at": item.at, **_percentiles_of(item)} for item in found.stretches]
        head = {"queue": queue, "span": span, "step": found.step}
        echo_json({**head, **_percentiles_of(found), "stretches": stretches, "slowest": slowest})
        return
    now = server_time(app)
    joined = map(join, _lines_of(found.stretches))
    rows = [
        [_clock(item.at, span), ago(item.at, now), *_times_row(item)]
        for item in joined
        if item.wait.count or item.run.count
    ]
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
    queues = [{"queue": name, **_percentiles_of(times)} for name, times in worked.items()]
    if answered(as_json, {"span": span, "queues": queues}, worked, "no node has worked any queue in that time"):
        return
    rows = [[name, *_times_row(StretchTimes(0.0, times.wait, times.run))] for name, times in worked.items()]
    echo_lines(table(("queue", *_TIMES_COLUMNS), rows, right=_TIMES_COLUMNS))


def _percentiles_of(found: Times | StretchTimes) -> dict[str, dict[str, float | None]]:
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
    if not found.count:
        return ""
    return duration(value, fine=True) if isfinite(value) else f"> {duration(found.buckets[-2][0])}"


@click.command
@with_app
@optional_queue
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
    if answered(
        as_json, {"errors": found}, found, "nothing has failed in the last 30 days, as far as nodes have recorded"
    ):
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


def _lines_of(items: Sequence[Item]) -> list[Sequence[Item]]:
    """The items, so many together that they make about LINES lines."""
    together = max(len(items) // LINES, 1)
    return [items[start : start + together] for start in range(0, len(items), together)]


def _clock(at: float, span: Span) -> str:
    """The local time of a moment, as exact as the span asks for."""
    form = {"hour": "%H:%M:%S", "day": "%a %H:%M"}.get(span, "%m-%d %H:%M")
    return datetime.fromtimestamp(at).astimezone().strftime(form)


def _rates_row(some: list[HistoryPoint]) -> list[str]:
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
    is_filtered = action or since or until or any(wanted.values())
    nothing = "no such entry" if is_filtered else "nobody did anything yet"
    if answered(as_json, {"audit": entries}, entries, nothing):
        return
    now = server_time(app)
    rows = [
        [
            ago(entry.at, now), entry.who, entry.address or "", entry.action, entry.target,
            "" if entry.count is None else number(entry.count),
            " ".join(f"{name}={value}" for name, value in entry.detail.items()),
        ]
        for entry in entries
    ]  # fmt: skip
    echo_lines(table(("when", "who", "from", "did", "to", "jobs", "?"), rows, right=("jobs",)))
    if len(entries) == limit:
        say(f"there may be more: --after {entries[-1].cursor}")
