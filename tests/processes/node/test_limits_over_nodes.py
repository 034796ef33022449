"""Limits over all nodes: real nodes that share a limit, and what becomes of it when one of them dies."""

import asyncio
import itertools
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from typing import Any

import pytest

import lowq
from tests.processes.conftest import MakeRig
from tests.processes.node.conftest import MakeApp, Start
from tests.processes.support import Rig
from tests.waiting import NEVER, PATIENCE, until

NOTHING = nullcontext()


class Nodes:
    """Nodes in this process, each with an application of its own, and what their workers perform."""

    def __init__(self, make_app: MakeApp, start: Start, kind: str) -> None:
        self.app, self.start, self.kind = make_app, start, kind
        self._lock = threading.Lock()
        self.now = self.most = 0
        self.begun: dict[str, list[Any]] = defaultdict(list)
        self.by_queue: dict[str, int] = defaultdict(int)
        self.goes_on = threading.Event()
        self.goes_on.set()

    def worker(
        self, app: lowq.Lowq, name: str = "q", *, around: Any = NOTHING, **options: Any
    ) -> type[lowq.Worker[Any]]:
        """``around``: what its handler performs within."""

        async def aperform(payloads_by_id: dict[str, list[Any]]) -> None:
            async with around:
                self._begin(name, payloads_by_id)
                while not self.goes_on.is_set():
                    await asyncio.sleep(0.001)
                await asyncio.sleep(0.001)
                self._end()

        def perform(payloads_by_id: dict[str, list[Any]]) -> None:
            with around:
                self._begin(name, payloads_by_id)
                self.goes_on.wait()
                time.sleep(0.001)
                self._end()

        return app.worker(queue_name=name, **options)(aperform if self.kind == "loop" else perform)

    def _begin(self, name: str, payloads_by_id: dict[str, list[Any]]) -> None:
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)
            self.by_queue[name] += len(payloads_by_id)
            for job_id, payloads in payloads_by_id.items():
                self.begun[job_id] += payloads

    def _end(self) -> None:
        with self._lock:
            self.now -= 1


@pytest.fixture(params=["threads", "loop"])
def nodes(make_app: MakeApp, start: Start, request: pytest.FixtureRequest) -> Iterator[Nodes]:
    nodes = Nodes(make_app, start, request.param)
    yield nodes
    nodes.goes_on.set()


def test_a_concurrency_holds_over_all_nodes_and_everything_is_performed_in_order(nodes: Nodes) -> None:
    apps = [nodes.app() for _ in range(3)]
    workers = [nodes.worker(app, shards_count=12, limit=lowq.Concurrency(2)) for app in apps]
    for version in range(3):
        workers[0].perform_async({"id": number, "payload": version, "score": version} for number in range(60))
    nodes.goes_on.clear()
    for app in apps:
        nodes.start(of=app)
    until(lambda: nodes.now == 2)  # all that may begin has begun
    nodes.goes_on.set()
    until(lambda: len(nodes.begun) == 60 and all(sorted(some) == [0, 1, 2] for some in nodes.begun.values()))
    assert nodes.most == 2
    assert all(some == sorted(some) for some in nodes.begun.values())


def test_workers_that_name_one_key_share_its_limit(nodes: Nodes) -> None:
    app = nodes.app()
    one, other = (nodes.worker(app, name, limit=lowq.Concurrency(1, key="api")) for name in ("one", "other"))
    for worker in (one, other):
        worker.perform_async({"id": f"{worker.queue_name}-{number}"} for number in range(20))
    nodes.start(of=app)
    until(lambda: len(nodes.begun) == 40)
    assert nodes.most == 1


