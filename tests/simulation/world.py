"""The world of a simulation: one thread, one virtual time, and chance from one seed.

Each simulated thread is a greenlet: code that knows nothing of the simulation runs in it as in a thread, until it waits
for something. Then the world goes on with the next event. What waits is in one queue, ordered by virtual time, and
events of the same moment in an order that the seed draws. So a seed tells the whole story, and tells it again.

Virtual time passes only while everything waits, and by a microsecond at each look at a clock.
"""

import asyncio
import heapq
import random
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from greenlet import getcurrent, greenlet

#: Seconds that a look at a clock takes: whoever looks again and again lets time pass.
GLANCE = 1e-6
#: What the clocks of all processes say at the beginning, monotonic and Unix seconds.
BEGINNING, BEGINNING_WALL = 1000.0, 1_800_000_000.0


class Stalled(Exception):
    """Everybody waits, and nothing will happen any more."""


class Process:
    """A process of the simulation: its threads die, freeze and see the time together."""

    def __init__(self, world: "World", name: str, pid: int) -> None:
        self.world = world
        self.name = name
        self.pid = pid
        #: Seconds by which its wall clock is ahead.
        self.wall_ahead = 0.0
        self.is_alive = True
        #: Until when nothing of it goes on.
        self.frozen_until = 0.0
        #: What is done at its next steps: called each time, and gone when it returns True.
        self.at_step: Callable[[], bool] | None = None
        self.tasks: list[Task] = []
        #: Called when it dies: closes what the kernel would close.
        self.at_death: list[Callable[[], object]] = []

    def __repr__(self) -> str:
        return self.name

    def die(self) -> None:
        """Nothing of it goes on any more, not even a ``finally``."""
        if self.is_alive:
            self.is_alive = False
            for close in self.at_death:
                close()
            task = self.world.task
            if task is not None and task.process is self:
                self.world.park()  # for ever

    def freeze(self, seconds: float) -> None:
        """Nothing of it goes on for so long."""
        self.frozen_until = max(self.frozen_until, self.world.now + seconds)
        task = self.world.task
        if task is not None and task.process is self:
            self.world.sleep(seconds)


class Task:
    """A simulated thread."""

    def __init__(self, world: "World", process: Process, run: Callable[[], object], name: str) -> None:
        self.world = world
        self.process = process
        self.name = name
        self.ident = world.next_number()
        self.is_done = False
        #: Of the wait that is under way: a wake-up for an earlier one does nothing.
        self.wait = 0
        self.is_waiting = False
        self.was_woken = False
        #: Raised in it when it goes on: see `interrupt`.
        self.pending: type[BaseException] | None = None
        self.running_loop: Any = None
        #: What `threading.current_thread` says in it.
        self.thread: Any = None
        self._run = run
        self.greenlet = greenlet(self._bootstrap, world.hub)
        process.tasks.append(self)

    def __repr__(self) -> str:
        return f"{self.process.name}/{self.name}"

    def _bootstrap(self) -> None:
        try:
            self._run()
        except SystemExit:
            pass
        except BaseException:
            self.world.crashed.append(f"{self!r}: {traceback.format_exc()}")
        finally:
            self.is_done = True

    def wake(self) -> None:
        """Ends its wait, at this moment of virtual time."""
        if self.is_waiting:
            self.is_waiting = False
            self.was_woken = True
            self.world.at(self.world.now, self._resumer(self.wait))

    def _resumer(self, wait: int) -> Callable[[], None]:
        def resume() -> None:
            if wait != self.wait or self.is_done or not self.process.is_alive:
                return
            if self.process.frozen_until > self.world.now:
                self.world.at(self.process.frozen_until, resume)
                return
            self.is_waiting = False
            self.wait += 1
            self.world.enter(self)

        return resume


