"""Requests, whose callers wait for the outcome; parts of them, one per shard; and script calls that parts share.

::

    waiting --- taken into a write ---> sent --- all outcomes are set ---> the caller is woken
       |                                 |   |        ^
       |                                 |   +--------+ refused for now: sent again, see `router.py`
       +---------- abandoned ------------+   its caller was interrupted or cancelled, or its time is up

An abandoned request is neither sent nor repeated. If it was sent already, its jobs may be in.
"""

import copy
import os
import time
from binascii import b2a_base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Protocol, Self, TypeGuard, TypeVar, Union

from lowq.codec import EncodedJob
from lowq.errors import PayloadError, RedisUnavailable
from lowq.sharding import Layout
from lowq.store import Call, NotConfirmed, Refusal, caller_deadline
from lowq.store.shard import PUSH

E = TypeVar("E", bound=BaseException)
#: The outcome of a part. True: it is in. False: the record of its schedule is another one, so nothing was written. An
#: error: it is not in, or with `RedisUnavailable` it may be. Success is always set, so a part that was left out by
#: mistake never counts as pushed.
Outcome = Union[bool, Exception, "Settled"]
#: The error of an abandoned request that may have been sent.
GIVEN_UP = "the push was given up before Redis had confirmed it"
#: How many arguments of the script a job has: id and payload, with its score and time, with its ttl and priority.
PLAIN, TIMED, EXTENDED = 2, 4, 6


class Target(Protocol):
    """The queue that jobs are pushed to, see `lowq.push.target`."""

    @property
    def queue(self) -> str: ...

    def reroute(self, part: "Part", refusal: Refusal, refused_at: float) -> list["Part"]:
        """Parts for the shards that a part's jobs belong to now: its shard had refused it by then (monotonic time), as
        it is sealed or not there.

        Raises:
            LowqError: the registry can't be read, or contradicts the shard.
        """
        ...


class Part:
    """Jobs of one push for one shard and one script call. ``jobs``: as they were given; ``words``: the queue's options
    for the script; ``hops``: how many layouts it has followed.
    """

    __slots__ = ("hops", "items", "jobs", "layout", "prefix", "shard", "target", "words")

    def __init__(
        self, target: Target, layout: Layout, shard: int, prefix: str, items: list[EncodedJob],
        jobs: list[Mapping[str, Any]], words: bytes, hops: int = 0,
    ) -> None:  # fmt: skip
        self.target = target
        self.layout = layout
        self.shard = shard
        self.prefix = prefix
        self.items = items
        self.jobs = jobs
        self.words = words
        self.hops = hops

    def ids(self) -> list[bytes]:
        return [item[0] for item in self.items]

    def keys(self) -> set[tuple[str, bytes]]:
        """The ids, each with its queue."""
        queue = self.target.queue
        return {(queue, item[0]) for item in self.items}

    def split(self, positions: Sequence[int]) -> tuple["Part", "Part | None"]:
        """The jobs at these positions, and the others; None: there are none. Both are new."""
        chosen = set(positions)
        others = [i for i in range(len(self.items)) if i not in chosen]
        return self._of(positions), self._of(others) if others else None

    def _of(self, positions: Sequence[int]) -> "Part":
        items, jobs = [self.items[i] for i in positions], [self.jobs[i] for i in positions]
        return Part(self.target, self.layout, self.shard, self.prefix, items, jobs, self.words, self.hops)


@dataclass(slots=True, eq=False)
class Settled:
    """The outcomes of parts that were refused and sent again, divided or to other shards."""

    #: Parts that were sent, with their outcomes.
    pairs: list[tuple[Part, bool | Exception]] = field(default_factory=list)
    #: Jobs for which there was no room.
    left: list[Mapping[str, Any]] = field(default_factory=list)


