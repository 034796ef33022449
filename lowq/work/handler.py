"""The handler: the instance of a worker, and its ``perform`` or ``perform_one`` with the middlewares around it.

::

    payloads_by_id -> middlewares -> merge function -> perform, or perform_one for each id

An instance belongs to one thread, or to the event loop. ``setup`` and ``teardown`` are called there, once each. What
could not be set up is not torn down.

In ``perform_one`` each id has its own outcome::

    waits again, uncharged --begin--> (nothing said) --> done | raised
              ^                             |
              |                             +-- ttr, or the process ends: charged, as a whole batch is elsewhere
              +-- the node stops, the batch is cancelled or written off before it began; or it has expired

When the batch ends early, the outcomes of all other ids are set: what is done is acknowledged, and what has not begun
waits again.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import suppress
from contextvars import Context, copy_context
from dataclasses import dataclass
from functools import partial
from types import CoroutineType
from typing import Any, NoReturn, Self

from lowq.coroutines import OwnContext, as_raised, at_once
from lowq.errors import LowqError, TimeLimitExceeded
from lowq.logs import describe, flush, get_log
from lowq.middleware import check_done, check_plain, wrap
from lowq.observe.events import QueueEvents
from lowq.options import MergeFunction, merged
from lowq.settings import Config
from lowq.verdicts import STOPS
from lowq.work.execution import Execution, current
from lowq.work.outcome import RAISED
from lowq.workers import Worker, handler_of, is_async, time_limits_of

log = get_log("lowq.node")

#: An id that has not begun. It is known by its identity: a handler may say the same of an id.
_NOT_BEGUN: tuple[str, Any] = ("release", None)
_DONE: tuple[str, Any] = ("done", None)
#: Errors that the error of a batch shows.
_SHOWN = 10
#: Methods of an instance's life, and those that do nothing.
_OF_WORKER: list[tuple[str, Any]] = [("setup", Worker.setup), ("teardown", Worker.teardown)]

#: A handler, with or without what is around it.
Performing = Callable[..., Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True)
class WorkerRuntime:
    """What one thread, or the event loop, needs for one queue: its instance of the worker, and that with the
    middlewares around it.
    """

    instance: Worker[Any]
    #: Emits the events of its batches.
    events: QueueEvents
    #: Performs payloads_by_id, with ``context=`` in that. In a thread everything that it awaits is done at once.
    call: Performing
    is_async: bool
    #: Read once: an application's attributes are not asked for between a take and its outcome.
    batch_size: int
    #: Seconds.
    time_limit: float | None = None
    ttr: float | None = None
    #: Whether it has ``perform_one``.
    is_per_id: bool = False

    @classmethod
    def of(
        cls,
        worker: type[Worker[Any]],
        config: Config,
        on_perform: Callable[[dict[str, list[Any]]], object] | None = None,
        events: QueueEvents | None = None,
        in_thread: Callable[..., Awaitable[None]] | None = None,
    ) -> Self:
        """Makes an instance of the worker, with the application's middlewares around it. ``on_perform``: of tests;
        called with the handler's payloads. ``in_thread``: calls a plain worker, given as a function and its argument,
        in a thread, and is awaited.

        Raises:
            ConfigError: a middleware that can't be around such a worker. What the worker's ``__init__`` raises.
        """
        instance: Any = worker()
        middlewares = () if worker._is_internal else config.server_middlewares
        is_awaited, is_per_id = is_async(worker), handler_of(worker) == "perform_one"
        if not is_awaited:
            check_plain(middlewares, worker)
        time_limit, ttr = time_limits_of(worker)
        call: Callable[..., Any] = instance.perform_one if is_per_id else instance.perform
        merge = worker.merge if callable(worker.merge) else None
        is_chain = bool(is_per_id or on_perform or middlewares or merge or in_thread)
        if is_chain:
            chain = _bounded(call, worker, "the handler", is_async=is_awaited, is_awaited=is_awaited)
            if is_per_id:
                chain = _one_by_one(chain, ttr if time_limit is None else time_limit)
            if on_perform is not None:
                chain = _observed(on_perform, chain)
            chain = wrap(middlewares, worker, chain, is_async=is_awaited) if middlewares else chain
            call = chain if merge is None else _merging(merge, chain)
            if in_thread is not None and not is_awaited:
                # As a coroutine: no future takes a StopIteration that a plain function has raised.
                call, is_awaited = partial(in_thread, _run, call), True
        name = "a middleware" if middlewares else "the handler"
        bounded = _bounded(call, worker, name, is_async=is_awaited, is_awaited=is_awaited or is_chain)
        events = events or QueueEvents(worker.queue_name)
        return cls(instance, events, bounded, is_awaited, worker.batch_size, time_limit, ttr, is_per_id)


def _run(chain: Performing, payloads_by_id: dict[str, list[Any]]) -> None:
    at_once(chain(payloads_by_id))


async def _awaited(awaitable: Awaitable[object]) -> object:
    return await awaitable


def _bounded(
    call: Callable[..., Any], worker: type[Worker[Any]], name: str, *, is_async: bool, is_awaited: bool
) -> Performing:
    """The call, in a context if one is given. What leaves a handler, or a middleware, concerns its job, in the process
    that has called it, and nothing else: neither the thread, nor a child that the handler has forked. ``is_awaited``:
    the call returns something to await.
    """

    async def bounded(*args: Any, context: Context | None = None) -> None:
        pid = os.getpid()
        try:
            returned = call(*args) if context is None else context.run(call, *args)
            if returned is not None and is_awaited:
                if context is not None:
                    returned = OwnContext(returned if type(returned) is CoroutineType else _awaited(returned), context)
                returned = await returned
        except BaseException as raised:
            if os.getpid() != pid:
                _end_child(raised)
            kind = type(raised)  # what an object says of its class is its own affair
            if issubclass(kind, STOPS) and not (is_async and issubclass(kind, asyncio.CancelledError)):
                raise _failure_of(name, raised) from raised
            raise  # also a cancellation of the task, or of something that it awaited: see `Loop`
        if os.getpid() != pid:
            _end_child(None)
        if returned is not None:
            check_done(returned, worker, handler_of(worker))

    return bounded


def _failure_of(name: str, raised: BaseException) -> LowqError:
    return LowqError(f"{name} raised {describe(raised)}")


def _end_child(raised: BaseException | None) -> NoReturn:
    """Ends a process that a handler forked and that has left the handler: what follows is the parent's."""
    code = 0 if raised is None else 1
    if isinstance(raised, SystemExit):
        code = raised.code if isinstance(raised.code, int) else int(raised.code is not None)
    log.warning(
        "a process that a handler has forked has left the handler and ends with code %d%s", code,
        "" if raised is None else f": {describe(raised)}", extra={"event": "forked"},
    )  # fmt: skip
    flush()
    os._exit(code)


