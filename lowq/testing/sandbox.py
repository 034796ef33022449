"""A sandbox: every application of the process on an empty embedded store.

It follows the calls to the store (`pushes`, `order`), moves its clock, and has a drain lose an outcome (`drainer`).
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, Unpack

from lowq.application import Lowq, all_embedded
from lowq.codec import delay_seconds
from lowq.errors import ConfigError, JobError
from lowq.job import JobId, JobOptions
from lowq.shards.shard import Shard
from lowq.store import Call, Client, Command, Wait, new_store
from lowq.store.calls import Deadline, time_argument, time_of
from lowq.store.keys import queue_of_prefix
from lowq.testing import drainer
from lowq.testing.drainer import ERRORS_KEPT, Drained, worker_of
from lowq.testing.order import OrderCheck
from lowq.testing.pushes import ANYTHING, Place, Pushed, Pushes, place_in
from lowq.work.handler import current_execution
from lowq.workers import Worker

#: Scripts that bring no jobs into an empty shard. Shards that any other script was called for are drained.
WITHOUT_JOBS = frozenset(
    ["ack_and_take", "acquire", "examine", "fetch_jobs", "pause", "range_page", "renew", "scan", "shard_snapshot",
     "stats", "surrender", "sweep", "why"]
)  # fmt: skip
#: Seconds until the jobs of a dead owner are due.
CRASH_PAUSE = 0.5


class SandboxClock:
    """The clock of the embedded stores: jobs are due, retried, debounced and expire by it."""

    def __init__(self) -> None:
        self._ahead = 0.0

    def now(self) -> float:
        """Unix time, seconds."""
        return time.time() + self._ahead

    def travel(self, seconds: float | timedelta) -> None:
        """Moves the clock forward. ``time.time()`` stays as it is.

        Raises:
            ConfigError: it is no length of time, or negative.
        """
        try:
            ahead = delay_seconds(seconds)
        except JobError as error:
            raise ConfigError(f"travel({seconds!r:.100}): write seconds, or a timedelta: {error}") from None
        if not ahead and seconds:  # which counts a negative one as 0
            raise ConfigError(f"travel({seconds!r:.100}): the clock of Redis goes forward only; begin a new test")
        self._ahead += ahead

    @property
    def ahead(self) -> float:
        """Seconds by which it is ahead of this machine's."""
        return self._ahead


