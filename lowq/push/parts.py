"""What is sent: the jobs of a push for one shard, as one call of the script."""

import secrets
from binascii import b2a_base64
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Protocol

from lowq.codec import EncodedJob
from lowq.sharding import Layout
from lowq.store import Call, Refusal
from lowq.store.shard import PushCall


class Target(Protocol):
    """Where jobs go."""

    @property
    def queue(self) -> str: ...

    def reroute(self, part: "Part", refusal: Refusal, refused_at: float) -> list["Part"]:
        """Parts for the shards that a part's jobs belong to now: its shard had refused it by then (monotonic time), as
        it is sealed or not there.

        Raises:
            LowqError: the registry can't be read, or contradicts the shard.
        """
        ...


class SentPart(Protocol):
    """What can be sent, and sent again."""

    prefix: str
    shards_count: int
    #: The token of the call that must have come before; empty: none.
    after: bytes

    def repeated_call(self) -> Call[Any] | None:
        """The call again, after its reply was lost; None: nobody wants it any more."""
        ...


class Part:
    """Jobs of one push for one shard, that go in one script call."""

    __slots__ = (
        "after",
        "call",
        "hops",
        "items",
        "jobs",
        "layout",
        "prefix",
        "shard",
        "shards_count",
        "target",
        "token",
        "width",
        "words",
    )

    def __init__(
        self, prefix: str, shards_count: int, items: list[EncodedJob], jobs: list[Mapping[str, Any]], width: int,
        after: bytes = b"", words: bytes = b"", *, layout: Layout | None = None, shard: int = 0,
        target: Target | None = None,
    ) -> None:  # fmt: skip
        #: Where it goes if its shard refuses it, and which shard that is.
        self.target = target
        self.layout = layout
        self.shard = shard
        self.prefix = prefix
        self.shards_count = shards_count
        self.items = items
        self.jobs = jobs
        #: How many arguments each job has, see `width_of`.
        self.width = width
        #: The token of the call that must have come before.
        self.after = after
        #: What the script is told of the queue's options.
        self.words = words
        self.token = b""
        self.call: Call[Any] | None = None
        #: How many layouts it has followed.
        self.hops = 0

    def ids(self) -> list[bytes]:
        return [item[0] for item in self.items]

    def keys(self) -> set[tuple[str, bytes]]:
        """Its ids, each with its queue, whatever shard it belongs to just now."""
        queue = self.prefix if self.target is None else self.target.queue
        return {(queue, item[0]) for item in self.items}

    def copy(self, positions: Sequence[int]) -> "Part":
        """Some of its jobs, to be sent with a token of their own, after nothing."""
        copied = Part(
            self.prefix, self.shards_count, [self.items[i] for i in positions], [self.jobs[i] for i in positions],
            self.width, words=self.words, layout=self.layout, shard=self.shard, target=self.target,
        )  # fmt: skip
        copied.hops = self.hops
        return copied

    def split(self, positions: Sequence[int]) -> tuple["Part", "Part | None"]:
        """The jobs at these positions, and the others; None: there are none."""
        if len(positions) == len(self.items):
            return self.copy(positions), None
        chosen = set(positions)
        return self.copy(positions), self.copy([i for i in range(len(self.items)) if i not in chosen])

    def make_call(self, keep: bytes, is_wanted: Callable[[], bool] | None = None) -> Call[Any]:
        """The call, with a fresh token unless there is one."""
        self.token = self.token or new_token()
        data = push_arguments(self.shards_count, self.items, self.token, self.after, keep, self.width, self.words)
        self.call = PushCall(self.prefix, data)
        self.call.only_if = is_wanted
        return self.call

    def repeated_call(self) -> Call[Any] | None:
        assert self.call is not None
        mark_repeated(self.call)
        return self.call


def new_token() -> bytes:
    return b2a_base64(secrets.token_bytes(9), newline=False)


#: How many arguments of the script a job has: id and payload, with its score and time, with its ttl and priority.
PLAIN, TIMED, EXTENDED = 2, 4, 6


def width_of(item: EncodedJob) -> int:
    """How many arguments a job needs."""
    if len(item) == EXTENDED:
        return EXTENDED
    return TIMED if item[2] or item[3] else PLAIN


def push_arguments(
    shards_count: int, items: Sequence[EncodedJob], token: bytes, after: bytes, keep: bytes, width: int, words: bytes
) -> list[bytes]:
    """What a call of the script is given. ``keep``: seconds for which Redis remembers it. ``words``: of the queue's
    options.
    """
    data = [b"", token, b"", b"%d" % shards_count, b"%d" % width + words, keep, after]
    if width == PLAIN:
        for item in items:
            data += item[:2]
    elif width == TIMED:
        data += chain.from_iterable(items)
    else:
        for item in items:
            data += item if len(item) == EXTENDED else (*item, b"=", b"=")
    return data


def pushed_items(data: Sequence[bytes]) -> Iterator[tuple[bytes, bytes, bytes, bytes, bytes, bytes]]:
    """The counterpart of `push_arguments`: id, payload, score, time, ttl and priority of each job, ``b""`` for what it
    does not say, also of those that the queue's options say.
    """
    width, *options = data[4].split()
    words = dict(option.split(b"=", 1) for option in options)
    rest = words.get(b"ttl", b""), words.get(b"priority", b"")
    step = int(width)
    for start in range(7, len(data), step):
        item = (*data[start : start + step], *[b""] * (TIMED - step))
        own = rest if len(item) < EXTENDED or item[4] == b"=" else item[4:]
        yield (*item[:4], *own)  # type: ignore[misc]  # slices of tuples have no known length


def mark_repeated(call: Call[Any]) -> None:
    """Has Redis look whether it carried the call out already."""
    call.data[2] = b"1"
