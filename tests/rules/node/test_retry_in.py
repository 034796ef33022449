"""When a job that failed is tried again: ``retry_in`` of a worker or of the application, and what the log says."""

import itertools
import logging
import math
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

import lowq
from lowq.codec import MAX_TIME
from lowq.testing import drain
from tests.rows import case
from tests.rules.node.conftest import MakeApp
from tests.rules.node.drivers import Driver, job_of

PayloadsById = dict[str, list[Any]]


def delay_of(app: lowq.Lowq, perform: Callable[[PayloadsById], object], **body: Any) -> float:
    """Seconds until the retry of a job of such a worker, which was pushed a moment ago."""
    kind = type("Orders", (lowq.Worker,), {"perform": lambda _self, payloads_by_id: perform(payloads_by_id), **body})
    decorate: Any = app.worker(shards_count=1)
    worker = decorate(kind)
    worker.push("1")
    pushed = job_of(worker).perform_at or 0
    drain(worker, limit=1)
    assert job_of(worker).retry_count == 0
    return (job_of(worker).perform_at or 0) - pushed


def fail(payloads_by_id: PayloadsById) -> None:
    raise KeyError("boom")


def test_it_is_seconds_and_nonsense_is_logged_and_the_default_used(
    make_app: MakeApp, caplog: pytest.LogCaptureFixture
) -> None:
    def divide() -> float:
        raise ZeroDivisionError

    nonsense: list[Any] = [None, "soon", math.nan, math.inf, 10**400, divide]
    rows: list[tuple[Any, float]] = [
        (700, 700),
        (-3, 0),
        (2.5, 2.5),
        (timedelta(minutes=20), 1200),
        (1e300, MAX_TIME),
        *((one, -1) for one in nonsense),
    ]
    for value, seconds in rows:
        with case(value):
            caplog.clear()
            give = value if callable(value) else itertools.repeat(value).__next__
            delay = delay_of(make_app(), fail, retry_in=lambda _self, _count, give=give: give())
            if seconds == -1:
                assert 15 <= delay <= 15 + 1 + 30 + 60
                assert "Orders.retry_in(0)" in caplog.text
            else:
                assert seconds <= delay + 0.001 < seconds + 60 or seconds == MAX_TIME
                assert "retry_in" not in caplog.text


def test_the_error_is_for_a_parameter_that_must_be_given_or_is_called_error(make_app: MakeApp) -> None:
    def with_base(retry_count: int, base: float = 9) -> float:
        return base + 991

    def with_any(retry_count: int, *rest: object) -> float:
        return 1000 if isinstance(rest[0], KeyError) else 0

    def with_two(retry_count: int, base: float = 9, error: object = None) -> float:
        return base + 991

    def with_error(retry_count: int, error: object = None) -> float:
        return 1000 if isinstance(error, KeyError) else 0

    def with_another_name(retry_count: int, reason: object) -> float:
        return 1000 if isinstance(reason, KeyError) else 0

    for retry_in in (with_base, with_any, with_two, with_error, with_another_name):
        with case(retry_in):
            assert 1000 <= delay_of(make_app(), fail, retry_in=staticmethod(retry_in)) + 0.001 < 1060


def test_it_is_told_what_the_handler_said(app: lowq.Lowq) -> None:
    told: list[Any] = []

    def retry_in(_self: object, retry_count: int, error: BaseException | str) -> float:
        told.append((retry_count, error))
        return 500

    delay_of(app, lambda _: lowq.current().fail("1", "no"), retry_in=retry_in)
    assert told == [(0, "no")]


def test_the_applications_holds_where_a_worker_has_none(make_app: MakeApp, caplog: pytest.LogCaptureFixture) -> None:
    rows: list[tuple[Any, dict[str, Any], float]] = [
        (lambda _count, _error: 500, {}, 500),
        (lambda _count: 500, {}, 500),
        (lambda _count, _error: 500, {"retry_in": lambda _self, _count: 1000}, 1000),
        (lambda _count, _error: 1 / 0, {}, 15),
    ]
    for number, (retry_in, own, seconds) in enumerate(rows):
        with case(number):
            assert seconds <= delay_of(make_app(retry_in=retry_in), fail, **own) + 0.001 < seconds + 100
    assert "Orders.retry_in(0) failed for id '1'; the default is used" in caplog.text


