"""Whoever lost the lease may write nothing: each script that a holder calls refuses it, and changes nothing."""

from collections.abc import Callable

import pytest

from lowq.errors import LeaseLost
from lowq.shards.lease import Lease
from lowq.shards.shard import Shard
from tests.rows import case
from tests.rules.support import NOW, TTL, Channel, ShardRig, exhausted, job, report, retry

LATER = NOW + 2


def renew(shard: Shard, rig: ShardRig) -> None:
    (reply,) = rig.client.run_many([shard.lease.renew_call(2 * TTL)])
    if isinstance(reply, Exception):
        raise reply


WRITES: dict[str, Callable[[Shard, ShardRig], object]] = {
    "take": lambda shard, _: shard.in_flight.take(1, LATER),
    "acknowledge": lambda shard, _: shard.in_flight.take(0, LATER),
    "fail": lambda shard, _: report(shard, "fail", [retry("x"), exhausted("y")], LATER),
    "release": lambda shard, _: report(shard, "release", [("x", None), ("y", 1.0)], LATER),
    "release crashed": lambda shard, _: report(shard, "release", [("x", None)], LATER, crashed=True),
    "bury": lambda shard, _: report(shard, "bury", [("x", b"bad", [])], LATER),
    "bury in part": lambda shard, _: report(shard, "bury", [("x", b"bad", [b'"v1"'])], LATER),
    "renew": renew,
    "surrender": lambda shard, _: shard.lease.surrender(),
    "surrender in mid-work": lambda shard, _: shard.lease.surrender(3.0),
}


@pytest.mark.parametrize("lost", ["it has run out", "another has it", "an earlier one of its own"])
def test_without_the_lease_nothing_is_written(rig: ShardRig, free: Channel, lost: str) -> None:
    for name, write in WRITES.items():
        with case(name):
            rig.renew()
            shard = rig.own()
            rig.push(job("x", "v1", 1), job("y", "v1", 1), job("z", "v1", 1))
            shard.in_flight.take(2, NOW + 1)
            shard.in_flight.finish(["y"])
            rig.lease_runs_out()
            if lost != "it has run out":
                rig.own("second", LATER)
            if lost == "an earlier one of its own":
                rig.lease_runs_out()
                assert isinstance(rig.owner("first").lease.acquire(TTL, LATER), Lease)
            before, left, _ = rig.snapshot(), rig.client.command("PTTL", rig.prefix + "lease"), free.messages()
            with pytest.raises(LeaseLost):
                write(shard, rig)
            assert rig.snapshot() == before
            assert rig.client.command("PTTL", rig.prefix + "lease") <= left
            assert free.messages() == []
            if name != "renew" and "surrender" not in name:
                assert shard.lease.current is None
            if name in ("take", "acknowledge"):
                assert not shard.in_flight.unacknowledged
