"""What the scripts of a shard answer, field by field. Ids are as Redis has them; times are Unix time in seconds, by the
server's clock, unless they say something else. What can't be read counts as nothing, or as 0.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from lowq.store import untrusted

#: (order value, id): where something is in an order. The value is 0.0 in the order by id.
Position = tuple[float, bytes]

#: What became of an id that something was to be done to.
DONE, AGAIN, IN_FLIGHT = 1, 2, 3
#: What became of a job that was released: it waits again, or is buried as poison, or nothing is left of it.
POISONED, EXPIRED = 2, 3

#: Bits of the state that `ack_and_take` answers.
_PAUSED, _HAS_TTL, _HAS_TRACES, _SEALED, _HAS_EXPIRIES, _SOLO, _HAS_LEVELS, _FULL = 1, 2, 4, 8, 16, 32, 64, 128


class AcquireReply(NamedTuple):
    """The outcome of an attempt to get a lease."""

    state: Literal["acquired", "resumed", "adopted", "held", "restoring", "sealed", "unsealed", "fed"]
    #: Of the lease, as Redis wrote it; empty: there is none.
    fence: bytes = b""
    #: Of "held": how many milliseconds its lease still runs.
    held_for: int = 0
    #: How many jobs of a dead holder wait again; which ones, if that was asked for.
    restored: int = 0
    restored_ids: Sequence[bytes] = ()
    #: Those that were buried, as their holders kept dying.
    poisoned: Sequence[bytes] = ()

    @classmethod
    def of(cls, reply: Sequence[Any]) -> "AcquireReply":
        state = reply[0].decode()
        if state == "held":
            return cls(state, held_for=max(reply[1], 0))
        if len(reply) < 3:
            return cls(state, reply[1] if len(reply) == 2 else b"")
        _, fence, restored, *poisoned = reply
        ids = restored if isinstance(restored, list) else ()
        count = len(ids) if isinstance(restored, list) else restored
        return cls(state, fence if state == "acquired" else b"", 0, count, ids, poisoned)


class RenewReply(NamedTuple):
    """The state of a shard whose lease was renewed."""

    #: Payloads that have come in since it was made, and jobs that are due or in flight.
    pushed: int
    backlog: int
    #: Its jobs belong to another layout.
    sealed: bool

    @classmethod
    def of(cls, reply: Any) -> "RenewReply | None":
        """None: a consumer isn't told, or it can't be read."""
        return cls(reply[0], reply[1], bool(reply[2])) if isinstance(reply, list) else None


# --- jobs of the holder ---


class TakeReply(NamedTuple):
    """A delivery, and how the shard is doing behind it."""

    delivery: int
    #: Seconds until the oldest waiting job is due, negative when it is overdue; None: nothing waits.
    delay: float | None
    paused: bool
    #: Its payloads have a ttl, so that it wants to be swept.
    has_ttl: bool
    sealed: bool
    #: So much is in flight that nothing more is taken before some of it is reported.
    is_full: bool
    #: The job is to be performed alone.
    is_solo: bool
    #: As the script has them; see `jobs`.
    items: list[Any]
    #: Of a shard with priorities: level -> as `delay`.
    levels: dict[int, float] | None
    #: Id, microseconds until the first of its payloads expires, id, ...: of those that have a ttl.
    expiries: Sequence[Any]
    #: Id -> trace contexts, each followed by a newline, of those that have any.
    traces: Mapping[bytes, bytes]

    @classmethod
    def of(cls, reply: list[Any]) -> "TakeReply":
        delivery, delay, state, _, *items = reply
        levels: dict[int, float] | None = None
        expiries: Sequence[Any] = ()
        traces: Mapping[bytes, Any] = _NOTHING
        if state & _HAS_LEVELS:
            levels = {level: micros / 1e6 for level, micros in _pairs(items.pop())}
        if state & _HAS_TRACES:
            traces = dict(_pairs(items.pop()))
        if state & _HAS_EXPIRIES:
            expiries = items.pop()
        return cls(
            delivery, None if delay is None else delay / 1e6, bool(state & _PAUSED), bool(state & _HAS_TTL),
            bool(state & _SEALED), bool(state & _FULL), bool(state & _SOLO), items, levels, expiries, traces,
        )  # fmt: skip

    def jobs(self) -> Iterator[tuple[bytes, list[tuple[bytes, float]]]]:
        """Each id with its payloads and scores, in the order in which they are handed over. `InFlight` does the same,
        in a hurry.
        """
        items = iter(self.items)
        for item in items:
            if isinstance(item, list):
                yield item[0], [(payload, float(score)) for payload, score in zip(item[3::2], item[4::2], strict=True)]
                continue
            _, inline = next(items), next(items)
            score, _, payload = inline.partition(b" ")
            yield item, [(payload, float(score))]


_NOTHING: Mapping[bytes, Any] = MappingProxyType({})


class SweepReply(NamedTuple):
    """The payloads and buried jobs that were removed."""

    #: Payloads that had expired, and buried jobs.
    expired: int
    removed: int
    #: There is more to be swept at once.
    more: bool
    #: Id -> how many of its payloads had expired.
    expired_of: dict[bytes, int]
    removed_ids: list[bytes]

    @classmethod
    def of(cls, reply: Sequence[Any]) -> "SweepReply":
        expired, removed, more, counts, ids = reply
        return cls(expired, removed, bool(more), dict(_pairs(counts)), ids)


class DropReply(NamedTuple):
    """How far a shard is dropped."""

    state: Literal[0, 1, 2]
    #: Jobs that were removed.
    removed: int

    @classmethod
    def of(cls, reply: Sequence[Any]) -> "DropReply":
        return cls(*reply)

    @property
    def is_gone(self) -> bool:
        return self.state == 1

    @property
    def is_held(self) -> bool:
        """Somebody holds the lease: nothing was touched."""
        return self.state == 2


class StatsReply(NamedTuple):
    """How a shard is doing."""

    length: int
    #: Waiting jobs whose time has come.
    due: int
    #: Waiting jobs that failed at least once.
    retries: int
    taken: int
    morgue_length: int
    #: Seconds since the oldest due job became due.
    lag: float
    processed: int
    failed: int
    buried: int
    paused: bool
    #: The owner's token "nonce:fence"; None: nobody.
    lease: bytes | None
    #: Seconds that the lease still runs.
    lease_seconds: float
    #: The waiting job that is or was due first, and its perform_at (Unix time, seconds).
    oldest_id: bytes | None
    oldest_at: float | None
    expired: int
    pushed: int
    #: Its jobs belong to another layout, all of them were moved there, and: jobs are being moved to it.
    sealed: bool = False
    moved: bool = False
    fed: bool = False

    @classmethod
    def of(cls, reply: Sequence[Any]) -> "StatsReply":
        (
            length, due, retries, taken, morgue_length, lag, processed, failed, buried, paused, lease, ttl, oldest_id,
            oldest_at, expired, pushed, sealed, moved, fed,
        ) = reply  # fmt: skip
        return cls(
            length, due, retries, taken, morgue_length, untrusted.finite(lag, 0.0), untrusted.count(processed),
            untrusted.count(failed), untrusted.count(buried), paused is not None, lease, max(ttl, 0) / 1000, oldest_id,
            None if oldest_at is None else float(oldest_at), untrusted.count(expired), untrusted.count(pushed),
            sealed is not None, moved is not None, fed is not None,
        )  # fmt: skip


class ScanReply(NamedTuple):
    """The ids that a scan came across."""

    #: None: this was the last of the shard.
    cursor: bytes | None
    #: Unix time, seconds: what is due is not after it.
    due_cutoff: float
    #: The shard's clock, as Redis wrote it; empty before the first push.
    clock: bytes
    found: list[Position]

    @classmethod
    def of(cls, reply: Sequence[Any]) -> "ScanReply":
        cursor, due_cutoff, clock, *found = reply
        return cls(None if cursor == b"0" else cursor, float(due_cutoff), clock, _positions(found))


class RangeReply(NamedTuple):
    """What the script `range_page` answers."""

    finished: bool
    #: Score, as Redis wrote it, and id: where the next page goes on; None: nothing was looked at.
    position: tuple[bytes, bytes] | None
    found: list[Position]
    #: Whether the shard uses priorities: each level is asked for by itself.
    has_levels: bool

    @classmethod
    def of(cls, reply: Sequence[Any]) -> "RangeReply":
        state, score, job_id, *found = reply
        position = None if score is None else (score, job_id)
        return cls(bool(state & 1), position, _positions(found), bool(state & 2))


def _positions(found: Sequence[bytes]) -> list[Position]:
    """From id, value, id, value..."""
    return list(zip(map(float, found[1::2]), found[::2], strict=True))


class Flight(NamedTuple):
    """The other jobs of an id's shard that are in flight."""

    number: int
    #: When the first of them was taken, Unix time in seconds; None: that can't be read.
    since: float | None
    #: Up to three of them, those taken first.
    ids: tuple[bytes, ...]

    @classmethod
    def of(cls, reply: Sequence[Any] | None) -> "Flight":
        if reply is None:
            return cls(0, None, ())
        number, since, *ids = reply
        return cls(number, untrusted.finite(since), tuple(ids))


