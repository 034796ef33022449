"""A shard as its holder calls it: lease, jobs, reshards. A method for each script, and its reply.

A method packs the arguments of its script and returns a `Call`, whose `read` names the fields of the reply. The top of
a script's file in ``lua/`` says what it does and answers, and why it may be repeated.

Ids are as Redis has them. Times are Unix time in seconds, by the server's clock, unless they say something else. A
``now`` of None is the server's clock. A script that writes for the holder of the lease cites the ``token``. If it
concerns jobs in flight, it also cites the ``delivery`` that they were taken under. So neither a repeat nor a late call
of a former holder changes anything.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from queue import SimpleQueue
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from lowq.store.calls import Argument, Call, Repeated, time_argument

Id = bytes
#: The script that takes jobs in. `lowq.push.calls.push_arguments` packs its arguments.
PUSH = "push"
#: The outcomes of a release, besides 0 and 1: the job is buried as poison, or nothing is left of it. Also of a failure:
#: it was cancelled.
POISONED, EXPIRED, CANCELLED = 2, 3, 4
#: The part of a reshard in a lease. "prepared": a reshard has made the layout of the shard, which has no holder before
#: all of its jobs have come. "moves": the caller moves the jobs to another layout.
Reshard = Literal["", "prepared", "moves"]
#: Bits of the state that `ack_and_take` answers.
_PAUSED, _HAS_TTL, _HAS_TRACES, _SEALED, _HAS_EXPIRIES, _SOLO, _HAS_LEVELS, _FULL = 1, 2, 4, 8, 16, 32, 64, 128


class AcquireReply(NamedTuple):
    """The outcome of an attempt to get a lease."""

    state: Literal["acquired", "resumed", "adopted", "held", "restoring", "sealed", "unsealed", "fed"]
    #: Of what is taken under the lease, as Redis wrote it; empty: there is none.
    fence: bytes = b""
    #: Of "held": how many milliseconds its lease still runs.
    held_for: int = 0
    #: How many jobs of a dead holder wait again; which ones, if that was asked for.
    restored: int = 0
    restored_ids: Sequence[bytes] = ()
    #: Those that were buried, as their holders kept dying; and those that were cancelled, of which nothing is left.
    poisoned: Sequence[bytes] = ()
    cancelled: Sequence[bytes] = ()
    #: Of "resumed": the fence in its token, with which the lease was got.
    token_fence: bytes = b""

    @classmethod
    def of(cls, reply: Sequence[Any]) -> "AcquireReply":
        state = reply[0].decode()
        if state == "held":
            return cls(state, held_for=max(reply[1], 0))
        if state == "resumed":
            return cls(state, reply[2], token_fence=reply[1])
        if len(reply) < 3:
            return cls(state, reply[1] if len(reply) == 2 else b"")
        _, fence, restored, *poisoned = reply
        cancelled = poisoned.pop() if poisoned and isinstance(poisoned[-1], list) else ()
        ids = restored if isinstance(restored, list) else ()
        count = len(ids) if isinstance(restored, list) else restored
        return cls(state, fence if state == "acquired" else b"", 0, count, ids, poisoned, cancelled)


class RenewReply(NamedTuple):
    """The state of a shard whose lease was renewed."""

    #: Payloads that have come in since it was made, and jobs that are due or in flight.
    pushed: int
    backlog: int
    in_flight: int
    #: Seconds until the oldest waiting job is due, negative when it is overdue; None: nothing waits.
    delay: float | None
    paused: bool
    #: Its payloads have a ttl, so that it wants to be swept.
    has_ttl: bool
    #: Its jobs belong to another layout.
    sealed: bool
    #: The jobs in flight that are to end: id -> the delivery that they were taken under, and whether they are removed
    #: then; otherwise they wait again.
    stopping: Mapping[bytes, tuple[int, bool]] = MappingProxyType({})

    @classmethod
    def of(cls, reply: Any) -> "RenewReply | None":
        """None: it can't be read."""
        if not isinstance(reply, list):
            return None
        pushed, backlog, in_flight, delay, state, *marks = reply
        flat = marks[0] if marks else ()
        found = zip(flat[::3], flat[1::3], flat[2::3], strict=True)
        return cls(
            pushed, backlog, in_flight, None if delay is None else delay / 1e6, bool(state & _PAUSED),
            bool(state & _HAS_TTL), bool(state & _SEALED),
            {item: (int(number), mark == b"x") for item, number, mark in found},
        )  # fmt: skip


class TakeLimits(NamedTuple):
    """The bounds of one take."""

    jobs: int
    #: Payloads of one id.
    payloads: int
    #: Bytes of all payloads, each with 100 besides; one payload always fits.
    size: int


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
    #: Of jobs with a ttl: the time, then id, when the first of its payloads expires, id, ...: of those in a list. Of
    #: others it is in the item: "score,expires payload".
    expiries: Sequence[bytes]
    #: Id -> trace contexts, each followed by a newline, of those that have any.
    traces: Mapping[bytes, bytes]

    @classmethod
    def of(cls, reply: list[Any]) -> "TakeReply":
        delivery, delay, state, _, *items = reply
        levels: dict[int, float] | None = None
        expiries: Sequence[bytes] = ()
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
            yield item, [(payload, float(score.partition(b",")[0]))]


_NOTHING: Mapping[bytes, Any] = MappingProxyType({})
#: Gets a take that was sent for another thread: the shard's wake-ups before it, the call, and what waits for the reply;
#: or None, when it could not be sent.
SentTake = SimpleQueue[tuple[int, Call[TakeReply], Callable[[], list[Any]]] | None]


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