def _observed(on_perform: Callable[[dict[str, list[Any]]], object], inner: Performing) -> Performing:
    async def call(payloads_by_id: dict[str, list[Any]]) -> None:
        on_perform(payloads_by_id)
        await inner(payloads_by_id)

    return call


def _merging(merge: MergeFunction, call: Performing) -> Performing:
    """The call, with the payloads that the worker's merge function leaves. An id whose payloads it can't merge fails,
    and the others are performed; an id without any left is done.
    """

    async def merge_and_call(payloads_by_id: dict[str, list[Any]]) -> None:
        execution = current()
        left: dict[str, list[Any]] = {}
        for job_id, payloads in payloads_by_id.items():
            try:
                left[job_id] = merged(merge, payloads)
            except Exception as error:
                execution.fail(job_id, error)
                continue
            except STOPS as error:
                execution.fail(job_id, _failure_of("the merge function", error))
                continue
            if not left[job_id]:
                del left[job_id]
                execution.done(job_id)
        if left:
            await call(left)

    return merge_and_call


def _one_by_one(perform_one: Performing, seconds: float | None) -> Performing:
    """``perform`` of a worker with ``perform_one``. ``seconds``: what each id has, of the time limit or the ttr.

    An id that is alone is performed as a batch is.
    """

    async def perform(payloads_by_id: dict[str, list[Any]]) -> None:
        if len(payloads_by_id) == 1:
            ((job_id, payloads),) = payloads_by_id.items()
            await perform_one(job_id, payloads)
            return
        batch, errors, has_begun = current(), list[Any](), False
        for job_id in payloads_by_id:
            batch._outcomes.setdefault(job_id, _NOT_BEGUN)
        for job_id, payloads in payloads_by_id.items():
            if has_begun:
                if batch._source is not None and batch._source.in_flight.has_expired(job_id):
                    continue  # meanwhile, perhaps: it waits again
                if not batch._may_go_on():
                    break
                if batch._limits is not None and seconds is not None:
                    batch._limits.renew(seconds)
            has_begun = True
            errors += await _perform_id(perform_one, batch, job_id, payloads)
        batch._begin(None)
        try:
            _raise_all(errors, len(payloads_by_id))
        finally:
            del errors  # this frame is a part of their tracebacks

    return perform


