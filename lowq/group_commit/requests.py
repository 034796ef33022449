"""Requests: small pushes whose callers wait for their outcome, and the script calls that several of them share.

::

    waiting --- taken into a write ---> sent --- outcomes are set ---> the caller is woken
       |                                 |
       +---------- abandoned ------------+   its caller was interrupted or cancelled, or its time is up

An abandoned request is neither sent nor repeated. If it was sent already, its jobs may be in.
"""

import copy
import time
from collections.abc import Sequence
from itertools import chain
from typing import Literal, TypeVar

from lowq.codec import EncodedJob
from lowq.errors import RedisUnavailable
from lowq.group_commit.parts import Part, mark_repeated, new_token, push_arguments
from lowq.store import Call

E = TypeVar("E", bound=BaseException)
#: What became of a part. True: it is in. An error: it is not, or with `RedisUnavailable` it may be. None: that is not
#: known yet. Success is always set, so a part that was left out by mistake never counts as pushed.
Outcome = Literal[True] | Exception | None


class Request:
    """A small push that waits for its outcome among others. How its caller waits is up to the subclass."""

    __slots__ = (
        "abandoned",
        "give_up_at",
        "is_limited_by_batch",
        "jobs_count",
        "outcomes",
        "parts",
        "size",
        "was_taken",
    )

    def __init__(
        self, parts: list[Part], jobs_count: int, size: int, timeout: float, is_limited_by_batch: bool
    ) -> None:
        self.parts = parts
        self.jobs_count = jobs_count
        #: Bytes of payloads.
        self.size = size
        #: When its caller gives up, monotonic.
        self.give_up_at = time.monotonic() + timeout
        #: Whether that is the deadline of the batch that its caller performs, not push_timeout.
        self.is_limited_by_batch = is_limited_by_batch
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

    def wake_caller(self) -> None:
        """Has the caller look at the outcomes. It may be called again."""
        raise NotImplementedError


class SharedCall(Call):
    """A script call that parts of several requests for one shard share."""

    __slots__ = ("after", "members", "prefix", "shards_count", "token", "words")

    def __init__(self, prefix: str, shards_count: int, words: bytes = b"") -> None:
        super().__init__("push", prefix, ())
        self.after = b""
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

    def repeated_call(self) -> Call | None:
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


def call_of_one(request: Request, position: int) -> SharedCall:
    """A call for one part alone."""
    part = request.parts[position]
    call = SharedCall(part.prefix, part.shards_count, part.words)
    call.members.append((request, position))
    return call


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
