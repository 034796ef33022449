"""The end of a process, bounded: what hangs in it when its time is over is named in the log, and the process ends."""

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lowq.duration import duration
from lowq.logs import flush, get_log

log = get_log("lowq.node")

#: Seconds beyond `shutdown_timeout` for what a node does itself when that is over: reports, surrendered leases.
LEEWAY = 2.0


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


@contextmanager
def ending_process_by(deadline: float | None, exit_code: int, *, at_once: Callable[[], bool]) -> Iterator[None]:
    """`end_process_by`, called off when the block ends. None: no deadline."""
    call_off = None if deadline is None else end_process_by(deadline, exit_code, at_once=at_once)
    try:
        yield
    finally:
        if call_off is not None:
            call_off()


def _stacks() -> str:
    """Where the threads are that keep the process from ending."""
    frames = sys._current_frames()
    threads = [thread for thread in threading.enumerate() if not thread.daemon and thread.ident in frames]
    return "\n".join(
        f"--- {thread.name}\n{''.join(traceback.format_stack(frames[thread.ident or 0]))}" for thread in threads
    )
