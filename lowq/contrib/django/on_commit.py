"""Pushes at the commit of the caller's transaction.

A transaction's pushes to a queue leave in the order of their calls, those that follow each other there and are called
alike in one write. A rollback drops them; that of a savepoint drops those that came within it.

::

    push_on_commit --> _DeferredPush --on_commit--> Django keeps it, or drops it with its savepoint
                                                |
    the commit: Django runs the first one left; it pushes itself and all later ones that Django still keeps

What holds where: before the commit nothing is in Redis. A process that dies between the commit and the push loses the
push, and so does an outage of Redis at that moment: the push raises, out of ``atomic()``, when the transaction is
committed already. Where that must not be, the job belongs into the transaction (`lowq.contrib.outbox`).
"""

import copy
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeAlias, Unpack

from asgiref.sync import sync_to_async
from django.db import transaction

import lowq
from lowq.errors import ConfigError, JobError
from lowq.job import JobId, JobOptions, new_job
from lowq.logs import get_log

log = get_log(__name__)

#: Where to push: a worker, or the handle of a queue.
Target: TypeAlias = "type[lowq.Worker[Any]] | lowq.Queue[Any]"
#: Ids that the log names of those that could not be pushed.
IDS_LOGGED = 20
#: The method of workers that have none of their own.
_perform_async: object = lowq.Worker.perform_async.__func__  # type: ignore[attr-defined]  # a class method


@dataclass(frozen=True)
class _PushOptions:
    """The options of a push. Calls of a queue that follow each other leave together if these are equal."""

    target: Target = field(compare=False)
    #: The same for targets whose pushes do the same: ``app.queue`` makes a handle at each call.
    place: object
    #: As they were given: a method of the worker's own may take none.
    options: dict[str, Any]
    robust: bool

    def note_failure(self, jobs: Sequence[Mapping[str, Any]], error: Exception) -> Exception | None:
        """Logs that jobs may not have been pushed. Returns the error, unless nobody is to learn of it."""
        queue, ids = _name_of(self.target), ", ".join(str(job["id"]) for job in jobs[:IDS_LOGGED])
        log.error(
            "queue %r: %d jobs of a committed transaction may not have been pushed (ids %s): %s", queue,
            len(jobs), ids, error, exc_info=error if self.robust else None,
            extra={"event": "push_on_commit_failed", "queue": queue},
        )  # fmt: skip
        return None if self.robust else error


def _place_of(target: Target) -> object:
    if isinstance(target, type):
        if getattr(target.perform_async, "__func__", None) is not _perform_async:
            return target  # a method of the worker's own
        target = target.queue
    return target.name, target._backend, type(target)


def _name_of(target: Target) -> str:
    return target.name if isinstance(target, lowq.Queue) else target.queue_name


@dataclass(eq=False)
class _DeferredPush:
    """A call within a transaction. Django has the only lasting reference to it, so it lives as long as its savepoint
    is not rolled back: Python (CPython) frees it at once. Nothing else of Django's tells what was rolled back.
    """

    push: _PushOptions
    job: dict[str, Any]
    pending: "_Pending"
    is_pushed: bool = False

    def run(self) -> None:
        """Called by Django after the commit, in the order of the calls; in a test by ``captureOnCommitCallbacks``."""
        if not self.is_pushed:
            self.pending.push_from(self)


@dataclass(eq=False)
class _Pending:
    """The calls in the transactions of a connection that were not pushed, in their order."""

    calls: "list[weakref.ref[_DeferredPush]]" = field(default_factory=list)
    #: How long the list may become before those that were pushed or dropped are removed from it.
    longest: int = 100

    def add(self, call: _DeferredPush) -> None:
        self.calls.append(weakref.ref(call))
        if len(self.calls) > self.longest:
            self.calls = [weakref.ref(waiting) for waiting in self.waiting()]
            self.longest = max(100, 2 * len(self.calls))

    def waiting(self) -> list[_DeferredPush]:
        """The calls that were neither pushed nor dropped."""
        return [call for known in self.calls if (call := known()) is not None and not call.is_pushed]

    def push_from(self, first: _DeferredPush) -> None:
        """Pushes this call and all later ones. Earlier ones that still wait are of an enclosing test, which does not
        have them run.
        """
        waiting = self.waiting()
        due = waiting[waiting.index(first) :]
        groups: list[tuple[_PushOptions, list[dict[str, Any]]]] = []
        last: dict[str, tuple[_PushOptions, list[dict[str, Any]]]] = {}  # of each queue: a call joins no earlier one
        for call in due:
            call.is_pushed = True  # whatever comes of it: a push that failed half way must not be made twice
            name = _name_of(call.push.target)
            if name not in last or call.push != last[name][0]:
                last[name] = (call.push, [])
                groups.append(last[name])
            last[name][1].append(call.job)
        errors = [error for push, jobs in groups if (error := _push(push, jobs)) is not None]
        if errors:
            raise errors[0]


