"""Jobs in: ``lowq push``, from a file or the standard input, one JSON object a line, or a single one from options;
``lowq put``, with a fresh id; ``lowq outbox``, from a table of the application's database.
"""

import os
import re
import stat
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import IO, Any, NoReturn

import click
import msgspec

from lowq import logs
from lowq.application import Lowq
from lowq.cli.group import json_option, log_options, open_app, options_of, queue_argument, with_app, with_connection
from lowq.cli.output import Failure, Progress, WrongUsage, answer, count, failure_of, moment, say
from lowq.cli.process import stopped_by_signals
from lowq.codec import encode_job
from lowq.errors import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    JobError,
    LowqError,
    NotReplicated,
    PushError,
    QueueFull,
    UnknownQueueError,
)
from lowq.logs import LogFormat
from lowq.queue import Queue
from lowq.store import DURABILITIES, Durability


class JobLine(dict[str, Any]):
    """A job that knows which line it came from, counted from 1."""

    __slots__ = ("number",)

    def __init__(self, job: dict[str, Any], number: int) -> None:
        super().__init__(job)
        self.number = number


class BadLine(LowqError):
    """A line is no JSON object."""


class Source:
    """The jobs of an NDJSON stream. Remembers those that are not certainly in."""

    def __init__(self, stream: IO[bytes], skip: Sequence[range], longest: int) -> None:
        self._stream = stream
        #: The lines that are left out, in order.
        self._skip = deque(skip)
        self._longest = longest
        self._uncertain: deque[JobLine] = deque()
        self._stopped = False
        #: Lines, bytes and jobs that were read so far: some lines are blank. Jobs that are in.
        self.number = self.bytes_read = self._jobs = self.accepted = 0

    def __iter__(self) -> Iterator[JobLine]:
        while not self._stopped and (raw := self._stream.readline(self._longest + 1)):
            self.bytes_read += len(raw)
            self.number += 1
            if self._is_skipped():
                continue
            if len(raw) > self._longest:
                raise BadLine(f"line {self.number} is longer than {self._longest:,} bytes")
            if self.number == 1:
                raw = raw.removeprefix(b"\xef\xbb\xbf")
            if not raw.strip():
                continue
            line = JobLine(parse(raw, self.number), self.number)
            self._uncertain.append(line)
            self._jobs += 1
            yield line

    def _is_skipped(self) -> bool:
        while self._skip and self._skip[0].stop <= self.number:
            self._skip.popleft()
        return bool(self._skip) and self.number in self._skip[0]

    def note_accepted(self, count: int) -> None:
        """Notes how many jobs are in, from the first one on."""
        self.accepted = count
        while self._uncertain and self._jobs - len(self._uncertain) < count:
            self._uncertain.popleft()

    def stop(self) -> None:
        """Ends the iteration, as if the stream had ended."""
        self._stopped = True

    def uncertain(self, rest: list[Any] | None = None) -> list[JobLine]:
        """The jobs that were read and are not certainly in; ``rest``: those among them that PushError named."""
        return list(self._uncertain) if rest is None else [line for line in rest if isinstance(line, JobLine)]


def lines_to_skip(text: str) -> Sequence[range]:
    """``17``: the first 17 lines; ``1-17,19,23-40``: these lines. Ranges of lines, in order."""
    if re.fullmatch(r"\d{1,18}", text, re.ASCII):
        return [range(1, int(text) + 1)]
    if not re.fullmatch(r"\d{1,18}(-\d{1,18})?(,\d{1,18}(-\d{1,18})?)*", text, re.ASCII):
        raise click.BadParameter(f"{text!r:.60} is neither a number of lines nor some of them, such as 1-17,19,23-40")
    bounds = [part.partition("-") for part in text.split(",")]
    ranges = [range(int(first), int(last or first) + 1) for first, _, last in bounds]
    if any(one.stop > other.start for one, other in pairwise(ranges)) or not all(ranges) or ranges[0].start < 1:
        raise click.BadParameter(f"{text!r:.60}: lines are counted from 1, and named in order")
    return ranges


