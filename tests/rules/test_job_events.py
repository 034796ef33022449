"""Events of jobs: which are emitted, by whom, and that callbacks can do whatever they like."""

import asyncio
import logging
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import lowq
from lowq.consumer import ConsumerJob
from lowq.node.node import Node
from lowq.observe.callbacks import Callbacks
from lowq.observe.events import QueueEvents
from lowq.shards.lease import Lease
from lowq.shards.shard import shards_of
from lowq.testing import adrain, drain
from lowq.workers import Worker, queue_options_of
from tests.leases import run_out
from tests.rows import case
from tests.waiting import NEVER, PATIENCE, until

MakeApp = Callable[..., lowq.Lowq]
PayloadsById = dict[str, list[Any]]


class Events(list[lowq.JobEvent]):
    """A callback that keeps what it is called with."""

    def __call__(self, event: lowq.JobEvent) -> None:
        self.append(event)

    def of(self, job_id: str) -> list[tuple[str, int | None]]:
        return [
            (event.kind, event.payloads_count) for event in self if event.id == job_id and event.kind != "new_error"
        ]

    def kinds(self, job_id: str) -> list[str]:
        return [kind for kind, _ in self.of(job_id)]


@pytest.fixture
def store_url(redis_url: str) -> str:
    """One store will do: events are made of what it answers."""
    return redis_url


@pytest.fixture
def events() -> Events:
    return Events()


@pytest.fixture(autouse=True)
def callbacks_may_stand_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever ends waits for them as patiently as the tests do."""
    monkeypatch.setattr("lowq.testing.drainer.FLUSH_SECONDS", PATIENCE)
    monkeypatch.setattr(lowq.Lowq.flush_events, "__defaults__", (PATIENCE,))


@pytest.fixture
def make_app(store_url: str) -> Iterator[MakeApp]:
    apps: list[lowq.Lowq] = []

    def make(**settings: Any) -> lowq.Lowq:
        apps.append(lowq.Lowq(redis_url=store_url, lease_ttl=NEVER, **settings))
        return apps[-1]

    yield make
    for app in apps:
        app.close()


def handle(payloads_by_id: PayloadsById) -> None:
    """What a job's id says is done with it."""
    for job_id in payloads_by_id:
        verb = job_id.partition("-")[0]
        if verb == "release":
            lowq.current().release(job_id, delay=3600)
        elif verb == "bury":
            lowq.current().bury(job_id, "by hand")
        elif verb in ("fail", "exhaust"):
            raise ValueError(job_id)


def make_worker(app: lowq.Lowq, *, by_loop: bool = False, **options: Any) -> type[Worker[Any]]:
    async def ahandle(payloads_by_id: PayloadsById) -> None:
        await asyncio.sleep(0)
        handle(payloads_by_id)

    decorate = app.worker(queue_name="orders", **{"shards_count": 2, **options})
    worker: type[Worker[Any]] = decorate(ahandle if by_loop else handle)
    return worker


def perform_by_node(app: lowq.Lowq, done: Callable[[], bool]) -> None:
    node = Node(app, threads=2)
    node.start()
    try:
        until(done, "all jobs")
    finally:
        assert node.stop()


@pytest.mark.parametrize("by_loop", [False, True], ids=["thread", "loop"])
@pytest.mark.parametrize("how", ["node", "drain"])
def test_each_outcome_of_a_worker_has_its_event(make_app: MakeApp, events: Events, how: str, by_loop: bool) -> None:
    app = make_app(on_job_event=events)
    worker = make_worker(app, by_loop=by_loop)
    ids = ["ack", "release", "bury", "fail"]
    worker.perform_async([{"id": job_id, "payload": number} for job_id in ids for number in (1, 2)])
    if how == "node":
        node = Node(app, threads=2)
        node.start()
        until(lambda: len({event.id for event in events if event.kind not in ("pushed", "taken")}) == 4, "all jobs")
        assert node.stop()
    else:
        drain(worker)
    for job_id, kind in zip(ids, ("acked", "released", "buried", "failed"), strict=True):
        assert events.of(job_id) == [("pushed", 1), ("pushed", 1), ("taken", 2), (kind, 2)]
    assert {event.queue for event in events} == {"orders"}


