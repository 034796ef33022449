"""A shard as people call it: act on jobs, look, examine, repair. A method for each script, and its reply.

As in `lowq.store.shard`, but ``now`` is text where many calls have the same time; "" is the server's clock. Actions on
jobs cite an ``attempt``, which supersedes the earlier attempts that it names. A value that can't be read counts as
nothing, or as 0.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from lowq.store import untrusted
from lowq.store.calls import Argument, Call, time_argument
from lowq.store.shard import Id

#: (order value, id): where something is in an order. The value is 0.0 in the order by id.
Position = tuple[float, bytes]

#: The outcome of an action on an id.
DONE, AGAIN, IN_FLIGHT = 1, 2, 3


class DropReply(NamedTuple):
    """The progress of dropping a shard."""

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
        """The shard has a holder: nothing was touched."""
        return self.state == 2


class StatsReply(NamedTuple):
    """The figures of a shard."""

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
    cancelled: int = 0

    @classmethod
    def of(cls, reply: Sequence[Any]) -> "StatsReply":
        (
            length, due, retries, taken, morgue_length, lag, processed, failed, buried, paused, lease, ttl, oldest_id,
            oldest_at, expired, pushed, sealed, moved, fed, cancelled,
        ) = reply  # fmt: skip
        return cls(
            length, due, retries, taken, morgue_length, untrusted.finite(lag, 0.0), untrusted.count(processed),
            untrusted.count(failed), untrusted.count(buried), paused is not None, lease, max(ttl, 0) / 1000, oldest_id,
            None if oldest_at is None else float(oldest_at), untrusted.count(expired), untrusted.count(pushed),
            sealed is not None, moved is not None, fed is not None, untrusted.count(cancelled),
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
    """A page of ids in order."""

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
    """Pairs of id, value, id, value..."""
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


@dataclass(frozen=True, slots=True)
class Finished:
    """The last time that an id was performed, of a queue with ``keep_finished``."""

    #: Unix time, seconds: when it was acknowledged.
    at: float
    #: How long it was in flight, with all of its batch.
    seconds: float
    payloads: int
    #: The name of the node, or of the consumer.
    node: str

    @classmethod
    def of(cls, entry: bytes | None) -> "Finished | None":
        """None: nothing is known, or it can't be read."""
        at, seconds, payloads, node, *_ = *(entry or b"").split(b" ", 3), b"", b"", b"", b""
        finished_at = untrusted.finite(at)
        if finished_at is None:
            return None
        name = node.decode("utf-8", "replace")
        return cls(finished_at, untrusted.finite(seconds, 0.0), untrusted.count(payloads), name)


def split_attempts(error: bytes) -> tuple[bytes, list[tuple[float, float, str, bytes]]]:
    """An error without the attempts that are kept behind it (``lib/kept.lua``), and these: time, seconds, node and
    error, oldest first; none, if they can't be read.
    """
    size = untrusted.count(error[-17:-9]) if error.endswith(b"\0attempts") else 0
    begin = len(error) - 17 - size
    if not size or begin < 0:
        return error, []
    attempts, rest = [], error[begin:-17]
    while (head := re.match(rb"(\S+) (\S+) (\S+) (\d{1,9})\n", rest)) and (at := untrusted.finite(head[1])) is not None:
        end = head.end() + int(head[4])
        node = head[3].decode("utf-8", "replace")
        attempts.append((at, untrusted.finite(head[2], 0.0), node, rest[head.end() : end]))
        rest = rest[end:]
    return error[:begin], attempts


class WhyReply(NamedTuple):
    """All that decides whether an id is performed now."""

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
    #: What is in flight is to end: it was cancelled.
    cancelled: bool
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
    finished: Finished | None = None

    @classmethod
    def of(cls, reply: Sequence[Any]) -> "WhyReply":
        (
            now, due_cutoff, record, perform_at, retry_count, rank, buried_at, paused, lease, _ttl, solo, paused_by,
            leased_until, flight, level, expires, expired, debounced, full, sealed, moved, fed, finished,
        ) = reply  # fmt: skip
        at = float(now)
        parts = [] if record is None else record.split()  # without any: a record that is none of ours
        taken_at = None if record is None else untrusted.finite(parts[-1] if parts else b"", at)
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
            cancelled=parts[-2:-1] != [] and parts[-2][1:2] == b"x",
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
            finished=Finished.of(finished),
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
    #: The ids that were looked at.
    looked: list[bytes]
    #: Ids with a fault, and its code.
    found: list[tuple[bytes, str]]

    @classmethod
    def of(cls, reply: Sequence[Any]) -> "ExamineReply":
        cursor, looked, *found = reply
        codes = (code.decode() for code in found[1::2])
        return cls(None if cursor == b"0" else cursor, looked, list(zip(found[::2], codes, strict=True)))