#: The options of a job, and of how it is pushed.
job_options = options_of(
    click.option("--perform-at", metavar="TIME", help="When to run: Unix time, or 2027-01-31T12:00Z."),
    click.option("--delay", type=float, metavar="SECONDS", help="When to run, from now on."),
    click.option("--ttl", type=float, metavar="SECONDS", help="How long the payload is good for; default: for ever."),
    click.option("--priority", type=click.IntRange(0, 9), help="0, the most urgent, to 9; default: that of the queue."),
)
shards_count_option = click.option(
    "--shards-count", type=click.IntRange(1, 16384), help="For a queue that doesn't exist yet."
)
push_options = options_of(
    click.option(
        "--timeout", type=click.FloatRange(0), metavar="SECONDS", help="Wait so long for room in a full queue."
    ),
    click.option(
        "--durability", type=click.Choice(DURABILITIES), help="What to wait for; default: what the queue says."
    ),
)


def lines_but(wanted: Iterable[int], count: int) -> str:
    """The text that `lines_to_skip` reads as all of the first ``count`` lines except those wanted."""
    gaps = pairwise([0, *sorted(wanted), count + 1])
    parts = [(before + 1, after - 1) for before, after in gaps if after - before > 1]
    if not parts:
        return "0"
    if parts[0][0] == 1 and len(parts) == 1:
        return str(parts[0][1])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in parts]
    return ",".join(texts) if len(texts) > 1 else f"{parts[0][0]}-{parts[0][1]}"


def parse(raw: bytes, number: int) -> dict[str, Any]:
    """The object in a line.

    Raises:
        BadLine
    """
    try:
        job = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadLine(f"line {number} is no JSON: {error}: {_shown(raw)}") from None
    if not isinstance(job, dict):
        raise BadLine(f'line {number} is no JSON object, such as {{"id": 42}}: {_shown(raw)}')
    return job


def _shown(raw: bytes) -> str:
    text = raw.decode("utf-8", "backslashreplace").strip()
    return text if len(text) <= 60 else text[:60] + "..."


@click.command
@with_app
@queue_argument
@click.argument("file", required=False, type=click.Path(dir_okay=False, allow_dash=True))
@click.option(
    "--skip", type=lines_to_skip, default="0", metavar="LINES",
    help="Lines to leave out: so many at the beginning, or such as 1-17,19,23-40.",
)  # fmt: skip
@shards_count_option
@click.option("--id", "job_id", metavar="ID", help="Push this single job.")
@click.option("--payload", metavar="JSON", help='Its payload; default: "".')
@click.option("--score", metavar="NUMBER", help="The payload's order within its id; default: the time.")
@job_options
@push_options
@json_option
def push(
    app: Lowq, queue: str, file: str | None, skip: Sequence[range], shards_count: int | None, job_id: str | None,
    timeout: float | None, durability: Durability | None, as_json: bool, **single: Any,
) -> None:  # fmt: skip
    """Push jobs, one JSON object a line.

    They come from FILE, or the standard input (-):

    \b
    {"id": 42, "payload": {"version": 7, "status": "paid"}, "score": 7}
    {"id": 43, "payload": {"version": 1}, "delay": 60}

    Or a single one:

    \b
    lowq push Orders --id 42 --payload '{"version": 7}' --score 7
    """
    if job_id is not None:
        if file is not None or any(skip):
            raise WrongUsage("--id pushes a single job; leave out the file and --skip")
        job = job_of(job_id, **single)
        handle = queue_to_push(app, queue, shards_count)
        with single_push():
            accepted = handle.push(job, timeout=timeout, durability=durability)
    else:
        for name, value in single.items():
            if value is not None:
                raise WrongUsage(f"--{name.replace('_', '-')} is for a single job: give its --id too")
        if file and file != "-" and not os.path.exists(file):  # noqa: PTH110 - Path's raises if the name is too long
            example = f"""echo '{{"id": 42, "payload": {{"version": 7}}}}' | lowq push {queue}"""
            raise WrongUsage(f"{file:.40}: no such file; jobs come from a file or the standard input: {example}")
        handle = queue_to_push(app, queue, shards_count)
        accepted = _push_lines(app, handle, file or "-", skip, timeout, durability)
    answer(as_json, {"queue": queue, "accepted": accepted}, f"{count(accepted, 'payload')} pushed to {queue}")


@contextmanager
def single_push() -> Iterator[None]:
    """Ends the command with what to do when the job that the block pushes is in, but not replicated."""
    try:
        yield
    except NotReplicated as error:
        (job,) = error.unsafe
        raise Failure(
            f"job {job['id']} of {error.queue} is in, but not safe: {error.reason}; pushing it again by its id makes "
            "it so",
        ) from None  # fmt: skip


