"""`LowqBackend`: Django's tasks as jobs of lowq, in order per entity where a task says which.

::

    TASKS = {"default": {"BACKEND": "lowq.contrib.django.tasks.LowqBackend", "QUEUES": ["default", "mail"]}}

    @task(key="order_id")                     # calls for one order are performed one after the other, in order
    def invoice(order_id, version): ...

Each name in QUEUES is a queue of lowq. A call is a payload; its job's id is the key, or without one an id of its own.
Payloads are handed over one at a time, so each call is performed, acknowledged and retried alone. None equals another,
as each has an id.

Django 6 has tasks; for 5.2 it is the package django-tasks, with the same names.
"""

import inspect
import os
import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from datetime import datetime
from functools import partial
from traceback import format_exception
from typing import Any

from asgiref.sync import sync_to_async
from django.conf import settings
from django.core import checks
from django.utils import timezone
from django.utils.crypto import get_random_string
from django.utils.module_loading import import_string

import lowq
from lowq.clock import Lock
from lowq.contrib.django.on_commit import apush_on_commit, call_on_commit, push_on_commit
from lowq.contrib.django.task_results import DEFAULT_TTL, TIMES, TaskRecords
from lowq.errors import ConfigError
from lowq.retry import find_policy, is_exhausted, policies_of
from lowq.work.outcome import NO_REDIS_PAUSES, found_no_redis_in

try:
    from django.tasks import task_backends
    from django.tasks.backends.base import BaseTaskBackend
    from django.tasks.base import Task, TaskContext, TaskError, TaskResult, TaskResultStatus
    from django.tasks.exceptions import InvalidTask, TaskResultDoesNotExist
    from django.tasks.signals import task_enqueued, task_finished, task_started
    from django.utils.json import normalize_json
except ModuleNotFoundError as error:
    if error.name != "django.tasks":
        raise
    from django_tasks import exceptions, task_backends
    from django_tasks.backends.base import BaseTaskBackend
    from django_tasks.base import Task, TaskContext, TaskError, TaskResult, TaskResultStatus
    from django_tasks.exceptions import TaskResultDoesNotExist
    from django_tasks.signals import task_enqueued, task_finished, task_started
    from django_tasks.utils import normalize_json

    InvalidTask = getattr(exceptions, "InvalidTask", None) or exceptions.InvalidTaskError  # its name up to 0.12

#: The options of a backend in settings.TASKS.
_OPTIONS = ("enqueue_on_commit", "using", "result_cache", "result_ttl", "async_queues", "queue_options")
__all__ = ["InvalidTask", "LowqBackend", "LowqTask", "task"]

#: Defaults of Django's ``@task``.
_TASK_DEFAULTS = {
    "priority": 0, "queue_name": "default", "backend": "default", "takes_context": False, "run_after": None,
}  # fmt: skip
#: Priority of a queue's jobs: that of tasks with Django's default, 0.
_DEFAULT_PRIORITY = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class LowqTask(Task):
    """A task with an entity: ``key`` is the name of an argument, or a function of all arguments that gives an id."""

    key: str | Callable[..., object] | None = None


def task(function: Any = None, *, key: str | Callable[..., object] | None = None, **options: Any) -> Any:
    """Django's ``@task`` with ``key=``, also for Django 6.0, whose own takes no other options than its own; and for
    backends that know no key, such as the immediate one in tests: there it has no effect.
    """

    def make(decorated: Any) -> Any:
        given = {**_TASK_DEFAULTS, **options}
        kind = task_backends[given["backend"]].task_class
        own = {"key": key} if issubclass(kind, LowqTask) else {}
        return kind(func=decorated, **given, **own)

    return make if function is None else make(function)


#: Queue -> what performs it, its options, and its worker: Django makes a backend for each thread, and all have the same
#: workers. Changed under the lock.
_workers_made: dict[str, tuple[type, dict[str, Any], type[lowq.Worker[Any]]]] = {}
_making = Lock()


