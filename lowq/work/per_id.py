"""``perform_one``: a batch is performed id by id, and what each of them comes to is its own.

::

    waits again, uncharged --begin--> (nothing said) --> done | raised
              ^                             |
              |                             +-- ttr, or the process ends: charged, as the whole of a batch is elsewhere
              +-- the node stops, the batch is cancelled or written off before it began; or it has expired

What ends a batch in the middle finds the outcomes of all others set: what is done is acknowledged, and what has not
begun waits again.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from contextvars import copy_context
from typing import Any, NamedTuple

from lowq.coroutines import OwnContext, plain
from lowq.errors import LowqError, TimeLimitExceeded
from lowq.work.time_limits import TimeLimits

#: What an id raised when nothing but that id was performed: it is the id's own failure.
RAISED = "raised"
#: Of an id that has not begun. It is known by its identity: a handler may say the same of an id.
_NOT_BEGUN: tuple[str, Any] = ("release", None)
_DONE: tuple[str, Any] = ("done", None)
#: Errors that are shown of a batch.
_SHOWN = 10

PerformOne = Callable[[str, list[Any]], Coroutine[Any, Any, None]]


class Batch(NamedTuple):
    """What is needed of the batch that is being performed."""

    #: What becomes of single ids.
    outcomes: dict[str, tuple[str, Any]]
    limits: TimeLimits | None
    #: Whether its shard is to be given up or its lease is lost, or the node is to stop: then no other id begins.
    is_leaving: Callable[[], bool]
    #: Whether a payload of the id has expired since it was taken.
    has_expired: Callable[[str], bool]
    #: Whether its task was cancelled.
    is_cancelled: Callable[[], bool]
    #: Called with the id that begins, and with None when all have ended.
    on_begin: Callable[[str | None], object]


Current = Callable[[], Batch]


class _Run:
    """One batch, id by id."""

    def __init__(self, batch: Batch, ids: Iterable[str], seconds: float | None) -> None:
        self._batch = batch
        self._seconds = seconds
        self._outcomes = batch.outcomes
        self._errors: list[Exception] = []
        self._count = 0
        for job_id in ids:
            self._outcomes.setdefault(job_id, _NOT_BEGUN)
            self._count += 1
        self._is_first = True

    def has_expired(self, job_id: str) -> bool:
        """Whether the id is to wait again: behind the first one, payloads may have expired meanwhile."""
        return not self._is_first and self._batch.has_expired(job_id)

    def begin(self, job_id: str) -> bool:
        """Whether the id is to be performed now. It has the whole time limit for itself.

        Raises:
            LeaseLost: the batch was written off.
        """
        limits = self._batch.limits
        if not self._is_first:
            if self._batch.is_leaving():
                return False
            if limits is not None:
                limits.check_held()
                if self._seconds is not None:
                    limits.renew(self._seconds)
        self._is_first = False
        if self._outcomes.get(job_id) is _NOT_BEGUN:
            del self._outcomes[job_id]
        self._batch.on_begin(job_id)
        return True

    def end(self, job_id: str, error: BaseException | None = None) -> None:
        """It has returned or raised. What the handler itself has said of the id comes first."""
        self._outcomes.setdefault(job_id, _DONE if error is None else (RAISED, error))
        if isinstance(error, Exception):
            self._errors.append(error)

    def close(self) -> None:
        """Raises what was raised, for middlewares and the log: the outcomes are set, and hold."""
        self._batch.on_begin(None)
        errors, self._errors = self._errors, []
        try:
            if len(errors) == 1:
                raise errors[0]
            if errors:
                raise ExceptionGroup(f"{len(errors)} of {self._count} ids failed", errors[:_SHOWN])
        finally:
            del errors  # its frame is a part of their tracebacks

    def was_cancelled(self, job_id: str, cancelled: asyncio.CancelledError) -> bool:
        """Whether the batch was cancelled. Otherwise it is something that the handler awaited, and the id failed."""
        limits = self._batch.limits
        if limits is not None and limits.cancelled:
            self.end(job_id, TimeLimitExceeded(limits.exceeded()).with_traceback(cancelled.__traceback__))
            return True
        if self._batch.is_cancelled():
            return True
        error = LowqError("what the handler awaited was cancelled")
        error.__cause__ = cancelled
        self.end(job_id, error)
        return False


def one_by_one(
    perform_one: PerformOne, current: Current, seconds: float | None, *, is_async: bool
) -> Callable[[dict[str, list[Any]]], Coroutine[Any, Any, None]]:
    """``perform`` of a worker with ``perform_one``. ``seconds``: what each id has, of the time limit or the ttr.

    An id that is alone is performed as a batch is.
    """

    async def perform(payloads_by_id: dict[str, list[Any]]) -> None:
        if len(payloads_by_id) == 1:
            ((job_id, payloads),) = payloads_by_id.items()
            await perform_one(job_id, payloads)
            return
        run = _Run(current(), payloads_by_id, seconds)
        for job_id, payloads in payloads_by_id.items():
            if run.has_expired(job_id):
                continue
            if not run.begin(job_id):
                break
            try:
                if is_async:
                    await OwnContext(perform_one(job_id, payloads))
                else:
                    copy_context().run(plain(perform_one), job_id, payloads)
            except Exception as error:
                run.end(job_id, error)
            except TimeLimitExceeded as error:
                run.end(job_id, error)
                raise
            except asyncio.CancelledError as cancelled:
                if run.was_cancelled(job_id, cancelled):
                    raise
            else:
                run.end(job_id)
        run.close()

    return perform
