"""Bulk actions: an action on all jobs that a filter admits, in short steps, and only on those there when it began.

The server's time at the beginning and the order of the sets tell these jobs from later ones:

- The morgue is sorted by the time of burial. Later burials than the beginning are not looked at: kicked jobs that keep
  failing come back behind the end.
- Waiting jobs are sorted by perform_at. Jobs that were due at the beginning are not after that moment, and later pushes
  are. They come first.
- Scheduled jobs follow, up to the latest perform_at that there was. New jobs arrive in this part, too, and only one
  rule tells them from old ones: a push "for now" is never later than now. So the walk keeps ahead of the clock, and
  leaves alone what lies between the beginning and now, unless nothing was pushed to the shard meanwhile. A job that
  becomes due before its turn may be left alone, as if a worker had been quicker. A job that is pushed meanwhile *for
  later* may be acted on. No more than twice as many jobs as there were are looked at, so this part ends in any case.

An action that people confirm begins later than their look at the jobs. ``before`` is the time of that look, and jobs
that came since are left alone:

- Burials are bounded by their time, and jobs that were due by their perform_at: a push gives no job a perform_at before
  the push.
- The perform_at of a job that was not due doesn't tell when it came. A `Snapshot` remembers these jobs, id and
  perform_at, so exactly these are acted on. With a bare time, they are acted on only in shards without a push since, by
  the shard's clock, and only while they are not due.

An id that waited then is an old job, also when another payload of it has come since.

A cancel looks at what is in flight last, so that it meets what was taken meanwhile. Of these its time tells what was
there when it began: what was not due then, and has been taken since, is left alone.

All of this goes by the server's time. If that steps back behind the beginning while the action runs, jobs that are
pushed or buried then look older than they are, and are acted on.
"""

import math
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

from lowq.errors import ConfigError
from lowq.job import State
from lowq.operate.actions import MAX_IDS, Action, ActionName, act_where_it_is
from lowq.operate.job_filter import JobFilter, Snapshot, fingerprint, new_salt
from lowq.operate.jobs import MAX_PAGE_BYTES, look_up
from lowq.operate.queues import QueueShards
from lowq.operate.walk import FURTHER_LEVELS, Scan, Walk, ask, bound
from lowq.store import Call, Client
from lowq.store.calls import time_of
from lowq.store.shard_operations import BoundsReply, ScanReply, ShardOperations


@dataclass(frozen=True, slots=True)
class Step:
    """The progress of a bulk action. `done` never shrinks."""

    #: Jobs that it was done to.
    done: int
    #: Jobs that there were when it began. `done` may stay below: workers may be quicker, and jobs be in flight.
    total: int
    #: They are still being counted, as patterns and some states need it: nothing is done yet, and `total` may change.
    counting: bool = False


#: Jobs that a `Snapshot` remembers at most, at 8 bytes each.
MAX_REMEMBERED = 1_000_000
_WAITING: tuple[State, ...] = ("scheduled", "due", "retrying")
#: The states of each action. Without a state it acts on all that wait, cancel on what is in flight, too; kick on the
#: morgue.
STATES_OF: dict[str, tuple[State, ...]] = {
    "perform_now": _WAITING,
    "bury": _WAITING,
    "kick": ("morgue",),
    "delete": (*_WAITING, "morgue"),
    "cancel": (*_WAITING, "taken"),
}


def filter_for(action: ActionName, wanted: JobFilter) -> JobFilter:
    """The jobs that an action acts on if it is given this filter, in the order of time.

    Raises:
        ConfigError: the action does nothing to jobs in that state, or they are bounded by something else than time.
    """
    allowed = STATES_OF[action]
    if wanted.state is not None and wanted.state not in allowed:
        hint = {
            "kick": ", which is also its default", "cancel": "; without a state: all that wait or are in flight",
        }.get(action, "; without a state: all that wait")  # fmt: skip
        raise ConfigError(
            f"{action} can't be done to jobs with state={wanted.state!r}; state is one of: {', '.join(allowed)}{hint}"
        )
    if wanted.asks_for_errors and wanted.order == "retry_count" and wanted.low <= 0 and wanted.high == math.inf:
        wanted = replace(wanted, min=None, max=None)  # a job with an error has failed
    if wanted.bounded and not wanted.by_time:
        raise ConfigError(
            "actions on all that match can be bounded by time, not by id or retry_count: order by time, or use a "
            "pattern"
        )
    return replace(wanted, state="morgue" if action == "kick" else wanted.state, order_by=None, reverse=False)


