"""Bulk actions: something done to all jobs of a kind, in short steps, and only to those there when it began.

What keeps it from running after its own tail: the server's time when it begins, and the sets' own order.

- The morgue is sorted by the time of burial. What is buried later than the beginning is not looked at: kicked jobs
  that keep failing come back behind the end.
- Waiting jobs are sorted by perform_at. Those due at the beginning are not after that moment, and whatever is
  pushed later is. They come first.
- Then those that were scheduled, up to the latest perform_at there was, forwards. New jobs arrive in this part
  too, and nothing tells them from old ones except this: a push "for now" is never later than now. So the walk keeps
  ahead of the clock, and does not touch what is between the beginning and now, where new jobs arrive (unless nothing
  has been pushed to the shard meanwhile). Thus a job whose time comes before its turn may be left alone, as if a
  worker had been quicker; and one that is pushed meanwhile *for later* may be done with the others.
  Of this part, no more than twice as many jobs as there were are looked at, so it ends in any case.

All of it goes by the server's time. Should that step back behind the beginning while the action runs, what is pushed or
buried then looks older than it is, and is done with the others.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from lowq.actions import MAX_IDS, Action, act
from lowq.connection import Call, Client
from lowq.errors import ConfigError
from lowq.job import State
from lowq.paging import SCANS_TOGETHER, Listing, Walk, ask, bound
from lowq.pattern import encode_pattern, ids_per_call


@dataclass(frozen=True, slots=True)
class Step:
    """How far a bulk action is. `done` never shrinks."""

    #: Jobs that it was done to.
    done: int
    #: How many there were when it began. Others may have been quicker, or some be in flight: `done` may stay below.
    total: int
    #: They are still being counted, as patterns and some states need: nothing is done yet, and `total` may change.
    counting: bool = False


_WAITING: tuple[State, ...] = ("scheduled", "due", "retrying")
#: What each action can be done to; None, besides: all that wait, or with kick the morgue.
STATES_OF: dict[str, tuple[State, ...]] = {
    "perform_now": _WAITING,
    "bury": _WAITING,
    "kick": ("morgue",),
    "delete": (*_WAITING, "morgue"),
}


def bulk_state(action: str, state: State | None) -> State | None:
    """The state that is meant.

    Raises:
        ConfigError: the action does nothing to jobs in that state.
    """
    allowed = STATES_OF[action]
    if state is not None and state not in allowed:
        hint = ", which is also its default" if action == "kick" else "; without a state: all that wait"
        raise ConfigError(
            f"{action} can't be done to jobs with state={state!r}; state is one of: {', '.join(allowed)}{hint}"
        )
    return "morgue" if action == "kick" else state


class _Part(NamedTuple):
    """A range of a shard's set that is walked."""

    walk: Walk
    not_after: str
    #: How many ids are looked at, at most.
    most: float


@dataclass(slots=True)
class _Shard:
    """A shard as it was when the action began. Scores are text, as Redis wrote them."""

    prefix: str
    now: bytes
    horizon: bytes
    clock: bytes
    highest: bytes | None
    upto_now: int
    due: int
    total: int


def bulk(client: Callable[[], Client], prefixes: Sequence[str], action: Action, wanted: Listing) -> Iterator[Step]:
    """Does it, a step at a time, whenever the next step is asked for."""
    run = _Bulk(client, prefixes, action, wanted)
    counts = run.count()
    total = next(counts)
    for number in counts:
        yield Step(0, total, counting=True)
        total = number
    done = 0
    yield Step(0, total)
    for number in run.act_on_all():
        done += number
        yield Step(done, max(total, done))


