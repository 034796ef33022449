"""How far Redis's clock is ahead of this process's own."""

import pytest

from lowq.shards.membership import ServerClock

#: Redis's clock is so far ahead.
AHEAD = 1_700_000_000.0


def test_each_reply_narrows_it_down() -> None:
    clock = ServerClock()
    assert clock.offset is None
    clock.note(10.0 + AHEAD, 10.0, 12.0)  # written at once: it lies in the middle of what is possible
    assert clock.offset == pytest.approx(AHEAD - 1.0)
    clock.note(15.001 + AHEAD, 15.0, 15.002)
    assert clock.offset == pytest.approx(AHEAD, abs=0.001)
    clock.note(22.0 + AHEAD, 20.0, 24.0)
    assert clock.offset == pytest.approx(AHEAD, abs=0.005), "a reply that came late makes it no worse"


@pytest.mark.parametrize("step", [-3600.0, 0.0005, 0.5, 3600.0])
def test_a_clock_that_is_set_or_drifts_is_believed(step: float) -> None:
    clock = ServerClock()
    for number in range(1000):
        sent = 5.0 * number
        clock.note(sent + 0.001 + AHEAD + number * step, sent, sent + 0.002)
        assert clock.offset == pytest.approx(AHEAD + number * step, abs=0.005)