class _Part(NamedTuple):
    """A range of a shard's set that is walked."""

    walk: Walk
    #: None: of jobs that were not due, each is told from newer ones, and the bound is the latest one of each call.
    not_after: str | None
    #: Ids that are looked at at most.
    most: float


class _Shard(NamedTuple):
    """A shard when the action began; one for each of its priorities, if it uses them."""

    prefix: str
    bounds: BoundsReply
    #: None: the shard uses no priorities.
    level: int | None

    @property
    def due_cutoff(self) -> float:
        return float(self.bounds.due_cutoff)

    @property
    def highest(self) -> float:
        return float(self.bounds.highest or -math.inf)


#: A queue, and what is done to its jobs.
Target = tuple[QueueShards, Action]


def bulk(targets: Sequence[Target], wanted: JobFilter) -> Iterator[Step]:
    """Acts on the jobs of a filter of `filter_for`, queue by queue, a step whenever the next one is asked for. All
    queues are looked at before anything is done to one.

    Raises:
        ConfigError: there is no such shard; or, with the first step, its ``before`` lies in the future.
    """
    return _steps([(queue, action, queue.prefixes_for(wanted)) for queue, action in targets], wanted)


def _steps(targets: Sequence[tuple[QueueShards, Action, Sequence[str]]], wanted: JobFilter) -> Iterator[Step]:
    runs = [_Bulk(queue, action, prefixes, wanted) for queue, action, prefixes in targets]
    total = wanted.before.total if isinstance(wanted.before, Snapshot) else 0
    for run in [] if isinstance(wanted.before, Snapshot) else runs:
        number = 0
        for place, number in enumerate(run.count()):
            if place:
                yield Step(0, total + number, counting=True)
        total += number
    done = 0
    yield Step(0, total)
    for run in runs:
        for number in run.act_on_all():
            done += number
            yield Step(done, max(total, done))


def snapshot(client: Client, targets: Sequence[Target], wanted: JobFilter, now: str) -> Snapshot:
    """The jobs that `bulk` would act on now."""
    moment = server_now(client, now)
    salt, found = new_salt(), array("q")
    total = 0
    for queue, action in targets:
        run = _Bulk(queue, action, queue.prefixes_for(wanted), replace(wanted, before=moment))
        total += run.remember(salt, found)
    return Snapshot(moment, total, array("q", sorted(found)) if len(found) <= MAX_REMEMBERED else None, salt)


def server_now(client: Client, now: str) -> float:
    """Unix time, seconds: this one, or with "" that of the server."""
    return float(now) if now else time_of(client.command("TIME"))