class Request:
    """Parts of a push whose caller waits for their outcome. How it waits is up to the subclass.

    ``jobs_count``, ``size``: jobs, and bytes of payloads; ``seconds``: how long the caller waits; ``room_until``: until
    when it waits for room, monotonic.
    """

    __slots__ = (
        "abandoned", "again", "deadline", "give_up_at", "is_limited_by_batch", "jobs_count", "outcomes", "parts",
        "room_until", "size", "waiter", "was_taken", "whole",
    )  # fmt: skip

    def __init__(self, parts: list[Part], jobs_count: int, size: int, seconds: float, room_until: float = 0.0) -> None:
        self.parts = parts
        self.jobs_count = jobs_count
        self.size = size
        self.room_until = room_until
        #: When its caller gives up, monotonic: at the latest at the deadline of the batch that it performs; and whether
        #: that deadline limits it.
        self.give_up_at = time.monotonic() + seconds
        self.deadline = caller_deadline()
        self.is_limited_by_batch = self.deadline < self.give_up_at
        if self.is_limited_by_batch:
            self.give_up_at = self.deadline
        #: Of the parts for which it is known.
        self.outcomes: dict[Part, Outcome] = {}
        #: Parts that are to be sent again, with why they were refused; None: only because of others.
        self.again: dict[Part, Refusal | None] = {}
        #: Whether its caller no longer waits, as far as the caller could say so.
        self.abandoned = False
        #: Whether it is in a write.
        self.was_taken = False
        #: What its caller waits on.
        self.waiter: Any = None
        #: The request of which it has some parts, as those go to several servers.
        self.whole: Request | None = None

    def some(self, parts: list[Part]) -> Self:
        """A request for some of the parts. The outcomes are those of this request, too."""
        other = type(self)(parts, *sizes_of(parts), 0.0, self.room_until)
        other.give_up_at, other.deadline = self.give_up_at, self.deadline
        other.is_limited_by_batch = self.is_limited_by_batch
        other.outcomes = self.outcomes
        other.whole = self
        return other

    def is_abandoned(self) -> bool:
        """Whether its caller waits no longer, or its time is up. The time also finds a caller that was interrupted
        before it could mark the request.
        """
        is_given_up = self.abandoned or (self.whole is not None and self.whole.abandoned)
        return is_given_up or self.give_up_at <= time.monotonic()

    @property
    def missed_batch(self) -> bool:
        """Whether its time is up because the deadline of its caller's batch has passed."""
        return self.deadline <= min(self.give_up_at, time.monotonic())

    def fail(self, error: Exception) -> None:
        """Sets the outcome of every part that has none yet."""
        for part in self.parts:
            self.outcomes.setdefault(part, error)

    def keys(self) -> set[tuple[str, bytes]]:
        """As of a `Part`, of all of them."""
        return self.parts[0].keys() if len(self.parts) == 1 else set().union(*(part.keys() for part in self.parts))

    @property
    def is_settled(self) -> bool:
        """Whether the outcome of every part is known."""
        return None not in map(self.outcomes.get, self.parts)

    def wake_caller(self) -> None:
        """Wakes the caller, which looks at the outcomes. It may be called again."""
        raise NotImplementedError

    def wake_caller_from_thread(self) -> None:
        """The same, from any thread."""
        self.wake_caller()


class Owner(Protocol):
    """A request, or refused parts of one: gets the outcomes of its parts."""

    @property
    def outcomes(self) -> "dict[Part, Outcome]": ...

    def is_abandoned(self) -> bool: ...


class SharedCall(Call[int]):
    """A script call that parts of several requests for one shard share. ``after``: the token of the call that must have
    come before; empty: none.
    """

    __slots__ = ("after", "first", "members", "token")

    def __init__(self, owner: Owner, part: Part, after: bytes) -> None:
        super().__init__(PUSH, part.prefix, ())
        self.only_if = SharedCall.leave_out_abandoned
        #: A part that says where it goes, and with which words.
        self.first = part
        self.after = after
        self.members = [(owner, part)]
        self.token = new_token()

    def prepare(self, keep: bytes) -> None:
        """Makes it fit to be sent, when it has all its members. ``keep``: seconds for which Redis remembers it."""
        first, members = self.first, self.members
        items = members[0][1].items
        if len(members) > 1:
            items = list(chain.from_iterable([part.items for _, part in members]))
        self.data = push_arguments(first.layout.shards_count, items, self.token, self.after, keep, first.words)

    def leave_out_abandoned(self) -> bool:
        """Leaves out the jobs of abandoned requests: their callers may have pushed other payloads for the same id
        meanwhile, which these must not follow. False: none is left. Redis knows the call by its token: once it was
        carried out, a repeat changes nothing, whatever is in it.
        """
        wanted = []
        for member in self.members:
            if member[0].is_abandoned():  # its caller may still be there to see the error
                member[0].outcomes[member[1]] = RedisUnavailable(GIVEN_UP)
            else:
                wanted.append(member)
        is_smaller = len(wanted) < len(self.members)
        self.members = wanted
        if wanted and is_smaller:
            was_repeated, keep = self.data[2], self.data[5]
            self.prepare(keep)
            self.data[2] = was_repeated
        return bool(wanted)

    def fail(self, error: Exception) -> None:
        """Sets the error as the outcome of all its parts."""
        for owner, part in self.members:
            owner.outcomes[part] = copy_of(error)


