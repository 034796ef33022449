"""The output of commands: tables, times, numbers, JSON, progress, failures; and the input of times.

Nothing that comes from a job, an id or a name reaches a terminal unescaped.
"""

import dataclasses
import json
import math
import os
import shutil
import sys
import time
import unicodedata
from collections.abc import Collection, Sequence
from datetime import datetime
from typing import IO, Any, Self

import click

from lowq.application import Lowq
from lowq.clock import ago, duration, relative_seconds, seconds_of
from lowq.codec import MAX_TIME
from lowq.errors import (
    EXIT_FAILED,
    EXIT_USAGE,
    START_REDIS,
    ConfigError,
    JobError,
    LowqError,
    RedisUnavailable,
    ShardsCountError,
    UnknownQueueError,
)
from lowq.job import Job
from lowq.logs import printable
from lowq.operate.job_filter import JobFilter
from lowq.retry import attempt_number, attempt_text
from lowq.store.calls import time_of

#: Seconds between two updates of a progress line.
PROGRESS_INTERVAL = 0.1


# --- failures ------------------------------------------------------------------------------------------------


class Failure(click.ClickException):
    """Ends the command with ``lowq: message`` on stderr.

    ``passing``: trying again later may well help. ``trace``: where in the user's code it went wrong, shown before that.
    """

    def __init__(self, message: str, exit_code: int = EXIT_FAILED, *, passing: bool = False, trace: str = "") -> None:
        super().__init__(message)
        self.passing = passing
        self.trace = trace
        self.exit_code = exit_code  # type: ignore[misc]  # click declares it for the class, and reads it here

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(self.trace, file=file, err=file is None, nl=False)
        click.echo(f"lowq: {printable(self.format_message())}", file=file, err=file is None)


class WrongUsage(Failure):
    """Ends the command as the arguments make no sense; the message says what to type instead."""

    def __init__(self, message: str) -> None:
        super().__init__(message, EXIT_USAGE)


def failure_of(error: LowqError) -> Failure:
    """The failure that ends a command for an error of lowq's: its message, and no traceback."""
    typed = isinstance(error, UnknownQueueError | ConfigError | JobError) and not isinstance(error, ShardsCountError)
    return (WrongUsage if typed else Failure)(message_of(error))


def message_of(error: LowqError, or_else: str = "") -> str:
    """The error's message; where nothing listens, also what to do about it. ``or_else``: one more thing to do."""
    if isinstance(error, RedisUnavailable) and "does not answer" in str(error):
        return f"{str(error).rstrip('.')}; {START_REDIS.format('--redis-url')}{or_else}"
    return str(error)


# --- machines ------------------------------------------------------------------------------------------------


def echo_json(document: Any) -> None:
    """One JSON document on a line of its own. Pure ASCII, so that it survives every pipe and drives no terminal."""
    try:
        text = json.dumps(document, default=_json_value, allow_nan=False)
    except ValueError:  # a score that is infinite, which JSON has not
        text = json.dumps(json.loads(json.dumps(document, default=_json_value), parse_constant=lambda _: None))
    click.echo(text)


def answer(as_json: bool, document: Any, *lines: str) -> None:
    """Shows the result of a command: the document to machines, the lines to people."""
    if as_json:
        echo_json(document)
    else:
        echo_lines(lines)


def fail_if(reason: object) -> None:
    """Ends the command with exit code 1 if there is a reason: something is wrong, missing, or was left alone."""
    if reason:
        click.get_current_context().exit(EXIT_FAILED)


def _json_value(value: Any) -> Any:
    """JSON for what `json` does not know: dataclasses, and payloads of other codecs."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return str(value)


def answered(as_json: bool, document: Any, found: Collection[Any], nothing: str) -> bool:
    """Gives machines the document, and tells people when nothing was found. Otherwise returns False: what was found is
    to be shown to them.
    """
    if as_json:
        echo_json(document)
    elif not found:
        say(nothing)
    return as_json or not found


# --- numbers and times ---------------------------------------------------------------------------------------


def number(value: float) -> str:
    """``1,234,567``."""
    return f"{value:,}"


def count(value: int, noun: str) -> str:
    """``1 job``, ``1,234 jobs``."""
    return f"{value:,} {noun}{'s' * (value != 1)}"


def score(value: float) -> str:
    """A score as it was given, as far as a float has it: 7, not 7.0."""
    return str(int(value)) if abs(value) <= 2**53 and value == int(value) else repr(value)


def server_time(app: Lowq) -> float:
    """Unix time in seconds, by the clock that due times are judged by."""
    return time_of(app.client.command("TIME"))


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
        raise WrongUsage(f"{name} {text}: it is {what}") from None


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


# --- text ----------------------------------------------------------------------------------------------------


def width_of(text: str) -> int:
    """Columns that a text takes on a terminal."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text
    )


def shorten(text: str, width: float) -> str:
    """The text, cut to so many columns if it is longer."""
    if len(text) * 2 <= width or width_of(text) <= width:
        return text
    taken, size = [], 0
    for char in text:
        size += width_of(char)
        if size > width - 1:
            break
        taken.append(char)
    return "".join(taken) + "…"


def terminal_width() -> float:
    """Columns that there are: those of the terminal; without one, what COLUMNS says, or no bound."""
    if sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit():
        return shutil.get_terminal_size().columns
    return math.inf


def payload_text(payload: Any) -> str:
    """A payload as compact JSON, escaped."""
    try:
        text = json.dumps(payload, ensure_ascii=False, separators=(",", ":"), default=str)
    except (TypeError, ValueError, RecursionError):
        text = repr(payload)
    return printable(text)


