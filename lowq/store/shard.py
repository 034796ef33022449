"""A shard as Redis knows it: one method for each script that has the key prefix of a shard.

A method packs the arguments of its script and returns a `Call`, whose `read` gives the fields of the reply their names
(`lowq.store.shard_replies`). What a script does, what it answers, and why it may be repeated stands at the top of its
file in ``lua/``. ``now`` is Unix time, seconds, and None or "" the server's clock: calls that people make, many
of which have the same, take it as text.

Whatever writes as the holder of the lease cites its ``token``; what concerns jobs in flight also the ``delivery`` they
were taken under: a repeat, and the late word of a former holder, change nothing. What people do to jobs cites an
``attempt`` instead, which supersedes the earlier attempts that it names.
"""

from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Any, Literal, NamedTuple

from lowq.store.calls import Argument, Call
from lowq.store.scripts import time_argument
from lowq.store.shard_replies import (
    AcquireReply,
    BoundsReply,
    DropReply,
    ExamineReply,
    MoveReply,
    RangeReply,
    RenewReply,
    ScanReply,
    SnapshotReply,
    StatsReply,
    SweepReply,
    TakeReply,
    WhyReply,
)

Id = bytes

#: What a reshard has to do with a lease. "prepared": the shard is of a layout that one has made, and nobody gets it
#: before all that belongs to it has come. "opened": and the registry says that this has ended. "moves": the caller
#: moves its jobs to another layout.
Reshard = Literal["", "prepared", "opened", "moves"]


class TakeLimits(NamedTuple):
    """The bounds of one take."""

    jobs: int
    #: Payloads of one id.
    payloads: int
    #: Bytes of all payloads, each with 100 besides; one payload always fits.
    size: int


class PrepareReply(IntEnum):
    """Whether a shard of the next layout is fed."""

    WAS_OPENED = 0
    #: From now on: it was not there.
    FED = 1
    WAS_FED = 2


class SealReply(IntEnum):
    """Whether a shard accepts no more pushes."""

    WAS_SEALED = 0
    SEALED = 1
    #: All of its jobs were moved, too.
    MOVED = 2


class MoveInReply(IntEnum):
    """Whether the jobs of a page have come."""

    HAD_COME = 0
    CAME = 1
    #: The shard is not there, or it is open and does not know which steps have come: they are not moved.
    NOT_FED = 2


class OpenReply(IntEnum):
    """Whether a shard of the next layout is open."""

    WAS_OPEN = 0
    OPENED = 1
    ABSENT = 2


class PushCall(Call[int]):
    """Jobs for a shard. ``data``: as `lowq.push.calls.push_arguments` makes it."""

    __slots__ = ()

    def __init__(self, prefix: str, data: list[bytes] | None = None) -> None:
        super().__init__("push", prefix, (), data)


