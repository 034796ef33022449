"""Workers: the base class, the decorator's checks, the options and what is made of the three forms.

A subclass of `Worker` stays what it is; a plain class becomes a subclass of itself and `Worker`; a function
becomes a worker that calls it. Wrong forms are refused at decoration, with the fix in the message.
"""

import inspect
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from datetime import timedelta
from difflib import SequenceMatcher, get_close_matches
from functools import partial
from typing import Any, ClassVar, Generic, Protocol, TypeAlias, TypeVar, Unpack, overload

from lowq import codec
from lowq.codec.types import PayloadType, annotated_type, payload_type, type_argument
from lowq.errors import ConfigError, JobError
from lowq.job import Job, JobDict, JobId, JobOptions, P, Untyped, new_job
from lowq.limits import Limit
from lowq.observe.callbacks import Listener
from lowq.options import WORKER_OPTIONS, QueueOptions, seconds_of, takes
from lowq.push.background import in_own_thread
from lowq.push.target import Jobs
from lowq.queue import Queue
from lowq.retry import BuryOn, ReleaseOn, check_apart, checked_retry_in, default_retry_in
from lowq.schedules import Schedule
from lowq.settings import Config
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

#: The two forms of a handler: the method's name -> how it is written.
_FORMS = {"perform": "perform(self, payloads_by_id)", "perform_one": "perform_one(self, id, payloads)"}


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

    With a TypedDict, a dataclass, a ``msgspec.Struct``, a pydantic model, or a union of such with a tag in the
    brackets, a push takes nothing else, and handlers get instances of it.
    """

    # Type checkers want them here as well; their defaults are set below.
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
    #: These two are as of `WorkerKeywords`. Any, as a type checker would bind a function like a method.
    merge: ClassVar[Any]
    score: ClassVar[Any]
    debounce: ClassVar[float | timedelta | None]
    max_wait: ClassVar[float | timedelta | None]
    morgue_ttl: ClassVar[float | timedelta | None]
    morgue_max: ClassVar[int | None]
    durability: ClassVar[Durability]
    bury_on: ClassVar[BuryOn | None]
    release_on: ClassVar[ReleaseOn | None]
    limit: ClassVar[Limit | Sequence[Limit] | None]
    # No ClassVar: type checkers would refuse a static method in its place.
    on_event: Listener | None
    driver: ClassVar[str | None]

    #: The handle of the queue: stats, jobs, kick, pause ...
    queue: ClassVar[_QueueOfClass] = _QueueOfClass()
    _app: ClassVar[Application | None] = None
    #: What was declared, checked. Nobody asks the class again: what belongs to an application may raise.
    _queue_options: ClassVar[QueueOptions]
    #: ``bury_on`` and ``release_on`` as they were declared, checked.
    _by_error: ClassVar[tuple[BuryOn | None, dict[type[BaseException], float] | None]] = (None, None)
    #: ``limit``, checked.
    _limits: ClassVar[tuple[Limit, ...]] = ()
    #: Whether ``retry_in`` takes the error.
    _retry_in_takes_error: ClassVar[bool] = True
    #: The method that performs: "perform" or "perform_one".
    _handler: ClassVar[str] = "perform"
    #: What ``@lowq.every`` has added; of this class alone, see `schedules_of`.
    _schedules: ClassVar[tuple[Schedule, ...]] = ()
    #: It belongs to lowq itself: no middleware, event or log of the application concerns it.
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
        """Called once per instance, in its thread or event loop, before it performs anything: to connect to something,
        for example. Of an async worker it may be an ``async def``. When it raises, the node does not start.
        """

    def teardown(self) -> Coroutine[Any, Any, None] | None:
        """Called once per instance that was set up, in its thread or event loop, when that has performed its last
        batch: when the node stops, or when a handler comes back whose thread was replaced. A kill may skip it.
        """

    # Its own may take the retry count alone, or (retry_count, error): type checkers accept both instead of this.
    def retry_in(self, retry_count: int, *_error: Any, **_named: Any) -> float:
        """Seconds until retry number ``retry_count``, counted from 0. Write ``def retry_in(self, retry_count, error)``,
        or without ``error``: what the handler raised, or the text that it said by ``lowq.current().fail``.
        """
        return default_retry_in(retry_count)

    def retries_exhausted(self, jobs: list[Job]) -> Coroutine[Any, Any, None] | None:
        """Called after payloads went to the morgue because their retries were used up. May be missed by a crash."""

    @classmethod
    def push(
        cls,
        job_id: JobId,
        /,
        payload: P = _NO_PAYLOAD,
        *,
        timeout: float | timedelta | None = None,
        durability: Durability | None = None,
        **options: Unpack[JobOptions],
    ) -> int:
        """Pushes a job, as its id and its payload::

            OrderSync.push(42, {"version": 2}, score=2, delay=60)

        ``options`` are those of a `lowq.JobDict`; None says nothing. Returns 1, the number of payloads accepted.

        Raises:
            As `perform_async`, with which many jobs are pushed at once.
        """
        _check_id(cls, job_id)
        job: Any = new_job(job_id, payload, options)
        return cls.perform_async(job, **_given(timeout, durability))

    @classmethod
    async def apush(
        cls,
        job_id: JobId,
        /,
        payload: P = _NO_PAYLOAD,
        *,
        timeout: float | timedelta | None = None,
        durability: Durability | None = None,
        **options: Unpack[JobOptions],
    ) -> int:
        """``push`` from async code, as `aperform_async`."""
        _check_id(cls, job_id)
        job: Any = new_job(job_id, payload, options)
        return await cls.aperform_async(job, **_given(timeout, durability))

    @overload
    @classmethod
    def perform_async(
        cls,
        jobs: JobDict[P],
        *,
        timeout: float | timedelta | None = None,
        durability: Durability | None = None,
    ) -> int: ...
    @overload
    @classmethod
    def perform_async(
        cls,
        jobs: Iterable[JobDict[P]],
        *,
        timeout: float | timedelta | None = None,
        durability: Durability | None = None,
    ) -> int: ...
    @overload
    @classmethod
    def perform_async(
        cls: "type[Worker[Untyped]]",
        jobs: Jobs,
        *,
        timeout: float | timedelta | None = None,
        durability: Durability | None = None,
    ) -> int: ...
    @classmethod
    def perform_async(
        cls, jobs: Any, *, timeout: float | timedelta | None = None, durability: Durability | None = None
    ) -> int:
        """Pushes one job or any iterable of jobs; returns the number of payloads accepted. ``timeout``: seconds, or a
        timedelta, to wait for room at most when the queue has reached its ``capacity``. ``durability``: what to wait
        for, instead of what the worker says: ``"none"``, ``"replicated"`` or ``"fsynced"``.

        Raises:
            JobError, PayloadError: a job is malformed; nothing of its chunk was written.
            PushError: Redis failed half way; it carries what is certainly in and the rest.
            QueueFull: there was no room for some jobs; it says how many are in and carries the rest.
            NotReplicated: jobs are in, and no replica, or not the disk, has them for certain.
            ShardsCountError, RedisUnavailable
        """
        _check_jobs(cls, jobs)
        return cls.queue.push(jobs, timeout=timeout, durability=durability)

    @overload
    @classmethod
    async def aperform_async(
        cls,
        jobs: JobDict[P],
        *,
        timeout: float | timedelta | None = None,
        durability: Durability | None = None,
    ) -> int: ...
    @overload
    @classmethod
    async def aperform_async(
        cls,
        jobs: Iterable[JobDict[P]],
        *,
        timeout: float | timedelta | None = None,
        durability: Durability | None = None,
    ) -> int: ...
    @overload
    @classmethod
    async def aperform_async(
        cls: "type[Worker[Untyped]]",
        jobs: Jobs,
        *,
        timeout: float | timedelta | None = None,
        durability: Durability | None = None,
    ) -> int: ...
    @classmethod
    async def aperform_async(
        cls, jobs: Any, *, timeout: float | timedelta | None = None, durability: Durability | None = None
    ) -> int:
        """``perform_async`` from async code. Small pushes of coroutines that meet leave together in one write.

        When it is cancelled before its jobs were sent, nothing is written; otherwise they may be in.

        Raises:
            As `perform_async`.
        """
        if getattr(cls.perform_async, "__func__", None) is not Worker.perform_async.__func__:  # type: ignore[attr-defined]  # a class method
            own = partial(cls.perform_async, jobs, **_given(timeout, durability))  # the worker's own method is in front
            return await in_own_thread(own)
        _check_jobs(cls, jobs)
        return await cls.queue.apush(jobs, timeout=timeout, durability=durability)


for _name, _option in WORKER_OPTIONS.items():
    if _name != "queue_name":  # which is that of the class
        setattr(Worker, _name, _option.default)


def _given(timeout: float | timedelta | None, durability: Durability | None) -> dict[str, Any]:
    """Those that were given: a method of the worker's own may be in front, which takes neither."""
    given = {"timeout": timeout, "durability": durability}
    return {name: value for name, value in given.items() if value is not None}


