"""``lowq take`` and ``consume``: jobs out by hand, or by any program."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import IO, Any

import click
import msgspec

from lowq import logs
from lowq.application import Lowq
from lowq.cli.group import json_option, metrics_options, queue_argument, set_up, with_app
from lowq.cli.output import Failure, WrongUsage, count, say
from lowq.cli.process import stopped_by_signals
from lowq.clock import Lock
from lowq.consumer import Consumer, ConsumerJob
from lowq.errors import ConsumerClosed, NotTaken, RedisUnavailable
from lowq.logs import get_log

log = get_log("lowq.consumer")

#: Exit code of a command that gives its job back (EX_TEMPFAIL); 0 acknowledges it, and any other fails.
RELEASE = 75
#: Seconds that a command has after TERM, before it is killed.
GRACE = 5.0
#: Characters of what a command wrote to its standard error that are kept with a failed job.
KEPT_ERROR = 2000


@click.command
@with_app
@queue_argument
@click.option("--limit", type=click.IntRange(1, 1000), default=1, show_default=True, help="Jobs at most.")
@click.option("--timeout", type=click.FloatRange(0), default=0.0, metavar="SECONDS", help="Wait so long for one.")
@click.option("--ack", is_flag=True, help="Acknowledge them: they are done.")
@json_option
def take(app: Lowq, queue: str, limit: int, timeout: float, ack: bool, as_json: bool) -> None:
    """Take jobs, one JSON object a line, or all in one document; without --ack they wait again afterwards.

    Exit code 1: nothing came.
    """
    jobs: list[ConsumerJob] = []
    to_json = _to_json(app, queue)
    with app.queue(queue).consumer() as consumer:
        while len(jobs) < limit and (some := consumer.take(limit - len(jobs), timeout if not jobs else 0)):
            jobs += some
        lines = [
            {"id": job.id, "payloads": [msgspec.Raw(to_json(p)) for p in job.payloads], "retry_count": job.retry_count}
            for job in jobs
        ]
        if as_json and jobs:
            click.echo(msgspec.json.encode({"queue": queue, "jobs": lines}))
        for job, line in zip(jobs, lines, strict=True):
            if not as_json:
                click.echo(msgspec.json.encode(line))
            if ack:
                sys.stdout.flush()  # first: what nobody has got must not be acknowledged
                job.ack()
    if not jobs:
        raise Failure(f"queue {queue!r}: nothing came" + (f" within {timeout:g} s" if timeout else ""))


@click.command(context_settings={"ignore_unknown_options": True})
@with_app
@queue_argument
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.option("-c", "--concurrency", type=click.IntRange(1, 1000), default=1, show_default=True, help="Jobs at once.")
@click.option(
    "--ttr", type=click.FloatRange(0, min_open=True), metavar="SECONDS", help="Kill a command after so long: it fails."
)
@click.option("--idle", type=click.FloatRange(0), metavar="SECONDS", help="End when nothing came for so long.")
@metrics_options
def consume(
    app: Lowq, queue: str, command: Sequence[str], concurrency: int, ttr: float | None, idle: float | None,
    **settings: Any,
) -> None:  # fmt: skip
    """Run a command for each job.

    It gets the payloads on its standard input, one line of JSON each, oldest first; {id} in its arguments stands for
    the id, as LOWQ_ID does in its environment, beside LOWQ_QUEUE and LOWQ_RETRY_COUNT. Exit code 0 acknowledges the
    job, 75 gives it back uncharged, any other fails: the job is retried, with what the command wrote to its standard
    error as the reason.

    \b
    lowq consume mail -c 4 -- ./send.sh {id}

    TERM and Ctrl-C end it: running commands are waited for, up to shutdown_timeout.
    """
    if not command:
        raise WrongUsage("say which command is to be run for each job: lowq consume QUEUE -- COMMAND {id}")
    if "{id}" not in command[0] and shutil.which(command[0]) is None:
        raise WrongUsage(f"{command[0]!r} can't be run: there is no such program, or it is not executable")
    logs.configure(None, None)
    set_up(app, **settings)
    # The command is killed long before its job would be taken from us, and so from two commands at once.
    patience = None if ttr is None else ttr + 3 * GRACE
    with app.queue(queue).consumer(ttr=patience) as consumer:
        runner = _Runner(consumer, command, ttr, _to_json(app, queue))
        with stopped_by_signals(runner.stop):
            say(f"consuming {queue}: {shlex.join(command)}; Ctrl-C ends it")
            left = runner.run(concurrency, idle, app.config.shutdown_timeout)
    if left:
        raise Failure(f"{count(left, 'command')} still ran after shutdown_timeout; their jobs wait again")


def _to_json(app: Lowq, queue: str) -> Callable[[Any], bytes]:
    """The function that encodes a payload of the queue as JSON; a typed one as it is stored."""
    typed = app.payload_type_of(queue)
    return partial(msgspec.json.encode, enc_hook=str) if typed is None else typed.dump


class _Runner:
    """Runs a command for each job, in some threads."""

    def __init__(
        self, consumer: Consumer, command: Sequence[str], ttr: float | None, to_json: Callable[[Any], bytes]
    ) -> None:
        self._to_json = to_json
        self._consumer = consumer
        self._command = list(command)
        self._ttr = ttr
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock = Lock()
        self._stopping = threading.Event()
        #: Running commands are ended: their jobs are released, and do not fail.
        self._cuts_short = threading.Event()
        self._failure: Exception | None = None

    def stop(self) -> None:
        """Stops taking jobs; a second call ends the running commands. For a signal handler: it waits for nothing."""
        if self._stopping.is_set():
            raise KeyboardInterrupt
        self._stopping.set()

    def run(self, concurrency: int, idle: float | None, shutdown_timeout: float) -> int:
        """Works until it is stopped, or idle for so many seconds. Returns how many commands still ran then."""
        threads = [threading.Thread(target=self._work, args=(idle,), daemon=True) for _ in range(concurrency)]
        left = 0
        try:
            for thread in threads:
                thread.start()
            while any(thread.is_alive() for thread in threads) and not self._stopping.wait(0.1):
                pass
            self._consumer.quiet()
            deadline = time.monotonic() + shutdown_timeout
            for thread in threads:
                thread.join(max(deadline - time.monotonic(), 0.0))
        finally:  # also when a second signal ends it at once
            left = self._cut_short()
        for thread in threads:
            thread.join(1.0)
        if self._failure is not None:
            raise self._failure
        return left

    def _cut_short(self) -> int:
        """Ends what still runs, all at once; returns how many those were."""
        self._cuts_short.set()
        with self._lock:
            running = list(self._running)
        for process in running:
            _signal(process, signal.SIGTERM)
        deadline = time.monotonic() + GRACE
        for process in running:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0.0))
            _signal(process, signal.SIGKILL)
        return len(running)

    def _work(self, idle: float | None) -> None:
        try:
            while not self._stopping.is_set():
                jobs = self._consumer.take(timeout=idle)
                if not jobs:
                    return
                self._perform(jobs[0])
        except Exception as error:
            self._failure = error
            self._stopping.set()

    def _perform(self, job: ConsumerJob) -> None:
        try:
            lines = b"".join(self._to_json(payload) + b"\n" for payload in job.payloads)
            code, said = self._call(job, lines)
        except (TypeError, ValueError) as error:  # an id with a NUL in it, for one: it can never be
            log.error("id %r: %s can't be started: %s", job.id, self._command[0], error)
            self._report(partial(job.bury, f"{self._command[0]} can't be started: {error}"))
            return
        except OSError as error:
            code, said = 127, f"it can't be started: {error}"
        if code == 0:
            self._report(job.ack)
        elif code == RELEASE:
            self._report(partial(job.release, 1.0))
        elif self._cuts_short.is_set():
            self._report(job.release)
        else:
            how = f"exited with {code}" if code > 0 else f"was ended by signal {-code}"
            log.error("id %r: %s %s", job.id, self._command[0], how)
            self._report(partial(job.fail, f"{self._command[0]} {how}\n{said}".rstrip()))

    def _report(self, report: Callable[[], object]) -> None:
        """Reports the outcome of a job; while Redis is away again and again, until running commands are ended."""
        while True:
            try:
                report()
                return
            except (NotTaken, ConsumerClosed) as error:
                log.warning("%s", error)
                return
            except RedisUnavailable:
                if self._cuts_short.wait(0.5):
                    return

    def _call(self, job: ConsumerJob, lines: bytes) -> tuple[int, str]:
        """Runs the command for a job. Returns its exit code, negative for a signal, and the end of its standard error.

        Raises:
            OSError, ValueError: it can't be started.
        """
        arguments = [argument.replace("{id}", job.id) for argument in self._command]
        more = {"LOWQ_ID": job.id, "LOWQ_QUEUE": self._consumer.queue, "LOWQ_RETRY_COUNT": str(job.retry_count)}
        # In one step: a command that `_cut_short` does not know would go on beside the next run of its job.
        with self._lock:
            if self._cuts_short.is_set():
                return -signal.SIGTERM, ""
            process = subprocess.Popen(
                arguments, stdin=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | more, start_new_session=True
            )
            self._running.add(process)
        assert process.stdin is not None
        assert process.stderr is not None
        kept = bytearray()
        reader = threading.Thread(target=_pass_on, args=(process.stderr, kept), daemon=True)
        try:
            reader.start()
            # In a thread: the command may not read them, nor close its end.
            threading.Thread(target=_feed, args=(process.stdin, lines), daemon=True).start()
            try:
                code, prefix = process.wait(self._ttr), ""
                reader.join(1.0)  # not until the end of the stream: processes that it has left behind may have it open
            except subprocess.TimeoutExpired:
                code, prefix = self._end(process), f"it had run for {self._ttr:g} s\n"
            return code, prefix + bytes(kept).decode("utf-8", "backslashreplace")[-KEPT_ERROR:]
        finally:
            with self._lock:
                self._running.discard(process)

    def _end(self, process: "subprocess.Popen[bytes]") -> int:
        _signal(process, signal.SIGTERM)
        code = 0
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(GRACE)
        _signal(process, signal.SIGKILL)  # the rest of what it has started, too
        return code or process.wait()


def _pass_on(stream: IO[bytes], kept: bytearray) -> None:
    """Passes on what a command writes to its standard error, and keeps the end of it."""
    with stream:
        while data := os.read(stream.fileno(), 2**16):
            kept[:] = (kept + data)[-4 * KEPT_ERROR :]
            with suppress(OSError, ValueError):  # nobody reads ours; the command goes on all the same
                click.echo(data, err=True, nl=False)


def _feed(stream: IO[bytes], lines: bytes) -> None:
    with suppress(OSError), stream:  # the command may not read all of them
        stream.write(lines)


def _signal(process: "subprocess.Popen[bytes]", number: int) -> None:
    """Sends a signal to a command and all processes that it has started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
