"""The decorators ``@lowq.worker`` and ``@lowq.every``: the worker class that they make, and their checks.

A subclass of `Worker` stays itself; a plain class becomes a subclass of itself and `Worker`; a function becomes a
worker that calls it. A wrong form or option is refused when it is decorated, with the fix in the message.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from difflib import SequenceMatcher, get_close_matches
from itertools import islice
from typing import Any, Protocol, TypeVar, overload
from zoneinfo import ZoneInfo

from lowq import codec
from lowq.codec.types import annotated_type, payload_type, type_argument
from lowq.errors import ConfigError
from lowq.guesses import OPTIONS, hint_for
from lowq.job import P
from lowq.limits import checked_limits
from lowq.options import WORKER_OPTIONS, QueueOptions, takes
from lowq.push.target import tick_payload
from lowq.retry import as_retry_in, check_apart, checked_retry_in
from lowq.schedules import Missed, Schedule, checked_schedule, schedules_queue
from lowq.settings import Config
from lowq.store.keys import is_queue_name
from lowq.workers import (
    Application,
    PerformFunction,
    Worker,
    handler_of,
    is_async,
    payload_type_of,
    schedules_of,
    time_limits_of,
)

C = TypeVar("C")
# A plain class that became a worker is no subclass of it for a type checker: `lowq.worker` gives back its type.
W = TypeVar("W", bound=type)

#: The two forms of a handler: the method's name -> its declaration.
_FORMS = {"perform": "perform(self, payloads_by_id)", "perform_one": "perform_one(self, id, payloads)"}
#: Unix time, as ticks have it.
_SOME_TIME = 1_800_000_000.0

# --- @lowq.worker ---


class Decorator(Protocol):
    """The decorator that ``@lowq.worker(...)`` returns."""

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
    _set_retry_in(worker, options.get("retry_in"))
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

    def __init__(_self: Worker[Any], *arguments: object, **named: object) -> None:  # noqa: N807 - that of the class
        if arguments or named:
            raise TypeError(
                f"{target.__name__} is a worker, and no function any more: push a job with {target.__name__}.push(); "
                "a test has it performed by the fixture lowq_drain or by lowq.testing.drain()"
            )

    body = {
        handler: staticmethod(target), "__init__": __init__, "__module__": target.__module__,
        "__qualname__": target.__qualname__, "__doc__": target.__doc__,
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


def _set_retry_in(worker: type[Worker[Any]], given: Any) -> None:
    """Makes a method of a ``retry_in`` that is an option, or seconds in the body of the class."""
    static = inspect.getattr_static(worker, "retry_in")
    function = as_retry_in(f"{worker.__name__}: ", static if given is None else given)
    if function is not static:
        worker.retry_in = staticmethod(function)  # type: ignore[method-assign]  # it gets no self


def _check_method(worker: type[Worker[Any]], name: str, form: str) -> None:
    """Checks that the method can be called as ``form`` declares it."""
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


def check_loop_function(name: str, function: Any) -> None:
    """Checks a function of ``@app.on_loop_start`` or ``@app.on_loop_stop``.

    Raises:
        ConfigError
    """
    form = f"@app.{name}, and below it async def {'connect' if name == 'on_loop_start' else 'disconnect'}(state)"
    whose = getattr(function, "__name__", None) or f"{function!r:.100}"
    if not inspect.iscoroutinefunction(inspect.unwrap(function) if callable(function) else function):
        raise ConfigError(
            f"{whose}: {name} is for the event loop of async workers: write {form}. What threads need is made in "
            "the worker's setup, or in the setting on_server_init"
        )
    if not (takes(function, 1) or takes(function, 0)):
        raise ConfigError(f"{whose}{inspect.signature(function)}: write {form}, or without state")


def _inherited(worker: type, names: Iterable[str]) -> str:
    """The base that one of these methods comes from, for people."""
    for name in names:
        owner = next(base for base in worker.__mro__ if name in vars(base))
        if owner.__name__ != worker.__name__:
            return f" ({name} comes from {owner.__name__})"
    return ""


def _apply_options(worker: type[Worker[Any]], options: Mapping[str, Any]) -> None:
    for name in options:
        if name not in WORKER_OPTIONS:
            hint = hint_for(OPTIONS, name, WORKER_OPTIONS, _nearest(name, 0.6), "options are")
            raise ConfigError(f"{worker.__name__}: unknown worker option {name!r}; {hint}")
    for name in _attributes_of(worker):
        # At 0.8 a `height` would be taken for `weight`. Most guesses may well be attributes of the worker's own.
        near = "max_retry_count" if name == "max_retries" else _nearest(name, 0.85)
        if near:
            raise ConfigError(f"{worker.__name__}.{name}: did you mean the worker option {near!r}?")
    for name in options.keys() - {"retry_in"}:
        setattr(worker, name, options[name])
    if "queue_name" not in vars(worker):
        worker.queue_name = worker.__name__
    prefix = f"{worker.__name__}: "
    said = {name: option.kind.check(prefix, name, getattr(worker, name)) for name, option in WORKER_OPTIONS.items()}
    worker._by_error = said["bury_on"], said["release_on"]
    check_apart(prefix, *worker._by_error)
    # Once more with the name of the queue, which is the key of those without one.
    worker._limits = checked_limits(prefix, "limit", said["limit"], worker.queue_name)
    worker._queue_options = QueueOptions(worker.queue_name, worker.shards_count).declared(said, worker.__name__)
    if worker.on_push is not None and worker.batch_size > 1 and handler_of(worker) == "perform":
        raise ConfigError(
            f"{worker.__name__}: on_push={worker.on_push!r} with batch_size={worker.batch_size} would end whole "
            "batches, also for ids that nothing was pushed for; write batch_size=1, or def perform_one(self, job_id, "
            "payloads)"
        )
    time_limit, ttr = time_limits_of(worker)
    if time_limit is not None and ttr is not None and ttr <= time_limit:
        raise ConfigError(
            f"{worker.__name__}: ttr={worker.ttr!r} must be more than time_limit={worker.time_limit!r}: it is for "
            "handlers that did not end when their time limit had passed"
        )


def _nearest(name: str, likeness: float) -> str | None:
    """The option that was probably meant: of the similar ones, the one with the longest part in common."""
    near = get_close_matches(name, WORKER_OPTIONS, 3, likeness)
    return max(near, key=lambda option: SequenceMatcher(None, name, option).find_longest_match().size, default=None)


def _attributes_of(worker: type[Worker[Any]]) -> list[str]:
    """Attributes of its classes that could be misspelt options: plain values under other names."""
    return [
        name
        for kind in worker.__mro__
        if kind not in Worker.__mro__
        for name, value in vars(kind).items()
        if isinstance(value, int | float | str) and not name.startswith("_") and name not in WORKER_OPTIONS
    ]


def check_codec(worker: type[Worker[Any]], config: Config) -> None:
    """Checks that the settings have no codec if the worker has a type of payloads, which says how they are encoded.

    Raises:
        ConfigError: they have one.
    """
    typed = payload_type_of(worker)
    if typed is not None and (
        config.dump_payload is not codec.dump_payload or config.load_payload is not codec.load_payload
    ):
        raise ConfigError(
            f"{worker.__name__}: its payloads are {typed.name}, which says how they are encoded, and so do the "
            "settings dump_payload, load_payload or codec. Leave these out, or make it a plain lowq.Worker"
        )


# --- @lowq.every ---


def every(
    at: str | float | timedelta, *, tz: str | ZoneInfo | None = None, missed: Missed = "one", name: str | None = None
) -> Callable[[W], W]:
    """Pushes a job to the worker's queue at the times of a time table, once for all nodes::

        @lowq.every("0 8 * * 1", tz="Europe/Berlin")
        @lowq.worker
        def send_report(job_id, payloads): ...

    ``at``: a cron string, read in the time zone ``tz`` (UTC), or an interval, in seconds or as a timedelta, of one
    second at least. The job's id is the ``name``, and its payload ``{"planned_at": Unix time of the tick, seconds}``.
    ``name``: by default the queue's name, with ``-2`` appended for a worker's second schedule, counted from the worker
    upwards. Keep the name when the time table changes, so that no tick is lost or comes twice. ``missed``: the ticks to
    make up for when nobody could perform them in time: the latest one, all, or none (``"skip"``).

    Raises:
        ConfigError: an argument is wrong, or it is not above a worker.
    """
    decorated: object = at
    if inspect.isclass(decorated) or inspect.isfunction(decorated):
        raise ConfigError(
            f"{decorated.__name__}: @lowq.every says when; write @lowq.every(30), in seconds, or "
            '@lowq.every("0 8 * * 1")'
        )

    def decorate(target: W) -> W:
        worker = _checked_worker(target)
        present = schedules_of(worker)
        queue = worker.queue_name
        number = len(present) + 1
        chosen = (queue if number == 1 else f"{queue}-{number}") if name is None else name
        added = checked_schedule(worker.__name__, chosen, at, tz, missed)
        _check_name(worker, added, present)
        _check_payloads(worker, added)
        worker._schedules = (*present, added)
        return target

    return decorate


def _checked_worker(worker: object) -> type[Worker[Any]]:
    if not (inspect.isclass(worker) and issubclass(worker, Worker) and vars(worker).get("_app") is not None):
        whose = getattr(worker, "__name__", None) or f"{worker!r:.100}"
        raise ConfigError(
            f"{whose}: @lowq.every(...) goes above @lowq.worker, which makes a worker of it first: write it in the "
            "line before @lowq.worker"
        )
    if not is_queue_name(schedules_queue(worker.queue_name)):
        raise ConfigError(
            f"{worker.__name__}: the queue name {worker.queue_name!r} of a worker with schedules has "
            f"{128 - len(schedules_queue(''))} characters at most"
        )
    return worker


def _check_payloads(worker: type[Worker[Any]], added: Schedule) -> None:
    try:
        for tick in islice(added.after(_SOME_TIME), 2):  # of two, one is no whole number where any is none
            tick_payload(tick, payload_type_of(worker))
    except Exception as error:
        raise ConfigError(
            f'{worker.__name__}: a schedule pushes {{"planned_at": <Unix time>}}, which is no payload of the worker\'s '
            f"type: {error}; give the type a field planned_at: float, and defaults to the others"
        ) from error


def _check_name(worker: type[Worker[Any]], added: Schedule, present: tuple[Schedule, ...]) -> None:
    if any(other.name == added.name for other in present):
        raise ConfigError(
            f"{worker.__name__}: two schedules have the name {added.name!r}; give one of them another: "
            f"@lowq.every({added.at!r}, name=...)"
        )
