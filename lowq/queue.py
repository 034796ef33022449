"""The handle of a queue over all its shards: jobs in, and jobs out by hand.

`lowq.operate` has its other halves: `Queries`, which reads, and `Commands`, which acts.
"""

import inspect
import time
from collections.abc import AsyncIterable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Generic, Unpack, overload

from lowq.backend import Backend
from lowq.codec.jobs import fresh_id
from lowq.errors import ConfigError, JobError, RedisUnavailable, UnknownQueueError
from lowq.guesses import PUSHES, add_guesses
from lowq.job import AnyJobs, JobDict, JobId, JobOptions, Jobs, P, Untyped, new_job
from lowq.operate.actions import release_all
from lowq.operate.commands import Commands
from lowq.options import DURABILITY, TIMEOUT, QueueOptions
from lowq.push.push import apush, push
from lowq.push.target import SharedLookup, Target, check_jobs, push_ticks, reader_of, tick_payload
from lowq.push.write import GRACE, limit_of_caller, no_answer
from lowq.sharding import Layouts
from lowq.shards.outage import Outage
from lowq.store import Durability

if TYPE_CHECKING:
    from lowq.consumer import AsyncConsumer, Consumer


class Queue(Commands, Generic[P]):
    """The handle of a queue. Safe for threads.

    ``now`` (Unix time, seconds) stands for the server's clock wherever it is given.
    """

    def __init__(
        self, backend: Backend, name: str, shards_count: int | None = None, worker: Any = None,
        declared: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(backend, name, shards_count)
        #: The worker's class, if known.
        self._worker = worker
        #: The options given to `Lowq.queue`.
        self._declared = declared or {}
        #: The target of the last push, and `Registrations.entered` as it was then.
        self._last_target: tuple[object, Target] | None = None
        #: Durability -> the target, and the same for pushes that wait for it.
        self._durable_targets: dict[Durability, tuple[Target, Target]] = {}
        #: Registers the queue for coroutines. They share its outcome, so no caller's limit counts, only push_timeout.
        self._target_lookup = SharedLookup()

    # --- producing ---

    @overload
    def push(
        self,
        job_id: JobId,
        /,
        payload: P = ...,
        *,
        timeout: float | timedelta | None = None,
        durability: Durability | None = None,
        **options: Unpack[JobOptions],
    ) -> int: ...
    @overload
    def push(
        self,
        jobs: JobDict[P],
        on_progress: Callable[[int], object] | None = None,
        *,
        timeout: float | timedelta | None = None,
        durability: Durability | None = None,
    ) -> int: ...
    @overload
    def push(
        self,
        jobs: Iterable[JobDict[P]],
        on_progress: Callable[[int], object] | None = None,
        *,
        timeout: float | timedelta | None = None,
        durability: Durability | None = None,
    ) -> int: ...
    @overload
    def push(
        self: "Queue[Untyped]",
        jobs: Jobs,
        on_progress: Callable[[int], object] | None = None,
        *,
        timeout: float | timedelta | None = None,
        durability: Durability | None = None,
    ) -> int: ...
    def push(self, jobs: Any, *args: Any, timeout: Any = None, durability: Any = None, **options: Any) -> int:
        """Pushes one job, given as its id and its payload, or any number of jobs, given as mappings::

            queue.push(42, {"version": 2}, score=2, delay=60)
            queue.push({"id": number, "payload": {"version": 1}} for number in range(1_000_000))

        Returns the number of payloads accepted. ``options`` are those of a `JobDict`; None counts as not given. An
        iterable is streamed in chunks, and ``on_progress`` called with the number accepted so far. ``timeout``:
        seconds, or a timedelta, to wait at most for room in a queue that has reached its ``capacity``; without it
        `QueueFull` is raised at once. ``durability``: ``"none"``, ``"replicated"`` or ``"fsynced"``, instead of the
        queue's own.

        Raises:
            JobError, PayloadError: a job is malformed; nothing of its chunk was written.
            PushError: Redis failed, or a later chunk was malformed; it has the number accepted and the rest.
            QueueFull: there was no room for some jobs; it has the number accepted and the rest.
            NotReplicated: jobs are in, but were not confirmed by a replica, or by the disk.
            ShardsCountError: the queue exists with another number of shards; nothing was written.
            UnknownQueueError: nobody has used the queue yet, and the number of its shards was not given.
            ConfigError: a wrong timeout or durability, or a durability with ``memory://``.
        """
        on_progress = None
        if args or options or type(jobs) is not dict:  # most pushes are of one job, as a mapping
            jobs, on_progress = self._read_jobs(jobs, args, options)
        seconds = None if timeout is None else TIMEOUT.check("", "timeout", timeout)
        target = self._known_target()
        if target is None:
            self._check_first(jobs)
            target = self._enter_target()
        if durability is not None or target.options.durability != "none":
            target = self._durable_target(target, durability)
        return push(target, jobs, on_progress, seconds)

    @overload
    async def apush(
        self,
        job_id: JobId,
        /,
        payload: P = ...,
        *,
        timeout: float | timedelta | None = None,
        durability: Durability | None = None,
        **options: Unpack[JobOptions],
    ) -> int: ...
    @overload
    async def apush(
        self,
        jobs: JobDict[P],
        on_progress: Callable[[int], object] | None = None,
        *,
        timeout: float | timedelta | None = None,
        durability: Durability | None = None,
    ) -> int: ...
    @overload
    async def apush(
        self,
        jobs: Iterable[JobDict[P]] | AsyncIterable[JobDict[P]],
        on_progress: Callable[[int], object] | None = None,
        *,
        timeout: float | timedelta | None = None,
        durability: Durability | None = None,
    ) -> int: ...
    @overload
    async def apush(
        self: "Queue[Untyped]",
        jobs: AnyJobs,
        on_progress: Callable[[int], object] | None = None,
        *,
        timeout: float | timedelta | None = None,
        durability: Durability | None = None,
    ) -> int: ...
    async def apush(self, jobs: Any, *args: Any, timeout: Any = None, durability: Any = None, **options: Any) -> int:
        """`push` from async code, also of an async iterable, which is read in the caller's task, a chunk whenever the
        one before is in. Small pushes of coroutines that meet leave together in one write. ``on_progress`` may be
        called in another thread. ``PushError.rest`` is an async iterable if the jobs were one.

        When it is cancelled before its jobs were sent, nothing is written; otherwise they may be in.

        Raises:
            LowqError: as `push`.
        """
        on_progress = None
        if args or options or type(jobs) is not dict:  # most pushes are of one job, as a mapping
            jobs, on_progress = self._read_jobs(jobs, args, options)
        seconds = None if timeout is None else TIMEOUT.check("", "timeout", timeout)
        target = self._known_target()
        if target is None:
            self._check_first(jobs)
        if target is None or self._target_lookup.is_under_way():
            target = await self._find_target()
        if durability is not None or target.options.durability != "none":
            target = self._durable_target(target, durability)
        return await apush(target, jobs, on_progress, seconds)

    def _read_jobs(self, jobs: Any, args: tuple[Any, ...], options: Any) -> tuple[Jobs, Callable[[int], object] | None]:
        """The jobs and ``on_progress`` of a push, from either of its forms.

        Raises:
            JobError: it has neither form.
        """
        is_one = isinstance(jobs, JobId)
        name = "payload" if is_one else "on_progress"
        if len(args) > 1 or (args and name in options):
            raise JobError(
                f"queue {self.name!r}: push takes an id and a payload, and all else by name: push(42, payload, "
                "score=7); or jobs"
            )
        second = args[0] if args else options.pop(name, "" if is_one else None)
        if is_one:
            return new_job(jobs, second, options), None
        if options:
            raise JobError(
                f"queue {self.name!r}: {', '.join(options)} beside jobs: each job says it for itself, as in "
                "{'id': 42, 'score': 7}; or push a single one: push(42, payload, score=7)"
            )
        if second is not None and not callable(second):
            raise JobError(
                f"queue {self.name!r}: push({jobs!r:.60}, {second!r:.60}) has neither an id, which is a str, an int or "
                "a UUID, before a payload, nor jobs before a function that is told how many are in"
            )
        if inspect.iscoroutinefunction(second):
            raise JobError(f"queue {self.name!r}: on_progress is called, and not awaited: write a plain def")
        return jobs, second

    def _check_first(self, jobs: AnyJobs) -> None:
        """Checks the jobs before the queue is entered in the registry: a push that is refused must leave nothing."""
        backend, worker = self._backend, self._worker
        score = self._declared.get("score") if worker is None else worker._queue_options.score
        payload_type = backend.payload_type_of(self.name)
        check_jobs(self.name, backend.config, jobs, payload_type, reader_of(score, worker or self.name, payload_type))

    def _known_target(self) -> Target | None:
        """The target of the last push; None: the registry must be asked."""
        if self._last_target is None:
            return None
        entered, target = self._last_target
        if entered is not self._backend.registrations.entered:  # forgotten, or in another store
            return None
        return None if target.routes.sealed and target.routes.is_doubtful else target

    def _durable_target(self, target: Target, durability: Durability | None) -> Target:
        """The same target for pushes that wait for this durability, by default for that of the queue.

        Raises:
            ConfigError: there is no such durability, or the store is in memory.
        """
        wanted = target.options.durability if durability is None else DURABILITY.check("", "durability", durability)
        config = self._backend.config
        if wanted == "none":
            return target
        if config.redis_url.startswith("memory://"):
            raise ConfigError(
                f"queue {self.name!r}: durability={wanted!r} needs a Redis with replicas or a disk, and "
                f"redis_url={config.redis_url!r} is in the memory of this process. Leave durability out there"
            )
        known = self._durable_targets.get(wanted)
        if known is None or known[0] is not target:
            group = target.group.durable(wanted, config.durability_timeout)
            known = self._durable_targets[wanted] = target, replace(target, group=group)
        return known[1]

    async def _find_target(self) -> Target:
        """`_enter_target` for a coroutine: Redis is asked in a thread. Each caller waits as long as it would for its
        push."""
        config = self._backend.config
        timeout, is_limited_by_batch = limit_of_caller(config.push_timeout)
        try:
            return await self._target_lookup.get(self._known_target, self._enter_target, timeout + GRACE)
        except TimeoutError:
            raise no_answer(config.redis_url, config.push_timeout, of_batch=is_limited_by_batch) from None

    def _enter_target(self) -> Target:
        """The target of a push, after the queue was entered in the registry."""
        target = self._known_target()
        if target is not None:
            return target
        backend, registrations = self._backend, self._backend.registrations
        entered = registrations.entered
        routes = registrations.routes_of(self.name)
        try:
            options = self._register(anew=routes is not None and routes.is_doubtful)
        except RedisUnavailable as error:
            # A script without Redis is shown its message, and hardly a frame of ours.
            raise error.with_traceback(None) from error.__cause__
        target = Target(
            backend.group,
            backend.config,
            self.name,
            self._shards.declared_count,
            registrations.routes_of(self.name)
            or registrations.note_layouts(self.name, Layouts.plain(options.shards_count)),
            self._worker or self.name,
            options,
            backend.events_of(self.name),
            options.push_words(),
            backend.payload_type_of(self.name),
            learn_anew=self._learn_anew,
        )
        self._last_target = entered, target
        return target

    def _learn_anew(self) -> Layouts:
        """Re-registers the queue if needed, and returns its layouts in the registry."""
        options = self._register(anew=True)
        routes = self._backend.registrations.routes_of(self.name)
        return Layouts.plain(options.shards_count) if routes is None else routes.layouts

    def _register(self, *, anew: bool = False) -> QueueOptions:
        """Enters the queue in the registry, if need be, and returns its options. ``anew``: reads the registry again."""
        try:
            count = self._shards.declared_count
        except UnknownQueueError as error:
            hint = f"Its first producer says how many shards it gets: app.queue({self.name!r}, shards_count=5)"
            said = str(error)
            raise UnknownQueueError(f"{said}{'' if said.endswith('?') else '.'} {hint}") from None
        return self._backend.registrations.enter(self.name, count, self._worker, self._declared, anew=anew)

    def put(
        self,
        payload: Any = "",
        *,
        timeout: float | timedelta | None = None,
        durability: Durability | None = None,
        **options: Unpack[JobOptions],
    ) -> str:
        """Pushes a payload that belongs to no entity, under a fresh id, and returns the id: a UUIDv7, so later ones
        sort behind earlier ones. ``timeout``, ``durability`` and ``options`` are as of `push`.

        Raises:
            LowqError: as `push`. After a RedisUnavailable the job may be in, under an unknown id.
        """
        job_id = str(fresh_id())
        self.push(job_id, payload, timeout=timeout, durability=durability, **options)
        return job_id

    async def aput(
        self,
        payload: Any = "",
        *,
        timeout: float | timedelta | None = None,
        durability: Durability | None = None,
        **options: Unpack[JobOptions],
    ) -> str:
        """`put` from async code."""
        job_id = str(fresh_id())
        await self.apush(job_id, payload, timeout=timeout, durability=durability, **options)
        return job_id

    def push_ticks(self, schedule: str, ticks: Sequence[float], record: bytes, new_record: bytes) -> bool:
        """Pushes ticks of a schedule, for a node; see `lowq.push.target.push_ticks`."""
        return push_ticks(self._enter_target(), schedule, ticks, record, new_record)

    def push_tick(self, schedule: str, planned_at: float) -> None:
        """Pushes a job of a schedule by hand."""
        payload = tick_payload(planned_at, self._enter_target().payload_type)
        self.push(schedule, payload, score=planned_at)

    # --- consuming ---

    def consumer(self, *, ttr: float | timedelta | None = None, session: str | None = None) -> "Consumer":
        """Takes jobs by hand, without a worker::

            with queue.consumer(ttr=60) as consumer:
                for job in consumer.take(limit=10, timeout=5):
                    job.ack()

        A consumer shares the shards with nodes and other consumers. Nobody else takes from its shards, so it must go on
        taking as long as it is open. ``ttr`` (by default that of the queue) and ``session`` are as of `Consumer`. This
        waits while Redis can't serve (a read-only replica, or one that loads its data), and while a primary of a
        cluster is away.

        Raises:
            UnknownQueueError: nobody has used the queue yet. Others: as of `Consumer`.
        """
        from lowq.consumer import Consumer, check_consumer  # producers and workers need none of it

        check_consumer(ttr, session)
        return Outage().start(
            lambda: Consumer(self._backend, self._register(anew=True), ttr=ttr, session=session), time.sleep,
            has_answered=lambda: self._backend.client.is_known,
        )  # fmt: skip

    def aconsumer(self, *, ttr: float | timedelta | None = None, session: str | None = None) -> "AsyncConsumer":
        """As `consumer`, for coroutines: ``async with queue.aconsumer() as consumer``, and every verb is awaited."""
        from lowq.consumer import AsyncConsumer

        return AsyncConsumer(lambda: self.consumer(ttr=ttr, session=session))

    def release_all(self) -> int:
        """Makes the jobs that dead holders had in flight wait again at once, charged with a crash, without a node that
        takes over. Returns the number of jobs. Living holders keep theirs, as they may be performing them. A holder
        that died counts as dead once its lease has run out.

        Raises:
            UnknownQueueError, RedisUnavailable: call it again.
        """
        options = self._register(anew=True)
        return release_all(self._shards, options.max_crash_count)


add_guesses(Queue, PUSHES, name="queue", many="push")
