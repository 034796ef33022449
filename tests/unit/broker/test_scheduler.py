from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowq.broker.scheduler import LagScheduler, Schedulable, Scheduler, SeqScheduler

NOW = 1000.0


@dataclass(eq=False)
class Shard:
    """A shard as a scheduler sees it: `waits` seconds since its oldest job became due."""

    name: str
    waits: float = 1.0
    index: int = 0

    @property
    def queue(self) -> str:
        return self.name

    @property
    def next_due(self) -> float | None:
        return NOW - self.waits


def shards_named(names: str) -> list[Shard]:
    return [Shard(name) for name in names]


def names(scheduler: Scheduler[Shard], shards: list[Shard], calls: int) -> list[str | None]:
    returned = [scheduler(shards, NOW) for _ in range(calls)]
    return [shard.name if shard else None for shard in returned]


class TestLag:
    def test_the_shard_that_has_waited_longest_is_next(self) -> None:
        shards = [Shard("a", 1), Shard("b", 3), Shard("c", 2)]
        assert LagScheduler()(shards, NOW) is shards[1]

    def test_of_equals_the_first_in_the_list_is_next(self) -> None:
        shards = [Shard("a", 1), Shard("b", 3), Shard("c", 3)]
        assert LagScheduler()(shards, NOW) is shards[1]

    def test_of_no_shards_none_is_next(self) -> None:
        no_shards: list[Shard] = []
        assert LagScheduler()(no_shards, NOW) is None

    @given(st.lists(st.integers(0, 5), min_size=1, max_size=20))
    def test_no_shard_has_waited_longer_than_the_chosen(self, waits: list[int]) -> None:
        shards = [Shard(str(i), wait) for i, wait in enumerate(waits)]
        expected = max(shards, key=lambda shard: shard.waits)  # max keeps the first of equals
        assert LagScheduler()(shards, NOW) is expected


class TestSeq:
    def test_shards_take_turns_whatever_their_lag(self) -> None:
        shards = [Shard("a", 1), Shard("b", 99), Shard("c", 2)]
        assert names(SeqScheduler(), shards, calls=7) == ["a", "b", "c", "a", "b", "c", "a"]

    def test_shards_of_a_queue_take_turns_by_their_number(self) -> None:
        shards = [Shard("a", index=2), Shard("a", index=10), Shard("b", index=0)]
        scheduler = SeqScheduler()
        assert [scheduler(shards, NOW) for _ in range(4)] == [*shards, shards[0]]

    def test_the_only_shard_is_returned_again_and_again(self) -> None:
        assert names(SeqScheduler(), [Shard("b")], calls=3) == ["b", "b", "b"]

    def test_a_shard_that_is_not_ready_loses_its_turn(self) -> None:
        a, b, c = shards_named("abc")
        scheduler = SeqScheduler()
        assert names(scheduler, [a, c], calls=2) == ["a", "c"]
        assert names(scheduler, [a, b, c], calls=3) == ["a", "b", "c"]

    def test_shards_that_join_get_their_turn_in_their_order(self) -> None:
        a, b, c = shards_named("abc")
        scheduler = SeqScheduler()
        assert names(scheduler, [a, c], calls=1) == ["a"]
        assert names(scheduler, [a, b, c], calls=3) == ["b", "c", "a"]

    def test_the_turn_passes_on_when_the_last_shard_leaves(self) -> None:
        a, b, c, d = shards_named("abcd")
        scheduler = SeqScheduler()
        assert names(scheduler, [a, b, c, d], calls=2) == ["a", "b"]
        assert names(scheduler, [a, c, d], calls=3) == ["c", "d", "a"]

    def test_without_shards_nothing_is_next_and_the_turn_is_kept(self) -> None:
        scheduler = SeqScheduler()
        assert names(scheduler, [], calls=1) == [None]
        assert names(scheduler, shards_named("abc"), calls=1) == ["a"]
        assert names(scheduler, [], calls=1) == [None]
        assert names(scheduler, shards_named("abc"), calls=2) == ["b", "c"]

    def test_each_instance_goes_its_own_round(self) -> None:
        one, other = SeqScheduler(), SeqScheduler()
        assert names(one, shards_named("ab"), calls=1) == ["a"]
        assert names(other, shards_named("ab"), calls=1) == ["a"]

    @given(st.integers(1, 20), st.integers(0, 20))
    def test_within_one_round_every_shard_is_returned_once(self, count: int, turns_before: int) -> None:
        shards = [Shard("a", index=number) for number in range(count)]
        scheduler = SeqScheduler()
        for _ in range(turns_before):
            scheduler(shards, NOW)
        round_ = [scheduler(shards, NOW) for _ in shards]
        assert sorted(shard.index for shard in round_ if shard) == list(range(count))

    @given(st.lists(st.sets(st.integers(0, 9)), max_size=20))
    def test_any_change_of_the_list_between_calls_is_survived(self, held: list[set[int]]) -> None:
        all_shards = [Shard("a", index=number) for number in range(10)]
        scheduler = SeqScheduler()
        for indexes in held:
            shards = [all_shards[number] for number in sorted(indexes)]
            shard = scheduler(shards, NOW)
            assert (shard in shards) if shards else (shard is None)


@pytest.mark.parametrize("scheduler", [LagScheduler(), SeqScheduler()], ids=["lag", "seq"])
def test_both_are_schedulers_and_see_a_shard_by_its_protocol(scheduler: Scheduler[Shard]) -> None:
    shard = Shard("a")
    seen: Schedulable = shard
    assert scheduler([shard], NOW) is seen
