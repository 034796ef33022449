"""Looking costs little: what Redis is asked, counted exactly on a smaller scale than `make web-cost`; and it is asked
once for everybody.
"""

import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import lowq
import lowq_web
from lowq import inspection
from lowq.observe.histories import RINGS, total_history
from lowq.store import Client
from lowq_web.app import MAX_SCANS
from lowq_web.listing import JobQuery, Page, Target
from lowq_web.redaction import Redact
from lowq_web.single_flight import FAILURE_AGE, SingleFlight
from lowq_web.stats_cache import CHANGING, HISTORY_AGE, INTERVAL, PER_SHARD, WHOLE_AGE, StatsCache
from lowq_web.threads import Threads
from tests.recorded import record
from tests.rows import case
from tests.rules.web.conftest import Open
from tests.rules.web.served import get, served
from tests.tiers import often
from tests.waiting import NEVER, PATIENCE, until

SHARDS = 300


@pytest.fixture
def big(app: lowq.Lowq, monkeypatch: pytest.MonkeyPatch) -> lowq.Lowq:
    """A queue of many shards, with a few jobs in each."""
    monkeypatch.setattr("lowq_web.stats_cache.PATIENCE", NEVER)  # the embedded store is slow
    app.queue("Big", SHARDS).push({"id": n, "payload": {"n": n}, "delay": 100 + n} for n in range(3 * SHARDS))
    return app


@contextmanager
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """How often each script is sent, and each command as COMMAND."""
    counts: Counter[str] = Counter()
    start = Client.start

    def counted(self: Client, calls: Any, **options: Any) -> Any:
        counts.update(call.script for call in calls)
        return start(self, calls, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Client, "start", counted)
        yield counts


class Clock:
    """Stands for the module `time`."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return 1_800_000_000 + self.now


def test_all_viewers_share_one_look_and_looks_are_far_between(big: lowq.Lowq, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("lowq_web.single_flight.time", clock)
    monkeypatch.setattr("lowq_web.stats_cache.time", clock)
    stats_cache = StatsCache(big)
    with asked(monkeypatch) as counts:
        with ThreadPoolExecutor(20) as pool:
            list(pool.map(lambda _: stats_cache.figures(), range(20)))
        assert counts["stats"] == SHARDS
        for _ in range(100):  # ten seconds of somebody who asks ten times a second
            clock.now += 0.1
            stats_cache.figures()
    looks = counts["stats"] / SHARDS - 1
    assert looks <= 10 / max(INTERVAL, SHARDS * PER_SHARD) + 1
    # A look costs Redis some 20 microseconds a shard: less than half a percent of its time.
    assert stats_cache.figures().interval >= SHARDS * 20e-6 / 0.005


#: Page or address -> how often it may call each script.
MOST: dict[str, dict[str, int]] = {
    "/": {"stats": SHARDS},
    "/queues/Big": {"stats": SHARDS, "range_page": SHARDS + 20, "fetch_jobs": 60},
    "/queues/Big/job?id=5": {"stats": 1, "fetch_jobs": 3, "why": 1},
    "/queues/Big/shards": {"stats": SHARDS},
    "/nodes": {},
    "/audit": {},
    "/search?id=5": {"fetch_jobs": 3},
    "/api/v1/stats": {"stats": SHARDS},
    "/api/v1/queues/Big/jobs?limit=10": {"range_page": SHARDS + 20, "fetch_jobs": 60},
}


@pytest.mark.parametrize("path", often(list(MOST), ["/queues/Big", "/queues/Big/job?id=5"]))
def test_a_page_asks_no_more_than_it_shows(
    browse: Open, big: lowq.Lowq, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    # However long the page takes, what it has read stays the latest, and Redis need not answer again.
    for name in ("INTERVAL", "CLOCK_AGE"):
        monkeypatch.setattr(f"lowq_web.stats_cache.{name}", NEVER)
    client = browse()
    with asked(monkeypatch) as counts:
        assert client.get(path).status_code in (200, 303)
    commands = {name for name in counts if name.isupper()}
    assert commands <= {"TIME", "HGETALL", "HKEYS", "HGET", "HMGET", "LRANGE", "INFO", "CONFIG"}
    assert sum(counts[name] for name in commands) <= 20
    for script in counts.keys() - commands:
        assert counts[script] <= MOST[path].get(script, 0), (script, counts)


def test_a_listing_that_was_given_up_keeps_no_slot(app: lowq.Lowq, monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis stalls, the client is answered so, and the response that nobody waits for is made later."""
    app.queue("Orders", 1).push({"id": 1, "delay": 60})
    application = lowq_web.create_app(app)
    site = application.state.context
    stalled, over = threading.Event(), threading.Event()
    made: list[Any] = []
    pages, alive, run = JobQuery.pages, site.stats_cache.alive, Threads.run

    def stall(asked: JobQuery, queue: Target, redact: Redact) -> Iterator[Page | None]:
        stalled.set()
        assert over.wait(PATIENCE)
        return pages(asked, queue, redact)

    async def refuse() -> None:
        if stalled.is_set() and not over.is_set():
            raise lowq.RedisUnavailable("Redis has not answered for 2 s")
        await alive()

    async def noted(threads: Threads, *call: Any) -> Any:
        response = await run(threads, *call)
        made.append(response)
        return response

    monkeypatch.setattr(JobQuery, "pages", stall)
    monkeypatch.setattr(Threads, "run", noted)
    monkeypatch.setattr(type(site.stats_cache), "alive", lambda _: refuse())
    monkeypatch.setattr(sys.modules["lowq_web.app"], "LONG", 0.01)  # the package has an application of that name
    paths = ("/queues/Orders?order_by=id", "/api/v1/queues/Orders/jobs?order_by=id")
    with served(application) as address:
        for path in (*paths, *paths):  # as many as may look through all ids at once
            assert get(address, path)[0] == 503
            stalled.clear()
        over.set()
        until(lambda: len(made) == MAX_SCANS, "late responses")
        for path in paths:
            assert get(address, path)[0] == 200


