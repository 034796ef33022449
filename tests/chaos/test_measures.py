"""Times and rates that have bounds. Those of takeovers are measured by `make chaos`."""

from pathlib import Path

import pytest

from tests.chaos.measures import IDLE_TRIPS, THROUGHPUT, idle, rebalancing

pytestmark = pytest.mark.slow  # on a machine that is busy with other things they say nothing


def test_a_fourth_node_joins_three_and_the_throughput_holds(tmp_path: Path) -> None:
    # Beside other tests a second may bring half of the one before it, whatever moves. Were the shards to wait for each
    # other it would bring next to nothing. `make chaos`, which runs alone, asks for all of it.
    assert rebalancing(tmp_path, settle=2.5, watch=2.0) >= THROUGHPUT / 3


def test_a_node_with_a_thousand_idle_shards_does_next_to_nothing(tmp_path: Path) -> None:
    # Longer than from one renewal to the next. Its processor time, too, is measured by `make chaos`.
    _, round_trips = idle(tmp_path, settle=1.0, seconds=7.0)
    assert 0 < round_trips < IDLE_TRIPS
