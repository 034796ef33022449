"""What a dead owner left in flight, more of it than one call restores; and how much an owner may have in flight."""

from collections.abc import Callable

import pytest

from lowq.errors import LeaseLost
from lowq.shards.delivery import Delivery
from lowq.shards.lease import Lease, LeaseDenied
from lowq.shards.shard import Shard
from tests.rows import case
from tests.rules.support import NOW, TTL, ShardRig, handed, job, report
from tests.tiers import real_redis_often

LATER = NOW + 2
#: Jobs that one call restores.
STEP = 100
#: Jobs that one owner may have in flight of a shard.
MOST = 1000


def push(rig: ShardRig, count: int) -> None:
    for start in range(0, count, 500):
        some = range(start, min(start + 500, count))
        rig.push(*(job(f"x{n:04d}", "v1", 1) for n in some), now=NOW + start / 1000)  # so they are due in their order


def take_all(shard: Shard, most: int = MOST) -> list[Delivery]:
    """As a consumer does, which acknowledges nothing meanwhile."""
    deliveries: list[Delivery] = []
    left = most
    while left and (delivery := shard.in_flight.take(left, LATER)).jobs:
        deliveries.append(delivery)
        left -= len(delivery.jobs)
    return deliveries


def call(rig: ShardRig, shard: Shard, now: float = LATER, *, charge: bool = True) -> Lease | LeaseDenied:
    """One call for the lease."""
    (reply,) = rig.client.run_many([shard.lease.acquire_call(TTL, now, charge=charge)])
    return shard.lease.acquired(reply, 0.0)


def left(rig: ShardRig) -> int:
    return len(rig.read("taken"))


def leave(rig: ShardRig, count: int = 2 * STEP + 50) -> Shard:
    """An owner dies with so many jobs in flight; returns its shard."""
    push(rig, count)
    owner = rig.own("dead")
    take_all(owner)
    assert left(rig) == count
    rig.lease_runs_out()
    return owner


# --- restored in steps ---


def test_each_call_restores_a_part_and_the_last_one_gets_the_lease(rig: ShardRig) -> None:
    leave(rig)
    shard = rig.owner("second")
    answers = [call(rig, shard) for _ in range(3)]
    assert [answer.restored for answer in answers] == [STEP, STEP, 50]
    assert [isinstance(answer, LeaseDenied) and answer.is_restoring for answer in answers] == [True, True, False]
    assert shard.lease.current is answers[-1]
    assert rig.read("taken") == {}
    assert rig.read("crashes") == dict.fromkeys(rig.read("due"), "1")
    assert len(rig.read("due")) == 2 * STEP + 50


def test_nothing_is_handed_out_before_all_is_restored(rig: ShardRig) -> None:
    """Not even by who had the shard: some of its jobs wait again, so it must not go on with them."""
    dead = leave(rig)
    second, third = rig.owner("second"), rig.owner("third")
    call(rig, second)
    for shard in (dead, second, third):
        with pytest.raises(LeaseLost):
            shard.in_flight.take(10, LATER + 10)
    with pytest.raises(LeaseLost):
        report(dead, "release", [("x0000", None)], LATER)
    # The owner comes back, and another one, and the first of the two dies in the middle.
    assert [call(rig, shard).restored for shard in (dead, third)] == [STEP, 50]
    assert dead.lease.current is None
    assert third.lease.current is not None
    assert set(rig.read("crashes").values()) == {"1"}
    assert left(rig) == 0


CHARGED: dict[str, tuple[Callable[[Shard, ShardRig], object], bool, set[str]]] = {
    "its owner died": (lambda *_: None, True, {"1"}),
    "its owner could not wait for it": (lambda shard, _: shard.lease.surrender(leave=TTL), True, {"0 1"}),
    "a consumer detached": (
        lambda shard, rig: rig.client.run_many([shard.lease.detach_call(TTL)]), True, {"0 1"}
    ),
    "Redis was away": (lambda *_: None, False, set()),
}  # fmt: skip


def test_all_of_it_is_charged_alike_whoever_restores_it(rig: ShardRig) -> None:
    for what, (end, charge, expected) in CHARGED.items():
        with case(what):
            rig.renew()
            push(rig, 2 * STEP)
            owner = rig.own("dead", session="dead")
            take_all(owner)
            end(owner, rig)
            rig.lease_runs_out()
            call(rig, rig.owner("second"), charge=charge)
            assert isinstance(call(rig, rig.owner("third")), Lease)
            crashes = rig.read("crashes")
            assert set(crashes.values()) == expected
            assert len(crashes) == (2 * STEP if expected else 0)
            assert rig.read("solo") == (set(crashes) if expected == {"1"} else set())
            # And what the next owner leaves is its own.
            assert rig.meta("uncharged") is None


