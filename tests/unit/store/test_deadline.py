"""How long callers wait for Redis."""

import pytest

from lowq.store.deadline import Deadline, deadlines


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which stands still until it is set."""
    now = [100.0]
    monkeypatch.setattr("lowq.store.deadline.time.monotonic", lambda: now[0])
    return now


def test_all_attempts_together_have_the_time(now: list[float]) -> None:
    shares = [deadline.seconds for deadline in deadlines(8.0, 3) if deadline is not None]
    assert shares == [4.0, 2.0, 2.0]
    assert [deadline.seconds for deadline in deadlines(8.0, 1) if deadline is not None] == [8.0]


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
