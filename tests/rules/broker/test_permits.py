"""What a process does with the permits that it gets, by a clock and a Redis that the tests move."""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import pytest

from lowq import Concurrency, Rate
from lowq.broker.delivery import Delivery
from lowq.broker.dispatcher import Dispatcher
from lowq.broker.fairness import Share
from lowq.broker.lease import Lease
from lowq.broker.outage import Outage
from lowq.broker.permits import MOST_UNUSED_SECONDS, STARVED_SECONDS, UNUSED_SECONDS, Permits
from lowq.broker.queue_permits import QueuePermits
from lowq.broker.scheduler import LagScheduler
from lowq.broker.shard import Shard
from lowq.errors import RedisUnavailable
from lowq.limits import Limit
from lowq.store import Call, Client
from tests.rows import case
from tests.waiting import until

LEASE = Lease("me:1", 1)
TTL = 15.0
CHANNEL = "lowq:v1:limit:concurrency:q"


class Redis:
    """Grants so many, and takes its time."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.takes = 0.0
        self.left = 100
        self.others_wait = 0
        self.calls: list[Call] = []
        self.loses_replies = False

    def run_many(self, calls: Sequence[Call], **_options: Any) -> list[Any]:
        return [self._run(call) for call in calls]

    def _run(self, call: Call) -> Any:
        self.calls.append(call)
        self.now += self.takes
        if self.loses_replies:
            return RedisUnavailable("the reply was lost")
        more = int(call.args[6])
        granted = min(more, self.left)
        self.left -= granted
        return [granted, self.others_wait, 1_000_000 if granted < more else None, 7]

    @property
    def stated(self) -> list[tuple[int, int]]:
        """Of each call: what was needed still, and what was wanted besides."""
        return [(int(call.args[5] or 0), int(call.args[6])) for call in self.calls]


class Process:
    """A process with some threads, its queue "q", which has limits, and a queue "other" without."""

    def __init__(self, *limits: Limit, threads: int = 1, shards: int = 4, others: int = 4) -> None:
        self.redis = Redis()
        self.shards = [self._shard("q", index) for index in range(shards)]
        self.others = [self._shard("other", index) for index in range(others)]
        shares = {"q": Share(limits=limits), "other": Share()}
        clock = self.clock
        self.dispatcher = Dispatcher(
            [[*self.shards, *self.others] for _ in range(threads)],
            [dict.fromkeys(shares, LagScheduler()) for _ in range(threads)],
            shares,
            ask_for_permits=lambda: self.permits.nudge(),  # noqa: PLW0108  # made below
            clock=clock,
        )
        self.permits = Permits(
            cast(Client, self.redis), "lowq", "me", shares, dict.fromkeys(shares, self.dispatcher), TTL, Outage(),
            on_fatal=lambda _error: None, clock=clock,
        )  # fmt: skip
        self.dispatcher._uses["other"].virtual_time = 1.0  # the turn is that of "q"

    def _shard(self, queue: str, index: int) -> Shard:
        made = Shard(cast(Client, None), "lowq", queue, index, shards_count=9, nonce="me", load_payload=bytes.decode)
        made.lease.current, made.lease.deadline = LEASE, 1e9
        made.dispatch.next_due = 0.0
        return made

    def clock(self) -> float:
        return self.redis.now

    @property
    def permits_of_q(self) -> QueuePermits:
        permits = self.dispatcher._uses["q"].permits
        assert permits is not None
        return permits

    @property
    def holder(self) -> str:
        return str(self.redis.calls[-1].args[3])

    def wait(self, thread: int = 0) -> "Waiting":
        """The thread waits for a shard. Returns when it has got one or sleeps."""
        waiting = Waiting(partial(self.dispatcher.wait, thread))
        until(lambda: waiting.has_ended or self.dispatcher._idle)
        return waiting


class Waiting:
    """A thread that waits for a shard."""

    def __init__(self, wait: Callable[[], Shard | None]) -> None:
        self.shard: Shard | None = None
        self._wait = wait
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self.shard = self._wait()

    @property
    def has_ended(self) -> bool:
        return not self._thread.is_alive()


def queue_of(shard: Shard | None) -> str | None:
    return None if shard is None else shard.queue


def test_a_thread_waits_for_the_answer_when_it_is_the_queues_turn() -> None:
    process = Process(Rate(10))
    assert process.dispatcher.pick(0) is None, "not yet: else all threads are with other queues when it comes"
    process.permits.turn()
    assert queue_of(process.dispatcher.pick(0)) == "q"


def test_it_goes_on_with_another_queue_when_no_permit_comes() -> None:
    for how in ("there is none", "the reply is lost", "the answer takes long"):
        with case(how):
            process = Process(Rate(10))
            assert process.dispatcher.pick(0) is None
            process.redis.left = 0 if how == "there is none" else 100
            process.redis.loses_replies = how == "the reply is lost"
            if how == "the answer takes long":
                process.redis.now += 1
            else:
                process.permits.turn()
            assert queue_of(process.dispatcher.pick(0)) == "other"
            assert queue_of(process.dispatcher.pick(0)) == "other", "and does not wait again"


def test_it_does_not_wait_while_it_is_not_the_queues_turn() -> None:
    process = Process(Rate(1), threads=2)
    process.dispatcher.pick(0)
    process.permits.turn()
    assert queue_of(process.dispatcher.pick(0)) == "q"
    assert queue_of(process.dispatcher.pick(1)) == "other", "which has no thread yet"


def test_an_event_loop_keeps_a_place_until_the_answer_comes() -> None:
    process = Process(Rate(10))
    assert [shard.queue for shard in process.dispatcher.pick_many(2, ())] == ["other"]
    process.permits.turn()
    assert [shard.queue for shard in process.dispatcher.pick_many(1, ())] == ["q"]


def test_what_comes_late_from_a_redis_that_is_far_away_can_be_used() -> None:
    for limit in (Rate(10), Concurrency(10)):
        process = Process(limit, others=0)
        waiting = process.wait()
        process.redis.takes = 0.3
        process.permits.turn()
        process.redis.takes = 0.0
        until(lambda: waiting.has_ended)  # noqa: B023
        assert waiting.shard is not None


def test_its_own_waiting_does_not_make_it_give_permits_back() -> None:
    process = Process(Concurrency(10), threads=2, others=0)
    process.redis.left = 1
    process.dispatcher.pick(0)
    process.permits.turn()
    held = process.permits_of_q
    process.permits.woken(CHANNEL, f"? {process.holder}")
    assert held.contended == [False]
    process.permits.woken(CHANNEL, "? somebody-else:q")
    assert held.contended == [True]


def test_it_gives_back_and_asks_anew_when_messages_may_have_been_lost() -> None:
    process = Process(Concurrency(10), others=0)
    process.redis.left = 0
    process.dispatcher.pick(0)
    process.permits.turn()
    calls = len(process.redis.calls)
    process.permits.turn()
    assert len(process.redis.calls) == calls, "it was told when to ask again"
    process.permits.woken(CHANNEL, "")
    process.permits.turn()
    assert process.redis.stated[calls:] == [(0, 1)]


def test_a_call_that_is_repeated_counts_from_when_it_was_sent_first() -> None:
    # Redis has heard of it then, and what it granted is free again a ttl later.
    process = Process(Concurrency(10), others=0)
    process.dispatcher.pick(0)
    process.redis.loses_replies = True
    process.permits.turn()
    process.redis.now += 0.9 * TTL
    process.redis.loses_replies = False
    process.permits.turn()
    held = process.permits_of_q
    assert held.valid_until[0] >= process.redis.now + TTL, "it has stated it anew at once"
    assert process.redis.stated == [(0, 1), (0, 1), (1, 0)]


def test_what_was_granted_of_a_rate_long_ago_is_given_back() -> None:
    process = Process(Rate(10, per=1), others=0)
    process.dispatcher.pick(0)
    process.redis.takes = 5.0
    process.permits.turn()
    assert process.dispatcher.pick(0) is None
    process.redis.takes = 0.0
    process.permits.turn()
    assert [call.args[5] for call in process.redis.calls] == ["", "7 1"]


def test_what_it_has_given_back_of_a_rate_it_may_ask_for_again_at_once() -> None:
    # It was told to ask again when the permits that it had itself count no longer: an hour later.
    process = Process(Rate(10, per=3600), threads=2, others=0)
    process.redis.left = 1
    process.permits_of_q.wanted = 2
    process.permits.turn()
    process.redis.now += 0.1  # nobody has come for the one that it got
    process.permits.turn()
    process.permits_of_q.wanted = 2
    process.permits.turn()
    assert [call.args[5:7] for call in process.redis.calls] == [["", 2], ["7 1", 0], ["", 2]]


def test_when_it_waits_no_more_for_a_rate_it_may_ask_again_at_once() -> None:
    # Nobody would wake it when others give some back.
    process = Process(Rate(10, per=3600), others=0)
    process.redis.left = 0
    for wanted in (1, 0, 1):
        process.permits_of_q.wanted = wanted
        process.permits.turn()
    assert [call.args[6] for call in process.redis.calls] == [1, 0, 1]


def test_nothing_is_left_counted_of_a_shard_without_jobs() -> None:
    process = Process(Rate(10), others=0)
    process.dispatcher.pick(0)
    process.permits.turn()
    shard = process.dispatcher.pick(0)
    assert shard is not None
    process.dispatcher.took(shard, shard.dispatch.wakes, Delivery(1, LEASE, [], None, False))
    process.dispatcher.unclaim(shard)
    held = process.permits_of_q
    assert held.starts == [{7: 1}]


@pytest.mark.parametrize("is_loop", [False, True], ids=["threads", "loop"])
def test_a_batch_that_was_written_off_keeps_no_permit_though_the_node_drains(*, is_loop: bool) -> None:
    process = Process(Concurrency(10), others=0)
    process.dispatcher.pick(0)
    process.permits.turn()
    shard = process.dispatcher.pick_many(1, ())[0] if is_loop else process.dispatcher.pick(0)
    assert shard is not None
    process.dispatcher.withhold(shard)
    process.dispatcher.close()
    process.redis.now += TTL / 2
    process.permits.turn()
    assert process.redis.stated[-1] == (0, 0)


def lapses(process: Process) -> float:
    """Has a permit come for which no thread is free; returns for how long it is kept."""
    process.permits_of_q.wanted = 1
    process.permits.turn()
    assert process.permits_of_q.may_begin(0)
    came = process.redis.now
    while process.permits_of_q.at_once != [0]:
        process.redis.now += 0.02
        process.permits.turn()
    return process.redis.now - came


def test_a_permit_that_no_thread_is_free_for_is_given_back_soon() -> None:
    assert lapses(Process(Concurrency(1))) == pytest.approx(UNUSED_SECONDS, abs=0.03)


def test_a_queue_that_has_begun_nothing_for_long_keeps_it_until_a_thread_comes_back() -> None:
    process = Process(Concurrency(1))
    process.redis.now += STARVED_SECONDS
    assert lapses(process) == pytest.approx(MOST_UNUSED_SECONDS, abs=0.03)
    assert lapses(process) == pytest.approx(UNUSED_SECONDS, abs=0.03), "then it is the others' turn for a while"
    process.redis.now += STARVED_SECONDS
    process.permits_of_q.wanted = 1
    process.permits.turn()
    process.redis.now += 0.9 * MOST_UNUSED_SECONDS
    process.permits.turn()
    assert queue_of(process.dispatcher.pick(0)) == "q"


def test_one_of_a_rate_is_never_kept_for_long() -> None:
    process = Process(Rate(10))
    process.redis.now += STARVED_SECONDS
    process.permits_of_q.wanted = 1
    process.permits.turn()
    process.redis.now += 0.1
    assert not process.permits_of_q.may_begin(0), "others count on the moment in which it was granted"
