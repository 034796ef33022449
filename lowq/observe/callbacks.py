"""Callbacks of the application for the changes of its jobs.

::

    jobs_changed --batch--> `Buffer` --one event after the other--> the callbacks, in one thread

A process emits what it has done, once it is written in Redis, and does not wait for callbacks. When they are too slow
the oldest events are dropped and counted.
"""

import atexit
import os
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from lowq.codec import decode_id
from lowq.logs import describe, get_log
from lowq.observe.buffer import Buffer
from lowq.observe.events import Counts, JobEventKind, Observer

log = get_log("lowq.events")

#: Events that wait for callbacks, at most.
MAX_EVENTS = 10_000
#: Seconds that a process waits for callbacks at its end.
FLUSH_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class JobEvent:
    """A change of a job."""

    kind: JobEventKind
    queue: str
    id: str
    #: How many payloads of the id changed; None: not known here.
    payloads_count: int | None
    #: When this process knew of it, by its clock: Unix time, seconds.
    at: float
    #: Of "new_error": the exception and the first line of its message.
    error: str | None = None


class Listener(Protocol):
    """A callback for events. A Protocol, as an attribute of the type of a function would count as a method."""

    def __call__(self, event: JobEvent, /) -> object: ...


@dataclass(frozen=True, slots=True)
class _Batch:
    """Events of one kind that were emitted together."""

    kind: JobEventKind
    queue: "QueueCallbacks"
    ids: Sequence[str | bytes]
    counts: Counts
    at: float
    error: str | None

    def __len__(self) -> int:
        return len(self.ids)


class Callbacks:
    """The callbacks of an application, and the events on their way to them. Safe for threads. A forked child has none
    of its parent's events.
    """

    def __init__(self, *, max_events: int = MAX_EVENTS) -> None:
        self._max_events = max_events
        self._is_flushed_at_exit = False
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._buffer: Buffer[_Batch] = Buffer("lowq-events", self._max_events, self._call)
        #: `dropped` when the callbacks were last up to date; None: they are.
        self._dropped_before: int | None = None
        #: The last error of a callback. Only for the thread.
        self._said = ""

    @property
    def dropped(self) -> int:
        """Events that there was no room for."""
        return self._buffer.dropped

    def of(self, queue: str, *listeners: Listener | None) -> "list[QueueCallbacks]":
        """The observers of the queue's events; none without listeners."""
        present = tuple(listener for listener in listeners if listener is not None)
        return [QueueCallbacks(self, queue, present)] if present else []

    def put(self, batch: _Batch) -> None:
        """Has the callbacks called, without waiting for them."""
        if self._pid != os.getpid():
            self._begin()
        is_first_dropped = False
        with self._buffer.changed:
            before = self.dropped
            self._buffer.put(batch)
            if self.dropped > before and self._dropped_before is None:
                self._dropped_before, is_first_dropped = before, True
        if not self._is_flushed_at_exit:
            self._is_flushed_at_exit = True
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
        return self._pid != os.getpid() or self._buffer.flush(timeout)

    # --- the thread ---

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
        with self._buffer.changed:
            before, is_behind = self._dropped_before, self._buffer.has_waiting()
            if before is None or is_behind:
                return
            self._dropped_before = None
            dropped = self.dropped - before
        log.warning(
            "callbacks for events keep up again; %d events were dropped", dropped,
            extra={"event": "events_resumed", "dropped": dropped},
        )  # fmt: skip

    def _call_one(self, listener: Listener, event: JobEvent) -> None:
        try:
            listener(event)
        except BaseException as error:  # also SystemExit: it ends nothing but the callback
            said = describe(error)
            if said != self._said:  # once, and not for every job
                self._said = said
                log.error("a callback has failed with %r", event, exc_info=error, extra={"event": "callback_failed"})


class QueueCallbacks(Observer):
    """The callbacks for the events of one queue."""

    def __init__(self, callbacks: Callbacks, queue: str, listeners: tuple[Listener, ...]) -> None:
        self._callbacks = callbacks
        #: The queue.
        self.name = queue
        self.listeners = listeners

    def jobs_changed(self, kind: JobEventKind, ids: Sequence[str | bytes], counts: Counts, error: str | None) -> None:
        self._callbacks.put(_Batch(kind, self, ids, counts, time.time(), error))


def _flush(callbacks: "weakref.ref[Callbacks]") -> None:
    """Called at the end of the process, which ends its daemon threads."""
    found = callbacks()
    if found is not None:
        found.flush()
