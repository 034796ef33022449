"""The doctor: who works what. Registries and leases are compared in Python, which no store sees."""

from collections.abc import Callable

import pytest

from lowq.shards.delivery import Failure
from lowq.store.keys import nodes_key, queues_key
from tests.rows import case
from tests.rules.operate.clinic import SHARDS, A, B, Clinic, PassingTime, ids_of, new_clinic
from tests.rules.support import report, run_script

pytestmark = pytest.mark.parametrize("store_url", ["memory"], indirect=True)


@pytest.fixture
def old_clinic(clinic: Clinic, monkeypatch: pytest.MonkeyPatch) -> Clinic:
    """On a server that has run for long: the tests' own has just been started, which is nobody's fault."""
    monkeypatch.setattr(clinic.client, "server_age", lambda: 1e9)
    return clinic


# --- owners ------------------------------------------------------------------------------------------------------


def test_what_a_dead_owner_left_in_flight_is_restored_as_a_new_owner_would(old_clinic: Clinic) -> None:
    clinic = old_clinic
    clinic.push(A)
    report(clinic.take(), "fail", [Failure(A, "retry", 2, 0.0, b"boom")])
    lease = clinic.take().lease.current
    assert lease is not None
    clinic.push(A, payload={"version": 2}, score=2)
    clinic.dies()
    finding = clinic.examine()["ownerless"]
    assert finding.what == "1 job in flight, and nobody holds the lease of shard 1"
    assert (finding.severity, finding.shards, finding.repairable) == ("error", (1,), True)
    assert not clinic.examine(repair=True)["ownerless"].wrong
    assert clinic.examine() == {}
    job = clinic.job()
    assert job.state in ("retrying", "due")  # its pause may be over
    assert (job.retry_count, job.crashes, job.error) == (2, 1, "boom")
    assert [payload["version"] for payload, _ in job.payloads] == [1, 2]
    assert clinic.do("SISMEMBER", "solo", A) == 1
    owner, fence = clinic.do("HMGET", "meta", "owner", "fence")
    assert owner is None
    assert int(fence) > lease.fence
    assert "lease" not in clinic.key_names()


def test_a_number_of_shards_that_somebody_wrote_in_another_form_is_reported_and_stops_no_repair(
    clinic: Clinic,
) -> None:
    clinic.push(A)
    clinic.take()
    clinic.dies()
    clinic.do("HSET", "meta", "shards_count", "3.0")
    found = clinic.examine(repair=True)
    assert found["ownerless"].wrong
    assert clinic.do("HEXISTS", "taken", A) == 1


def test_a_server_that_has_just_come_back_charges_nobody_however_many_are_restored(
    clinic: Clinic, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clinic.client, "server_age", lambda: 1.0)
    ids = [job_id for job_id, _ in zip(ids_of(1), range(250), strict=False)]  # more than one call restores
    clinic.queue.push([{"id": job_id} for job_id in ids])
    assert len(clinic.shard().in_flight.take(500).jobs) == 250
    clinic.dies()
    assert not clinic.examine(repair=True)["ownerless"].wrong
    assert (clinic.queue.stats().taken, clinic.queue.stats().due) == (0, 250)
    assert {job.crashes for job in clinic.queue.jobs(limit=1000)} == {0}


def test_what_dies_too_often_is_buried_by_a_repair_too(old_clinic: Clinic) -> None:
    old_clinic.push(A)
    old_clinic.take()
    old_clinic.dies()
    old_clinic.do("HSET", "crashes", A, 2)
    assert not old_clinic.examine(repair=True)["ownerless"].wrong
    assert old_clinic.job().state == "morgue"
    assert "poison" in (old_clinic.job().error or "")


def test_a_shard_that_gets_an_owner_meanwhile_was_only_in_motion(
    clinic: Clinic, monkeypatch: pytest.MonkeyPatch
) -> None:
    clinic.node("heir..")
    clinic.push(A)
    clinic.take()
    clinic.dies()
    assert "ownerless" in clinic.examine()
    monkeypatch.setattr("lowq.operate.integrity.time", PassingTime(lambda: clinic.shard(nonce="heir..")))
    assert "ownerless" not in clinic.examine(patience=30.0, repair=True)
    clinic.shard(nonce="heir..").in_flight.take(0)  # it holds the lease


def test_shards_that_nobody_holds_though_nodes_work_the_queue(clinic: Clinic) -> None:
    clinic.node()
    clinic.push(A)
    for shard in (0, 2):
        clinic.shard(next(ids_of(shard)))
    finding = clinic.finds("shard_unserved", repaired=False)
    assert finding.shards == (1,)
    assert "number_of_nodes" in finding.advice
    clinic.queue.delete(A)
    assert clinic.examine()["shard_unserved"].severity == "warning"


# --- queues ------------------------------------------------------------------------------------------------------


def test_a_queue_that_nobody_works(clinic: Clinic) -> None:
    clinic.push(A)
    for _ in range(2):  # without a node, and with one that is quiet
        found = clinic.finding("queue_unserved")
        assert found is not None
        assert found.what == "1 job in the queue, and no node works it"
        clinic.node(quiet=True)
    clinic.node()
    assert clinic.finding("queue_unserved") is None


def test_a_queue_that_the_registry_does_not_know_is_entered_and_its_ids_are_examined_too(clinic: Clinic) -> None:
    clinic.push(A)
    clinic.push(B)
    clinic.do("ZREM", "due", A)
    clinic.do("HDEL", "payloads", B)
    clinic.command("DEL", queues_key("lowq"))
    for found in (clinic.examine(), clinic.examine("Orders")):
        assert found.keys() == {"queue_unregistered", "orphan_payloads", "due_without_payloads"}
        assert found["queue_unregistered"].what == "the registry does not know the queue, and 1 job in its shards"
    assert not any(finding.wrong for finding in clinic.examine(repair=True).values())
    assert clinic.examine() == {}
    (info,) = clinic.app.queues()
    assert (info.name, info.shards_count) == ("Orders", SHARDS)


