"""The verbs that read: stats, nodes, shards, jobs, peek, why."""

import dataclasses
import math
import re
import shutil
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import click

from lowq.application import Lowq
from lowq.cli.failure import FAILED, USAGE, Failure
from lowq.cli.group import json_option, queue_argument, with_app
from lowq.cli.output import (
    JOB_COLUMNS,
    count,
    echo_json,
    echo_lines,
    job_block,
    job_row,
    number,
    say,
    shorten,
    table,
)
from lowq.codec import MAX_TIME
from lowq.duration import LONGEST_WAIT, ago, duration, relative_seconds
from lowq.errors import RedisUnavailable, ScriptError
from lowq.job import Job
from lowq.logs import printable
from lowq.operate.explain import ABSENT, Why
from lowq.operate.job_filter import ORDERS, STATES, JobFilter
from lowq.operate.nodes import NodeInfo
from lowq.operate.paging import MAX_LIMIT, FoundJob, FoundPage, Page
from lowq.operate.queries import shards_of_handle
from lowq.operate.stats import Forecast, Stats, read_shards
from lowq.operate.walk import Silent
from lowq.queue import Queue
from lowq.schedules import is_internal
from lowq.store import untrusted
from lowq.store.scripts import time_of

#: Seconds between two looks of `stats --watch`.
WATCH_SECONDS = 2.0

#: Seconds from which on `lowq nodes` names a batch that runs.
LONG = 10.0

#: Figures that are added up over queues.
_SUMS = (
    "length",
    "due",
    "scheduled",
    "fresh",
    "retries",
    "taken",
    "morgue_length",
    "processed",
    "failed",
    "buried",
    "expired",
    "pushed",
)


def server_time(app: Lowq) -> float:
    """Unix time in seconds, by the clock that due times are judged by."""
    return time_of(app.client.command("TIME"))


# --- stats ---------------------------------------------------------------------------------------------------


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
        _end_without(unanswered)
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
            unanswered[queue.name] = _unanswered(silent, "not counted")
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


def _unanswered(silent: Silent, state: str) -> str:
    places = ", ".join(map(str, sorted(silent)))
    return f"shard{'s' if len(silent) > 1 else ''} {places} {state}: {next(iter(silent.values()))}"


def _end_without(unanswered: Mapping[str, str]) -> None:
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
            lines += [
                f"  {title}:",
                *(
                    f"    {name}: {'not counted' if value is None else value}"
                    for name, value in dataclasses.asdict(counts).items()
                ),
            ]
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


# --- nodes, shards -------------------------------------------------------------------------------------------


@click.command
@with_app
@json_option
def nodes(app: Lowq, as_json: bool) -> None:
    """The nodes that live, and what they hold.

    Each as of its last heartbeat.
    """
    found = app.nodes()
    if as_json:
        echo_json({"nodes": found})
        return
    if not found:
        say("no node is running")
        return
    now = server_time(app)
    rows = []
    for node in found:
        busy = sum(item is not None for item in node.performing)
        held = sum(len(shards) for queue, shards in node.shards.items() if not is_internal(queue))
        rows.append(
            [
                node.name,
                f"{busy}/{node.threads}",
                number(node.tasks),
                number(held),
                duration(now - node.started_at) if node.started_at else "",
                f"{duration(node.seconds_ago)} ago",
                node.version,
                _remarks(node),
                " ".join(queue for queue in node.queues if not is_internal(queue)),
            ]
        )
    columns = ("node", "busy", "tasks", "shards", "up", "heartbeat", "version", "?", "queues")
    echo_lines(table(columns, rows, right=("busy", "tasks", "shards")))
    say("BUSY (threads), TASKS (of async workers) and SHARDS: each node as of its heartbeat")
    long = [
        batch_text(node, thread, performed)
        for node in found
        for thread, performed in [*enumerate(node.performing), *((None, task) for task in node.longest_tasks)]
        if performed is not None and performed["seconds"] >= LONG
    ]
    if long:
        echo_lines(["", f"Batches that have been running for more than {LONG:g} s:", *long])
    if any(node.waiting for node in found):
        say("WAITING: Redis is a replica, which can't be written to; nodes go on when it is a primary again")


def batch_text(node: NodeInfo, thread: int | None, performed: Mapping[str, Any]) -> str:
    """Who performs which batch, and for how long."""
    ids, count = performed["ids"][:3], performed["count"]
    more = f" and {number(count - len(ids))} more" if count > len(ids) else ""
    return printable(
        f"  {node.name} {'task' if thread is None else f'thread {thread}'}: {performed['queue']} shard "
        f"{performed['shard']}, id{'s' * (count != 1)} {', '.join(ids)}{more}, for {duration(performed['seconds'])}"
    )


