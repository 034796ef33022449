"""Looking costs little: what Redis is asked, counted exactly on a smaller scale.

`make web-cost` measures it on a million jobs in a thousand shards.
"""

import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import lowq
import lowq_web
from lowq.store import Client
from lowq_web.app import MAX_SCANS
from lowq_web.listing import JobQuery
from lowq_web.redaction import Redact
from lowq_web.stats_cache import INTERVAL, PER_SHARD, StatsCache
from lowq_web.threads import Threads
from tests.processes.support import NEVER, PATIENCE, until
from tests.rules.web.conftest import Open
from tests.rules.web.served import get, served
from tests.tiers import often

SHARDS = 300


@pytest.fixture
def big(app: lowq.Lowq, monkeypatch: pytest.MonkeyPatch) -> lowq.Lowq:
    """A queue of many shards, with a few jobs in each."""
    monkeypatch.setattr("lowq_web.stats_cache.PATIENCE", 3600.0)  # the embedded store is slow
    app.queue("Big", SHARDS).push({"id": n, "payload": {"n": n}, "delay": 100 + n} for n in range(3 * SHARDS))
    return app


@contextmanager
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """How often each script is sent, and each command as COMMAND."""
    counts: Counter[str] = Counter()
    start, commands = Client.start, Client.commands

    def counted(self: Client, calls: Any, **options: Any) -> Any:
        counts.update(call.script for call in calls)
        return start(self, calls, **options)

    def counted_commands(self: Client, some: Any, *args: Any, **options: Any) -> Any:
        counts.update(str(command[0]) for command in some)
        return commands(self, some, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Client, "start", counted)
        patch.setattr(Client, "commands", counted_commands)
        yield counts


class Clock:
    """Stands for the module `time`."""

    def __init__(self) -> None:
        self.now = 1000.0

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
        viewers = [threading.Thread(target=stats_cache.figures) for _ in range(20)]
        for viewer in viewers:
            viewer.start()
        for viewer in viewers:
            viewer.join()
        assert counts["stats"] == SHARDS
        for _ in range(100):  # ten seconds of somebody who asks ten times a second
            clock.now += 0.1
            stats_cache.figures()
    looks = counts["stats"] / SHARDS - 1
    assert looks <= 10 / max(INTERVAL, SHARDS * PER_SHARD) + 1


def test_the_pause_between_looks_grows_with_the_shards(app: lowq.Lowq, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowq_web.stats_cache.PATIENCE", NEVER)  # the embedded store is slow
    for shards in (1, 500):
        app.register(f"queue-{shards}", shards)
        # A look costs Redis some 20 microseconds a shard: less than half a percent of its time.
        assert StatsCache(app).figures().interval >= shards * 20e-6 / 0.005


#: Page or address -> how often it may call each script.
MOST: dict[str, dict[str, int]] = {
    "/": {"stats": SHARDS},
    "/queues/Big": {"stats": SHARDS, "range_page": SHARDS + 20, "fetch_jobs": 60},
    "/queues/Big?state=morgue": {"stats": SHARDS, "range_page": SHARDS},
    "/queues/Big/job?id=5": {"stats": 1, "fetch_jobs": 3, "why": 1},
    "/queues/Big/shards": {"stats": SHARDS},
    "/nodes": {},
    "/audit": {},
    "/tasks": {},
    "/search?id=5": {"fetch_jobs": 3},
    "/metrics": {"stats": SHARDS},
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


@pytest.mark.slow
def test_pages_stay_small(browse: Open, app: lowq.Lowq) -> None:
    app.queue("Big", 600).push({"id": "x" * 500, "payload": "y" * 100_000})
    for number in range(100):
        app.register(f"queue-{number}", 1)
    client = browse()
    for path in ("/", "/queues/Big", "/queues/Big/shards", "/audit"):
        assert len(client.get(path).content) < 400_000, path


def test_a_listing_that_was_given_up_keeps_no_slot(app: lowq.Lowq, monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis stalls, the client is answered so, and the response that nobody waits for is made later."""
    app.queue("Orders", 1).push({"id": 1, "delay": 60})
    application = lowq_web.create_app(app)
    site = application.state.context
    stalled, over = threading.Event(), threading.Event()
    made: list[Any] = []
    pages, alive, run = JobQuery.pages, site.stats_cache.alive, Threads.run

    def stall(asked: JobQuery, queue: lowq.Queue, redact: Redact) -> Iterator[lowq.Page | None]:
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
