"""The verbs that count: stats, statistics."""

import dataclasses
import re
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import click

from lowq.application import Lowq
from lowq.cli.failure import FAILED
from lowq.cli.group import json_option, with_app
from lowq.cli.output import echo_json, echo_lines, number, say, shorten, table
from lowq.duration import LONGEST_WAIT, duration
from lowq.errors import RedisUnavailable, ScriptError
from lowq.logs import printable
from lowq.operate.stats import Forecast, Stats
from lowq.operate.walk import Silent
from lowq.queue import Queue
from lowq.store import untrusted

#: Seconds between two looks of `stats --watch`.
WATCH_SECONDS = 2.0

#: Figures that are added up over queues.
_SUMS = (
    "length", "due", "scheduled", "fresh", "retries", "taken", "morgue_length", "processed", "failed", "buried",
    "expired", "pushed",
)  # fmt: skip


@click.command
@with_app
@click.argument("queues", nargs=-1, metavar="[QUEUE...]")
@click.option(
    "--watch", is_flag=False, flag_value=str(WATCH_SECONDS), metavar="[SECONDS]", help="Again and again, in place."
)
@json_option
def stats(app: Lowq, queues: tuple[str, ...], watch: str | None, as_json: bool) -> None:
    """Queues in figures: all of them, or those named.

    LENGTH is all that waits: DUE and LATER, which is what the states scheduled and retrying are together. RETRIES are
    those among them that have failed before, due or not. BACKLOG says when nothing is due or in flight any more, if it
    goes on as in the last 5 minutes.
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
    _Watch(app, queues, seconds).run()


def _seconds(text: str) -> float | None:
    if not re.fullmatch(r"\d*\.?\d+", text):
        return None
    return min(max(float(text), 0.1), LONGEST_WAIT)


def _read_stats(
    app: Lowq, queues: Sequence[str], unanswered: dict[str, str] | None = None
) -> list[tuple[Stats, Forecast]]:
    """``unanswered``: what is left out is entered there, by queue; without it, nothing is left out."""

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
    """Which shards are left out, and why."""
    places = ", ".join(map(str, sorted(silent)))
    return f"shard{'s' if len(silent) > 1 else ''} {places} {state}: {next(iter(silent.values()))}"


def end_without(unanswered: Mapping[str, str]) -> None:
    """Names what is left out, as a primary of the cluster does not answer."""
    for queue, what in unanswered.items():
        click.echo(f"lowq: {queue}: {printable(what)}", err=True)
    if unanswered:
        click.get_current_context().exit(FAILED)


def _total(figures: Sequence[Stats]) -> dict[str, Any]:
    total: dict[str, Any] = {name: sum(getattr(item, name) for item in figures) for name in _SUMS}
    return total | {"lag": max((item.lag for item in figures), default=0.0)}


def _show_stats(
    found: Sequence[tuple[Stats, Forecast]], as_json: bool, unanswered: Mapping[str, str] | None = None
) -> None:
    if as_json:
        figures = [item for item, _ in found]
        forecasts = {item.name: dataclasses.asdict(forecast) | {"text": forecast.text} for item, forecast in found}
        more = {"unanswered": unanswered} if unanswered else {}
        echo_json({"total": _total(figures), "queues": figures, "forecasts": forecasts, **more})
    elif found:
        echo_lines(_stats_table(found))
    else:
        say("no queue has been used yet")


@click.command
@with_app
@click.argument("queues", nargs=-1, metavar="[QUEUE...]")
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
    if as_json:
        echo_json({"queues": found})
    elif not found:
        say("no queue has been used yet")
    for item in () if as_json else found:
        lines = [item.name]
        for title, counts in (("tasks", item.tasks), ("calls", item.calls)):
            counted = dataclasses.asdict(counts).items()
            lines += [f"  {title}:", *(f"    {name}: {'not counted' if n is None else n}" for name, n in counted)]
        echo_lines(lines)


_STATS_COLUMNS = (
    "queue", "length", "due", "later", "retries", "taken", "morgue", "lag", "processed", "failed", "per s?",
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


class _Watch:
    """Looks again and again, and writes over what it has written; one table after the other where it can't."""

    def __init__(self, app: Lowq, queues: Sequence[str], seconds: float) -> None:
        self._app = app
        self._queues = queues
        self._seconds = seconds
        self._before: tuple[float, dict[str, int]] | None = None
        self._written = 0

    def run(self) -> None:
        try:
            while True:
                try:
                    lines = self._lines()
                except RedisUnavailable as error:
                    lines = [f"{error}; trying again"]
                self._write(lines)
                time.sleep(self._seconds)
        except KeyboardInterrupt:
            if sys.stdout.isatty():
                click.echo()

    def _lines(self) -> list[str]:
        found = _read_stats(self._app, self._queues)
        now, counts = time.monotonic(), {item.name: item.processed for item, _ in found}
        rates: dict[str, float] = {}
        if self._before is not None:
            since, before = self._before
            rates = {name: (counts[name] - before[name]) / (now - since) for name in counts.keys() & before.keys()}
            rates[""] = sum(rates.values())
        self._before = now, counts
        head = f"{datetime.now().astimezone():%H:%M:%S}  every {self._seconds:g} s, Ctrl-C ends it"
        return [head, *(_stats_table(found, rates) if found else ["no queue has been used yet"])]

    def _write(self, lines: list[str]) -> None:
        if not sys.stdout.isatty():
            click.echo("\n".join(lines))
            sys.stdout.flush()
            return
        columns, rows = shutil.get_terminal_size()
        lines = [shorten(line, columns) for line in lines[: rows - 1]]
        up = f"\x1b[{self._written}F" if self._written else ""
        click.echo(f"{up}\x1b[J" + "\n".join(lines))
        self._written = len(lines)
