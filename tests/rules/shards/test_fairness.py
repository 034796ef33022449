"""Shares of threads: a node's threads are played through on a clock that the test moves, or wait for real."""

import heapq
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowq.shards.dispatcher import Dispatcher, Schedule
from lowq.shards.permits import Share
from lowq.shards.scheduler import ASK_AGAIN, LagScheduler, SeqScheduler, is_ready
from lowq.shards.shard import Shard
from tests.rows import case
from tests.rules.shards.dispatching import Waiting, delivery, dispatcher, look, shard
from tests.waiting import NEVER, PATIENCE, until

# --- shares, over time ---


@dataclass
class Queue:
    """What a queue asks of a node: so many shards, with batches of that length, seconds, all due from that time on."""

    seconds: float | tuple[float, float]
    weight: float = 1
    max_threads: int | None = None
    shards: int = 20
    since: float = 0.0
    #: Times of jobs that come by themselves, instead of a backlog.
    arrivals: list[float] = field(default_factory=list)


class Played:
    """A node, played through: its threads take shard after shard as a real one's do."""

    def __init__(self, threads: int, queues: Mapping[str, Queue], seconds: float) -> None:
        self.now = 0.0
        self._queues, self._draw = queues, random.Random(7)
        self._shards = [shard(name, index) for name, queue in queues.items() for index in range(queue.shards)]
        shares = {name: Share(queue.weight, queue.max_threads) for name, queue in queues.items()}
        self._dispatcher = dispatcher(threads, self._shards, shares, clock=lambda: self.now)
        self._held: list[Shard | None] = [None] * threads
        self._waiting: set[int] = set()
        #: Seconds of threads, and threads at once.
        self.used = dict.fromkeys(queues, 0.0)
        self.most = dict.fromkeys(queues, 0)
        self.delays: list[float] = []
        self._left = {name: list(queue.arrivals) for name, queue in queues.items()}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        for number in range(threads):
            self._at(0.0, lambda number=number: self._turn(number))  # type: ignore[misc]  # a default binds it
        for name, queue in queues.items():
            for moment in queue.arrivals or [queue.since]:
                self._at(moment, lambda name=name: self._arrive(name))  # type: ignore[misc]
        while self._events and self._events[0][0] < seconds:
            self.now, _, act = heapq.heappop(self._events)
            act()

    def _at(self, moment: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (moment, len(self._events) + self._draw.randrange(10**9), act))

    def _arrive(self, name: str) -> None:
        mine = [item for item in self._shards if item.queue == name]
        for item in mine[:1] if self._queues[name].arrivals else mine:
            self._dispatcher.wake(item)
        for number in sorted(self._waiting):
            self._turn(number)

    def _turn(self, number: int) -> None:
        held = self._held[number]
        following = self._dispatcher.pick(number)
        if held is not None and held is not following:
            self._dispatcher.unclaim(held)
        self._held[number] = following
        self._waiting.discard(number)
        if following is None:
            self._waiting.add(number)
            return
        queue = self._queues[following.queue]
        length = queue.seconds if isinstance(queue.seconds, float) else self._draw.uniform(*queue.seconds)
        self.used[following.queue] += length
        at_once = sum(item is not None and item.queue == following.queue for item in self._held)
        self.most[following.queue] = max(self.most[following.queue], at_once)
        if queue.arrivals:
            self.delays.append(self.now - self._left[following.queue].pop(0))
        came = bool(self._left[following.queue]) and self._left[following.queue][0] <= self.now
        self._dispatcher.note_delivery(
            following, following.dispatch.wakes, delivery(0.0 if came or not queue.arrivals else None)
        )
        self._at(self.now + length, lambda: self._turn(number))


LENGTHS: list[tuple[float | tuple[float, float], ...]] = [
    (0.05, 0.05, 0.05), (0.001, 0.05, (0.01, 0.05)), (0.05, 0.001, 0.02),
]  # fmt: skip


def test_thread_time_is_as_the_weights_whatever_the_number_of_threads() -> None:
    all_weights: list[tuple[float, ...]] = [(3, 1), (3, 1, 1)]
    for lengths, weights, threads in product(LENGTHS, all_weights, [1, 2, 4, 5, 6]):
        with case(lengths, weights, threads):
            queues = {str(n): Queue(lengths[n], weight) for n, weight in enumerate(weights)}
            played = Played(threads, queues, seconds=8.0 / threads)
            total = sum(played.used.values())
            assert total == pytest.approx(8.0, rel=0.05)  # none of them rested
            for name, queue in queues.items():
                assert played.used[name] / total == pytest.approx(queue.weight / sum(weights), rel=0.1)


