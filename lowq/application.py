"""The application: its workers and queues, and what people ask of all of them. Settings and connections are in
`Backend`, limits around calls in `Limiting`.

`lowq.worker` and `lowq.config` belong to the default application; `Lowq(...)` makes another one, for several in a
process and for tests.
"""

import os
import weakref
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from itertools import count
from typing import Any, Concatenate, ParamSpec, TypeAlias, TypeVar, Unpack, overload

from lowq import drivers
from lowq.call_limit import Limit, Limiting
from lowq.clock import Lock
from lowq.decorators import Decorator, build_worker, check_codec, check_loop_function
from lowq.errors import ConfigError
from lowq.guesses import APPLICATION, add_guesses
from lowq.observe.error_groups import ErrorGroup, read_error_groups
from lowq.operate import audit as audit_log
from lowq.operate.commands import AllQueues
from lowq.operate.deploy import deploy_check
from lowq.operate.doctor import Examination
from lowq.operate.findings import Finding, redis_info
from lowq.operate.nodes import nodes as read_nodes
from lowq.operate.nodes import send_command, stuck_batches
from lowq.operate.queries import shards_of_handle
from lowq.operate.queues import RegistryCheck
from lowq.operate.queues import queues as read_queues
from lowq.operate.schedules import find_schedule, pause_schedule
from lowq.operate.schedules import schedules as read_schedules
from lowq.operate.stats import ShardInfo, overview, read_shards
from lowq.options import QueueKeywords, WorkerKeywords, check_queue_name, checked_options
from lowq.queue import Queue
from lowq.schedules import is_internal
from lowq.settings import Config
from lowq.store import SOCKET_TIMEOUT, Client
from lowq.store.calls import time_of
from lowq.workers import PerformFunction, Worker

C = TypeVar("C")
P = TypeVar("P")
S = ParamSpec("S")
#: A function for the start or the stop of a node's event loop: it may take the state.
LoopFunction: TypeAlias = Callable[..., Coroutine[Any, Any, None]]
L = TypeVar("L", bound=LoopFunction)

#: All applications of the process, in their order, and the functions that are called with new ones.
_applications: "weakref.WeakValueDictionary[int, Lowq]" = weakref.WeakValueDictionary()
_numbers = count()
_on_new: "list[Callable[[Lowq], object]]" = []


def _with_keywords_of(
    _config: Callable[S, object],
) -> Callable[[Callable[..., None]], Callable[Concatenate["Lowq", S], None]]:
    """Tells type checkers which keywords a method takes."""
    return lambda method: method