class _Bulk:
    def __init__(self, queue: QueueShards, action: Action, prefixes: Sequence[str], wanted: JobFilter) -> None:
        self._queue = queue
        self._action = action
        self._in_morgue = wanted.state == "morgue"
        self._base = "morgue" if self._in_morgue else "due"
        # A due job needn't be made due.
        self._with_due = wanted.state in (None, "due") and action.name != "perform_now"
        self._with_later = wanted.state in (None, "scheduled", "retrying")
        before = wanted.before
        self._snapshot = before if isinstance(before, Snapshot) else None
        self._before = before.at if isinstance(before, Snapshot) else before
        if self._before is not None:
            now = server_now(queue.client, action.now)
            if self._before > now:
                raise ConfigError(f"before={self._before!r} lies in the future: by Redis's clock it is {now!r}")
            if self._in_morgue:
                wanted = replace(wanted, max=min(wanted.high, self._before))
        self._wanted = wanted
        #: Whether all ids are looked at, in no order.
        self._scans = bool(wanted.pattern) or wanted.asks_for_contents or wanted.state == "taken"
        #: What is in flight, where a cancel concerns that besides what waits.
        self._running: JobFilter | None = None
        if action.name == "cancel" and wanted.state is None and wanted.priority is None:
            self._running = replace(wanted, state="taken")
        #: Fingerprints of what is not due, while a snapshot is taken.
        self._remembered: array[int] | None = None
        self._salt = b""
        self._shards = self._read_bounds(prefixes, action.now if self._before is None else repr(self._before))
        if self._before is not None:
            # The jobs due by then end at that moment, wherever the shard's clock is.
            self._shards = [
                shard._replace(bounds=shard.bounds._replace(due_cutoff=shard.bounds.now, due=shard.bounds.upto_now))
                for shard in self._shards
            ]

    def _read_bounds(self, prefixes: Iterable[str], now: str) -> list[_Shard]:
        """The bounds of the shards, one for each priority that is used, or for the one that the filter names."""
        wanted = self._wanted.priority
        shards = self._read_some_bounds([(prefix, None) for prefix in prefixes], now)
        levelled = [shard.prefix for shard in shards if shard.bounds.has_levels]
        whole = [shard._replace(level=0) if shard.bounds.has_levels else shard for shard in shards if not wanted]
        levels = FURTHER_LEVELS if wanted is None else {wanted} - {0}
        return whole + self._read_some_bounds([(prefix, level) for prefix in levelled for level in levels], now)

    def _read_some_bounds(self, places: Sequence[tuple[str, int | None]], now: str) -> list[_Shard]:
        low, high = bound(self._wanted.low), bound(self._wanted.high)
        calls = [ShardOperations(prefix).bulk_bounds(self._base, low, high, level, now) for prefix, level in places]
        replies = ask(self._queue.client, calls, 100)
        return [_Shard(prefix, reply, level) for (prefix, level), reply in zip(places, replies, strict=True)]

    def _untouched(self, clock: bytes) -> bool:
        """Whether a shard with this clock got no push since ``before``: each push moves the clock beyond its time."""
        return self._before is not None and float(clock or 0) <= self._before

    # --- what there is at this moment ---

    def remember(self, salt: bytes, found: "array[int]") -> int:
        """Adds the fingerprints of what is not due at the time ``before``. Returns how many jobs there are."""
        self._remembered, self._salt = found, salt
        total = 0
        if self._scans:
            *_, total = (0, *self._count_all(self._wanted))
        elif self._in_morgue:
            total = sum(shard.bounds.upto_now for shard in self._shards)
        else:
            total = sum(shard.bounds.due for shard in self._shards) if self._with_due else 0
            for shard in self._shards if self._with_later else ():
                for part in self._parts(shard):
                    if part.not_after is None:
                        total += sum(len(ids) for ids, _ in self._walk_part(shard, part, 1000))
        if self._running is not None:
            *_, running = (0, *self._count_all(self._running))
            total += running
        return total

    def _is_old(self, shard: _Shard, value: float, job_id: bytes, due_cutoff: float, clock: bytes) -> bool:
        """Whether a job that was not due at ``before`` was there by then."""
        if self._remembered is not None:
            if len(self._remembered) <= MAX_REMEMBERED:
                self._remembered.append(fingerprint(self._salt, shard.prefix, value, job_id))
            return True
        if self._snapshot is not None and self._snapshot.remembers:
            return self._snapshot.holds(shard.prefix, value, job_id)
        # What was kicked or made due since has a time up to now.
        return self._untouched(clock) and value > due_cutoff

    # --- how many there are ---

    def count(self) -> Iterator[int]:
        """The number of jobs as far as it is known, after each call or so; the last one is the result."""
        total = 0
        for total in self._count():
            yield total
        for running in self._count_all(self._running) if self._running is not None else ():
            yield total + running

    def _count(self) -> Iterator[int]:
        """`count`, without what is in flight besides."""
        if self._scans:
            yield from self._count_all(self._wanted)
        elif self._in_morgue:
            yield sum(shard.bounds.upto_now for shard in self._shards)
        else:
            total = sum(shard.bounds.due for shard in self._shards) if self._with_due else 0
            later = self._count_later() if self._with_later else 0
            if not self._with_later or self._wanted.state is None:
                yield total + later
                return
            # No set is sorted by both, so all failed jobs are looked at.
            for failed in chain((0,), self._count_all(replace(self._wanted, state="retrying"))):
                yield total + (failed if self._wanted.state == "retrying" else max(later - failed, 0))

    def _count_later(self) -> int:
        shards = self._shards
        if self._before is not None:
            untouched = dict.fromkeys(shard.prefix for shard in shards if self._untouched(shard.bounds.clock))
            shards = self._read_bounds(untouched, self._action.now)
        return sum(shard.bounds.total - shard.bounds.due for shard in shards)

    def _count_all(self, wanted: JobFilter) -> Iterator[int]:
        total = 0
        for _, groups in self._scan(wanted):
            total += sum(len(ids) for ids in groups.values())
            yield total

    # --- by a pattern, or by what is in them ---

    def _scan(self, wanted: JobFilter) -> Iterator[tuple[str, dict[str, list[bytes]]]]:
        """All jobs that match, some 1,000 ids of a shard at a time: not_after -> ids."""
        failed = wanted.asks_for_errors and wanted.state in (None, "due")  # nothing else has an error
        base = "taken" if wanted.state == "taken" else self._base
        base = "retries" if failed or wanted.state == "retrying" else base
        order_by = "buried_at" if self._in_morgue else "perform_at"
        scan = Scan(base, wanted.pattern, order_by, past=wanted.past)
        # All priorities of a shard are found together.
        shards: dict[str, _Shard] = {}
        for shard in sorted(self._shards, key=lambda shard: shard.highest, reverse=True):
            shards.setdefault(shard.prefix, shard)
        prefixes = [shard.prefix for shard in self._shards]
        for prefix, scanned in scan.shards(self._queue.client, prefixes, self._action.now):
            yield prefix, self._matching(shards[prefix], wanted, scanned)

    def _matching(self, shard: _Shard, wanted: JobFilter, scanned: ScanReply) -> dict[str, list[bytes]]:
        same_clock = self._may_pass_now(shard) and scanned.clock == shard.bounds.clock
        with_due = wanted.state == "taken" or (wanted.state in (None, "due") and self._with_due)
        with_later = wanted.state in (None, "scheduled", "retrying")
        groups: dict[str, list[bytes]] = {}
        later: list[tuple[float, bytes]] = []
        found = [(value, job_id) for value, job_id in scanned.found if wanted.low <= value <= wanted.high]
        if wanted.asks_for_contents and found:
            # A job that changes before the action is still the same job, or has another time.
            admitted = self._admitted([job_id for _, job_id in found], wanted)
            found = [(value, job_id) for value, job_id in found if job_id in admitted]
        for value, job_id in found:
            if self._in_morgue or value <= shard.due_cutoff:
                not_after = shard.bounds.now if self._in_morgue else shard.bounds.due_cutoff
                if value <= float(not_after) and (self._in_morgue or with_due):
                    groups.setdefault(not_after.decode(), []).append(job_id)
            elif with_later and value <= shard.highest:
                if self._before is None:
                    old = value > scanned.due_cutoff or same_clock
                else:
                    old = self._is_old(shard, value, job_id, scanned.due_cutoff, scanned.clock)
                if old:
                    later.append((value, job_id))
        if later:
            groups[repr(max(later)[0])] = [job_id for _, job_id in later]
        return groups

    def _admitted(self, ids: Sequence[bytes], wanted: JobFilter) -> set[bytes]:
        """The ids whose job matches the content filter. Jobs are read in bounded batches."""
        name = self._queue.name
        found, left = set[bytes](), [(name, job_id) for job_id in ids]
        now = float(self._action.now) if self._action.now else None
        while left:
            jobs, missing = look_up({name: self._queue}, left, wanted.where, now, MAX_PAGE_BYTES)
            found |= {job_id for (_, job_id), job in jobs.items() if wanted.admits(job)}
            left = [key for key in left if key in missing]
        return found

    def _may_pass_now(self, shard: _Shard) -> bool:
        """Whether jobs that have become due since the beginning are old while the shard's clock stands still. Not so if
        the action itself makes jobs due now.
        """
        return self._action.name != "perform_now" and shard.bounds.clock != b""

    # --- in order ---

    def _parts(self, shard: _Shard) -> Iterator[_Part]:
        prefix, bounds, level = shard
        low, high = self._wanted.low, self._wanted.high
        if self._in_morgue:
            yield _Part(Walk(prefix, "morgue", bound(low), _lowest(bounds.now, high)), bounds.now.decode(), math.inf)
            return
        cutoff = bounds.due_cutoff.decode()
        if self._with_due:
            walk = Walk(prefix, "due", bound(low), _lowest(bounds.due_cutoff, high), level=level)
            yield _Part(walk, cutoff, math.inf)
        if self._with_later and bounds.highest is not None:
            # Ahead of the clock, behind which new jobs arrive. After ``before`` each job that has become due is judged.
            is_ahead = self._before is None
            walk = Walk(
                prefix, "due", bound(low) if low > shard.due_cutoff else f"({cutoff}", _lowest(bounds.highest, high),
                when="later" if is_ahead else "", past=self._wanted.past,
                clock=bounds.clock if is_ahead and self._may_pass_now(shard) else b"", level=level,
            )  # fmt: skip
            yield _Part(walk, None, 2 * (bounds.total - bounds.due) + 1000)

    def act_on_all(self) -> Iterator[int]:
        """Acts on all jobs; yields after each call or so the number that it was done to, which may be 0."""
        yield from self._act_on_scanned(self._wanted) if self._scans else self._act_in_order()
        if self._running is not None:
            yield from self._act_on_scanned(self._running)

    def _act_on_scanned(self, wanted: JobFilter) -> Iterator[int]:
        for prefix, groups in self._scan(wanted):
            if not groups:
                yield 0
            for not_after, ids in groups.items():
                for start in range(0, len(ids), MAX_IDS):
                    yield self._act(prefix, ids[start : start + MAX_IDS], not_after)

    def _act_in_order(self) -> Iterator[int]:
        walks = deque((shard.prefix, self._walk_parts(shard)) for shard in self._shards)
        while walks:  # they take turns
            prefix, steps = walks.popleft()
            if (step := next(steps, None)) is not None:
                ids, not_after = step
                yield self._act(prefix, ids, not_after) if ids else 0
                walks.append((prefix, steps))

    def _walk_parts(self, shard: _Shard) -> Iterator[tuple[list[bytes], str]]:
        for part in self._parts(shard):
            yield from self._walk_part(shard, part, MAX_IDS)

    def _walk_part(self, shard: _Shard, part: _Part, limit: int) -> Iterator[tuple[list[bytes], str]]:
        walk, looked = part.walk, 0
        judged = part.not_after is None and self._before is not None
        # The clock is read after the ids: a push that it does not show came after these.
        further = (
            [ShardOperations(shard.prefix).bulk_bounds("due", "+inf", "+inf", now=self._action.now)] if judged else []
        )
        while not walk.finished and looked < part.most:
            calls: list[Call[Any]] = [walk.call(limit, self._action.now), *further]
            page, *moments = ask(self._queue.client, calls)
            walk.note_page(page)
            looked += max(len(walk.ready), 1)
            found = walk.ready[::-1]
            for moment in moments:
                found = [
                    (value, job_id)
                    for value, job_id in found
                    if self._is_old(shard, value, job_id, float(moment.due_cutoff), moment.clock)
                ]
            if found or not walk.finished:
                latest = part.not_after or (repr(found[-1][0]) if found else "")
                yield [job_id for _, job_id in found], latest

    def _act(self, prefix: str, ids: list[bytes], not_after: str) -> int:
        return act_where_it_is(self._queue, prefix, self._action, ids, not_after=not_after).done


def _lowest(score: bytes, other: float) -> str:
    return score.decode() if float(score) <= other else bound(other)
