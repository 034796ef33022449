"""Time limits of a batch: what may happen when, with a clock that the tests move; and that an interrupt strikes nothing
but its own batch.
"""

import asyncio
import contextvars
import itertools
import subprocess
import sys
import textwrap
import threading
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from lowq.coroutines import at_once
from lowq.errors import TimeLimitExceeded
from lowq.store import caller_deadline, caller_limit
from lowq.work.time_limits import (
    DROPPED_AFTER,
    TimeLimits,
    WrittenOff,
    interrupt_of_this_thread,
)
from tests.waiting import PATIENCE


class Batch:
    """A batch that is being performed in the test's own thread: whoever watches is the test, too."""

    def __init__(self, time_limit: float | None = None, ttr: float | None = None) -> None:
        self.now = 1000.0
        self.sent: list[type[BaseException] | None] = []
        self.earlier = 0
        self.written_off = 0
        self.limits = TimeLimits(
            time_limit, ttr, interrupt=self.sent.append, on_earlier=self._on_earlier, clock=lambda: self.now
        )

    def _on_earlier(self) -> None:
        self.earlier += 1

    def enforce(self, at: float) -> float | None:
        """``at``: seconds since the batch began."""
        self.now = 1000.0 + at
        return self.limits.enforce(self._write_off)

    def _write_off(self) -> None:
        self.written_off += 1


def run(limits: TimeLimits, handler: Callable[[], object]) -> None:
    """As a thread performs a batch."""

    context = contextvars.copy_context()

    async def performing() -> None:
        context.run(handler)

    at_once(limits.run(performing(), context))


def test_a_time_limit_interrupts_its_batch_once_when_it_has_passed() -> None:
    batch = Batch(time_limit=10)

    def handler() -> None:
        assert batch.enforce(4) == 6
        assert batch.sent == []
        assert not batch.limits.interrupt_dropped()  # none was sent: it is somebody else's
        for _ in range(2):
            assert batch.enforce(10) == DROPPED_AFTER
            assert batch.sent == [TimeLimitExceeded]
        assert batch.limits.interrupt_dropped()  # by Python: it comes again
        batch.enforce(11)
        assert batch.sent == [TimeLimitExceeded] * 2

    run(batch.limits, handler)
    assert batch.sent == [TimeLimitExceeded, TimeLimitExceeded, None], "one that was not raised yet is taken back"


def test_a_batch_that_has_ended_or_not_begun_is_left_alone() -> None:
    batch = Batch(time_limit=10, ttr=20)
    batch.enforce(30)
    run(batch.limits, lambda: None)
    assert batch.enforce(30) is None
    assert (batch.sent, batch.written_off) == ([], 0)


def test_a_task_that_exceeded_its_limit_shows_where_it_waited() -> None:
    async def ask_a_slow_supplier() -> None:
        await asyncio.sleep(PATIENCE)

    async def perform() -> None:
        limits = TimeLimits(10, None, interrupt=lambda _: None)
        task = asyncio.create_task(limits.run(ask_a_slow_supplier(), contextvars.copy_context()))
        await asyncio.sleep(0)
        limits.raised, limits.cancelled = TimeLimitExceeded, task.cancel()
        await task

    with pytest.raises(TimeLimitExceeded, match="longer than its time_limit of 10 s") as caught:
        asyncio.run(perform())
    assert "ask_a_slow_supplier" in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("what", ["time_limit", "ttr"])
