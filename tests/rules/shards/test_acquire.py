"""acquire: the right to work a shard, and what a dead owner left in flight waits again."""

import pytest

from lowq.errors import LeaseLost, ShardsCountError
from lowq.shards.lease import Lease, LeaseDenied
from lowq.shards.shard import Shard
from tests.rules.support import NOW, REMAINS, TTL, ShardRig, handed, job

LATER = NOW + 2
#: Seconds by which a job is delayed after its owner died.
EARLIEST, LATEST = 0.05, 0.5


def lease_of(shard: Shard, now: float | None = NOW) -> Lease:
    lease = shard.lease.acquire(TTL, now)
    assert isinstance(lease, Lease)
    return lease


# --- the lease ---


def test_free_shard_is_acquired_and_one_that_somebody_holds_refused_with_the_time(rig: ShardRig) -> None:
    lease = lease_of(rig.shard)
    assert (lease.resumed, lease.restored, lease.poisoned) == (False, 0, ())
    assert rig.read("lease") == lease.token == f"first:{lease.fence}"
    assert (rig.meta("owner"), rig.meta("shards_count")) == ("first", "5")
    before = rig.snapshot()
    held = rig.owner("second").lease.acquire(TTL, NOW)
    assert isinstance(held, LeaseDenied)
    assert TTL - 60 < held.seconds <= TTL
    assert rig.snapshot() == before


def test_lease_that_lasts_longer_than_a_lease_can_is_cut_to_one(rig: ShardRig) -> None:
    """The server's clock stepped back: a dead owner's lease would last for as long as the step."""
    rig.own()
    rig.client.command("PEXPIRE", rig.prefix + "lease", int(100 * TTL * 1000))
    second = rig.owner("second")
    for _ in range(2):
        held = second.lease.acquire(TTL / 2, NOW)  # its own leases may be shorter; what counts is the owner's
        assert isinstance(held, LeaseDenied)
        assert TTL - 60 < held.seconds <= TTL
    assert TTL * 1000 - 60_000 < rig.client.command("PTTL", rig.prefix + "lease") <= TTL * 1000


def test_fence_grows_with_every_change_of_owner(rig: ShardRig) -> None:
    fences = []
    for number in range(4):
        rig.lease_runs_out()
        fences.append(lease_of(rig.owner(f"process {number}"), NOW - number).fence)  # the clock steps back, too
    assert fences == sorted(set(fences))
    assert fences[0] == int(NOW * 1e6), "at least the server's time in microseconds"
    assert rig.meta("fence") == str(fences[-1])


def test_fence_grows_also_after_redis_lost_its_data(rig: ShardRig) -> None:
    first = lease_of(rig.shard, None)
    rig.client.command("FLUSHALL")
    second = lease_of(rig.owner("second"), None)
    assert second.fence > first.fence
    with pytest.raises(LeaseLost):
        rig.shard.in_flight.take(1)
    rig.client.command("FLUSHALL")
    again = lease_of(rig.shard, None)
    assert again.fence > second.fence
    assert not again.resumed


def test_another_shards_count_is_refused_before_anything_is_written(rig: ShardRig) -> None:
    rig.push(job("x", "v1", 1), shards_count=7)
    before = rig.snapshot()
    with pytest.raises(ShardsCountError) as refused:
        rig.shard.lease.acquire(TTL, NOW)
    assert (refused.value.existing, refused.value.wanted) == (7, 5)
    assert rig.snapshot() == before


@pytest.mark.parametrize("is_sealed", [False, True])
def test_what_was_only_leased_for_another_number_is_not_made(rig: ShardRig, is_sealed: bool) -> None:
    rig.shard.lease.acquire(TTL, NOW)
    if is_sealed:
        assert rig.run("seal", repr(NOW), 7, 3, 1, "") == 1
    else:
        rig.push(job("x", "v1", 1), shards_count=7)
    assert rig.meta("shards_count") == "7"


# --- restore ---


def test_what_a_dead_owner_left_in_flight_waits_again_spread_over_time(rig: ShardRig) -> None:
    rig.push(job("x", "v1", 1), job("x", "v2", 2), *(job(f"y{n}", "v1", 1) for n in range(50)))
    rig.own().in_flight.take(60, NOW + 1)
    second = rig.owner("second")
    rig.lease_runs_out()
    assert lease_of(second, LATER).restored == 51
    times = rig.read("due")
    assert len(set(times.values())) > 45  # two may meet by chance
    assert all(LATER + EARLIEST <= at <= LATER + LATEST for at in times.values())
    assert (rig.read("crashes"), rig.read("solo"), rig.read("taken")) == (dict.fromkeys(times, "1"), {*times}, {})
    taken = handed(second.in_flight.take(1, LATER + 1))
    assert rig.read("taken").keys() == taken.keys()


def test_its_own_process_resumes_with_what_it_has_and_a_lease_as_long_as_asked_for(rig: ShardRig) -> None:
    shard = rig.own()
    rig.push(job("x", "v1", 1))
    fence, token = shard.in_flight.take(10, NOW + 1).lease.fence, shard.lease.token
    before = rig.snapshot()
    rig.lease_runs_out()
    lease = shard.lease.acquire(2 * TTL, LATER)
    assert isinstance(lease, Lease)
    assert (lease.resumed, lease.token, lease.fence, lease.restored) == (True, token, int(LATER * 1e6), 0)
    assert lease.fence > fence
    after = rig.snapshot()
    assert after["meta"].pop("lease_ttl") == str(int(2 * TTL * 1000))
    assert after["meta"].pop("resumed_fence") == str(lease.fence)
    assert after | {"meta": after["meta"] | {"lease_ttl": before["meta"]["lease_ttl"]}} == before
    held = rig.owner("second").lease.acquire(TTL, NOW)
    assert isinstance(held, LeaseDenied)
    assert TTL < held.seconds <= 2 * TTL


