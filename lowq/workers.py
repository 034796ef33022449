"""Workers: the base class, the decorator's checks, the options and what is made of the three forms.

A subclass of `Worker` stays what it is; a plain class becomes a subclass of itself and `Worker`; a function
becomes a worker that calls it. Wrong forms are refused at decoration, with the fix in the message.
"""

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Iterable, Mapping
from datetime import timedelta
from difflib import SequenceMatcher, get_close_matches
from functools import partial
from typing import Any, ClassVar, Generic, Protocol, TypeAlias, TypeVar, overload

from lowq import drivers
from lowq.errors import ConfigError
from lowq.job import Job
from lowq.job_events import Listener
from lowq.producer import Jobs
from lowq.queue import Queue
from lowq.queue_options import (
    DeclaredOptions,
    QueueOptions,
    check_time,
    checked,
    seconds_of,
)
from lowq.retry import MAX_RETRY_COUNT, default_retry_in
from lowq.store.keys import is_queue_name

P = TypeVar("P")
C = TypeVar("C")

#: A worker that is a function: a plain ``def``, or an ``async def``.
PerformFunction: TypeAlias = (
    Callable[[dict[str, list[Any]]], None] | Callable[[dict[str, list[Any]]], Coroutine[Any, Any, None]]
)


class WorkerOptions(DeclaredOptions, total=False):
    """The options of ``@lowq.worker``: those of its queue, and its own."""

    #: Ids handed to one ``perform`` (1).
    batch_size: int
    #: The queue's name (the class's name).
    queue_name: str
    #: The queue's part of a node's threads, compared with the weights of the other queues that have due work (1).
    weight: float
    #: Threads of a node that perform the queue's jobs at once, at most; None: all of them (None).
    max_threads: int | None
    #: Seconds, or a timedelta, after which `TimeLimitExceeded` is raised in ``perform`` (None: never).
    time_limit: float | timedelta | None
    #: Called with every `lowq.JobEvent` of the queue in this process, in a thread for that (None).
    on_event: Listener | None
    #: The name of the class of its queue's handle, which an installed package brings (None: `Queue`).
    driver: str | None


#: Bounds of ``weight``: far beyond what makes sense, and near enough that sums of shares stay exact.
_WEIGHTS = (1e-6, 1e6)


#: The options that say in which time a handler has to end.
_LIMITS = ("time_limit", "ttr")
#: The options of a worker that are checked in ways of their own.
_OWN = ("queue_name", "weight", "time_limit", "on_event", "driver")
#: The options of whole numbers that the registry always has.
_SHOWN = ("shards_count", "batch_size", "max_retry_count", "max_payloads", "max_crash_count", "max_threads")


class Application(Protocol):
    """What a worker needs of the application that it belongs to."""

    def queue_of(self, worker: "type[Worker[Any]]") -> Queue: ...


class _QueueOfClass:
    """``Worker.queue``: the handle of the class's queue."""

    def __get__(self, instance: object, owner: "type[Worker[Any]]") -> Queue:
        app = owner.__dict__.get("_app")
        if app is None:
            raise ConfigError(f"{owner.__name__} is no worker yet; decorate it with @lowq.worker")
        queue: Queue = app.queue_of(owner)
        return queue


