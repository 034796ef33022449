"""A queue over all its shards: the handle that producers and people hold. Looking is in `queries`."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from heapq import nsmallest
from typing import Any, Unpack

from lowq.admin.actions import ACTIONS, CHANGED, MAX_IDS, Acted, Action, ActionName, act, attempt, attempt_all
from lowq.admin.bulk import Step, bulk, meant_by, snapshot
from lowq.admin.release import release_all
from lowq.backend import Backend
from lowq.codec import decode_id, lookup_id
from lowq.consumer import AsyncConsumer, Consumer
from lowq.errors import ConfigError, LowqError, QueueInUse, UnknownQueueError
from lowq.fresh_id import fresh_id
from lowq.group_commit import GRACE, limit_of_caller, no_answer
from lowq.inspection.calls import TOGETHER, ask
from lowq.inspection.job_filter import FilterOptions, JobFilter, Snapshot
from lowq.inspection.queries import Queries, as_ids
from lowq.job import JobDict, JobId, State
from lowq.producer import Jobs, Target, apush, push
from lowq.queue_options import QueueOptions, room_timeout
from lowq.settings import dump_text
from lowq.shared_lookup import SharedLookup
from lowq.store import Call, Command, untrusted
from lowq.store.keys import history_key, queues_key
from lowq.store.scripts import time_argument, time_of

#: perform_at and the time of burial of an id's jobs: Unix time, seconds; None: none waits, or is buried.
Moments = tuple[float | None, float | None]

#: Ids that are gathered before any of them is sent: with many shards, a call for a few ids each would be slow.
MAX_GATHERED = 5000
#: Shards that are paused in one write.
TOGETHER_PAUSED = 200
#: Jobs of the morgue that `kick_oldest` looks for at once.
OLDEST_TOGETHER = 1000
#: Jobs of one kind that one step of `drop` removes.
DROP_JOBS = 500


class Queue(Queries):
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
        #: Registers the queue for coroutines, with nobody's limit but push_timeout: its outcome is for all of them.
        self._target_lookup = SharedLookup()

    # --- producing ---

    def push(
        self,
        jobs: Jobs,
        on_progress: Callable[[int], object] | None = None,
        *,
        timeout: float | timedelta | None = None,
    ) -> int:
        """Pushes one job or any iterable of jobs, streamed in chunks; returns the number of payloads accepted.

        ``on_progress`` is called with the number accepted so far. ``timeout``: seconds, or a timedelta, to wait for
        room at most when the queue has reached its ``capacity``; without it that raises at once.

        Raises:
            JobError, PayloadError: a job is malformed; nothing of its chunk was written.
            PushError: Redis failed, or a later chunk was malformed: it says how many are in and carries the rest.
            QueueFull: there was no room for some jobs; it says how many are in and carries the rest.
            ShardsCountError: the queue exists with another number of shards; nothing was written.
            UnknownQueueError: nobody has used the queue yet, and the number of its shards was not given.
            ConfigError: timeout is no length of time.
        """
        return push(self._target(), jobs, on_progress, None if timeout is None else room_timeout(timeout))

    async def apush(
        self,
        jobs: Jobs,
        on_progress: Callable[[int], object] | None = None,
        *,
        timeout: float | timedelta | None = None,
    ) -> int:
        """`push` from async code. Small pushes of coroutines that meet leave together in one write. ``on_progress`` may
        be called in another thread.

        When it is cancelled before its jobs were sent, nothing is written; otherwise they may be in.

        Raises:
            As `push`.
        """
        seconds = None if timeout is None else room_timeout(timeout)
        target = self._present_target()
        if target is None or self._target_lookup.is_under_way():
            target = await self._find_target()
        return await apush(target, jobs, on_progress, seconds)

    def _present_target(self) -> Target | None:
        """Where jobs go, as long as that is what it was; None: it is to be found out."""
        target = self._last_target
        # Everything is entered anew after the registry was lost or the queue was dropped.
        if target is None or target.group is not self._backend.group_for(self.name, target.shards_count):
            return None
        return target

    async def _find_target(self) -> Target:
        """`_target` for a coroutine: Redis is asked in a thread. Each caller waits as long as it would for its push."""
        config = self._backend.config
        timeout, is_limited_by_batch = limit_of_caller(config.push_timeout)
        try:
            return await self._target_lookup.get(
                self._present_target, self._target, timeout + GRACE, config.push_timeout + GRACE
            )
        except TimeoutError:
            raise no_answer(config.redis_url, config.push_timeout, of_batch=is_limited_by_batch) from None

    def _target(self) -> Target:
        target = self._present_target()
        if target is not None:
            return target
        backend = self._backend
        options = self._register()
        target = Target(
            backend.group,
            backend.config,
            self.name,
            options.shards_count,
            self._worker or self.name,
            options,
            backend.events_of(self.name),
            options.push_words(),
        )
        self._last_target = target
        return target

    def _register(self, *, anew: bool = False) -> QueueOptions:
        """Enters the queue in the registry, if need be, and returns its options. ``anew``: as they are there now."""
        try:
            count = self.shards_count
        except UnknownQueueError as error:
            hint = f"Its first producer says how many shards it gets: app.queue({self.name!r}, shards_count=5)"
            raise UnknownQueueError(f"{error}. {hint}") from None
        return self._backend.register(self.name, count, self._worker, self._declared, anew=anew)

    def put(
        self,
        payload: Any = "",
        *,
        score: float | None = None,
        perform_at: float | datetime | None = None,
        delay: float | timedelta | None = None,
        ttl: float | timedelta | None = None,
        priority: int | None = None,
        timeout: float | timedelta | None = None,
    ) -> str:
        """Pushes a job of its own, with a fresh id, and returns that: a UUIDv7, so later ones sort behind earlier ones.
        For payloads that belong to no entity. ``timeout`` is as of `push`, the rest as of a `JobDict`; None is what a
        job has that says nothing.

        Raises:
            As `push`. After a RedisUnavailable the job may be in, under an id that nobody knows.
        """
        job = _job(payload, score, perform_at, delay, ttl, priority)
        self.push(job, timeout=timeout)
        return str(job["id"])

    async def aput(
        self,
        payload: Any = "",
        *,
        score: float | None = None,
        perform_at: float | datetime | None = None,
        delay: float | timedelta | None = None,
        ttl: float | timedelta | None = None,
        priority: int | None = None,
        timeout: float | timedelta | None = None,
    ) -> str:
        """`put` from async code."""
        job = _job(payload, score, perform_at, delay, ttl, priority)
        await self.apush(job, timeout=timeout)
        return str(job["id"])

    # --- consuming ---

    def consumer(self, *, ttr: float | timedelta | None = None, session: str | None = None) -> Consumer:
        """Takes jobs by hand, without a worker::

            with queue.consumer(ttr=60) as consumer:
                for job in consumer.take(limit=10, timeout=5):
                    job.ack()

        It is a member that shares the shards with nodes and other consumers: of its shards nobody else takes, so it
        is to take as long as it is open. ``ttr`` (by default that of the queue) and ``session`` are as of `Consumer`.

        Raises:
            UnknownQueueError, and what `Consumer` raises.
        """
        return Consumer(self._backend, self._register(anew=True), ttr=ttr, session=session)

    def aconsumer(self, *, ttr: float | timedelta | None = None, session: str | None = None) -> AsyncConsumer:
        """As `consumer`, for coroutines: ``async with queue.aconsumer() as consumer``, and every verb is awaited."""
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
        found: dict[str, Moments] = {}
        for prefix, some in self._gathered(ids):
            for job_id, moments in zip(some, self._moments(prefix, some)[1], strict=True):
                found[decode_id(job_id)] = moments
        return found

    def _moments(self, prefix: str, ids: Sequence[bytes]) -> tuple[float, list[Moments]]:
        """The server's time, and what the ids of a shard have at that moment or a little later."""
        lookups = [("ZMSCORE", prefix + name, *ids) for name in ("due", "morgue")]
        time, waiting, buried = self._client.commands([("TIME",), *lookups], key=prefix)
        times = map(untrusted.perform_at, waiting), map(untrusted.finite, buried)
        return time_of(time), list(zip(*times, strict=True))

    def _act(
        self, action: Action, ids: JobId | Iterable[JobId], unchanged: Mapping[str, Moments] | None = None
    ) -> Acted:
        acted = Acted()
        action = action._replace(events=self._backend.events_of(self.name))
        try:
            for prefix, some in self._gathered(ids):
                if unchanged is None:
                    acted += act(self._client, prefix, action, some)
                else:
                    acted += self._act_on_unchanged(prefix, action, some, unchanged)
        except LowqError as error:
            error.done += acted.done
            raise
        return acted

    def _act_on_unchanged(
        self, prefix: str, action: Action, ids: Sequence[bytes], unchanged: Mapping[str, Moments]
    ) -> Acted:
        now, found = self._moments(prefix, ids)
        # What is pushed or buried from here on is later than `now`. A job that is not due has no such bound: between
        # this look and the call another one may take its place, if it is for no later time.
        due: list[bytes] = []
        later: list[tuple[float, bytes]] = []
        changed: list[tuple[str, str]] = []
        for job_id, moments in zip(ids, found, strict=True):
            name = decode_id(job_id)
            if moments != unchanged.get(name):
                changed.append((name, CHANGED))
            elif moments[0] is not None and moments[0] > now:
                later.append((moments[0], job_id))
            else:
                due.append(job_id)
        acted = Acted(missing=len(changed), left=tuple(changed))
        if due:
            acted += act(self._client, prefix, action, due, repr(now))
        if later:
            acted += act(self._client, prefix, action, [job_id for _, job_id in later], repr(max(later)[0]))
        return acted

    def _gathered(self, ids: JobId | Iterable[JobId]) -> Iterator[tuple[str, list[bytes]]]:
        """The ids by their shards, some at a time."""
        gathered: dict[str, list[bytes]] = defaultdict(list)
        count = 0
        for job_id in as_ids(ids):
            encoded = lookup_id(job_id)
            prefix = self._prefix_of(encoded)
            shard_ids = gathered[prefix]
            shard_ids.append(encoded)
            count += 1
            if len(shard_ids) == MAX_IDS:
                yield prefix, gathered.pop(prefix)
                count -= MAX_IDS
            elif count >= MAX_GATHERED:
                yield from gathered.items()
                gathered.clear()
                count = 0
        yield from gathered.items()

    def _reason(self, reason: str | None) -> bytes:
        if reason is None:
            return b""
        # Forms and command lines bring bytes that are no UTF-8 as surrogates, which no dump_error could encode.
        return dump_text(self._backend.config, reason.encode("utf-8", "backslashreplace").decode())

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
        say. Who stops iterating stops it, whether or not anything was found yet.

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
        return bulk(lambda: self._client, self._prefixes, done, meant)

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
        return snapshot(lambda: self._client, self._prefixes, done, meant)

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
            looks = [
                Command(prefix, "ZRANGE", f"{prefix}morgue", 0, some - 1, "WITHSCORES") for prefix in self._prefixes
            ]
            buried: list[tuple[float, bytes]] = []
            for start in range(0, len(looks), TOGETHER):
                for reply in self._client.run_many(looks[start : start + TOGETHER]):
                    if isinstance(reply, Exception):
                        raise reply
                    buried += zip(map(float, reply[1::2]), reply[::2], strict=True)
                buried = nsmallest(some, buried)
            kicked = self.kick([decode_id(job_id) for _, job_id in buried])
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
        return release_all(
            self._client, self.name, self._prefixes, shards_count=options.shards_count,
            max_crash_count=options.max_crash_count,
        )  # fmt: skip

    # --- the whole queue ---

    def pause(self, *, by: str = "", now: float | None = None) -> bool:
        """No more jobs are taken until `resume`; those in flight are finished, and pushing goes on.

        ``by``: who does it, for those who wonder. Returns whether that changed anything.

        Raises:
            UnknownQueueError, RedisUnavailable: some shards may be paused.
        """
        return self._pause("1", by, now)

    def resume(self) -> bool:
        """Ends a pause. Returns whether that changed anything.

        Raises:
            UnknownQueueError, RedisUnavailable: some shards may still be paused.
        """
        return self._pause("", "", None)

    def _pause(self, pause: str, by: str, now: float | None) -> bool:
        calls = [partial(_pause_call, prefix, time_argument(now), pause, by[:200]) for prefix in self._prefixes]
        changed = False
        for start in range(0, len(calls), TOGETHER_PAUSED):
            for reply in attempt_all(self._client, calls[start : start + TOGETHER_PAUSED]):
                if isinstance(reply, Exception):
                    raise reply
                changed = changed or reply == 1
        return changed

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
        prefixes = self._prefixes
        for shard, (state, _) in enumerate(self._drop_replies(prefixes)):
            self._refuse_in_use(shard, state)
        removed = 0
        for shard, prefix in enumerate(prefixes):
            state = 0
            while state != 1:
                state, number = attempt(self._client, partial(_drop_call, prefix, DROP_JOBS, ""))
                self._refuse_in_use(shard, state)
                removed += number
        namespace = self._backend.config.namespace
        self._client.command("UNLINK", history_key(namespace, self.name), key=history_key(namespace, self.name))
        key = queues_key(namespace)
        self._client.command("HDEL", key, self.name, key=key)
        self._backend.forget_registered()
        self._known_shards_count = self._given_shards_count
        self._last_target = None
        return removed

    def _drop_replies(self, prefixes: list[str]) -> Iterator[list[int]]:
        return ask(self._client, [_drop_call(prefix, 0, "1", "") for prefix in prefixes], TOGETHER)

    def _refuse_in_use(self, shard: int, state: int) -> None:
        if state == 2:
            raise QueueInUse(
                f"queue {self.name!r} can't be dropped: a node holds its shard {shard}. Stop the nodes that work it "
                "first (a dead node's lease runs out by itself), then drop it"
            )


def _pause_call(prefix: str, now: str, pause: str, by: str, attempt: str) -> Call:
    return Call("pause", prefix, [now, attempt, pause, by])


def _drop_call(prefix: str, jobs: int, asks: str, attempt: str) -> Call:
    return Call("drop", prefix, ["", attempt, jobs, asks])


def _job(
    payload: Any,
    score: float | None,
    perform_at: float | datetime | None,
    delay: float | timedelta | None,
    ttl: float | timedelta | None,
    priority: int | None,
) -> JobDict:
    """A job with a fresh id."""
    job: JobDict = {"id": fresh_id(), "payload": payload}
    if score is not None:
        job["score"] = score
    if perform_at is not None:
        job["perform_at"] = perform_at
    if delay is not None:
        job["delay"] = delay
    if ttl is not None:
        job["ttl"] = ttl
    if priority is not None:
        job["priority"] = priority
    return job
