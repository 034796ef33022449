"""The keys beside the shards: a call for each script of queues, nodes, sessions, limits, histories and the dashboard.

The ``key`` is one of `lowq.store.keys`. The top of a script's file in ``lua/`` says what it does and answers, and why
it may be repeated.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from lowq.store.calls import Argument, Call, time_argument


def rights(key: str, commands: Sequence[str]) -> Call[list[bytes]]:
    """The commands, of these, that the user may not run on a key or channel."""
    return Call("rights", key, commands)


# --- queues ---


class Registration(Call[bytes | int]):
    """Enters a queue. ``entry``: JSON, "" when only its shards_count is known; ``based_on``: the entry that it was made
    from, b"": it is entered whatever there is; ``strict``: another shards_count is an error; ``layout``: what the
    caller knows, as an entry has it up to its options. Replies the entry that there was, if it was another one.
    """

    __slots__ = ("queue", "shards_count")

    def __init__(
        self, key: str, queue: str, shards_count: int, entry: str = "", *, based_on: bytes = b"", strict: bool = False,
        layout: str = "",
    ) -> None:  # fmt: skip
        more = [layout] if layout else []
        super().__init__("register", key, ["", queue, shards_count, entry, based_on, "1" if strict else "", *more])
        self.queue = queue
        self.shards_count = shards_count


def set_layout(key: str, queue: str, before: bytes, entry: str) -> Call[bytes | int]:
    """Changes the entry of a queue from ``before``. Replies 1, or the entry that there is instead."""
    return Call("set_layout", key, ["", queue, before, entry])


# --- nodes ---


class HeartbeatReply(NamedTuple):
    """The nodes that live."""

    #: Seconds until the first of the others will have been silent for too long; None: there are no others.
    silent_in: float | None
    #: Unix time, seconds, by the server's clock.
    now: float
    #: Node -> its part in the work, JSON: of those that have one.
    parts: dict[bytes, bytes]

    @classmethod
    def of(cls, reply: Sequence[bytes]) -> "HeartbeatReply":
        silent_in, now, *parts = reply
        return cls(float(silent_in) if silent_in else None, float(now), dict(zip(parts[::2], parts[1::2], strict=True)))


def heartbeat(key: str, node: str, part: str, details: str, silence: float) -> Call[HeartbeatReply]:
    """Says that a node lives. ``part``, ``details``: JSON; "": it has none, or says goodbye; ``silence``: seconds after
    which it is to be taken for dead.
    """
    return Call("heartbeat", key, ["", node, part, details, silence], read=HeartbeatReply.of)


def prune_nodes(key: str) -> Call[HeartbeatReply]:
    """Takes the parts of dead nodes from them: an anonymous deregistration."""
    return heartbeat(key, "", "", "", 0)


# --- sessions, limits ---


class SessionReply(NamedTuple):
    """Whether a session is the caller's."""

    is_own: bool
    #: Seconds that it is another one's, if that dies.
    seconds: float

    @classmethod
    def of(cls, reply: Sequence[int]) -> "SessionReply":
        return cls(bool(reply[0]), max(reply[1], 0) / 1000)


def session(key: str, instance: str, seconds: float | None) -> Call[SessionReply]:
    """Gets or keeps a session for so long; None gives it up."""
    return Call("session", key, ["", instance, "" if seconds is None else int(seconds * 1000)], read=SessionReply.of)


class PermitsReply(NamedTuple):
    """Permits that were granted of a limit."""

    granted: int
    #: How many other holders wait.
    waiting: int
    #: Seconds until one more may be had, when fewer were granted than wanted; None: no time is known.
    delay: float | None
    #: Of a rate: the slot that they count in.
    slot: int
    #: Seconds for which somebody has put it off for all; None: nobody has.
    deferred: float | None

    @classmethod
    def of(cls, reply: Sequence[Any]) -> "PermitsReply":
        granted, waiting, delay, slot, deferred = reply
        seconds = [None if each is None else each / 1e6 for each in (delay, deferred)]
        return cls(granted, waiting, seconds[0], slot, seconds[1])


class TakePermits(Call[PermitsReply]):
    """Asks for permits. ``per``: seconds, of a rate; ``number``: of the call, a repeat has the same; ``has``: permits
    that the holder still needs, or of a rate those that it gives back unused, "slot count" for each slot; ``counted``:
    of a rate whose permits the holder still needs, how many others count from now on.
    """

    __slots__ = ("counted", "has", "want")

    def __init__(
        self, key: str, most: int, per: float | None, holder: str, number: int, has: int | str, want: int, ttl: float,
        counted: int | None = None,
    ) -> None:  # fmt: skip
        args: list[Argument] = ["", most, "" if per is None else repr(per), holder, number, has, want, repr(ttl)]
        if counted is not None:
            args.append(counted)
        super().__init__("take_permits", key, args, read=PermitsReply.of)
        self.has, self.want, self.counted = has, want, counted


def defer_limit(key: str, seconds: float) -> Call[int]:
    """Has nobody begin anything of a limit for so long; 0: from now on it may begin again."""
    return Call("defer_limit", key, ["", repr(float(seconds))])


# --- histories ---


def count(key: str, counted: Sequence[Argument], now: float | None = None) -> Call[int]:
    """Adds the work of a node for a queue to the queue's history."""
    return Call("count", key, [time_argument(now), *counted])


class RecordErrors(Call[list[bytes]]):
    """Adds failures. ``groups``: fingerprint, how many, the id that failed last, text, of each. Replies the
    fingerprints of those that there were not.
    """

    __slots__ = ("groups",)

    def __init__(self, key: str, most: int, forgotten: int, groups: Sequence[Argument]) -> None:
        super().__init__("record_errors", key, ["", most, forgotten, *groups])
        self.groups = groups


# --- the dashboard ---


def audit_append(key: str, entry: str, kept: int, replaces: str = "") -> Call[int]:
    return Call("audit_append", key, ["", entry, kept, replaces])


def task_begin(
    key: str, task_id: str, facts: str, most_running: int, most_ended: int, silence: float, kept: int
) -> Call[tuple[int, Any]]:
    """Replies (1, when it began), or (0, how many others run) when that is too many."""
    return Call("task_begin", key, ["", task_id, facts, most_running, most_ended, silence, kept])


class TaskReply(NamedTuple):
    """A task as Redis knows it from now on."""

    #: "": there is no such task.
    state: str
    is_cancelled: bool

    @classmethod
    def of(cls, reply: Sequence[Any]) -> "TaskReply":
        return cls(reply[0].decode(), bool(reply[1]))


def task_report(
    key: str, task_id: str, state: str, done: int, total: int | None, error: str, kept: int
) -> Call[TaskReply]:
    args: list[Argument] = ["", task_id, state, done, "" if total is None else total, error, kept]
    return Call("task_report", key, args, read=TaskReply.of)


def task_cancel(key: str, task_id: str) -> Call[int]:
    """Replies 0 when it has ended, or is not there."""
    return Call("task_cancel", key, ["", task_id])
