"""The doctor and queues that are resharded: every state between is in order, and what is left lying is found."""

import itertools
from collections.abc import Iterator
from contextlib import closing

import pytest

from lowq.operate.reshard import reshard
from lowq.sharding import Layout
from lowq.store.keys import nodes_key, queues_key, shard_prefix
from tests.rules.operate.clinic import SHARDS, Clinic, PassingTime

pytestmark = pytest.mark.parametrize("store_url", ["memory"], indirect=True)


class Resharded(Clinic):
    """A queue of 40 jobs, while its layout changes."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        for number in range(40):
            self.push(f"id-{number}")

    def of(self, shard: int, epoch: int, name: str) -> str:
        """A key of a shard of a layout."""
        return shard_prefix("lowq", "Orders", shard, epoch) + name

    def shard_now(self, job_id: str) -> int:
        """Where an id belongs in the layout that the registry knows."""
        return self.app.queue("Orders").layouts.current.shard_of(job_id.encode())

    def plant(self, shard: int, epoch: int, job_id: str) -> None:
        self.command("ZADD", self.of(shard, epoch, "due"), 1, job_id)
        self.command("HSET", self.of(shard, epoch, "payloads"), job_id, "1 x")

    def stop_after(self, steps: int) -> bool:
        """A reshard to 6 shards that stops after so many steps; True: it has ended by then."""
        progress = reshard(self.app, "Orders", 6)
        with closing(progress):  # type: ignore[type-var]  # it is a generator, where anything is to be done
            return any(done.is_done for done in itertools.islice(progress, steps + 1))


@pytest.fixture
def clinic(store_url: str) -> Iterator[Resharded]:
    with closing(Resharded(store_url)) as clinic:
        yield clinic


def test_nothing_is_wrong_with_a_queue_that_was_resharded_twice(clinic: Resharded) -> None:
    clinic.queue.reshard(5)
    name = clinic.node()
    assert clinic.examine().keys() == {"shard_unserved"}, "what is left of the shards before is not missed by anybody"
    clinic.queue.reshard(2)
    assert [place.epoch for place in clinic.app.shards("Orders")] == [2, 2]
    clinic.command("HDEL", nodes_key("lowq"), name)
    assert clinic.examine() == {}


def test_a_reshard_that_nobody_goes_on_with_is_found_at_every_step(clinic: Resharded) -> None:
    steps = 0
    unserved = {"shard_unserved", "node_without_leases"}  # of those that are not sealed yet, or opened
    clinic.node(shards={"Orders": [0]})
    while not clinic.stop_after(steps):
        found = clinic.examine()
        assert found.keys() - unserved == {"reshard_left"}
        finding = found["reshard_left"]
        assert finding.severity == "warning"
        assert "lowq reshard Orders 6" in finding.advice
        assert "to 6 shards" in finding.what
        steps += 1
    assert steps >= 3
    assert clinic.examine().keys() <= unserved


def test_a_reshard_that_goes_on_is_none_that_was_left(clinic: Resharded, monkeypatch: pytest.MonkeyPatch) -> None:
    progress = reshard(clinic.app, "Orders", 5)
    next(progress)
    monkeypatch.setattr("lowq.operate.integrity.time", PassingTime(lambda: next(progress, None)))
    assert clinic.examine(patience=1.0) == {}


def test_while_what_is_in_flight_is_finished_the_reshard_is_in_order(clinic: Resharded) -> None:
    shard = clinic.take("id-0")
    taken = [job.id for job in clinic.queue.jobs("taken")]
    progress = reshard(clinic.app, "Orders", 5)
    next(done for done in progress if done.waits_for)
    clinic.node()
    assert "reshard_left" not in clinic.examine()
    shard.in_flight.finish(taken)
    shard.in_flight.take(0)
    shard.lease.surrender(0.0)
    assert list(progress)[-1].is_done


def test_a_registry_from_before_the_reshard_is_found_and_put_right_by_another_reshard(clinic: Resharded) -> None:
    before = clinic.command("HGET", queues_key("lowq"), "Orders")
    clinic.queue.reshard(5)
    clinic.command("HSET", queues_key("lowq"), "Orders", before)
    found = clinic.examine()
    assert found.keys() == {"shard_sealed", "layout_unknown"}
    assert found["shard_sealed"].shards == tuple(range(SHARDS))
    assert "lowq reshard Orders 5" in found["shard_sealed"].advice
    assert "lowq reshard Orders N" in found["layout_unknown"].advice
    assert "(of layout 1)" in found["layout_unknown"].what
    assert "40 jobs" in found["layout_unknown"].what
    clinic.app.queue("Orders").reshard(5)
    assert clinic.examine() == {}


def test_strays_are_judged_by_the_layout_of_their_shard(clinic: Resharded) -> None:
    clinic.queue.reshard(5)
    clinic.plant(0, 0, "a")  # all was moved from there
    strange = (clinic.shard_now("stray") + 1) % 5
    clinic.plant(strange, 1, "stray")
    found = clinic.examine()
    assert found.keys() == {"layout_unknown", "wrong_shard"}
    assert found["layout_unknown"].shards == (0,)
    assert "layout 1" in found["layout_unknown"].what
    assert (found["wrong_shard"].shards, found["wrong_shard"].ids) == ((strange,), ("stray",))


def test_damage_in_shards_of_a_later_layout_is_mended(clinic: Resharded) -> None:
    clinic.queue.reshard(5)
    shard = clinic.shard_now("id-1")
    clinic.command("ZREM", clinic.of(shard, 1, "due"), "id-1")
    assert clinic.examine(repair=True)["orphan_payloads"].repaired == 1
    clinic.command("DEL", clinic.of(shard, 1, "meta"))
    assert clinic.examine(repair=True)["meta_lost"].repaired == 1
    assert clinic.command("HGET", clinic.of(shard, 1, "meta"), "shards_count") == b"5"
    assert clinic.examine() == {}


def test_a_queue_that_the_registry_has_lost_is_entered_with_its_layout_unless_it_is_resharded(
    clinic: Resharded,
) -> None:
    clinic.queue.reshard(5)
    clinic.command("HDEL", queues_key("lowq"), "Orders")
    assert clinic.examine("Orders").keys() == {"queue_unregistered"}
    assert clinic.examine(repair=True)["queue_unregistered"].repaired == 1
    (info,) = clinic.app.queues()
    assert info.layouts.all == (Layout(5, 1),)
    assert clinic.examine() == {}
    assert not clinic.stop_after(2)
    clinic.command("HDEL", queues_key("lowq"), "Orders")
    finding = clinic.examine(repair=True)["queue_unregistered"]
    assert (finding.repairable, finding.repaired) == (False, 0)