def sizes_of(parts: Sequence[Part]) -> tuple[int, int]:
    """The number of jobs in them, and of bytes of payloads."""
    return sum(len(part.items) for part in parts), sum(len(item[1]) for part in parts for item in part.items)


def new_token() -> bytes:
    return b2a_base64(os.urandom(9), newline=False)


def push_arguments(
    shards_count: int, items: Sequence[EncodedJob], token: bytes, after: bytes, keep: bytes, words: bytes
) -> list[bytes]:
    """The arguments of the script `push`. ``keep``: seconds for which Redis remembers the call; ``words``: the queue's
    options.
    """
    data = [b"", token, b"", b"%d" % shards_count, b"%d" % PLAIN + words, keep, after]
    for item in items:
        if item[2] or item[3] or len(item) == EXTENDED:
            break
        data += item[:2]
    else:
        return data  # as mostly
    width = max(map(len, items))
    data[4:] = [b"%d" % width + words, keep, after]
    for item in items:
        data += item if len(item) == width else (*item, b"=", b"=")
    return data


def pushed_items(data: Sequence[bytes]) -> Iterator[tuple[bytes, bytes, bytes, bytes, bytes, bytes]]:
    """The counterpart of `push_arguments`: id, payload, score, time, ttl and priority of each job, ``b""`` for those
    that neither the job nor the queue's options say.
    """
    width, *options = data[4].split()
    words = dict(option.split(b"=", 1) for option in options)
    rest = words.get(b"ttl", b""), words.get(b"priority", b"")
    step = int(width)
    for start in range(7, len(data), step):
        item = (*data[start : start + step], *[b""] * (TIMED - step))
        own = rest if len(item) < EXTENDED or item[4] == b"=" else item[4:]
        yield (*item[:4], *own)  # type: ignore[misc]  # slices of tuples have no known length


def copy_of(error: E) -> E:
    """A copy for one of several callers: raising an error adds a traceback to it."""
    try:
        copied = copy.copy(error)
    except Exception:  # some class that can't be copied
        return error
    copied.__cause__ = error.__cause__
    return copied


def is_failure(outcome: object) -> TypeGuard[Exception]:
    """Whether jobs are not in, or may not be."""
    return isinstance(outcome, Exception) and not isinstance(outcome, NotConfirmed)


def is_full(result: object) -> TypeGuard[Refusal]:
    """Whether jobs of the call did not fit: the queue has a capacity. Nothing was written."""
    return isinstance(result, Refusal) and result.code == "QUEUEFULL"


def is_misrouted(result: object) -> TypeGuard[Refusal]:
    """Whether the jobs of the call may belong to another layout of their queue by now. Nothing was written."""
    return isinstance(result, Refusal) and result.code in ("SEALED", "SHARDSCOUNT")


def is_misscored(result: object) -> TypeGuard[Refusal]:
    """Whether jobs of the call have no score, or one, and others of their shard are otherwise. Nothing was written."""
    return isinstance(result, Refusal) and result.code == "SCORES"


def is_out_of_turn(result: object) -> TypeGuard[Refusal]:
    """Whether the call that had to come before was not carried out. Nothing was written."""
    return isinstance(result, Refusal) and result.code == "OUTOFTURN"


def wrong_scores(part: Part, refusal: Refusal) -> PayloadError:
    """The error for a part that `is_misscored`."""
    kind, *positions = refusal.detail.split()
    job = part.jobs[int(positions[0]) if positions else 0]
    if kind == "missing":
        why = (
            "has no score, and others of the queue have versions: its score would be the time, which is above all "
            "of them, so it would come last and count as the newest. Push it with score=..., or declare where "
            "that is, once: the option score='version' of the worker, if that is the field's name"
        )
    else:
        why = (
            f"has a score, {part.items[int(positions[0])][2].decode()}, and others of its shard wait or run that "
            "were pushed without: their score is the time, so they would come after it and count as newer. Push "
            "all with scores, once what was pushed without is performed, or deleted"
        )
    return PayloadError(f"queue {part.target.queue!r}: job {job['id']!r:.100} {why}; nothing was written")
