"""What the tests of what people do are given."""

from collections.abc import Iterator

import pytest

from tests.rules.queue_rig import QueueRig


@pytest.fixture
def rig(store_url: str) -> Iterator[QueueRig]:
    """An empty queue."""
    rig = QueueRig(store_url)
    yield rig
    rig.close()