def _remarks(node: NodeInfo) -> str:
    remarks = ["waiting"] if node.waiting else []
    remarks += ["quiet"] if node.quiet else []
    if node.kind == "consumer":
        remarks.append(f"consumer, taken: {number(node.taken)}")
    if node.written_off:
        remarks.append(f"written off: {node.written_off}")
    return ", ".join(remarks)


@click.command
@with_app
@queue_argument
@json_option
def shards(app: Lowq, queue: str, as_json: bool) -> None:
    """The shards of a queue: who works them, what waits."""
    silent: Silent = {}
    found = read_shards(shards_of_handle(app.queue(queue)), silent=silent)
    unanswered = {queue: _unanswered(silent, "not shown")} if silent else {}
    if as_json:
        echo_json({"queue": queue, "shards": found} | ({"unanswered": unanswered} if silent else {}))
        _end_without(unanswered)
        return
    rows = [
        [
            str(shard.index),
            number(shard.length),
            number(shard.taken),
            number(shard.morgue_length),
            duration(shard.lag),
            shard.owner or "nobody",
            "" if shard.lease_seconds is None else duration(shard.lease_seconds),
            shard.oldest_id or "",
            "paused" if shard.paused else "",
        ]
        for shard in found
    ]
    columns = ("shard", "length", "taken", "morgue", "lag", "owner", "lease?", "oldest?", "?")
    echo_lines(table(columns, rows, right=("shard", "length", "taken", "morgue", "lag", "lease")))
    _end_without(unanswered)


# --- jobs ----------------------------------------------------------------------------------------------------


@click.command
@with_app
@click.argument("queue", required=False)
@click.option("--state", type=click.Choice(STATES), help="Default: all that wait.")
@click.option("--match", metavar="PATTERN", help="Only ids like this: 4*, order-?, [a-c]*")
@click.option("--payload", metavar="FIELD:VALUE", help="Only those with it in a payload: customer:7, order.customer:7")
@click.option("--error", metavar="TEXT", help="Only those with it in their error.")
@click.option("--error-group", metavar="GROUP", help="Only those whose error is in this group of `lowq errors`.")
@click.option("--shard", type=click.IntRange(0), help="Only this shard of the queue.")
@click.option("--order-by", type=click.Choice(ORDERS), help="Default: perform_at; in the morgue buried_at.")
@click.option("--reverse", is_flag=True, help="The last ones first.")
@click.option("--limit", type=click.IntRange(1, MAX_LIMIT), default=50, show_default=True)
@click.option("--after", metavar="CURSOR", help="Goes on where a page ended.")
@click.option("--min", metavar="VALUE", help="Bounds what it is ordered by: a time (ISO, -2h), a number, an id.")
@click.option("--max", metavar="VALUE", help="Likewise. Both are included.")
@json_option
def jobs(app: Lowq, queue: str | None, limit: int, after: str | None, as_json: bool, **options: Any) -> None:
    """A page of jobs, in order over all shards, and without QUEUE over all queues.

    --payload, --error and --error-group look into the jobs, some 20,000 for a page: it says where to go on.
    """
    bounds = {name: bound(app, f"--{name}", options[name], options["order_by"]) for name in ("min", "max")}
    wanted = JobFilter(**{**options, **bounds})
    columns = ["buried" if name == "when" and wanted.state == "morgue" else name for name in JOB_COLUMNS]
    page: Page | FoundPage
    if queue is None:
        page = app.jobs(wanted, limit=limit, after=after)
        columns.insert(0, "queue")
        head: dict[str, Any] = {}
        found: list[Any] = [dataclasses.asdict(item.job) | {"queue": item.queue} for item in page]
    else:
        page = app.queue(queue).jobs(wanted, limit=limit, after=after)
        head, found = {"queue": queue}, page.jobs
    if as_json:
        looked = {} if page.looked is None else {"looked": page.looked}
        echo_json({**head, "jobs": found, "cursor": page.cursor, **looked})
        return
    now = server_time(app)
    if len(page):
        rows = [
            [item.queue, *job_row(item.job, now)] if isinstance(item, FoundJob) else job_row(item, now) for item in page
        ]
        echo_lines(table(columns, rows, right=("retry", "payloads")))
    elif not page.cursor:
        say("no such job" if wanted.state is not None or queue is None else _elsewhere(app.queue(queue)))
    if page.looked is not None:
        say(f"{count(page.looked, 'job')} looked at")
    if page.cursor:
        say(f"there are more: --after {page.cursor}")


