"""The scripts that only read: how each is called, and what its reply says, by name."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from lowq.codec import decode_id
from lowq.errors import RedisUnavailable
from lowq.inspection.pattern import encode_pattern, ids_per_call
from lowq.store import Call, Client, Command, untrusted
from lowq.store.scripts import time_argument

#: Calls that go out together. Redis works what one client wrote in one piece, so these must be short as a whole:
#: a walk takes well under a millisecond, a scan two or three, statistics some 20 microseconds a shard.
TOGETHER = 8
SCANS_TOGETHER = 3
STATS_TOGETHER = 200

#: (order value, id): where something is in an order. The value is 0.0 in the order by id.
Position = tuple[float, bytes]


#: Calls without an answer, by their place among all, as a primary of a cluster is away that others don't need.
Silent = dict[int, RedisUnavailable]


def ask(
    client: Client, calls: Sequence[Call | Command], together: int = TOGETHER, silent: Silent | None = None
) -> Iterator[Any]:
    """The replies to calls, a few of them sent at a time so that other clients of Redis come in between. ``silent``:
    those without an answer are entered there, and their reply is None; without it, they are an error.

    Raises:
        RedisUnavailable, RedisRefused, ScriptError: the first error among the replies.
    """
    for start in range(0, len(calls), together):
        for place, reply in enumerate(client.run_many(calls[start : start + together]), start):
            if silent is not None and client.is_cluster and isinstance(reply, RedisUnavailable):
                silent[place] = reply
                if len(silent) == len(calls):
                    raise reply
                yield None
                continue
            if isinstance(reply, Exception):
                raise reply
            yield reply


# --- stats ---


class ShardStats(NamedTuple):
    """What the script `stats` answers. Values that can't be read count as 0."""

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
    def of(cls, reply: Sequence[Any]) -> "ShardStats":
        (
            length, due, retries, taken, morgue_length, lag, processed, failed, buried, paused, lease, ttl, oldest_id,
            oldest_at, expired, pushed, sealed, moved, fed,
        ) = reply  # fmt: skip
        return cls(
            length,
            due,
            retries,
            taken,
            morgue_length,
            untrusted.finite(lag, 0.0),
            untrusted.count(processed),
            untrusted.count(failed),
            untrusted.count(buried),
            paused is not None,
            lease,
            max(ttl, 0) / 1000,
            oldest_id,
            None if oldest_at is None else float(oldest_at),
            untrusted.count(expired),
            untrusted.count(pushed),
            sealed is not None,
            moved is not None,
            fed is not None,
        )


def stats_call(prefix: str, now: float | None) -> Call:
    """Asks how a shard is doing; see `ShardStats`."""
    return Call("stats", prefix, [time_argument(now)])


def read_stats(client: Client, prefixes: Sequence[str], now: float | None) -> list[ShardStats]:
    """How these shards are doing.

    Raises:
        RedisUnavailable, RedisRefused, ScriptError
    """
    calls = [stats_call(prefix, now) for prefix in prefixes]
    return [ShardStats.of(reply) for reply in ask(client, calls, STATS_TOGETHER)]


# --- scan ---


class Scanned(NamedTuple):
    """What the script `scan` answers."""

    #: None: this was the last of the shard.
    cursor: bytes | None
    #: Unix time, seconds: what is due is not after it.
    due_cutoff: float
    #: The shard's clock, as Redis wrote it; empty before the first push.
    clock: bytes
    found: list[Position]

    @classmethod
    def of(cls, reply: Sequence[Any]) -> "Scanned":
        cursor, due_cutoff, clock, *found = reply
        return cls(None if cursor == b"0" else cursor, float(due_cutoff), clock, _positions(found))


class Scan(NamedTuple):
    """What is looked for, in which set."""

    #: due, retries, morgue or taken.
    base: str
    #: Of ids; "" = any.
    pattern: str
    #: The value wanted: perform_at, retry_count, buried_at or id.
    order: str
    #: Only jobs that are "due" or "later"; "" = any.
    when: str = ""
    #: Only "fresh" or "failed" jobs; "" = any.
    past: str = ""

    def call(self, prefix: str, cursor: bytes, now: str) -> Call:
        """Asks for the next ids of a shard; see `Scanned`. It looks at about 1,000, fewer for a dear pattern."""
        wanted = [encode_pattern(self.pattern), self.order.encode(), self.when.encode(), self.past.encode()]
        return Call("scan", prefix, [now, self.base, cursor, *wanted, ids_per_call(self.pattern)])


# --- range_page ---


class RangePage(NamedTuple):
    """What the script `range_page` answers."""

    finished: bool
    #: Score, as Redis wrote it, and id: where the next page goes on; None: nothing was looked at.
    position: tuple[bytes, bytes] | None
    found: list[Position]
    #: Whether the shard uses priorities: each level is asked for by itself.
    has_levels: bool

    @classmethod
    def of(cls, reply: Sequence[Any]) -> "RangePage":
        state, score, job_id, *found = reply
        position = None if score is None else (score, job_id)
        return cls(bool(state & 1), position, _positions(found), bool(state & 2))


def _positions(found: Sequence[bytes]) -> list[Position]:
    """From id, value, id, value..."""
    return list(zip(map(float, found[1::2]), found[::2], strict=True))


# --- why ---


class Flight(NamedTuple):
    """What else of an id's shard is in flight."""

    number: int
    #: When the first of them was taken, Unix time in seconds; None: that can't be read.
    since: float | None
    #: Up to three of them, those taken first.
    ids: tuple[str, ...]

    @classmethod
    def of(cls, reply: Sequence[Any] | None) -> "Flight":
        if reply is None:
            return cls(0, None, ())
        number, since, *ids = reply
        return cls(number, untrusted.finite(since), tuple(decode_id(job_id) for job_id in ids))


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
    #: As of `ShardStats`.
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
