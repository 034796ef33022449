"""What a node may ask of Redis. Times, rates and processor time are measured by `make chaos`, which runs alone."""

from pathlib import Path

import pytest

from tests.chaos.measures import IDLE_TRIPS, idle


@pytest.mark.slow
def test_a_node_with_a_thousand_idle_shards_does_next_to_nothing(tmp_path: Path) -> None:
    # Longer than from one renewal to the next. However long the machine stands still, no more are asked for.
    _, round_trips = idle(tmp_path, settle=1.0, seconds=7.0)
    assert round_trips < IDLE_TRIPS
