"""What becomes of each job of a batch, by what its handler says and what it raises: the same whoever performs it."""

import asyncio
import itertools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

import lowq
from lowq.errors import PushInterrupted, RedisFull, RedisNotReady, RedisUnavailable, TimeLimitExceeded
from lowq.node.node import Node
from lowq.testing import drain
from tests.rows import case
from tests.rules.node.conftest import MakeApp
from tests.rules.node.drivers import Driver, job_of, running, states
from tests.waiting import until

PayloadsById = dict[str, list[Any]]
State = tuple[str, int] | None


class RateLimited(Exception):
    """The other side wants to be left alone."""


class HardLimited(RateLimited):
    """It insists."""


class OwnUnavailable(RedisUnavailable):
    """A subclass of the application's own."""


class Stop(BaseException):
    """No Exception: what stops a process."""


POLICIES: dict[str, Any] = {
    "bury_on": (KeyError, HardLimited),
    "release_on": {RateLimited: timedelta(minutes=50), TimeoutError: 30},
}
CHARGED, BURIED, RELEASED, AGAIN = ("retrying", 0), ("morgue", -1), ("scheduled", -1), ("due", -1)

#: What a handler may say of an id, and what becomes of it then.
WORDS: dict[str, tuple[Callable[[str], object], State]] = {
    "done": (lambda job_id: lowq.current().done(job_id), None),
    "fail": (lambda job_id: lowq.current().fail(job_id, "no such order"), CHARGED),
    "release": (lambda job_id: lowq.current().release(job_id, delay=500), RELEASED),
    "bury": (lambda job_id: lowq.current().bury(job_id, reason="cancelled"), BURIED),
}
#: What becomes of the others, by what the batch raises. Of what fails in company nobody knows which id it was: each is
#: tried again alone.
UNSAID: list[tuple[type[BaseException] | None, State]] = [
    (None, None),
    (ValueError, AGAIN),
    (KeyError, AGAIN),
    (RateLimited, RELEASED),
    (RedisUnavailable, AGAIN),
    (TimeLimitExceeded, AGAIN),
    (Stop, ("crashed", -1)),
]


def test_each_id_gets_its_word_and_otherwise_what_the_exception_means(make_app: MakeApp, driver: Driver) -> None:
    for error, unsaid in UNSAID:

        def handler(payloads_by_id: PayloadsById, error: type[BaseException] | None = error) -> None:
            for job_id in payloads_by_id:
                if job_id in WORDS:
                    WORDS[job_id][0](job_id)
            if error is not None:
                raise error

        with case(error):
            app = make_app()
            worker = driver.worker(app, handler, **POLICIES)
            ids = ["nothing", *WORDS, "more"]
            worker.perform_async({"id": job_id} for job_id in ids)
            stop = driver.perform(app, worker)
            assert (type(stop) is Stop) is (error is Stop)
            said = {word: state for word, (_, state) in WORDS.items()}
            assert states(worker, ids) == {"nothing": unsaid, **said, "more": unsaid}


def group(*errors: BaseException) -> BaseException:
    return BaseExceptionGroup("of a task group", errors)


def pushing(cause: Any) -> Exception:
    error = PushInterrupted("Orders", 0, [], cause)
    error.__cause__ = cause
    return error


AWAY = RedisUnavailable("away")
#: What may be raised, and what becomes of an id that is alone with it.
ERRORS: dict[str, tuple[BaseException, State]] = {
    "error": (ValueError("boom"), CHARGED),
    "bury_on": (KeyError("boom"), BURIED),
    "release_on": (RateLimited("boom"), RELEASED),
    "nearest class": (HardLimited("boom"), BURIED),
    # What ends a thread or a process where nobody expects it is a failure of the job.
    "cancelled": (asyncio.CancelledError(), CHARGED),
    "closed": (GeneratorExit(), CHARGED),
    "exit": (SystemExit(2), CHARGED),
    # A group is what all of its errors are.
    "all to be buried": (group(KeyError(), group(KeyError())), BURIED),
    "all to be released": (group(TimeoutError(), RateLimited()), RELEASED),
    "both": (group(TimeoutError(), KeyError()), BURIED),
    "one of them": (group(TimeoutError(), ValueError()), CHARGED),
    # A handler that found no Redis has not failed.
    "away": (AWAY, AGAIN),
    "replica": (RedisNotReady("is a read-only replica", "replica"), AGAIN),
    "pushing": (pushing(AWAY), AGAIN),
    "all away": (group(AWAY, group(AWAY)), AGAIN),
    "half away": (group(AWAY, ValueError()), CHARGED),
    "an own one": (OwnUnavailable("mine"), CHARGED),
    "full": (RedisFull("maxmemory"), CHARGED),
    "of something else": (ConnectionError(), CHARGED),
    "too late to push": (pushing(TimeLimitExceeded()), CHARGED),
}


