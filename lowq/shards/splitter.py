"""Splitters: which shards a node holds.

A splitter is any callable that is given the shards of all queues in their canonical order (A0 A1 A2 B0 ...)
and returns lists of shards, one per thread. Shards in none of the lists are not held by this node; the
threads of the node share all others.

The lists are dealt like cards: shard i goes to group i % n. So the shards of one queue spread over as many
threads as possible, and no thread holds more than one shard more than another. Groups that are left without a
shard are dropped: a node may run fewer threads than it was allowed.

Splitters are pure: they read no clock and no Redis. One that has a method `among` is asked anew, through it,
whenever a node comes or goes; `BalancedSplitter` is the one that does.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol, TypeAlias, TypeVar, runtime_checkable

#: The nodes that share the work: name -> queue -> its shards_count, of the queues that the node serves. A queue that
#: was resharded is named with its layout: "Orders@1".
Members: TypeAlias = Mapping[str, Mapping[str, int]]


class Splittable(Protocol):
    """What `BalancedSplitter` sees of a shard."""

    @property
    def queue(self) -> str: ...

    @property
    def index(self) -> int: ...


S = TypeVar("S")
P = TypeVar("P", bound=Splittable)

#: What a user's own splitter has to be: shards in canonical order -> one sequence of shards per thread.
Splitter: TypeAlias = Callable[[Sequence[S]], Sequence[Sequence[S]]]


@dataclass(frozen=True)
class DefaultSplitter:
    """Deals all shards over the threads of the only node.

    A0 A1 A2 B0 B1 B2 B3 C0 D0 D1 over 3 threads: t0: A0 B0 B3 D1; t1: A1 B1 C0; t2: A2 B2 D0.

    Raises:
        ValueError: `threads_per_node` is no integer of 1 or more.
    """

    threads_per_node: int

    def __post_init__(self) -> None:
        _require_count("threads_per_node", self.threads_per_node)

    def __call__(self, shards: Sequence[S]) -> list[list[S]]:
        return [group for group in _deal(shards, self.threads_per_node) if group]


@dataclass(frozen=True)
class ByNodeSplitter:
    """Deals the shards over a fixed number of nodes, then this node's over its threads.

    All nodes must be given the same `number_of_nodes`, and each its own `node_number`, counted from 0. A
    shard whose node is not running is worked by nobody.

    Raises:
        ValueError: a count is no integer of 1 or more, or `node_number` is outside 0 ... number_of_nodes - 1.
    """

    number_of_nodes: int
    node_number: int
    threads_per_node: int

    def __post_init__(self) -> None:
        _require_count("number_of_nodes", self.number_of_nodes)
        _require_count("threads_per_node", self.threads_per_node)
        if type(self.node_number) is not int or not 0 <= self.node_number < self.number_of_nodes:
            raise ValueError(
                f"node_number must be an integer from 0 to {self.number_of_nodes - 1}, as nodes are counted "
                f"from 0 and number_of_nodes is {self.number_of_nodes}; got {self.node_number!r}"
                f"{_hint(self.node_number)}"
            )

    def __call__(self, shards: Sequence[S]) -> list[list[S]]:
        of_this_node = _deal(shards, self.number_of_nodes)[self.node_number]
        return [group for group in _deal(of_this_node, self.threads_per_node) if group]


@runtime_checkable
class MembershipSplitter(Protocol):
    """A splitter that is asked anew when nodes come and go."""

    def among(self, shards: Sequence[P], members: Members, me: str) -> Sequence[Sequence[P]]:
        """The lists of this node, one per thread, while these nodes share the work. All nodes must come to the same
        shares, so nothing but the arguments may enter into it.
        """
        ...


@dataclass(frozen=True)
class BalancedSplitter(DefaultSplitter):
    """Shares the shards out among the nodes that are alive now, then deals this node's over its threads.

    The shards of one queue go evenly, to within one, to the nodes that serve it; when a node joins n others, or
    leaves them, about 1/n of the shards move. See `shares`. Without other nodes it is a `DefaultSplitter`.

    Raises:
        ValueError: `threads_per_node` is no integer of 1 or more.
    """

    def among(self, shards: Sequence[P], members: Members, me: str) -> list[list[P]]:
        """The lists of the node ``me``, one per thread that has a shard."""
        owners = shares(members)
        # While a queue is resharded the shards of its two layouts are shared out apart.
        return self(
            [shard for shard in shards if owners.get((getattr(shard, "layout_name", shard.queue), shard.index)) == me]
        )


#: How many shards a node may have more than another, over all queues, before it gets no more odd ones.
_TOLERANCE = 2


def shares(members: Members) -> dict[tuple[str, int], str]:
    """Who is to have which shard: ``(queue, index) -> node``; the same on every node that knows the same members.

    Rendezvous hashing with bounded loads: every pair of a shard and a node has a weight, and the heaviest pairs win
    as long as the node has room. (Thaler and Ravishankar, "Using name-based mappings to increase hit rates", 1998;
    Mirrokni, Thorup and Zadimoghaddam, "Consistent hashing with bounded loads", 2018.) The room of a node in a
    queue is the even share; the shards left over go one each to nodes chosen by weight, too, but not to one that
    has got many more than the others in the queues before.
    """
    counts: dict[str, int] = {}
    for served in members.values():
        for queue, count in served.items():
            counts[queue] = max(count, counts.get(queue, 0))
    owners: dict[tuple[str, int], str] = {}
    load = dict.fromkeys(members, 0)
    for queue in sorted(counts):
        count = counts[queue]
        serving = [node for node in sorted(members) if queue in members[node]]
        even, odd = divmod(count, len(serving))
        full = min(load[node] for node in serving) + _TOLERANCE
        by_weight = sorted(serving, key=lambda node: _weight(queue, "", node))
        chosen = sorted(by_weight, key=lambda node: load[node] > full)[:odd]
        room = {node: even + (node in chosen) for node in serving}
        pairs = [(_weight(queue, index, node), index, node) for index in range(count) for node in serving]
        pairs.sort(reverse=True)
        for _, index, node in pairs:
            if room[node] and (queue, index) not in owners:
                owners[queue, index] = node
                room[node] -= 1
                load[node] += 1
    return owners


def _weight(queue: str, index: object, node: str) -> bytes:
    return blake2b(f"{queue}\0{index}\0{node}".encode("utf-8", "surrogateescape"), digest_size=8).digest()


def _deal(items: Sequence[S], groups_count: int) -> list[list[S]]:
    """Item i goes to group i % groups_count; groups may stay empty."""
    return [list(items[group::groups_count]) for group in range(groups_count)]


def _require_count(name: str, value: object) -> None:
    if type(value) is not int or value < 1:  # not isinstance: True is no number of threads
        raise ValueError(f"{name} must be an integer of 1 or more; got {value!r}{_hint(value)}")


def _hint(value: object) -> str:
    return "; convert what comes from the environment with int()" if isinstance(value, str) else ""