async def _perform_id(perform_one: Performing, batch: Execution, job_id: str, payloads: list[Any]) -> list[Any]:
    """Performs one id of several, and sets its outcome. What the handler itself has said of the id comes first.

    Returns what it raised; that is raised if it ends the batch.
    """
    outcomes, limits = batch._outcomes, batch._limits
    if outcomes.get(job_id) is _NOT_BEGUN:
        del outcomes[job_id]
    batch._begin(job_id)
    error: Any = None
    try:
        await perform_one(job_id, payloads, context=copy_context())
        outcomes.setdefault(job_id, _DONE)
        return []
    except Exception as raised:
        error = as_raised(raised)
    except TimeLimitExceeded as raised:
        outcomes.setdefault(job_id, (RAISED, raised))
        raise
    except asyncio.CancelledError as cancelled:
        if limits is not None and limits.cancelled:
            error = TimeLimitExceeded(limits.exceeded()).with_traceback(cancelled.__traceback__)
            outcomes.setdefault(job_id, (RAISED, error))
            del error
            raise
        if batch._is_cancelled():
            raise
        error = cancelled_inside(cancelled)
    try:
        outcomes.setdefault(job_id, (RAISED, error))
        return [error]
    finally:
        del error  # this frame is a part of its traceback


def _raise_all(errors: list[Any], count: int) -> None:
    """Raises what the ids have raised, for middlewares and the log: the outcomes are set, and hold."""
    try:
        if len(errors) == 1:
            raise errors[0]
        if errors:
            raise ExceptionGroup(f"{len(errors)} of {count} ids failed", errors[:_SHOWN])
    finally:
        del errors


def cancelled_inside(cancelled: BaseException) -> LowqError:
    """The failure of a handler in which something that it awaits was cancelled, and not its task."""
    error = LowqError("what the handler awaited was cancelled")
    error.__cause__ = cancelled
    return error


def has_life(worker: object) -> bool:
    """Whether the worker, a class or an instance, has a ``setup`` or a ``teardown`` of its own."""
    kind: Any = worker if isinstance(worker, type) else type(worker)
    return any(getattr(kind, name, own) is not own for name, own in _OF_WORKER)


class Instances:
    """Those of one thread, or of the event loop, that were set up. Only for that thread."""

    def __init__(self) -> None:
        self._set_up: list[Any] = []

    def __bool__(self) -> bool:
        return bool(self._set_up)

    async def set_up(self, instances: Iterable[object]) -> None:
        """Calls ``setup`` of each, which may be an async def if its worker is async.

        Raises:
            What it raises, with a note that names the worker. ConfigError: it returned a coroutine.
        """
        for instance in instances:
            if has_life(instance):
                try:
                    await _call(instance, "setup")
                except BaseException as error:
                    name = type(instance).__name__
                    with suppress(Exception):  # what an exception says of itself is its own affair
                        error.add_note(f"raised by {name}.setup, before anything was performed by that instance")
                    raise
                self._set_up.append(instance)

    async def tear_down(self) -> None:
        """Calls ``teardown`` of all that were set up, the last first. What it raises is logged."""
        while self._set_up:
            instance = self._set_up.pop()
            try:
                await _call(instance, "teardown")
            except BaseException:
                log.exception("%s.teardown failed", type(instance).__name__)


async def _call(instance: Any, method: str) -> None:
    returned = getattr(instance, method)()
    if returned is not None and is_async(type(instance)):
        returned = await returned
    check_done(returned, type(instance), method)