@pytest.mark.parametrize("way", ["raised in perform_one", "said"])
def test_an_error_of_one_id_concerns_that_id_alone(app: lowq.Lowq, driver: Driver, way: str) -> None:
    def perform_one(job_id: str, payloads: list[Any]) -> None:
        if job_id in ERRORS:
            raise ERRORS[job_id][0]

    def perform(payloads_by_id: PayloadsById) -> None:
        for job_id in payloads_by_id:
            if job_id in ERRORS:
                lowq.current().fail(job_id, ERRORS[job_id][0])

    is_said = way == "said"
    worker = driver.worker(app, perform if is_said else perform_one, per_id=not is_said, batch_size=100, **POLICIES)
    ids = ["first", *ERRORS, "last"]
    worker.perform_async({"id": job_id} for job_id in ids)
    assert driver.perform(app, worker) is None
    expected = {name: CHARGED if is_said and state == AGAIN else state for name, (_, state) in ERRORS.items()}
    assert states(worker, ids) == {"first": None, **expected, "last": None}
    assert "boom" in (job_of(worker, "error").error or "")
    assert "boom" in (job_of(worker, "bury_on").error or "")
    longest, lease = job_of(worker, "all to be released"), job_of(worker, "release_on")
    assert abs((longest.perform_at or 0) - (lease.perform_at or 0)) < 1  # of its delays


def test_an_id_that_is_alone_gets_what_its_batch_raises(make_app: MakeApp, driver: Driver) -> None:
    rows = [ERRORS[name] for name in ("error", "bury_on", "release_on", "cancelled", "closed", "exit", "away")]
    rows += [(TimeLimitExceeded(), CHARGED), (group(ValueError(), SystemExit()), CHARGED), (Stop(), ("crashed", -1))]
    kinds = [False] if driver.is_node else [False, True]  # ``perform_one`` begins no batch
    for (error, state), per_id in itertools.product(rows, kinds):

        def handler(*_: Any, error: BaseException = error) -> None:
            raise error

        with case(error, per_id):
            app = make_app()
            worker = driver.worker(app, handler, per_id=per_id, **POLICIES)
            worker.push("1")
            assert driver.perform(app, worker) is (error if type(error) is Stop else None)
            assert states(worker, "1") == {"1": state}


def test_what_stops_the_process_is_charged_to_the_id_that_raised_it_alone(app: lowq.Lowq, driver: Driver) -> None:
    def handler(job_id: str, payloads: list[Any]) -> None:
        if job_id == "b":
            raise Stop

    worker = driver.worker(app, handler, per_id=True)
    worker.perform_async({"id": job_id} for job_id in "abcd")
    assert type(driver.perform(app, worker)) is Stop
    found = states(worker, "abcd")
    assert (found["a"], found["b"]) == (None, ("crashed", -1))
    assert {found["c"], found["d"]} <= {AGAIN, None}  # a node may begin them before it stops


def test_ids_of_a_batch_that_failed_are_tried_alone_and_only_the_one_that_fails_then_is_charged(
    app: lowq.Lowq, driver: Driver
) -> None:
    batches: list[list[str]] = []

    def handler(payloads_by_id: PayloadsById) -> None:
        batches.append(sorted(payloads_by_id))
        if "b" in payloads_by_id:
            raise KeyError("boom")

    worker = driver.worker(app, handler, **POLICIES)
    worker.perform_async({"id": job_id} for job_id in "abc")
    for _ in range(4):
        driver.perform(app, worker)
    assert (batches[0], sorted(batches[1:])) == (["a", "b", "c"], [["a"], ["b"], ["c"]])
    assert states(worker, "abc") == {"a": None, "b": BURIED, "c": None}