class WhyReply(NamedTuple):
    """What the script `why` answers. Times are Unix time in seconds, by the server's clock."""

    now: float
    #: What is due is not after it.
    due_cutoff: float
    #: In flight: since when; now if that can't be read. None: not in flight.
    taken_at: float | None
    #: Of the waiting job; None: none waits.
    perform_at: float | None
    #: None: it never failed.
    retry_count: int | None
    #: Waiting jobs that come before it.
    ahead: int
    buried_at: float | None
    #: Since when; now if that can't be read. None: it is not.
    paused_at: float | None
    paused_by: str | None
    #: The owner's token "nonce:fence"; None: nobody.
    lease: bytes | None
    #: When the last lease ends or has ended; now if that can't be read.
    leased_until: float
    #: It is to be taken alone.
    solo: bool
    flight: Flight
    priority: int
    #: Of the first of its payloads that wait and expire; None: none does.
    expires_at: float | None
    #: All of its payloads that wait have.
    expired: bool
    #: It waits for more payloads, until then at the latest; None: it doesn't.
    debounced: float | None
    #: A push did not fit into the queue's capacity, and nothing has made room in this shard since.
    full: bool
    #: As of `StatsReply`.
    sealed: bool = False
    moved: bool = False
    fed: bool = False

    @classmethod
    def of(cls, reply: Sequence[Any]) -> "WhyReply":
        (
            now, due_cutoff, record, perform_at, retry_count, rank, buried_at, paused, lease, _ttl, solo, paused_by,
            leased_until, flight, level, expires, expired, debounced, full, sealed, moved, fed,
        ) = reply  # fmt: skip
        at = float(now)
        taken_at = None
        if record is not None:
            *_, taken = record.split() or [b""]  # without parts: a record that is none of ours
            taken_at = untrusted.finite(taken, at)
        return cls(
            now=at,
            due_cutoff=float(due_cutoff),
            taken_at=taken_at,
            perform_at=None if perform_at is None else float(perform_at),
            retry_count=None if retry_count is None else untrusted.count(retry_count),
            ahead=int(rank or 0),
            buried_at=None if buried_at is None else float(buried_at),
            paused_at=None if paused is None else untrusted.finite(paused, at),
            paused_by=None if paused_by is None else paused_by.decode("utf-8", "replace"),
            lease=lease,
            leased_until=untrusted.finite(leased_until, at),
            solo=bool(solo),
            flight=Flight.of(flight),
            priority=level,
            expires_at=untrusted.finite(expires),
            expired=bool(expired),
            debounced=untrusted.finite(debounced),
            full=bool(full),
            sealed=sealed is not None,
            moved=moved is not None,
            fed=fed is not None,
        )


