"""Shares of threads: a node's threads are played through on a clock that the test moves, or wait for real."""

import heapq
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import product
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowq import clock
from lowq.broker.delivery import Delivery
from lowq.broker.dispatcher import ASK_AGAIN, Dispatcher, Schedule, is_ready
from lowq.broker.fairness import QueueUse, Share, next_queue
from lowq.broker.lease import Lease
from lowq.broker.scheduler import LagScheduler, SeqScheduler
from lowq.broker.shard import Shard
from lowq.clock import Clock
from lowq.store import Client
from tests.rows import case
from tests.waiting import NEVER, PATIENCE, until

LEASE = Lease("me:1", 1)


def shard(queue: str, index: int = 0, due: float | None = None) -> Shard:
    made = Shard(cast(Client, None), "lowq", queue, index, shards_count=1, nonce="me", load_payload=bytes.decode)
    made.lease.current, made.lease.deadline = LEASE, float("inf")
    made.dispatch.next_due = due
    return made


def delivery(delay: float | None = None) -> Delivery:
    return Delivery(1, LEASE, [], delay, False)


def dispatcher(
    threads: int,
    shards: Sequence[Shard],
    shares: Mapping[str, Share],
    *,
    build_scheduler: Callable[[], Schedule] = LagScheduler,
    clock: Clock = clock.now,
) -> Dispatcher:
    schedules = [{queue: build_scheduler() for queue in shares} for _ in range(threads)]
    return Dispatcher([shards[number::threads] for number in range(threads)], schedules, shares, clock=clock)


# --- which queue ---


def use(queue: str, running: int, weight: float, virtual_time: float = 0.0) -> QueueUse:
    made = QueueUse(queue, Share(weight))
    made.running, made.virtual_time = running, virtual_time
    return made


class TestNextQueue:
    def test_the_one_that_has_less_than_its_share_even_with_one_more(self) -> None:
        rows: list[tuple[tuple[int, float], tuple[int, float], str]] = [
            ((3, 3), (0, 1), "b"), ((2, 3), (1, 1), "a"), ((2, 3), (2, 1), "a"), ((0, 0.5), (2, 1), "a"),
        ]  # fmt: skip
        for a, b, chosen in rows:
            with case(a, b, chosen):
                for ahead, behind in ((0.0, 100.0), (100.0, 0.0)):
                    assert next_queue([use("a", *a, ahead), use("b", *b, behind)]).queue == chosen

    def test_of_those_whose_shares_are_no_whole_threads_the_one_that_has_used_less(self) -> None:
        rows: list[tuple[tuple[int, float], tuple[int, float]]] = [
            ((3, 3), (1, 1)), ((1, 3), (0, 1)), ((0, 3), (0, 1)), ((4, 3), (1, 1)),
        ]  # fmt: skip
        for a, b in rows:
            with case(a, b):
                assert next_queue([use("a", *a, 1.0), use("b", *b, 2.0)]).queue == "a"
                assert next_queue([use("a", *a, 2.0), use("b", *b, 1.0)]).queue == "b"


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
        self.total = sum(self.used.values())

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
        self._dispatcher.took(
            following, following.dispatch.wakes, delivery(0.0 if came or not queue.arrivals else None)
        )
        self._at(self.now + length, lambda: self._turn(number))

    def part(self, name: str) -> float:
        return self.used[name] / self.total


LENGTHS: dict[str, tuple[float | tuple[float, float], ...]] = {
    "alike": (0.05, 0.05, 0.05),
    "the first short": (0.001, 0.05, (0.01, 0.05)),
    "the second short": (0.05, 0.001, 0.02),
}