def test_no_queue_has_more_threads_than_its_share_while_another_waits() -> None:
    assert Played(4, {"a": Queue(0.05, 3), "b": Queue(0.005)}, 2.0).most == {"a": 3, "b": 1}
    hours = Played(5, {"hours": Queue(3600.0, since=0.5), "quick": Queue(0.001)}, 2.0)
    assert hours.most["hours"] == 3
    assert hours.used["quick"] == pytest.approx(0.5 * 5 + 1.5 * 2, rel=0.1)


def test_a_queue_that_is_alone_has_all_threads_and_gives_them_back_batch_by_batch() -> None:
    played = Played(4, {"a": Queue(0.05), "b": Queue(0.05, since=10.0)}, 10.2)
    assert played.most["a"] == 4
    assert played.used["a"] == pytest.approx(10.0 * 4 + 0.2 * 2, rel=0.02)
    # From the end of the batches that ran then, 0.05 s at most, it has its 2 threads.
    assert played.used["b"] == pytest.approx(0.2 * 2, abs=0.2)


def test_who_had_nothing_to_do_or_too_few_shards_for_its_share_saves_up_no_credit() -> None:
    played = Played(1, {"a": Queue(0.05), "b": Queue(0.05, since=20.0)}, 22.0)
    assert played.used["b"] == pytest.approx(1.0, abs=0.1)
    played = Played(5, {"a": Queue(0.05, shards=1), "b": Queue(0.05), "c": Queue(0.05, since=10.0)}, 15.0)
    assert played.used["a"] == pytest.approx(15.0, rel=0.1)
    assert played.used["c"] == pytest.approx(5.0 * 2, rel=0.1)


def test_jobs_that_come_one_by_one_do_not_wait_behind_a_backlog() -> None:
    fast = Queue(0.001, shards=5, arrivals=[0.01 + number * 0.08 for number in range(200)])
    played = Played(5, {"slow": Queue(0.05, shards=5), "fast": fast}, 16.1)
    assert len(played.delays) == 200
    assert max(played.delays) <= 0.05 + 1e-9  # until the next of five batches of the other ends
    assert played.used["slow"] == pytest.approx(16.1 * 5, rel=0.02)


@pytest.mark.parametrize("others", [{}, {"b": Queue(0.005)}], ids=["alone", "beside another"])
def test_a_queue_never_has_more_than_max_threads(others: dict[str, Queue]) -> None:
    played = Played(5, {"a": Queue(0.05, 3, max_threads=2), **others}, 4.0)
    assert played.most["a"] == 2
    assert played.used["a"] == pytest.approx(4.0 * 2, rel=0.05)
    if others:
        assert played.used["b"] == pytest.approx(4.0 * 3, rel=0.05)


# --- sleep ---


BOUNDED = {"a": Share(max_threads=1), "b": Share()}


def test_whoever_leaves_a_full_queue_wakes_a_thread_for_it(waiting: Waiting) -> None:
    first, second = shard("a", 0, due=0.0), shard("a", 1, due=0.0)
    dispatch = dispatcher(2, [first, second], BOUNDED, clock=waiting.clock)
    assert dispatch.pick(0) is first
    sleeping = waiting.wait(dispatch, 1)
    assert not sleeping.done()
    dispatch.note_delivery(first, first.dispatch.wakes, delivery())
    dispatch.unclaim(first)  # nothing more of this one: it is the other that the sleeper can have
    assert sleeping.result(PATIENCE) is second


def test_also_when_a_scheduler_raises_and_what_it_had_in_hand_stays_claimed(waiting: Waiting) -> None:
    raising = threading.Event()

    def choose(shards: Sequence[Shard], now: float, ready: Callable[[Shard], bool]) -> Shard | None:
        if raising.is_set():
            raising.clear()
            raise ZeroDivisionError
        return LagScheduler()(shards, now, ready)

    a, more = shard("a", 0, due=0.0), shard("a", 1, due=0.0)
    dispatch = dispatcher(2, [a, more], BOUNDED, build_scheduler=lambda: choose, clock=waiting.clock)
    assert dispatch.pick(0) is a
    sleeping = waiting.wait(dispatch, 1)
    raising.set()
    with pytest.raises(ZeroDivisionError):
        dispatch.pick(0)
    assert a.dispatch.claimed_by == 0
    assert sleeping.result(PATIENCE) is more


