import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import cast

import pytest

from lowq import clock
from lowq.broker import dispatcher as dispatch_module
from lowq.broker.delivery import Delivery
from lowq.broker.dispatcher import Dispatcher, Schedule
from lowq.broker.fairness import Share
from lowq.broker.lease import Lease
from lowq.broker.scheduler import LagScheduler, SeqScheduler
from lowq.broker.shard import Shard
from lowq.clock import Clock
from lowq.store import Client
from tests.rows import case
from tests.waiting import PATIENCE, until

LEASE = Lease("me:1", 1)


#: The queue of all shards here.
QUEUE = "q"


@pytest.fixture(params=["one queue", "two queues", "bounded"], autouse=True)
def shares(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same holds in a node with a single queue, which counts no threads, and beside another queue without work."""
    made = {QUEUE: Share(max_threads=1000 if request.param == "bounded" else None)}
    monkeypatch.setattr(sys.modules[__name__], "SHARES", made | ({"z": Share()} if "two" in request.param else {}))


SHARES: dict[str, Share] = {}


def shard(name: str, *, due_in: float | None = 0.0, lease_for: float = 1000.0) -> Shard:
    """A shard that is held, with a job that is due in some seconds; None: no job. They are in the order of names."""
    index = int.from_bytes(name.encode()[:8].ljust(8, b"\0"))
    made = Shard(cast(Client, None), "lowq", QUEUE, index, shards_count=1, nonce="me", load_payload=bytes.decode)
    now = clock.now()
    made.lease.current, made.lease.deadline = LEASE, now + lease_for
    made.dispatch.next_due = None if due_in is None else now + due_in
    return made


def always(chosen: Shard, _shards: Sequence[Shard], _now: float, _ready: Callable[[Shard], bool]) -> Shard:
    """A scheduler that chooses a shard whether it may or not."""
    return chosen


def delivery(*, delay: float | None = None, paused: bool = False) -> Delivery:
    return Delivery(1, LEASE, [], delay, paused)


def dispatcher(*preferred: Sequence[Shard]) -> Dispatcher:
    return scheduled(preferred, *[LagScheduler() for _ in preferred])


def scheduled(
    preferred: Sequence[Sequence[Shard]],
    *schedules: Schedule,
    on_left: Callable[[Shard], object] = lambda _shard: None,
    clock: Clock = clock.now,
) -> Dispatcher:
    """With a scheduler for each thread."""
    return Dispatcher(preferred, [dict.fromkeys(SHARES, made) for made in schedules], SHARES, on_left, clock=clock)


def busy_for(dispatch: Dispatcher, thread: int, seconds: float) -> None:
    """The thread was given what it is with so long ago."""
    dispatch._busy_since[thread] = clock.now() - seconds
    dispatch._none_stuck_until = 0.0


class Sleepers:
    """Threads inside of `Dispatcher.wait`."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(16)
        self._waits: list[tuple[Dispatcher, Future[Shard | None]]] = []

    def wait(self, dispatch: Dispatcher, thread: int) -> "Future[Shard | None]":
        """Thread number `thread` waits for a shard. Returns when it has got one or sleeps."""
        future = self._pool.submit(dispatch.wait, thread)
        self._waits.append((dispatch, future))
        # One that was asleep before may have got a shard meanwhile.
        until(lambda: future.done() or dispatch._idle >= sum(self._waits_in(dispatch)))
        return future

    def _waits_in(self, dispatch: Dispatcher) -> Iterator[bool]:
        return (not future.done() for each, future in self._waits if each is dispatch)

    def close(self) -> None:
        for dispatch, _ in self._waits:
            dispatch.close()
        self._pool.shutdown()


@pytest.fixture
def sleepers() -> Iterator[Sleepers]:
    made = Sleepers()
    yield made
    made.close()


# --- sleep ---


def test_the_leader_sleeps_until_a_wake_up_however_late_the_next_job_is(sleepers: Sleepers) -> None:
    for due_in in [1e10, 2**63, float("inf")]:
        with case(due_in):
            never, a = shard("never", due_in=due_in), shard("a", due_in=None)
            dispatch = dispatcher([never, a])
            sleeping = sleepers.wait(dispatch, 0)
            assert not sleeping.done()  # an error of waiting would be its result
            dispatch.wake(a)
            assert sleeping.result(PATIENCE) is a


# --- claims ---


class TestClaims:
    def test_a_claimed_shard_is_nobody_elses(self, sleepers: Sleepers) -> None:
        a = shard("a")
        dispatch = dispatcher([a], [a])
        assert dispatch.wait(0) is a
        other = sleepers.wait(dispatch, 1)
        dispatch.wake(a)
        assert not other.done()
        dispatch.unclaim(a)
        assert other.result(PATIENCE) is a

    def test_a_scheduler_is_given_its_shards_ordered_by_queue_and_index_and_which_are_ready(self) -> None:
        given: list[tuple[list[Shard], list[Shard]]] = []

        def note(shards: Sequence[Shard], now: float, ready: Callable[[Shard], bool]) -> Shard | None:
            found = [shard for shard in shards if ready(shard)]
            given.append((list(shards), found))
            return found[0]

        a, b, later, paused = shard("a"), shard("b"), shard("later", due_in=1000), shard("paused")
        paused.dispatch.paused = True
        dispatch = scheduled([[b, later, paused, a], [b, a]], note, note)
        assert dispatch.wait(0) is a
        assert dispatch.wait(1) is b
        assert dispatch.pick(1) is b  # what a thread has in hand is ready for it, and for nobody else
        assert given == [([a, b, later, paused], [a, b]), ([a, b], [b]), ([a, b], [b])]

    def test_a_scheduler_cannot_hand_out_what_is_not_to_be_worked(self) -> None:
        a, b, later = shard("a"), shard("b"), shard("later", due_in=1000)
        for wrong in (a, later):
            dispatch = scheduled([[a], [b]], LagScheduler(), partial(always, wrong))
            assert dispatch.wait(0) is a
            assert dispatch.pick(1) is None  # it could have had b
            assert (a.dispatch.claimed_by, b.dispatch.claimed_by, later.dispatch.claimed_by) == (0, None, None)
            dispatch.unclaim(a)

    def test_a_scheduler_that_raises_leaves_the_shard_in_hand_claimed(self) -> None:
        a = shard("a")

        def fail(shards: Sequence[Shard], now: float, ready: Callable[[Shard], bool]) -> Shard | None:
            raise ZeroDivisionError

        dispatch = scheduled([[a], [a]], fail, LagScheduler())
        a.dispatch.claimed_by = 0
        with pytest.raises(ZeroDivisionError):
            dispatch.pick(0)
        assert a.dispatch.claimed_by == 0


# --- who works what ---


class TestPreference:
    def test_a_thread_works_its_own_shards_first_however_long_others_wait(self) -> None:
        mine, others = shard("mine"), shard("others", due_in=-100)
        assert dispatcher([others], [mine]).wait(1) is mine

    def test_then_it_helps_with_the_one_that_has_waited_longest(self) -> None:
        mine, a, b = shard("mine", due_in=None), shard("a", due_in=-1), shard("b", due_in=-2)
        assert dispatcher([a, b], [mine]).wait(1) is b

    def test_one_that_goes_round_its_shards_starves_none_of_those(self) -> None:
        a, b, c, d = (shard(name, due_in=-1) for name in "abcd")
        a.dispatch.next_due = None
        dispatch = scheduled([[a, c], [b, d]], SeqScheduler(), SeqScheduler())
        busy_for(dispatch, 1, 10.0)
        picked = []
        for _ in range(12):
            found = dispatch.pick(0)
            assert found is not None
            picked.append(found)
            busy_for(dispatch, 1, 10.0)
            dispatch.took(found, found.dispatch.wakes, delivery(delay=0.0))  # the next one of it is due now
            dispatch.unclaim(found)
        assert all(picked.count(one) >= 3 for one in (b, c, d))

    def test_all_take_turns_with_the_shards_of_a_thread_that_is_long_with_one_batch(self) -> None:
        stuck, waits, mine = shard("stuck", due_in=-9), shard("waits", due_in=-1), shard("mine", due_in=-5)
        dispatch = dispatcher([stuck, waits], [mine])
        assert dispatch.wait(0) is stuck
        assert dispatch.wait(1) is mine  # thread 0 has only just begun
        busy_for(dispatch, 0, 2 * dispatch_module.PATIENCE)
        assert dispatch.pick(1) is waits
        dispatch.unclaim(mine)
        assert dispatch.pick(1) is mine
        dispatch.unclaim(waits)
        assert dispatch.pick(1) is waits

    def test_once_it_is_back_its_shards_are_its_own_again(self) -> None:
        stuck, waits, mine = shard("stuck", due_in=-9), shard("waits", due_in=-1), shard("mine", due_in=-5)
        dispatch = dispatcher([stuck, waits], [mine])
        assert dispatch.wait(0) is stuck
        busy_for(dispatch, 0, 2 * dispatch_module.PATIENCE)
        assert dispatch.pick(0) is stuck
        for _ in range(3):
            assert dispatch.wait(1) is mine
            dispatch.unclaim(mine)

    def test_a_thread_that_comes_back_from_a_long_batch_does_not_help_itself(self) -> None:
        a, b, oldest = shard("a", due_in=-1), shard("b", due_in=-1), shard("oldest", due_in=-9)
        dispatch = scheduled([[a, b, oldest]], SeqScheduler())
        held = dispatch.wait(0)
        order = []
        for _ in range(6):
            assert held is not None
            order.append(held)
            busy_for(dispatch, 0, 2 * dispatch_module.PATIENCE)
            following = dispatch.pick(0)
            dispatch.unclaim(held)
            held = following
        assert order == [a, b, oldest] * 2

    def test_a_shard_that_is_paused_or_not_surely_leased_is_left_alone(self, sleepers: Sleepers) -> None:
        paused, expired = shard("paused"), shard("expired", lease_for=-1)
        paused.dispatch.paused = True
        assert not sleepers.wait(dispatcher([paused, expired]), 0).done()

    def test_pick_goes_on_with_the_shard_in_hand_or_another(self) -> None:
        a, b = shard("a", due_in=-2), shard("b", due_in=-1)
        dispatch = dispatcher([a, b])
        assert dispatch.wait(0) is a
        assert dispatch.pick(0) is a
        dispatch.took(a, a.dispatch.wakes, delivery(delay=5))
        assert dispatch.pick(0) is b
        assert a.dispatch.claimed_by == 0  # until what it finished is acknowledged
        assert b.dispatch.claimed_by == 0


# --- wake-ups ---


class TestWaking:
    def test_two_wake_ups_reach_two_sleeping_threads(self, sleepers: Sleepers) -> None:
        shards = [shard("a", due_in=None), shard("b", due_in=None)]
        dispatch = dispatcher(shards, shards)
        waiting = [sleepers.wait(dispatch, number) for number in range(2)]
        for item in shards:
            dispatch.wake(item)
        assert {future.result(PATIENCE) for future in waiting} == set(shards)

    def test_a_wake_up_during_a_take_is_not_lost(self) -> None:
        a = shard("a")
        dispatch = dispatcher([a])
        assert dispatch.wait(0) is a
        wakes = a.dispatch.wakes
        dispatch.wake(a)  # a push, after Redis has answered and before the answer is here
        dispatch.took(a, wakes, delivery(delay=None))
        assert dispatch.pick(0) is a

    def test_a_resume_during_a_take_is_not_lost_either(self) -> None:
        a = shard("a")
        dispatch = dispatcher([a])
        assert dispatch.wait(0) is a
        wakes = a.dispatch.wakes
        dispatch.wake(a)
        dispatch.took(a, wakes, delivery(delay=-1, paused=True))
        assert dispatch.pick(0) is a

    def test_a_wake_up_while_a_job_is_performed_is_not_lost(self, sleepers: Sleepers) -> None:
        a = shard("a")
        dispatch = dispatcher([a], [a])
        dispatch.wait(0)
        dispatch.took(a, a.dispatch.wakes, delivery(delay=None))
        waiting = sleepers.wait(dispatch, 1)
        dispatch.wake(a)
        assert not waiting.done()
        dispatch.unclaim(a)
        assert waiting.result(PATIENCE) is a

    def test_a_shard_that_was_due_before_it_may_be_worked_wakes_a_thread(self, sleepers: Sleepers) -> None:
        for state in ["paused", "leased to somebody else"]:
            with case(state):
                a = shard("a", due_in=-5)
                dispatch = dispatcher([a])
                if state == "paused":
                    a.dispatch.paused = True
                else:
                    a.lease.deadline = 0.0
                waiting = sleepers.wait(dispatch, 0)
                assert not waiting.done()
                a.lease.deadline = clock.now() + 1000
                dispatch.wake(a)
                assert waiting.result(PATIENCE) is a

    def test_jobs_that_went_back_to_a_shard_are_looked_for_at_once(self) -> None:
        a = shard("a")
        dispatch = dispatcher([a])
        dispatch.wait(0)
        dispatch.took(a, a.dispatch.wakes, delivery(delay=None))
        assert dispatch.pick(0) is None
        dispatch.look_again(a)
        assert dispatch.pick(0) is a

    def test_a_later_wake_up_does_not_put_off_an_earlier_time(self) -> None:
        a = shard("a", due_in=1.0)
        before = a.next_due
        dispatcher([a]).wake(a, 100.0)
        assert a.next_due == before


class TestAlarm:
    def test_the_alarm_is_set_anew_when_something_is_due_earlier(self, sleepers: Sleepers) -> None:
        shards = [shard("a", due_in=1000), shard("b", due_in=None)]
        dispatch = dispatcher(shards, shards)
        waiting = [sleepers.wait(dispatch, number) for number in range(2)]
        dispatch.wake(shards[1], 0.05)
        until(lambda: any(future.done() for future in waiting))
        assert [future.result() for future in waiting if future.done()] == [shards[1]]

    @pytest.mark.parametrize("asleep_first", [0, 1])
    def test_when_the_leader_goes_to_work_another_sleeper_watches_the_time(
        self, asleep_first: int, sleepers: Sleepers
    ) -> None:
        now, soon = shard("now", due_in=None), shard("soon", due_in=0.1)
        dispatch = dispatcher([now, soon], [now, soon])
        waiting = [sleepers.wait(dispatch, number) for number in (asleep_first, 1 - asleep_first)]
        dispatch.wake(now)
        assert {future.result(PATIENCE) for future in waiting} == {now, soon}

    def test_nobody_polls(self, sleepers: Sleepers) -> None:
        for state in ("nothing due", "paused", "claimed", "leaving", "lease over", "due later"):
            with case(state):
                self.check_that_nobody_polls(state, sleepers)

    @staticmethod
    def check_that_nobody_polls(state: str, sleepers: Sleepers) -> None:
        looks = 0

        def count() -> float:  # whoever looks for a shard reads the clock first
            nonlocal looks
            looks += 1
            return clock.now()

        a = shard("a", due_in={"nothing due": None, "due later": 1000.0}.get(state, -1.0))
        a.dispatch.paused = state == "paused"
        a.dispatch.claimed_by = 7 if state == "claimed" else None
        a.dispatch.leaving = state == "leaving"
        if state == "lease over":
            a.lease.deadline = clock.now() - 0.001  # Redis is away: it is not surely ours, and its job is still due
        dispatch = scheduled([[a], [a]], LagScheduler(), LagScheduler(), clock=count)
        looks = 0
        waiting = [sleepers.wait(dispatch, number) for number in range(2)]
        time.sleep(0.25)
        assert looks == 2
        assert not any(future.done() for future in waiting)


class TestRefresh:
    def test_it_finds_what_a_lost_message_would_have_told(self, sleepers: Sleepers) -> None:
        a = shard("a", due_in=None)
        dispatch = dispatcher([a])
        waiting = sleepers.wait(dispatch, 0)
        dispatch.refreshed(a, a.dispatch.wakes, -3.0, paused=False)
        assert waiting.result(PATIENCE) is a

    def test_it_finds_a_pause_and_its_end(self, sleepers: Sleepers) -> None:
        a = shard("a")
        dispatch = dispatcher([a])
        dispatch.refreshed(a, a.dispatch.wakes, -3.0, paused=True)
        waiting = sleepers.wait(dispatch, 0)
        assert not waiting.done()
        dispatch.refreshed(a, a.dispatch.wakes, -3.0, paused=False)
        assert waiting.result(PATIENCE) is a

    def test_only_shards_that_nobody_works_are_looked_at(self) -> None:
        held, worked, others = shard("held", due_in=None), shard("worked"), shard("others", due_in=None)
        dispatch = dispatcher([held, worked, others])
        assert dispatch.wait(0) is worked
        assert [item for item, _ in dispatch.unclaimed([held, worked])] == [held]

    def test_it_does_not_undo_what_a_newer_message_told(self) -> None:
        a = shard("a", due_in=None)
        dispatch = dispatcher([a])
        ((looked_at, wakes),) = dispatch.unclaimed([a])
        dispatch.wake(a)
        dispatch.refreshed(looked_at, wakes, None, paused=True)
        assert dispatch.wait(0) is a

    def test_it_does_not_touch_a_shard_that_a_thread_works(self) -> None:
        a = shard("a")
        dispatch = dispatcher([a])
        ((looked_at, wakes),) = dispatch.unclaimed([a])
        dispatch.wait(0)
        dispatch.refreshed(looked_at, wakes, None, paused=True)
        assert dispatch.pick(0) is a


class TestLeaving:
    """Shards that are to be given up."""

    def test_no_thread_picks_what_is_to_be_given_up(self, sleepers: Sleepers) -> None:
        a = shard("a")
        dispatch = dispatcher([a])
        dispatch.leave([a])
        waiting = sleepers.wait(dispatch, 0)
        dispatch.wake(a)
        dispatch.refreshed(a, a.dispatch.wakes, -1.0, paused=False)
        assert not waiting.done()
        dispatch.stay([a])
        assert waiting.result(PATIENCE) is a

    def test_the_thread_that_works_it_lets_it_go_after_its_trip(self) -> None:
        left: list[Shard] = []
        a, b = shard("a"), shard("b", due_in=None)
        dispatch = scheduled([[a, b]], LagScheduler(), on_left=left.append)
        assert dispatch.wait(0) is a
        dispatch.leave([a])
        dispatch.took(a, a.dispatch.wakes, delivery(delay=-1.0))
        assert dispatch.pick(0) is None
        assert left == []
        dispatch.unclaim(a)
        assert left == [a]
        dispatch.stay([a])
        assert dispatch.wait(0) is a
        dispatch.unclaim(a)
        assert left == [a]


class TestAssign:
    """Other shards than before."""

    def test_the_new_ones_are_worked_and_the_old_ones_are_not(self, sleepers: Sleepers) -> None:
        old, new = shard("old", due_in=None), shard("new")
        dispatch = dispatcher([old])
        waiting = sleepers.wait(dispatch, 0)
        dispatch.assign([[new]])
        assert waiting.result(PATIENCE) is new
        dispatch.unclaim(new)
        new.dispatch.next_due = None
        dispatch.wake(old)
        assert dispatch.pick(0) is None


class TestClose:
    def test_sleeping_threads_are_sent_home(self, sleepers: Sleepers) -> None:
        shards = [shard("a", due_in=1000)]
        dispatch = dispatcher(shards, shards, shards)
        waiting = [sleepers.wait(dispatch, number) for number in range(3)]
        dispatch.close()
        assert [future.result(PATIENCE) for future in waiting] == [None, None, None]


def test_a_thread_is_given_the_most_urgent_shard_of_its_queue_whichever_it_prefers() -> None:
    mine, theirs = shard("a"), shard("b", due_in=None)
    dispatch = dispatcher([mine], [theirs])
    assert dispatch.pick(0) is mine
    backfill = Delivery(1, LEASE, [], -100.0, False, {9: -100.0})
    dispatch.took(mine, mine.dispatch.wakes, backfill)
    dispatch.wake(theirs, 0.0, 5)
    assert dispatch.pick(0) is theirs
    dispatch.took(theirs, theirs.dispatch.wakes, delivery())
    dispatch.unclaim(theirs)
    assert dispatch.pick(0) is mine
    dispatch.unclaim(mine)
    dispatch.refreshed(theirs, theirs.dispatch.wakes, 0.0, paused=False, levels={3: 0.0})
    assert dispatch.pick(0) is theirs
    assert (mine.priority_at(clock.now()), theirs.priority_at(clock.now())) == (9, 3)
    # A job of it failed and waits again: it is as urgent as it was.
    dispatch.took(theirs, theirs.dispatch.wakes, Delivery(1, LEASE, [], 50.0, False, {8: 50.0}))
    dispatch.look_again(theirs)
    assert theirs.priority_at(clock.now()) == 3
    assert dispatch.pick_many(2, [theirs]) == [theirs, mine]
