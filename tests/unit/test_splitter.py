from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowq.splitter import ByNodeSplitter, DefaultSplitter, Splitter

# Workers A, B, C, D with 3, 4, 1 and 2 shards.
SHARDS = ["A0", "A1", "A2", "B0", "B1", "B2", "B3", "C0", "D0", "D1"]

shard_lists = st.integers(0, 100).map(lambda count: list(range(count)))
counts = st.integers(1, 12)


def test_default_deals_over_threads_as_in_the_readme() -> None:
    assert DefaultSplitter(3)(SHARDS) == [
        ["A0", "B0", "B3", "D1"],
        ["A1", "B1", "C0"],
        ["A2", "B2", "D0"],
    ]


def test_by_node_deals_over_nodes_first_then_over_threads() -> None:
    # node 0 holds A0 A2 B1 B3 D0, node 1 holds A1 B0 B2 C0 D1
    assert ByNodeSplitter(2, 0, threads_per_node=2)(SHARDS) == [["A0", "B1", "D0"], ["A2", "B3"]]
    assert ByNodeSplitter(2, 1, threads_per_node=2)(SHARDS) == [["A1", "B2", "D1"], ["B0", "C0"]]


def test_threads_without_a_shard_are_dropped() -> None:
    assert DefaultSplitter(5)(["A0", "A1", "B0"]) == [["A0"], ["A1"], ["B0"]]
    assert ByNodeSplitter(3, 1, threads_per_node=5)(["A0", "A1", "B0", "B1", "B2"]) == [["A1"], ["B2"]]


def test_without_shards_there_are_no_threads() -> None:
    assert DefaultSplitter(5)([]) == []
    assert ByNodeSplitter(3, 2, threads_per_node=5)(["A0", "A1"]) == []


def test_any_sequence_of_any_type_will_do() -> None:
    assert DefaultSplitter(2)((("A", 0), ("A", 1), ("B", 0))) == [[("A", 0), ("B", 0)], [("A", 1)]]


def test_a_plain_function_is_a_splitter() -> None:
    def one_thread(shards: Any) -> list[list[str]]:
        return [list(shards)]

    splitter: Splitter[str] = one_thread
    assert splitter(SHARDS) == [SHARDS]


@given(shards=shard_lists, threads=counts)
def test_default_gives_every_shard_to_exactly_one_thread(shards: list[int], threads: int) -> None:
    groups = DefaultSplitter(threads)(shards)
    assert sorted(shard for group in groups for shard in group) == shards
    assert len(groups) == min(threads, len(shards))


@given(shards=shard_lists, nodes=counts, threads=counts)
def test_by_node_gives_every_shard_to_exactly_one_node(shards: list[int], nodes: int, threads: int) -> None:
    of_nodes = [ByNodeSplitter(nodes, number, threads)(shards) for number in range(nodes)]
    assert sorted(shard for groups in of_nodes for group in groups for shard in group) == shards


@given(shards=shard_lists, nodes=counts, threads=counts)
def test_nodes_and_threads_differ_by_one_shard_at_most(shards: list[int], nodes: int, threads: int) -> None:
    of_nodes = [ByNodeSplitter(nodes, number, threads)(shards) for number in range(nodes)]
    held = [sum(map(len, groups)) for groups in of_nodes]
    assert max(held) - min(held) <= 1
    for groups in of_nodes:
        sizes = [len(group) for group in groups]
        assert max(sizes, default=0) - min(sizes, default=0) <= 1


@given(shards=shard_lists, threads=counts)
def test_one_node_of_one_is_the_default(shards: list[int], threads: int) -> None:
    assert ByNodeSplitter(1, 0, threads)(shards) == DefaultSplitter(threads)(shards)


@given(shards=shard_lists, nodes=counts, threads=counts)
def test_every_thread_keeps_the_canonical_order(shards: list[int], nodes: int, threads: int) -> None:
    for number in range(nodes):
        for group in ByNodeSplitter(nodes, number, threads)(shards):
            assert group == sorted(group)


wrong_counts = pytest.mark.parametrize("count", [0, -1, 2.0, "3", None, True])


@wrong_counts
def test_threads_must_be_one_or_more(count: Any) -> None:
    with pytest.raises(ValueError, match="threads_per_node must be an integer of 1 or more"):
        DefaultSplitter(count)
    with pytest.raises(ValueError, match="threads_per_node must be an integer of 1 or more"):
        ByNodeSplitter(2, 0, threads_per_node=count)


@wrong_counts
def test_nodes_must_be_one_or_more(count: Any) -> None:
    with pytest.raises(ValueError, match="number_of_nodes must be an integer of 1 or more"):
        ByNodeSplitter(count, 0, threads_per_node=5)


@pytest.mark.parametrize("number", [-1, 3, 1.0, "1", None, False])
def test_nodes_are_numbered_from_zero(number: Any) -> None:
    with pytest.raises(ValueError, match="node_number must be an integer from 0 to 2"):
        ByNodeSplitter(3, number, threads_per_node=5)


def test_a_number_from_the_environment_is_refused_with_the_fix() -> None:
    unconverted: Any = "3"
    with pytest.raises(ValueError, match=r"got '3'; convert what comes from the environment with int\(\)"):
        DefaultSplitter(unconverted)
    with pytest.raises(ValueError, match=r"got '3'; convert what comes from the environment with int\(\)"):
        ByNodeSplitter(5, unconverted, threads_per_node=5)