def test_a_session_gets_nothing_back_of_which_a_part_waits_again(rig: ShardRig) -> None:
    push(rig, 2 * STEP)
    one = rig.own("session-one", session="session")
    take_all(one)
    rig.client.run_many([one.lease.detach_call(TTL)])
    rig.lease_runs_out()
    call(rig, rig.owner("other"))
    two = rig.owner("session-two", session="session")
    lease = two.lease.acquire(TTL, LATER)
    assert isinstance(lease, Lease)
    assert (lease.adopted, lease.restored) == (False, STEP)


def test_poison_is_told_with_the_call_that_buries_it(rig: ShardRig) -> None:
    leave(rig)
    shard = rig.owner("second", max_crash_count=1)
    answers = [call(rig, shard) for _ in range(3)]
    assert [len(answer.poisoned) for answer in answers] == [STEP, STEP, 50]
    assert {job_id for answer in answers for job_id in answer.poisoned} == set(rig.read("morgue"))
    rig.client.command("FLUSHALL")
    leave(rig)
    lease = rig.owner("third", max_crash_count=1).lease.acquire(TTL, LATER)
    assert (lease.restored, len(lease.poisoned)) == (0, 2 * STEP + 50)


@pytest.mark.parametrize("max_crash_count", [1, 3])
def test_a_call_restores_fewer_jobs_with_many_payloads(rig: ShardRig, max_crash_count: int) -> None:
    """Those that join others: these are moved one by one."""
    names = [f"x{n}" for n in range(12)]
    payloads = [f"v{n}" for n in range(100)]
    for name in names:
        rig.push(*(job(name, payload, 1) for payload in payloads))
    take_all(rig.own("dead"))
    for name in names:
        rig.push(job(name, "later", 2), job(name, "last", 3))
    rig.lease_runs_out()
    shard = rig.owner("second", max_crash_count=max_crash_count)
    steps = []
    while not isinstance(call(rig, shard), Lease):
        steps.append(left(rig))
    assert steps == [7, 2]
    key = "payloads" if max_crash_count == 3 else "morgue:payloads"
    for name in names:
        assert set(rig.read(f"{key}:{name}")) == {*payloads, "later", "last"}


# --- so much may be in flight ---


@real_redis_often
def test_a_take_brings_no_more_than_may_be_in_flight(rig: ShardRig) -> None:
    push(rig, MOST + 9)
    shard = rig.own()
    deliveries = take_all(shard, MOST + 9)
    assert sum(len(one.jobs) for one in deliveries) == MOST
    full = shard.in_flight.take(10, LATER)
    assert full.jobs == []
    assert full.delay is not None, "jobs wait, and that is told"
    assert full.delay <= 0
    number, ids = deliveries[-1].number, [one.id for one in deliveries[-1].jobs]
    for made in (
        shard.in_flight.ack_report(ids[:3], number, LATER),
        shard.in_flight.release_report([(job_id, 60.0) for job_id in ids[3:6]], LATER, delivery=number),
        shard.in_flight.bury_report([(job_id, b"", ()) for job_id in ids[6:9]], LATER, delivery=number),
    ):
        shard.in_flight.write([made])
        assert len(shard.in_flight.take(10, LATER).jobs) == 3
        assert shard.in_flight.take(10, LATER).jobs == []


@pytest.mark.parametrize("levels", [(0, 0), (0, 5), (5, 0)])
def test_newer_payloads_of_what_is_in_flight_hide_nobody_who_waits_behind_them(
    rig: ShardRig, levels: tuple[int, int]
) -> None:
    """Which ids are in flight is asked of those alone that are looked at, first of few."""
    push(rig, 120)
    shard = rig.own()
    (held,) = take_all(shard)
    rig.push(*(job(f"x{n:04d}", "v2", 2, priority=levels[0]) for n in range(120)))
    rig.push(*(job(name, "v1", 1, priority=levels[1]) for name in ("behind", "further")), now=NOW + 1)
    rig.push(job("in an hour", "v1", 1, delay=3600), now=LATER)
    assert handed(shard.in_flight.take(1, LATER)) == {"behind": ["v1"]}
    assert handed(shard.in_flight.take(10, LATER)) == {"further": ["v1"]}
    delivery = shard.in_flight.take(10, LATER)
    assert delivery.jobs == []
    assert delivery.delay == pytest.approx(3600, abs=0.01)
    shard.in_flight.write([shard.in_flight.ack_report(["x0000", "x0119"], held.number, LATER)])
    assert sorted(handed(shard.in_flight.take(10, LATER))) == ["x0000", "x0119"]