def test_several_limits_hold_together_and_why_says_which_is_reached(nodes: Nodes) -> None:
    apps = [nodes.app() for _ in range(2)]
    limits = [lowq.Rate(60, per=86400, key="api"), lowq.Concurrency(2), lowq.Concurrency(3, key="api")]
    workers = [nodes.worker(app, shards_count=12, limit=limits) for app in apps]
    workers[0].perform_async({"id": number} for number in range(100))
    for app in apps:
        nodes.start(of=app)
    until(lambda: len(nodes.begun) == 60)
    until(lambda: nodes.now == 0)
    for number in set(range(100)) - {int(job_id) for job_id in nodes.begun}:
        until(lambda number=number: workers[0].queue.why(number).reason == "limited")  # type: ignore[misc]
    why = workers[0].queue.why(number)
    assert "60 of 60 jobs in 1 d, shared as 'api'" in why.detail, why.detail
    rate, *others = workers[0].queue.limits()
    assert (rate.used, rate.is_reached) == (60, True)
    assert 86000 < (rate.wait or 0) <= 86400
    assert not any(state.is_reached for state in others)
    assert len(nodes.begun) == 60
    assert nodes.most <= 2


def test_a_queue_whose_limit_is_reached_takes_no_thread_from_others(nodes: Nodes) -> None:
    app = nodes.app()
    limited = nodes.worker(app, "limited", shards_count=12, limit=lowq.Rate(2, per=86400))
    free = nodes.worker(app, "free")
    limited.perform_async({"id": f"limited-{number}"} for number in range(100))
    nodes.start(of=app, threads=2)
    until(lambda: nodes.by_queue["limited"] == 2)
    free.perform_async({"id": f"free-{number}"} for number in range(100))
    until(lambda: nodes.by_queue["free"] == 100)
    assert nodes.by_queue["limited"] == 2


def test_a_node_that_stops_gives_its_permits_back_and_a_lower_limit_of_newer_code_holds_then(nodes: Nodes) -> None:
    old, new = nodes.app(), nodes.app()
    worker = nodes.worker(old, shards_count=12, limit=lowq.Concurrency(4))
    nodes.worker(new, shards_count=12, limit=lowq.Concurrency(1))
    worker.perform_async({"id": number} for number in range(20))
    first = nodes.start(of=old)
    until(lambda: len(nodes.begun) >= 5)
    assert first.stop(PATIENCE)
    assert [state.used for state in worker.queue.limits()] == [0]
    nodes.most = 0
    worker.perform_async({"id": f"new-{number}"} for number in range(20))
    nodes.start(of=new)
    until(lambda: len(nodes.begun) == 40)
    assert nodes.most == 1


def enters_all(app: lowq.Lowq, limit: lowq.Limit) -> None:
    """Gets all permits of a concurrency: nobody has kept one."""
    (rule,) = limit.rules
    with ExitStack() as stack:
        for _ in range(rule.limit):
            stack.enter_context(app.limit(limit.name, rule, timeout=PATIENCE))


def test_handlers_of_several_nodes_share_a_limit_around_their_calls(nodes: Nodes) -> None:
    apps = [nodes.app() for _ in range(2)]
    limits = [app.limit("erp", lowq.Concurrency(2)) for app in apps]
    for app, limit in zip(apps, limits, strict=True):
        nodes.worker(app, shards_count=12, around=limit)
    apps[0].queue("q").push({"id": number} for number in range(40))
    for app in apps:
        nodes.start(of=app)
    until(lambda: len(nodes.begun) == 40)
    assert nodes.most == 2
    enters_all(nodes.app(), limits[0])


@pytest.mark.parametrize("is_async", [False, True], ids=["threads", "loop"])
def test_a_wait_ends_with_its_batch_and_a_storm_of_interrupts_keeps_no_permit(
    make_app: MakeApp, start: Start, *, is_async: bool
) -> None:
    app, other = make_app(lease_ttl=NEVER), make_app()
    limit, ended = app.limit("erp", lowq.Concurrency(2)), list[str]()

    @app.worker(queue_name="q", shards_count=12, time_limit=0.03, max_retry_count=0)
    class Calls(lowq.Worker[Any]):
        def perform_in_thread(self, payloads_by_id: dict[str, list[Any]]) -> None:
            while True:
                with limit:
                    pass

        async def perform_in_loop(self, payloads_by_id: dict[str, list[Any]]) -> None:
            while True:
                async with limit:
                    await asyncio.sleep(0)

        perform = perform_in_loop if is_async else perform_in_thread

        def retries_exhausted(self, jobs: list[lowq.Job]) -> None:
            ended.extend(job.id for job in jobs)

    with ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(other.limit("erp", *limit.rules, timeout=PATIENCE))
        Calls.perform_async({"id": "waits"})
        start(of=app, threads=4)
        until(lambda: ended == ["waits"])
        (job,) = Calls.queue.jobs("morgue").jobs
        assert "TimeLimitExceeded" in str(job.error)
    Calls.perform_async({"id": number} for number in range(60))
    until(lambda: len(ended) == 61)
    enters_all(other, limit)


