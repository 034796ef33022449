"""A dispatcher without its node: shards that are held, and threads that wait for them."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import cast

from lowq import clock
from lowq.clock import Clock
from lowq.shards.delivery import Delivery
from lowq.shards.dispatcher import Dispatcher, Schedule
from lowq.shards.lease import Lease
from lowq.shards.permits import Share
from lowq.shards.scheduler import LagScheduler
from lowq.shards.shard import Shard
from lowq.store import Client
from tests.waiting import until

LEASE = Lease("me:1", 1)


def shard(queue: str, index: int = 0, due: float | None = None) -> Shard:
    """A shard that is held for ever, with a job that is due at that time; None: no job."""
    made = Shard(cast(Client, None), "lowq", queue, index, shards_count=9, nonce="me", load_payload=bytes.decode)
    made.lease.current, made.lease.deadline = LEASE, float("inf")
    made.dispatch.next_due = due
    return made


def delivery(delay: float | None = None, *, paused: bool = False, levels: dict[int, float] | None = None) -> Delivery:
    return Delivery(1, LEASE, [], delay, paused, levels)


def look(
    dispatch: Dispatcher,
    item: Shard,
    delay: float | None,
    *,
    paused: bool = False,
    levels: dict[int, float] | None = None,
) -> None:
    """Asks the shard when its next job is due, which Redis answers so."""
    for asked, version in dispatch.unclaimed([item]):
        dispatch.note_state(asked, version, delay, paused=paused, levels=levels)


def dispatcher(
    threads: int,
    shards: Sequence[Shard],
    shares: Mapping[str, Share],
    *,
    build_scheduler: Callable[[], Schedule] = LagScheduler,
    clock: Clock = clock.now,
) -> Dispatcher:
    schedules = [{queue: build_scheduler() for queue in shares} for _ in range(threads)]
    return Dispatcher(shards, schedules, shares, clock=clock)


class Waiting:
    """Threads that wait for shards of dispatchers that are made with its `clock`."""

    def __init__(self) -> None:
        #: How often somebody has looked for a shard: whoever does, reads the clock first, and under the lock.
        self.looks = 0
        self._dispatchers: list[Dispatcher] = []
        self._stands_at: float | None = None

    def clock(self) -> float:
        self.looks += 1
        return clock.now() if self._stands_at is None else self._stands_at

    @contextmanager
    def time_stands_still(self) -> Iterator[None]:
        """Nothing becomes due meanwhile, however long that takes. Who sleeps wakes up when it meant to."""
        before = self._stands_at
        self._stands_at = clock.now() if before is None else before
        yield
        self._stands_at = before

    def wait(self, dispatch: Dispatcher, thread: int) -> "Future[Shard | None]":
        """The thread waits for a shard. When this returns, it has got one, or sleeps when the lock is next free."""
        future: Future[Shard | None] = Future()
        before = self.looks
        self._dispatchers.append(dispatch)
        threading.Thread(target=lambda: future.set_result(dispatch.wait(thread)), daemon=True).start()
        until(lambda: self.looks > before, "a look")
        return future

    def close(self) -> None:
        for made in self._dispatchers:
            made.close()
