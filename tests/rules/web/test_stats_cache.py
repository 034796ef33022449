"""What is read for everybody: once, by the server's clock, and again after a failure."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import lowq
from lowq.store import Client
from lowq_web.single_flight import FAILURE_AGE, SingleFlight
from lowq_web.stats_cache import HISTORY_AGE, PER_HISTORY, StatsCache
from tests.rules.web.conftest import Open
from tests.rules.web.test_bounded import Clock, asked
from tests.waiting import NEVER, PATIENCE, until


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
        shared = SingleFlight(source, lambda _: 5.0, 0.05)
        with pytest.raises(lowq.RedisUnavailable, match=r"not answered for 0\.05 s"):
            shared.get()
        clock.now += 100
        waits: list[float | None] = []
        result = Future.result

        def noted(self: "Future[Any]", timeout: float | None = None) -> Any:
            waits.append(timeout)
            return result(self, timeout)

        with monkeypatch.context() as patch:
            patch.setattr(Future, "result", noted)
            for _ in range(50):
                with pytest.raises(lowq.RedisUnavailable):
                    shared.get()
        assert waits == [0.0] * 50
        until(lambda: source.reads, "the thread that reads")
        source.go.set()

        def value() -> int:
            try:
                return shared.get()
            except lowq.RedisUnavailable:
                return 0

        assert until(value, "word of what was read after all") == 1
        assert source.reads == 1

    def test_what_was_forgotten_is_read_anew_also_while_it_is_read(self) -> None:
        source = Source()
        source.go.clear()
        shared = SingleFlight(source, lambda _: NEVER, PATIENCE)
        with ThreadPoolExecutor(2) as pool:
            before = pool.submit(shared.get)
            while not source.reads:
                time.sleep(0.001)
            shared.forget()
            after = pool.submit(shared.get)
            while source.reads < 2:
                time.sleep(0.001)
            source.go.set()
            assert {before.result(), after.result()} <= {1, 2}
        assert source.reads == 2
        assert shared.get() == after.result()


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Moves the server's clock, seconds from ours. The embedded store has the clock of this machine."""
    command = Client.command

    def move(seconds: float) -> None:
        def moved(client: Client, *words: Any, **more: Any) -> Any:
            answer = command(client, *words, **more)
            return [int(answer[0]) + int(seconds), answer[1]] if words == ("TIME",) else answer

        monkeypatch.setattr(Client, "command", moved)

    return move


@pytest.mark.parametrize("ahead", [-300.0, 300.0])
def test_figures_are_as_of_the_clock_of_the_server(
    app: lowq.Lowq, elsewhere: Callable[[float], None], ahead: float
) -> None:
    app.queue("Orders", 1).push({"id": 1})
    elsewhere(ahead)
    stats_cache = StatsCache(app)
    assert stats_cache.figures().at - time.time() == pytest.approx(ahead, abs=PATIENCE)
    assert stats_cache.now() - time.time() == pytest.approx(ahead, abs=PATIENCE)


def test_the_oldest_age_is_reckoned_with_one_clock(
    app: lowq.Lowq, browse: Open, elsewhere: Callable[[float], None]
) -> None:
    # It became due ten minutes before what will be the server's now.
    app.queue("Orders", 1).push({"id": 1, "perform_at": time.time() + 3000})
    elsewhere(3600.0)
    families = text_string_to_metric_families(browse().get("/metrics").text)
    ages = [
        sample.value for family in families for sample in family.samples if family.name == "lowq_oldest_age_seconds"
    ]
    assert ages == [pytest.approx(600, abs=PATIENCE)]


def test_what_is_to_come_has_no_age(app: lowq.Lowq, browse: Open) -> None:
    app.queue("Later", 1, debounce=3600).push({"id": 1})
    assert 'lowq_oldest_age_seconds{queue="Later"} 0.0' in browse().get("/metrics").text


@pytest.mark.slow
def test_histories_are_read_once_for_all_and_less_often_the_more_queues_there_are(
    app: lowq.Lowq, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    queues = int(HISTORY_AGE / PER_HISTORY) * 2
    for number in range(queues):
        app.register(f"queue-{number}", 1)
    monkeypatch.setattr("lowq_web.stats_cache.PATIENCE", NEVER)  # the embedded store is slow
    stats_cache = StatsCache(app)
    stats_cache.figures()
    with asked(monkeypatch) as counts:
        for later, reads in ((0.0, 1), (HISTORY_AGE * 1.5, 1), (HISTORY_AGE, 2)):
            clock.now += later
            with ThreadPoolExecutor(8) as pool:
                list(pool.map(lambda _: stats_cache.history("", "hour"), range(8)))
            assert counts["HMGET"] == reads * queues