class Source:
    """Something to be read that takes as long as it is set to."""

    def __init__(self) -> None:
        self.reads = 0
        self.go = threading.Event()
        self.go.set()
        self.error: Exception | None = None

    def __call__(self) -> int:
        self.reads += 1
        assert self.go.wait(PATIENCE)
        if self.error is not None:
            raise self.error
        return self.reads


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("lowq_web.single_flight.time", clock)
    return clock


class TestShared:
    def test_an_error_is_answered_to_all_and_for_a_moment_to_those_who_come_then(self, clock: Clock) -> None:
        source = Source()
        source.error = lowq.RedisUnavailable("away")
        shared = SingleFlight(source, lambda _: 5.0, 1.0)
        for _ in range(3):
            with pytest.raises(lowq.RedisUnavailable, match="away"):
                shared.get()
        assert source.reads == 1
        clock.now += FAILURE_AGE
        source.error = None
        assert shared.get() == 2

    def test_nobody_waits_longer_than_until_its_time_is_over(
        self, clock: Clock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        source = Source()
        source.go.clear()
        shared, waits, result = SingleFlight(source, lambda _: 5.0, 0.05), list[float | None](), Future.result
        with pytest.raises(lowq.RedisUnavailable, match=r"not answered for 0\.05 s"):
            shared.get()
        clock.now += 100

        def noted(self: "Future[Any]", timeout: float | None = None) -> Any:
            waits.append(timeout)
            return result(self, timeout)

        with monkeypatch.context() as patch:
            patch.setattr(Future, "result", noted)
            for _ in range(5):
                with pytest.raises(lowq.RedisUnavailable):
                    shared.get()
        assert waits == [0.0] * 5
        until(lambda: source.reads, "the thread that reads")
        source.go.set()

        def value() -> int:
            with suppress(lowq.RedisUnavailable):
                return shared.get()
            return 0

        assert until(value, "word of what was read after all") == source.reads == 1

    def test_what_was_forgotten_is_read_anew_also_while_it_is_read(self) -> None:
        source = Source()
        source.go.clear()
        shared = SingleFlight(source, lambda _: NEVER, PATIENCE)
        with ThreadPoolExecutor(2) as pool:
            before = pool.submit(shared.get)
            until(lambda: source.reads == 1, "the first")
            shared.forget()
            after = pool.submit(shared.get)
            until(lambda: source.reads == 2, "another one")
            source.go.set()
            assert {before.result(), after.result()} <= {1, 2}
        assert (source.reads, shared.get()) == (2, after.result())


def test_figures_are_as_of_the_clock_of_the_server(
    app: lowq.Lowq, browse: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = Client.command

    def ahead(client: Client, *words: Any, **more: Any) -> Any:
        answer = command(client, *words, **more)
        return [int(answer[0]) + 3600, answer[1]] if words == ("TIME",) else answer

    monkeypatch.setattr(Client, "command", ahead)
    # It became due ten minutes before what will be the server's now.
    app.queue("Orders", 1).push({"id": 1, "perform_at": time.time() + 3000})
    stats_cache = StatsCache(app)
    assert stats_cache.figures().at - time.time() == pytest.approx(3600, abs=PATIENCE)
    assert stats_cache.now() - time.time() == pytest.approx(3600, abs=PATIENCE)
    families = text_string_to_metric_families(browse().get("/metrics").text)
    (age,) = [item.value for family in families for item in family.samples if item.name == "lowq_oldest_age_seconds"]
    assert age == pytest.approx(600, abs=PATIENCE)


def test_what_is_to_come_has_no_age(app: lowq.Lowq, browse: Open) -> None:
    app.queue("Later", 1, debounce=3600).push({"id": 1})
    assert 'lowq_oldest_age_seconds{queue="Later"} 0.0' in browse().get("/metrics").text


def test_histories_are_read_once_for_all_and_less_often_the_more_queues_there_are(
    app: lowq.Lowq, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    monkeypatch.setattr("lowq_web.stats_cache.PER_HISTORY", HISTORY_AGE)
    for name in ("Orders", "Mails"):
        app.registrations.enter(name, 1)
    stats_cache = StatsCache(app)
    stats_cache.figures()
    with asked(monkeypatch) as counts:
        for later, reads in ((0.0, 1), (HISTORY_AGE * 1.5, 1), (HISTORY_AGE, 2)):
            clock.now += later
            with ThreadPoolExecutor(8) as pool:
                list(pool.map(lambda _: stats_cache.history("", "hour"), range(8)))
            assert counts["HMGET"] == reads * 2


def test_of_the_history_of_all_queues_only_what_may_have_changed_is_read_again(
    app: lowq.Lowq, monkeypatch: pytest.MonkeyPatch
) -> None:
    width = RINGS["hour"].width
    now = 1_800_000_000.0
    stats_cache, asked_since = StatsCache(app), []

    def read(*args: Any) -> inspection.History:
        asked_since.append(args[-1])
        return total_history(*args)

    def is_whole() -> bool:
        monkeypatch.setattr(StatsCache, "now", lambda _: now)
        names = [info.name for info in app.queues()]
        return stats_cache.history("", "hour") == total_history(app, names, "hour", now)

    monkeypatch.setattr("lowq_web.stats_cache.total_history", read)
    monkeypatch.setattr("lowq_web.stats_cache.HISTORY_AGE", -1.0)  # whoever asks has it read
    for name in ("Orders", "Mails"):
        app.registrations.enter(name, 1)
        record(app, name, now - 3000, 50)
    assert is_whole()
    assert asked_since == [0.0]
    for later in (0.0, 7.0, 40.0, 500.0, 5000.0):
        now += later
        record(app, "Orders", now, 40, 4, seconds=5.0)
        record(app, "Mails", now, 4000, 4, seconds=4000.0, lag=7.0)  # after an outage
        with case(later):
            before, asked_since[:] = now - later, []
            assert is_whole()
            assert asked_since == [0.0 if later > WHOLE_AGE else before - CHANGING * width]
    app.registrations.enter("New", 1)
    record(app, "New", now - 2000, 50)
    assert is_whole()
    assert asked_since[-1] == 0.0, "all, as there is another queue"
