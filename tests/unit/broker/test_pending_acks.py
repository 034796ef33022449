"""What the maintenance loop does with deliveries whose later jobs are still being performed."""

from typing import Any, cast

from lowq import clock
from lowq.broker.activity import Performing
from lowq.broker.lease import Lease
from lowq.broker.leases import Leases
from lowq.broker.maintenance import MaintenanceLoop
from lowq.broker.membership import Membership
from lowq.broker.outage import Outage
from lowq.broker.shard import Shard
from lowq.broker.sweeper import Sweeper
from lowq.node.activity import ThreadActivity
from lowq.store import Call, Client


class Wire:
    """Takes note of what would be sent to Redis."""

    def __init__(self) -> None:
        self.sent: list[Call] = []

    def run_many(self, calls: list[Call], repeats: int) -> list[Any]:
        self.sent += calls
        return [None for _ in calls]

    def acknowledged(self) -> list[tuple[str, int, list[bytes]]]:
        """Shard's key, delivery and ids of each acknowledgement since the last time."""
        found = [(call.key, int(call.args[6]), list(call.args[7:])) for call in self.sent]
        self.sent.clear()
        return cast(list[tuple[str, int, list[bytes]]], found)


class Thread:
    """A thread that performs one delivery, as the maintenance loop sees it."""

    def __init__(self, name: str = "Orders") -> None:
        self.shard = Shard(
            cast(Client, None), "lowq", name, 0, shards_count=1, nonce="me", load_payload=bytes.decode
        )  # fmt: skip
        self.shard.lease.acquired([b"acquired", b"1", 0], clock.now() + 1000)
        assert isinstance(self.shard.lease.current, Lease)

    def takes(self, delivery: int, *ids: str) -> None:
        self.shard.in_flight.take_call(10)
        jobs = [item for job_id in ids for item in (job_id.encode(), b"1", b"1 x")]
        self.shard.in_flight.took([delivery, None, 0, 0, *jobs])

    def performs(self, activity: ThreadActivity, *ids: str) -> None:
        activity.performing = Performing(self.shard, list(ids), clock.now())


def loop_of(wire: Wire, *activities: ThreadActivity) -> MaintenanceLoop:
    return MaintenanceLoop(
        cast(Client, wire), cast(Membership, None), cast(Leases, None), lambda: activities, Outage(),
        divide=lambda _members: [],
        lease_ttl=15.0, poll_interval=1.0, registrations=list, on_ready=lambda: None, on_fatal=lambda _error: None,
        sweeper=Sweeper(list, [], 500),
    )  # fmt: skip


def test_a_trip_that_is_still_performed_at_the_second_look_is_acknowledged_so_far() -> None:
    wire, activity, thread = Wire(), ThreadActivity(0), Thread()
    keeping = loop_of(wire, activity)
    thread.takes(7, "a", "b", "c", "d")
    thread.shard.in_flight.finish(["a"])
    thread.performs(activity, "b")
    assert keeping._acknowledge_early()
    assert wire.acknowledged() == []  # it may be over in a moment: that is what a delivery is meant to take
    thread.shard.in_flight.finish(["b"])
    thread.performs(activity, "c")  # no single job of it takes long
    assert keeping._acknowledge_early()
    assert wire.acknowledged() == [(thread.shard.prefix, 7, [b"a", b"b"])]


def test_nothing_is_acknowledged_twice() -> None:
    wire, activity, thread = Wire(), ThreadActivity(0), Thread()
    keeping = loop_of(wire, activity)
    thread.takes(7, "a", "b", "c", "d")
    thread.shard.in_flight.finish(["a"])
    thread.performs(activity, "b")
    keeping._acknowledge_early()
    keeping._acknowledge_early()
    assert wire.acknowledged() == [(thread.shard.prefix, 7, [b"a"])]
    assert keeping._acknowledge_early()
    assert wire.acknowledged() == []
    thread.shard.in_flight.finish(["b", "c"])
    assert keeping._acknowledge_early()
    assert wire.acknowledged() == [(thread.shard.prefix, 7, [b"b", b"c"])]


def test_a_new_trip_begins_anew_also_on_another_shard_with_the_same_number() -> None:
    wire, activity, thread, other = Wire(), ThreadActivity(0), Thread(), Thread("Mails")
    keeping = loop_of(wire, activity)
    thread.takes(7, "a", "b", "c")
    thread.shard.in_flight.finish(["a", "b"])
    thread.performs(activity, "c")
    keeping._acknowledge_early()
    keeping._acknowledge_early()
    wire.acknowledged()
    other.takes(7, "x", "y")
    other.shard.in_flight.finish(["x"])
    other.performs(activity, "y")
    keeping._acknowledge_early()
    assert wire.acknowledged() == []
    keeping._acknowledge_early()
    assert wire.acknowledged() == [(other.shard.prefix, 7, [b"x"])]


def test_who_performs_nothing_or_has_nothing_finished_costs_nothing() -> None:
    wire, idle, first = Wire(), ThreadActivity(0), ThreadActivity(1)
    thread = Thread()
    keeping = loop_of(wire, idle, first)
    thread.takes(7, "a", "b")
    thread.performs(first, "a")
    assert not keeping._acknowledge_early()
    assert not keeping._acknowledge_early()
    assert wire.sent == []
