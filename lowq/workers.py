"""The worker: its base class, and what a class that was decorated says of itself."""

import inspect
from collections.abc import AsyncIterable, Callable, Coroutine, Iterable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar, Generic, Never, Protocol, TypeAlias, TypeVar, Unpack, overload

from lowq.clock import seconds_of
from lowq.codec.types import PayloadType
from lowq.coroutines import in_own_thread
from lowq.errors import ConfigError, JobError
from lowq.guesses import PUSHES, add_guesses
from lowq.job import AnyJobs, Job, JobDict, JobId, JobOptions, Jobs, P, Untyped, new_job
from lowq.limits import LimitRule
from lowq.observe.callbacks import Listener
from lowq.options import WORKER_OPTIONS, OnPush, QueueOptions
from lowq.queue import Queue
from lowq.retry import BuryOn, ReleaseOn, default_retry_in
from lowq.schedules import Schedule
from lowq.store import Durability

C = TypeVar("C")
#: The payload of a job that has none.
_NO_PAYLOAD: Any = ""

#: A worker that is a function: a plain ``def``, or an ``async def``.
PerformFunction: TypeAlias = (
    Callable[[dict[str, list[P]]], None]
    | Callable[[dict[str, list[P]]], Coroutine[Any, Any, None]]
    | Callable[[str, list[P]], None]
    | Callable[[str, list[P]], Coroutine[Any, Any, None]]
)


class Application(Protocol):
    """What a worker needs of the application that it belongs to."""

    def queue_of(self, worker: "type[Worker[Any]]") -> Queue: ...


class _QueueOfClass:
    """``Worker.queue``: the handle of the class's queue."""

    def __get__(self, instance: object, owner: "type[Worker[P]]") -> Queue[P]:
        app = owner.__dict__.get("_app")
        if app is None:
            raise ConfigError(f"{owner.__name__} is no worker yet; decorate it with @lowq.worker")
        queue: Queue[P] = app.queue_of(owner)
        return queue