def test_each_call_of_the_holder_makes_a_higher_fence_and_keeps_the_token(rig: ShardRig) -> None:
    """Whatever the clock says, and whether replies get lost, or a call arrives behind its repeat."""
    shard = rig.own()
    late, token = shard.lease.acquire_call(TTL, NOW), shard.lease.token
    fences = [int(rig.meta("fence") or 0)]
    for number in range(4):
        if number == 1:
            rig.lease_runs_out()
        if number == 2:
            rig.lose_reply(late)
        lease = lease_of(shard, NOW - number)  # a clock that steps back
        fences.append(lease.fence)
        assert (lease.resumed, lease.token, rig.read("lease")) == (True, token, token)
    assert fences == sorted(set(fences))
    rig.lose_reply(late)
    second = rig.crash("second", NOW - 10).lease.current
    assert second is not None
    assert second.fence > fences[-1] + 1, "also than that which nobody has heard of"
    assert (rig.meta("fence"), rig.meta("resumed_fence")) == (str(second.fence), None)


# --- Redis lost its last writes ---


class Replica:
    """What a replica has of the shard, which is behind: what its primary writes from now on is lost with it."""

    def __init__(self, rig: ShardRig) -> None:
        self._client = rig.client
        keys = rig.client.command("KEYS", "*")
        self._dumped = [(key, max(rig.client.command("PTTL", key), 0), rig.client.command("DUMP", key)) for key in keys]

    def take_over(self) -> None:
        self._client.command("FLUSHALL")
        for key, left, data in self._dumped:
            self._client.command("RESTORE", key, left, data)


@pytest.mark.parametrize("ran_out", [True, False])
def test_an_owner_that_was_cut_off_has_a_higher_fence_than_one_whose_writes_a_failover_has_lost(
    rig: ShardRig, ran_out: bool
) -> None:
    """What it has in hand is reported all the same; what it took and has not begun is taken again. ``ran_out``: also at
    the new primary, whose clock may be behind.
    """
    rig.push(job("x", "v1", 1), job("y", "v1", 1))
    first = rig.own()
    delivery = first.in_flight.take(2, NOW)
    assert delivery.is_held(first.lease, 0.0)
    replica = Replica(rig)
    second = rig.crash("second", NOW + 1)
    lost = second.in_flight.take(2, NOW + 2).lease.fence
    replica.take_over()
    if ran_out:
        rig.lease_runs_out()
    lease = lease_of(first, NOW + 3)
    assert (lease.resumed, lease.fence > lost > delivery.lease.fence) == (True, True)
    assert not delivery.is_held(first.lease, 0.0), "nothing of it begins under the old fence"
    first.in_flight.finish(["x"])
    first.in_flight.in_hand.clear()  # as a thread does that begins nothing more of a delivery
    again = first.in_flight.take(2, NOW + 4)
    assert (handed(again), again.lease.fence) == ({"y": ["v1"]}, lease.fence)
    assert (rig.count("processed"), rig.read("crashes")) == (1, {})
    assert again.is_held(first.lease, 0.0)


def test_nor_is_a_fence_lower_when_later_leases_of_its_own_were_lost(rig: ShardRig) -> None:
    rig.push(job("x", "v1", 1))
    rig.own()
    rig.shard.in_flight.take(1, NOW)
    replica = Replica(rig)
    rig.crash("second", NOW + 1)
    first = rig.crash("first", NOW + 2)
    assert handed(first.in_flight.take(1, NOW + 2)) == {"x": ["v1"]}
    assert first.lease.current is not None
    highest = first.lease.current.fence
    for ran_out in (False, True):  # the earlier lease may still run, or not
        replica.take_over()
        if ran_out:
            rig.lease_runs_out()
        lease = lease_of(first, NOW - 100)  # by a clock that stepped back, too
        assert lease.fence > highest
        highest = lease.fence
        assert handed(first.in_flight.take(1, NOW + 3)) == {"x": ["v1"]}, "it is in flight, and in nobody's hand"
        first.in_flight.in_hand.clear()
    assert rig.read("crashes") == {}


# --- uncharged ---


def stop_in_the_middle(rig: ShardRig, shard: Shard, successor: str) -> Shard:
    """The owner is told to stop, and can't wait for what it took."""
    assert handed(shard.in_flight.take(1, LATER)) == {"x": ["v1"]}
    assert shard.lease.surrender(leave=TTL)
    rig.lease_runs_out()
    return rig.owner(successor)


def test_what_outlasts_every_stop_is_charged_as_a_crash_from_the_third_time_on(rig: ShardRig) -> None:
    rig.push(job("x", "v1", 1))
    shard = rig.own()
    for number, crashes in enumerate(["0 1", "0 2", "1 2", "2 2"]):
        shard = stop_in_the_middle(rig, shard, f"process {number}")
        assert lease_of(shard, LATER).restored == 1
        assert rig.read("crashes") == {"x": crashes}
        assert rig.read("solo") == (set() if crashes.startswith("0") else {"x"})
        ((_, _, _, _, shown, *_),) = rig.run("fetch_jobs", "", "", 1000, 1_000_000, "x")
        assert shown.decode() == crashes[0], "what was spared shows as no crash"
        rig.client.command("ZADD", rig.prefix + "due", repr(NOW), "x")  # a crash delays it a little
    shard = stop_in_the_middle(rig, shard, "last")
    assert lease_of(shard, LATER).poisoned == ("x",)
    assert rig.read("morgue:errors")["x"].startswith("poison: its process died, or its batch exceeded ttr, 3 times")
    assert rig.names() == REMAINS | {"morgue", "morgue:errors", "morgue:payloads:x"}