def test_each_payload_and_job_of_a_batch_has_its_own(make_app: MakeApp, events: Events) -> None:
    app = make_app(on_job_event=events, dump_payload=str.encode, load_payload=lambda data: {b"good": "good"}[data])
    worker = make_worker(app, max_retry_count=0, batch_size=2, shards_count=1)
    worker.perform_async([{"id": job_id, "payload": "good"} for job_id in ("exhaust", "ack")])
    worker.perform_async([{"id": "ack", "payload": "bad"}, {"id": "x", "payload": "bad"}])
    drain(worker)
    assert events.of("x") == [("pushed", 1), ("taken", 1), ("buried", 1)]
    # A batch that failed is tried again one by one.
    assert events.of("ack")[2:] == [("taken", 2), ("buried", 1), ("released", 1), ("taken", 1), ("acked", 1)]
    assert events.of("exhaust")[1:] == [("taken", 1), ("released", 1), ("taken", 1), ("failed", 1), ("buried", 1)]


def test_adrain_delivers_events_before_it_returns(make_app: MakeApp) -> None:
    received = Events()
    loops: list[asyncio.AbstractEventLoop] = []

    def callback(event: lowq.JobEvent) -> None:
        asyncio.run_coroutine_threadsafe(note(event), loops[0]).result()  # the loop goes on meanwhile

    async def note(event: lowq.JobEvent) -> None:
        received(event)

    worker = make_worker(make_app(on_job_event=callback), by_loop=True)

    async def run() -> None:
        loops.append(asyncio.get_running_loop())
        await worker.aperform_async({"id": "ack"})
        await adrain(worker)
        assert received.kinds("ack") == ["pushed", "taken", "acked"]

    asyncio.run(run())


def test_each_verb_of_a_consumer_has_its_event(make_app: MakeApp, events: Events) -> None:
    app = make_app(on_job_event=events)
    queue = app.queue("mail", 2)
    ids = ["acked", "released", "buried", "failed", "closed"]
    queue.push([{"id": job_id} for job_id in ids])
    with queue.consumer() as consumer:
        jobs: dict[str, ConsumerJob] = {}
        while len(jobs) < len(ids):
            jobs |= {job.id: job for job in consumer.take(10)}
        jobs["acked"].ack()
        jobs["released"].release(delay=3600)
        jobs["buried"].bury("no")
        jobs["failed"].fail("no", delay=3600)
    for job_id in ids:
        last = "released" if job_id == "closed" else job_id
        assert events.of(job_id) == [("pushed", 1), ("taken", 1), (last, 1)]
    app.queue("other", 1).push("late")
    with app.queue("other").consumer(ttr=0.2) as consumer:
        assert consumer.take(1)
        until(lambda: events.kinds("late")[:3] == ["pushed", "taken", "released"], "its release")


def test_what_people_do_has_its_events(make_app: MakeApp, events: Events) -> None:
    app = make_app(on_job_event=events)
    queue = app.queue("mail", 3)
    queue.push([{"id": number, "perform_at": 2**33} for number in range(6)])
    queue.bury([0, 1, 2, "nobody"], "why not")
    queue.kick([0, "nobody"])
    assert queue.kick_oldest(1).done == 1
    queue.delete([3, 99])
    assert queue.clear() == 5
    with pytest.raises(lowq.JobError):
        queue.push([{"id": 1}, {"id": None}])
    assert app.flush_events(60)
    assert Counter(event.kind for event in events) == {"pushed": 6, "buried": 3, "kicked": 2, "deleted": 6}
    assert events.of("3") == [("pushed", 1), ("deleted", None)]
    assert events.kinds("0") == ["pushed", "buried", "kicked", "deleted"]


#: More of each shard than one call restores.
JOBS = 300


@pytest.mark.parametrize("listens", [False, True])
def test_what_a_dead_owner_left_in_flight_is_restored_or_buried(
    make_app: MakeApp, events: Events, listens: bool
) -> None:
    app = make_app()
    worker = make_worker(app, max_crash_count=1)
    worker.perform_async([{"id": number} for number in range(JOBS)])
    taken: set[str] = set()
    for dead in shards_of(app.client, app.config, queue_options_of(worker), "a" * 16):
        assert isinstance(dead.lease.acquire(NEVER), Lease)
        taken |= {job.id for job in dead.in_flight.take(JOBS).jobs}
        run_out(app.client, dead.prefix)
    assert len(taken) == JOBS
    app = make_app(on_job_event=events if listens else None)
    restored = 0
    for mine in shards_of(app.client, app.config, queue_options_of(worker), "b" * 16, events=app.events_of("orders")):
        lease = mine.lease.acquire(NEVER)
        assert isinstance(lease, Lease)
        restored += lease.restored + len(lease.poisoned)
        mine.lease.acquire(NEVER)  # resumes it: nothing more is restored
    assert restored == JOBS, "what a lease says is the same"
    app.flush_events(60)
    assert sorted(event.id for event in events) == (sorted(taken) if listens else [])
    assert {event.kind for event in events} <= {"restored", "buried"}