def last_line(error: str | None) -> str:
    """The last line of a traceback, which says most."""
    lines = (error or "").strip().splitlines()
    return printable(lines[-1].strip()) if lines else ""


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()) -> list[str]:
    """Aligned columns. Those named in ``right`` are aligned to the right; a column that is empty is left out.

    What doesn't fit the terminal is cut.
    """
    cells = [[printable(cell) for cell in row] for row in rows]
    columns = [i for i, header in enumerate(headers) if not header.endswith("?") or any(row[i] for row in cells)]
    names = [headers[i].rstrip("?") for i in columns]
    widths = [
        max([width_of(name), *(width_of(row[i]) for row in cells)]) for i, name in zip(columns, names, strict=True)
    ]
    most = terminal_width()
    lines = []
    for row in [[name.upper() for name in names], *([row[i] for i in columns] for row in cells)]:
        parts = []
        for name, cell, width in zip(names, row, widths, strict=True):
            space = " " * (width - width_of(cell))
            parts.append(space + cell if name in right else cell + space)
        lines.append(shorten("  ".join(parts).rstrip(), most))
    lines[0] = click.style(lines[0], dim=True)
    return lines


def echo_lines(lines: Sequence[str]) -> None:
    """All in one write."""
    if lines:
        click.echo("\n".join(lines))


def say(text: str) -> None:
    """A word beside the output, on stderr."""
    click.echo(printable(text, keep="\n"), err=True)


# --- jobs ----------------------------------------------------------------------------------------------------


def job_row(job: Job, now: float) -> list[str]:
    """A line of `jobs`; the columns are JOB_COLUMNS."""
    moment = job.buried_at if job.state == "morgue" else job.perform_at
    newest = payload_text(job.payloads[-1][0]) if job.payloads else ""
    tried = "" if job.retry_count < 0 else number(attempt_number(job.retry_count))
    return [job.id, job.state, ago(moment, now), tried, number(job.payloads_count), last_line(job.error), newest]


JOB_COLUMNS = ("id", "state", "when", "attempt?", "payloads", "error?", "newest payload")


def job_block(job: Job, now: float, max_retry_count: int) -> list[str]:
    """All about a job, over several lines. ``max_retry_count``: that of its worker."""
    width = terminal_width()
    if job.state == "morgue":
        when = f"buried {ago(job.buried_at, now)}"
    elif job.state == "taken":
        when = "in flight"
    else:
        when = ago(job.perform_at, now)
    if job.state != "morgue" and job.retry_count >= 0:
        when += f", {attempt_text(job.retry_count, max_retry_count)}"
    if job.crashes:
        when += f", crashed {count(job.crashes, 'time')}"
    if job.priority:
        when += f", priority {job.priority}"
    if job.expires_at is not None:
        when += f", expires {ago(job.expires_at, now)}"
    lines = [f"{printable(job.id)}  {job.state}, {when}"]
    for payload, value in job.payloads:
        lines.append(shorten(f"  score {score(value)}  {payload_text(payload)}", width))
    more = job.payloads_count - len(job.payloads)
    if more > 0:
        lines.append(f"  and {count(more, 'payload')} more, of higher scores")
    if job.error:
        lines += ["  reason:" if job.state == "morgue" else "  last error:"]
        lines += [f"    {line}" for line in printable(job.error.rstrip(), keep="\n").split("\n")]
    if job.attempts:
        lines.append("  last attempts:")
    for attempt in job.attempts:
        took = duration(attempt.seconds, fine=True)
        text = f"    {ago(attempt.at, now)} on {attempt.node}, {took}: {last_line(attempt.error)}"
        lines.append(shorten(printable(text), width))
    return lines


# --- progress ------------------------------------------------------------------------------------------------


class Progress:
    """A line on stderr that shows how far long work is. Silent when stderr is no terminal."""

    def __init__(self, unit: str) -> None:
        self._unit = unit
        self._shown = sys.stderr.isatty()
        self._began = self._last = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        if self._shown and self._last != self._began:
            click.echo("\r\x1b[K", nl=False, err=True)

    def show(self, done: int, fraction: float | None = None) -> None:
        """``fraction``: 0 to 1, where that is known."""
        now = time.monotonic()
        if not self._shown or now - self._last < PROGRESS_INTERVAL:
            return
        self._last = now
        seconds = now - self._began
        text = f"{done:,} {self._unit}  {done / seconds:,.0f}/s"
        if fraction is not None and 0 < fraction <= 1:
            filled = round(fraction * 20)
            left = duration(seconds / fraction - seconds)
            text = f"[{'#' * filled}{'.' * (20 - filled)}] {fraction:4.0%}  {text}  {left} left"
        columns = shutil.get_terminal_size().columns
        click.echo(f"\r{text[: columns - 1]}\x1b[K", nl=False, err=True)


def in_words(wanted: JobFilter) -> str:
    """The filter in words, without its state."""
    words = [
        ("with ids like", wanted.match), ("with the payload", wanted.payload), ("with the error", wanted.error),
        ("with an error of the group", wanted.error_group), ("of shard", wanted.shard),
        ("of priority", wanted.priority),
    ]  # fmt: skip
    ages = [("older than", seconds_of(wanted.older_than)), ("newer than", seconds_of(wanted.newer_than))]
    return "".join(
        [f" {word} {value!r}" for word, value in words if value is not None]
        + [f" {word} {duration(age)}" for word, age in ages if age is not None]
    )