class LowqBackend(BaseTaskBackend):
    """Pushes tasks to lowq. Nodes perform them: ``manage.py lowq run``."""

    task_class = LowqTask
    supports_defer = True
    supports_async_task = True
    supports_priority = True

    def __init__(self, alias: str, params: dict[str, Any]) -> None:
        super().__init__(alias, params)
        self._on_commit = bool(self.options.get("enqueue_on_commit", True))
        self._using: str | None = self.options.get("using")
        self.records = TaskRecords(self.options.get("result_cache"), self.options.get("result_ttl", DEFAULT_TTL))
        self.supports_get_result = self.records.is_shared
        #: queue_name -> worker.
        self._workers: dict[str, type[lowq.Worker[Any]]] = {}
        #: Faults of its queues, for `check`.
        self._problems: list[checks.CheckMessage] = []
        for name in sorted(self.queues):
            try:
                self._workers[name] = self._worker_of(name)
            except (ConfigError, TypeError) as error:
                self._problems.append(self._error(f"the queue {name!r}: {error}", "Correct QUEUES or OPTIONS.", "E012"))

    @classmethod
    def register_workers_of(cls, alias: str) -> None:
        """Makes the backend of that name, and so the workers of its queues."""
        task_backends[alias]

    def _worker_of(self, name: str) -> type[lowq.Worker[Any]]:
        base = _AsyncPerformer if name in self.options.get("async_queues", ()) else _Performer
        given = {"priority": _DEFAULT_PRIORITY, **self.options.get("queue_options", {}).get(name, {})}
        # Calls are kept apart by their ids. One that is pushed again, as its process died while it did so, is the same.
        options = {**given, "queue_name": name, "merge": "collapse", "max_payloads": 1, "batch_size": 1}
        with _making:
            known = _workers_made.get(name)
            if known is not None and known[:2] == (base, options) and lowq.app.workers.get(name) is known[2]:
                return known[2]
            made = type(f"Tasks_{name}", (base, lowq.Worker), {"__module__": __name__})
            worker: type[lowq.Worker[Any]] = lowq.app.worker(**options)(made)
            _workers_made[name] = base, options, worker
        return worker

    # --- enqueue ---

    def validate_task(self, task: Any) -> None:
        """Raises InvalidTask, also for a key that the function can't have and a queue that no node works."""
        super().validate_task(task)
        if task.queue_name not in self._workers:
            raise InvalidTask(
                f"Queue '{task.queue_name}' is not valid for backend: name it in QUEUES of settings.TASKS."
            )
        key = getattr(task, "key", None)
        if isinstance(key, str):
            parameters = inspect.signature(task.func).parameters.values()
            if not any(parameter.name == key or parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
                raise InvalidTask(f"key={key!r}: {task.name} has no argument of that name.")
        elif key is not None and not callable(key):
            raise InvalidTask(f"key={key!r}: write the name of an argument, or a function of the arguments.")

    def enqueue(self, task: Any, args: Any, kwargs: Any) -> Any:
        """Pushes the task, at the commit if there is a transaction."""
        result, job_id, payload, options = self._prepare(task, args, kwargs)
        worker = self._workers[task.queue_name]
        if self._on_commit:
            push_on_commit(worker, job_id, payload, using=self._using, **options)
            self._note_at_commit(result)
        else:
            worker.push(job_id, payload, **options)
            self._note_enqueued(result)
        return result

    async def aenqueue(self, task: Any, args: Any, kwargs: Any) -> Any:
        """As `enqueue`, from async code."""
        result, job_id, payload, options = self._prepare(task, args, kwargs)
        worker = self._workers[task.queue_name]
        if self._on_commit:
            await apush_on_commit(worker, job_id, payload, using=self._using, **options)
            await sync_to_async(self._note_at_commit)(result)
        else:
            await worker.apush(job_id, payload, **options)
            await sync_to_async(self._note_enqueued)(result)
        return result

    def _prepare(self, task: Any, args: Any, kwargs: Any) -> tuple[Any, str, dict[str, Any], dict[str, Any]]:
        """The result, and the id, payload and options that it is pushed with."""
        self.validate_task(task)
        result = _new_result(task, get_random_string(32), args, kwargs, self.alias)
        payload = {
            "task": task.module_path, "id": result.id, "args": result.args, "kwargs": result.kwargs,
            "backend": self.alias, "at": timezone.now().timestamp(),
        }  # fmt: skip
        options: dict[str, Any] = {}
        if task.priority:
            payload["priority"] = task.priority
            options["priority"] = _priority(task.priority)
        if task.run_after is not None:
            payload["run_after"] = options["perform_at"] = _timestamp(task.run_after)
        key, job_id = getattr(task, "key", None), result.id
        if key is not None and task.run_after is None:
            job_id = self._id_of(task, key, args, kwargs)
        elif key is not None:
            # An id that waits has one time. So until then the call waits by itself, and holds up no others of its key.
            payload["key"] = self._id_of(task, key, args, kwargs)
        return result, job_id, payload, options

    def _id_of(self, task: Any, key: Any, args: Any, kwargs: Any) -> str:
        if callable(key):
            value = key(*args, **kwargs)
        else:
            before = (None,) if task.takes_context else ()
            bound = inspect.signature(task.func).bind(*before, *args, **kwargs)
            bound.apply_defaults()
            value = bound.arguments.get(key, kwargs.get(key))
        if value is None:
            raise InvalidTask(f"{task.name}: its key, {key!r}, is None, which is no entity.")
        return str(value)

    def _note_at_commit(self, result: Any) -> None:
        note = partial(self._note_enqueued, result)
        if not call_on_commit(note, self._using):
            note()

    def _note_enqueued(self, result: Any) -> None:
        object.__setattr__(result, "enqueued_at", timezone.now())
        self.records.save(result, only_new=True)
        task_enqueued.send_robust(type(self), task_result=result)

    # --- results ---

    def get_result(self, result_id: str) -> Any:
        """The result, as long as its record is kept.

        Raises:
            TaskResultDoesNotExist; NotImplementedError: OPTIONS says no ``result_cache``.
        """
        if self.records.alias is None:
            return super().get_result(result_id)
        record = self.records.load(str(result_id))
        if record is None:
            raise TaskResultDoesNotExist(result_id)
        return _result_of(record)

    # --- checks ---

    def check(self, **_options: Any) -> Iterable[checks.CheckMessage]:
        """Django's system check of this backend."""
        yield from self._problems
        if not self.queues:
            hint = 'Write QUEUES: ["default"]; leave it out for that.'
            yield self._error("QUEUES is empty: a node has to know the queues that it works", hint, "E010")
        for name in self.options:
            if name not in _OPTIONS:
                yield self._error(f"OPTIONS has no {name!r}", f"Options are {', '.join(_OPTIONS)}.", "E011")
        for other, params in settings.TASKS.items():
            shared = self.queues & set(params.get("QUEUES", ["default"]))
            if other > self.alias and params.get("BACKEND") == settings.TASKS[self.alias]["BACKEND"] and shared:
                hint = "Give each backend queues of its own."
                yield self._error(f"TASKS[{other!r}] has the queue {min(shared)!r}, too", hint, "E013")
        if self.records.alias is not None and self.records.alias not in settings.CACHES:
            hint = f"Write one of {', '.join(settings.CACHES)}."
            yield self._error(f"result_cache: CACHES has no {self.records.alias!r}", hint, "E014")
        elif self.records.alias is not None and not self.records.is_shared:
            yield checks.Warning(
                f"TASKS[{self.alias!r}]: the cache {self.records.alias!r} is not shared by processes, so a web process "
                "can't see the results that a node writes.",
                hint="Name a cache in Redis or in the database as result_cache.",
                id="lowq.W010",
            )

    def _error(self, text: str, hint: str, number: str) -> checks.CheckMessage:
        return checks.Error(f"TASKS[{self.alias!r}]: {text}.", hint=hint, id=f"lowq.{number}")


def _priority(priority: int) -> int:
    """Django's -100 to 100, the most urgent, as lowq's 9 to 0."""
    return _DEFAULT_PRIORITY - round(priority * (_DEFAULT_PRIORITY if priority > 0 else 9 - _DEFAULT_PRIORITY) / 100)


def _timestamp(moment: datetime) -> float:
    return (moment if timezone.is_aware(moment) else timezone.make_aware(moment)).timestamp()


def _moment(timestamp: float) -> datetime:
    made = datetime.fromtimestamp(timestamp, timezone.get_default_timezone())
    return made if settings.USE_TZ else timezone.make_naive(made)


def _new_result(task: Any, result_id: str, args: Any, kwargs: Any, alias: str, **more: Any) -> Any:
    values: dict[str, Any] = dict.fromkeys(TIMES)
    values |= {"status": TaskResultStatus.READY, "errors": [], "worker_ids": []} | more
    return TaskResult(task=task, id=result_id, args=args, kwargs=kwargs, backend=alias, **values)


def _result_of(record: Mapping[str, Any]) -> Any:
    found = _task_of(
        record["task"], record["backend"], queue_name=record["queue"], priority=record["priority"],
        run_after=_parsed(record["run_after"]),
    )  # fmt: skip
    times = {name: _parsed(record[name]) for name in TIMES}
    result = _new_result(
        found, record["id"], record["args"], record["kwargs"], record["backend"],
        status=TaskResultStatus(record["status"]), worker_ids=list(record["worker_ids"]),
        errors=[TaskError(exception_class_path=path, traceback=text) for path, text in record["errors"]], **times,
    )  # fmt: skip
    object.__setattr__(result, "_return_value", record["return_value"])
    return result


def _parsed(time: str | None) -> datetime | None:
    return None if time is None else datetime.fromisoformat(time)


def _task_of(path: str, alias: str, **changes: Any) -> Any:
    found = import_string(path)
    if not isinstance(found, Task):
        raise InvalidTask(f"{path} is no task: decorate it with @task")
    same = {field.name: getattr(found, field.name) for field in fields(found)} | {"backend": alias} | changes
    return type(found)(**same)


# --- performing ---

#: Errors of a task that are its own failure.
_FAILURES = (Exception, SystemExit, lowq.TimeLimitExceeded, lowq.JobCancelled)


class _Attempt:
    """One call that is performed: what it is, and what is noted of it."""

    def __init__(self, worker: type[lowq.Worker[Any]], job_id: str, call: Mapping[str, Any]) -> None:
        self._worker = worker
        self._call = call
        self._job = next(job for job in lowq.current().jobs if job.id == job_id)
        backend: Any = task_backends[call["backend"]]
        self._backend = backend
        self._result: Any = None

    def begin(self) -> tuple[Any, list[Any], dict[str, Any]]:
        """The task, and what it is called with."""
        call, now = self._call, timezone.now()
        run_after = call.get("run_after")
        task = _task_of(
            call["task"], call["backend"], queue_name=self._worker.queue_name, priority=call.get("priority", 0),
            run_after=None if run_after is None else _moment(run_after),
        )  # fmt: skip
        record = self._backend.records.attempts(call["id"])
        before = list(record.get("worker_ids") or ["unknown"] * (self._job.retry_count + 1))
        self._result = _new_result(
            task, call["id"], call["args"], call["kwargs"], call["backend"],
            status=TaskResultStatus.RUNNING, enqueued_at=_moment(call["at"]), last_attempted_at=now,
            started_at=_parsed(record.get("started_at")) or now,
            worker_ids=[*before, f"{socket.gethostname()}:{os.getpid()}"[-64:]],
            errors=[TaskError(exception_class_path=path, traceback=text) for path, text in record.get("errors", ())],
        )  # fmt: skip
        self._backend.records.save(self._result)
        task_started.send_robust(type(self._backend), task_result=self._result)
        first = [TaskContext(task_result=self._result)] if task.takes_context else []
        return task, [*first, *self._result.args], self._result.kwargs

    def succeed(self, value: Any) -> None:
        """The call returned; `TypeError` if that is nothing JSON has."""
        object.__setattr__(self._result, "_return_value", normalize_json(value))
        self._finish(TaskResultStatus.SUCCESSFUL)

    def fail(self, error: BaseException) -> bool:
        """The call raised: it is READY for its next attempt, also when it is released, or FAILED after the last one.
        Returns whether that is all: otherwise the error is to be raised on.
        """
        if isinstance(error, SystemExit):
            lowq.current().fail(self._job.id, error)  # it is the task's failure, not the end of the node
        if self._result is not None and not isinstance(error, lowq.LeaseLost):  # else somebody else performs it
            self._note_failure(error)
        return isinstance(error, SystemExit)

    def _note_failure(self, error: BaseException) -> None:
        kind = type(error)
        path = f"{kind.__module__}.{kind.__qualname__}"
        self._result.errors.append(TaskError(exception_class_path=path, traceback="".join(format_exception(error))))
        if self._is_given_up(error):
            self._finish(TaskResultStatus.FAILED)
        else:
            object.__setattr__(self._result, "status", TaskResultStatus.READY)
            self._backend.records.save(self._result)

    def _is_given_up(self, error: BaseException) -> bool:
        """Whether the job goes to the morgue."""
        source = lowq.current()._source
        pauses = 0 if source is None else source.in_flight.found_no_redis.get(self._job.id, 0)
        if found_no_redis_in(error) and pauses < len(NO_REDIS_PAUSES):
            return False  # it is released
        config = lowq.app.config
        policies = policies_of(self._worker._by_error, (config.bury_on, config.release_on))
        policy = find_policy(policies, error)
        if policy is None:
            return is_exhausted(self._job.retry_count + 1, self._worker.max_retry_count)
        return policies[policy] is None

    def _finish(self, status: Any) -> None:
        object.__setattr__(self._result, "finished_at", timezone.now())
        object.__setattr__(self._result, "status", status)
        self._backend.records.save(self._result)
        task_finished.send_robust(type(self._backend), task_result=self._result)


def _forwarded(call: Mapping[str, Any]) -> tuple[tuple[str, dict[str, Any]], dict[str, Any]]:
    """The arguments of a push for a call that has waited for its time, and now joins those of its key."""
    payload = {name: value for name, value in call.items() if name != "key"}
    return (call["key"], payload), {"priority": _priority(call["priority"])} if "priority" in call else {}


class _Performer:
    """The handler of a queue of tasks, in a thread."""

    def perform_one(self, job_id: str, payloads: list[Mapping[str, Any]]) -> None:
        worker: Any = type(self)
        for call in payloads:  # one, as max_payloads says
            if "key" in call:
                job, options = _forwarded(call)
                worker.push(*job, **options)
                return
            attempt = _Attempt(worker, job_id, call)
            try:
                task, args, kwargs = attempt.begin()
                attempt.succeed(task.call(*args, **kwargs))
            except _FAILURES as error:
                if not attempt.fail(error):
                    raise


class _AsyncPerformer:
    """The handler of a queue of tasks, in the event loop of a node: many tasks at once."""

    async def perform_one(self, job_id: str, payloads: list[Mapping[str, Any]]) -> None:
        worker: Any = type(self)
        for call in payloads:
            if "key" in call:
                job, options = _forwarded(call)
                await worker.apush(*job, **options)
                return
            attempt = _Attempt(worker, job_id, call)
            try:
                task, args, kwargs = await sync_to_async(attempt.begin)()
                await sync_to_async(attempt.succeed)(await task.acall(*args, **kwargs))
            except _FAILURES as error:
                if not await sync_to_async(attempt.fail)(error):
                    raise