def test_a_node_that_stops_sends_away_who_would_wait_for_too_long_and_charges_nothing(
    make_app: MakeApp, start: Start
) -> None:
    app = make_app()
    waits, raised = threading.Event(), list[lowq.LimitTimeout]()

    @app.worker(queue_name="q", shards_count=1)
    def calls(payloads_by_id: dict[str, list[Any]]) -> None:
        with app.limit("erp", lowq.Rate(1, per=86400)):
            waits.set()
        try:
            with app.limit("erp"):
                pass
        except lowq.LimitTimeout as error:
            raised.append(error)
            raise

    calls.perform_async({"id": 1})
    node = start(of=app)
    assert waits.wait(PATIENCE)
    assert node.stop(PATIENCE)
    assert "the node stops" in str(raised[0])
    (job,) = calls.queue.jobs().jobs
    assert (job.state, job.retry_count) == ("due", -1)


@pytest.mark.parametrize("batch_size", [1, 10])
@pytest.mark.parametrize("is_per_id", [False, True])
def test_no_time_has_more_jobs_than_a_strict_rate_allows(
    make_app: MakeApp, start: Start, batch_size: int, *, is_per_id: bool
) -> None:
    moments: list[float] = []

    class OneByOne(lowq.Worker[Any]):
        def perform_one(self, job_id: str, payloads: list[Any]) -> None:
            moments.append(time.monotonic())
            time.sleep(0.01)

    class AllAtOnce(lowq.Worker[Any]):
        def perform(self, payloads_by_id: dict[str, list[Any]]) -> None:
            for job_id, payloads in payloads_by_id.items():
                OneByOne().perform_one(job_id, payloads)

    apps, rate = [make_app() for _ in range(2)], lowq.Rate(10, per=0.3, strict=True)
    for app in apps:
        options = dict[str, Any](queue_name="q", shards_count=8, batch_size=batch_size, limit=rate)
        app.worker(**options)(type("Calls", (OneByOne if is_per_id else AllAtOnce,), {}))
    apps[0].queue("q").push({"id": number} for number in range(60))
    for app in apps:
        start(of=app, threads=4)
    until(lambda: len(moments) == 60)
    moments.sort()
    # Measured in the handler, however busy the machine is.
    assert all(later - earlier > 0.3 for earlier, later in zip(moments, moments[10:], strict=False))


def most_at_once(rig: Rig) -> int:
    """How many performs ran at once, at most. Those of a process that was killed end with it."""
    changes = [change for perform in rig.performs() for change in ((perform.start, 1), (perform.end, -1))]
    return max(itertools.accumulate(change for _, change in sorted(changes)), default=0)


@pytest.mark.parametrize("where", ["ORDERS_CONCURRENCY", "ORDERS_CALLS"])
def test_permits_of_killed_nodes_return_and_are_never_too_many(make_rig: MakeRig, where: str) -> None:
    # A lease as long as none of them may be frozen, on a busy machine either: what it had would be somebody else's.
    rig = make_rig(ORDERS_SHARDS=12, ORDERS_WORK=0.02, LOWQ_LEASE_TTL=12, **{where: 3})
    nodes = [rig.node() for _ in range(3)]
    finished = rig.produce(1, ids=40, versions=4, rounds=0, pause=0.05)
    for number in range(2):
        until(lambda number=number: len(rig.performs()) > 40 * (number + 1))  # type: ignore[misc]  # a default binds it
        nodes[number].kill()
        rig.node()
    begun = len(rig.performs())
    until(lambda: len(rig.performs()) > begun + 40)
    finished()
    rig.drained()
    assert rig.report().problems == []
    assert most_at_once(rig) == 3