class Worker(Generic[P]):
    """The base of workers, generic in the payload. A node makes one instance per thread when it starts."""

    shards_count: ClassVar[int] = 5
    batch_size: ClassVar[int] = 1
    max_retry_count: ClassVar[int] = MAX_RETRY_COUNT
    queue_name: ClassVar[str]
    max_payloads: ClassVar[int] = 1000
    max_crash_count: ClassVar[int] = 3
    weight: ClassVar[float] = 1
    max_threads: ClassVar[int | None] = None
    time_limit: ClassVar[float | timedelta | None] = None
    ttr: ClassVar[float | timedelta | None] = None
    ttl: ClassVar[float | timedelta | None] = None
    priority: ClassVar[int] = 0
    capacity: ClassVar[int | None] = None
    #: As of `WorkerOptions`. Any, as a type checker would bind a function like a method.
    merge: ClassVar[Any] = "collapse"
    debounce: ClassVar[float | timedelta | None] = None
    max_wait: ClassVar[float | timedelta | None] = None
    morgue_ttl: ClassVar[float | timedelta | None] = None
    morgue_max: ClassVar[int | None] = None
    # No ClassVar: type checkers would refuse a static method in its place.
    on_event: Listener | None = None
    driver: ClassVar[str | None] = None

    #: The handle of the queue: stats, jobs, kick, pause ...
    queue: ClassVar[Queue] = _QueueOfClass()  # type: ignore[assignment]  # a property of the class
    _app: ClassVar[Application | None] = None
    #: What was declared, checked. Nobody asks the class again: what belongs to an application may raise.
    _queue_options: ClassVar[QueueOptions]

    def perform(self, payloads_by_id: dict[str, list[P]]) -> Coroutine[Any, Any, None] | None:
        """Does the work: id -> payloads, oldest (lowest score) first. Raising makes the batch fail. An ``async def`` is
        performed in the event loop of a node, a plain ``def`` in one of its threads.
        """
        raise NotImplementedError

    def retry_in(self, retry_count: int) -> float:
        """Seconds until retry number ``retry_count``, counted from 0."""
        return default_retry_in(retry_count)

    def retries_exhausted(self, jobs: list[Job]) -> Coroutine[Any, Any, None] | None:
        """Called after payloads went to the morgue because their retries were used up. May be missed by a crash."""

    @classmethod
    def perform_async(cls, jobs: Jobs, *, timeout: float | timedelta | None = None) -> int:
        """Pushes one job or any iterable of jobs; returns the number of payloads accepted. ``timeout``: seconds, or a
        timedelta, to wait for room at most when the queue has reached its ``capacity``.

        Raises:
            JobError, PayloadError: a job is malformed; nothing of its chunk was written.
            PushError: Redis failed half way; it carries what is certainly in and the rest.
            QueueFull: there was no room for some jobs; it says how many are in and carries the rest.
            ShardsCountError, RedisUnavailable
        """
        return cls.queue.push(jobs, timeout=timeout)

    @classmethod
    async def aperform_async(cls, jobs: Jobs, *, timeout: float | timedelta | None = None) -> int:
        """``perform_async`` from async code. Small pushes of coroutines that meet leave together in one write.

        When it is cancelled before its jobs were sent, nothing is written; otherwise they may be in.

        Raises:
            As `perform_async`.
        """
        if getattr(cls.perform_async, "__func__", None) is not Worker.perform_async.__func__:  # type: ignore[attr-defined]  # a class method
            own = partial(cls.perform_async, jobs)  # a method of the worker's own is in front
            return await asyncio.to_thread(own if timeout is None else partial(own, timeout=timeout))
        return await cls.queue.apush(jobs, timeout=timeout)


class Decorator(Protocol):
    """What ``@lowq.worker(...)`` returns."""

    @overload
    def __call__(self, target: type[C], /) -> type[C]: ...  # type: ignore[overload-overlap]  # a class is no function
    @overload
    def __call__(self, target: PerformFunction, /) -> type[Worker[Any]]: ...


def build_worker(app: Application, target: Any, options: Mapping[str, Any]) -> type[Worker[Any]]:
    """The worker class that a decorated class or function becomes.

    Raises:
        ConfigError: a wrong form or option; the message says what to write.
    """
    if inspect.isclass(target):
        worker = target if issubclass(target, Worker) else _from_plain_class(target)
    elif inspect.isfunction(target):
        worker = _from_function(target)
    else:
        raise ConfigError(f"@lowq.worker decorates a class or a function, not {target!r:.100}")
    other = vars(worker).get("_app")
    if other is not None and other is not app:
        raise ConfigError(f"{worker.__name__} is a worker of another application already; make a subclass for this one")
    _check_methods(worker)
    _apply_options(worker, options)
    worker._app = app
    return worker


