"""Handlers that block an event loop: the one that has not awaited anything for long is named in the log."""

import asyncio
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import Any

from lowq.clock import Clock
from lowq.logs import get_log
from lowq.shards.shard import Performing

log = get_log("lowq.node")

#: Seconds for which a handler may go on without awaiting anything before it is named in the log.
BLOCKED_SECONDS = 0.1


class BlockedLoopWatch:
    """A thread that asks a loop, which runs in another one, for a sign of life while ``is_busy``. ``performing``: what
    a task of it performs.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        loop_thread: threading.Thread,
        is_busy: Callable[[], bool],
        performing: Callable[["asyncio.Task[Any]"], Performing | None],
        clock: Clock,
    ) -> None:
        self._loop = loop
        self._loop_thread = loop_thread
        self._is_busy = is_busy
        self._performing = performing
        self._clock = clock
        self._thread = threading.Thread(target=self._run, name="lowq-loop-watch", daemon=True)
        #: Set while tasks run.
        self._busy = threading.Event()
        self._closed = False
        #: When the loop was asked for a sign of life that it has not given yet; None: it has. Monotonic.
        self._asked_at: float | None = None

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def nudge(self) -> None:
        """Tasks run from now on."""
        if not self._busy.is_set():
            self._busy.set()

    def close(self) -> None:
        """Ends the thread."""
        self._closed = True
        self._busy.set()

    def _run(self) -> None:
        warn_after = BLOCKED_SECONDS
        while self._busy.wait() and not self._closed:
            now = self._clock()
            if self._asked_at is None:
                warn_after = BLOCKED_SECONDS
                if not self._is_busy():
                    self._busy.clear()
                    if self._is_busy() or self._closed:  # since it was looked at
                        self._busy.set()
                    continue
                self._asked_at = now
                self._loop.call_soon_threadsafe(self._answer)
            elif now - self._asked_at >= warn_after and self._name_the_blocker(now - self._asked_at):
                warn_after *= 2
            time.sleep(BLOCKED_SECONDS / 4)

    def _answer(self) -> None:
        self._asked_at = None

    def _name_the_blocker(self, seconds: float) -> bool:
        """False: it is the machine, or it is over."""
        task = asyncio.current_task(self._loop)
        frame = sys._current_frames().get(self._loop_thread.ident or 0)
        if task is None or frame is None or self._asked_at is None:
            return False
        log.warning(
            "%s has blocked the event loop for %.1f s, and with it all other tasks: await what waits, and run what "
            "computes in asyncio.to_thread\n%s",
            self._performing(task) or f"task {task.get_name()!r}", seconds,
            "".join(traceback.format_stack(frame)), extra={"event": "loop_blocked", "seconds": seconds},
        )  # fmt: skip
        return True


def stack_of(task: "asyncio.Task[None]") -> list[str]:
    """Where a task waits, outermost first. `asyncio.Task.get_stack` knows only its outermost function."""
    lines = []
    awaited: Any = task.get_coro()
    while isinstance(awaited, Coroutine):
        frame: FrameType | None = getattr(awaited, "cr_frame", None)
        if frame is not None:
            code = frame.f_code
            lines.append(f'  File "{code.co_filename}", line {frame.f_lineno}, in {code.co_name}\n')
        awaited = getattr(awaited, "cr_await", None)
    return lines
