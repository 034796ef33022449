"""What the tests of the contract are given."""

from collections.abc import Iterator

import pytest

from tests.contract.support import Channel, ShardRig


@pytest.fixture
def rig(store_url: str) -> Iterator[ShardRig]:
    """An untouched shard, on each of the stores."""
    rig = ShardRig(store_url)
    yield rig
    rig.close()


@pytest.fixture
def wake(rig: ShardRig) -> Iterator[Channel]:
    channel = Channel(rig, "wake")
    yield channel
    channel.close()


@pytest.fixture
def free(rig: ShardRig) -> Iterator[Channel]:
    channel = Channel(rig, "lease_released")
    yield channel
    channel.close()
