"""What Redis refused for now: which jobs are sent again, and in which order, whatever becomes of them."""

import math
import random
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from lowq.codec import EncodedJob
from lowq.errors import RedisUnavailable
from lowq.group_commit import PLAIN, Outcome, Part, Settled
from lowq.group_commit.refused import RefusedPush, Resender
from lowq.store import Refusal
from tests.waiting import PATIENCE


class Shards:
    """Shards with a capacity, and what they have taken: (id, payload). They are their jobs' target as well."""

    queue = "orders"

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.taken: dict[str, list[tuple[bytes, bytes]]] = defaultdict(list)
        self.away: set[str] = set()
        self.sealed: set[str] = set()
        #: Of the calls that were carried out.
        self.tokens: set[bytes] = set()

    def reroute(self, part: Part, _refusal: Refusal, _refused_at: float) -> list[Part]:
        """Its jobs belong to a shard with a dash behind its name."""
        return [Part(f"{part.prefix}-", 1, part.items, part.jobs, part.width, target=self)]

    def send(self, parts: Sequence[tuple[Part, Callable[[], bool]]], _until: float) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for part, is_wanted in parts:
            assert is_wanted()
            is_its_turn = not part.after or part.after in self.tokens
            outcomes.append(self.push(part) if is_its_turn else Refusal("OUTOFTURN", ""))
            if outcomes[-1] is True:
                self.tokens.add(part.token)
        return outcomes

    def push(self, part: Part) -> Outcome:
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

    def part(self, prefix: str, *ids: str, start: int = 0) -> Part:
        items: list[EncodedJob] = [(job_id.encode(), b"%d" % n, b"", b"") for n, job_id in enumerate(ids, start)]
        jobs: list[Mapping[str, Any]] = [{"id": job_id, "payload": n} for n, job_id in enumerate(ids, start)]
        return Part(prefix, 1, items, jobs, PLAIN, target=self)

    def push_in_sequence(self, parts: list[Part]) -> list[Outcome]:
        """The outcomes of calls each of which comes after the one before it of its shard."""
        outcomes: list[Outcome] = []
        refused: set[str] = set()
        for part in parts:
            outcome = Refusal("OUTOFTURN", "") if part.prefix in refused else self.push(part)
            if outcome is not True:
                refused.add(part.prefix)
            outcomes.append(outcome)
        return outcomes

    def send_again(self, parts: list[Part], outcomes: Sequence[Outcome]) -> Settled:
        """What becomes of them, without time to wait for room."""
        ended = threading.Event()
        known: dict[Part, Outcome] = dict(zip(parts, outcomes, strict=True))
        push = RefusedPush(self.send, parts, known, 0.0, math.inf, lambda: True, lambda _settled: ended.set())
        Resender(None).add(push)  # type: ignore[arg-type]  # nobody waits for room
        assert ended.wait(PATIENCE)
        return push.settled


def payloads(settled: Settled) -> list[int]:
    return [job["payload"] for job in settled.left]


def outcomes_of(settled: Settled) -> list[Outcome]:
    return [outcome for _, outcome in settled.pairs]


def test_what_fits_is_in_and_the_rest_is_left_in_order() -> None:
    shards = Shards(2)
    parts = [shards.part("s", "a", "b", "c", "a", "c")]
    settled = shards.send_again(parts, shards.push_in_sequence(parts))
    assert (outcomes_of(settled), payloads(settled)) == ([True], [2, 4])
    assert shards.taken["s"] == [(b"a", b"0"), (b"b", b"1"), (b"a", b"3")]


def test_what_came_behind_a_refused_call_is_sent_without_ids_that_are_left() -> None:
    shards = Shards(1)
    parts = [shards.part("s", "a", "b"), shards.part("s", "b", "a", start=2), shards.part("s", "c", start=4)]
    settled = shards.send_again(parts, shards.push_in_sequence(parts))
    assert payloads(settled) == [1, 2, 4]
    assert shards.taken["s"] == [(b"a", b"0"), (b"a", b"3")]
    assert outcomes_of(settled) == [True, True]