def _check_jobs(worker: type[Worker[Any]], jobs: object) -> None:
    if type(jobs) is not dict and isinstance(jobs, JobId):  # which the queue's `push` takes as well
        raise JobError(
            f"queue {worker.queue_name!r}: jobs are one mapping or an iterable of mappings, not {type(jobs).__name__}; "
            f"to push one id write {worker.__name__}.push({jobs!r:.60}, payload)"
        )


def _check_id(worker: type[Worker[Any]], job_id: object) -> None:
    if isinstance(job_id, Iterable) and not isinstance(job_id, JobId | bytes):  # jobs, which the queue's `push` takes
        name = worker.__name__
        raise JobError(
            f"queue {worker.queue_name!r}: {name}.push takes an id and a payload: {name}.push(42, payload); jobs as "
            f"mappings are pushed by {name}.perform_async(jobs)"
        )


class Decorator(Protocol):
    """What ``@lowq.worker(...)`` returns."""

    @overload
    def __call__(self, target: type[C], /) -> type[C]: ...  # type: ignore[overload-overlap]  # a class is no function
    @overload
    def __call__(self, target: PerformFunction[P], /) -> type[Worker[P]]: ...


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
    _set_payload_type(worker, type_argument(worker, Worker) if inspect.isclass(target) else annotated_type(target))
    worker._app = app
    return worker


