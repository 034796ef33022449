"""How far Redis's clock is ahead of this process's own."""

import pytest

from lowq.broker.server_clock import ServerClock

#: Redis's clock is so far ahead.
AHEAD = 1_700_000_000.0


def heard(clock: ServerClock, sent: float, received: float, ahead: float = AHEAD) -> None:
    """A reply that was written half way between the two."""
    clock.note((sent + received) / 2 + ahead, sent, received)


def test_at_first_it_is_not_known() -> None:
    assert ServerClock().offset is None


def test_each_reply_narrows_it_down() -> None:
    clock = ServerClock()
    clock.note(10.0 + AHEAD, 10.0, 12.0)  # written at once: it lies in the middle of what is possible
    assert clock.offset == pytest.approx(AHEAD - 1.0)
    heard(clock, 15.0, 15.002)
    assert clock.offset == pytest.approx(AHEAD, abs=0.001)
    heard(clock, 20.0, 24.0)
    assert clock.offset == pytest.approx(AHEAD, abs=0.005), "a reply that came late makes it no worse"


@pytest.mark.parametrize("step", [-3600.0, 0.5, 3600.0])
def test_a_server_whose_clock_is_set_is_believed(step: float) -> None:
    clock = ServerClock()
    heard(clock, 10.0, 10.002)
    heard(clock, 15.0, 15.1, AHEAD + step)
    assert clock.offset == pytest.approx(AHEAD + step, abs=0.001)


def test_clocks_that_drift_apart_are_followed() -> None:
    clock = ServerClock()
    for number in range(1000):
        sent = 5.0 * number
        heard(clock, sent, sent + 0.002, AHEAD + 0.0001 * sent)
        assert clock.offset == pytest.approx(AHEAD + 0.0001 * sent, abs=0.005)