class BoundsReply(NamedTuple):
    """The jobs that wait, or are buried, at one moment. Scores and times are text, as Redis wrote them."""

    now: bytes
    due_cutoff: bytes
    #: The shard's clock; empty before the first push.
    clock: bytes
    #: The highest score that there is; None: there is nothing.
    highest: bytes | None
    #: How many scores within the bounds are not after now, not after due_cutoff, there at all.
    upto_now: int
    due: int
    total: int
    #: The shard uses priorities: each other level is to be asked for, too.
    has_levels: bool

    @classmethod
    def of(cls, reply: Sequence[Any]) -> "BoundsReply":
        now, due_cutoff, clock, highest, upto_now, due, total, has_levels = reply
        return cls(now, due_cutoff, clock, highest, upto_now, due, total, bool(has_levels))


class ExamineReply(NamedTuple):
    """Ids that were looked at."""

    #: None: this was the last of the set.
    cursor: bytes | None
    #: How many ids were looked at.
    looked: int
    #: Ids that something is wrong with, and what.
    found: list[tuple[bytes, str]]

    @classmethod
    def of(cls, reply: Sequence[Any]) -> "ExamineReply":
        cursor, looked, *found = reply
        codes = (code.decode() for code in found[1::2])
        return cls(None if cursor == b"0" else cursor, looked, list(zip(found[::2], codes, strict=True)))