class TestShares:
    def test_thread_time_is_as_the_weights_whatever_the_number_of_threads(self) -> None:
        all_weights: list[tuple[float, ...]] = [(3, 1), (3, 1, 1)]
        for lengths, weights, threads in product(LENGTHS.values(), all_weights, [1, 2, 4, 5, 6]):
            with case(lengths, weights, threads):
                queues = {str(n): Queue(length, weight) for n, (length, weight) in enumerate(zip(lengths, weights))}  # noqa: B905
                played = Played(threads, queues, seconds=8.0 / threads)
                assert played.total == pytest.approx(8.0, rel=0.05)  # none of them rested
                for name, queue in queues.items():
                    assert played.part(name) == pytest.approx(queue.weight / sum(weights), rel=0.1)

    def test_no_queue_has_more_threads_than_its_share_while_another_waits(self) -> None:
        assert Played(4, {"a": Queue(0.05, 3), "b": Queue(0.005)}, 2.0).most == {"a": 3, "b": 1}

    def test_a_queue_that_is_alone_has_all_threads(self) -> None:
        played = Played(5, {"a": Queue(0.05), "b": Queue(0.05, since=NEVER)}, 5.0)
        assert played.used["a"] == pytest.approx(25.0, rel=0.02)

    def test_what_was_lent_comes_back_batch_by_batch(self) -> None:
        played = Played(4, {"a": Queue(0.05), "b": Queue(0.05, since=10.0)}, 10.2)
        assert played.most["a"] == 4
        # From the end of the batches that ran then, 0.05 s at most, it has its 2 threads.
        assert played.used["b"] == pytest.approx(0.2 * 2, abs=0.2)

    def test_a_queue_that_had_nothing_to_do_saves_up_no_credit(self) -> None:
        played = Played(1, {"a": Queue(0.05), "b": Queue(0.05, since=20.0)}, 22.0)
        assert played.used["b"] == pytest.approx(1.0, abs=0.1)

    def test_nor_does_one_with_fewer_shards_than_its_share(self) -> None:
        few = Queue(0.05, shards=1)
        played = Played(5, {"a": few, "b": Queue(0.05), "c": Queue(0.05, since=10.0)}, 15.0)
        assert played.used["a"] == pytest.approx(15.0, rel=0.1)
        assert played.used["c"] == pytest.approx(5.0 * 2, rel=0.1)

    def test_jobs_that_come_one_by_one_do_not_wait_behind_a_backlog(self) -> None:
        fast = Queue(0.001, shards=5, arrivals=[0.01 + number * 0.08 for number in range(200)])
        played = Played(5, {"slow": Queue(0.05, shards=5), "fast": fast}, 16.1)
        assert len(played.delays) == 200
        assert max(played.delays) <= 0.05 + 1e-9  # until the next of five batches of the other ends
        assert played.used["slow"] == pytest.approx(16.1 * 5, rel=0.02)

    def test_hours_of_one_queue_take_no_more_threads_than_its_share(self) -> None:
        played = Played(5, {"hours": Queue(3600.0, since=0.5), "quick": Queue(0.001)}, 2.0)
        assert played.most["hours"] == 3
        assert played.used["quick"] == pytest.approx(0.5 * 5 + 1.5 * 2, rel=0.1)


class TestMaxThreads:
    @pytest.mark.parametrize("others", [{}, {"b": Queue(0.005)}], ids=["alone", "beside another"])
    def test_a_queue_never_has_more(self, others: dict[str, Queue]) -> None:
        played = Played(5, {"a": Queue(0.05, 3, max_threads=2), **others}, 4.0)
        assert played.most["a"] == 2
        assert played.used["a"] == pytest.approx(4.0 * 2, rel=0.05)
        if others:
            assert played.used["b"] == pytest.approx(4.0 * 3, rel=0.05)


# --- sleep ---


class Node:
    """Threads that really wait. `looks` counts how often one of them has looked for a shard."""

    def __init__(self) -> None:
        self.looks = 0
        self._made: list[Dispatcher] = []

    def clock(self) -> float:
        self.looks += 1  # whoever looks for a shard reads the clock first
        return clock.now()

    def dispatcher(
        self,
        threads: int,
        shards: Sequence[Shard],
        shares: Mapping[str, Share],
        build_scheduler: Callable[[], Schedule],
    ) -> Dispatcher:
        made = dispatcher(threads, shards, shares, build_scheduler=build_scheduler, clock=self.clock)
        self._made.append(made)
        return made

    def wait(self, dispatch: Dispatcher, thread: int) -> "Future[Shard | None]":
        """The thread waits for a shard. Returns when it has got one or sleeps."""
        future: Future[Shard | None] = Future()
        asleep = dispatch._idle
        threading.Thread(target=lambda: future.set_result(dispatch.wait(thread)), daemon=True).start()
        until(lambda: future.done() or dispatch._idle > asleep)
        return future

    def close(self) -> None:
        for made in self._made:
            made.close()


@pytest.fixture
def node() -> Iterator[Node]:
    made = Node()
    yield made
    made.close()


def ends(dispatch: Dispatcher, item: Shard, thread: int) -> None:
    """The thread's batch of the shard ends, more of it is due, and the thread looks for nothing else."""
    dispatch.look_again(item)
    dispatch.unclaim(item)


BOUNDED = {"a": Share(max_threads=1), "b": Share()}