def test_nobody_polls_for_a_full_queue_nor_is_woken_by_its_jobs(waiting: Waiting) -> None:
    first, second = shard("a", 0, due=0.0), shard("a", 1, due=0.0)
    dispatch = dispatcher(3, [first, second], BOUNDED, clock=waiting.clock)
    assert dispatch.pick(0) is first
    sleeping = [waiting.wait(dispatch, number) for number in (1, 2)]
    dispatch.wake(second)
    looks = waiting.looks
    with pytest.raises(TimeoutError):
        sleeping[0].result(3 * ASK_AGAIN)
    assert waiting.looks == looks
    assert not sleeping[1].done()


class Storm:
    """Threads that work a dispatcher's shards, which get jobs at any time; and what may never be."""

    def __init__(self, threads: int, shares: Mapping[str, Share]) -> None:
        self.shards = [shard(queue, index) for queue in shares for index in range(6)]
        self.dispatcher = dispatcher(threads, self.shards, shares)
        self.worked = dict.fromkeys(self.shards, 0)
        self.most = dict.fromkeys(shares, 0)
        self.overlaps: list[Shard] = []
        self.is_ending, self._pause = threading.Event(), threading.Event()
        self._busy: set[Shard] = set()
        self._lock = threading.Lock()
        self.pool = [threading.Thread(target=self._work, args=(number,), daemon=True) for number in range(threads)]
        for thread in self.pool:
            thread.start()

    def _work(self, number: int) -> None:
        draw, held = random.Random(number), self.dispatcher.wait(number)
        while held is not None:
            with self._lock:
                self.overlaps += [held] if held in self._busy else []
                self._busy.add(held)
                self.worked[held] += 1
                running = sum(each.queue == held.queue for each in self._busy)
                self.most[held.queue] = max(self.most[held.queue], running)
            wakes = held.dispatch.wakes
            self._pause.wait(draw.choice([0.0, 0.0, 0.001]))
            delay = None if self.is_ending.is_set() else draw.choice([None, 0.0, 0.001])
            self.dispatcher.note_delivery(held, wakes, delivery(delay))
            with self._lock:
                self._busy.discard(held)
            following = self.dispatcher.pick(number)
            if following is not held:
                self.dispatcher.unclaim(held)
            held = following or self.dispatcher.wait(number)


def test_in_a_storm_no_shard_has_two_threads_nor_a_queue_too_many_and_no_wake_up_is_lost() -> None:
    storm = Storm(6, {"a": Share(max_threads=2), "b": Share(weight=3)})
    draw = random.Random(99)

    def wake() -> bool:
        storm.dispatcher.wake(draw.choice(storm.shards), draw.choice([0.0, 0.0, 0.001]))
        return sum(storm.worked.values()) >= 500 and min(storm.worked.values()) > 0

    until(wake, "enough turns")
    storm.is_ending.set()
    until(lambda: all(item.next_due is None for item in storm.shards), "all worked without another wake-up")
    storm.dispatcher.close()
    for thread in storm.pool:
        thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in storm.pool)
    assert storm.most["a"] <= 2
    assert not storm.overlaps


# --- schedulers ---


class Moody:
    """A scheduler that declines while it is told to."""

    def __init__(self) -> None:
        self.declines = True

    def __call__(self, shards: Sequence[Shard], now: float, ready: Callable[[Shard], bool]) -> Shard | None:
        return None if self.declines else LagScheduler()(shards, now, ready)


either = pytest.mark.parametrize("shares", [{"a": Share()}, {"a": Share(), "z": Share()}], ids=["one", "two"])


@either
def test_one_that_declines_is_obeyed_and_asked_again_but_not_in_a_loop(
    shares: dict[str, Share], waiting: Waiting
) -> None:
    a, moody = shard("a", due=0.0), Moody()
    dispatch = dispatcher(2, [a], shares, build_scheduler=lambda: moody, clock=waiting.clock)
    begun, looks = time.monotonic(), waiting.looks
    sleeping = [waiting.wait(dispatch, number) for number in range(2)]
    until(lambda: waiting.looks - looks >= 10)
    assert waiting.looks - looks <= 10 + 4 * (time.monotonic() - begun) / ASK_AGAIN
    moody.declines = False  # nothing else happens: only that it is asked again
    until(lambda: any(future.done() for future in sleeping))