class ShardScripts:
    """The scripts of the shard with this key prefix."""

    __slots__ = ("prefix",)

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix

    # --- the lease ---

    def acquire(
        self,
        nonce: str,
        lease_ttl: int,
        shards_count: int | str,
        max_crash_count: int,
        *,
        jitter_seed: int,
        now: float | None = None,
        charge: bool = True,
        last_fence: int = 0,
        session: str = "",
        wants_ids: bool = False,
        reshard: Reshard = "",
    ) -> Call[AcquireReply]:
        """The right to work the shard. ``lease_ttl``: milliseconds; ``charge``: what a dead holder left in flight
        counts as a crash; ``last_fence``: of the caller's last lease; ``wants_ids``: of the jobs that wait again.
        """
        args: list[Argument] = [
            time_argument(now), nonce, lease_ttl, shards_count, max_crash_count, jitter_seed, "" if charge else "1",
            last_fence, session, "1" if wants_ids else "", reshard,
        ]  # fmt: skip
        while args[-1] == "" and len(args) > 8:
            args.pop()
        return Call("acquire", self.prefix, args, read=AcquireReply.of)

    def renew(self, token: str, lease_ttl: int, *, is_consumer: bool = False) -> Call[RenewReply | None]:
        """``lease_ttl``: milliseconds. The reply is None for a consumer."""
        more = ["1"] if is_consumer else []
        return Call("renew", self.prefix, ["", token, lease_ttl, *more], read=RenewReply.of)

    def detach(self, token: str, lease_ttl: int) -> Call[int]:
        """Leaves the shard, with what is in flight, to a consumer with the same session."""
        return Call("detach", self.prefix, ["", token, lease_ttl])

    def surrender(self, token: str, leave: int | None = None) -> Call[int]:
        """``leave``: milliseconds that the lease is to run on, with jobs in flight; None: refused with any."""
        return Call("surrender", self.prefix, ["", token, "" if leave is None else leave])

    # --- jobs of the holder ---

    def ack_and_take(
        self, token: str, last: int, limits: TakeLimits, delivery: int, ids: Iterable[Id], now: float | None = None
    ) -> Call[TakeReply]:
        """``last``: the last delivery that reached the caller and is not reported whole, 0: none; ``ids``: performed,
        taken under that ``delivery``.
        """
        return Call(
            "ack_and_take",
            self.prefix,
            ["" if now is None else time_argument(now), token, last, *limits, delivery, *ids],
            read=TakeReply.of,
        )

    def fail(self, token: str, delivery: int, items: Iterable[Argument], now: float | None = None) -> Call[list[int]]:
        """``items``: id, verdict, retry_count, delay (seconds), error, of each job."""
        return Call("fail", self.prefix, [time_argument(now), token, delivery, *items])

    def release(
        self, token: str, delivery: int, max_crash_count: int, items: Iterable[Argument], now: float | None = None
    ) -> Call[list[int]]:
        """``items``: id, delay (seconds; '': the time it was due), '1' when it made its process stop, of each job."""
        return Call("release", self.prefix, [time_argument(now), token, delivery, max_crash_count, *items])

    def bury_taken(
        self, token: str, delivery: int, items: Iterable[Argument], now: float | None = None
    ) -> Call[list[int]]:
        """``items``: id, reason, n, n payloads (0: the whole job), of each job."""
        return Call("bury", self.prefix, [time_argument(now), token, delivery, "", "", *items])

    def sweep(self, scan_size: int, morgue_ttl: str = "", morgue_max: str = "") -> Call[SweepReply]:
        """Removes what has expired, and of the morgue what is too old or too much."""
        return Call("sweep", self.prefix, ["", scan_size, morgue_ttl, morgue_max], read=SweepReply.of)

    # --- what people do to jobs ---

    def perform_now(self, ids: Iterable[Id], attempt: str = "", not_after: str = "", now: str = "") -> Call[list[int]]:
        """``not_after``, here and below: only jobs whose time is not after this; "": any."""
        return Call("perform_now", self.prefix, [now, attempt, not_after, *ids])

    def kick(self, ids: Iterable[Id], attempt: str, not_after: str = "", now: str = "") -> Call[list[int]]:
        return Call("kick", self.prefix, [now, attempt, not_after, *ids])

    def delete(
        self, ids: Iterable[Id], attempt: str, where: str = "", not_after: str = "", now: str = ""
    ) -> Call[list[int]]:
        """``where``: "waiting", "morgue", or "" for both."""
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
        """What the shard's own keys say, at one moment."""
        return Call("shard_snapshot", self.prefix, [now], read=SnapshotReply.of)

    # --- the doctor ---

    def repair(self, what: str, ids: Iterable[Id], now: str = "") -> Call[list[int]]:
        """``what``: as of `examine`."""
        return Call("repair", self.prefix, [now, what, *ids])

    def repair_shard(self, code: str, argument: str) -> Call[int]:
        """``argument``: milliseconds of a lease without an end, or the shards_count of the queue."""
        return Call("repair_shard", self.prefix, ["", code, argument])

    # --- reshards ---

    def prepare(self, shards_count: int, paused_at: Argument = "", paused_by: Argument = "") -> Call[PrepareReply]:
        """Makes a shard of the next layout."""
        return Call("prepare_shard", self.prefix, ["", shards_count, paused_at, paused_by], read=PrepareReply)

    def seal(self, shards_count: int, next_count: int, next_epoch: int, came: int) -> Call[SealReply]:
        """Ends pushes to a shard whose jobs are to be moved; ``came``: the last step that the next layout has."""
        return Call("seal", self.prefix, ["", shards_count, next_count, next_epoch, came], read=SealReply)

    def move_out(self, token: str, done: int) -> Call[MoveReply]:
        """The jobs behind the step ``done``, whose own are deleted."""
        return Call("move_out", self.prefix, ["", token, done], read=MoveReply.of)

    def move_in(self, origin: int, page: MoveReply, items: Iterable[tuple[bytes, bytes, Any]]) -> Call[MoveInReply]:
        """Brings some items of a page of the shard ``origin``."""
        data = [b"", b"%d" % origin, b"%d" % page.step, page.kind, page.clock, page.features]
        for item_id, score, rest in items:
            texts = (
                [text if isinstance(text, bytes) else b"%d" % text for text in rest] if type(rest) is list else [rest]
            )
            data += (item_id, score, b"%d" % len(texts), *texts)
        return Call("move_in", self.prefix, (), data, read=MoveInReply)

    def open(
        self, clock: bytes, server_time: bytes, server_time_since: bytes, fence: bytes, step: bytes
    ) -> Call[OpenReply]:
        """Opens a shard of the next layout: all that belongs to it has come."""
        return Call("open_shard", self.prefix, ["", clock, server_time, server_time_since, fence, step], read=OpenReply)

    # --- pushes, schedules ---

    def set_schedule(self, name: str, before: bytes, record: bytes) -> Call[int]:
        """Changes the record of a schedule from ``before``; b"": none. Replies 0: it is another one."""
        return Call("set_schedule", self.prefix, ["", name, before, record])