def test_it_may_be_an_option_a_length_of_time_or_a_function(make_app: MakeApp) -> None:
    def with_error(retry_count: int, error: object) -> float:
        return 600 if isinstance(error, KeyError) else 0

    rows: list[Any] = [600, timedelta(minutes=10), lambda _count: timedelta(minutes=10), with_error]
    for retry_in in rows:
        with case(retry_in):
            decorate: Any = make_app().worker(shards_count=1, retry_in=retry_in)
            worker = decorate(fail)
            assert worker.push("1")
            assert drain(worker, limit=1).failed == 1
            assert 590 < (job_of(worker).perform_at or 0) - time.time() <= 600
            if not callable(retry_in):
                assert 600 <= delay_of(make_app(), fail, retry_in=retry_in) + 0.001 < 660  # in the body of a class
            assert 600 <= delay_of(make_app(retry_in=retry_in), fail) + 0.001 < 660  # of all workers


def test_a_length_of_time_that_makes_no_sense_is_refused(make_app: MakeApp) -> None:
    for wrong in (-1, math.nan, 2**40, timedelta(-1), "soon", True):
        with case(wrong):
            retry_in: Any = wrong
            with pytest.raises(lowq.ConfigError, match=r"^Orders[:.] ?retry_in=.*( must be seconds| is no function)"):
                make_app().worker(retry_in=retry_in)(type("Orders", (), {"perform": lambda _self, _payloads: None}))
            with pytest.raises(lowq.ConfigError, match=r"^retry_in=.*( must be seconds| is no function)"):
                make_app(retry_in=retry_in)


# --- the log ---


class Wordy(Exception):
    """Something of another library."""

    def __repr__(self) -> str:
        return "many\nlines"


def test_a_retry_is_a_warning_in_one_line_and_the_morgue_an_error_with_the_traceback(
    make_app: MakeApp, caplog: pytest.LogCaptureFixture
) -> None:
    def fail_by_name(payloads_by_id: PayloadsById) -> None:
        lowq.current().fail("1", Wordy())

    def fail_at_the_end(payloads_by_id: PayloadsById) -> None:
        lowq.current().done("1")
        raise Wordy

    def raise_it(payloads_by_id: PayloadsById) -> None:
        raise Wordy

    caplog.set_level(logging.DEBUG, "lowq.node")
    retry, morgue = [("WARNING", False), ("DEBUG", True)], [("ERROR", True)]
    rows: list[tuple[Any, dict[str, Any], str, list[tuple[str, bool]]]] = [
        (raise_it, {"max_retry_count": 1}, "failed", retry),
        (raise_it, {"max_retry_count": 0}, "failed", morgue),
        (raise_it, {"bury_on": [Wordy]}, "failed", morgue),
        (raise_it, {"release_on": {Wordy: 50}}, "released", [("INFO", False)]),
        (fail_by_name, {"max_retry_count": 1}, "failed", retry),
        (fail_by_name, {"max_retry_count": 0}, "failed", morgue),
        (fail_at_the_end, {"max_retry_count": 1}, "failed", morgue),  # nobody will see it fail again
    ]
    driver = Driver("thread")
    for handler, options, event, said in rows:
        with case(handler, options):
            caplog.clear()
            app = make_app()
            worker = driver.worker(app, handler, **options)
            worker.push("1")
            driver.perform(app, worker)
            records = [record for record in caplog.records if vars(record).get("event") == event]
            assert [(record.levelname, bool(record.exc_info)) for record in records] == said
            assert vars(records[0])["ids"] == ["1"]
            assert event != "failed" or not any("\n" in record.getMessage() for record in records)
            line = raise_it.__code__.co_firstlineno + 1
            place = f" at {__file__}:{line} in raise_it; " if (event, handler) == ("failed", raise_it) else ""
            assert place in records[0].getMessage()


def test_the_log_counts_attempts(make_app: MakeApp, caplog: pytest.LogCaptureFixture) -> None:
    driver = Driver("thread")
    for most, said in (
        (1, "id 1: attempt 2 of 2 in 1 min 40 s"),
        (0, "id 1: attempt 1 of 1 failed, its oldest payload is in the morgue now"),
    ):
        with case(most):
            app = make_app()
            worker = driver.worker(app, fail, max_retry_count=most)
            worker.push("1")
            driver.perform(app, worker)
            assert said in caplog.text