def queue_to_push(app: Lowq, name: str, shards_count: int | None) -> Queue:
    """The handle of the queue.

    Raises:
        Failure: nobody has used the queue, and nobody said how many shards it gets.
    """
    queue = app.queue(name, shards_count)
    try:
        queue.shards_count  # noqa: B018 - raises
    except UnknownQueueError as error:
        raise WrongUsage(f"{str(error).rstrip('?')}; to make the queue, say its shards: --shards-count 5") from None
    return queue


def job_of(
    job_id: str | None, payload: str | None, score: str | None, perform_at: str | None, **options: Any
) -> dict[str, Any]:
    """The job of the texts that were typed; without an id it is one for `Queue.put`."""
    job: dict[str, Any] = {"id": job_id, **options}
    if payload is not None:
        try:
            job["payload"] = msgspec.json.decode(payload)
        except (msgspec.DecodeError, UnicodeEncodeError) as error:
            is_object = payload.lstrip().startswith("{")
            needs = (
                'names and texts need double quotes: \'{"status": "new"}\''
                if is_object
                else "a text needs its quotes: '\"text\"'"
            )
            raise WrongUsage(f"the payload is no JSON: {error}; {needs}") from None
    if score is not None:
        try:
            job["score"] = int(score) if score.lstrip("+-").isdigit() else float(score)
        except ValueError:
            raise WrongUsage(f"--score {score}: it must be a number") from None
    if perform_at is not None:
        try:
            job["perform_at"] = moment(perform_at)
        except ValueError:
            raise WrongUsage(f"--perform-at {perform_at}: it is Unix time, or such as 2027-01-31T12:00Z") from None
    return {name: value for name, value in job.items() if value is not None or name == "payload"}


def _push_lines(
    app: Lowq, queue: Queue, file: str, skip: Sequence[range], timeout: float | None, durability: Durability | None
) -> int:
    with click.open_file(file, "rb") as stream, Progress("jobs") as progress:
        total = _size_of(stream)
        if file == "-" and sys.stdin.isatty():
            say("one JSON object a line; Ctrl-D ends them")
        # JSON may be much longer than the canonical form that is measured: escapes, spaces.
        source = Source(stream, skip, 8 * app.config.max_payload_bytes + 2**16)

        def on_progress(count: int) -> None:
            source.note_accepted(count)
            progress.show(count, source.bytes_read / total if total else None)

        try:
            return queue.push(source, on_progress, timeout=timeout, durability=durability)
        except (BadLine, JobError, PushError, KeyboardInterrupt) as error:
            _give_up(app, queue, error, source, f"lowq push {queue.name} {file}")


def _size_of(stream: IO[bytes]) -> int:
    """Bytes of the file; 0: it is no file, or a pipe."""
    try:
        status = os.fstat(stream.fileno())
    except OSError:
        return 0
    return status.st_size if stat.S_ISREG(status.st_mode) else 0


def _give_up(app: Lowq, queue: Queue, error: BaseException, source: Source, command: str) -> NoReturn:
    """Says how many jobs are in, what is wrong, and how to go on."""
    accepted, rest = source.accepted, None
    if isinstance(error, PushError):
        accepted = error.accepted
        source.stop()
        rest = [*error.unsafe, *error.rest]  # pushed again: that makes them safe, and merges
    uncertain = source.uncertain(rest)
    first = min((line.number for line in uncertain), default=source.number + (not isinstance(error, BadLine)))
    cause = error.__cause__ if isinstance(error, PushError) and error.__cause__ is not None else error
    if isinstance(cause, JobError):
        reason = _refusal(app, queue, cause, uncertain)
    elif isinstance(cause, KeyboardInterrupt):
        reason = "interrupted"
    elif isinstance(cause, NotReplicated):
        reason = f"{count(len(cause.unsafe), 'payload')} in, but not safe: {cause.reason}"
    else:
        reason = str(cause)
    # A full queue has named exactly the jobs that are not in.
    left_out = (
        lines_but([line.number for line in uncertain], source.number) if isinstance(error, QueueFull) else first - 1
    )
    if accepted == 0 and first <= 1:
        resume = "nothing was pushed"
    else:
        resume = f"{count(accepted, 'payload')} in; go on with: {command} --skip {left_out}"
    code = EXIT_INTERRUPTED if isinstance(cause, KeyboardInterrupt) else EXIT_FAILED
    raise Failure(f"{reason}; {resume}", code) from None