def _from_plain_class(target: type) -> type[Worker[Any]]:
    for name in ("queue", "push", "apush", "aperform_async"):
        if name in vars(target):
            raise ConfigError(f"{target.__name__}.{name} hides what every worker has; give it another name")
    body: dict[str, Any] = {
        "__module__": target.__module__, "__qualname__": target.__qualname__, "__doc__": target.__doc__
    }  # fmt: skip
    if "queue_name" in vars(target):
        body["queue_name"] = vars(target)["queue_name"]
    return type(target.__name__, (target, Worker), body)


def _from_function(target: Callable[..., Any]) -> type[Worker[Any]]:
    _check_runs(target.__name__, target, "write a def without it")
    handler = "perform" if takes(target, 1) else "perform_one"
    if handler == "perform_one" and not takes(target, 2):
        raise ConfigError(
            f"{target.__name__}{inspect.signature(target)}: a worker function takes one argument, payloads_by_id, or "
            "two, id and payloads"
        )

    def perform(_self: Worker[Any], *arguments: Any) -> Any:
        return target(*arguments)  # what must be None is checked where it is called

    async def perform_awaiting(_self: Worker[Any], *arguments: Any) -> Any:
        return await target(*arguments)

    def __init__(_self: Worker[Any], *arguments: object, **named: object) -> None:  # noqa: N807 - that of the class
        if arguments or named:
            raise TypeError(
                f"{target.__name__} is a worker, and no function any more: push a job with {target.__name__}.push(); "
                "a test has it performed by the fixture lowq_drain or by lowq.testing.drain()"
            )

    body = {
        handler: perform_awaiting if inspect.iscoroutinefunction(inspect.unwrap(target)) else perform,
        "__init__": __init__, "__module__": target.__module__, "__qualname__": target.__qualname__,
        "__doc__": target.__doc__,
    }  # fmt: skip
    return type(target.__name__, (Worker,), body)


