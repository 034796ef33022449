from datetime import timedelta
from typing import Any

import pytest

import lowq
from lowq.errors import ConfigError
from lowq.options import QueueOptions
from lowq.registrations import options_of
from lowq.workers import queue_options_of
from tests.rows import case

NAN, INF = float("nan"), float("inf")
TIMES = ["ttr", "ttl", "debounce", "max_wait", "morgue_ttl"]
NUMBERS = ["max_payloads", "max_retry_count", "max_crash_count", "priority", "capacity", "morgue_max"]


@pytest.fixture
def app() -> lowq.Lowq:
    return lowq.Lowq(redis_url="memory://")


class Plain:
    def perform(self, payloads_by_id: dict[str, list[Any]]) -> None: ...


def newest(payloads: list[Any]) -> list[Any]:
    return payloads[-1:]


def nothing() -> list[Any]:
    return []


async def later(payloads: list[Any]) -> list[Any]:
    return payloads


WRONG: list[tuple[str, Any]] = [
    *((name, value) for name in TIMES for value in (0, -1, NAN, "5", True, timedelta(0), 2**40)),
    *((name, value) for name in NUMBERS for value in (-1, 2.0, "5", True, 2**40)),
    *((name, None) for name in ("priority", "max_payloads", "max_retry_count", "max_crash_count", "merge")),
    *((name, 0) for name in ("capacity", "morgue_max", "max_payloads")),
    ("priority", 10),
    *(("durability", value) for value in ("safe", None)),
    *(("merge", value) for value in ("newest", 5, nothing, divmod, later)),
]


def test_what_makes_no_sense_is_refused_where_it_is_declared(app: lowq.Lowq) -> None:
    for name, value in WRONG:
        with case(name, value):
            options: Any = {name: value}
            with pytest.raises(ConfigError, match=rf"^queue 'mail': {name}=.* (must|there is no) "):
                app.queue("mail", 4, **options)
            with pytest.raises(ConfigError, match=rf"^Plain: {name}=.* (must|there is no) "):
                app.worker(**options)(Plain)
            with pytest.raises(ConfigError, match=rf"^Sync: {name}=.* (must|there is no) "):
                app.worker(type("Sync", (Plain,), {name: staticmethod(value) if callable(value) else value}))
            assert not app.workers


def test_an_option_that_there_is_not_is_refused(app: lowq.Lowq) -> None:
    options: Any = {"batch_size": 5}
    with pytest.raises(ConfigError, match=r"queue 'mail': unknown option 'batch_size'; options are .*shards_count"):
        app.queue("mail", 4, **options)


def test_max_wait_is_that_of_debounce(app: lowq.Lowq) -> None:
    with pytest.raises(ConfigError, match=r"Plain: .*max_wait=5\.0 bounds the wait of debounce"):
        app.worker(max_wait=5)(Plain)
    with pytest.raises(ConfigError, match=r"Plain: .*must not be less"):
        app.worker(debounce=5, max_wait=4)(Plain)


def test_a_worker_declares_the_options_of_its_queue(app: lowq.Lowq) -> None:
    @app.worker(
        queue_name="mail", shards_count=3, ttl=timedelta(hours=1), ttr=60, priority=2, capacity=10, merge="latest",
        latency_goal=timedelta(minutes=5),
        debounce=2, max_wait=30, morgue_ttl=timedelta(days=7), morgue_max=100, max_payloads=5, durability="fsynced",
    )  # fmt: skip
    class Mail(lowq.Worker[Any]):
        def perform(self, payloads_by_id: dict[str, list[Any]]) -> None: ...

    assert queue_options_of(Mail) == QueueOptions(
        "mail", 3, ttl=3600.0, ttr=60.0, priority=2, capacity=10, merge="latest", debounce=2.0, max_wait=30.0,
        latency_goal=300.0,
        morgue_ttl=604800.0, morgue_max=100, max_payloads=5, durability="fsynced",
    )  # fmt: skip


def test_a_merge_function_may_be_a_method_of_the_class(app: lowq.Lowq) -> None:
    @app.worker
    class Mail(lowq.Worker[Any]):
        merge = staticmethod(newest)

        def perform(self, payloads_by_id: dict[str, list[Any]]) -> None: ...

    options = queue_options_of(Mail)
    assert (options.policy, options.merge_function) == ("collapse", newest)
    assert "merge" not in options_of(Mail)


def test_what_the_registry_has_is_read_again() -> None:
    options = QueueOptions("mail", 3, ttl=5.0, priority=9, capacity=1, merge="append", debounce=1.0, morgue_max=7)
    assert QueueOptions("mail", 3).registered(options.shown()) == options


def test_what_can_not_be_read_in_the_registry_is_left_out() -> None:
    entry = {"ttl": -5, "priority": "high", "capacity": None, "merge": "some driver's", "max_wait": 3.0, "color": "red"}
    entry |= {"shards_count": 99, "queue_name": "x", "morgue_max": 7}
    assert QueueOptions("mail", 3).registered(entry) == QueueOptions("mail", 3, morgue_max=7)


def test_what_follows_from_options() -> None:
    for debounce, max_wait, longest in (
        (None, None, None),
        (2.0, None, 20.0),
        (2.0, 30.0, 30.0),
        (2e9, None, 2**33 - 1),
    ):
        with case(debounce, max_wait, longest):
            assert QueueOptions("mail", 3, debounce=debounce, max_wait=max_wait).longest_wait == longest
    for capacity, of_a_shard in ((None, None), (1, 1), (4, 1), (5, 2), (8, 2)):
        with case(capacity, of_a_shard):
            assert QueueOptions("mail", 4, capacity=capacity).shard_capacity == of_a_shard