class MoveReply(NamedTuple):
    """A step of the jobs that leave a sealed shard."""

    step: int
    kind: Literal[b"waiting", b"morgue", b"schedules", b"rest", b"end"]
    #: The clock of the shard and its features, as `move_in` takes them.
    clock: bytes
    features: bytes
    #: Id, score, and the rest of a job: "score payload", or a list.
    items: list[tuple[bytes, bytes, Any]]

    @classmethod
    def of(cls, reply: Sequence[Any]) -> "MoveReply":
        step, kind, clock, _, _, features = reply[:6]
        return cls(step, kind, clock, features, list(zip(reply[6::3], reply[7::3], reply[8::3], strict=True)))

    @property
    def jobs(self) -> int:
        """The number of its items that are jobs."""
        return len(self.items) if self.kind in (b"waiting", b"morgue") else 0


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


class ShardScripts:
    """The scripts that the holder of the shard with this key prefix runs, and those that make and move shards."""

    __slots__ = ("prefix",)

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix

    # --- the lease ---

    def acquire(
        self, nonce: str, lease_ttl: int, shards_count: int | str, max_crash_count: int, *, jitter_seed: int,
        now: float | None = None, charge: bool = True, last_fence: int = 0, session: str = "", wants_ids: bool = False,
        reshard: Reshard = "",
    ) -> Call[AcquireReply]:  # fmt: skip
        """Asks for the lease. ``lease_ttl``: milliseconds; ``charge``: jobs that a dead holder left in flight are
        charged with a crash; ``last_fence``: of the caller's last lease; ``wants_ids``: of the jobs that wait again.
        """
        args: list[Argument] = [
            time_argument(now), nonce, lease_ttl, shards_count, max_crash_count, jitter_seed, "" if charge else "1",
            last_fence, session, "1" if wants_ids else "", reshard,
        ]  # fmt: skip
        while args[-1] == "" and len(args) > 8:
            args.pop()
        return Call("acquire", self.prefix, args, read=AcquireReply.of)

    def renew(self, token: str, lease_ttl: int, *, is_consumer: bool = False) -> Call[RenewReply | None]:
        """``lease_ttl``: milliseconds."""
        more = ["1"] if is_consumer else []
        return Repeated("renew", self.prefix, ["", token, lease_ttl, *more], read=RenewReply.of)

    def detach(self, token: str, lease_ttl: int) -> Call[int]:
        """Leaves the shard, and its jobs in flight, to a consumer with the same session."""
        return Call("detach", self.prefix, ["", token, lease_ttl])

    def surrender(self, token: str, leave: int | None = None) -> Call[int]:
        """``leave``: milliseconds that the lease is to run on, with jobs in flight; None: refused with any."""
        return Call("surrender", self.prefix, ["", token, "" if leave is None else leave])

    # --- jobs of the holder ---

    def ack_and_take(
        self, token: str, last: int, limits: TakeLimits, delivery: Argument, ids: Iterable[Id], now: float | None = None
    ) -> Call[TakeReply]:
        """``last``: the last delivery that reached the caller and is not reported whole, 0: none; ``ids``: performed,
        taken under that ``delivery``, as of ``lib/kept.lua``.
        """
        return Call(
            "ack_and_take",
            self.prefix,
            ["" if now is None else time_argument(now), token, last, *limits, delivery, *ids],
            read=TakeReply.of,
        )

    def fail(
        self, token: str, delivery: Argument, items: Iterable[Argument], now: float | None = None
    ) -> Call[list[int]]:
        """``items``: id, verdict, retry_count, delay (seconds), error, of each job."""
        return Call("fail", self.prefix, [time_argument(now), token, delivery, *items])

    def release(
        self, token: str, delivery: int, max_crash_count: int, items: Iterable[Argument], now: float | None = None
    ) -> Call[list[int]]:
        """``items``: id, delay (seconds; '': the time it was due), '1' when it made its process stop, of each job."""
        return Call("release", self.prefix, [time_argument(now), token, delivery, max_crash_count, *items])

    def bury_taken(
        self, token: str, delivery: Argument, items: Iterable[Argument], now: float | None = None
    ) -> Call[list[int]]:
        """``items``: id, reason, n, n payloads (0: the whole job), of each job."""
        return Call("bury", self.prefix, [time_argument(now), token, delivery, "", "", *items])

    def sweep(self, scan_size: int, morgue_ttl: str = "", morgue_max: str = "") -> Call[SweepReply]:
        """Removes expired payloads, and jobs of the morgue that are too old or too many."""
        return Call("sweep", self.prefix, ["", scan_size, morgue_ttl, morgue_max], read=SweepReply.of)

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
        self, clock: bytes = b"", server_time: bytes = b"", server_time_since: bytes = b"", fence: bytes = b"",
        step: bytes = b"0",
    ) -> Call[OpenReply]:  # fmt: skip
        """Opens a shard of the next layout: all that belongs to it has come. Without more, Redis has lost that it was
        opened before.
        """
        return Call("open_shard", self.prefix, ["", clock, server_time, server_time_since, fence, step], read=OpenReply)

    # --- schedules ---

    def set_schedule(self, name: str, before: bytes, record: bytes) -> Call[int]:
        """Changes the record of a schedule from ``before``; b"": none. Replies 0: it is another one."""
        return Call("set_schedule", self.prefix, ["", name, before, record])


def _pairs(flat: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    return zip(flat[::2], flat[1::2], strict=True)