@either
def test_what_one_declines_another_threads_may_choose(shares: dict[str, Share], waiting: Waiting) -> None:
    a, moods = shard("a"), [Moody() for _ in range(3)]
    moods[2].declines = False
    dispatch = Dispatcher([a], [dict.fromkeys(shares, moody) for moody in moods], shares, clock=waiting.clock)
    sleeping = [waiting.wait(dispatch, number) for number in range(3)]
    dispatch.wake(a)  # this may wake any of them
    assert sleeping[2].result(PATIENCE) is a
    assert not sleeping[0].done()


def test_when_one_declines_or_chooses_of_another_queue_its_own_has_no_turn() -> None:
    a, b = shard("a", due=0.0), shard("b", due=0.0)
    shares = {"a": Share(), "b": Share()}
    declines: dict[str, Schedule] = {"a": Moody(), "b": LagScheduler()}
    assert Dispatcher([a, b], [declines], shares).pick(0) is b
    wrong: dict[str, Schedule] = {"a": lambda *_: b, "b": lambda *_: a}
    assert Dispatcher([a, b], [wrong], shares).pick(0) is None


def test_each_sees_the_shards_of_one_queue() -> None:
    given: list[list[Shard]] = []

    def decline(shards: Sequence[Shard], now: float, ready: Callable[[Shard], bool]) -> Shard | None:
        given.append(list(shards))
        return None

    a, b = [shard("a", index, due=0.0) for index in range(4)], [shard("b", index, due=0.0) for index in range(2)]
    dispatch = dispatcher(2, [*a, *b], {"a": Share(), "b": Share()}, build_scheduler=lambda: decline)
    assert dispatch.pick(0) is None
    assert given == [a, b]


def test_a_round_goes_on_where_it_was_when_queues_take_turns() -> None:
    now = 0.0
    shards = [shard(queue, index, due=0.0) for queue in "ab" for index in range(3)]
    dispatch = dispatcher(1, shards, {"a": Share(), "b": Share()}, build_scheduler=SeqScheduler, clock=lambda: now)
    turns: dict[str, list[int]] = {"a": [], "b": []}
    for _ in range(12):
        picked = dispatch.pick(0)
        assert picked is not None
        turns[picked.queue].append(picked.index)
        now += 1.0
        dispatch.unclaim(picked)
    assert turns == {"a": [0, 1, 2, 0, 1, 2], "b": [0, 1, 2, 0, 1, 2]}


# --- nothing is overlooked ---


@settings(max_examples=40)
@given(st.randoms(use_true_random=False), st.integers(1, 3))
def test_a_shard_that_is_ready_is_always_found(draw: random.Random, threads: int) -> None:
    """The dispatcher remembers that a queue rests: whatever is known of a shard later must end that."""
    now = 0.0
    shares = {"a": Share(), "b": Share(weight=2), "c": Share(max_threads=1)}
    shards = [shard(queue, index) for queue in shares for index in range(2)]
    dispatch = dispatcher(threads, shards, shares, clock=lambda: now)
    held: list[Shard | None] = [None] * threads
    assigned = shards
    for _ in range(60):
        now += draw.choice([0.0, 0.5, 1.0])
        number, item = draw.randrange(threads), draw.choice(shards)
        wakes = item.dispatch.wakes
        match draw.randrange(7):
            case 0:
                dispatch.wake(item, draw.choice([0.0, 0.7]))
            case 1:
                look(dispatch, item, draw.choice([None, 0.0, 0.7]), paused=draw.random() < 0.3)
            case 2:
                draw.choice([dispatch.leave, dispatch.stay])([item])
            case 3:
                assigned = [other for other in shards if draw.random() < 0.8]
                dispatch.assign(assigned)
            case 4:
                item.lease.deadline = draw.choice([now, NEVER])
            case _:
                mine = held[number]
                if mine is not None:
                    dispatch.note_delivery(
                        mine, draw.choice([wakes, mine.dispatch.wakes]), delivery(draw.choice([None, 0, 0.7]))
                    )
                running = {name: sum(other is not None and other.queue == name for other in held) for name in shares}
                running["c"] -= mine is not None and mine.queue == "c"
                ready = [
                    other
                    for other in assigned
                    if is_ready(number, now, other) and (other.queue != "c" or running["c"] < 1)
                ]
                picked = dispatch.pick(number)
                assert (picked is not None) == bool(ready)
                if mine is not None and mine is not picked:
                    dispatch.unclaim(mine)
                held[number] = picked
