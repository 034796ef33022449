"""Which thread works which shard, and that no work that is known of is overlooked."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from threading import Event, Thread

import pytest

from lowq import clock
from lowq.clock import Clock
from lowq.limits import Concurrency
from lowq.shards.dispatcher import Dispatcher, Schedule
from lowq.shards.permits import QueuePermits, Share
from lowq.shards.scheduler import LagScheduler, SeqScheduler
from lowq.shards.shard import Shard
from lowq.store.shard import SentTake
from tests.rows import case
from tests.rules.shards.dispatching import Waiting, delivery, look
from tests.rules.shards.dispatching import shard as shard_of
from tests.waiting import NEVER, PATIENCE, until

Shares = Mapping[str, Share]
shard = partial(shard_of, "q")


@pytest.fixture(params=["one queue", "two queues", "bounded"])
def shares(request: pytest.FixtureRequest) -> Shares:
    """The same holds in a node with a single queue, which counts no threads, and beside another queue without work."""
    made = {"q": Share(max_threads=1000 if request.param == "bounded" else None)}
    return made | ({"z": Share()} if request.param == "two queues" else {})


def dispatcher(
    shares: Shares,
    shards: Sequence[Shard],
    threads: int = 1,
    *,
    schedule: Callable[[], Schedule] = LagScheduler,
    clock: Clock = lambda: 0.0,
    on_left: Callable[[Shard], object] = lambda _: None,
) -> Dispatcher:
    schedules = [dict.fromkeys(shares, schedule()) for _ in range(threads)]
    return Dispatcher(shards, schedules, shares, on_left, clock=clock)


# --- who works what ---


def test_a_claimed_shard_is_nobody_elses(shares: Shares, waiting: Waiting) -> None:
    a = shard(due=0.0)
    dispatch = dispatcher(shares, [a], 2, clock=waiting.clock)
    assert dispatch.wait(0) is a
    other = waiting.wait(dispatch, 1)
    dispatch.note_delivery(a, a.dispatch.wakes, delivery())
    dispatch.wake(a)  # while a job of it is performed
    assert not other.done()
    dispatch.unclaim(a)
    assert other.result(PATIENCE) is a


def test_every_thread_gets_the_shard_that_has_waited_longest_whoever_is_long_with_another(shares: Shares) -> None:
    soon, late, later = shard(0, 0.0), shard(1, -200.0), shard(2, -100.0)
    dispatch = dispatcher(shares, [soon, late, later], threads=2)
    assert [dispatch.pick(0) for _ in range(2)] == [late] * 2
    assert dispatch.pick(1) is later
    dispatch.note_delivery(later, later.dispatch.wakes, delivery(5.0))
    assert dispatch.pick(1) is soon


def test_long_batches_in_turn_starve_no_shard(shares: Shares) -> None:
    now = 0.0
    a, b, oldest = shard(0, -1.0), shard(1, -1.0), shard(2, -9.0)
    dispatch = dispatcher(shares, [a, b, oldest], schedule=SeqScheduler, clock=lambda: now)
    order, held = [], dispatch.pick(0)
    for _ in range(6):
        assert held is not None
        order.append(held)
        now += 2.0
        following = dispatch.pick(0)
        dispatch.unclaim(held)
        held = following
    assert order == [a, b, oldest] * 2


def test_a_scheduler_is_given_its_shards_in_order_and_which_are_ready(shares: Shares) -> None:
    given: list[tuple[list[Shard], list[Shard]]] = []

    def note(shards: Sequence[Shard], now: float, ready: Callable[[Shard], bool]) -> Shard | None:
        given.append((list(shards), [shard for shard in shards if ready(shard)]))
        return given[-1][1][0]

    a, b, later, paused = shard(0, 0.0), shard(1, 0.0), shard(2, 1000.0), shard(3, 0.0)
    paused.dispatch.paused = True
    dispatch = dispatcher(shares, [b, later, paused, a], 2, schedule=lambda: note)
    assert (dispatch.pick(0), dispatch.pick(1)) == (a, b)
    assert dispatch.pick(1) is b, "what a thread has in hand is ready for it, and for nobody else"
    assert given == [([a, b, later, paused], [a, b]), ([a, b, later, paused], [b]), ([a, b, later, paused], [b])]


def test_a_scheduler_cannot_hand_out_what_is_not_to_be_worked(shares: Shares) -> None:
    for due in (0.0, 1000.0):
        with case(due):
            wrong, b = shard(0, due), shard(1, 0.0)
            dispatch = dispatcher(shares, [wrong, b], 2, schedule=lambda: lambda *_: wrong)  # noqa: B023
            assert dispatch.pick(0) is (wrong if due == 0.0 else None)
            assert dispatch.pick(1) is None
            assert b.dispatch.claimed_by is None


def test_without_a_shard_nobody_is_asked(shares: Shares) -> None:
    for schedule in (LagScheduler, SeqScheduler, lambda: lambda shards, *_: shards[0]):
        with case(schedule):
            dispatch = dispatcher(shares, [], schedule=schedule)
            assert dispatch.pick(0) is None
            assert dispatch.pick_many(3, ()) == []


def test_the_most_urgent_shard_of_a_queue_is_next(shares: Shares) -> None:
    mine, theirs = shard(0, 0.0), shard(1)
    dispatch = dispatcher(shares, [mine, theirs])
    assert dispatch.pick(0) is mine
    dispatch.note_delivery(mine, mine.dispatch.wakes, delivery(-100.0, levels={9: -100.0}))
    dispatch.wake(theirs, 0.0, 5)
    assert dispatch.pick(0) is theirs
    dispatch.note_delivery(theirs, theirs.dispatch.wakes, delivery())
    dispatch.unclaim(theirs)
    assert dispatch.pick(0) is mine
    dispatch.unclaim(mine)
    look(dispatch, theirs, 0.0, levels={3: 0.0})
    assert dispatch.pick(0) is theirs
    # A job of it failed and waits again: it is as urgent as it was.
    dispatch.note_delivery(theirs, theirs.dispatch.wakes, delivery(50.0, levels={8: 50.0}))
    dispatch.look_again(theirs)
    assert (mine.priority_at(0.0), theirs.priority_at(0.0)) == (9, 3)
    assert dispatch.pick_many(2, [theirs]) == [theirs, mine]


# --- what is known of a shard ---


def test_whatever_kept_a_shard_from_being_worked_a_thread_is_woken_when_it_ends(
    shares: Shares, waiting: Waiting
) -> None:
    for what in ("no job", "paused", "resumed", "lease over", "to be given up", "claimed", "not assigned"):
        with case(what):
            a = shard(0, None if what == "no job" else 0.0)
            a.dispatch.paused = what in ("paused", "resumed")
            a.dispatch.leaving = what == "to be given up"
            a.dispatch.claimed_by = 7 if what == "claimed" else None
            if what == "lease over":
                a.lease.deadline = clock.now()
            dispatch = dispatcher(shares, [] if what == "not assigned" else [a], clock=waiting.clock)
            future = waiting.wait(dispatch, 0)
            assert dispatch.pick(0) is None
            if what == "to be given up":
                dispatch.wake(a)
                assert dispatch.pick(0) is None
                dispatch.stay([a])
            elif what == "claimed":
                a.dispatch.claimed_by = None
                dispatch.wake(a)
            elif what == "not assigned":
                dispatch.assign([a])
            else:
                a.lease.deadline = NEVER + clock.now()
                if what in ("lease over", "resumed"):
                    dispatch.wake(a)
                else:  # as a look finds what a lost message would have told
                    look(dispatch, a, -3.0)
            assert future.result(PATIENCE) is a


def test_what_is_heard_during_a_take_counts_more_than_its_reply(shares: Shares) -> None:
    for reply in (delivery(), delivery(-1.0, paused=True)):
        with case(reply.paused):
            a = shard(0, 0.0)
            dispatch = dispatcher(shares, [a])
            assert dispatch.pick(0) is a
            wakes = a.dispatch.wakes
            dispatch.wake(a)  # a push, or a resume, after Redis has answered and before the answer is here
            dispatch.note_delivery(a, wakes, reply)
            assert dispatch.pick(0) is a
            dispatch.note_delivery(a, a.dispatch.wakes, reply)
            assert dispatch.pick(0) is None


def test_a_look_undoes_nothing_that_happened_meanwhile(shares: Shares) -> None:
    a, worked = shard(0), shard(1, 0.0)
    dispatch = dispatcher(shares, [a, worked])
    looks = dispatch.unclaimed([a, worked])
    dispatch.wake(a, 1.0)
    assert dispatch.pick(0) is worked
    for looked_at, version in looks:
        dispatch.note_state(looked_at, version, None, paused=True)
    assert a.next_due == 1.0
    assert dispatch.pick(0) is worked
    dispatch.wake(a, 100.0)
    assert a.next_due == 1.0, "a later wake-up does not put off an earlier time"
    ((looked_at, version),) = dispatch.unclaimed([a, worked])
    assert looked_at is a
    # A job was taken, has failed and is to be retried while the reply was under way.
    dispatch.wake(a)
    ((_, version),) = dispatch.unclaimed([a])
    dispatch.unclaim(worked)
    dispatch.rest(worked, 100.0)
    assert dispatch.pick(0) is a
    dispatch.note_delivery(a, a.dispatch.wakes, delivery(10.0))
    dispatch.unclaim(a)
    due = a.next_due
    dispatch.note_state(a, version, None, paused=False)
    assert a.next_due == due


def test_a_shard_that_is_to_be_given_up_is_let_go_after_the_trip(shares: Shares) -> None:
    left: list[Shard] = []
    a = shard(0, 0.0)
    dispatch = dispatcher(shares, [a, shard(1)], on_left=left.append)
    assert dispatch.pick(0) is a
    dispatch.leave([a])
    dispatch.note_delivery(a, a.dispatch.wakes, delivery(-1.0))
    assert dispatch.pick(0) is None
    assert left == []
    dispatch.unclaim(a)
    assert left == [a]


# --- sleep ---


def test_the_take_of_a_shard_is_sent_while_a_thread_is_woken_for_it(shares: Shares, waiting: Waiting) -> None:
    a, b = shard(0), shard(1)
    dispatch = dispatcher(shares, [a, b], 2, clock=waiting.clock)
    sent: list[Shard] = []

    def send_take(shard: Shard, reply: SentTake) -> None:
        sent.append(shard)
        reply.put(None)
        if len(sent) == 2:
            dispatch.close()

    dispatch.send_take = send_take
    dispatch.wake(a)  # nobody is asleep
    assert dispatch.wait(0) is a
    # Not by who keeps the leases, which would wait for a connection. And also when nothing more is handed out
    # meanwhile: its jobs are in flight.
    for number in (0, 1, 2):
        thread = waiting.wait(dispatch, 1)
        dispatch.wake(b, sends=number > 0)
        assert thread.result(PATIENCE) is b
        assert sent == [b] * number
        assert (b.dispatch.claimed_by, b.in_flight.sent is None) == (1, number == 0)
        dispatch.note_delivery(b, b.dispatch.wakes, delivery())
        dispatch.unclaim(b)


def test_when_the_thread_that_watches_the_time_goes_to_work_another_watches_it(
    shares: Shares, waiting: Waiting
) -> None:
    now, soon = shard(0), shard(1, clock.now() + 0.2)
    dispatch = dispatcher(shares, [now, soon], 2, clock=waiting.clock)
    futures = [waiting.wait(dispatch, number) for number in range(2)]
    dispatch.wake(now)
    assert {future.result(PATIENCE) for future in futures} == {now, soon}


def test_the_time_is_set_anew_when_something_is_due_earlier(shares: Shares, waiting: Waiting) -> None:
    late, soon = shard(0, clock.now() + NEVER), shard(1)
    dispatch = dispatcher(shares, [late, soon], 2, clock=waiting.clock)
    futures = [waiting.wait(dispatch, number) for number in range(2)]
    dispatch.wake(soon, 0.05)
    until(lambda: any(future.done() for future in futures))
    assert [future.result() for future in futures if future.done()] == [soon]


def test_permits_are_asked_for_when_a_job_of_a_limited_queue_becomes_due(waiting: Waiting) -> None:
    for what in ("a thread", "an event loop"):
        with case(what):
            delayed, share, is_asked = shard(0), Share(limits=(Concurrency(2, "erp"),)), Event()
            permits = {"q": QueuePermits("q", share, "lowq", "me", is_asked.set, clock.now)}
            looks, schedules = waiting.looks, [{"q": LagScheduler()}]
            dispatch = Dispatcher([delayed], schedules, {"q": share}, permits=permits, clock=waiting.clock)
            wait = partial(dispatch.wait, 0) if what == "a thread" else partial(dispatch.wait_many, 1)
            thread = Thread(target=wait)
            thread.start()
            until(lambda: waiting.looks > looks)  # noqa: B023
            dispatch.wake(delayed, 0.2)
            assert is_asked.wait(PATIENCE)
            dispatch.close()
            dispatch.nudge()
            thread.join(PATIENCE)


def test_what_becomes_due_is_begun_though_its_queue_was_full_when_the_time_was_set(waiting: Waiting) -> None:
    first, later, other = shard(0, clock.now()), shard(1), shard_of("z", 0)
    shares = {"q": Share(max_threads=1), "z": Share()}
    dispatch = dispatcher(shares, [first, later, other], 4, clock=waiting.clock)
    assert dispatch.wait(0) is first  # its queue is full now
    futures = [waiting.wait(dispatch, number) for number in (1, 2)]
    with waiting.time_stands_still():
        dispatch.wake(later, 1.0)
        _let_the_alarm_ring_for_nothing(dispatch, other, waiting, 2)
        dispatch.note_delivery(first, first.dispatch.wakes, delivery(None))
        assert dispatch.pick(0) is None
        dispatch.unclaim(first)
    futures.append(waiting.wait(dispatch, 0))
    until(lambda: any(future.done() for future in futures))
    assert [future.result() for future in futures if future.done()] == [later]


def test_when_two_threads_leave_a_full_queue_at_once_two_others_come_for_what_is_due(waiting: Waiting) -> None:
    shards, other = [shard(number, clock.now()) for number in range(4)], shard_of("z", 0)
    dispatch = dispatcher({"q": Share(max_threads=2), "z": Share()}, [*shards, other], 4, clock=waiting.clock)
    left = [dispatch.wait(0), dispatch.wait(1)]  # it is full now
    futures = [waiting.wait(dispatch, number) for number in (2, 3)]
    _let_the_alarm_ring_for_nothing(dispatch, other, waiting, 2)
    with dispatch._changed:  # before anybody who is woken by the first one is awake
        for each in left:
            assert each is not None
            dispatch.note_delivery(each, each.dispatch.wakes, delivery(None))
            dispatch.unclaim(each)
    assert {future.result(PATIENCE) for future in futures} == {*shards} - {*left}


def test_a_shard_that_rests_for_a_failover_is_worked_when_that_is_over(waiting: Waiting) -> None:
    resting, other = shard(0, clock.now()), shard(1)
    dispatch = dispatcher({"q": Share()}, [resting, other], 4, clock=waiting.clock)
    assert dispatch.wait(0) is resting
    futures = [waiting.wait(dispatch, number) for number in (1, 2, 3)]
    _let_the_alarm_ring_for_nothing(dispatch, other, waiting, 3)
    dispatch.rest_for_failover(resting)
    dispatch.unclaim(resting)
    until(lambda: any(future.done() for future in futures))
    assert [future.result() for future in futures if future.done()] == [resting]


def _let_the_alarm_ring_for_nothing(dispatch: Dispatcher, shard: Shard, waiting: Waiting, threads: int) -> None:
    """The thread that watches the time is the last to be woken from then on. So many threads wait."""
    looks = waiting.looks
    with waiting.time_stands_still():  # or its time might come before it is known to have no job
        dispatch.wake(shard, 0.3)  # reads the clock twice, and each thread when it is woken
        until(lambda: waiting.looks >= looks + 2 + threads)
        looks = waiting.looks
        look(dispatch, shard, None)  # reads it once
    until(lambda: waiting.looks >= looks + 2)


def test_a_sleep_has_no_longest_time_and_ends_with_the_node(shares: Shares, waiting: Waiting) -> None:
    for due in (1e10, 2.0**63, float("inf")):
        with case(due):
            a = shard(0, due)
            dispatch = dispatcher(shares, [a], 2, clock=waiting.clock)
            futures = [waiting.wait(dispatch, number) for number in range(2)]
            dispatch.wake(a)
            until(lambda: any(future.done() for future in futures))  # noqa: B023
            dispatch.close()
            assert {future.result(PATIENCE) for future in futures} == {a, None}


def test_nobody_polls(shares: Shares, waiting: Waiting) -> None:
    """Not for a second thread's shard, nor while Redis is away, so that its lease is not surely held any more."""
    for what in ("nothing due", "paused", "claimed", "to be given up", "lease over", "due later"):
        with case(what):
            a = shard(0, {"nothing due": None, "due later": NEVER + clock.now()}.get(what, 0.0))
            a.dispatch.paused = what == "paused"
            a.dispatch.claimed_by = 7 if what == "claimed" else None
            a.dispatch.leaving = what == "to be given up"
            if what == "lease over":
                a.lease.deadline = clock.now()
            dispatch = dispatcher(shares, [a], 2, clock=waiting.clock)
            futures = [waiting.wait(dispatch, number) for number in range(2)]
            looks = waiting.looks
            with pytest.raises(TimeoutError):
                futures[0].result(0.25)
            assert waiting.looks == looks