class TestSleep:
    def test_whoever_leaves_a_full_queue_wakes_a_thread_for_it(self, node: Node) -> None:
        first, second = shard("a", 0, due=0.0), shard("a", 1, due=0.0)
        dispatch = node.dispatcher(2, [first, second], BOUNDED, LagScheduler)
        assert dispatch.pick(0) is first
        sleeping = node.wait(dispatch, 1)
        assert not sleeping.done()
        dispatch.took(first, first.dispatch.wakes, delivery())
        dispatch.unclaim(first)  # nothing more of this one: it is the other that the sleeper can have
        assert sleeping.result(PATIENCE) is second

    def test_also_when_a_scheduler_raises(self, node: Node) -> None:
        raising = threading.Event()

        def choose(shards: Sequence[Shard], now: float, ready: Callable[[Shard], bool]) -> Shard | None:
            if raising.is_set():
                raising.clear()
                raise ZeroDivisionError
            return LagScheduler()(shards, now, ready)

        a, more = shard("a", 0, due=0.0), shard("a", 1, due=0.0)
        dispatch = node.dispatcher(2, [a, more], BOUNDED, lambda: choose)
        assert dispatch.pick(0) is a
        sleeping = node.wait(dispatch, 1)
        raising.set()
        with pytest.raises(ZeroDivisionError):
            dispatch.pick(0)
        assert a.dispatch.claimed_by == 0
        assert sleeping.result(PATIENCE) is more

    def test_nobody_polls_for_a_full_queue_nor_is_woken_by_its_jobs(self, node: Node) -> None:
        first, second = shard("a", 0, due=0.0), shard("a", 1, due=0.0)
        dispatch = node.dispatcher(3, [first, second], BOUNDED, LagScheduler)
        assert dispatch.pick(0) is first
        sleeping = [node.wait(dispatch, number) for number in (1, 2)]
        slept = threading.Event()
        dispatch.wake(second)
        node.looks = 0
        slept.wait(3 * ASK_AGAIN)
        assert node.looks == 0
        assert not any(future.done() for future in sleeping)

    def test_never_two_threads_on_a_shard_nor_more_than_the_queue_may_have_in_a_storm(self, node: Node) -> None:
        shares = {"a": Share(max_threads=2), "b": Share(weight=3)}
        shards = [shard(queue, index) for queue in shares for index in range(6)]
        dispatch = node.dispatcher(6, shards, shares, LagScheduler)
        lock, working, most, worked = threading.Lock(), {"a": 0, "b": 0}, {"a": 0, "b": 0}, dict.fromkeys(shards, 0)
        busy: set[Shard] = set()
        overlaps: list[Shard] = []
        enough = 500

        def work(number: int) -> None:
            draw, held = random.Random(number), None
            while True:
                taken = dispatch.wait(number) if held is None else dispatch.pick(number)
                if held is not None and held is not taken:
                    dispatch.unclaim(held)
                if taken is None and held is None:
                    return
                held = taken
                if taken is None:
                    continue
                with lock:
                    overlaps.extend([taken] if taken in busy else [])
                    busy.add(taken)
                    working[taken.queue] += 1
                    most[taken.queue] = max(most[taken.queue], working[taken.queue])
                    worked[taken] += 1
                wakes = taken.dispatch.wakes
                slept.wait(draw.choice([0.0, 0.0, 0.001]))
                dispatch.took(taken, wakes, delivery(None if ending.is_set() else draw.choice([None, 0.0, 0.001])))
                with lock:
                    busy.discard(taken)
                    working[taken.queue] -= 1

        slept, ending = threading.Event(), threading.Event()
        pool = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(6)]
        for thread in pool:
            thread.start()
        draw = random.Random(99)

        def wake() -> bool:
            dispatch.wake(draw.choice(shards), draw.choice([0.0, 0.0, 0.001]))
            return sum(worked.values()) >= enough and min(worked.values()) > 0

        until(wake, "enough turns")
        ending.set()
        until(
            lambda: all(item.next_due is None for item in shards), "all worked without another wake-up: none was lost"
        )
        dispatch.close()
        for thread in pool:
            thread.join(PATIENCE)
        assert not any(thread.is_alive() for thread in pool)
        assert most["a"] <= 2
        assert not overlaps
        assert {use.running for use in dispatch._uses.values()} == {0}


# --- schedulers ---


class Moody:
    """A scheduler that declines while it is told to."""

    def __init__(self) -> None:
        self.declines = True

    def __call__(self, shards: Sequence[Shard], now: float, ready: Callable[[Shard], bool]) -> Shard | None:
        return None if self.declines else LagScheduler()(shards, now, ready)


SHARES = [{"a": Share()}, {"a": Share(), "z": Share()}]