def _set_payload_type(worker: type[Worker[Any]], declared: Any) -> None:
    worker._payload_type = payload_type(worker.__name__, declared)
    if worker._payload_type is None:
        return
    for name in ("dump_payload", "load_payload"):
        if hasattr(worker, name):
            raise ConfigError(
                f"{worker.__name__}.{name} would do nothing: its payloads are {worker._payload_type.name}, which says "
                "how they are encoded. Leave it out, or the type"
            )


def _check_methods(worker: type[Worker[Any]]) -> None:
    given = [name for name in _FORMS if getattr(worker, name) is not getattr(Worker, name)]
    if not given:
        raise ConfigError(
            f"{worker.__name__} has no method perform(self, payloads_by_id), nor perform_one(self, id, payloads)"
        )
    if len(given) > 1:
        raise ConfigError(
            f"{worker.__name__} has both perform and perform_one{_inherited(worker, given)}: keep perform, which gets "
            "a whole batch, or perform_one, which is called id by id"
        )
    worker._handler = given[0]
    _check_method(worker, given[0], _FORMS[given[0]])
    for name in ("setup", "teardown"):
        _check_method(worker, name, f"{name}(self)")
        if inspect.iscoroutinefunction(inspect.unwrap(getattr(worker, name))) and not is_async(worker):
            raise ConfigError(
                f"{worker.__name__}.{name} is an async def and {worker.__name__}.{worker._handler} a plain def, which "
                f"runs in a thread: write a plain def {name}(self)"
            )
    static = inspect.getattr_static(worker, "retry_in")
    is_method = inspect.isfunction(static)
    worker._retry_in_takes_error = checked_retry_in(
        f"{worker.__name__}.", static if is_method else getattr(worker, "retry_in", static), int(is_method)
    )
    for name in ("perform_async", "aperform_async"):
        if not isinstance(inspect.getattr_static(worker, name), classmethod):
            raise ConfigError(
                f"{worker.__name__}.{name} is called on the class; write @classmethod above it, "
                f"and super().{name}(jobs) inside"
            )


def _check_method(worker: type[Worker[Any]], name: str, form: str) -> None:
    """Whether the method can be called as ``form`` says it is written."""
    method, whose = getattr(worker, name), f"{worker.__name__}.{name}"
    if not callable(method):
        raise ConfigError(f"{whose} is no function; write def {form}")
    _check_runs(whose, method, f"write def {form} without it")
    static = inspect.getattr_static(worker, name)
    if inspect.isfunction(static) and not takes(static, form.count(",") + 1):
        raise ConfigError(f"{whose}{inspect.signature(static)}: write def {form}")


def _check_runs(whose: str, function: Callable[..., Any], what_to_do: str) -> None:
    inner = inspect.unwrap(function)
    if inspect.isgeneratorfunction(inner) or inspect.isasyncgenfunction(inner):
        raise ConfigError(f"{whose} contains yield, so calling it would do nothing; {what_to_do}")


def _inherited(worker: type, names: Iterable[str]) -> str:
    """Which of them come from a base, for people."""
    for name in names:
        owner = next(base for base in worker.__mro__ if name in vars(base))
        if owner.__name__ != worker.__name__:
            return f" ({name} comes from {owner.__name__})"
    return ""


def is_async(worker: type[Worker[Any]]) -> bool:
    """Whether its ``perform`` or ``perform_one`` is an ``async def``: then the event loop of a node performs it, not a
    thread.
    """
    return inspect.iscoroutinefunction(inspect.unwrap(getattr(worker, worker._handler)))