def test_a_queue_whose_shards_tell_different_numbers_is_not_entered(clinic: Clinic) -> None:
    clinic.queue.push({"id": number} for number in range(20))
    clinic.do("HSET", "meta", "shards_count", 7)
    clinic.command("DEL", queues_key("lowq"))
    finding = clinic.examine(repair=True)["queue_unregistered"]
    assert (finding.repairable, finding.wrong) == (False, True)


def test_an_entry_of_a_queue_that_cannot_be_read(store_url: str) -> None:
    for entry in ("junk", "[]", '{"shards_count": 0}'):
        with case(entry), new_clinic(store_url) as clinic:
            clinic.command("HSET", queues_key("lowq"), "Orders", entry)
            found = clinic.examine(repair=True)
            assert found.keys() == {"queue_unreadable"}
            assert entry in found["queue_unreadable"].what
            assert clinic.examine("Orders").keys() == {"queue_unreadable"}


# --- nodes -------------------------------------------------------------------------------------------------------


def test_a_node_that_is_dead_or_cannot_be_read_is_forgotten_and_no_other(clinic: Clinic) -> None:
    living = clinic.node("living", queues=())
    clinic.command("HSET", nodes_key("lowq"), "host:1:abcdef", "junk")
    dead = clinic.node("silent", ago=100, queues=())
    found = clinic.examine()
    assert {code: finding.nodes for code, finding in found.items()} == {
        "node_unreadable": ("host:1:abcdef",), "node_silent": (dead,),
    }  # fmt: skip
    assert "1 min" in found["node_silent"].what
    assert not any(finding.wrong for finding in clinic.examine(repair=True).values())
    assert clinic.examine() == {}
    assert {node.name: node.lost for node in clinic.app.nodes() + clinic.app.nodes(lost=True)} == {
        living: False, dead: True,
    }  # fmt: skip
    clinic.command("HSET", nodes_key("lowq"), "host:1:abcdef", f"{4e9} 45 2 {{}}[]")
    assert clinic.examine(repair=True)["node_unreadable"].wrong, "strange details are left"
    clinic.command("HSET", nodes_key("lowq"), "host:1:abcdef", "100 45 2 {}[]")
    assert not clinic.examine(repair=True)["node_unreadable"].wrong, "but not for ever"
    assert clinic.examine() == {}
    seconds, _ = clinic.command("TIME")
    clinic.command("HSET", nodes_key("lowq"), "host:1:abcdef", f"{int(seconds) - 100} 45 2 {{}}[]")
    assert not clinic.examine(repair=True)["node_unreadable"].wrong, "also one that is kept for people"
    assert clinic.examine() == {}


def test_of_very_many_nodes_that_died_the_latest_are_kept_for_people(clinic: Clinic) -> None:
    names = [clinic.node(f"dead{number:02}", ago=3000 - number, queues=()) for number in range(60)]
    clinic.node("long", ago=4000, queues=())
    clinic.examine(repair=True)
    assert [node.name for node in clinic.app.nodes(lost=True)] == names[:9:-1]


def test_a_node_whose_leases_are_gone(clinic: Clinic) -> None:
    clinic.push(A)
    name = clinic.node("frozen", queues=(), shards={"Orders": [1]})
    clinic.shard()
    found = clinic.examine(repair=True)
    assert found.keys() == {"node_without_leases"}
    assert found["node_without_leases"].nodes == (name,)
    clinic.node("tester", queues=(), shards={"Orders": [1]})
    clinic.command("HDEL", nodes_key("lowq"), name)
    assert clinic.examine() == {}


def test_a_node_that_is_known_to_be_dead_owns_no_lease(clinic: Clinic) -> None:
    """What it said last stays in the registry for people, for an hour."""
    clinic.shard(nonce="silent")
    clinic.node("silent", ago=100, queues=())
    assert clinic.finding("lease_unknown") is None, "nobody has noticed yet that it is dead"
    clinic.examine(repair=True)
    assert [node.lost for node in clinic.app.nodes(lost=True)] == [True]
    assert clinic.finding("lease_unknown") is not None


def test_what_is_said_of_queues_leases_and_nodes(store_url: str) -> None:
    late = "the maintenance loop of host:1:tester ran up to {} s late in the last ten minutes"
    rows: list[tuple[str, str, str, Callable[[Clinic], object]]] = [
        ("queue_unused", "ok", "", Clinic.key_names),
        ("paused_in_part", "warning", "the queue is paused only in part: shard 1",
         lambda clinic: run_script(clinic.client, "pause", clinic.key(""), "", "", "1")),
        ("lease_unknown", "warning", "the lease of shard 1 belongs to stranger, which is no node that lives",
         lambda clinic: clinic.shard(nonce="stranger")),
        ("maintenance_late", "warning", late.format("6.0"), lambda clinic: clinic.node(queues=(), late=6.0)),
        ("maintenance_late", "error", late.format("16"), lambda clinic: clinic.node(queues=(), late=16.0)),
        ("version_drift", "warning", "1.0: host:1:living; 1.1: host:1:second",
         lambda clinic: clinic.node("second", queues=(), version="1.1")),
    ]  # fmt: skip
    for code, severity, what, plant in rows:
        with case(code, severity), new_clinic(store_url) as clinic:
            clinic.node("living", queues=(), late=4.9, version="1.0")
            if code != "queue_unused":
                assert clinic.finding(code) is None
            plant(clinic)
            found = clinic.finding(code)
            assert found is not None
            assert (found.severity, what in found.what) == (severity, True)
