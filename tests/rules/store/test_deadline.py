"""How long callers wait for Redis."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from lowq.store.deadline import Deadline, caller_deadline, caller_limit, deadlines


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which stands still until it is set."""
    now = [100.0]
    monkeypatch.setattr("lowq.store.deadline.time.monotonic", lambda: now[0])
    return now


def test_all_attempts_together_have_the_time(now: list[float]) -> None:
    shares = [deadline.seconds for deadline in deadlines(8.0, 3)]
    assert shares == [4.0, 2.0, 2.0]
    assert [deadline.seconds for deadline in deadlines(8.0, 1)] == [8.0]


def test_without_a_time_each_attempt_has_the_connections(now: list[float]) -> None:
    assert list(deadlines(None, 3)) == [None, None, None]


def test_progress_begins_it_anew(now: list[float]) -> None:
    deadline = Deadline(5.0)
    now[0] += 4.0
    assert (deadline.left(), deadline.passed) == (1.0, False)
    deadline.restart()
    now[0] += 4.5
    assert (deadline.left(), deadline.passed) == (0.5, False)


def test_what_is_left_is_never_nothing(now: list[float]) -> None:
    # A socket with the timeout 0 does not wait, and one with none waits for ever.
    deadline = Deadline(5.0)
    now[0] += 6.0
    assert (deadline.left(), deadline.passed) == (0.001, True)


# --- a caller that has to end in time ---


@dataclass
class Caller:
    deadline: float | None


@pytest.fixture
def caller(now: list[float]) -> Iterator[Caller]:
    """It has three seconds."""
    caller = Caller(now[0] + 3.0)
    token = caller_limit.set(caller)
    yield caller
    caller_limit.reset(token)


def test_all_attempts_together_have_no_more_than_the_caller_has(now: list[float], caller: Caller) -> None:
    assert [deadline.seconds for deadline in deadlines(8.0, 2)] == [1.5, 1.5]
    assert [deadline.seconds for deadline in deadlines(2.0, 2)] == [1.0, 1.0]
    caller.deadline = None
    assert [deadline.seconds for deadline in deadlines(8.0, 2)] == [4.0, 4.0]


def test_progress_gives_no_more_time_than_the_caller_has(now: list[float], caller: Caller) -> None:
    (deadline,) = deadlines(8.0, 1)
    assert deadline is not None
    now[0] += 2.0
    deadline.restart()
    assert (deadline.left(), deadline.passed) == (1.0, False)
    now[0] += 1.0
    deadline.restart()
    assert (deadline.left(), deadline.passed) == (0.001, True)


def test_what_has_no_timeout_is_not_the_callers(now: list[float], caller: Caller) -> None:
    assert list(deadlines(None, 2)) == [None, None]


def test_without_a_caller_that_has_to_end_there_is_no_deadline() -> None:
    assert caller_deadline() == float("inf")