class _Bulk:
    def __init__(self, client: Callable[[], Client], prefixes: Sequence[str], action: Action, wanted: Listing) -> None:
        self._client = client
        self._action = action
        self._wanted = wanted
        self._in_morgue = wanted.state == "morgue"
        self._base = "morgue" if self._in_morgue else "due"
        # What is due needn't be made due.
        self._with_due = wanted.state in (None, "due") and action.name != "perform_now"
        self._with_later = wanted.state in (None, "scheduled", "retrying")
        limits = [action.now, self._base, bound(wanted.low), bound(wanted.high)]
        calls = [Call("extent", prefix, limits) for prefix in prefixes]
        self._shards = [
            _Shard(prefix, *reply) for prefix, reply in zip(prefixes, ask(client(), calls, 100), strict=True)
        ]

    # --- how many there are ---

    def count(self) -> Iterator[int]:
        """What is known of the number, after each call or so where ids are looked at; the last word comes last."""
        if self._wanted.match:
            yield from self._count_all(self._wanted)
        elif self._in_morgue:
            yield sum(shard.upto_now for shard in self._shards)
        else:
            total = sum(shard.due for shard in self._shards) if self._with_due else 0
            later = sum(shard.total - shard.due for shard in self._shards) if self._with_later else 0
            if not self._with_later or self._wanted.state is None:
                yield total + later
                return
            # No set is sorted by both, so all that failed are looked at.
            for failed in self._count_all(self._wanted._replace(state="retrying")):
                yield total + (failed if self._wanted.state == "retrying" else max(later - failed, 0))

    def _count_all(self, wanted: Listing) -> Iterator[int]:
        total = 0
        for _, groups in self._scan(self._shards, wanted):
            total += sum(len(ids) for ids in groups.values())
            yield total

    # --- by a pattern ---

    def _scan(
        self, shards: Sequence[_Shard], wanted: Listing | None = None
    ) -> Iterator[tuple[_Shard, dict[str, list[bytes]]]]:
        """All that fits, some 1,000 ids at a time: not_after -> ids."""
        wanted = wanted or self._wanted
        base = "retries" if wanted.state == "retrying" else self._base
        order_by = "buried_at" if self._in_morgue else "perform_at"
        tail: list[str | bytes | int] = [
            encode_pattern(wanted.match),
            order_by,
            "",
            wanted.past,
            ids_per_call(wanted.match),
        ]
        cursors = dict.fromkeys(range(len(shards)), b"0")
        while cursors:
            some = list(cursors)[:SCANS_TOGETHER]
            calls = [Call("scan", shards[i].prefix, [self._action.now, base, cursors[i], *tail]) for i in some]
            for i, reply in zip(some, list(ask(self._client(), calls)), strict=True):
                if reply[0] == b"0":
                    del cursors[i]
                else:
                    cursors[i] = reply[0]
                yield shards[i], self._fitting(shards[i], wanted, reply)

    def _fitting(self, shard: _Shard, wanted: Listing, reply: list[Any]) -> dict[str, list[bytes]]:
        horizon, same_clock = float(reply[1]), self._may_pass_now(shard) and reply[2] == shard.clock
        begun, highest = float(shard.horizon), float(shard.highest or -math.inf)
        with_due = wanted.state in (None, "due") and self._with_due
        with_later = wanted.state in (None, "scheduled", "retrying")
        groups: dict[str, list[bytes]] = {}
        for job_id, raw in zip(reply[3::2], reply[4::2], strict=True):
            value = float(raw)
            if not wanted.low <= value <= wanted.high:
                continue
            if self._in_morgue:
                not_after = shard.now if value <= float(shard.now) else None
            elif value <= begun:
                not_after = shard.horizon if with_due else None
            elif with_later and value <= highest and (value > horizon or same_clock):
                not_after = shard.highest
            else:
                not_after = None
            if not_after is not None:
                groups.setdefault(not_after.decode(), []).append(job_id)
        return groups

    def _may_pass_now(self, shard: _Shard) -> bool:
        """Whether what has become due since the beginning is surely old while the shard's clock stands still. Not
        when it is the action itself that makes jobs due now."""
        return self._action.name != "perform_now" and shard.clock != b""

    # --- in order ---

    def _parts(self, shard: _Shard) -> Iterator[_Part]:
        low, high = self._wanted.low, self._wanted.high
        if self._in_morgue:
            walk = Walk(shard.prefix, "morgue", bound(low), _lowest(shard.now, high))
            yield _Part(walk, shard.now.decode(), math.inf)
            return
        if self._with_due:
            walk = Walk(shard.prefix, "due", bound(low), _lowest(shard.horizon, high))
            yield _Part(walk, shard.horizon.decode(), math.inf)
        if self._with_later and shard.highest is not None:
            walk = Walk(
                shard.prefix,
                "due",
                bound(low) if low > float(shard.horizon) else f"({shard.horizon.decode()}",
                _lowest(shard.highest, high),
                when="later",
                past=self._wanted.past,
                clock=shard.clock if self._may_pass_now(shard) else b"",
            )
            yield _Part(walk, shard.highest.decode(), 2 * (shard.total - shard.due) + 1000)

    def act_on_all(self) -> Iterator[int]:
        """Does it, and says after each call or so to how many jobs, be it none."""
        if self._wanted.match:
            for shard, groups in self._scan(self._shards):
                if not groups:
                    yield 0
                for not_after, ids in groups.items():
                    for start in range(0, len(ids), MAX_IDS):
                        yield self._act(shard.prefix, ids[start : start + MAX_IDS], not_after)
            return
        walks = [(shard.prefix, self._walk_parts(shard)) for shard in self._shards]
        while walks:
            going_on = []
            for prefix, steps in walks:
                step = next(steps, None)
                if step is not None:
                    ids, not_after = step
                    yield self._act(prefix, ids, not_after) if ids else 0
                    going_on.append((prefix, steps))
            walks = going_on

    def _walk_parts(self, shard: _Shard) -> Iterator[tuple[list[bytes], str]]:
        for walk, not_after, most in self._parts(shard):
            looked = 0
            while not walk.finished and looked < most:
                call = walk.call(MAX_IDS, self._action.now)
                (reply,) = ask(self._client(), [call])
                walk.took(reply)
                looked += max(len(walk.ready), 1)
                if walk.ready or not walk.finished:
                    yield [job_id for _, job_id in reversed(walk.ready)], not_after

    def _act(self, prefix: str, ids: list[bytes], not_after: str) -> int:
        return act(self._client(), prefix, self._action, ids, not_after).done


def _lowest(score: bytes, other: float) -> str:
    return score.decode() if float(score) <= other else bound(other)