class World:
    """See the top of the file. ``seed``: all chance comes of it. ``switch_share``: of a thread's steps, at how many
    another may go on.
    """

    def __init__(self, seed: int, switch_share: float = 0.05) -> None:
        self.switch_share = switch_share
        self.chance = random.Random(seed)
        self.now = BEGINNING
        self.hub: greenlet = getcurrent()
        #: The simulated thread that runs; None: the world itself, or a server.
        self.task: Task | None = None
        #: Whose clocks are looked at while no thread runs.
        self.process_of_hub: Process | None = None
        #: Threads that ended with an exception.
        self.crashed: list[str] = []
        self.is_over = False
        #: Steps so far: a measure of what was simulated.
        self.steps = 0
        self._queue: list[tuple[float, float, int, Callable[[], object]]] = []
        self._numbers = 0
        self._kept: list[Task] = []

    def next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    # --- time and events ---

    def at(self, when: float, happen: Callable[[], object]) -> None:
        """Has something happen at that virtual time, in the hub."""
        heapq.heappush(self._queue, (when, self.chance.random(), self.next_number(), happen))

    def after(self, seconds: float, happen: Callable[[], object]) -> None:
        self.at(self.now + seconds, happen)

    def run(self, until: Callable[[], bool], limit: float) -> None:
        """Lets time pass until that holds.

        Raises:
            Stalled: nothing happens any more, or ``limit`` (virtual time) has come.
        """
        while not until():
            if not self._queue:
                raise Stalled(f"at {self.now:.3f} nothing happens any more")
            when, _, _, happen = heapq.heappop(self._queue)
            if when > limit:
                raise Stalled(f"at {limit:.3f} it was not done")
            self.now = max(self.now, when)
            happen()

    # --- threads ---

    def spawn(self, process: Process, run: Callable[[], object], name: str) -> Task:
        task = Task(self, process, run, name)
        self._kept.append(task)
        self.at(self.now, task._resumer(task.wait))
        return task

    def enter(self, task: Task) -> None:
        """Goes on with a thread, from the hub, until it waits."""
        before, self.task = self.task, task
        asyncio._set_running_loop(task.running_loop)
        try:
            task.greenlet.switch()
        finally:
            self.task = before
            asyncio._set_running_loop(None)

    def park(self, seconds: float | None = None) -> bool:
        """The thread that runs waits until `Task.wake`, or for so long. Returns whether it was woken."""
        task = self.task
        if task is None:
            raise RuntimeError("the hub can't wait")
        task.is_waiting, task.was_woken = True, False
        if seconds is not None:
            self.at(self.now + max(seconds, 0.0), task._resumer(task.wait))
        self._switch(task)
        return task.was_woken

    def _switch(self, task: Task) -> None:
        task.running_loop = asyncio._get_running_loop()
        self.hub.switch()
        if task.pending is not None:
            pending, task.pending = task.pending, None
            raise pending

    def sleep(self, seconds: float) -> None:
        """`time.sleep`, which nothing but its time ends."""
        task = self.task
        if task is None:
            raise RuntimeError("the hub can't wait")
        self.at(self.now + max(seconds, 0.0), task._resumer(task.wait))
        self._switch(task)

    def step(self) -> None:
        """The thread that runs comes to a place where another may go on, or its process may die or freeze."""
        task = self.task
        if task is None:
            return
        self.steps += 1
        process = task.process
        if process.at_step is not None and process.at_step():
            process.at_step = None
        if self.chance.random() < self.switch_share:
            self.sleep(self.chance.choice((0.0, 0.0, 1e-5, 2e-4)))

    def glance(self) -> float:
        """What a look at a clock shows."""
        if self.task is not None:  # a server's time passes with its commands
            self.now += GLANCE
        return self.now

    @property
    def process(self) -> Process | None:
        return self.task.process if self.task is not None else self.process_of_hub

    @contextmanager
    def acting_as(self, process: Process) -> Iterator[None]:
        """What the hub does in the block is done by that process: it sees its clock."""
        before, self.process_of_hub = self.process_of_hub, process
        try:
            yield
        finally:
            self.process_of_hub = before

    # --- the end ---

    def end(self) -> None:
        """Nothing goes on any more. The threads are left as they are: to unwind them would run code of theirs. So a
        process that simulates many worlds grows, and is replaced by another one now and then.
        """
        self.is_over = True
        self._queue.clear()
        _ended.extend(task.greenlet for task in self._kept)

    def stacks(self) -> str:
        """Where the living threads are: for whoever reads a failure."""
        texts = []
        for task in self._kept:
            frame = task.greenlet.gr_frame
            if not task.is_done and task.process.is_alive and frame is not None:
                lines = traceback.format_stack(frame)
                texts.append(f"--- {task!r}\n{''.join(lines[-6:])}")
        return "\n".join(texts)


#: The world that runs, if one does.
_present: list[World] = []
#: Kept for good: garbage collection would unwind them.
_ended: list[greenlet] = []


def current() -> World:
    """The world that runs.

    Raises:
        RuntimeError: there is none.
    """
    if not _present:
        raise RuntimeError("no world is simulated")
    return _present[0]


def has_world() -> bool:
    return bool(_present)


@contextmanager
def simulating(world: World) -> Iterator[World]:
    """The patched modules (`tests.simulation.machine`) ask this world in the block."""
    _present.append(world)
    try:
        yield world
    finally:
        world.end()
        _present.pop()