#: The fields of `meta` that a snapshot shows.
_META = (
    "shards_count", "clock", "owner", "fence", "delivery", "paused", "pushed", "processed", "failed", "buried",
    "released", "kicked", "deleted", "expired", "sealed", "moved", "fed", "step",
)  # fmt: skip


@dataclass(frozen=True)
class SnapshotReply:
    """What the keys of a shard said at one moment."""

    now: float
    #: Names of keys that have a type they must not have. Then nothing else is known.
    wrong: tuple[str, ...]
    #: Token of the lease, None when there is none; and the milliseconds that it still runs, -1 without an end.
    token: str | None = None
    ttl: int = -2
    #: The fields of `meta` that there are.
    meta: Mapping[str, str] = field(default_factory=dict)
    due: int = 0
    length: int = 0
    taken: int = 0
    morgue_length: int = 0
    #: Ids in all sets together; one may be in several.
    entries: int = 0
    #: What its keys show that it uses, and `features` in `meta` does not say.
    missing_features: tuple[str, ...] = ()

    @classmethod
    def of(cls, reply: Sequence[Any]) -> "SnapshotReply":
        now, names, *rest = reply
        wrong = tuple(name.decode() for name in names)
        if wrong:
            return cls(float(now), wrong)
        lease, ttl, *rest = rest
        values, (due, length, taken, morgue_length, entries, missing) = rest[: len(_META)], rest[len(_META) :]
        meta = {name: _text(raw) for name, raw in zip(_META, values, strict=True) if raw is not None}
        words = tuple(word.decode() for word in missing)
        token = None if lease is None else _text(lease)
        return cls(float(now), wrong, token, ttl, meta, due, length, taken, morgue_length, entries, words)


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")


class MoveReply(NamedTuple):
    """A step of the jobs that leave a sealed shard."""

    step: int
    kind: Literal[b"waiting", b"morgue", b"schedules", b"rest", b"end"]
    #: The clock of the shard, and what it uses, as `move_in` takes them.
    clock: bytes
    features: bytes
    #: Id, score, and what else is known of it: "score payload", or a list.
    items: list[tuple[bytes, bytes, Any]]

    @classmethod
    def of(cls, reply: Sequence[Any]) -> "MoveReply":
        step, kind, clock, _, _, features = reply[:6]
        return cls(step, kind, clock, features, list(zip(reply[6::3], reply[7::3], reply[8::3], strict=True)))

    @property
    def jobs(self) -> int:
        """How many of its items are jobs."""
        return len(self.items) if self.kind in (b"waiting", b"morgue") else 0


def _pairs(flat: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    return zip(flat[::2], flat[1::2], strict=True)
