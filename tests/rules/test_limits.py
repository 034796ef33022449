"""Limits over all nodes, as workers declare them."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

import lowq
from lowq.limits import LimitRule, registered_limits
from lowq.registrations import options_of
from lowq.workers import limits_of
from tests.rows import case

app = lowq.Lowq(redis_url="memory://")


def declare(limit: Any) -> type[lowq.Worker[Any]]:
    @app.worker(queue_name="limited", limit=limit)
    class Limited(lowq.Worker[Any]):
        def perform(self, payloads_by_id: dict[str, list[Any]]) -> None:
            """Nothing."""

    return Limited


@pytest.fixture(autouse=True)
def fresh_app(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "app", lowq.Lowq(redis_url="memory://"))


def test_a_worker_may_have_one_several_or_none() -> None:
    assert limits_of(declare(None)) == ()
    forms: list[Any] = [lowq.Rate(100, per=1), [lowq.Rate(100, per=timedelta(seconds=1))], (lowq.Rate(100),)]
    for limit in forms:
        with case(limit):
            assert limits_of(declare(limit)) == (lowq.Rate(100, per=1.0),)


def test_rates_of_different_times_stand_beside_each_other() -> None:
    limits = (
        lowq.Rate(10),
        lowq.Rate(1000, per=3600, strict=True),
        lowq.Concurrency(5),
        lowq.Concurrency(50, key="all"),
    )
    worker = declare(limits)
    assert limits_of(worker) == limits
    assert len({limit.name("limited") for limit in limits}) == 4
    assert registered_limits(options_of(worker)["limit"]) == list(limits)


def test_limits_of_one_key_are_one_limit() -> None:
    assert lowq.Rate(10, key="api").name("a") == lowq.Rate(10, key="api").name("b")
    assert lowq.Rate(10).name("a") != lowq.Rate(10).name("b")
    assert lowq.Rate(10, key="api").name("a") != lowq.Concurrency(10, key="api").name("a")


def test_what_is_no_limit_is_refused() -> None:
    numbers: list[Any] = [0, 1.5, True, "5", 10**7]
    lengths: list[Any] = [0, True, "1", float("nan"), 1e9, timedelta(0)]
    keys: list[Any] = ["", "a b", "{x}", "x" * 129, 5]
    others: list[Any] = [5, [lowq.Rate(5), None], lowq.Rate]
    rows: list[tuple[Callable[[Any], Any], list[Any], str]] = [
        (lowq.Rate, numbers, "the limit must be a whole number from 1 to 1,000,000"),
        (lowq.Concurrency, numbers, "the limit must be a whole number from 1 to 1,000,000"),
        (lambda per: lowq.Rate(5, per=per), lengths, r"lowq.Rate\(5, per=.*\): per must be seconds, or a timedelta"),
        (lambda key: lowq.Concurrency(5, key=key), keys, r"lowq.Concurrency\(5, key=.*\): a key is a text of 1 to 128"),
        (declare, others, r"Limited: limit=.* must be a lowq.Rate, such as lowq.Rate\(100"),
        (
            declare,
            [[lowq.Rate(5), lowq.Rate(6)], [lowq.Rate(5), lowq.Rate(3, key="limited")]],
            r"Limited: limit says twice the same, Rate\(limit=5, .* different keys",
        ),
        (declare, [[lowq.Rate(5, key=f"k{n}") for n in range(9)]], "limit has 9 limits; a worker has at most 8"),
    ]
    for make, values, message in rows:
        for value in values:
            with case(value, message), pytest.raises(lowq.ConfigError, match=message):
                make(value)


def test_what_an_entry_of_the_registry_says_otherwise_is_left_out() -> None:
    entries: list[object] = [
        None, 5, "rate", [None], [{}], [{"rate": "x", "per": 1}], [{"rate": 5}], [{"concurrency": 0}], [["rate", 5]],
    ]  # fmt: skip
    for entry in entries:
        with case(entry):
            found: list[LimitRule] = registered_limits(entry)
            assert found == []