@pytest.mark.parametrize("per_id", [False, True])
def test_what_was_cancelled_before_its_failure_is_written_is_neither_charged_nor_given_up(
    make_app: MakeApp, driver: Driver, per_id: bool, caplog: pytest.LogCaptureFixture
) -> None:
    app = make_app()

    def cancel_and_fail(*args: Any) -> None:
        if args[0] in ("1", {"1": ["v1"]}):
            worker.queue.cancel("1")
            raise ValueError("boom")

    worker = driver.worker(app, cancel_and_fail, per_id=per_id, max_retry_count=0)
    worker.perform_async([{"id": job_id, "payload": "v1"} for job_id in (["1", "2"] if per_id else ["1"])])
    driver.perform(app, worker)
    stats = worker.queue.stats()
    assert (stats.cancelled, stats.failed, stats.morgue_length, stats.length) == (1, 0, 0, 0)
    assert driver.exhausted == []
    assert "morgue" not in caplog.text


def test_retries_are_exhausted_when_the_count_reaches_the_maximum(make_app: MakeApp, driver: Driver) -> None:
    def handler(payloads_by_id: PayloadsById) -> None:
        payloads_by_id["1"].pop()["version"] = 7  # which changes nothing of what was taken
        raise ValueError("boom")

    for maximum in (0, 2):
        with case(maximum):
            app = make_app()
            worker = driver.worker(app, handler, max_retry_count=maximum)
            worker.perform_async({"id": 1, "payload": {"version": n}, "score": n} for n in (1, 2))
            for retry in range(maximum + 1):
                assert worker.queue.peek(1, "morgue") is None, retry
                worker.queue.perform_now(1)
                driver.perform(app, worker)
            waiting, buried = worker.queue.places(1)
            assert (buried.state, buried.payloads) == ("morgue", [({"version": 1}, 1.0)])  # the oldest is given up
            assert (waiting.state, waiting.payloads) == ("due", [({"version": 2}, 2.0)])
            (told,) = driver.exhausted
            assert (told.id, told.payloads) == ("1", [({"version": 1}, 1.0)])


def test_the_applications_policies_hold_where_a_worker_says_nothing(app: lowq.Lowq) -> None:
    app.config.bury_on = (ValueError,)
    app.config.release_on = {RateLimited: 50}
    rows: list[tuple[str, type[Exception], dict[str, Any], str]] = [
        ("buried", ValueError, {}, "morgue"),
        ("released", RateLimited, {"bury_on": (KeyError,)}, "scheduled"),
        ("retried", ValueError, {"bury_on": ()}, "retrying"),
        ("charged", RateLimited, {"release_on": {}}, "retrying"),
        ("own", ValueError, {"release_on": {ValueError: 50}}, "scheduled"),
    ]
    for name, error, options, state in rows:

        def handler(payloads_by_id: PayloadsById, error: type[Exception] = error) -> None:
            raise error

        with case(name):
            worker = app.worker(shards_count=1, queue_name=name, **options)(handler)
            worker.push("1")
            drain(worker, limit=1)
            assert job_of(worker).state == state


# --- a handler that finds no Redis, though the node does ---


@pytest.mark.parametrize("driver", ["thread", "loop"], indirect=True)
def test_pauses_grow_and_in_the_end_it_is_charged(
    app: lowq.Lowq, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lowq.work.outcome.NO_REDIS_PAUSES", (None, 0.1, 0.2))
    runs: list[tuple[float, float]] = []

    def handler(payloads_by_id: PayloadsById) -> None:
        (job,) = lowq.current().jobs
        assert (job.retry_count, job.perform_at is None) == (-1, False)
        seconds, microseconds = app.client.command("TIME")
        runs.append((job.perform_at or 0, int(seconds) + int(microseconds) / 1e6))
        raise AWAY

    worker = driver.worker(app, handler)
    worker.push("1")
    with running(Node(app, threads=1)):
        until(lambda: job_of(worker).state == "retrying", "the charge")
    due, at = zip(*runs, strict=True)
    assert len(runs) == 4
    assert due[1] == due[0], "at once"
    assert due[2] >= at[1] + 0.1 - 0.001
    assert due[3] >= at[2] + 0.2 - 0.001


@pytest.mark.parametrize("driver", ["thread", "loop"], indirect=True)
def test_only_times_in_a_row_count(app: lowq.Lowq, driver: Driver) -> None:
    runs: list[str] = []

    def handler(payloads_by_id: PayloadsById) -> None:
        runs.extend(payloads_by_id)
        if len(runs) % 2:
            raise AWAY

    worker = driver.worker(app, handler)
    with running(Node(app, threads=1)):
        for times in range(1, 8):
            worker.push("1")
            until(lambda times=times: worker.queue.stats().processed == times, "the second try")  # type: ignore[misc]
    assert len(runs) == 14