def test_pushes_that_meet_have_their_events(make_app: MakeApp, events: Events) -> None:
    app = make_app(on_job_event=events)
    queue = app.queue("mail", 4)

    async def run() -> None:
        await asyncio.gather(*(queue.apush({"id": number}) for number in range(300)))
        await queue.apush([{"id": number} for number in range(300, 3000)])

    asyncio.run(run())
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(queue.push, ({"id": number} for number in range(3000, 3200)))) == [1] * 200
    assert app.flush_events(60)
    assert sorted(int(event.id) for event in events) == list(range(3200))
    assert {(event.kind, event.payloads_count) for event in events} == {("pushed", 1)}


# --- who listens ---


def test_a_worker_hears_of_its_own_queue_and_the_application_of_all(make_app: MakeApp, events: Events) -> None:
    app, of_worker, of_function = make_app(on_job_event=events), Events(), Events()

    @app.worker(shards_count=1)
    class Orders(Worker[Any]):
        def perform(self, payloads_by_id: PayloadsById) -> None:
            pass

        @classmethod
        def on_event(cls, event: lowq.JobEvent) -> None:
            of_worker(event)

    @app.worker(shards_count=1, on_event=of_function)
    def mails(payloads_by_id: PayloadsById) -> None:
        pass

    Orders.perform_async({"id": 1})
    mails.perform_async({"id": 2})
    drain(Orders, mails)
    assert of_worker.kinds("1") == of_function.kinds("2") == ["pushed", "taken", "acked"]
    assert {event.queue for event in of_worker} == {"Orders"}
    assert {event.queue for event in of_function} == {"mails"}
    assert len(events) == 6


def test_nothing_is_made_where_nobody_listens(make_app: MakeApp) -> None:
    app = make_app()
    make_worker(app)
    assert not app.events_of("orders").follows_jobs


def test_what_is_no_callback_is_refused() -> None:
    async def awaits(event: lowq.JobEvent) -> None:
        pass

    callback: Any
    for callback, message in (
        (5, r"on_event=.* must be a function of one argument"), (os.rename, "must be a function of one argument"),
        (awaits, "not async def"),
    ):  # fmt: skip
        with case(callback), pytest.raises(lowq.ConfigError, match=message):
            make_worker(lowq.Lowq(), on_event=callback)
    for callback in (awaits, os.rename):
        with (
            case(callback),
            pytest.raises(lowq.ConfigError, match=r"on_job_event=.* must be a function"),
        ):
            lowq.Lowq(on_job_event=callback)
    body = {"perform": lambda _self, _payloads_by_id: None, "on_event": lambda _self, _event: None}
    with pytest.raises(lowq.ConfigError, match="write @staticmethod def on_event"):
        lowq.Lowq().worker(type("Orders", (), body))


# --- callbacks that misbehave ---