class TestSchedulers:
    @pytest.mark.parametrize("shares", SHARES, ids=["one queue", "two queues"])
    def test_one_that_declines_is_obeyed_and_asked_again(self, shares: dict[str, Share], node: Node) -> None:
        a, moody = shard("a", due=0.0), Moody()
        dispatch = node.dispatcher(1, [a], shares, lambda: moody)
        assert dispatch.pick(0) is None
        sleeping = node.wait(dispatch, 0)
        assert not sleeping.done()
        moody.declines = False  # nothing else happens: only that it is asked again
        assert sleeping.result(PATIENCE) is a

    @pytest.mark.parametrize("shares", SHARES, ids=["one queue", "two queues"])
    def test_what_one_declines_another_threads_may_choose(self, shares: dict[str, Share], node: Node) -> None:
        a = shard("a")
        moods = [Moody() for _ in range(3) for _ in shares]
        made = iter(moods)
        dispatch = node.dispatcher(3, [a], shares, lambda: next(made))
        for moody in moods[2 * len(shares) :]:
            moody.declines = False
        sleeping = [node.wait(dispatch, number) for number in range(3)]
        dispatch.wake(a)  # this may wake any of them
        assert sleeping[2].result(PATIENCE) is a
        assert not sleeping[0].done()

    @pytest.mark.parametrize("shares", SHARES, ids=["one queue", "two queues"])
    def test_one_that_declines_is_not_asked_in_a_loop(self, shares: dict[str, Share], node: Node) -> None:
        dispatch = node.dispatcher(2, [shard("a", due=0.0)], shares, Moody)
        for number in (0, 1):  # the leader, and another
            assert dispatch.pick(number) is None
            with dispatch._changed:
                assert dispatch._timeout(number, 1.0) == pytest.approx(ASK_AGAIN)

    def test_when_one_declines_another_queue_has_its_turn(self) -> None:
        a, b, moody = shard("a", due=0.0), shard("b", due=0.0), Moody()
        schedules: list[dict[str, Schedule]] = [{"a": moody, "b": LagScheduler()}]
        assert Dispatcher([[a, b]], schedules, {"a": Share(), "b": Share()}).pick(0) is b

    def test_a_shard_of_another_queue_is_no_choice(self) -> None:
        a, b = shard("a", due=0.0), shard("b", due=0.0)
        schedules: list[dict[str, Schedule]] = [{"a": lambda *_: b, "b": lambda *_: a}]
        assert Dispatcher([[a, b]], schedules, {"a": Share(), "b": Share()}).pick(0) is None

    def test_each_sees_the_shards_of_one_queue_first_those_that_its_thread_prefers(self) -> None:
        given: list[list[Shard]] = []

        def decline(shards: Sequence[Shard], now: float, ready: Callable[[Shard], bool]) -> Shard | None:
            given.append(list(shards))
            return None

        a, b = [shard("a", index, due=0.0) for index in range(4)], [shard("b", index, due=0.0) for index in range(2)]
        dispatch = dispatcher(2, [*a, *b], {"a": Share(), "b": Share()}, build_scheduler=lambda: decline)
        assert dispatch.pick(0) is None
        assert given == [[a[0], a[2]], a, [b[0]], b]

    def test_a_round_goes_on_where_it_was_when_queues_take_turns(self) -> None:
        shards = [shard(queue, index, due=0.0) for queue in "ab" for index in range(3)]
        moving = 0.0
        dispatch = dispatcher(
            1, shards, {"a": Share(), "b": Share()}, build_scheduler=SeqScheduler, clock=lambda: moving
        )
        turns = []
        for _ in range(12):
            picked = dispatch.pick(0)
            assert picked is not None
            turns.append(picked)
            moving += 1.0
            dispatch.unclaim(picked)
        assert [item.index for item in turns if item.queue == "a"] == [0, 1, 2, 0, 1, 2]
        assert [item.index for item in turns if item.queue == "b"] == [0, 1, 2, 0, 1, 2]


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
    for _ in range(60):
        now += draw.choice([0.0, 0.5, 1.0])
        number, item = draw.randrange(threads), draw.choice(shards)
        wakes = item.dispatch.wakes
        match draw.randrange(7):
            case 0:
                dispatch.wake(item, draw.choice([0.0, 0.7]))
            case 1:
                dispatch.refreshed(item, wakes, draw.choice([None, 0.0, 0.7]), paused=draw.random() < 0.3)
            case 2:
                draw.choice([dispatch.leave, dispatch.stay])([item])
            case 3:
                kept = [other for other in shards if draw.random() < 0.8]
                dispatch.assign([kept[place::threads] for place in range(threads)])
            case 4:
                item.lease.deadline = draw.choice([now, NEVER])
            case _:
                mine = held[number]
                if mine is not None:
                    dispatch.took(
                        mine, draw.choice([wakes, mine.dispatch.wakes]), delivery(draw.choice([None, 0, 0.7]))
                    )
                running = {name: sum(other is not None and other.queue == name for other in held) for name in shares}
                running["c"] -= mine is not None and mine.queue == "c"
                ready = [
                    other
                    for other in dispatch._all
                    if is_ready(number, now, other) and (other.queue != "c" or running["c"] < 1)
                ]
                picked = dispatch.pick(number)
                assert (picked is not None) == bool(ready)
                if mine is not None and mine is not picked:
                    dispatch.unclaim(mine)
                held[number] = picked
    for name, count in dispatch._uses.items():
        assert count.running == sum(other is not None and other.queue == name for other in held)
