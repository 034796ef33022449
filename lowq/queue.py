"""A queue over all its shards: the handle that producers and people hold. Looking and acting is in `operate`."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Generic, Unpack, overload

from lowq.backend import Backend
from lowq.codec import decode_id
from lowq.codec.error_text import dump_text
from lowq.codec.jobs import fresh_id
from lowq.errors import ConfigError, JobError, UnknownQueueError
from lowq.job import JobDict, JobId, JobOptions, P, State, Untyped, new_job
from lowq.operate.actions import (
    ACTIONS,
    Acted,
    Action,
    ActionName,
    Moments,
    act_on,
    drop_queue,
    pause_queue,
    read_moments,
    release_all,
)
from lowq.operate.bulk import Step, bulk, meant_by, snapshot
from lowq.operate.job_filter import FilterOptions, JobFilter, Snapshot
from lowq.operate.layout_switch import ReshardProgress
from lowq.operate.queries import Queries
from lowq.operate.reshard import reshard, reshard_progress
from lowq.operate.walk import Search
from lowq.options import DURABILITY, TIMEOUT, QueueOptions
from lowq.push.push import apush, push
from lowq.push.target import Jobs, Target, check_jobs, reader_of
from lowq.push.ticks import push_ticks, tick_payload
from lowq.push.write import GRACE, limit_of_caller, no_answer
from lowq.sharding import Layouts
from lowq.shards.outage import Outage
from lowq.shared_lookup import SharedLookup
from lowq.store import Durability
from lowq.store.scripts import time_argument

if TYPE_CHECKING:
    from lowq.consumer import AsyncConsumer, Consumer

#: Jobs of the morgue that `kick_oldest` looks for at once.
OLDEST_TOGETHER = 1000


# More than 30 methods, in a long file: it is all that people do to a queue, each a line or two over what does it, with
# what they need to know of it. Type checkers want each form of a push as an overload.
class Queue(Queries, Generic[P]):
    """The handle of a queue. Safe for threads.

    ``now`` (Unix time, seconds) stands for the server's clock wherever it is given.
    """

    def __init__(
        self, backend: Backend, name: str, shards_count: int | None = None, worker: Any = None,
        declared: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(backend, name, shards_count)
        #: Its worker's class, where that is known.
        self._worker = worker
        #: Options that were given with the name.
        self._declared = declared or {}
        self._last_target: Target | None = None
        #: For each durability: the target, and the same for pushes that wait for it.
        self._durable_targets: dict[Durability, tuple[Target, Target]] = {}
        #: Registers the queue for coroutines, with nobody's limit but push_timeout: its outcome is for all of them.
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
        """Pushes one job, given as its id and its payload; or any number of jobs, given as mappings::

            queue.push(42, {"version": 2}, score=2, delay=60)
            queue.push({"id": number, "payload": {"version": 1}} for number in range(1_000_000))

        Returns the number of payloads accepted. ``options`` are those of a `JobDict`; None says nothing. An iterable is
        streamed in chunks, and ``on_progress`` called with the number accepted so far. ``timeout``: seconds, or a
        timedelta, to wait for room at most when the queue has reached its ``capacity``; without it that raises at once.
        ``durability``: what to wait for, instead of what the queue says: ``"none"``, ``"replicated"`` or ``"fsynced"``.

        Raises:
            JobError, PayloadError: a job is malformed; nothing of its chunk was written.
            PushError: Redis failed, or a later chunk was malformed: it says how many are in and carries the rest.
            QueueFull: there was no room for some jobs; it says how many are in and carries the rest.
            NotReplicated: jobs are in, and no replica, or not the disk, has them for certain.
            ShardsCountError: the queue exists with another number of shards; nothing was written.
            UnknownQueueError: nobody has used the queue yet, and the number of its shards was not given.
            ConfigError: timeout is no length of time, or durability none that there is, or ``memory://`` is to be
            durable.
        """
        on_progress = None
        if args or options or type(jobs) is not dict:  # one job, as a mapping, is what most pushes are
            jobs, on_progress = self._meant_jobs(jobs, args, options)
        seconds = None if timeout is None else TIMEOUT.check("", "timeout", timeout)
        target = self._present_target()
        if target is None:
            self._check(jobs)
            target = self._target()
        if durability is not None or target.options.durability != "none":
            target = self._durable(target, durability)
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
        jobs: Iterable[JobDict[P]],
        on_progress: Callable[[int], object] | None = None,
        *,
        timeout: float | timedelta | None = None,
        durability: Durability | None = None,
    ) -> int: ...
    @overload
    async def apush(
        self: "Queue[Untyped]",
        jobs: Jobs,
        on_progress: Callable[[int], object] | None = None,
        *,
        timeout: float | timedelta | None = None,
        durability: Durability | None = None,
    ) -> int: ...
    async def apush(self, jobs: Any, *args: Any, timeout: Any = None, durability: Any = None, **options: Any) -> int:
        """`push` from async code. Small pushes of coroutines that meet leave together in one write. ``on_progress`` may
        be called in another thread.

        When it is cancelled before its jobs were sent, nothing is written; otherwise they may be in.

        Raises:
            As `push`.
        """
        on_progress = None
        if args or options or type(jobs) is not dict:  # one job, as a mapping, is what most pushes are
            jobs, on_progress = self._meant_jobs(jobs, args, options)
        seconds = None if timeout is None else TIMEOUT.check("", "timeout", timeout)
        target = self._present_target()
        if target is None:
            self._check(jobs)
        if target is None or self._target_lookup.is_under_way():
            target = await self._find_target()
        if durability is not None or target.options.durability != "none":
            target = self._durable(target, durability)
        return await apush(target, jobs, on_progress, seconds)

    def _meant_jobs(
        self, jobs: Any, args: tuple[Any, ...], options: Any
    ) -> tuple[Jobs, Callable[[int], object] | None]:
        """Either form of `push` as jobs, and who is told how many are in.

        Raises:
            JobError: it is neither form.
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
        return jobs, second

    def _check(self, jobs: Jobs) -> None:
        """Before the queue is entered in the registry: a push that is refused is to leave nothing."""
        backend, worker = self._backend, self._worker
        score = self._declared.get("score") if worker is None else worker._queue_options.score
        payload_type = backend.payload_type_of(self.name)
        check_jobs(self.name, backend.config, jobs, payload_type, reader_of(score, worker or self.name, payload_type))

    def _present_target(self) -> Target | None:
        """Where jobs go, as long as that is what it was; None: it is to be found out."""
        target = self._last_target
        # Everything is entered anew after the registry was lost or the queue was dropped.
        if target is None or target.group is not self._backend.group_for(self.name, target.shards_count):
            return None
        return None if target.routes.sealed and target.routes.is_doubtful else target

    def _durable(self, target: Target, durability: Durability | None) -> Target:
        """The same target for pushes that wait for this, or for what the queue says.

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
        """`_target` for a coroutine: Redis is asked in a thread. Each caller waits as long as it would for its push."""
        config = self._backend.config
        timeout, is_limited_by_batch = limit_of_caller(config.push_timeout)
        try:
            return await self._target_lookup.get(self._present_target, self._target, timeout + GRACE)
        except TimeoutError:
            raise no_answer(config.redis_url, config.push_timeout, of_batch=is_limited_by_batch) from None

    def _target(self) -> Target:
        target = self._present_target()
        if target is not None:
            return target
        backend, registrations = self._backend, self._backend.registrations
        routes = registrations.routes_of(self.name)
        options = self._register(anew=routes is not None and routes.is_doubtful)
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
        self._last_target = target
        return target

    def _learn_anew(self) -> Layouts:
        """The layouts that the registry says, in which the queue is entered if it is not there any more."""
        options = self._register(anew=True)
        routes = self._backend.registrations.routes_of(self.name)
        return Layouts.plain(options.shards_count) if routes is None else routes.layouts

    def _register(self, *, anew: bool = False) -> QueueOptions:
        """Enters the queue in the registry, if need be, and returns its options. ``anew``: as they are there now."""
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
        """Pushes a job of its own, with a fresh id, and returns that: a UUIDv7, so later ones sort behind earlier ones.
        For payloads that belong to no entity. ``timeout``, ``durability`` and ``options`` are as of `push`.

        Raises:
            As `push`. After a RedisUnavailable the job may be in, under an id that nobody knows.
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
        """Pushes ticks of a schedule, for its turn in a node; see `lowq.push.ticks.push_ticks`."""
        return push_ticks(self._target(), schedule, ticks, record, new_record)

    def push_tick(self, schedule: str, planned_at: float) -> None:
        """Pushes a job of a schedule by hand."""
        payload = tick_payload(planned_at, self._target().payload_type)
        self.push(schedule, payload, score=planned_at)

    # --- consuming ---

    def consumer(self, *, ttr: float | timedelta | None = None, session: str | None = None) -> "Consumer":
        """Takes jobs by hand, without a worker::

            with queue.consumer(ttr=60) as consumer:
                for job in consumer.take(limit=10, timeout=5):
                    job.ack()

        It is a member that shares the shards with nodes and other consumers: of its shards nobody else takes, so it
        is to take as long as it is open. ``ttr`` (by default that of the queue) and ``session`` are as of `Consumer`.
        It waits for a Redis that can't serve now, as it is a read-only replica or loads its data, and for a primary of
        a cluster that is away.

        Raises:
            UnknownQueueError, and what `Consumer` raises.
        """
        from lowq.consumer import Consumer, check_consumer  # only who takes jobs by hand needs it

        check_consumer(ttr, session)
        return Outage().start(
            lambda: Consumer(self._backend, self._register(anew=True), ttr=ttr, session=session), time.sleep,
            has_answered=lambda: self._backend.client.is_known,
        )  # fmt: skip

    def aconsumer(self, *, ttr: float | timedelta | None = None, session: str | None = None) -> "AsyncConsumer":
        """As `consumer`, for coroutines: ``async with queue.aconsumer() as consumer``, and every verb is awaited."""
        from lowq.consumer import AsyncConsumer

        return AsyncConsumer(lambda: self.consumer(ttr=ttr, session=session))

    # --- single jobs ---

    def perform_now(self, ids: JobId | Iterable[JobId], *, now: float | None = None) -> Acted:
        """Makes waiting jobs due now. Their retry_count stays.

        Takes one id or any iterable of ids, which is streamed.

        Raises:
            JobError: an id is none; what came before it is done. UnknownQueueError, RedisUnavailable. What was done
            before is in the error's ``done``, as far as that is known.
        """
        return self._act(Action("perform_now", time_argument(now)), ids)

    def bury(
        self,
        ids: JobId | Iterable[JobId],
        reason: str | None = None,
        *,
        unchanged: Mapping[str, Moments] | None = None,
        now: float | None = None,
    ) -> Acted:
        """Moves waiting jobs to the morgue. ``reason``: why, for people; by default their last error. ``unchanged``:
        what `moments` told before; ids that something has happened to since are left alone, as missing.

        Raises:
            JobError, UnknownQueueError, RedisUnavailable: as `perform_now`.
        """
        return self._act(Action("bury", time_argument(now), self._reason(reason)), ids, unchanged)

    def kick(self, ids: JobId | Iterable[JobId], *, now: float | None = None) -> Acted:
        """Moves jobs out of the morgue. They merge with what waits for the same id, start afresh and are due now.

        Raises:
            JobError, UnknownQueueError, RedisUnavailable: as `perform_now`.
        """
        return self._act(Action("kick", time_argument(now)), ids)

    def delete(self, ids: JobId | Iterable[JobId], *, unchanged: Mapping[str, Moments] | None = None) -> Acted:
        """Removes jobs for good, waiting and buried ones alike. An id in flight keeps all it has. ``unchanged``: what
        `moments` told before; ids that something has happened to since are left alone, as missing.

        Raises:
            JobError, UnknownQueueError, RedisUnavailable: as `perform_now`.
        """
        return self._act(Action("delete"), ids, unchanged)

    def moments(self, ids: JobId | Iterable[JobId]) -> dict[str, Moments]:
        """id -> the perform_at and the time of burial of its jobs, None where it has none: when either of them is not
        what it was, something has happened to the id.

        Raises:
            JobError: an id is none. UnknownQueueError, RedisUnavailable
        """
        return read_moments(self._shards, ids)

    def _act(
        self, action: Action, ids: JobId | Iterable[JobId], unchanged: Mapping[str, Moments] | None = None
    ) -> Acted:
        return act_on(self._shards, action._replace(events=self._backend.events_of(self.name)), ids, unchanged)

    def _reason(self, reason: str | None) -> bytes:
        if reason is None:
            return b""
        # Forms and command lines bring bytes that are no UTF-8 as surrogates, which no dump_error could encode.
        return dump_text(self._backend.config.dump_error, reason.encode("utf-8", "backslashreplace").decode())

    # --- many jobs ---

    def bulk(
        self,
        action: ActionName,
        wanted: JobFilter | State | None = None,
        /,
        *,
        reason: str | None = None,
        now: float | None = None,
        **options: Unpack[FilterOptions],
    ) -> Iterator[Step]:
        """Does something to all jobs of a kind that are there when it begins, step by step as it is iterated over::

            for step in queue.bulk("kick", match="4*"):
                print(step.done, "of", step.total)

        ``action``: perform_now, bury, kick or delete. ``reason``: of bury. Which jobs: a state, the fields of a
        `JobFilter` by their names, or a `JobFilter`. None means all that wait; kick is for the morgue, delete for
        either. ``min`` and ``max`` bound perform_at, in the morgue buried_at, both included.

        ``before``: nothing that came later is touched. A `snapshot` that was taken before tells exactly. With a time
        (Unix time, seconds), jobs that were not due by then are left alone in shards that got a push since, since
        nothing tells them from new ones, and so are those that have become due since; what was in flight then and
        has failed since may be among those that it is done to. An id that waited by then is an old job, also when
        another payload of it came later.

        Patterns, and what is scheduled or retrying, must be looked for: the first steps then only count, and so they
        say. With ``payload``, ``error`` and ``error_group`` each job is read besides, twice: to count, and before
        something is done to it. Who stops iterating stops it, whether or not anything was found yet.

        It ends even while producers push and kicked jobs keep failing: what is buried or pushed after the beginning
        is not touched, except that a job pushed meanwhile *for later* may be taken for one that was scheduled
        already. Jobs in flight are left alone. With perform_now, what is due already is neither touched nor counted.
        Of scheduled jobs that become due before it is their turn, some may be left alone while others are being
        pushed: they can't be told from new ones. Do it again to have those too.

        Raises:
            ConfigError: it names what is allowed; or, when it is iterated over, ``before`` lies in the future.
            UnknownQueueError, RedisUnavailable
        """
        done, meant = self._meant(action, JobFilter.of(wanted, options), reason, now)
        return bulk(self._shards, done, meant)

    def snapshot(
        self,
        action: ActionName,
        wanted: JobFilter | State | None = None,
        /,
        *,
        now: float | None = None,
        **options: Unpack[FilterOptions],
    ) -> Snapshot:
        """What `bulk` would be done to now: for those who ask somebody first, and then do it to that and no more::

            found = queue.snapshot("delete", "scheduled")
            if ask(f"delete {found.total} jobs?"):
                for step in queue.bulk("delete", "scheduled", before=found):
                    ...

        It remembers up to a million jobs that are not due, with 8 bytes each; of more, `bulk` is told only the time.

        Raises:
            As `bulk`.
        """
        done, meant = self._meant(action, JobFilter.of(wanted, options), None, now)
        if meant.before is not None:
            raise ConfigError("before: a snapshot is of what there is now")
        return snapshot(self._shards, done, meant)

    def count(
        self,
        action: ActionName,
        wanted: JobFilter | State | None = None,
        /,
        *,
        now: float | None = None,
        **options: Unpack[FilterOptions],
    ) -> int:
        """To how many jobs `bulk` would do something, were it to begin now. Patterns look at every id.

        Raises:
            As `bulk`.
        """
        steps = self.bulk(action, JobFilter.of(wanted, options), now=now)
        return next(step.total for step in steps if not step.counting)

    def _meant(
        self, action: ActionName, wanted: JobFilter, reason: str | None, now: float | None
    ) -> tuple[Action, JobFilter]:
        if action not in ACTIONS:
            raise ConfigError(f"action={action!r}: it is one of {', '.join(ACTIONS)}")
        if reason is not None and action != "bury":
            raise ConfigError(f"reason={reason!r}: only bury takes a reason, not {action}")
        meant = meant_by(action, wanted)
        where = ("morgue" if meant.state == "morgue" else "waiting") if action == "delete" else ""
        return Action(
            action, time_argument(now), self._reason(reason), where, self._backend.events_of(self.name)
        ), meant

    def kick_oldest(self, count: int) -> Acted:
        """Kicks so many jobs of the morgue, over all shards: those that were buried first.

        Raises:
            ConfigError: count is no whole number of 0 or more. UnknownQueueError, RedisUnavailable: as `kick`.
        """
        given: object = count
        if isinstance(given, bool) or not isinstance(given, int) or given < 0:
            raise ConfigError(f"count={count!r:.100} must be a whole number, 0 or more")
        acted = Acted()
        while acted.done < count:
            some = min(count - acted.done, OLDEST_TOGETHER)
            queues = dict.fromkeys(self._shards.prefixes, self.name)
            *_, places = Search(self._shards.client, queues, JobFilter("morgue"), some).find()
            kicked = self.kick([decode_id(job_id) for *_, job_id in places])
            acted += kicked
            if not kicked.done:
                break
        return acted

    def release_all(self) -> int:
        """What is in flight of holders that are gone waits again at once, charged with a crash, though nobody is there
        who would take over; returns how many jobs that is. What living holders have stays theirs: they may be in the
        middle of it. A holder that died is gone when its lease has run out.

        Raises:
            UnknownQueueError, RedisUnavailable: call it again.
        """
        options = self._register(anew=True)
        return release_all(self._shards, options.max_crash_count)

    # --- the whole queue ---

    def pause(self, *, by: str = "", now: float | None = None) -> bool:
        """No more jobs are taken until `resume`; those in flight are finished, and pushing goes on.

        ``by``: who does it, for those who wonder. Returns whether that changed anything.

        Raises:
            UnknownQueueError, RedisUnavailable: some shards may be paused.
        """
        return pause_queue(self._shards, True, by, now)

    def resume(self) -> bool:
        """Ends a pause. Returns whether that changed anything.

        Raises:
            UnknownQueueError, RedisUnavailable: some shards may still be paused.
        """
        return pause_queue(self._shards, False)

    def clear(self) -> int:
        """Deletes all jobs that wait, are retried, or are buried when it begins, in bounded steps; returns how many. An
        id in flight keeps all it has, and the queue stays what it is. `drop` removes that, too.

        Raises:
            UnknownQueueError, RedisUnavailable: call it again.
        """
        done = 0
        for state in (None, "morgue"):
            reached = 0
            for step in self.bulk("delete", state):
                reached = step.done
            done += reached
        return done

    def drop(self) -> int:
        """Removes the queue with all its jobs, waiting, buried or left behind by a dead node, for good.

        Returns how many jobs that were. Nobody may push meanwhile: what is pushed into a part that has been removed
        already makes the queue anew.

        Raises:
            QueueInUse: a node holds a shard of it. Nothing was removed, unless the node came meanwhile.
            UnknownQueueError, RedisUnavailable: call it again.
        """
        removed = drop_queue(self._shards)
        self._backend.registrations.forget()
        self._last_target = None
        return removed

    def reshard(
        self,
        shards_count: int,
        *,
        on_progress: Callable[[ReshardProgress], object] | None = None,
        by: str = "",
        unconfirmed: bool = False,
    ) -> ReshardProgress | None:
        """Gives the queue another number of shards while it is used: pushing goes on, order holds, nothing is lost. An
        id rests only while the shards are moved that feed its new one. It may end at any moment: call it again with the
        same number to go on.

        What is moved is deleted where it was once as many replicas have confirmed it as the primary had at the
        beginning; without them it waits. ``unconfirmed``: it does not, and a failover may lose jobs.

        ``on_progress``: called with a `ReshardProgress` now and then. ``by``: who does it, for people. Returns the last
        of these; None: the queue has so many shards already, and what a failover may have lost of that was in order.

        Raises:
            ConfigError: shards_count is out of range, or a node that serves the queue is strict about it. Resharding:
            it is being resharded to another number. UnknownQueueError, RedisUnavailable, RedisRefused: call it again.
        """
        progress: ReshardProgress | None = None
        for progress in reshard(self._backend, self.name, shards_count, by=by, unconfirmed=unconfirmed):
            if on_progress is not None:
                on_progress(progress)
        return progress if progress is not None and progress.is_done else None

    def reshard_progress(self) -> ReshardProgress | None:
        """How far the reshard is that is under way, whoever does it; None: none is.

        Raises:
            UnknownQueueError, RedisUnavailable
        """
        return reshard_progress(self._backend, self.name)
