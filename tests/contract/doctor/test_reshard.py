"""The doctor and queues that are resharded: every state between is in order, and what is left lying is found."""

import json
from collections.abc import Iterator

import pytest

from lowq.admin.reshard import reshard
from lowq.doctor import Finding
from lowq.store.keys import queues_key, shard_prefix
from tests.contract.doctor.test_doctor import SHARDS, Clinic

IDS = [f"id-{number}" for number in range(40)]


class Resharded(Clinic):
    """The queue, while its layout changes."""

    def prefix(self, shard: int, epoch: int) -> str:
        return shard_prefix("lowq", "Orders", shard, epoch)

    def entry(self) -> dict[str, object]:
        raw = self.command("HGET", queues_key("lowq"), "Orders")
        entry = json.loads(raw)
        assert isinstance(entry, dict)
        return entry

    def enter(self, entry: dict[str, object]) -> None:
        self.command("HSET", queues_key("lowq"), "Orders", json.dumps(entry))

    def fill(self) -> None:
        for job_id in IDS:
            self.push(job_id)

    def stop_after(self, steps: int) -> bool:
        """A reshard to 6 shards that stops after so many steps; True: it has ended by then."""
        progress = reshard(self.app, "Orders", 6)
        for number, done in enumerate(progress):
            if done.is_done:
                return True
            if number == steps:
                break
        progress.close()  # type: ignore[attr-defined]  # it is a generator, where anything is to be done
        return False


@pytest.fixture
def clinic(store_url: str) -> Iterator[Resharded]:
    clinic = Resharded(store_url)
    yield clinic
    clinic.app.close()


def test_nothing_is_wrong_with_a_queue_that_was_resharded_twice(clinic: Resharded) -> None:
    clinic.fill()
    clinic.queue.reshard(5)
    clinic.node()
    assert clinic.examine().keys() == {"shard_unserved"}, "what is left of the shards before is not missed by anybody"
    clinic.queue.reshard(2)
    assert [place.epoch for place in clinic.app.shards("Orders")] == [2, 2]
    clinic.command("HDEL", "lowq:v1:nodes", "host:1:tester")
    assert clinic.examine() == {}


def test_a_reshard_that_nobody_goes_on_with_is_found_at_every_step(clinic: Resharded) -> None:
    clinic.fill()
    steps = 0
    clinic.node(queues=("Orders",), shards={"Orders": [0]})
    while not clinic.stop_after(steps):
        found = clinic.examine()
        found.pop("shard_unserved", None)  # of those that are not sealed yet, or opened
        found.pop("node_without_leases", None)
        assert found.keys() == {"reshard_left"}
        finding = found["reshard_left"]
        assert finding.severity == "warning"
        assert "lowq reshard Orders 6" in finding.advice
        assert "to 6 shards" in finding.what
        steps += 1
    assert steps >= 3
    assert clinic.examine().keys() <= {"shard_unserved", "node_without_leases"}


def test_a_reshard_that_goes_on_is_none_that_was_left(clinic: Resharded, monkeypatch: pytest.MonkeyPatch) -> None:
    clinic.fill()
    progress = reshard(clinic.app, "Orders", 5)
    next(progress)
    passed = [0.0]

    class Clock:
        @staticmethod
        def monotonic() -> float:
            return passed[0]

        @staticmethod
        def sleep(seconds: float) -> None:
            passed[0] += seconds
            next(progress, None)

    monkeypatch.setattr("lowq.doctor.members.time", Clock())
    assert clinic.examine(patience=1.0) == {}


def test_while_what_is_in_flight_is_finished_the_reshard_is_in_order(clinic: Resharded) -> None:
    clinic.push("a")
    shard = clinic.take("a")
    progress = reshard(clinic.app, "Orders", 5)
    for done in progress:
        if done.waits_for:
            break
    clinic.node()
    assert "reshard_left" not in clinic.examine()
    shard.in_flight.finish(["a"])
    shard.in_flight.take(0)
    shard.lease.surrender(0.0)
    assert list(progress)[-1].is_done