class Sandbox:
    """The sandbox. There is one at a time in a process."""

    def __init__(self) -> None:
        #: Moves the time.
        self.clock = SandboxClock()
        self._pushes = Pushes()
        self._order = OrderCheck()
        self._crashes = 0
        #: The embedded applications, in the order of their creation.
        self._apps: list[Lowq] = []
        #: The applications that have brought jobs into a queue, and the prefixes of the shards that have had any.
        self._pushers: defaultdict[Place, dict[Lowq, None]] = defaultdict(dict)
        self._shards: set[str] = set()
        #: Calls are carried out one after the other, so that their order is known.
        self._lock = threading.RLock()

    # --- performing ---

    def drain(self, *workers: type, limit: int | None = None, raises: bool = False) -> Drained:
        """Performs everything that is due, in the calling thread, as `lowq.testing.drain`. Without ``workers`` it
        drains those of all applications that had jobs. It pushes the ticks of schedules of the workers that it drains.
        """
        total = Drained()
        for group in self._groups(workers):
            left = None if limit is None else limit - total.batches
            total = _sum(total, drainer.drain(*group, limit=left, raises=raises))
        return total

    async def adrain(self, *workers: type, limit: int | None = None, raises: bool = False) -> Drained:
        """As `drain`, in the running event loop: for async tests."""
        total = Drained()
        for group in self._groups(workers):
            left = None if limit is None else limit - total.batches
            total = _sum(total, await drainer.adrain(*group, limit=left, raises=raises))
        return total

    def _groups(self, workers: Sequence[type]) -> Iterator[Sequence[type]]:
        """Yields the workers to drain, again as long as handlers push to further ones."""
        if workers:
            yield workers
            return
        known: list[type] = []
        while len(pushed := self._pushed_to()) > len(known):
            known = pushed
            yield known

    def _pushed_to(self) -> list[type]:
        """The worker of each queue that has had jobs: of the application that pushed them; if that has none, as it only
        produces, of the newest application on the same store that has one.
        """
        found: dict[type, None] = {}
        for place, apps in list(self._pushers.items()):
            for app in [*apps, *reversed(self._apps)]:
                worker = app.workers.get(place[2])
                if worker is not None and place_in(app, place[2]) == place:
                    found[worker] = None
                    break
        return list(found)

    def crash(self, times: int = 1) -> None:
        """Has the outcome of the next batch lost: it is performed, its process dies before the outcome is written (as
        by ``kill -9``), and its jobs are restored and performed again, by a new instance of the worker. ``times``: that
        many batches, one after the other. Each crash is charged (``max_crash_count``), and half a second passes.

        Raises:
            ConfigError: times is no whole number above 0.
        """
        given: object = times
        if isinstance(given, bool) or not isinstance(given, int) or given < 1:
            raise ConfigError(f"crash(times={times!r:.100}): write how many outcomes are to be lost, 1 or more")
        self._crashes = times

    # --- asserting ---

    def assert_pushed(
        self,
        target: type | str,
        id: JobId = ANYTHING,  # noqa: A002  # as in a job
        payload: Any = ANYTHING,
        *,
        times: int | None = None,
        **options: Unpack[JobOptions],
    ) -> list[Pushed]:
        """Asserts that such a payload was pushed to a worker, or to the queue of a name. Returns all of these payloads.
        ``options``: as of `push`; an argument that is left out may be anything. ``times``: exactly so often; 0: never;
        None: at least once.

        Raises:
            AssertionError: it was not; the message lists what was. ConfigError, JobError: an argument makes no sense.
        """
        __tracebackhide__ = True
        return self._pushes.check(target, id, payload, times, options)

    def assert_ordered(self, *workers: type) -> None:
        """Asserts that the payloads of each id were handed over in the order of their scores, without gaps, and that no
        middleware or merge function has changed that order. Without ``workers`` it checks all queues.

        Raises:
            AssertionError: they were not, or nothing was handed over.
        """
        __tracebackhide__ = True
        queues = [worker_of(worker).queue_name for worker in workers]
        failure = self._order.failure(queues)
        missing = [queue for queue in queues if queue not in self._order.handed_over]
        if not failure and (missing or not self._order.handed_over):
            of_queue = f" of {', '.join(missing)}" if missing else ""
            failure = f"nothing{of_queue} was handed over, so there is no order to be checked; drain first"
        if failure:
            raise AssertionError(failure)

    # --- for the drainer ---

    def has_jobs(self, shard: Shard) -> bool:
        """Whether the shard has ever had jobs."""
        return shard.prefix in self._shards

    def on_perform(self, worker: type[Worker[Any]], payloads_by_id: dict[str, list[Any]]) -> None:
        """Notes the payloads that a handler is about to get."""
        execution = current_execution.get()
        if execution is not None:
            taken = [(job.id, [payload for payload, _ in job.payloads]) for job in execution.jobs]
            may_drop = callable(worker.merge)
            self._order.note_performed(worker.queue_name, taken, payloads_by_id, may_drop=may_drop)

    def loses_outcome(self) -> bool:
        """Whether `crash` was called for this batch."""
        if not self._crashes:
            return False
        self._crashes -= 1
        return True

    def on_takeover(self) -> None:
        """Has the jobs that were in flight be due."""
        self.clock.travel(CRASH_PAUSE)

    # --- the stores ---

    @contextmanager
    def _open(self) -> Iterator[None]:
        stores: dict[str, Any] = {}

        @contextmanager
        def embed(app: Lowq) -> Iterator[None]:
            url = app.config.redis_url
            # Each memory:// is a store of its own.
            store = new_store() if url == "memory://" else stores.get(url) or stores.setdefault(url, new_store())
            self._apps.append(app)
            with app.embedded(store, partial(_SandboxClient, self, app)):
                yield

        with all_embedded(embed):
            workers = {app: dict(app.workers) for app in self._apps}
            drainer.watchers.append(self)
            try:
                yield
            finally:
                drainer.watchers.remove(self)
                for app in self._apps:
                    _forget_local(app, workers.get(app, {}))
        if self._crashes:
            raise AssertionError(
                f"crash() was to lose {self._crashes} outcome(s) more, and nothing was performed after that; "
                "drain after crash()"
            )

    def note(self, app: Lowq, store: int, calls: Sequence[Call[Any]], replies: Sequence[Any]) -> None:
        """Notes calls that were carried out."""
        for call, reply in zip(calls, replies, strict=True):
            if type(call) is Command or isinstance(reply, Exception):
                continue
            load = app.config.load_payload
            if call.key.endswith("}:") and (typed := app.payload_type_of(queue_of_prefix(call.key)[1])) is not None:
                load = typed.load
            if call.key.endswith("}:") and call.script not in WITHOUT_JOBS:
                self._shards.add(call.key)
                self._pushers[(store, *queue_of_prefix(call.key))][app] = None
            if call.script == "push":
                self._pushes.note(store, call, load)
            self._order.note(store, call, reply, load)