class Worker(Generic[P]):
    """The base of workers, generic in the payload. A node makes one instance per thread when it starts.

    With a TypedDict, a dataclass, a ``msgspec.Struct``, a pydantic model, or a tagged union of these in the brackets, a
    push takes nothing else, and handlers get instances of it.
    """

    # For type checkers; the defaults are set below.
    shards_count: ClassVar[int]
    batch_size: ClassVar[int]
    max_retry_count: ClassVar[int]
    queue_name: ClassVar[str]
    max_payloads: ClassVar[int]
    max_crash_count: ClassVar[int]
    weight: ClassVar[float]
    max_threads: ClassVar[int | None]
    time_limit: ClassVar[float | timedelta | None]
    ttr: ClassVar[float | timedelta | None]
    ttl: ClassVar[float | timedelta | None]
    priority: ClassVar[int]
    capacity: ClassVar[int | None]
    latency_goal: ClassVar[float | timedelta | None]
    #: These two are as of `WorkerKeywords`. Any, as a type checker would bind a function like a method.
    merge: ClassVar[Any]
    score: ClassVar[Any]
    on_push: ClassVar[OnPush | None]
    debounce: ClassVar[float | timedelta | None]
    max_wait: ClassVar[float | timedelta | None]
    morgue_ttl: ClassVar[float | timedelta | None]
    morgue_max: ClassVar[int | None]
    keep_finished: ClassVar[float | timedelta | None]
    durability: ClassVar[Durability]
    bury_on: ClassVar[BuryOn | None]
    release_on: ClassVar[ReleaseOn | None]
    limit: ClassVar[LimitRule | Sequence[LimitRule] | None]
    # No ClassVar: type checkers would refuse a static method in its place.
    on_event: Listener | None
    driver: ClassVar[str | None]

    #: The handle of the queue.
    queue: ClassVar[_QueueOfClass] = _QueueOfClass()
    _app: ClassVar[Application | None] = None
    # What follows is read and checked when the class is decorated, and not again: an application's attributes may
    # raise.

    #: The options of its queue.
    _queue_options: ClassVar[QueueOptions]
    #: ``bury_on`` and ``release_on``.
    _by_error: ClassVar[tuple[BuryOn | None, dict[type[BaseException], float] | None]] = (None, None)
    #: ``limit``.
    _limits: ClassVar[tuple[LimitRule, ...]] = ()
    #: Whether ``retry_in`` takes the error.
    _retry_in_takes_error: ClassVar[bool] = True
    #: The method that performs: "perform" or "perform_one".
    _handler: ClassVar[str] = "perform"
    #: Added by ``@lowq.every``, of this class alone; see `schedules_of`.
    _schedules: ClassVar[tuple[Schedule, ...]] = ()
    #: Whether it is one of lowq's own, without middlewares, events and logs of the application.
    _is_internal: ClassVar[bool] = False
    #: How payloads are encoded and decoded; None: as the settings say.
    _payload_type: ClassVar[PayloadType | None] = None

    def perform(self, payloads_by_id: dict[str, list[P]]) -> Coroutine[Any, Any, None] | None:
        """Does the work: id -> payloads, oldest (lowest score) first. Raising makes the batch fail. An ``async def`` is
        performed in the event loop of a node, a plain ``def`` in one of its threads.
        """
        raise NotImplementedError(f"{type(self).__name__} has no perform of its own; it may have a perform_one")

    def perform_one(self, job_id: str, payloads: list[P], /) -> Coroutine[Any, Any, None] | None:
        """Instead of ``perform``: called id by id within a batch. Raising makes that id fail, and the others go on. A
        ``time_limit`` or ``ttr`` is for each id.
        """
        raise NotImplementedError(f"{type(self).__name__} has no perform_one of its own; it may have a perform")

    def setup(self) -> Coroutine[Any, Any, None] | None:
        """Called once per instance, in its thread or event loop, before it performs anything, for example to connect to
        a database. May be an ``async def`` in an async worker. When it raises, the node does not start.
        """

    def teardown(self) -> Coroutine[Any, Any, None] | None:
        """Called once per instance that was set up, in its thread or event loop, after its last batch: when the node
        stops, or when a handler returns whose thread was replaced. A kill may skip it.
        """

    # So type checkers accept overrides with retry_count alone, and with (retry_count, error).
    def retry_in(self, retry_count: int, *_error: Any, **_named: Any) -> float | timedelta:
        """Seconds, or a timedelta, until retry number ``retry_count``, counted from 0. Write ``def retry_in(self,
        retry_count, error)``, or without ``error``: the exception of the handler, or the text that it gave
        ``lowq.current().fail``.
        """
        return default_retry_in(retry_count)

    def retries_exhausted(self, jobs: list[Job]) -> Coroutine[Any, Any, None] | None:
        """Called after payloads went to the morgue because their retries were used up. A crash may skip it."""

    @classmethod
    def push(
        cls,
        job_id: JobId,
        /,
        payload: P = _NO_PAYLOAD,
        *others: Never,
        timeout: float | timedelta | None = None,
        durability: Durability | None = None,
        **options: Unpack[JobOptions],
    ) -> int:
        """Pushes a job, given as its id and its payload::

            OrderSync.push(42, {"version": 2}, score=2, delay=60)

        ``options`` are those of a `lowq.JobDict`; None counts as not given. Returns 1, the number of payloads accepted.
        `perform_async` pushes many jobs at once.

        Raises:
            LowqError: as `perform_async`.
        """
        _check_id(cls, job_id, others)
        job: Any = new_job(job_id, payload, options)
        return cls.perform_async(job, **_given(timeout, durability))

    @classmethod
    async def apush(
        cls,
        job_id: JobId,
        /,
        payload: P = _NO_PAYLOAD,
        *others: Never,
        timeout: float | timedelta | None = None,
        durability: Durability | None = None,
        **options: Unpack[JobOptions],
    ) -> int:
        """``push`` from async code, as `aperform_async`."""
        _check_id(cls, job_id, others)
        job: Any = new_job(job_id, payload, options)
        return await cls.aperform_async(job, **_given(timeout, durability))

    @overload
    @classmethod
    def perform_async(
        cls,
        jobs: JobDict[P],
        *,
        on_progress: Callable[[int], object] | None = None,
        timeout: float | timedelta | None = None,
        durability: Durability | None = None,
    ) -> int: ...
    @overload
    @classmethod
    def perform_async(
        cls,
        jobs: Iterable[JobDict[P]],
        *,
        on_progress: Callable[[int], object] | None = None,
        timeout: float | timedelta | None = None,
        durability: Durability | None = None,
    ) -> int: ...
    @overload
    @classmethod
    def perform_async(
        cls: "type[Worker[Untyped]]",
        jobs: Jobs,
        *,
        on_progress: Callable[[int], object] | None = None,
        timeout: float | timedelta | None = None,
        durability: Durability | None = None,
    ) -> int: ...
    @classmethod
    def perform_async(
        cls, jobs: Any, *others: Any, on_progress: Callable[[int], object] | None = None,
        timeout: float | timedelta | None = None, durability: Durability | None = None,
    ) -> int:  # fmt: skip
        """Pushes one job or any iterable of jobs, streamed in chunks; returns the number of payloads accepted.
        ``on_progress``, ``timeout`` and ``durability`` are as of `Queue.push`.

        Raises:
            LowqError: as `Queue.push`.
        """
        _check_jobs(cls, jobs, others)
        if on_progress is not None:
            return cls.queue.push(jobs, on_progress, timeout=timeout, durability=durability)
        return cls.queue.push(jobs, timeout=timeout, durability=durability)

    @overload
    @classmethod
    async def aperform_async(
        cls,
        jobs: JobDict[P],
        *,
        on_progress: Callable[[int], object] | None = None,
        timeout: float | timedelta | None = None,
        durability: Durability | None = None,
    ) -> int: ...
    @overload
    @classmethod
    async def aperform_async(
        cls,
        jobs: Iterable[JobDict[P]] | AsyncIterable[JobDict[P]],
        *,
        on_progress: Callable[[int], object] | None = None,
        timeout: float | timedelta | None = None,
        durability: Durability | None = None,
    ) -> int: ...
    @overload
    @classmethod
    async def aperform_async(
        cls: "type[Worker[Untyped]]",
        jobs: AnyJobs,
        *,
        on_progress: Callable[[int], object] | None = None,
        timeout: float | timedelta | None = None,
        durability: Durability | None = None,
    ) -> int: ...
    @classmethod
    async def aperform_async(
        cls, jobs: Any, *others: Any, on_progress: Callable[[int], object] | None = None,
        timeout: float | timedelta | None = None, durability: Durability | None = None,
    ) -> int:  # fmt: skip
        """``perform_async`` from async code, also of an async iterable, as `Queue.apush`. Small pushes of coroutines
        that meet leave together in one write. ``on_progress`` may be called in another thread.

        When it is cancelled before its jobs were sent, nothing is written; otherwise they may be in.

        Raises:
            LowqError: as `perform_async`.
        """
        if getattr(cls.perform_async, "__func__", None) is not Worker.perform_async.__func__:  # type: ignore[attr-defined]  # a class method
            # The worker has overridden it, and may do something of its own there.
            if isinstance(jobs, AsyncIterable):
                raise JobError(
                    f"{cls.__name__} has a perform_async of its own, which can't read an async iterable: write an "
                    "aperform_async beside it, too"
                )
            own = partial(cls.perform_async, jobs, *others, **_given(timeout, durability, on_progress))
            return await in_own_thread(own)
        _check_jobs(cls, jobs, others)
        if on_progress is not None:
            return await cls.queue.apush(jobs, on_progress, timeout=timeout, durability=durability)
        return await cls.queue.apush(jobs, timeout=timeout, durability=durability)