@pytest.mark.parametrize("error", [ValueError("oops"), SystemExit(3), KeyboardInterrupt()])
def test_a_callback_that_raises_is_logged_and_harms_nothing(
    make_app: MakeApp, events: Events, caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    def callback(event: lowq.JobEvent) -> None:
        raise error

    app = make_app(on_job_event=callback)
    worker = make_worker(app, on_event=events)
    worker.perform_async([{"id": "ack"}, {"id": "ack-2"}])
    assert drain(worker).performed == 2
    assert len(events) == 6, "the other callback has all"
    logged = [record for record in caplog.records if getattr(record, "event", "") == "callback_failed"]
    assert len(logged) == 1, "not for every job"
    assert logged[0].exc_info is not None


def test_a_callback_that_hangs_delays_neither_work_nor_pushes_nor_the_end(
    make_app: MakeApp, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lowq.Lowq.flush_events, "__defaults__", (0.1,))
    caplog.set_level(logging.WARNING, "lowq.events")
    hangs = threading.Event()
    performed: list[str] = []
    app = make_app(on_job_event=lambda _event: hangs.wait())

    @app.worker(shards_count=2)
    def work(payloads_by_id: PayloadsById) -> None:
        performed.extend(payloads_by_id)

    try:
        node = Node(app, threads=2)
        node.start()
        work.perform_async([{"id": number} for number in range(12_000)])
        until(lambda: len(performed) == 12_000, "all jobs")
        assert node.stop()
        assert not app.flush_events(0.01)
        dropped = [record for record in caplog.records if getattr(record, "event", "") == "events_dropped"]
        assert len(dropped) == 1
    finally:
        hangs.set()


def test_the_oldest_events_are_dropped_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    events, received = Callbacks(max_events=10), Events()
    is_calling, goes_on = threading.Event(), threading.Event()

    def callback(event: lowq.JobEvent) -> None:
        is_calling.set()
        goes_on.wait(PATIENCE)
        received(event)

    emitter = QueueEvents("q", own=events.of("q", callback))
    emitter.jobs_changed("pushed", ["first"])
    assert is_calling.wait(PATIENCE)
    for number in range(30):
        emitter.jobs_changed("pushed", [f"{number}"], 1)
    assert events.dropped == 20
    goes_on.set()
    until(lambda: "20 events were dropped" in caplog.text, "the log says how many")
    assert [event.id for event in received] == ["first", *map(str, range(20, 30))]
    emitter.jobs_changed("expired", [b"\xd0\xb7"], [3])
    assert events.flush(60)
    assert (received[-1].kind, received[-1].id, received[-1].payloads_count) == ("expired", "з", 3)


def test_the_thread_ends_when_nothing_happens_and_comes_back(monkeypatch: pytest.MonkeyPatch, events: Events) -> None:
    monkeypatch.setattr("lowq.observe.buffer.IDLE_SECONDS", 0.01)
    threads: list[threading.Thread] = []

    def callback(event: lowq.JobEvent) -> None:
        threads.append(threading.current_thread())
        events(event)

    emitter = QueueEvents("q", own=Callbacks().of("q", callback))
    for number in range(3):
        emitter.jobs_changed("pushed", [str(number)])
        until(lambda: len(events) == number + 1 and not threads[-1].is_alive(), "its end")  # noqa: B023  # called at once
    assert len(set(threads)) == 3
    assert [event.id for event in events] == ["0", "1", "2"]


def test_without_a_thread_to_be_had_events_wait(monkeypatch: pytest.MonkeyPatch, events: Events) -> None:
    def refuse(_self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    emitter = QueueEvents("q", own=(callbacks := Callbacks()).of("q", events))
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        emitter.jobs_changed("pushed", ["1"])
    emitter.jobs_changed("pushed", ["2"])
    assert callbacks.flush(60)
    assert [event.id for event in events] == ["1", "2"]


def test_a_callback_may_push(make_app: MakeApp, events: Events) -> None:
    def callback(event: lowq.JobEvent) -> None:
        events(event)
        if event.kind == "acked" and event.id == "ack-1":
            worker.perform_async({"id": "ack-2"})
            assert not app.flush_events(60), "from here it waits for nothing"

    app = make_app(on_job_event=callback)
    worker = make_worker(app)
    worker.perform_async({"id": "ack-1"})
    drain(worker)
    drain(worker)
    assert events.kinds("ack-2") == ["pushed", "taken", "acked"]


def test_a_process_that_ends_waits_a_moment_for_callbacks() -> None:
    script = """
import time
import lowq
from lowq.observe.callbacks import Callbacks

def callback(event):
    time.sleep(0.05)
    print(event.kind, event.id)

Callbacks.flush.__defaults__ = (60.0,)  # a moment, on a machine that stands still
app = lowq.Lowq(redis_url="memory://script", on_job_event=callback)
app.queue("mail", 1).push([{"id": number} for number in range(3)])
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=PATIENCE)
    assert ran.stdout.splitlines()[:1] == ["pushed 0"]
    assert ran.stderr == ""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_child_of_a_fork_has_events_of_its_own() -> None:
    reader, writer = os.pipe()
    goes_on, parent, events = threading.Event(), os.getpid(), Callbacks()

    def callback(event: lowq.JobEvent) -> None:
        if os.getpid() == parent:
            goes_on.wait()
        else:
            os.write(writer, event.id.encode())

    emitter = QueueEvents("q", own=events.of("q", callback))
    for job_id in ("of the parent", "of the parent, too"):
        emitter.jobs_changed("pushed", [job_id])
    pid = os.fork()
    if pid == 0:
        try:
            emitter.jobs_changed("pushed", ["of the child"])
            events.flush(60)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    goes_on.set()
    os.close(writer)
    assert os.read(reader, 1000) == b"of the child"
    os.close(reader)
