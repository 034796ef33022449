"""The acting half of a queue's handle, and the same over all queues: each method is a line or two over the function
that does the work.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Unpack

from lowq.backend import Backend
from lowq.codec import decode_id
from lowq.codec.payloads import dump_text
from lowq.errors import ConfigError
from lowq.job import JobId, State
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
)
from lowq.operate.bulk import Step, Target, bulk, filter_for, snapshot
from lowq.operate.job_filter import FilterOptions, FilterState, JobFilter, Snapshot
from lowq.operate.jobs import FoundPage, pages_of_all, refuse_shard
from lowq.operate.layout_switch import ReshardProgress, reshard_progress
from lowq.operate.queries import Queries
from lowq.operate.reshard import reshard
from lowq.operate.walk import Search
from lowq.options import kind
from lowq.store import Client
from lowq.store.calls import time_argument, time_of

#: Jobs of the morgue that `Commands.kick_oldest` looks for at once.
OLDEST_TOGETHER = 1000
_COUNT = kind("a whole number, 0 or more", lambda value: type(value) is int and value >= 0)


class Commands(Queries):
    """Actions of people on a queue and its jobs. Safe for threads."""

    # --- single jobs ---

    def perform_now(self, ids: JobId | Iterable[JobId], *, now: float | None = None) -> Acted:
        """Makes waiting jobs due now. Their retry_count stays. ``ids``: one id, or any iterable of ids, which is
        streamed.

        Raises:
            JobError: an id is malformed; the ids before it are done. UnknownQueueError, RedisUnavailable. The error's
            ``done`` is the number of jobs that it was certainly done to.
        """
        return self._act(Action("perform_now", time_argument(now)), ids)

    def bury(
        self, ids: JobId | Iterable[JobId], reason: str | None = None, *,
        unchanged: Mapping[str, Moments] | None = None, now: float | None = None,
    ) -> Acted:  # fmt: skip
        """Moves waiting jobs to the morgue. ``reason``: for people; by default the last error of each job.
        ``unchanged``: an earlier answer of `moments`; ids that have changed since are left alone, and count as missing.

        Raises:
            ConfigError: reason is no text. JobError, UnknownQueueError, RedisUnavailable: as `perform_now`.
        """
        return self._act(Action("bury", time_argument(now), self._reason(reason)), ids, unchanged)

    def kick(self, ids: JobId | Iterable[JobId], *, now: float | None = None) -> Acted:
        """Moves jobs out of the morgue. They merge with the waiting job of the same id, start afresh and are due now.

        Raises:
            JobError, UnknownQueueError, RedisUnavailable: as `perform_now`.
        """
        return self._act(Action("kick", time_argument(now)), ids)

    def delete(self, ids: JobId | Iterable[JobId], *, unchanged: Mapping[str, Moments] | None = None) -> Acted:
        """Removes jobs for good, waiting and buried ones alike. Ids in flight are left alone. ``unchanged``: as of
        `bury`.

        Raises:
            JobError, UnknownQueueError, RedisUnavailable: as `perform_now`.
        """
        return self._act(Action("delete"), ids, unchanged)

    def cancel(self, ids: JobId | Iterable[JobId]) -> Acted:
        """Ends jobs as they are now: those that wait are deleted, also what waits of an id in flight, and those in
        flight are told to end. An async handler gets `asyncio.CancelledError`, one in a thread `JobCancelled`; a call
        that blocks in C is reached when it returns. Whatever becomes of it then, nothing of it waits again, unless it
        finishes first. The morgue is left alone.

        It does not wait for that end. ``.signalled`` of the result is how many were in flight, ``.running`` which ids.

        Raises:
            JobError, UnknownQueueError, RedisUnavailable: as `perform_now`.
        """
        return self._act(Action("cancel"), ids)

    def moments(self, ids: JobId | Iterable[JobId]) -> dict[str, Moments]:
        """id -> the perform_at and the time of burial of its jobs, None where it has none. An id has changed when
        either of them has.

        Raises:
            JobError: an id is malformed. UnknownQueueError, RedisUnavailable
        """
        return read_moments(self._shards, ids)

    def _act(
        self, action: Action, ids: JobId | Iterable[JobId], unchanged: Mapping[str, Moments] | None = None
    ) -> Acted:
        return act_on(self._shards, action._replace(events=self._backend.events_of(self.name)), ids, unchanged)

    def _reason(self, reason: str | None) -> bytes:
        if reason is None:
            return b""
        if not isinstance(reason, str):
            raise ConfigError(f"reason={reason!r:.100}: it is a text")
        # Forms and command lines bring bytes that are no UTF-8 as surrogates, which no dump_error could encode.
        return dump_text(self._backend.config.dump_error, reason.encode("utf-8", "backslashreplace").decode())

    # --- many jobs ---

    def bulk(
        self, action: ActionName, wanted: JobFilter | FilterState | None = None, /, *, reason: str | None = None,
        now: float | None = None, **options: Unpack[FilterOptions],
    ) -> Iterator[Step]:  # fmt: skip
        """Acts on all jobs of a kind that are there when it begins, step by step as it is iterated over::

            for step in queue.bulk("kick", match="4*"):
                print(step.done, "of", step.total)

        ``action``: perform_now, bury, kick, delete or cancel. ``reason``: of bury. The jobs are given as a state, as
        the fields of a `JobFilter` by their names, or as a `JobFilter`. None means all waiting jobs; kick is for the
        morgue, delete for either. Cancel is for what waits and for what is in flight ("taken"), without a state for
        both: an id that matches is cancelled, as of `cancel`. With a ``priority`` only waiting jobs match. ``min`` and
        ``max`` bound perform_at, in the morgue buried_at, both included; ``older_than`` and ``newer_than`` do so by its
        age. To undo a backfill that was pushed with a priority of its own::

            queue.bulk("delete", priority=9, newer_than=timedelta(hours=2))

        ``before``: later jobs are left alone. An earlier `snapshot` is exact. With a time (Unix time, seconds), nothing
        tells new jobs from old ones in shards that got a push since then; there, jobs that were not due by that time
        are left alone, also when they have become due since. Jobs that were in flight then and have failed since may be
        acted on. An id that waited by then is an old job, also when another payload of it came later.

        Patterns, and scheduled or retrying jobs, must be searched for: the first steps only count (`Step.counting`).
        With ``payload``, ``error`` and ``error_group`` each job is also read, twice: for the count, and before it is
        acted on. To stop it, stop iterating.

        It ends even while producers push and kicked jobs keep failing: jobs that are buried or pushed after the
        beginning are left alone, except that a job pushed meanwhile *for later* may be taken for one that was scheduled
        already. Jobs in flight are left alone, but for cancel. With perform_now, jobs that are due already are neither
        touched nor counted. Scheduled jobs that become due before their turn may be left alone while others are being
        pushed, since nothing tells them from new ones. Call it again to have those too.

        Raises:
            ConfigError: a wrong argument; or, when it is iterated over, ``before`` lies in the future. Resharding:
            jobs of it are being moved. UnknownQueueError, RedisUnavailable
        """
        return bulk(*_targets([self], action, JobFilter.of(wanted, options), reason, now))

    def snapshot(
        self, action: ActionName, wanted: JobFilter | FilterState | None = None, /, *, now: float | None = None,
        **options: Unpack[FilterOptions],
    ) -> Snapshot:  # fmt: skip
        """The jobs that `bulk` would act on now. Ask for confirmation, then act on exactly these::

            found = queue.snapshot("delete", "scheduled")
            if ask(f"delete {found.total} jobs?"):
                for step in queue.bulk("delete", "scheduled", before=found):
                    ...

        It remembers up to a million jobs that are not due, with 8 bytes each. With more, `bulk` goes by the time.

        Raises:
            As `bulk`.
        """
        return _snapshot(self._shards.client, [self], action, JobFilter.of(wanted, options), now)

    def count(
        self, action: ActionName, wanted: JobFilter | FilterState | None = None, /, *, now: float | None = None,
        **options: Unpack[FilterOptions],
    ) -> int:  # fmt: skip
        """How many jobs `bulk` would act on now. Patterns look at every id.

        Raises:
            As `bulk`.
        """
        return _total(self.bulk(action, JobFilter.of(wanted, options), now=now))

    def kick_oldest(self, count: int) -> Acted:
        """Kicks ``count`` jobs of the morgue, over all shards: those that were buried first.

        Raises:
            ConfigError: count is no whole number, 0 or more. UnknownQueueError, RedisUnavailable: as `kick`.
        """
        count = _COUNT.check("", "count", count)
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

    # --- the whole queue ---

    def pause(self, *, by: str = "", now: float | None = None) -> bool:
        """Stops the queue's jobs from being taken until `resume`. Jobs in flight are finished, and pushing goes on.

        ``by``: who paused it, for people. Returns whether that changed anything.

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
        """Deletes all jobs that wait, are retried, or are buried when it begins, in bounded steps; returns how many.
        Ids in flight are left alone. The queue stays; `drop` removes it, too.

        Raises:
            UnknownQueueError, RedisUnavailable: call it again.
        """
        done: dict[State | None, int] = {}
        states: tuple[State | None, ...] = None, "morgue"
        for state in states:
            for step in self.bulk("delete", state):
                done[state] = step.done
        return sum(done.values())

    def drop(self) -> int:
        """Removes the queue with all its jobs, waiting, buried or left behind by a dead node, for good. Returns the
        number of jobs. Nobody may push meanwhile: a push to a shard that has been removed already makes the queue anew.

        Raises:
            QueueInUse: a node holds a shard of it. Nothing was removed, unless the node came meanwhile.
            UnknownQueueError, RedisUnavailable: call it again.
        """
        removed = drop_queue(self._shards)
        self._backend.registrations.forget()
        return removed

    def reshard(
        self,
        shards_count: int,
        *,
        on_progress: Callable[[ReshardProgress], object] | None = None,
        by: str = "",
        unconfirmed: bool = False,
    ) -> ReshardProgress | None:
        """Changes the number of shards while the queue is used: pushing goes on, order holds, nothing is lost. An id
        rests only while the shards that feed its new shard are moved. It may end at any moment: call it again with the
        same number to go on.

        A source is deleted once as many replicas have confirmed its jobs as its primary has, or had since the
        beginning; until then the reshard waits. ``unconfirmed``: it does not wait, and a failover may lose jobs.

        ``on_progress``: called with a `ReshardProgress` now and then. ``by``: who does it, for people. Returns the last
        progress; None: the queue has so many shards already, and what a failover may have lost of a reshard was in
        order.

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
        """The progress of the reshard that is under way, in whatever process; None: none is.

        Raises:
            UnknownQueueError, RedisUnavailable
        """
        return reshard_progress(self._backend, self.name)


class AllQueues(Backend):
    """The jobs of all queues of an application: listed, and acted on. Safe for threads."""

    @abstractmethod
    def _handles(self, names: Iterable[str] | None) -> Sequence[Commands]:
        """The handles of these queues; None: of all that were ever used."""

    def jobs(
        self, wanted: JobFilter | FilterState | None = None, /, *, queues: Iterable[str] | None = None,
        limit: int = 50, after: str | None = None, **options: Unpack[FilterOptions],
    ) -> FoundPage:  # fmt: skip
        """A page of the jobs of all queues, or of these, in one order: by time or by ``order_by``, then by queue and
        id. Otherwise as `Queue.jobs`.

        Raises:
            ConfigError: a wrong argument; the message names the right ones. UnknownQueueError, RedisUnavailable
        """
        *_, page = self.jobs_in_steps(wanted, queues=queues, limit=limit, after=after, interval=math.inf, **options)
        return page

    def jobs_in_steps(
        self, wanted: JobFilter | FilterState | None = None, /, *, queues: Iterable[str] | None = None,
        limit: int = 50, after: str | None = None, interval: float = 0.25, redact: Callable[[Any], Any] | None = None,
        **options: Unpack[FilterOptions],
    ) -> Iterator[FoundPage]:  # fmt: skip
        """As `jobs`, for filters that look into jobs: the page so far, about every ``interval`` seconds, and at last
        the page itself. ``redact`` is applied to payloads before they are compared with the filter.

        Raises:
            LowqError: as `jobs`.
        """
        shards = [handle._shards for handle in self._handles(queues)]
        meant = JobFilter.of(wanted, options)
        return pages_of_all(shards, meant, limit=limit, after=after, interval=interval, redact=redact)

    def bulk(
        self, action: ActionName, wanted: JobFilter | FilterState | None = None, /, *,
        queues: Iterable[str] | None = None, reason: str | None = None, **options: Unpack[FilterOptions],
    ) -> Iterator[Step]:  # fmt: skip
        """Acts on the jobs of all queues, or of these, that match, queue by queue. Otherwise as `Queue.bulk`. To retry
        all that failed with one error::

            for step in app.bulk("kick", error_group="0c1d2e3f4a5b"):
                print(step.done, "of", step.total)

        Raises:
            ConfigError: as of `Queue.bulk`; or ``shard``, which only makes sense within a queue. UnknownQueueError,
                RedisUnavailable
        """
        return bulk(*_targets(self._handles(queues), action, JobFilter.of(wanted, options), reason, None))

    def snapshot(
        self, action: ActionName, wanted: JobFilter | FilterState | None = None, /, *,
        queues: Iterable[str] | None = None, **options: Unpack[FilterOptions],
    ) -> Snapshot:  # fmt: skip
        """The jobs that `bulk` would act on now, for its ``before``.

        Raises:
            LowqError: as `bulk`.
        """
        return _snapshot(self.client, self._handles(queues), action, JobFilter.of(wanted, options), None)

    def count(
        self, action: ActionName, wanted: JobFilter | FilterState | None = None, /, *,
        queues: Iterable[str] | None = None, **options: Unpack[FilterOptions],
    ) -> int:  # fmt: skip
        """How many jobs `bulk` would act on now.

        Raises:
            LowqError: as `bulk`.
        """
        return _total(self.bulk(action, JobFilter.of(wanted, options), queues=queues))


def _total(steps: Iterable[Step]) -> int:
    """How many jobs a bulk action has counted before it does anything."""
    return next(step.total for step in steps if not step.counting)


def _targets(
    handles: Sequence[Commands], action: ActionName, wanted: JobFilter, reason: str | None, now: float | None
) -> tuple[list[Target], JobFilter]:
    """What is done to the jobs of each of these queues, and to which ones."""
    if action not in ACTIONS:
        raise ConfigError(f"action={action!r}: it is one of {', '.join(ACTIONS)}")
    if reason is not None and action != "bury":
        raise ConfigError(f"reason={reason!r}: only bury takes a reason, not {action}")
    if len(handles) != 1:
        refuse_shard(wanted)
    if handles:
        client = handles[0]._shards.client
        wanted = wanted.aged(lambda: time_of(client.command("TIME")) if now is None else now)
    meant = filter_for(action, wanted)
    where = ("morgue" if meant.state == "morgue" else "waiting") if action == "delete" else ""
    act = Action(action, time_argument(now), where=where)
    return [
        (each._shards, act._replace(reason=each._reason(reason), events=each._backend.events_of(each.name)))
        for each in handles
    ], meant


def _snapshot(
    client: Client, handles: Sequence[Commands], action: ActionName, wanted: JobFilter, now: float | None
) -> Snapshot:
    if wanted.before is not None:
        raise ConfigError("before: a snapshot is of what there is now")
    return snapshot(client, *_targets(handles, action, wanted, None, now), time_argument(now))