class Lowq(Limiting, AllQueues):
    """An application: settings, workers, and a connection to Redis that is made when first needed.

    Safe for threads. A child of a fork makes connections of its own.

    Raises:
        ConfigError: an unknown setting, or a value that makes no sense.
    """

    @_with_keywords_of(Config)
    def __init__(self, **settings: Any) -> None:
        super().__init__(Config(**settings), RegistryCheck(self).accepts)
        #: queue name -> its worker, and the handle of that.
        self._queues: dict[str, tuple[type[Worker[Any]], Queue]] = {}
        #: The functions of `on_loop_start` and `on_loop_stop`.
        self.loop_start: list[LoopFunction] = []
        self.loop_stop: list[LoopFunction] = []
        if not isinstance(self, _WithOwnPool):  # which follows its application
            _applications[next(_numbers)] = self
            for call in _on_new:
                call(self)

    @overload
    def worker(self, target: type[C], /) -> type[C]: ...  # type: ignore[overload-overlap]  # a class is no function
    @overload
    def worker(self, target: PerformFunction[P], /) -> type[Worker[P]]: ...
    @overload
    def worker(self, /, **options: Unpack[WorkerKeywords]) -> Decorator: ...
    def worker(self, target: Any = None, /, **options: Any) -> Any:
        """Makes a worker of a class or a function. With or without options.

        Raises:
            ConfigError: a wrong form or option, or a queue name that another worker has.
        """
        if target is None:
            return lambda decorated: self._add(build_worker(self, decorated, options))
        return self._add(build_worker(self, target, options))

    def _add(self, worker: type[Worker[Any]]) -> type[Worker[Any]]:
        if is_internal(worker.queue_name):
            raise ConfigError(
                f"{worker.__name__}: the queue name {worker.queue_name!r} is one of lowq's own; give it another "
                "queue_name"
            )
        other = self.workers.get(worker.queue_name)
        names = [f"{one.__module__}.{one.__qualname__}" for one in (other, worker) if one is not None]
        if len(set(names)) == 2:
            raise ConfigError(
                f"two workers have the queue name {worker.queue_name!r}: {names[0]} and {names[1]}; give one of them "
                "another queue_name"
            )
        check_codec(worker, self.config)
        self.workers[worker.queue_name] = worker
        return worker

    def on_loop_start(self, function: L, /) -> L:
        """Calls the function when the event loop of a node begins, before the ``setup`` of its async workers and before
        it takes any job, to open what these share::

            @app.on_loop_start
            async def connect(state):
                state.http = httpx.AsyncClient()

        Handlers find it in ``lowq.current().state``. When it raises, the node does not start.

        Raises:
            ConfigError: it is no ``async def``, or can't be called with the state, or without.
        """
        check_loop_function("on_loop_start", function)
        self.loop_start.append(function)
        return function

    def on_loop_stop(self, function: L, /) -> L:
        """Calls the function when the event loop of a node ends, after the ``teardown`` of its workers, to close what
        `on_loop_start` has opened. The last one that was declared comes first. A kill may skip it.

        Raises:
            LowqError: as `on_loop_start`.
        """
        check_loop_function("on_loop_stop", function)
        self.loop_stop.append(function)
        return function

    def with_own_pool(self, size: int) -> "Lowq":
        """The same application with a client of its own, for up to ``size`` threads, so that their calls keep no
        producer waiting. It follows into an embedded store, and is closed when this one is.
        """
        other = _WithOwnPool(self, size)
        with self._lock:
            self._with_own_pools.add(other)
        return other

    def queue(
        self, name: str, shards_count: int | None = None, *, driver: str | None = None, **options: Unpack[QueueKeywords]
    ) -> Queue:
        """The handle of a queue, for code that does not import its worker.

        ``shards_count`` is only needed before anybody has used the queue; otherwise Redis knows it. ``driver``: the
        name of the handle's class, a subclass of `Queue` that an installed package brings; by default the worker's.
        ``options``: those of a worker that concern its queue. They are entered in the registry when the handle is first
        used; the others are taken from the registry.

        Raises:
            ConfigError: an unknown option or driver, or a wrong value.
        """
        worker = self.workers.get(check_queue_name(name))
        whose = f"queue {name!r}"
        declared = checked_options(whose, options)
        if shards_count is not None:
            checked_options(whose, {"shards_count": shards_count})
        if worker is not None and shards_count is None and not declared:
            if driver is None:
                return self.queue_of(worker)
            return _queue_class(driver)(self, name, worker.shards_count, worker)
        if worker is not None and driver is None:
            driver = worker.driver
        return _queue_class(driver)(self, name, shards_count, declared=declared)

    def queue_of(self, worker: type[Worker[Any]]) -> Queue:
        """The handle of a worker's queue."""
        known = self._queues.get(worker.queue_name)
        if known is None or known[0] is not worker:
            queue = _queue_class(worker.driver)(self, worker.queue_name, worker.shards_count, worker)
            known = self._queues[worker.queue_name] = worker, queue
        return known[1]

    #: All queues that were ever used, from the registry in Redis.
    queues = read_queues
    #: The nodes that live.
    nodes = read_nodes
    #: The batches that have been running for longer than a minute, and for longer than ten times the 95th percentile of
    #: their queue; longest first.
    stuck = stuck_batches
    #: What a stop of all nodes would probably interrupt.
    deploy_check = deploy_check
    #: All queues in figures, with their shards, in one round.
    overview = overview
    #: The server in figures, and what an operator should be warned of.
    redis_info = redis_info
    #: The schedules of all queues: when they came last, when they come next, whether they are paused.
    schedules = read_schedules
    #: Sends a node a command, once; `nodes` shows whether it was carried out.
    send_command = send_command
    #: A schedule by its name; ``queue``: its queue, where schedules of several have that name.
    schedule = find_schedule
    #: Writes an entry into the log of what people did.
    note = audit_log.note
    #: The log of what people did on the dashboard and the command line, newest first; it keeps the latest 1,000.
    audit = audit_log.entries

    def error_groups(self) -> list[ErrorGroup]:
        """The failures of all queues in groups of alike errors, the last seen first.

        Raises:
            RedisUnavailable, RedisRefused: as of every call.
        """
        return read_error_groups(self, [info.name for info in self.queues()])

    def _handles(self, names: Iterable[str] | None) -> list[Queue]:
        if names is None:
            return [self.queue(info.name, info.shards_count) for info in self.queues()]
        return [self.queue(name) for name in dict.fromkeys(names)]

    def run_schedule_now(self, name: str, queue: str | None = None) -> float:
        """Pushes a job of a schedule now, also of a paused one. Its time table does not change. Returns the job's
        ``planned_at``, Unix time, seconds.

        Raises:
            UnknownScheduleError: there is none of that name. QueueFull, PushError: the push failed.
        """
        found = self.schedule(name, queue)
        planned_at = time_of(self.client.command("TIME"))
        # As a tick would be, since payloads may have a type.
        planned_at = round(planned_at, 3) if isinstance(found.at, float) else int(planned_at)
        self.queue(found.queue).push_tick(found.name, planned_at)
        return planned_at

    def pause_schedule(self, name: str, queue: str | None = None, *, by: str = "") -> bool:
        """Pauses a schedule: no tick of it is pushed once this has returned. Returns whether that changed anything.
        ``by``: who paused it, for people.

        Raises:
            UnknownScheduleError, RedisUnavailable: as of every call.
        """
        return pause_schedule(self, self.schedule(name, queue).queue, name, True, by)

    def resume_schedule(self, name: str, queue: str | None = None) -> bool:
        """Ends a pause of a schedule; returns whether that changed anything. The ticks meanwhile count as missed.

        Raises:
            UnknownScheduleError, RedisUnavailable: as of every call.
        """
        return pause_schedule(self, self.schedule(name, queue).queue, name, False)

    def shards(self, queue: str | Queue) -> list[ShardInfo]:
        """The shards of a queue: owner, length, lag."""
        handle = self.queue(queue) if isinstance(queue, str) else queue
        return read_shards(shards_of_handle(handle))

    def examine(
        self,
        *queues: str,
        repair: bool = False,
        on_progress: Callable[[int, int], object] | None = None,
        patience: float | None = None,
    ) -> list[Finding]:
        """Examines Redis itself, the registries, the leases and the jobs, of these queues or of all. What is in order
        is a finding, too, with the severity "ok".

        It goes in short steps, about 10 s per million jobs, while nodes go on working. A finding about leases may only
        be a change under way, so it is looked at again for ``patience`` seconds, by default lease_ttl / 3 + 1.
        ``repair``: repairs everything that can be repaired without a loss; each finding has the number repaired.
        ``on_progress``: called with the number of ids and keys examined, and about how many there are.

        Raises:
            UnknownQueueError, RedisUnavailable, RedisRefused: as of every call.
        """
        return Examination(self, queues, repair=repair, on_progress=on_progress, patience=patience).findings()

    def selected_workers(self, queues: Iterable[str] | None = None) -> list[type[Worker[Any]]]:
        """The workers that a node runs: those in the setting ``workers``, or all that were decorated; of these queues.

        Raises:
            ConfigError: there is no worker, or none of one of these queues.
        """
        workers: Iterable[Any] = self.workers.values() if self.config.workers is None else self.config.workers
        chosen: list[type[Worker[Any]]] = list(workers)
        for worker in chosen:
            if self.workers.get(getattr(worker, "queue_name", "")) is not worker:
                raise ConfigError(f"workers={worker!r}: it was not decorated with this application's worker()")
        if queues is not None:
            by_name = {worker.queue_name: worker for worker in chosen}
            chosen = []
            for name in queues:
                if name not in by_name:
                    known = ", ".join(by_name) or "none"
                    raise ConfigError(f"no worker has the queue {name!r}; the queues of this app are: {known}")
                chosen.append(by_name[name])
        if not chosen:
            raise ConfigError("no worker is registered; decorate one with @lowq.worker in the module that is loaded")
        return chosen

    def connect(self, size: int, *, socket_timeout: float = SOCKET_TIMEOUT) -> Client:
        for worker in list(self.workers.values()):  # the settings may be later than the worker
            check_codec(worker, self.config)
        return super().connect(size, socket_timeout=socket_timeout)