def schedules_of(worker: type[Worker[Any]]) -> tuple[Schedule, ...]:
    """The schedules that were declared above the worker, not those of a base, which has a queue of its own."""
    found: tuple[Schedule, ...] = vars(worker).get("_schedules", ())
    return found


def handler_of(worker: type[Worker[Any]]) -> str:
    """The name of the method that performs: "perform" or "perform_one"."""
    return worker._handler


def _apply_options(worker: type[Worker[Any]], options: Mapping[str, Any]) -> None:
    for name in options:
        if name not in WORKER_OPTIONS:
            near = _nearest(name, 0.6)
            hint = f"did you mean {near!r}?" if near else f"options are {', '.join(WORKER_OPTIONS)}"
            raise ConfigError(f"{worker.__name__}: unknown worker option {name!r}; {hint}")
    for name in _attributes_of(worker):
        near = _nearest(name, 0.85)  # at 0.8 a `height` would be taken for `weight`
        if near:
            raise ConfigError(f"{worker.__name__}.{name}: did you mean the worker option {near!r}?")
    for name, value in options.items():
        setattr(worker, name, value)
    if "queue_name" not in vars(worker):
        worker.queue_name = worker.__name__
    prefix = f"{worker.__name__}: "
    said = {name: option.kind.check(prefix, name, getattr(worker, name)) for name, option in WORKER_OPTIONS.items()}
    worker._by_error = said["bury_on"], said["release_on"]
    check_apart(prefix, *worker._by_error)
    worker._limits = said["limit"]
    worker._queue_options = QueueOptions(worker.queue_name, worker.shards_count).declared(said, worker.__name__)
    time_limit, ttr = time_limits_of(worker)
    if time_limit is not None and ttr is not None and ttr <= time_limit:
        raise ConfigError(
            f"{worker.__name__}: ttr={worker.ttr!r} must be more than time_limit={worker.time_limit!r}: it is for "
            "handlers that did not end when their time limit had passed"
        )


def _nearest(name: str, likeness: float) -> str | None:
    """The option that was probably meant: of those that are like it, the one with the longest part in common."""
    near = get_close_matches(name, WORKER_OPTIONS, 3, likeness)
    return max(near, key=lambda option: SequenceMatcher(None, name, option).find_longest_match().size, default=None)


def _attributes_of(worker: type[Worker[Any]]) -> list[str]:
    """What its classes say that could be meant as an option: plain values with a name that is none."""
    return [
        name
        for kind in worker.__mro__
        if kind not in Worker.__mro__
        for name, value in vars(kind).items()
        if isinstance(value, int | float | str) and not name.startswith("_") and name not in WORKER_OPTIONS
    ]


def time_limits_of(worker: type) -> tuple[float | None, float | None]:
    """``time_limit`` and ``ttr`` in seconds."""
    return seconds_of(getattr(worker, "time_limit", None)), seconds_of(getattr(worker, "ttr", None))


def limits_of(worker: type[Worker[Any]]) -> tuple[Limit, ...]:
    """Its limits over all nodes."""
    return worker._limits


def payload_type_of(worker: type) -> PayloadType | None:
    """How the worker's payloads are encoded and decoded; None: as the settings say."""
    found: PayloadType | None = getattr(worker, "_payload_type", None)
    return found


def check_codec(worker: type[Worker[Any]], config: Config) -> None:
    """Whether the settings leave it to the type of payloads how they are encoded.

    Raises:
        ConfigError: they have a codec of their own, and the worker a type.
    """
    typed = payload_type_of(worker)
    if typed is not None and (
        config.dump_payload is not codec.dump_payload or config.load_payload is not codec.load_payload
    ):
        raise ConfigError(
            f"{worker.__name__}: its payloads are {typed.name}, which says how they are encoded, and so do the "
            "settings dump_payload, load_payload or codec. Leave these out, or make it a plain lowq.Worker"
        )


def queue_options_of(worker: type[Worker[Any]]) -> QueueOptions:
    """What the worker says of its queue."""
    return worker._queue_options
