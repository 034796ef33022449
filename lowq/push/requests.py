"""Requests: small pushes whose callers wait for their outcome, and the script calls that several of them share.

::

    waiting --- taken into a write ---> sent --- all outcomes are set ---> the caller is woken
       |                                 |   |        ^
       |                                 |   +--------+ what was refused for now is sent again, see `refused.py`
       +---------- abandoned ------------+   its caller was interrupted or cancelled, or its time is up

An abandoned request is neither sent nor repeated. If it was sent already, its jobs may be in.
"""

import copy
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal, TypeGuard, TypeVar, Union

from lowq.codec import EncodedJob
from lowq.errors import RedisUnavailable
from lowq.push.parts import Part, mark_repeated, new_token, push_arguments
from lowq.store import Call, Refusal
from lowq.store.shard import PushCall

E = TypeVar("E", bound=BaseException)
#: What became of a part. True: it is in. An error: it is not, or with `RedisUnavailable` it may be. None: that is not
#: known yet. Success is always set, so a part that was left out by mistake never counts as pushed.
Outcome = Union[Literal[True], Exception, "Settled", None]


@dataclass(slots=True, eq=False)
class Settled:
    """What became of parts that were refused and sent again, divided or to other shards."""

    #: What was sent, with its outcome.
    pairs: list[tuple[Part, Outcome]] = field(default_factory=list)
    #: Jobs for which there was no room.
    left: list[Mapping[str, Any]] = field(default_factory=list)


class Request:
    """A small push that waits for its outcome among others. How its caller waits is up to the subclass."""

    __slots__ = (
        "abandoned",
        "give_up_at",
        "is_limited_by_batch",
        "jobs_count",
        "outcomes",
        "parts",
        "room_until",
        "size",
        "was_taken",
    )

    def __init__(
        self, parts: list[Part], jobs_count: int, size: int, timeout: float, is_limited_by_batch: bool,
        room_until: float = 0.0,
    ) -> None:  # fmt: skip
        self.parts = parts
        self.jobs_count = jobs_count
        #: Bytes of payloads.
        self.size = size
        #: When its caller gives up, monotonic.
        self.give_up_at = time.monotonic() + timeout
        #: Whether that is the deadline of the batch that its caller performs, not push_timeout.
        self.is_limited_by_batch = is_limited_by_batch
        #: Until when it waits for room, monotonic.
        self.room_until = room_until
        #: Of each part.
        self.outcomes: list[Outcome] = [None] * len(parts)
        #: Whether its caller no longer waits, as far as the caller could say so.
        self.abandoned = False
        #: Whether it is in a write.
        self.was_taken = False

    def is_abandoned(self) -> bool:
        """Whether nobody waits for the outcome, or not for long: its time is up. A caller that was interrupted before
        it could say anything is found by that, too.
        """
        return self.abandoned or self.give_up_at <= time.monotonic()

    def fail(self, error: Exception) -> None:
        """Sets the outcome of every part that has none yet."""
        outcomes = self.outcomes
        for i, outcome in enumerate(outcomes):
            if outcome is None:
                outcomes[i] = error

    def keys(self) -> set[tuple[str, bytes]]:
        """As of a `Part`, of all of them."""
        return self.parts[0].keys() if len(self.parts) == 1 else set().union(*(part.keys() for part in self.parts))

    @property
    def is_settled(self) -> bool:
        """Whether the outcome of every part is known."""
        return None not in self.outcomes

    def settle(self, position: int, outcome: Outcome) -> None:
        """Sets the outcome of a part, from any thread, and wakes the caller if it was the last one."""
        if self.outcomes[position] is None:
            self.outcomes[position] = outcome
        if self.is_settled:
            self.wake_caller_from_thread()

    def wake_caller(self) -> None:
        """Has the caller look at the outcomes. It may be called again."""
        raise NotImplementedError

    def wake_caller_from_thread(self) -> None:
        """The same, from any thread."""
        self.wake_caller()


class SharedCall(PushCall):
    """A script call that parts of several requests for one shard share."""

    __slots__ = ("after", "members", "prefix", "shards_count", "token", "words")

    def __init__(self, prefix: str, shards_count: int, words: bytes, after: bytes) -> None:
        super().__init__(prefix)
        self.after = after
        self.prefix = prefix
        self.shards_count = shards_count
        self.words = words
        #: Requests, and the positions of their parts.
        self.members: list[tuple[Request, int]] = []
        self.token = new_token()

    def prepare(self, keep: bytes) -> None:
        """Makes it fit to be sent, when it has all its members. ``keep``: seconds for which Redis remembers it."""
        parts = [request.parts[i] for request, i in self.members]
        items: list[EncodedJob] = list(chain.from_iterable([part.items for part in parts]))
        width = max(part.width for part in parts)
        self.data = push_arguments(self.shards_count, items, self.token, self.after, keep, width, self.words)

    def is_wanted(self) -> bool:
        # It leaves without the jobs of abandoned requests: their callers may have pushed something else for the same id
        # meanwhile, and what comes late would come after that. Redis knows the call by its token: if it was carried
        # out it is not carried out again, whatever is in a repeat.
        wanted = without_abandoned(self.members)
        if wanted and len(wanted) < len(self.members):
            was_repeated, keep = self.data[2], self.data[5]
            self.members = wanted
            self.prepare(keep)
            self.data[2] = was_repeated
        self.members = wanted
        return bool(wanted)

    def repeated_call(self) -> Call[Any] | None:
        if not self.members:
            return None
        mark_repeated(self)
        return self

    def set_outcome(self, outcome: Literal[True] | Exception) -> None:
        """Sets the outcome of all its parts."""
        if outcome is not True and len(self.members) > 1:
            for request, i in self.members:
                request.outcomes[i] = copy_of(outcome)
        else:
            for request, i in self.members:
                request.outcomes[i] = outcome


def without_abandoned(members: Sequence[tuple[Request, int]]) -> list[tuple[Request, int]]:
    """Those that somebody waits for. The others get an error, as their callers may still be there to see it."""
    left: list[tuple[Request, int]] = []
    for request, i in members:
        if request.is_abandoned():
            request.outcomes[i] = RedisUnavailable("the push was given up before Redis had confirmed it")
        else:
            left.append((request, i))
    return left


def copy_of(error: E) -> E:
    """A copy, for one of several callers: whoever raises an error adds a traceback to it."""
    try:
        copied = copy.copy(error)
    except Exception:  # some class that can't be copied
        return error
    copied.__cause__ = error.__cause__
    return copied


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