#: The fields of `meta` that a snapshot shows.
_META = (
    "shards_count", "clock", "owner", "fence", "delivery", "paused", "pushed", "processed", "failed", "buried",
    "released", "kicked", "deleted", "cancelled", "expired", "sealed", "moved", "fed", "step",
)  # fmt: skip


@dataclass(frozen=True)
class SnapshotReply:
    """The keys of a shard at one moment."""

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
    #: Features that its keys show, and `features` in `meta` does not say.
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


class ShardOperations:
    """The scripts that people run on the shard with this key prefix."""

    __slots__ = ("prefix",)

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix

    # --- actions ---

    def perform_now(self, ids: Iterable[Id], attempt: str = "", not_after: str = "", now: str = "") -> Call[list[int]]:
        """``not_after``, here and below: only jobs whose time is not after this; "": any."""
        return Call("perform_now", self.prefix, [now, attempt, not_after, *ids])

    def kick(self, ids: Iterable[Id], attempt: str, not_after: str = "", now: str = "") -> Call[list[int]]:
        return Call("kick", self.prefix, [now, attempt, not_after, *ids])

    def delete(
        self, ids: Iterable[Id], attempt: str, where: str = "", not_after: str = "", now: str = ""
    ) -> Call[list[int]]:
        """``where``: "waiting", "morgue", or "" for both; "cancel": those that wait, and those in flight are to end."""
        return Call("delete", self.prefix, [now, attempt, where, not_after, *ids])

    def bury(
        self, ids: Iterable[Id], reason: bytes, attempt: str, not_after: str = "", now: str = ""
    ) -> Call[list[int]]:
        items = [part for job_id in ids for part in (job_id, reason, 0)]
        return Call("bury", self.prefix, [now, "", "", attempt, not_after, *items])

    def pause(self, pauses: bool, by: Argument = "", attempt: str = "", now: Argument = "") -> Call[int]:
        return Call("pause", self.prefix, [now, attempt, "1" if pauses else "", by])

    def drop(self, jobs: int, attempt: str = "", *, asks: bool = False) -> Call[DropReply]:
        """``jobs``: how many of each kind at most; ``asks``: only whether it might be dropped."""
        return Call("drop", self.prefix, ["", attempt, jobs, "1" if asks else ""], read=DropReply.of)

    # --- looking ---

    def stats(self, now: float | None = None) -> Call[StatsReply]:
        return Call("stats", self.prefix, [time_argument(now)], read=StatsReply.of)

    def why(self, job_id: Id, now: float | None = None) -> Call[WhyReply]:
        """All that decides whether an id is performed now."""
        return Call("why", self.prefix, [time_argument(now), job_id], read=WhyReply.of)

    def fetch_jobs(
        self, ids: Sequence[Id], where: str, max_payloads: int, max_bytes: int, now: float | None = None
    ) -> Call[list[Any]]:
        """``where``: "taken", "waiting", "morgue", or "" for the first of these in which the id is."""
        return Call("fetch_jobs", self.prefix, [time_argument(now), where, max_payloads, max_bytes, *ids])

    def scan(self, base: str, cursor: bytes, wanted: Sequence[Argument], count: int, now: str) -> Call[ScanReply]:
        return Call("scan", self.prefix, [now, base, cursor, *wanted, count], read=ScanReply.of)

    def range_page(self, args: Sequence[Argument], now: str) -> Call[RangeReply]:
        return Call("range_page", self.prefix, [now, *args], read=RangeReply.of)

    def bulk_bounds(self, base: str, low: str, high: str, level: int | None = None, now: str = "") -> Call[BoundsReply]:
        return Call(
            "bulk_bounds", self.prefix, [now, base, low, high, "" if level is None else level], read=BoundsReply.of
        )

    def examine(self, what: str, cursor: bytes) -> Call[ExamineReply]:
        """The next entries of the set ``what``; b"0" begins."""
        return Call("examine", self.prefix, ["", what, cursor], read=ExamineReply.of)

    def examine_ids(self, kind: bytes, ids: Iterable[Id]) -> Call[ExamineReply]:
        """Ids that have a key of that kind."""
        return Call("examine", self.prefix, ["", kind, "", *ids], read=ExamineReply.of)

    def snapshot(self, now: str = "") -> Call[SnapshotReply]:
        """The shard's own keys, at one moment."""
        return Call("shard_snapshot", self.prefix, [now], read=SnapshotReply.of)

    # --- the doctor ---

    def repair(self, what: str, ids: Iterable[Id], now: str = "") -> Call[list[int]]:
        """``what``: as of `examine`."""
        return Call("repair", self.prefix, [now, what, *ids])

    def repair_shard(self, code: str, argument: str) -> Call[int]:
        """``argument``: milliseconds of a lease without an end, or the shards_count of the queue."""
        return Call("repair_shard", self.prefix, ["", code, argument])