class _SandboxClient(Client):
    """A client of the sandbox, which follows its calls and gives its server the sandbox's clock."""

    def __init__(self, box: Sandbox, app: Lowq, url: str, *, store: Any, **options: Any) -> None:
        super().__init__(url, store=store, **options)
        self._box, self._app, self._store = box, app, id(store)

    def start(
        self,
        calls: Sequence[Call[Any]],
        *,
        lend: bool = False,  # noqa: ARG002  # the store answers before anybody could borrow the connection
        deadline: Deadline | None = None,
        wait: Wait | None = None,  # noqa: ARG002  # nor has the store anything to wait for
        pool: Any = None,  # noqa: ARG002  # and there is only one
    ) -> Callable[[], list[Any]]:
        ahead = self._box.clock.ahead
        with self._box._lock:
            for call in calls if ahead else ():
                if type(call) is not Command:  # every script has the time first, '' for the server's own
                    if call.args[:1] == [""]:
                        call.args[0] = time_argument(self._box.clock.now())
                    elif not call.args and call.data[:1] == [b""]:
                        call.data[0] = time_argument(self._box.clock.now()).encode()
            replies = super().start(calls, deadline=deadline)()
            self._box.note(self._app, self._store, calls, replies)
        for i, call in enumerate(calls):
            if type(call) is Command and call.script == "TIME":
                replies[i] = _later(replies[i], ahead)
        return lambda: replies


def _later(reply: Any, ahead: float) -> Any:
    """A reply to TIME, so many seconds later."""
    if isinstance(reply, Exception) or not ahead:
        return reply
    seconds, microseconds = divmod(round((time_of(reply) + ahead) * 1_000_000), 1_000_000)
    return [b"%d" % seconds, b"%d" % microseconds]


def _sum(one: Drained, other: Drained) -> Drained:
    errors = (one.errors + other.errors)[:ERRORS_KEPT]
    return Drained(one.performed + other.performed, one.failed + other.failed, one.batches + other.batches, errors)


def _forget_local(app: Lowq, before: dict[str, type[Worker[Any]]]) -> None:
    """Removes the workers that a test has defined in a function: the next test may define others of these names. Those
    of a module that was imported meanwhile stay.
    """
    for name, worker in list(app.workers.items()):
        if "<locals>" in worker.__qualname__ and before.get(name) is not worker:
            del app.workers[name]
            app._queues.pop(name, None)
            if name in before:
                app.workers[name] = before[name]


@contextmanager
def sandbox() -> Iterator[Sandbox]:
    """Puts every application of the process, also one that is made meanwhile, on an empty embedded store for the time
    of the block. Those with the same ``redis_url`` share one.

    Raises:
        ConfigError: fakeredis is not installed, or there is a sandbox already.
        AssertionError: at the end, if an outcome was to be lost and nothing was performed.
    """
    if drainer.watchers:
        raise ConfigError("there is a sandbox already: one at a time in a process")
    box = Sandbox()
    with ExitStack() as stack:
        stack.enter_context(box._open())
        yield box