def _from_plain_class(target: type) -> type[Worker[Any]]:
    for name in ("queue", "aperform_async"):
        if name in vars(target):
            raise ConfigError(f"{target.__name__}.{name} hides what every worker has; give it another name")
    body: dict[str, Any] = {
        "__module__": target.__module__,
        "__qualname__": target.__qualname__,
        "__doc__": target.__doc__,
    }
    if "queue_name" in vars(target):
        body["queue_name"] = vars(target)["queue_name"]
    return type(target.__name__, (target, Worker), body)


def _from_function(target: Callable[[dict[str, list[Any]]], Any]) -> type[Worker[Any]]:
    _check_perform(target.__name__, target)
    if not _takes_one(target):
        raise ConfigError(
            f"{target.__name__}{inspect.signature(target)}: a worker function takes one argument, payloads_by_id"
        )

    def perform(_self: Worker[Any], payloads_by_id: dict[str, list[Any]]) -> None:
        return target(payloads_by_id)  # type: ignore[no-any-return]  # what must be None is checked where it is called

    async def perform_awaiting(_self: Worker[Any], payloads_by_id: dict[str, list[Any]]) -> None:
        return await target(payloads_by_id)  # type: ignore[no-any-return]

    body = {
        "perform": perform_awaiting if inspect.iscoroutinefunction(inspect.unwrap(target)) else perform,
        "__module__": target.__module__,
        "__qualname__": target.__qualname__,
        "__doc__": target.__doc__,
    }
    return type(target.__name__, (Worker,), body)


def _check_methods(worker: type[Worker[Any]]) -> None:
    if worker.perform is Worker.perform:
        raise ConfigError(f"{worker.__name__} has no method perform(self, payloads_by_id)")
    _check_perform(f"{worker.__name__}.perform", worker.perform)
    static = inspect.getattr_static(worker, "perform")
    if inspect.isfunction(static) and not _takes_one(static, itself=True):
        raise ConfigError(
            f"{worker.__name__}.perform{inspect.signature(static)}: write def perform(self, payloads_by_id)"
        )
    for name in ("perform_async", "aperform_async"):
        if not isinstance(inspect.getattr_static(worker, name), classmethod):
            raise ConfigError(
                f"{worker.__name__}.{name} is called on the class; write @classmethod above it, "
                f"and super().{name}(jobs) inside"
            )


def _takes_one(function: Callable[..., Any], *, itself: bool = False) -> bool:
    """Whether it can be called with payloads_by_id alone, besides the instance."""
    try:
        inspect.signature(function).bind(*[None] * (2 if itself else 1))
    except TypeError:
        return False
    except ValueError:  # something of C's own, which doesn't say
        return True
    return True


def _check_perform(name: str, function: Callable[..., Any]) -> None:
    if not callable(function):
        raise ConfigError(f"{name} is no function; write def perform(self, payloads_by_id)")
    function = inspect.unwrap(function)
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigError(f"{name} contains yield, so calling it would do nothing; write a def without it")


def is_async(worker: type[Worker[Any]]) -> bool:
    """Whether its ``perform`` is an ``async def``: then the event loop of a node performs it, not a thread."""
    return inspect.iscoroutinefunction(inspect.unwrap(worker.perform))