def test_a_batch_does_not_end_while_who_watches_is_at_it(what: str) -> None:
    """Or an interrupt, checked for this batch, would strike the next one."""
    hangs, returns, go_on = threading.Event(), threading.Event(), threading.Event()
    ended: list[object] = []

    def act(exception: object = None) -> None:
        if threading.current_thread() is watcher:
            returns.set()
            performer.join(0.05)
            assert performer.is_alive()
            go_on.set()
            assert not ended

    limits = TimeLimits(0 if what == "time_limit" else None, 0 if what == "ttr" else None, interrupt=act)

    def handler() -> None:
        hangs.set()
        returns.wait(PATIENCE)

    def perform() -> None:
        try:
            run(limits, handler)
        except WrittenOff:
            pass
        ended.append(go_on.is_set())

    performer = threading.Thread(target=perform)
    watcher = threading.Thread(target=lambda: limits.enforce(act))
    performer.start()
    assert hangs.wait(PATIENCE)
    watcher.start()
    watcher.join(PATIENCE)
    performer.join(PATIENCE)
    assert ended == [True]


def test_touch_gives_so_many_seconds_from_now_and_ttr_keeps_its_distance() -> None:
    batch = Batch(time_limit=10, ttr=15)
    seen: list[float] = []

    def handler() -> None:
        seen.extend([batch.limits.deadline or 0, caller_deadline()])  # as what waits for Redis knows it
        batch.now += 8
        batch.limits.touch(30)
        seen.extend([batch.limits.deadline or 0, caller_deadline()])
        assert batch.earlier == 0
        assert batch.enforce(20) == 18
        assert batch.enforce(38) == DROPPED_AFTER
        assert len(batch.sent) == 1
        batch.enforce(43)
        assert batch.written_off == 1

    with pytest.raises(WrittenOff):
        run(batch.limits, handler)
    assert [*seen, caller_deadline()] == [1010, 1010, 1038, 1038, float("inf")]
    assert Batch(ttr=7).limits.deadline == 1007
    nearer = Batch(time_limit=10)
    nearer.limits.touch(3)
    assert nearer.earlier == 1, "who watches is told"


def test_the_callers_deadline_ends_with_the_batch_and_is_none_where_nobody_watches() -> None:
    batch = Batch(time_limit=10)
    context = contextvars.copy_context()  # of a task that goes on after it
    run(batch.limits, lambda: context.run(caller_limit.set, batch.limits))
    assert context.run(caller_deadline) == float("inf")
    seen: list[float] = []
    run(TimeLimits(10, 20), lambda: seen.append(caller_deadline()))
    assert seen == [float("inf")]


# --- when an interrupt strikes ---


def work(instructions: int) -> int:
    total = 0
    for number in range(instructions):
        total += number
    return total


def swallow(instructions: int) -> None:
    try:
        work(instructions)
    except TimeLimitExceeded:
        work(3)


def clean_up(instructions: int) -> None:
    try:
        work(instructions)
    finally:
        work(3)


def fail(instructions: int) -> None:
    work(instructions)
    raise ValueError("boom")


# --- interrupts of a thread ---