def unfinished(clinic: Resharded) -> None:
    """A reshard in which all shards are moved, and the registry does not know it."""
    clinic.fill()
    before = clinic.entry()
    clinic.queue.reshard(5)
    clinic.enter(before)


def test_a_registry_from_before_the_reshard_is_found_and_put_right_by_another_reshard(clinic: Resharded) -> None:
    unfinished(clinic)
    found = clinic.examine()
    assert found.keys() == {"shard_sealed", "layout_unknown"}
    assert found["shard_sealed"].shards == tuple(range(SHARDS))
    assert "lowq reshard Orders 5" in found["shard_sealed"].advice
    assert "lowq reshard Orders N" in found["layout_unknown"].advice
    assert "(of layout 1)" in found["layout_unknown"].what
    assert "40 jobs" in found["layout_unknown"].what
    clinic.app.queue("Orders").reshard(5)
    assert clinic.examine() == {}


def test_jobs_in_a_shard_that_all_was_moved_from_are_found(clinic: Resharded) -> None:
    clinic.queue.reshard(5)
    clinic.command("ZADD", f"{clinic.prefix(0, 0)}due", 1, "a")
    clinic.command("SET", f"{clinic.prefix(0, 0)}payloads:a", "1 x")
    found: dict[str, Finding] = clinic.examine()
    assert found.keys() == {"layout_unknown"}
    assert found["layout_unknown"].shards == (0,)
    assert "layout 1" in found["layout_unknown"].what


def test_an_id_is_judged_by_the_layout_of_its_shard(clinic: Resharded) -> None:
    clinic.fill()
    clinic.queue.reshard(5)
    own = clinic.app.queue("Orders").layouts.current.shard_of(b"stray")
    strange = (own + 1) % 5
    clinic.command("ZADD", f"{clinic.prefix(strange, 1)}due", 1, "stray")
    clinic.command("SET", f"{clinic.prefix(strange, 1)}payloads:stray", "1 x")
    found = clinic.examine()
    assert found.keys() == {"wrong_shard"}
    assert (found["wrong_shard"].shards, found["wrong_shard"].ids) == ((strange,), ("stray",))


def test_damage_in_shards_of_a_later_layout_is_mended(clinic: Resharded) -> None:
    clinic.fill()
    clinic.queue.reshard(5)
    shard = clinic.app.queue("Orders").layouts.current.shard_of(b"id-1")
    clinic.command("ZREM", f"{clinic.prefix(shard, 1)}due", "id-1")
    assert clinic.examine(repair=True)["orphan_payloads"].repaired == 1
    clinic.command("DEL", f"{clinic.prefix(shard, 1)}meta")
    assert clinic.examine(repair=True)["meta_lost"].repaired == 1
    assert clinic.command("HGET", f"{clinic.prefix(shard, 1)}meta", "shards_count") == b"5"
    assert clinic.examine() == {}


def test_a_resharded_queue_that_the_registry_has_lost_is_entered_with_its_layout(clinic: Resharded) -> None:
    clinic.fill()
    clinic.queue.reshard(5)
    clinic.command("HDEL", queues_key("lowq"), "Orders")
    assert clinic.examine("Orders").keys() == {"queue_unregistered"}
    assert clinic.examine(repair=True)["queue_unregistered"].repaired == 1
    assert (clinic.entry()["shards_count"], clinic.entry()["epoch"]) == (5, 1)
    assert clinic.examine() == {}


def test_a_queue_that_the_registry_has_lost_in_the_middle_of_a_reshard_is_left(clinic: Resharded) -> None:
    clinic.fill()
    assert not clinic.stop_after(2)
    clinic.command("HDEL", queues_key("lowq"), "Orders")
    finding = clinic.examine(repair=True)["queue_unregistered"]
    assert (finding.repairable, finding.repaired) == (False, 0)