def test_a_shard_that_fails_then_keeps_back_all_that_came_behind() -> None:
    shards = Shards(1)
    parts = [shards.part("s", "a", "b", "c"), shards.part("s", "a", "b", start=3), shards.part("t", "a", start=5)]
    outcomes = shards.push_in_sequence(parts)
    shards.away.add("s")
    settled = shards.send_again(parts, outcomes)
    assert settled.left == []
    failed = [job["payload"] for part, outcome in settled.pairs if outcome is not True for job in part.jobs]
    assert sorted(failed) == [0, 1, 2, 3, 4]
    assert (shards.taken["s"], shards.taken["t"]) == ([], [(b"a", b"5")])


def test_what_is_left_of_a_shard_that_is_sealed_meanwhile_follows_in_order() -> None:
    shards = Shards(1)
    parts = [shards.part("s", "a", "b"), shards.part("s", "b", "a", start=2)]
    outcomes = shards.push_in_sequence(parts)
    shards.sealed.add("s")
    settled = shards.send_again(parts, outcomes)
    assert (outcomes_of(settled), payloads(settled)) == ([True, True], [1, 2])
    assert (shards.taken["s"], shards.taken["s-"]) == ([], [(b"a", b"0"), (b"a", b"3")])


def test_shards_that_send_a_push_here_and_there_are_not_followed_without_end() -> None:
    shards = Shards(1)
    shards.sealed.update("s" + "-" * n for n in range(200))
    parts = [shards.part("s", "a")]
    (outcome,) = outcomes_of(shards.send_again(parts, shards.push_in_sequence(parts)))
    assert "disagree about their number" in str(outcome)


def test_a_registry_that_does_not_answer_is_asked_once_for_all_shards_of_a_push(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shards, asked = Shards(1), []

    def away(*_args: object) -> list[Part]:
        asked.append(1)
        raise RedisUnavailable("the registry does not answer")

    monkeypatch.setattr(shards, "reroute", away)
    parts = [shards.part(f"s{n}", "a") for n in range(20)]
    outcomes = outcomes_of(shards.send_again(parts, [Refusal("SEALED", "")] * 20))
    assert [str(outcome) for outcome in outcomes] == ["the registry does not answer"] * 20
    assert len(asked) == 1


def test_a_shard_that_says_where_its_jobs_belong_needs_no_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    shards = Shards(9)
    follow = shards.reroute

    def reroute(part: Part, refusal: Refusal, refused_at: float) -> list[Part]:
        if refusal.detail:
            return follow(part, refusal, refused_at)
        raise RedisUnavailable("the registry does not answer")

    monkeypatch.setattr(shards, "reroute", reroute)
    parts = [shards.part(name, "a") for name in ("lost", "moved")]
    settled = shards.send_again(parts, [Refusal("SEALED", ""), Refusal("SEALED", "1 1")])
    assert [(part.prefix, outcome is True) for part, outcome in settled.pairs] == [("lost", False), ("moved-", True)]


def test_every_job_is_in_or_left_and_those_of_an_id_keep_their_order() -> None:
    for seed in range(50):
        rng = random.Random(seed)
        shards = Shards(rng.randint(0, 5))
        parts: list[Part] = []
        start = 0
        for _ in range(rng.randint(1, 8)):
            ids = rng.choices("abcdefgh", k=rng.randint(1, 12))
            parts.append(shards.part(rng.choice("st"), *ids, start=start))
            start += len(ids)
        outcomes = shards.push_in_sequence(parts)
        left = payloads(shards.send_again(parts, outcomes))
        taken = [int(payload) for some in shards.taken.values() for _, payload in some]
        assert sorted([*taken, *left]) == list(range(start)), seed
        order: dict[tuple[str, bytes], list[int]] = defaultdict(list)
        place = {int(item[1]): (part.prefix, item[0]) for part in parts for item in part.items}
        for number in [*taken, *left]:
            order[place[number]].append(number)
        assert all(numbers == sorted(numbers) for numbers in order.values()), seed
