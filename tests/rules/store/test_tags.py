"""The hash tags of shards: as Redis has their slots, spread over the primaries of a cluster, and read back."""

from collections import Counter
from itertools import pairwise

from redis.crc import key_slot

from lowq.store.keys import SLOTS, place_of, queue_of_prefix, shard_prefix, slot_of, tag_of
from tests.rows import case

NAMES = [f"queue-{number}" for number in range(300)] + ["Orders", "Ünïcode", "a:b", "1", "q" * 128]


def test_a_slot_is_the_one_that_redis_has() -> None:
    for name in ("Orders", "Ünïcode", "a:1b"):
        for shard in range(100):
            prefix = shard_prefix("lowq", name, shard)
            slot = slot_of(tag_of(name, shard))
            assert slot == key_slot(prefix.encode()) == key_slot(f"{prefix}payloads:{{x}}".encode())


def test_tags_are_a_part_of_the_wire_format() -> None:
    # Frozen: whoever changes one loses the jobs of a shard.
    assert [tag_of("Orders", shard) for shard in (0, 1, 2, 3, 6, 16383)] == [
        "Orders:0c", "Orders:1fc", "Orders:2fd", "Orders:3bb", "Orders:6", "Orders:16383d",
    ]  # fmt: skip


def test_a_tag_is_its_place_and_nothing_else_is() -> None:
    for name in NAMES[-5:]:
        with case(name):
            for shard in (*range(30), 16383):
                assert place_of(tag_of(name, shard)) == (name, shard)
                assert place_of(tag_of(name, shard) + "a") is None
                assert queue_of_prefix(shard_prefix("n:s", name, shard)) == ("n:s", name)
    for tag in ("", ":", "Orders", "Orders:", "Orders:c", ":0", "Orders:00c", "Orders:-1", "Orders:" + "9" * 5000):
        with case(tag):
            assert place_of(tag) is None


def test_the_shards_of_a_queue_are_spread_over_the_primaries() -> None:
    # The first bound is a promise, see below. The others are what was found with 305 names.
    for shards_count, primaries, most in (
        (24, 3, 10), (24, 2, 13), (24, 6, 7), (24, 12, 4), (3, 3, 2), (7, 3, 3), (12, 2, 7), (48, 3, 19), (100, 30, 9),
    ):  # fmt: skip
        with case(shards_count, primaries):
            assert max(max(_per_primary(name, shards_count, primaries)) for name in NAMES) <= most
    one_each = Counter(slot_of(tag_of(f"tenant-{number}", 0)) * 3 // SLOTS for number in range(3000))
    assert all(900 < count < 1100 for count in one_each.values())


def test_no_primary_of_3_ever_has_more_than_10_of_24_shards() -> None:
    """Whatever the queue's name, and so where it begins: by the stretches alone, wherever in them the slots lie."""
    step, stretches = 2654435769, 16
    edges = (0, 5461, 10923, SLOTS)
    touched = [{slot * stretches // SLOTS for slot in range(*primary)} for primary in pairwise(edges)]
    worst = 0
    for begin in range(0, 2**16, 5):
        found = Counter(((begin << 16) + shard * step) % 2**32 * stretches // 2**32 for shard in range(24))
        worst = max(worst, *(sum(found[stretch] for stretch in some) for some in touched))
    assert worst == 10


def _per_primary(name: str, shards_count: int, primaries: int) -> list[int]:
    found = Counter(slot_of(tag_of(name, shard)) * primaries // SLOTS for shard in range(shards_count))
    return [found[primary] for primary in range(primaries)]
