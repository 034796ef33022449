"""What the tests of looking at queues are given."""

from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.rules.queue_rig import QueueRig


@pytest.fixture
def rig(store_url: str) -> Iterator[QueueRig]:
    with closing(QueueRig(store_url)) as rig:
        yield rig