for _name, _option in WORKER_OPTIONS.items():
    if _name not in ("queue_name", "retry_in"):  # that of the class, and a method
        setattr(Worker, _name, _option.default)


add_guesses(Worker, PUSHES, many="perform_async")


def _given(timeout: float | timedelta | None, durability: Durability | None, on_progress: Any = None) -> dict[str, Any]:
    """Those that are not None: an override of `Worker.perform_async` may take none of them."""
    given = {"timeout": timeout, "durability": durability, "on_progress": on_progress}
    return {name: value for name, value in given.items() if value is not None}


def _check_jobs(worker: type[Worker[Any]], jobs: object, others: tuple[object, ...]) -> None:
    if others or (type(jobs) is not dict and isinstance(jobs, JobId)):  # `Queue.push` would take it
        raise JobError(
            f"queue {worker.queue_name!r}: jobs are one mapping or an iterable of mappings, not an id and a payload; "
            f"to push one id write {worker.__name__}.push(42, payload)"
        )


def _check_id(worker: type[Worker[Any]], job_id: object, others: tuple[object, ...]) -> None:
    if others or (isinstance(job_id, Iterable) and not isinstance(job_id, JobId | bytes)):  # `Queue.push` would take it
        name = worker.__name__
        raise JobError(
            f"queue {worker.queue_name!r}: {name}.push takes an id and a payload, and all else by name: "
            f"{name}.push(42, payload, delay=60); jobs as mappings are pushed by {name}.perform_async(jobs)"
        )


def is_async(worker: type[Worker[Any]]) -> bool:
    """Whether its handler is an ``async def``, so that the event loop of a node performs it, not a thread."""
    return inspect.iscoroutinefunction(inspect.unwrap(getattr(worker, worker._handler)))


def schedules_of(worker: type[Worker[Any]]) -> tuple[Schedule, ...]:
    """The schedules that were declared above the worker; those of its base belong to the queue of the base."""
    found: tuple[Schedule, ...] = vars(worker).get("_schedules", ())
    return found


def handler_of(worker: type[Worker[Any]]) -> str:
    """The name of the method that performs: "perform" or "perform_one"."""
    return worker._handler


def time_limits_of(worker: type) -> tuple[float | None, float | None]:
    """``time_limit`` and ``ttr`` in seconds."""
    return seconds_of(getattr(worker, "time_limit", None)), seconds_of(getattr(worker, "ttr", None))


def limits_of(worker: type[Worker[Any]]) -> tuple[LimitRule, ...]:
    """Its limits over all nodes."""
    return worker._limits


def payload_type_of(worker: type) -> PayloadType | None:
    """How the worker's payloads are encoded and decoded; None: as the settings say."""
    found: PayloadType | None = getattr(worker, "_payload_type", None)
    return found


def queue_options_of(worker: type[Worker[Any]]) -> QueueOptions:
    """The options of the worker's queue."""
    return worker._queue_options
