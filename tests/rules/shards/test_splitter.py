import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from statistics import mean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowq.shards.splitter import BalancedSplitter, ByNodeSplitter, DefaultSplitter, shares
from tests.rows import case

# Workers A, B, C, D with 3, 4, 1 and 2 shards.
SHARDS = ["A0", "A1", "A2", "B0", "B1", "B2", "B3", "C0", "D0", "D1"]

shard_lists = st.integers(0, 100).map(lambda count: list(range(count)))
counts = st.integers(1, 12)


def test_default_deals_shards_over_threads_in_turn() -> None:
    assert DefaultSplitter(3)(SHARDS) == [
        ["A0", "B0", "B3", "D1"],
        ["A1", "B1", "C0"],
        ["A2", "B2", "D0"],
    ]


def test_by_node_deals_over_nodes_first_then_over_threads() -> None:
    # node 0 holds A0 A2 B1 B3 D0, node 1 holds A1 B0 B2 C0 D1
    assert ByNodeSplitter(2, 0, threads_per_node=2)(SHARDS) == [["A0", "B1", "D0"], ["A2", "B3"]]
    assert ByNodeSplitter(2, 1, threads_per_node=2)(SHARDS) == [["A1", "B2", "D1"], ["B0", "C0"]]


@given(shards=shard_lists, nodes=counts, threads=counts)
def test_every_shard_has_one_node_and_thread_evenly_and_in_order(shards: list[int], nodes: int, threads: int) -> None:
    for of_nodes in (
        [ByNodeSplitter(nodes, number, threads)(shards) for number in range(nodes)],
        [DefaultSplitter(threads)(shards)],
    ):
        assert sorted(shard for groups in of_nodes for group in groups for shard in group) == shards
        held = [sum(map(len, groups)) for groups in of_nodes]
        assert max(held) - min(held) <= 1
        for groups in of_nodes:
            sizes = [len(group) for group in groups]
            assert max(sizes, default=0) - min(sizes, default=0) <= 1
            assert groups == [sorted(group) for group in groups]


def test_what_is_no_number_of_threads_or_nodes_is_refused() -> None:
    wrong: list[Any] = [0, 2.0, "3", True]
    for count in wrong:
        threads = "threads_per_node must be an integer of 1 or more"
        rows: list[tuple[Any, str]] = [
            (lambda: DefaultSplitter(count), threads),  # noqa: B023
            (lambda: BalancedSplitter(count), threads),  # noqa: B023
            (lambda: ByNodeSplitter(2, 0, threads_per_node=count), threads),  # noqa: B023
            (lambda: ByNodeSplitter(count, 0, 5), "number_of_nodes must be an integer of 1 or more"),  # noqa: B023
            (lambda: ByNodeSplitter(3, count or 3, 5), "node_number must be an integer from 0 to 2"),  # noqa: B023
        ]
        for make, message in rows:
            with case(count, message), pytest.raises(ValueError, match=message):
                make()
    with pytest.raises(ValueError, match=r"got '3'; convert what comes from the environment with int\(\)"):
        DefaultSplitter(wrong[2])


# --- shared out among the nodes that live ---


@dataclass(frozen=True)
class Item:
    """A shard, as far as splitters see it."""

    queue: str
    index: int


def items(queues: Mapping[str, int]) -> list[Item]:
    return [Item(queue, index) for queue, count in queues.items() for index in range(count)]


def held(owners: Mapping[tuple[str, int], str], queue: str | None = None) -> Counter[str]:
    return Counter(node for (of, _), node in owners.items() if queue in (None, of))


names = st.text("abcdefgh0123456789.:-é", min_size=1, max_size=12)
queue_counts = st.dictionaries(names, st.integers(1, 40), min_size=1, max_size=5)
node_sets = st.sets(names, min_size=1, max_size=8)


@given(queues=queue_counts, nodes=node_sets, threads=counts, seed=st.randoms())
def test_balanced_nodes_agree_whatever_order_they_heard_of_each_other_in(
    queues: dict[str, int], nodes: set[str], threads: int, seed: random.Random
) -> None:
    lists: list[list[Item]] = []
    for me in nodes:
        order = sorted(nodes)
        seed.shuffle(order)
        groups = BalancedSplitter(threads).among(items(queues), dict.fromkeys(order, queues), me)
        assert len(groups) <= threads
        assert max(map(len, groups), default=0) - min(map(len, groups), default=0) <= 1
        lists += groups
    assert sorted((item.queue, item.index) for part in lists for item in part) == sorted(
        (item.queue, item.index) for item in items(queues)
    )


@given(data=st.data(), queues=queue_counts, nodes=node_sets)
def test_balanced_nodes_share_only_what_they_both_serve(
    data: st.DataObject, queues: dict[str, int], nodes: set[str]
) -> None:
    members = {
        node: {name: queues[name] for name in data.draw(st.sets(st.sampled_from(sorted(queues))))} for node in nodes
    }
    owners = shares(members)
    for queue, count in queues.items():
        serving = [node for node in nodes if queue in members[node]]
        each = held(owners, queue)
        assert set(each) <= set(serving)
        assert sum(each.values()) == (count if serving else 0)
        assert max((each[node] for node in serving), default=0) - min((each[node] for node in serving), default=0) <= 1


def test_when_a_node_comes_or_goes_little_more_than_its_part_moves() -> None:
    all_queues: list[dict[str, int]] = [{"A": 1000}, {"A": 100, "B": 100, "C": 100}]
    for nodes, queues in product([1, 2, 3, 5, 10], all_queues):
        with case(nodes, queues):
            rng = random.Random(nodes)
            moved = []
            for _ in range(10):
                everybody = [f"host-{rng.random()}" for _ in range(nodes + 1)]
                before = shares(dict.fromkeys(everybody[:-1], queues))
                after = shares(dict.fromkeys(everybody, queues))
                moved.append(sum(after[shard] != before[shard] for shard in before) / len(before))
            assert mean(moved) < 1.75 / (nodes + 1)
            assert min(moved) >= 0.9 / (nodes + 1)  # what the newcomer gets, at least


def test_queues_of_one_shard_are_shared_out_too() -> None:
    queues = {f"queue-{number}": 1 for number in range(60)}
    each = held(shares(dict.fromkeys(["a", "b", "c"], queues)))
    assert sum(each.values()) == 60
    assert max(each.values()) - min(each.values()) <= 3


def test_a_balanced_node_alone_deals_as_the_default_does() -> None:
    queues = {"A": 3, "B": 4, "C": 1, "D": 2}
    alone = BalancedSplitter(3).among(items(queues), {"me": queues}, "me")
    assert [[f"{item.queue}{item.index}" for item in group] for group in alone] == DefaultSplitter(3)(SHARDS)
    assert BalancedSplitter(3)(SHARDS) == DefaultSplitter(3)(SHARDS)
    assert BalancedSplitter(3).among(items({"A": 5}), {"other": {"A": 5}}, "me") == []
    assert shares({}) == {}