def _apply_options(worker: type[Worker[Any]], options: Mapping[str, Any]) -> None:
    known = WorkerOptions.__annotations__
    for name in options:
        if name not in known:
            near = _nearest(name, 0.6)
            hint = f"did you mean {near!r}?" if near else f"options are {', '.join(known)}"
            raise ConfigError(f"{worker.__name__}: unknown worker option {name!r}; {hint}")
    for name in _attributes_of(worker):
        near = _nearest(name, 0.85)  # at 0.8 a `height` would be taken for `weight`
        if near:
            raise ConfigError(f"{worker.__name__}.{name}: did you mean the worker option {near!r}?")
    for name, value in options.items():
        setattr(worker, name, value)
    if "queue_name" not in vars(worker):
        worker.queue_name = worker.__name__
    check_queue_name(worker.queue_name)
    said = {name: checked(worker.__name__, name, getattr(worker, name)) for name in known if name not in _OWN}
    _check_weight(worker.__name__, worker.weight)
    check_time(worker.__name__, "time_limit", worker.time_limit)
    _check_on_event(worker)
    if worker.driver is not None:
        drivers.check("queue", worker.driver)
    worker._queue_options = QueueOptions(worker.queue_name, worker.shards_count).declared(said, worker.__name__)
    time_limit, ttr = limits_of(worker)
    if time_limit is not None and ttr is not None and ttr <= time_limit:
        raise ConfigError(
            f"{worker.__name__}: ttr={worker.ttr!r} must be more than time_limit={worker.time_limit!r}: it is for "
            "handlers that did not end when their time limit had passed"
        )


def _nearest(name: str, likeness: float) -> str | None:
    """The option that was probably meant: of those that are like it, the one with the longest part in common."""
    near = get_close_matches(name, WorkerOptions.__annotations__, 3, likeness)
    return max(near, key=lambda option: SequenceMatcher(None, name, option).find_longest_match().size, default=None)


def _attributes_of(worker: type[Worker[Any]]) -> list[str]:
    """What its classes say that could be meant as an option: plain values with a name that is none."""
    return [
        name
        for kind in worker.__mro__
        if kind not in Worker.__mro__
        for name, value in vars(kind).items()
        if isinstance(value, int | float | str)
        and not name.startswith("_")
        and name not in WorkerOptions.__annotations__
    ]


def _check_weight(whose: str, weight: object) -> None:
    least, most = _WEIGHTS
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not least <= weight <= most:
        raise ConfigError(f"{whose}: weight={weight!r:.100} must be a number above 0, from {least:g} to {most:,.0f}")


def _check_on_event(worker: type[Worker[Any]]) -> None:
    callback: Any = worker.on_event
    if callback is not None and (
        not callable(callback) or inspect.iscoroutinefunction(callback) or not _takes_one(callback)
    ):
        raise ConfigError(
            f"{worker.__name__}.on_event={callback!r:.100} must be a function of one argument, the event, and no async "
            "def: in a class write @staticmethod def on_event(event)"
        )


def limits_of(worker: type) -> tuple[float | None, float | None]:
    """``time_limit`` and ``ttr`` in seconds."""
    time_limit, ttr = (getattr(worker, name, None) for name in _LIMITS)
    return seconds_of(time_limit), seconds_of(ttr)


def check_queue_name(name: object) -> str:
    """A queue's name becomes part of keys, so braces and control characters would break them.

    Raises:
        ConfigError
    """
    if not is_queue_name(name):
        raise ConfigError(
            f"queue name {name!r:.150}: it has 1 to 128 characters, without braces, spaces and control characters"
        )
    return name


def queue_options_of(worker: type[Worker[Any]]) -> QueueOptions:
    """What the worker says of its queue."""
    return worker._queue_options


def options_of(worker: type[Worker[Any]]) -> dict[str, Any]:
    """The worker's options, as the registry in Redis shows them."""
    options = _values_of(worker, _SHOWN)
    # Only those that are used: a registry is sent with every heartbeat.
    time_limit, _ = limits_of(worker)
    return options | ({} if time_limit is None else {"time_limit": time_limit}) | queue_options_of(worker).shown()


def _values_of(worker: type[Worker[Any]], names: Iterable[str]) -> dict[str, Any]:
    """What is a property has a value for each instance, and none here."""
    values = {name: getattr(worker, name) for name in names}
    return {name: value for name, value in values.items() if not isinstance(value, property)}
