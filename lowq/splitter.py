"""Splitters: which shards a node holds, and which of its threads prefers which of them.

A splitter is any callable that is given the shards of all queues in their canonical order (A0 A1 A2 B0 ...)
and returns one list of shards per thread of this node. Shards in none of the lists are not held by this node.
A thread prefers the shards of its own list, no more than that: what makes one thread at a time true is the
claim on the shard, whatever a splitter says.

The lists are dealt like cards: shard i goes to group i % n. So the shards of one queue spread over as many
threads as possible, and no thread holds more than one shard more than another. Groups that are left without a
shard are dropped: a node may run fewer threads than it was allowed.

Splitters are pure: they read no clock and no Redis. `BalancedSplitter`, which deals over the nodes that are
alive now, belongs here too.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

S = TypeVar("S")

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


def _deal(items: Sequence[S], groups_count: int) -> list[list[S]]:
    """Item i goes to group i % groups_count; groups may stay empty."""
    return [list(items[group::groups_count]) for group in range(groups_count)]


def _require_count(name: str, value: object) -> None:
    if type(value) is not int or value < 1:  # not isinstance: True is no number of threads
        raise ValueError(f"{name} must be an integer of 1 or more; got {value!r}{_hint(value)}")


def _hint(value: object) -> str:
    return "; convert what comes from the environment with int()" if isinstance(value, str) else ""
