"""What did not fit: which jobs are sent again, and in which order, whatever becomes of them."""

import random
from collections import defaultdict

import pytest

from lowq.codec import EncodedJob
from lowq.errors import RedisUnavailable
from lowq.group_commit import PLAIN, Outcome, Overflow, Part
from lowq.store import Refusal


class Shards:
    """Shards with a capacity, and what they have taken: (id, payload)."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.taken: dict[str, list[tuple[bytes, bytes]]] = defaultdict(list)
        self.away: set[str] = set()
        self.sealed: set[str] = set()
        self.calls = 0

    def leave_sealed(self, part: Part, _refusal: Refusal, parts: list[Part]) -> list[Part]:
        """Its jobs belong to a shard with a dash behind its name."""
        return [Part(f"{part.prefix}-", 1, other.items, other.jobs, other.width) for other in parts]

    def send(self, parts: list[Part]) -> list[Outcome]:
        assert len({part.prefix for part in parts}) == len(parts), "one call of a shard at a time"
        return [self.push(part) for part in parts]

    def push(self, part: Part) -> Outcome:
        self.calls += 1
        assert part.items
        if part.prefix in self.away:
            return RedisUnavailable("away")
        if part.prefix in self.sealed:
            return Refusal("SEALED", "1 1")
        taken = self.taken[part.prefix]
        known = {job_id for job_id, _ in taken}
        unfit: list[int] = []
        for position, (job_id, *_) in enumerate(part.items):
            if job_id not in known:
                if len(known) < self.capacity:
                    known.add(job_id)
                else:
                    unfit.append(position)
        if unfit:
            return Refusal("QUEUEFULL", " ".join(map(str, unfit)))
        taken += [(item[0], item[1]) for item in part.items]
        return True


def part_of(prefix: str, *ids: str, start: int = 0, after: bytes = b"") -> Part:
    items: list[EncodedJob] = [(job_id.encode(), b"%d" % n, b"", b"") for n, job_id in enumerate(ids, start)]
    return Part(prefix, 1, items, [{"id": job_id, "payload": n} for n, job_id in enumerate(ids, start)], PLAIN, after)


def settle(shards: Shards, parts: list[Part], outcomes: list[Outcome]) -> tuple[list[Outcome], list[int]]:
    """The outcomes, and the payloads that are left."""
    overflow = Overflow(parts, outcomes, shards.send, shards.leave_sealed)
    _, settled, left = overflow.settle(None, 0.0, lambda: True)  # type: ignore[arg-type]  # nobody waits
    return settled, [job["payload"] for job in left]


def first_sent(shards: Shards, parts: list[Part]) -> list[Outcome]:
    """Each comes after the one before it of its shard."""
    outcomes: list[Outcome] = []
    refused: set[str] = set()
    for part in parts:
        outcome = Refusal("OUTOFTURN", "") if part.prefix in refused else shards.push(part)
        if outcome is not True:
            refused.add(part.prefix)
        outcomes.append(outcome)
    return outcomes


def test_what_fits_is_in_and_the_rest_is_left_in_order() -> None:
    shards = Shards(2)
    parts = [part_of("s", "a", "b", "c", "a", "c")]
    outcomes, left = settle(shards, parts, first_sent(shards, parts))
    assert (outcomes, left) == ([True], [2, 4])
    assert shards.taken["s"] == [(b"a", b"0"), (b"b", b"1"), (b"a", b"3")]


def test_what_came_behind_a_refused_call_is_sent_without_ids_that_are_left() -> None:
    shards = Shards(1)
    parts = [part_of("s", "a", "b"), part_of("s", "b", "a", start=2), part_of("s", "c", start=4)]
    outcomes, left = settle(shards, parts, first_sent(shards, parts))
    assert left == [1, 2, 4]
    assert shards.taken["s"] == [(b"a", b"0"), (b"a", b"3")]
    assert outcomes == [True, True]


def test_a_shard_that_fails_then_keeps_back_all_that_came_behind() -> None:
    shards = Shards(1)
    parts = [part_of("s", "a", "b", "c"), part_of("s", "a", "b", start=3), part_of("t", "a", start=5)]
    outcomes = first_sent(shards, parts)
    shards.away.add("s")
    overflow = Overflow(parts, outcomes, shards.send, shards.leave_sealed)
    settled_parts, settled, left = overflow.settle(None, 0.0, lambda: True)  # type: ignore[arg-type]
    assert left == []
    failed = [
        job["payload"]
        for part, outcome in zip(settled_parts, settled, strict=True)
        if outcome is not True
        for job in part.jobs
    ]
    assert failed == [0, 1, 2, 3, 4]
    assert (shards.taken["s"], shards.taken["t"]) == ([], [(b"a", b"5")])


def test_what_is_left_of_a_shard_that_is_sealed_meanwhile_follows_in_order() -> None:
    shards = Shards(1)
    parts = [part_of("s", "a", "b"), part_of("s", "b", "a", start=2)]
    outcomes = first_sent(shards, parts)
    shards.sealed.add("s")
    settled, left = settle(shards, parts, outcomes)
    assert (settled, left) == ([True, True], [1, 2])
    assert (shards.taken["s"], shards.taken["s-"]) == ([], [(b"a", b"0"), (b"a", b"3")])


@pytest.mark.parametrize("seed", range(50))
def test_every_job_is_in_or_left_and_those_of_an_id_keep_their_order(seed: int) -> None:
    rng = random.Random(seed)
    shards = Shards(rng.randint(0, 5))
    parts: list[Part] = []
    start = 0
    for _ in range(rng.randint(1, 8)):
        ids = rng.choices("abcdefgh", k=rng.randint(1, 12))
        parts.append(part_of(rng.choice("st"), *ids, start=start))
        start += len(ids)
    outcomes = first_sent(shards, parts)
    if all(outcome is True for outcome in outcomes):
        return
    _, left = settle(shards, parts, outcomes)
    taken = [int(payload) for some in shards.taken.values() for _, payload in some]
    assert sorted([*taken, *left]) == list(range(start))
    order = {(part.prefix, item[0]): [] for part in parts for item in part.items}  # type: ignore[var-annotated]
    place = {int(item[1]): (part.prefix, item[0]) for part in parts for item in part.items}
    for number in [*taken, *left]:
        order[place[number]].append(number)
    assert all(numbers == sorted(numbers) for numbers in order.values())