add_guesses(Lowq, APPLICATION)


class _WithOwnPool(Lowq):
    """Another application's settings, workers and store, with a client of its own."""

    def __init__(self, app: Lowq, size: int) -> None:
        super().__init__()
        self.config, self.workers = app.config, app.workers
        self.registrations = self._new_registrations()
        self._exporter, self._callbacks = app._exporter, app._callbacks
        self.observers = app.observers
        self._app, self._size = app, size

    @property
    def client(self) -> Client:
        client = self._client
        if client is None or self._store is not self._app._store:
            with self._lock:
                if self._client is None or self._store is not self._app._store:
                    # Calls that are under way end where they began: only idle connections are closed.
                    self.close()
                    self._client = self.connect(self._size)
                    self._store = self._app._store
                client = self._client
        return client

    def connect(self, size: int, *, socket_timeout: float = SOCKET_TIMEOUT) -> Client:
        return self._app.connect(size, socket_timeout=socket_timeout)

    def with_own_pool(self, size: int) -> Lowq:
        return self._app.with_own_pool(size)

    def close(self) -> None:
        # Without our lock: the other application may be closed under its lock, which we take while we hold ours.
        self._close_connections()


def all_applications() -> "list[Lowq]":
    """All applications of the process, in the order in which they were made."""
    return list(_applications.values())


def _queue_class(driver: str | None) -> type[Queue]:
    return Queue if driver is None else drivers.load("queue", driver)


def with_all(call: Callable[[Lowq], object]) -> Callable[[], None]:
    """Calls a function with every application of the process, and with each that is made from now on, until the
    function that it returns is called.
    """
    for app in all_applications():
        call(app)
    _on_new.append(call)
    return partial(_on_new.remove, call)


@contextmanager
def all_embedded(embed: Callable[[Lowq], AbstractContextManager[None]]) -> Iterator[None]:
    """Embeds every application of the process for the time of the block, also one that is made meanwhile. ``embed``:
    does that with one, as `Lowq.embedded`.
    """
    with ExitStack() as stack:
        end = with_all(lambda app: stack.enter_context(embed(app)))
        try:
            yield
        finally:
            end()


def _renew_locks() -> None:
    """Replaces the locks in a forked child, where the threads that held them are gone."""
    for app in all_applications():
        for one in (app, *app._with_own_pools):
            one._lock = Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_locks)


#: The application behind ``lowq.worker`` and ``lowq.config``.
default = Lowq()
Limit.of_names = default