#: Connection -> its calls. A connection is used by one thread at a time.
_pending: "weakref.WeakKeyDictionary[Any, _Pending]" = weakref.WeakKeyDictionary()


def _push(push: _PushOptions, jobs: list[dict[str, Any]]) -> Exception | None:
    """Pushes jobs; returns the error for the caller of the commit. A malformed job does not keep out others."""
    try:
        call: Any = push.target.push if isinstance(push.target, lowq.Queue) else push.target.perform_async
        call(jobs, **push.options)
        return None
    except JobError as error:  # nothing is in
        if len(jobs) == 1:
            return push.note_failure(jobs, error)
    except Exception as error:
        return push.note_failure(jobs, error)
    found = [_push(push, [job]) for job in jobs]
    return next((error for error in found if error is not None), None)


def push_on_commit(
    worker: Target,
    job_id: JobId,
    /,
    payload: Any = "",
    *,
    using: str | None = None,
    robust: bool = False,
    timeout: float | timedelta | None = None,
    durability: lowq.Durability | None = None,
    **options: Unpack[JobOptions],
) -> None:
    """Pushes a job as ``worker.push`` does, when the transaction of the database ``using`` is committed; at once when
    there is none. ``robust``: what the push raises is logged, and not raised.

    The payload is copied here. Default scores, delays and ttl count from the push.

    Raises:
        ConfigError: ``worker`` is neither a worker nor the handle of a queue.
        JobError, PayloadError: the job is malformed. From the commit, after all pushes were tried: as `Worker.push`.
        TransactionManagementError: ``using`` is in manual transaction management.
    """
    push, job = _prepare(worker, job_id, payload, options, robust, timeout=timeout, durability=durability)
    if not _register(push, job, using) and (error := _push(push, [job])) is not None:
        raise error


async def apush_on_commit(
    worker: Target,
    job_id: JobId,
    /,
    payload: Any = "",
    *,
    using: str | None = None,
    robust: bool = False,
    timeout: float | timedelta | None = None,
    durability: lowq.Durability | None = None,
    **options: Unpack[JobOptions],
) -> None:
    """As `push_on_commit`, from async code: the transaction is that of the thread that ``sync_to_async`` calls. Outside
    of one it waits as ``worker.apush``, and keeps no thread busy.
    """
    push, job = _prepare(worker, job_id, payload, options, robust, timeout=timeout, durability=durability)
    if not await sync_to_async(_register)(push, job, using):
        apush: Any = worker.apush if isinstance(worker, lowq.Queue) else worker.aperform_async
        try:
            await apush(job, **push.options)
        except Exception as error:
            if push.note_failure([job], error) is not None:
                raise


def _prepare(
    worker: Target, job_id: JobId, payload: Any, options: JobOptions, robust: bool, **given_options: Any
) -> tuple[_PushOptions, dict[str, Any]]:
    """The options of the push, and the job with a copy of the payload.

    Raises:
        ConfigError, JobError, PayloadError: what can be said of it without asking Redis.
    """
    given: object = worker
    if not isinstance(given, lowq.Queue) and not (isinstance(given, type) and hasattr(given, "perform_async")):
        raise ConfigError(
            f"push_on_commit({given!r:.100}, ...): this is neither a worker nor the handle of a queue; write the "
            "class, push_on_commit(OrderSync, 42, payload), or push_on_commit(lowq.app.queue('OrderSync'), 42, payload)"
        )
    name = _name_of(worker)
    if not isinstance(job_id, JobId):
        raise JobError(
            f"queue {name!r}: the id {job_id!r:.60} is no str, int or UUID: push_on_commit(Worker, 42, payload)"
        )
    if type(payload) in (dict, list, str, int, float) and lowq.app.workers.get(name) is worker:
        typed = lowq.app.payload_type_of(name)
        (lowq.app.config.dump_payload if typed is None else typed.dump)(payload)
    given_options = {option: value for option, value in given_options.items() if value is not None}
    return _PushOptions(worker, _place_of(worker), given_options, robust), new_job(
        job_id, copy.deepcopy(payload), options
    )


def _register(push: _PushOptions, job: dict[str, Any], using: str | None) -> bool:
    """Has the job pushed at the commit; False: there is no transaction."""
    pending = _pending.setdefault(transaction.get_connection(using), _Pending())
    call = _DeferredPush(push, job, pending)
    is_deferred = call_on_commit(call.run, using)
    if is_deferred:
        pending.add(call)
    return is_deferred


def call_on_commit(function: Callable[[], object], using: str | None) -> bool:
    """Has a function called at the commit; False: there is no transaction. Unlike Django's, it does not connect to a
    database that was not used: that may be away, or not exist.

    Raises:
        TransactionManagementError: ``using`` is in manual transaction management.
    """
    connection = transaction.get_connection(using)
    is_open = connection.connection is not None
    if not connection.in_atomic_block and (
        connection.get_autocommit() if is_open else connection.settings_dict["AUTOCOMMIT"]
    ):
        return False
    on_commit: Callable[..., None] = connection.on_commit
    on_commit(function)
    return True