def _elsewhere(handle: Queue) -> str:
    """That no job waits, and where others are."""
    figures = handle.stats()
    places = [("morgue", figures.morgue_length, "in the morgue"), ("taken", figures.taken, "in flight")]
    hints = [f"{number(count)} {where} (--state {state})" for state, count, where in places if count]
    return "no such job waits" + (f"; the queue has {' and '.join(hints)}" if hints else "")


def bound(app: Lowq, name: str, text: str | None, order_by: str | None) -> float | str | None:
    """A bound as it was typed: a time, also before or after now, or with another order a number or an id.

    Raises:
        Failure: it is none.
    """
    if text is None or order_by == "id":
        return text
    by_time = order_by != "retry_count"
    try:
        away = relative_seconds(text) if by_time else None
        if away is not None:
            return server_time(app) + away
        return moment(text) if by_time else float(text)
    except ValueError:
        what = "a time: 2027-01-31T12:00Z, Unix seconds, or -2h, +30min" if by_time else "a number"
        raise Failure(f"{name} {text}: it is {what}", USAGE) from None


def moment(text: str) -> float:
    """Unix time in seconds, or ISO 8601; a time without a zone is local. ISO 8601 after the year 2242 counts as that.

    Raises:
        ValueError: it is neither.
    """
    try:
        seconds = float(text)
    except ValueError:
        pass
    else:
        if not math.isfinite(seconds):
            raise ValueError(text)
        return seconds
    parsed = datetime.fromisoformat(text)
    try:
        return min((parsed if parsed.tzinfo else parsed.astimezone()).timestamp(), MAX_TIME)
    except (OverflowError, OSError) as error:  # a year that the platform can't convert
        raise ValueError(str(error)) from None


# --- by id ---------------------------------------------------------------------------------------------------


@click.command
@with_app
@queue_argument
@click.argument("ids", nargs=-1, required=True, metavar="ID...")
@json_option
def peek(app: Lowq, queue: str, ids: tuple[str, ...], as_json: bool) -> None:
    """All about single jobs, wherever they are.

    An id may be in flight, wait with newer payloads, and have older ones in the morgue: all of that is shown.
    Exit code 1 when an id is nowhere.
    """
    found = app.queue(queue).describe_all(ids)
    missing = []
    jobs: list[Job] = []
    for item in found:
        if not item.jobs:
            missing.append(item.id)
        elif as_json:
            jobs += item.jobs
        for job in () if as_json else item.jobs:
            echo_lines(job_block(job, item.at))
    if as_json:
        echo_json({"queue": queue, "jobs": jobs, "missing": missing})
    else:
        for job_id in missing:
            say(f"{job_id}: {ABSENT}")
    if missing:
        click.get_current_context().exit(FAILED)


@click.command
@with_app
@queue_argument
@click.argument("ids", nargs=-1, required=True, metavar="ID...")
@json_option
def why(app: Lowq, queue: str, ids: tuple[str, ...], as_json: bool) -> None:
    """Why these ids are not being performed right now.

    Exit code 1 when an id is nowhere.
    """
    # Of each id only what is shown: not its payloads.
    found = [
        (item.id, item.why, None if item.buried is None else item.buried.buried_at, item.at)
        for item in app.queue(queue).describe_all(ids)
    ]
    if as_json:
        items = [
            {"id": job_id} | dataclasses.asdict(reason) | {"buried_at": buried_at}
            for job_id, reason, buried_at, _ in found
        ]
        echo_json({"queue": queue, "why": items})
    else:
        _say_why(found)
    if any(reason.state is None for _, reason, _, _ in found):
        click.get_current_context().exit(FAILED)


def _say_why(found: Iterable[tuple[str, Why, float | None, float]]) -> None:
    """Of each id: why, when it was buried, and when that was read."""
    lines = []
    for job_id, why, buried_at, at in found:
        until = f" ({ago(why.until, at)})" if why.until and "due in" not in why.detail else ""
        lines.append([job_id, why.state or "absent", why.detail + until])
        if buried_at is not None and why.state != "morgue":
            detail = f"also buried, {ago(buried_at, at)}; kick it to have that performed, too"
            lines.append([job_id, "morgue", detail])
    echo_lines(table(("id", "state", "why"), lines))
