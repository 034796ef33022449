"""Callbacks of the application: what was done to which id.

::

    jobs_changed --batch--> bounded buffer --one event after the other--> the callbacks, in one thread

Events come from the process that has done it, once it is written in Redis. Whoever emits waits for nobody: callbacks
run in a daemon thread, and when they are too slow the oldest events are dropped and counted.
"""

import atexit
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from lowq.codec import decode_id
from lowq.logs import describe, get_log
from lowq.observe.events import Counts, JobEventKind, Observer

log = get_log("lowq.events")

#: Events that wait for callbacks, at most.
MAX_EVENTS = 10_000
#: Seconds that whoever ends waits for callbacks.
FLUSH_SECONDS = 1.0
#: Seconds without an event after which the thread ends; the next event starts another.
IDLE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class JobEvent:
    """What has become of a job."""

    kind: JobEventKind
    queue: str
    id: str
    #: How many payloads of the id it is about; None: that is not known here.
    payloads_count: int | None
    #: When it was known to be done, by the clock of this process: Unix time, seconds.
    at: float
    #: Of "new_error": the exception and the first line of its message.
    error: str | None = None


class Listener(Protocol):
    """A callback for events. No plain type of a function: as an attribute of a class that would count as a method."""

    def __call__(self, event: JobEvent, /) -> object: ...


class _Batch(NamedTuple):
    """Events of one kind that were emitted together."""

    kind: JobEventKind
    queue: "QueueCallbacks"
    ids: Sequence[str | bytes]
    counts: Counts
    at: float
    error: str | None


class Callbacks:
    """Those of an application, and the events on their way to them. Safe for threads. A child of a fork has none of its
    parent's.
    """

    def __init__(self, *, max_events: int = MAX_EVENTS) -> None:
        self._max_events = max_events
        #: Events that there was no room for.
        self.dropped = 0
        self._at_exit = False
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        #: Guards what follows.
        self._changed = threading.Condition()
        self._batches: deque[_Batch] = deque()
        #: Events in them.
        self._count = 0
        self._thread: threading.Thread | None = None
        self._is_calling = False
        #: How many had been dropped when the callbacks were up to date last; None: they are.
        self._dropped_before: int | None = None
        #: What a callback raised last. Only for the thread.
        self._said = ""

    def of(self, queue: str, *listeners: Listener | None) -> "list[QueueCallbacks]":
        """What observes events of the queue; nothing, if nobody listens."""
        present = tuple(listener for listener in listeners if listener is not None)
        return [QueueCallbacks(self, queue, present)] if present else []

    def put(self, batch: _Batch) -> None:
        """Has the callbacks called, and waits for nothing."""
        if self._pid != os.getpid():
            self._begin()
        is_first_dropped = False
        with self._changed:
            self._batches.append(batch)
            self._count += len(batch.ids)
            while self._count > self._max_events and len(self._batches) > 1:
                excess = len(self._batches.popleft().ids)
                if self._dropped_before is None:
                    self._dropped_before, is_first_dropped = self.dropped, True
                self._count -= excess
                self.dropped += excess
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="lowq-events", daemon=True)
                with suppress(RuntimeError):  # no more threads: the next event tries again
                    thread.start()
                    self._thread = thread
            self._changed.notify_all()
        if not self._at_exit:
            self._at_exit = True
            atexit.register(_flush, weakref.ref(self))
        if is_first_dropped:
            log.warning(
                "callbacks for events are too slow, or hang: more than %d events wait, the oldest are dropped",
                self._max_events, extra={"event": "events_dropped"},
            )  # fmt: skip

    def flush(self, timeout: float = FLUSH_SECONDS) -> bool:
        """Waits until the callbacks have had all events. False: they have not within so many seconds, or this is called
        by one of them.
        """
        if self._pid != os.getpid():
            return True
        if threading.current_thread() is self._thread:
            return False
        with self._changed:
            return self._changed.wait_for(lambda: not self._batches and not self._is_calling, timeout)

    # --- the thread ---

    def _run(self) -> None:
        while True:
            with self._changed:
                self._is_calling = False
                self._changed.notify_all()
                caught_up = self._caught_up()
                if not caught_up and not self._changed.wait_for(lambda: bool(self._batches), IDLE_SECONDS):
                    self._thread = None
                    return
                batch = self._batches.popleft() if self._batches else None
                self._count -= 0 if batch is None else len(batch.ids)
                self._is_calling = batch is not None
            if caught_up:
                log.warning(
                    "callbacks for events keep up again; %d events were dropped", caught_up,
                    extra={"event": "events_resumed", "dropped": caught_up},
                )  # fmt: skip
            if batch is not None:
                self._call(batch)

    def _caught_up(self) -> int:
        """How many events were dropped, if nothing waits any more since then."""
        if self._batches or self._dropped_before is None:
            return 0
        before, self._dropped_before = self._dropped_before, None
        return self.dropped - before

    def _call(self, batch: _Batch) -> None:
        counts = batch.counts
        for number, job_id in enumerate(batch.ids):
            event = JobEvent(
                batch.kind,
                batch.queue.name,
                job_id if isinstance(job_id, str) else decode_id(job_id),
                counts[number] if isinstance(counts, Sequence) else counts,
                batch.at,
                batch.error,
            )
            for listener in batch.queue.listeners:
                self._call_one(listener, event)

    def _call_one(self, listener: Listener, event: JobEvent) -> None:
        try:
            listener(event)
        except BaseException as error:  # also SystemExit: it is nobody's but the callback's
            said = describe(error)
            if said != self._said:  # not for every job
                self._said = said
                log.error("a callback has failed with %r", event, exc_info=error, extra={"event": "callback_failed"})


class QueueCallbacks(Observer):
    """Those for the events of one queue."""

    def __init__(self, callbacks: Callbacks, queue: str, listeners: tuple[Listener, ...]) -> None:
        self._callbacks = callbacks
        #: The queue.
        self.name = queue
        self.listeners = listeners

    def jobs_changed(self, kind: JobEventKind, ids: Sequence[str | bytes], counts: Counts, error: str | None) -> None:
        self._callbacks.put(_Batch(kind, self, ids, counts, time.time(), error))


def _flush(callbacks: "weakref.ref[Callbacks]") -> None:
    """At the end of the process, whose daemon threads end with it."""
    found = callbacks()
    if found is not None:
        found.flush()