def _refusal(app: Lowq, queue: Queue, error: JobError, lines: list[JobLine]) -> str:
    typed = app.payload_type_of(queue.name)
    dump = app.config.dump_payload if typed is None else typed.dump
    for line in sorted(lines, key=lambda line: line.number):
        try:
            encode_job(line, dump, app.config.max_payload_bytes, is_typed=typed is not None)
        except JobError as refused:
            return f"line {line.number}: {refused}"
    return failure_of(error).message


@click.command
@with_app
@queue_argument
@click.argument("payload", required=False)
@click.option("--score", metavar="NUMBER", help="The payload's order; default: the time.")
@job_options
@shards_count_option
@push_options
@json_option
def put(
    app: Lowq, queue: str, payload: str | None, shards_count: int | None, timeout: float | None,
    durability: Durability | None, as_json: bool, **rest: Any,
) -> None:  # fmt: skip
    """Put a job with a fresh id; prints the id.

    PAYLOAD is JSON; default: "", and - reads it from the standard input.

    \b
    lowq put mail '{"to": "a@b.c"}' --delay 60
    """
    job = job_of(None, sys.stdin.read() if payload == "-" else payload, **rest)
    handle = queue_to_push(app, queue, shards_count)
    with single_push():
        job_id = handle.put(**job, timeout=timeout, durability=durability)
    answer(as_json, {"queue": queue, "id": job_id}, job_id)


# --- from an outbox ---

#: Seconds, at most, for which --once waits for transactions that were open when it began.
WAIT_FOR_WRITERS = 10.0


@click.command
@with_connection
@click.argument("database_url", required=False)
@click.option("--once", is_flag=True, help="Push what is committed now, then end.")
@click.option("--retry", is_flag=True, help="Let rows that could not be pushed wait again, then end.")
@click.option(
    "--sql", type=click.Choice(["postgresql", "sqlite"]), metavar="DATABASE",
    help="Print what makes the table, for postgresql or sqlite, then end.",
)  # fmt: skip
@click.option(
    "--interval", type=click.FloatRange(0, 3600, min_open=True), default=1.0, show_default=True, metavar="SECONDS",
    help="Look for rows after so long, though nobody has told of any.",
)  # fmt: skip
@log_options
def outbox(
    database_url: str | None, once: bool, retry: bool, sql: str | None, interval: float, log_format: LogFormat | None,
    log_level: str | None, **connection: str | None,
) -> None:  # fmt: skip
    """Push what the transactions of a database have left in its table lowq_outbox.

    DATABASE_URL is postgresql://user:password@host/name, sqlite:///path/to/file.db, or the name that Django knows it
    by. Default: the setting outbox, or the variable DATABASE_URL. Of several relays of one database, those of nodes
    with --outbox included, one is at work, the others wait. TERM and Ctrl-C end it.

    \b
    lowq outbox --sql postgresql | psql "$DATABASE_URL"
    lowq outbox -r shop.workers
    """
    from lowq.contrib import outbox as contrib  # the other verbs do without it

    if sql is not None:
        click.echo(contrib.sql(sql), nl=False)
        return
    logs.configure(log_format, log_level)
    app = open_app(**connection)
    logs.configure(log_format, log_level)
    database_url = database_url or app.config.outbox or os.environ.get("DATABASE_URL")
    if not database_url:
        raise WrongUsage("which database? lowq outbox postgresql://user:password@host/name, or set DATABASE_URL")
    relay = contrib.Relay(app, database_url, interval=interval)
    if not once and not retry:
        with stopped_by_signals(relay.request_stop):
            say("relaying the outbox; Ctrl-C ends it")
            relay.run()
        return
    try:
        if retry:
            say(f"{count(relay.retry_refused(), 'row')} wait again")
        else:
            pushed = relay.run_once(wait=WAIT_FOR_WRITERS)
            waiting, refused = relay.count_rows()
            say(
                f"{count(pushed, 'job')} pushed"
                + (f"; {count(waiting, 'row')} left for later" if waiting else "")
                + (f"; {count(refused, 'row')} kept with an error" if refused else "")
            )
    except LowqError:
        raise
    except Exception as error:  # the driver's
        raise Failure(f"the database can't be used: {type(error).__name__}: {error}".strip()) from None
