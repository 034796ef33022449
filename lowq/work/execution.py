"""`current`: the batch that is being performed, for its handler and for the records that it logs."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from datetime import timedelta
from typing import Any

from lowq import codec
from lowq.codec import delay_seconds
from lowq.codec.payloads import cut_error
from lowq.errors import LowqError
from lowq.job import Job
from lowq.observe.events import ObservedBatch
from lowq.shards.delivery import TakenJob
from lowq.shards.shard import Shard
from lowq.work.time_limits import TimeLimits, checked_seconds

#: Ids that a log record carries at most.
MAX_LOGGED_IDS = 10


def _is_task_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and bool(task.cancelling())


class Execution:
    """A batch that is being performed, as `current` returns it. Only for the thread, or task, that performs it."""

    # And whatever a middleware or a handler keeps here.
    __slots__ = (
        "__dict__", "__weakref__", "_jobs", "_limits", "_load_payload", "_outcomes", "_source", "fence", "shard",
        "worker",
    )  # fmt: skip

    # What most batches do without: set on those that need it, as each batch makes one of these.
    #: The id that ``perform_one`` performs, in a batch of several.
    _running_id: str | None = None
    #: The observers of the batch.
    _observed: ObservedBatch | None = None
    #: Whether another id may begin: not when the node stops, the shard is given up, or its lease is not surely held.
    _may_go_on: Callable[[], bool] = staticmethod(lambda: True)
    #: Whether the task was cancelled, and not something that it awaits.
    _is_cancelled: Callable[[], bool] = staticmethod(_is_task_cancelled)

    def __init__(
        self,
        worker: type,
        shard: int,
        fence: int,
        jobs: Sequence[TakenJob] | Sequence[Job],
        load_payload: Callable[[bytes], Any] = codec.load_payload,
        limits: TimeLimits | None = None,
        source: Shard | None = None,
    ) -> None:
        #: The worker's class.
        self.worker = worker
        #: The number of the shard.
        self.shard = shard
        #: The fencing token: grows with every change of the shard's owner. A database that remembers the highest
        #: one it saw can refuse an owner that was replaced without noticing.
        self.fence = fence
        self._jobs = jobs
        self._load_payload = load_payload
        self._limits = limits
        self._source = source
        #: Outcomes of single ids, as the handler has set them: id -> verb and detail.
        self._outcomes: dict[str, tuple[str, Any]] = {}

    @property
    def delivery(self) -> int:
        """The number of the delivery that the batch belongs to, counted by the shard; once the batch was written off,
        that of a later one.
        """
        return 0 if self._source is None else self._source.in_flight.delivery

    @property
    def deadline(self) -> float | None:
        """``time.monotonic()`` at which the worker's ``time_limit`` or its ``ttr`` passes, whichever is first; None: it
        has neither, or the batch has ended.
        """
        return None if self._limits is None else self._limits.deadline

    def touch(self, seconds: float | timedelta) -> None:
        """From now on the batch has so many seconds: ``time_limit`` passes then, and ``ttr`` as much later as it is
        longer. For a worker with neither it does nothing.

        Raises:
            LeaseLost: ``ttr`` has passed already, the jobs are performed by somebody else.
        """
        more = checked_seconds("touch", seconds.total_seconds() if isinstance(seconds, timedelta) else seconds)
        if self._limits is not None:
            self._limits.touch(more)

    @property
    def jobs(self) -> list[Job]:
        """The jobs of the batch, with scores, retry_count and perform_at, as they were taken."""
        return [item if isinstance(item, Job) else item.job(self._load_payload) for item in self._jobs]

    def done(self, job_id: object) -> None:
        """The id is finished, also if ``perform`` raises later."""
        self._set_outcome(job_id, "done", None)

    def fail(self, job_id: object, error: BaseException | str) -> None:
        """The id failed: it is charged a retry, whatever becomes of the others. What ``bury_on`` and ``release_on`` say
        of the error holds, as if the id had raised it alone.
        """
        if not isinstance(error, BaseException | str):
            raise LowqError(f"fail({job_id!r}): say the exception or a text, not {error!r:.100}")
        self._set_outcome(job_id, "fail", error if isinstance(error, BaseException) else cut_error(error))

    def release(self, job_id: object, delay: float | timedelta | None = None) -> None:
        """The id waits again, uncharged: ``delay`` seconds, or behind nothing when it is None."""
        # Checked here, where the handler learns of it: once the batch is over, nobody can learn of it.
        self._set_outcome(job_id, "release", None if delay is None else float(delay_seconds(delay)))

    def bury(self, job_id: object, reason: str = "") -> None:
        """The id goes to the morgue with all its payloads."""
        if not isinstance(reason, str):
            raise LowqError(f"bury({job_id!r}): reason is a text, not {reason!r:.100}")
        self._set_outcome(job_id, "bury", cut_error(reason))

    def _done_ids(self) -> list[str]:
        """The ids that are done whatever becomes of the rest. The handler may set outcomes meanwhile."""
        return [job_id for job_id, (verb, _) in dict(self._outcomes).items() if verb == "done"]

    def _begin(self, job_id: str | None) -> None:
        """In ``perform_one`` the id begins; None: all have ended."""
        self._running_id = job_id
        if job_id is not None and self._observed is not None:
            self._observed.id_began(job_id)

    def _set_outcome(self, job_id: object, verb: str, detail: Any) -> None:
        # Plain texts are kept: what raises, raises here, where the handler learns of it.
        name = "".join((str(job_id),))
        if self._limits is not None:
            # Should ttr pass right now, the outcome may get lost, as in a crash.
            self._limits.check_held()
        if not any(item.id == name for item in self._jobs):
            raise LowqError(f"{verb}({job_id!r}): the batch being performed has no such id")
        self._outcomes[name] = (verb, detail)


current_execution: ContextVar[Execution | None] = ContextVar("lowq_execution", default=None)


def current() -> Execution:
    """The batch that is being performed.

    Raises:
        LowqError: called outside of ``perform``.
    """
    execution = current_execution.get()
    if execution is None:
        raise LowqError(
            "lowq.current() was called outside of perform; in a test of a handler use lowq.testing.execution"
        )
    return execution


class LogContext(logging.Filter):
    """A filter for handlers of `logging`: each record made inside of ``perform`` gets the attributes ``queue``,
    ``shard``, ``ids`` (the first 10 of the batch, and ``ids_count`` if there are more; in ``perform_one`` its id), and
    ``delivery``. Records from elsewhere, and attributes that a record has, stay as they are. All records pass.

    It goes by context variables: it works in coroutines, and in what copies the context, such as `asyncio.to_thread`.
    ``lowq run`` adds it to the handlers of the root logger.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Adds the attributes. Always True."""
        execution = current_execution.get()
        if execution is not None:
            for name, value in _log_fields(execution).items():
                record.__dict__.setdefault(name, value)
        return True


def add_log_context() -> None:
    """Adds the filter to those handlers of the root logger that don't have it."""
    for handler in logging.getLogger().handlers:
        if not any(isinstance(item, LogContext) for item in handler.filters):
            handler.addFilter(LogContext())


def _log_fields(execution: Execution) -> dict[str, Any]:
    running, ids = execution._running_id, [job.id for job in execution._jobs[:MAX_LOGGED_IDS]]
    fields = {
        "queue": getattr(execution.worker, "queue_name", execution.worker.__name__),
        "shard": execution.shard,
        "ids": ids if running is None else [running],
        "delivery": execution.delivery,
    }
    if running is None and len(execution._jobs) > MAX_LOGGED_IDS:
        fields["ids_count"] = len(execution._jobs)
    return fields