@pytest.fixture
def switching() -> Iterator[None]:
    """Threads take turns after a few instructions."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


class Performer(threading.Thread):
    """Performs batches of varying length, one after another, while another thread interrupts each at any moment."""

    def __init__(self, handler: Callable[[int], object], batches: int) -> None:
        super().__init__(daemon=True)
        self.handler = handler
        self.batches = batches
        self.limits: TimeLimits | None = None
        self.results: list[str] = []
        self.escaped: list[BaseException] = []

    def run(self) -> None:
        interrupt = interrupt_of_this_thread()
        try:
            for number in itertools.count():
                if number >= self.batches and (self.handler is swallow or "exceeded" in self.results):
                    break  # the other thread may have come late
                limits = self.limits = TimeLimits(0, None, interrupt=interrupt)
                try:
                    run(limits, partial(self.handler, number * 37 % 2000))
                except TimeLimitExceeded:
                    self.results.append("exceeded")
                except ValueError:
                    self.results.append("failed")
                else:
                    self.results.append("done")
                work(5)  # what strikes here would escape
        except BaseException as error:
            self.escaped.append(error)


@pytest.mark.usefixtures("switching")
@pytest.mark.parametrize("handler", [work, swallow, clean_up, fail])
def test_an_interrupt_strikes_its_own_batch_or_nothing(handler: Callable[[int], Any]) -> None:
    performer = Performer(handler, 4000)
    performer.start()
    while performer.is_alive():
        if performer.limits is not None:
            performer.limits.enforce(lambda: None)
    performer.join()
    assert performer.escaped == []
    assert len(performer.results) >= performer.batches
    assert set(performer.results) <= {"exceeded", "failed" if handler is fail else "done"}


class Finalized:
    """Its finalizer waits until it is interrupted: Python drops that."""

    def __init__(self, has_begun: threading.Event, dropped: list[int]) -> None:
        self._has_begun = has_begun
        self._dropped = dropped

    def __del__(self) -> None:
        try:
            self._has_begun.set()
            while True:
                pass
        finally:
            self._dropped.append(1)


@pytest.mark.parametrize("is_elsewhere", [False, True], ids=["in its context", "in another context"])
def test_an_interrupt_that_strikes_in_a_finalizer_comes_again(is_elsewhere: bool) -> None:
    dropped: list[int] = []
    is_finalized, goes_on = threading.Event(), threading.Event()

    def handler(_: int) -> None:
        context = contextvars.Context() if is_elsewhere else contextvars.copy_context()
        context.run(Finalized, is_finalized, dropped)
        goes_on.set()
        while True:
            pass

    performer = Performer(handler, 1)
    performer.start()
    assert is_finalized.wait(PATIENCE)
    assert performer.limits is not None
    performer.limits.enforce(lambda: None)
    assert goes_on.wait(PATIENCE)
    while performer.is_alive():
        performer.limits.enforce(lambda: None)
    performer.join()
    assert (dropped, performer.results, performer.escaped) == ([1], ["exceeded"], [])


def run_alone(code: str) -> str:
    """What the code prints, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=PATIENCE, check=True
    )
    return done.stdout


#: Whoever traces calls hung in Python 3.11, also where no signal gets through: so in a process of its own.
TRACED = """
    import sys, threading
    from lowq.errors import TimeLimitExceeded
    from lowq.work.time_limits import interrupt_of_this_thread

    def trace_a_call():
        seen = []
        sys.settrace(lambda frame, event, _: seen.append(event))
        (lambda: None)()
        sys.settrace(None)
        print(seen, flush=True)

    interrupt_of_this_thread()(None)  # as when the handler ended before it was raised
    trace_a_call()

    def perform():
        interrupts.append(interrupt_of_this_thread())
        try:
            begun.set()
            end.wait()  # in C, and seldom not yet
            said.append("not raised")
        except TimeLimitExceeded:
            said.append("raised")

    said, interrupts, begun, end = [], [], threading.Event(), threading.Event()
    performer = threading.Thread(target=perform)
    performer.start()
    begun.wait()
    interrupts[0](TimeLimitExceeded)
    trace_a_call()
    end.set()
    performer.join()
    print(*said)
"""


def test_an_interrupt_that_is_not_raised_keeps_nobody_from_tracing_calls() -> None:
    assert run_alone(TRACED) == "['call']\n['call']\nraised\n"


DROPPED = """
    import contextvars, sys
    sys.unraisablehook = lambda dropped: print(dropped.exc_type.__name__)
    from lowq.coroutines import at_once
    from lowq.errors import TimeLimitExceeded
    from lowq.work.time_limits import TimeLimits, interrupt_of_this_thread

    class Fails:
        def __init__(self, error):
            self.error = error

        def __del__(self):
            raise self.error

    async def handler():
        Fails(ValueError)
        Fails(TimeLimitExceeded)  # its own

    interrupt = interrupt_of_this_thread()
    at_once(handler())
    at_once(TimeLimits(10, None, interrupt=interrupt).run(handler(), contextvars.copy_context()))
"""


def test_what_else_python_drops_is_reported_as_before() -> None:
    assert run_alone(DROPPED).split() == ["ValueError", "TimeLimitExceeded"] * 2
