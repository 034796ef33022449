from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowq.shards.scheduler import LagScheduler, Scheduler, SeqScheduler
from lowq.shards.shard import urgent_level

NOW = 1000.0


@dataclass(eq=False)
class Shard:
    """A shard as a scheduler sees it: `waits` seconds since its oldest job became due, None: no job."""

    name: str
    waits: float | None = 1.0
    blocked: bool = False  # paused, claimed or not leased
    index: int = 0
    #: Priority -> when the oldest job of it is due.
    levels: dict[int, float] | None = None

    def priority_at(self, now: float) -> int:
        return urgent_level(self.levels, now)

    @property
    def queue(self) -> str:
        return self.name

    @property
    def dispatch(self) -> "Shard":
        return self

    @property
    def next_due(self) -> float | None:
        return None if self.waits is None else NOW - self.waits

    def ready(self, now: float) -> bool:
        due = self.next_due
        return due is not None and due <= now and not self.blocked


def chosen(scheduler: Scheduler[Shard], shards: Sequence[Shard], now: float = NOW) -> Shard | None:
    return scheduler(shards, now, lambda shard: shard.ready(now))


def names(scheduler: Scheduler[Shard], shards: list[Shard], calls: int) -> list[str | None]:
    returned = [chosen(scheduler, shards) for _ in range(calls)]
    return [shard.name if shard else None for shard in returned]


class TestLag:
    def test_one_pass_over_thousands_of_shards(self) -> None:
        looks = 0

        class Counted(Shard):
            @property
            def next_due(self) -> float | None:
                nonlocal looks
                looks += 1
                return self.waits

            def ready(self, now: float) -> bool:
                return not self.blocked

        shards = [Counted(str(i), float(i)) for i in range(5000)]
        assert chosen(LagScheduler(), shards) is shards[0]
        assert looks == len(shards)

    @given(st.lists(st.tuples(st.none() | st.integers(-5, 5), st.booleans()), max_size=20))
    def test_no_ready_shard_has_waited_longer_than_the_chosen(
        self, waits_and_blocked: list[tuple[int | None, bool]]
    ) -> None:
        shards = [Shard(str(i), *pair) for i, pair in enumerate(waits_and_blocked)]
        ready = [shard for shard in shards if shard.ready(NOW)]
        expected = max(ready, key=lambda shard: shard.waits or 0, default=None)  # max keeps the first of equals
        assert chosen(LagScheduler(), shards) is expected


class TestSeq:
    def test_shards_take_turns_whatever_their_lag(self) -> None:
        shards = [Shard("a", 1), Shard("b", 99), Shard("c", 2)]
        assert names(SeqScheduler(), shards, calls=7) == ["a", "b", "c", "a", "b", "c", "a"]

    def test_the_turn_is_not_lost_by_a_round_in_vain_nor_by_shards_that_join_or_leave(self) -> None:
        a, b, c, d = (Shard(name) for name in "abcd")
        scheduler = SeqScheduler()
        assert names(scheduler, [a, c], calls=1) == ["a"]
        assert names(scheduler, [Shard("x", None)], calls=1) == [None]
        assert names(scheduler, [a, b, c, d], calls=2) == ["b", "c"]
        assert names(scheduler, [a, b, d], calls=3) == ["d", "a", "b"]
        assert names(SeqScheduler(), [a, b], calls=1) == ["a"], "each instance goes its own round"

    @given(st.lists(st.booleans(), min_size=1, max_size=20), st.integers(0, 20))
    def test_within_one_round_every_ready_shard_is_returned_once(self, blocked: list[bool], turns_before: int) -> None:
        shards = [Shard("a", blocked=b, index=i) for i, b in enumerate(blocked)]
        ready = [shard.index for shard in shards if not shard.blocked]
        scheduler = SeqScheduler()
        names(scheduler, shards, turns_before)
        round_ = [chosen(scheduler, shards) for _ in ready]
        assert sorted(shard.index for shard in round_ if shard) == ready


@pytest.mark.parametrize("make", [LagScheduler, SeqScheduler], ids=["lag", "seq"])
def test_the_most_urgent_shard_is_next_and_the_least_urgent_keeps_its_tenth(make: type[LagScheduler]) -> None:
    backfill = Shard("a", 100, index=0, levels={9: NOW - 100})
    other = Shard("b", 50, index=1, levels={5: NOW - 50})
    live = Shard("c", 1, index=2, levels={0: NOW - 1, 9: NOW - 200})
    shards = [backfill, other, live]
    turns = names(make(), shards, calls=40)
    assert turns.count("c") >= 32
    assert [number for number, name in enumerate(turns, 1) if name == "a"][:1] == [10]
    assert turns.count("a") >= 4
    assert turns.count("b") >= 1
    # What is urgent and due later does not count yet, and what nothing is known of may be urgent.
    shards = [Shard("a", 100, index=0, levels={0: NOW + 1, 9: NOW - 100}), other]
    assert chosen(make(), shards) is other
    assert chosen(make(), shards, NOW + 1) is shards[0]
    shards = [backfill, Shard("new", 1, index=1)]
    assert chosen(make(), shards) is shards[1]
