"""What the tests of looking and acting are given."""

from collections.abc import Iterator
from contextlib import closing

import pytest

from lowq.shards.membership import Identity, Membership
from tests.rules.operate.clinic import Clinic
from tests.rules.queue_rig import SHARDS, QueueRig


@pytest.fixture
def rig(store_url: str) -> Iterator[QueueRig]:
    """An empty queue."""
    with closing(QueueRig(store_url)) as rig:
        yield rig


@pytest.fixture
def clinic(store_url: str) -> Iterator[Clinic]:
    with closing(Clinic(store_url)) as clinic:
        yield clinic


def tell_of_activities(rig: QueueRig, *activities: dict[str, object] | None) -> None:
    """The heartbeat of the node that holds the rig's shards."""
    identity = Identity("tester", {"Orders": SHARDS}, len(activities), "1.0", host="host", pid=7)
    call = Membership(identity, "lowq", silence=60.0, shares=True).heartbeat_call({"performing": activities})
    rig.client.call(call)
