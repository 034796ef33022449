"""What runs for too long: batches, which the watchdog ends; stacks of what hangs; and the end of a process.

The watchdog is a thread. It looks at the batches that each performer shows (`BatchActivity`). No batch can pass a limit
sooner than the shortest limit after it began, so it sleeps for that long at most, or until the first running batch
passes one. A node without any limit has no watchdog.
"""

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial

from lowq.clock import LONGEST_WAIT, Clock, duration
from lowq.clock import now as clock_now
from lowq.errors import LowqError
from lowq.logs import flush, get_log
from lowq.shards.shard import Performing
from lowq.store import Client
from lowq.store.keys import stack_key
from lowq.work.loop import BatchActivity

log = get_log("lowq.node")

#: Seconds beyond `shutdown_timeout` for what a node does itself when that is over: reports, surrendered leases.
LEEWAY = 2.0
#: Innermost calls of a stack, and characters that are sent of it; and seconds that it is kept.
MOST_CALLS, MOST_CHARACTERS, STACK_SECONDS = 200, 2**16, 30


class Watchdog:
    """Enforces time limits and ttr, and names batches that run for long in the log.

    ``activities``: of those who perform, as they are at each look. ``limits``: all that there are, in seconds.
    ``warn_after``: seconds; 0: it warns of nothing. ``write_off``: called when a batch has exceeded its ttr, see
    `TimeLimits.enforce`.
    """

    def __init__(
        self,
        activities: Callable[[], Sequence[BatchActivity]],
        limits: Iterable[float],
        warn_after: float,
        *,
        write_off: Callable[[BatchActivity], object],
        on_fatal: Callable[[BaseException], object],
        clock: Clock = clock_now,
    ) -> None:
        self._activities = activities
        self._warn_after = warn_after
        #: Seconds that pass between two looks at most; infinite: there is nothing to look for.
        self._longest = min([*limits, *([warn_after] if warn_after else [])], default=float("inf"))
        self._write_off = write_off
        self._on_fatal = on_fatal
        self._clock = clock
        self._nudge = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="lowq-watchdog", daemon=True)

    # --- from other threads ---

    def start(self) -> None:
        """Starts the thread, if there is anything to look for."""
        if self._longest < float("inf"):
            self._thread.start()

    def nudge(self) -> None:
        """A limit is nearer than it was: look again now."""
        self._nudge.set()

    def stop(self) -> None:
        """Ends the thread, and waits for that, but not for a log that hangs. After this nothing is written off."""
        self._closed = True
        self._nudge.set()
        if self._thread.is_alive():
            self._thread.join(1.0)

    # --- its own ---

    def _run(self) -> None:
        try:
            while not self._closed:
                self._nudge.wait(min(self.look(), LONGEST_WAIT))
                self._nudge.clear()
        except BaseException as error:
            self._on_fatal(error)

    def look(self) -> float:
        """Does what is due, and returns the seconds until something may be due again."""
        wait = self._longest
        for activity in self._activities():
            limits = activity.limits
            if limits is not None:
                left = limits.enforce(partial(self._write_off, activity))
                if limits.written_off:
                    continue  # it is logged with that
                wait = wait if left is None else min(wait, left)
            performing = activity.performing
            if performing is not None and self._warn_after:
                wait = min(wait, self._warn(activity, performing))
        return max(wait, 0.0)

    def _warn(self, activity: BatchActivity, performing: Performing) -> float:
        """Names the batch if it is time for that; returns the seconds until it is time again."""
        known, due = activity.seen or (None, 0.0)
        if known is not performing:
            due = self._warn_after
        seconds = self._clock() - performing.since
        if seconds >= due:
            who = "a task" if activity.number is None else f"thread {activity.number}"
            log.warning(
                "%s still performs %s", who, performing,
                extra={
                    "event": "long_batch", "queue": performing.shard.queue, "shard": performing.shard.index,
                    "ids": performing.ids[:100], "thread_number": activity.number, "seconds": seconds,
                },
            )  # fmt: skip
            while due <= seconds:
                due *= 2
        activity.seen = performing, due
        return due - seconds


# --- the end of the process ---


def end_process_by(
    deadline: float, exit_code: int, *, at_once: Callable[[], bool] = lambda: False
) -> Callable[[], None]:
    """Ends the process with that code at that time (monotonic seconds), or as soon as ``at_once`` says so, however it
    hangs: in a hook of the application, in a thread of its own that is no daemon, or in `atexit`. Returns what calls
    this off. Leases that are still held then run out.
    """
    called_off = threading.Event()

    def watch() -> None:
        while not called_off.wait(min(max(deadline - time.monotonic(), 0.0), 0.1)):
            if time.monotonic() >= deadline or at_once():
                log.error(
                    "the process ends with %d: it should have ended %s ago, and this still runs:\n%s",
                    exit_code, duration(max(time.monotonic() - deadline, 0.0)), _stacks(),
                    extra={"event": "cut_short"},
                )  # fmt: skip
                flush()
                os._exit(exit_code)

    threading.Thread(target=watch, name="lowq-process-end", daemon=True).start()
    return called_off.set


def _stacks() -> str:
    """Where the threads are that keep the process from ending."""
    frames = sys._current_frames()
    threads = [thread for thread in threading.enumerate() if not thread.daemon and thread.ident in frames]
    return "\n".join(
        f"--- {thread.name}\n{''.join(traceback.format_stack(frames[thread.ident or 0]))}" for thread in threads
    )


# --- stacks ---


def stack_of_thread(ident: int | None) -> list[str]:
    """The lines of the stack of a thread, outermost first; empty: it does not run."""
    frame = sys._current_frames().get(ident or 0)
    return [] if frame is None else traceback.format_stack(frame, MOST_CALLS)


#: Queue and id -> the number of the thread that performs it, None for a task, and the lines; none when nothing does.
StackOf = Callable[[str, str], tuple[int | None, list[str]]]


def stack_sender(namespace: str, client: Client, stack_of: StackOf) -> Callable[[Mapping[str, str]], None]:
    """Returns a function that sends the stack of what performs an id to whoever asks for it: in a thread of its own, as
    lines of code are read from files, and Redis may be slow. Requests that come meanwhile get no answer.
    """
    busy = threading.Lock()

    def run(asked: Mapping[str, str]) -> None:
        # Who gets no answer asks again; another release may ask otherwise.
        with busy, suppress(LowqError, KeyError):
            key = stack_key(namespace, asked["request"])
            number, lines = stack_of(asked["queue"], asked["id"])
            answer = json.dumps({"thread": number, "text": "".join(lines)[-MOST_CHARACTERS:]})
            client.command("SET", key, answer, "EX", STACK_SECONDS, key=key)

    def send(asked: Mapping[str, str]) -> None:
        if not busy.locked():
            with suppress(RuntimeError):  # no more threads
                threading.Thread(target=run, args=(asked,), name="lowq-stack", daemon=True).start()

    return send
