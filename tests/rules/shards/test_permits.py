"""What a process does with the permits that it gets, by a clock and a Redis that the tests move."""

from collections.abc import Sequence
from typing import Any, cast

import pytest

from lowq import Concurrency, Rate
from lowq.errors import RedisUnavailable, ScriptError
from lowq.limits import LimitRule
from lowq.shards.delivery import Delivery, TakenJob
from lowq.shards.dispatcher import Dispatcher
from lowq.shards.limits import Permits
from lowq.shards.outage import Outage
from lowq.shards.permits import MOST_UNUSED_SECONDS, STARVED_SECONDS, UNUSED_SECONDS, QueuePermits, Share
from lowq.shards.scheduler import LagScheduler
from lowq.store import Call, Client
from lowq.store.registry import PermitsReply
from tests.rows import case
from tests.rules.shards.dispatching import LEASE, Waiting, shard
from tests.waiting import PATIENCE

TTL = 15.0
CHANNEL = "lowq:v1:limit:concurrency:q"


class Redis:
    """Grants so many, and takes its time."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.takes = 0.0
        self.left = 100
        self.deferred_until = -float("inf")
        self.loses_replies = self.spoilt = False
        self.calls: list[Call[Any]] = []

    def run_many(self, calls: Sequence[Call[Any]], **_options: Any) -> list[Any]:
        return [self._run(call) for call in calls]

    def _run(self, call: Call[Any]) -> Any:
        self.calls.append(call)
        self.now += self.takes
        if self.loses_replies:
            return RedisUnavailable("the reply was lost")
        if self.spoilt:
            return ScriptError("WRONGTYPE")
        more = int(call.args[6])
        deferred = self.deferred_until - self.now
        if deferred > 0:
            return PermitsReply.of([0, 0, deferred * 1e6, 7, deferred * 1e6])
        granted = min(more, self.left)
        self.left -= granted
        return PermitsReply.of([granted, 0, 1_000_000 if granted < more else None, 7, None])

    @property
    def stated(self) -> list[tuple[str, int]]:
        """Of each call: what is still needed, or given back, and what is wanted besides."""
        return [(str(call.args[5]), int(call.args[6])) for call in self.calls]


class Process:
    """A process with some threads and a queue "q", which has limits and jobs in four shards. ``beside``: a queue
    "other" without limits has work, too, and has had a batch of the first thread, so the turn is that of "q".
    """

    def __init__(
        self, *limits: LimitRule, waiting: Waiting | None = None, beside: bool = False, threads: int = 1,
        batch_size: int = 1, is_per_id: bool = False,
    ) -> None:  # fmt: skip
        self.redis = Redis()
        share = Share(limits=limits, batch_size=batch_size, is_per_id=is_per_id)
        shares, names = {"q": share}, ["q"]
        if beside:
            shares["other"], names = Share(), ["other", "q"]
        due = {"q": self.redis.now + beside, "other": 0.0}
        shards = [shard(name, index, due=due[name]) for name in names for index in range(4)]
        self.waiting = waiting
        clock = self.clock
        self.permits = Permits(
            cast(Client, self.redis), "lowq", "me", shares, TTL, Outage(), on_fatal=lambda _error: None, clock=clock
        )
        self.dispatcher = Dispatcher(
            shards, [dict.fromkeys(names, LagScheduler())] * threads, shares, permits=self.permits.queues, clock=clock
        )

        if beside:
            assert self.picks() == "other"
            self.redis.now += 1

    def picks(self, thread: int = 0) -> str | None:
        """The queue of what the thread is given."""
        found = self.dispatcher.pick(thread)
        return None if found is None else found.queue

    def clock(self) -> float:
        if self.waiting is not None:
            self.waiting.looks += 1
        return self.redis.now

    def held(self) -> QueuePermits:
        return self.permits.queues["q"]

    def wants(self, batches: int) -> None:
        """So many could begin."""
        self.held().wanted = batches

    def turns(self, after: float = 0.0) -> int:
        """A turn of the thread that asks, so many seconds later; returns how many calls it has made."""
        before = len(self.redis.calls)
        self.redis.now += after
        self.permits.turn()
        return len(self.redis.calls) - before


def delivery_of(jobs: int) -> Delivery:
    """A delivery of so many jobs."""
    return Delivery(1, LEASE, [cast(TakenJob, None)] * jobs, None, paused=False)


def test_what_comes_late_from_a_redis_that_is_far_away_can_be_used(waiting: Waiting) -> None:
    for limit in (Rate(10), Concurrency(10)):
        process = Process(limit, waiting=waiting)
        future = waiting.wait(process.dispatcher, 0)
        process.redis.takes = 0.3
        process.permits.turn()
        assert future.result(PATIENCE) is not None


def test_a_thread_waits_for_the_answer_for_a_moment_when_it_is_the_queues_turn() -> None:
    for how, then in (("granted", "q"), ("none left", "other"), ("reply lost", "other"), ("no answer", "other")):
        with case(how):
            process = Process(Rate(10), beside=True)
            assert process.picks() is None, "not yet: else all threads are with other queues when it comes"
            process.redis.left = 0 if how == "none left" else 100
            process.redis.loses_replies = how == "reply lost"
            if how == "no answer":
                process.redis.now += 1
            else:
                process.permits.turn()
            assert [process.picks(), process.picks()] == [then] * 2, "and it does not wait again"


def test_a_thread_does_not_wait_while_it_is_not_the_queues_turn() -> None:
    process = Process(Rate(1), beside=True, threads=2)
    assert process.picks() is None
    process.permits.turn()
    assert [process.picks(0), process.picks(1)] == ["q", "other"]


def test_an_event_loop_keeps_a_place_until_the_answer_comes() -> None:
    process = Process(Rate(10), beside=True)
    assert process.picks() is None, "the first batch of the other one has ended"
    assert [found.queue for found in process.dispatcher.pick_many(2, ())] == ["other"]
    process.permits.turn()
    assert [found.queue for found in process.dispatcher.pick_many(1, ())] == ["q"]


@pytest.mark.parametrize("own", [True, False])
def test_a_permit_goes_on_to_the_next_batch_unless_somebody_else_waits(own: bool) -> None:
    process = Process(Concurrency(10))
    process.redis.left = 1
    process.wants(1)
    process.permits.turn()
    batch = process.dispatcher.pick(0)
    assert batch is not None
    process.permits.wake(CHANNEL, f"? {process.redis.calls[-1].args[3]!s}" if own else "? somebody-else:q")
    process.dispatcher.unclaim(batch)
    process.permits.turn()
    assert (process.dispatcher.pick(0) is not None) == own


def test_it_asks_anew_when_messages_may_have_been_lost() -> None:
    process = Process(Concurrency(10))
    process.redis.left = 0
    process.wants(1)
    process.permits.turn()
    assert process.turns() == 0, "it was told when to ask again"
    process.permits.wake(CHANNEL, "")
    assert process.turns() == 1
    assert process.redis.stated == [("0", 1)] * 2


def test_a_call_that_is_repeated_counts_from_when_it_was_sent_first() -> None:
    # Redis has heard of it then, and what it granted is free again a ttl later.
    process = Process(Concurrency(10))
    process.wants(1)
    process.redis.loses_replies = True
    process.permits.turn()
    process.redis.loses_replies = False
    process.turns(after=0.9 * TTL)
    assert process.redis.stated == [("0", 1), ("0", 1), ("1", 0)], "it has stated it anew at once"
    assert process.dispatcher.pick(0) is not None


def test_a_key_that_is_not_lowqs_stops_nothing_and_is_asked_again() -> None:
    process = Process(Concurrency(10))
    process.wants(1)
    process.redis.spoilt = True
    process.permits.turn()
    assert process.dispatcher.pick(0) is None
    process.redis.spoilt = False
    process.turns(after=TTL)
    assert process.dispatcher.pick(0) is not None


def test_what_was_granted_of_a_rate_long_ago_is_given_back() -> None:
    process = Process(Rate(10, per=1))
    process.wants(1)
    process.redis.takes = 5.0
    process.permits.turn()
    assert process.dispatcher.pick(0) is None
    process.redis.takes = 0.0
    process.permits.turn()
    assert [given for given, _ in process.redis.stated] == ["", "7 1"]


def test_who_has_given_back_of_a_rate_or_waits_no_more_may_ask_again_at_once() -> None:
    """It was told to ask again in an hour, and nobody would wake it when others give some back."""
    for left, stated in ((1, [("", 2), ("7 1", 0), ("", 2)]), (0, [("", 2), ("", 0), ("", 2)])):
        with case(left):
            process = Process(Rate(10, per=3600))
            process.redis.left = left
            for wanted in (2, 0, 2):
                process.wants(wanted)
                process.turns(after=0.1)
            assert process.redis.stated == stated


@pytest.mark.parametrize("is_loop", [False, True], ids=["threads", "loop"])
def test_a_batch_that_was_written_off_keeps_no_permit_though_the_node_drains(is_loop: bool) -> None:
    process = Process(Concurrency(10))
    process.wants(1)
    process.permits.turn()
    batch = process.dispatcher.pick_many(1, ())[0] if is_loop else process.dispatcher.pick(0)
    assert batch is not None
    process.dispatcher.suspend(batch)
    process.dispatcher.close()
    process.turns(after=TTL / 2)
    assert process.redis.stated[-1] == ("0", 0)


def test_ids_that_begin_one_after_the_other_count_when_they_begin_and_strict_ones_when_they_have_ended() -> None:
    """Redis is told how many are still needed, what is wanted besides, and how many count from now on."""
    stories: list[tuple[Rate, bool, list[tuple[int, int]]]] = [
        (Rate(10), True, [(0, 0), (2, 1), (1, 1), (0, 0)]),  # the third never began
        (Rate(10, strict=True), True, [(0, 0), (3, 0), (2, 1), (0, 1)]),
        (Rate(10, strict=True), False, [(0, 0), (3, 0), (0, 3)]),
    ]
    for rate, is_per_id, stated in stories:
        with case(rate, is_per_id):
            process = Process(rate, batch_size=5, is_per_id=is_per_id)
            process.wants(1)
            process.permits.turn()
            batch = process.dispatcher.pick(0)
            assert batch is not None
            process.dispatcher.note_delivery(batch, 0, delivery_of(3))
            process.turns(after=1)
            if is_per_id:
                process.dispatcher.shares.next_id_began(batch)
                process.turns()
            process.dispatcher.unclaim(batch)
            process.turns()
            assert [(int(call.args[5]), int(call.args[8])) for call in process.redis.calls] == stated
            process.turns(after=TTL / 2)
            assert len(process.redis.calls) == len(stated), "nothing of it is left"


def test_a_deferral_holds_for_permits_that_could_be_used_again_and_ends_by_itself() -> None:
    process = Process(Concurrency(10))
    process.wants(1)
    process.permits.turn()
    process.redis.deferred_until = process.redis.now + 30
    process.permits.wake(CHANNEL, "! 30.000000")
    assert process.dispatcher.pick(0) is None
    process.wants(1)
    assert process.turns() == 1, "it gives back what it can't use"
    process.wants(1)
    assert process.turns(after=29) == 0, "it asks again when the time is over"
    process.wants(1)
    process.turns(after=1)
    assert process.dispatcher.pick(0) is not None


def test_a_deferral_that_was_called_off_unheard_ends_once_messages_may_have_been_lost() -> None:
    for limits in ([Rate(10)], [Concurrency(10)], [Rate(10), Concurrency(10)], [Rate(10), Rate(10, per=60)]):
        with case(limits):
            process = Process(*limits)
            process.redis.deferred_until = process.redis.now + 3600
            for channel in process.permits.channels:
                process.permits.wake(channel, "! 3600.000000")
            process.wants(1)
            process.turns()
            process.redis.deferred_until = -float("inf")
            for channel in process.permits.channels:
                process.permits.wake(channel, "")
            for _ in limits:
                process.wants(1)
                process.turns()
            assert process.dispatcher.pick(0) is not None


def lapses(process: Process) -> float:
    """Has a permit come for which no thread is free; returns for how long it is kept."""
    process.wants(1)
    process.permits.turn()
    came = process.redis.now
    assert process.held().may_begin(0)
    while process.held().may_begin(0):
        process.turns(after=0.02)
    return process.redis.now - came


def test_a_permit_that_no_thread_is_free_for_is_given_back_soon_unless_its_queue_is_starved() -> None:
    process = Process(Concurrency(1))
    assert lapses(process) == pytest.approx(UNUSED_SECONDS, abs=0.03)
    process.redis.left, process.redis.now = 100, process.redis.now + STARVED_SECONDS
    assert lapses(process) == pytest.approx(MOST_UNUSED_SECONDS, abs=0.03)
    assert lapses(process) == pytest.approx(UNUSED_SECONDS, abs=0.03), "then it is the others' turn for a while"
    process.redis.now += STARVED_SECONDS
    process.wants(1)
    process.permits.turn()
    process.turns(after=0.9 * MOST_UNUSED_SECONDS)
    assert process.dispatcher.pick(0) is not None


def test_one_of_a_rate_is_never_kept_for_long() -> None:
    process = Process(Rate(10))
    process.redis.now += STARVED_SECONDS
    process.wants(1)
    process.permits.turn()
    process.redis.now += 0.1
    assert process.dispatcher.pick(0) is None, "others count on the moment in which it was granted"
