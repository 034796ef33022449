"""The doctor: everything that should not be is planted, found, explained, and repaired as the queue's rules demand.

Damage is done by raw commands, as people and other programs do it.
"""

import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from lowq import Lowq
from lowq.broker.delivery import Failure
from lowq.broker.lease import Lease
from lowq.broker.shard import Shard
from lowq.codec import load_payload
from lowq.doctor import KINDS, Finding
from lowq.doctor.jobs import PAYLOADS, SETS
from lowq.errors import ScriptError, UnknownQueueError
from lowq.sharding import shard_of
from lowq.store.keys import nodes_key, queues_key, shard_prefix
from tests.leases import run_out
from tests.rows import case
from tests.tiers import real_redis_often

SHARDS = 3
TTL = 600.0
#: Findings about the server that the tests happen to run on.
OF_SERVERS = {"redis", "eviction", "persistence", "memory", "clock", "replication"}


class Clinic:
    """The queue "Orders" in a store that is emptied, with a doctor that does not wait."""

    def __init__(self, url: str) -> None:
        self.app = Lowq(redis_url=url)
        self.client = self.app.client
        self.queue = self.app.queue("Orders", SHARDS)
        self.command = self.client.command
        self.command("FLUSHALL")  # of the row before
        self.app.register("Orders", SHARDS)
        self._shards: dict[tuple[str, int], Shard] = {}

    def push(self, job_id: str, **more: Any) -> None:
        self.queue.push({"id": job_id, "payload": {"version": 1}, "score": 1, **more})

    def key(self, job_id: str, name: str) -> str:
        """A key of the shard of an id."""
        return shard_prefix("lowq", "Orders", shard_of(job_id.encode(), SHARDS)) + name

    def shard(self, job_id: str, nonce: str = "tester", **options: Any) -> Shard:
        """The shard of an id, with a lease."""
        index = shard_of(job_id.encode(), SHARDS)
        shard = self._shards.get((nonce, index))
        if shard is None:
            shard = self._shards[nonce, index] = Shard(
                self.client, "lowq", "Orders", index,
                shards_count=SHARDS, nonce=nonce, load_payload=load_payload, **options,
            )  # fmt: skip
        if shard.lease.current is None:
            assert isinstance(shard.lease.acquire(TTL), Lease)
        return shard

    def take(self, job_id: str, nonce: str = "tester") -> Shard:
        shard = self.shard(job_id, nonce)
        assert job_id in [item.id for item in shard.in_flight.take(100).jobs]
        return shard

    def dies(self, job_id: str) -> None:
        """The owner of the shard is dead, and its lease has run out."""
        run_out(self.client, self.key(job_id, ""))

    def node(
        self, nonce: str = "tester", *, queues: tuple[str, ...] = ("Orders",), ago: float = 0.0, **says: Any
    ) -> str:
        """A node in the registry, as its last heartbeat put it there."""
        name = f"host:1:{nonce}"
        seconds, microseconds = self.command("TIME")
        now = int(seconds) + int(microseconds) / 1e6 - ago
        details = json.dumps({"queues": list(queues), "version": "1", **says})
        self.command("HSET", nodes_key("lowq"), name, f"{now:.6f} 45 2 {{}}{details}")
        return name

    def examine(self, *queues: str, patience: float = 0.0, **options: Any) -> dict[str, Finding]:
        """code -> finding, of all that is wrong or was, but of the server."""
        findings = self.app.examine(*queues, patience=patience, **options)
        assert all(finding.code in OF_SERVERS or finding.code in KINDS for finding in findings)
        return {
            finding.code: finding
            for finding in findings
            if finding.severity != "ok" and finding.code not in {*OF_SERVERS, "queue_unserved", "lease_unknown"}
        }

    def finds(self, code: str, *ids: str, severity: str = "error", repaired: bool = True) -> Finding:
        """The only thing that is wrong; a repair repairs it or leaves it, and a second one finds it repaired."""
        found = self.examine()
        assert found.keys() == {code}
        finding = found[code]
        assert (finding.severity, finding.ids, finding.queue) == (severity, ids, "Orders")
        assert finding.count == max(len(ids), len(finding.shards))
        assert finding.wrong
        assert finding.cause
        assert finding.effect
        assert finding.advice
        assert "{" not in finding.what + finding.cause + finding.effect + finding.advice
        after = self.examine(repair=True)
        assert after.keys() == {code}
        if repaired:
            assert finding.repairable
            assert after[code].repaired == finding.count
            assert not after[code].wrong
            assert self.examine() == {}
        else:
            assert after[code] == finding
            assert self.examine() == found
        return finding


@contextmanager
def new_clinic(store_url: str) -> Iterator[Clinic]:
    clinic = Clinic(store_url)
    try:
        yield clinic
    finally:
        clinic.app.close()


@pytest.fixture
def clinic(store_url: str) -> Iterator[Clinic]:
    with new_clinic(store_url) as clinic:
        yield clinic


#: Ids of one shard.
A, B, C = [str(number) for number in range(100) if shard_of(str(number).encode(), SHARDS) == 1][:3]


# --- nothing is wrong --------------------------------------------------------------------------------------------


def test_nothing_is_wrong_with_jobs_in_every_state(clinic: Clinic) -> None:
    ids = iter(str(number) for number in range(1000) if shard_of(str(number).encode(), SHARDS) == 1)
    clinic.node()
    for other in range(SHARDS):  # each has an owner
        clinic.shard(next(str(number) for number in range(100) if shard_of(str(number).encode(), SHARDS) == other))
    retrying, exhausted, solo, crashed, in_flight = (next(ids) for _ in range(5))
    for job_id in (retrying, exhausted, solo):
        clinic.push(job_id)
        clinic.push(job_id, payload={"version": 2}, score=2)
    shard = clinic.take(retrying)
    shard.in_flight.fail(
        [
            Failure(retrying, "retry", 0, 3600.0, b"boom"),
            Failure(exhausted, "exhausted", 0, 0.0, b"given up"),
            Failure(solo, "solo", -1, 0.0, b"in company"),
        ]
    )
    clinic.command("ZADD", clinic.key(exhausted, "due"), 4e9, exhausted)
    clinic.command("ZADD", clinic.key(solo, "due"), 4e9, solo)
    clinic.push(crashed)
    clinic.take(crashed)
    clinic.dies(crashed)
    heir = clinic.shard(crashed, nonce="tester2")
    assert heir.lease.current is not None
    assert heir.lease.current.restored == 1
    clinic.command("ZADD", clinic.key(crashed, "due"), 4e9, crashed)
    clinic.push(next(ids), delay=3600)
    clinic.push(in_flight)
    clinic.take(in_flight, nonce="tester2")
    clinic.push(in_flight)
    buried = next(ids)
    clinic.push(buried)
    clinic.queue.bury(buried)
    clinic.push(buried)
    clinic.queue.pause()
    states = {state: clinic.queue.jobs(state).jobs for state in ("scheduled", "retrying", "due", "taken", "morgue")}
    assert all(states.values()), states
    assert clinic.examine(repair=True) == {}
    assert {finding.severity for finding in clinic.app.examine() if finding.code not in OF_SERVERS} <= {"ok"}


def test_nothing_is_wrong_with_an_empty_store(clinic: Clinic) -> None:
    assert clinic.examine() == {}


def test_nothing_is_wrong_with_a_queue_that_was_drained(clinic: Clinic) -> None:
    clinic.push(A)
    shard = clinic.take(A)
    shard.in_flight.finish([A])
    shard.in_flight.take(0)
    assert clinic.examine() == {}


def test_a_queue_that_does_not_exist_is_refused(clinic: Clinic) -> None:
    clinic.push(A)
    with pytest.raises(UnknownQueueError, match="did you mean 'Orders'"):
        clinic.examine("Ordrs")


def test_only_the_queues_named_are_examined(clinic: Clinic) -> None:
    clinic.push(A)
    clinic.app.queue("Mails", 1).push({"id": 1})
    clinic.command("ZREM", clinic.key(A, "due"), A)
    assert clinic.examine("Mails") == {}
    assert clinic.examine("Mails", "Orders").keys() == {"orphan_payloads"}


def test_progress_tells_how_far_it_is(clinic: Clinic) -> None:
    clinic.queue.push({"id": number} for number in range(300))
    seen: list[tuple[int, int]] = []
    clinic.examine(on_progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    done, total = seen[-1]
    assert 600 <= done <= total <= done + 10


def test_the_namespace_is_taken_literally(store_url: str) -> None:
    apps = [Lowq(redis_url=store_url, namespace=namespace) for namespace in ("a*c", "abc")]
    for app in apps:
        app.queue("Orders", 1).push({"id": 1})
        app.client.command("ZREM", shard_prefix(app.config.namespace, "Orders", 0) + "due", "1")
    for app in apps:
        (found,) = [finding for finding in app.examine(patience=0) if finding.code == "orphan_payloads"]
        assert found.count == 1
        app.close()


# --- ids ---------------------------------------------------------------------------------------------------------


def test_payloads_that_nothing_makes_due_become_due(clinic: Clinic) -> None:
    clinic.push(A, delay=3600)
    clinic.command("ZREM", clinic.key(A, "due"), A)
    finding = clinic.finds("orphan_payloads", A)
    assert finding.what == "payloads of 1 id wait, and nothing makes them due"
    assert finding.shards == (1,)
    job = clinic.queue.peek(A)
    assert job is not None
    assert (job.state, job.payloads) == ("due", [({"version": 1}, 1.0)])
    assert handed_over(clinic.shard(A)) == {A: [{"version": 1}]}


def test_payloads_that_become_due_again_keep_what_is_known_of_their_retries(clinic: Clinic) -> None:
    clinic.push(A)
    clinic.take(A).in_flight.fail([Failure(A, "retry", 4, 0.0, b"boom")])
    clinic.command("ZREM", clinic.key(A, "due"), A)
    clinic.finds("orphan_payloads", A)
    job = clinic.queue.peek(A)
    assert job is not None
    assert (job.retry_count, job.error) == (4, "boom")


def test_payloads_in_flight_that_nobody_knows_of_wait_again_merged_with_newer_ones(clinic: Clinic) -> None:
    clinic.push(A)
    clinic.push(A, payload={"version": 2}, score=2)  # two have a key; a single one travels in the record
    clinic.take(A)
    clinic.push(A, payload={"version": 3}, score=3)
    clinic.command("HDEL", clinic.key(A, "taken"), A)
    clinic.finds("orphan_taken_payloads", A)
    assert handed_over(clinic.shard(A, "tester")) == {A: [{"version": 1}, {"version": 2}, {"version": 3}]}


def test_payloads_in_flight_that_nobody_knows_of_wait_again_alone(clinic: Clinic) -> None:
    clinic.push(A)
    clinic.push(A, payload={"version": 2}, score=2)  # two have a key; a single one travels in the record
    clinic.take(A)
    clinic.command("DEL", clinic.key(A, "taken"))
    clinic.finds("orphan_taken_payloads", A)
    assert handed_over(clinic.shard(A)) == {A: [{"version": 1}, {"version": 2}]}


def test_many_payloads_in_flight_wait_again_in_bounded_calls(clinic: Clinic) -> None:
    clinic.push(A)
    members_ = [part for number in range(2000) for part in (number, b'{"version":%d}' % number)]
    clinic.command("ZADD", clinic.key(A, f"taken:payloads:{A}"), *members_)
    clinic.finds("orphan_taken_payloads", A)
    job = clinic.queue.peek(A)
    assert job is not None
    assert job.payloads_count == 2000


def test_buried_payloads_that_the_morgue_does_not_list_are_put_back_there(clinic: Clinic) -> None:
    clinic.push(A)
    clinic.queue.bury(A, reason="a test")
    clinic.command("ZREM", clinic.key(A, "morgue"), A)
    clinic.finds("orphan_morgue_payloads", A)
    job = clinic.queue.peek(A)
    assert job is not None
    assert (job.state, job.error, job.payloads) == ("morgue", "a test", [({"version": 1}, 1.0)])


def test_buried_payloads_without_a_reason_get_one(clinic: Clinic) -> None:
    clinic.push(A)
    clinic.queue.bury(A)
    clinic.command("DEL", clinic.key(A, "morgue"), clinic.key(A, "morgue:errors"))
    clinic.finds("orphan_morgue_payloads", A)
    job = clinic.queue.peek(A)
    assert job is not None
    assert "lowq doctor" in (job.error or "")
    assert clinic.queue.kick(A).done == 1


def test_an_entry_in_due_without_payloads_is_removed_with_its_past(clinic: Clinic) -> None:
    clinic.push(A)
    clinic.take(A).in_flight.fail([Failure(A, "retry", 0, 60.0, b"boom")])
    clinic.command("DEL", clinic.key(A, f"payloads:{A}"))
    finding = clinic.finds("due_without_payloads", A)
    assert "push what they stand for again" in finding.advice
    assert clinic.queue.stats().length == 0
    assert shard_keys(clinic, A) == {"meta", "pushed", "lease"}


def test_an_entry_in_due_without_payloads_is_removed_with_when_they_would_expire(store_url: str) -> None:
    for payloads in (1, 2):
        with case(payloads), new_clinic(store_url) as clinic:
            for number in range(payloads):
                clinic.push(A, payload=number, ttl=3600)
            clinic.command("DEL", clinic.key(A, f"payloads:{A}"))
            prefix = clinic.key(A, "")
            assert clinic.client.run("repair", prefix, "", "due", A) == [1]
            assert shard_keys(clinic, A) == {"meta", "pushed"}


def test_an_entry_in_due_without_payloads_leaves_the_past_of_what_is_in_flight(clinic: Clinic) -> None:
    clinic.push(A)
    clinic.take(A).in_flight.fail([Failure(A, "solo", -1, 0.0, b"in company")])
    clinic.take(A)
    clinic.push(A)
    clinic.command("DEL", clinic.key(A, f"payloads:{A}"))
    clinic.finds("due_without_payloads", A)
    assert {"taken", "errors", "solo"} <= shard_keys(clinic, A)


def test_an_id_in_flight_without_payloads_is_left_to_its_owner(clinic: Clinic) -> None:
    clinic.push(A)
    clinic.push(A, payload={"version": 2}, score=2)  # two have a key; a single one travels in the record
    shard = clinic.take(A)
    clinic.command("DEL", clinic.key(A, f"taken:payloads:{A}"))
    found = clinic.examine(repair=True)
    assert found.keys() == {"taken_without_payloads"}
    assert found["taken_without_payloads"].wrong
    shard.in_flight.finish([A])
    shard.in_flight.take(0)
    assert clinic.queue.stats().processed == 1
    assert clinic.examine() == {}


def test_an_id_in_flight_without_payloads_and_owner_is_removed(clinic: Clinic) -> None:
    clinic.push(A)
    clinic.push(A, payload={"version": 2}, score=2)  # two have a key; a single one travels in the record
    clinic.take(A)
    clinic.command("DEL", clinic.key(A, f"taken:payloads:{A}"))
    clinic.dies(A)
    found = clinic.examine(repair=True)
    assert found.keys() == {"taken_without_payloads"}
    assert not found["taken_without_payloads"].wrong
    assert clinic.examine() == {}
    assert shard_keys(clinic, A) == {"meta", "pushed"}


def test_a_buried_id_without_payloads_is_left_as_the_last_trace(clinic: Clinic) -> None:
    clinic.push(A)
    clinic.queue.bury(A, reason="a test")
    clinic.command("DEL", clinic.key(A, f"morgue:payloads:{A}"))
    finding = clinic.finds("morgue_without_payloads", A, severity="warning", repaired=False)
    assert "lowq delete Orders ID" in finding.advice
    assert clinic.queue.delete(A).done == 1
    assert clinic.examine() == {}


def test_an_entry_in_taken_that_nobody_can_read_waits_again(store_url: str) -> None:
    for record in ("", "junk", "1 now -1 0 0", "x 1 -1 0 0"):
        with case(record), new_clinic(store_url) as clinic:
            clinic.push(A)
            clinic.push(A, payload={"version": 2}, score=2)  # two have a key; a single one travels in the record
            shard = clinic.take(A)
            clinic.command("HSET", clinic.key(A, "taken"), A, record)
            clinic.finds("taken_unreadable", A)
            shard.in_flight.finish([A])  # the word of the owner that has performed it is too late
            shard.in_flight.take(0)
            assert clinic.queue.stats().processed == 0
            assert handed_over(shard) == {A: [{"version": 1}, {"version": 2}]}


def test_an_unreadable_entry_in_taken_gives_up_the_payload_it_carries(clinic: Clinic) -> None:
    clinic.push(A)
    shard = clinic.take(A)
    record = clinic.command("HGET", clinic.key(A, "taken"), A)
    clinic.command("HSET", clinic.key(A, "taken"), A, b"junk" + record)
    clinic.finds("taken_unreadable", A)
    shard.in_flight.take(0)
    assert handed_over(shard) == {A: [{"version": 1}]}


def test_an_entry_in_taken_that_carries_what_nobody_can_read_is_left(clinic: Clinic) -> None:
    clinic.push(A)
    clinic.take(A)
    clinic.command("HSET", clinic.key(A, "taken"), A, b'{"version": 1}\n')
    clinic.finds("taken_unreadable", A, repaired=False)


def test_an_unreadable_entry_does_stop_the_shard_until_it_is_mended(clinic: Clinic) -> None:
    clinic.push(A)
    clinic.push(A, payload={"version": 2}, score=2)  # two have a key; a single one travels in the record
    clinic.take(A)
    clinic.command("HSET", clinic.key(A, "taken"), A, "junk")
    clinic.dies(A)
    with pytest.raises(ScriptError):
        clinic.shard(B, nonce="heir")
    assert clinic.examine(repair=True)["taken_unreadable"].repaired == 1
    assert handed_over(clinic.shard(B, nonce="heir")) == {A: [{"version": 1}, {"version": 2}]}


def test_the_counter_of_deliveries_catches_up_with_what_was_handed_out(clinic: Clinic) -> None:
    clinic.push(A)
    for _ in range(3):
        shard = clinic.take(A)
        shard.in_flight.release([(A, None)])
    shard = clinic.take(A)
    clinic.command("HDEL", clinic.key(A, "meta"), "delivery")
    clinic.finds("delivery_behind", A, severity="warning")
    assert clinic.command("HGET", clinic.key(A, "meta"), "delivery") == b"4"
    shard.in_flight.finish([A])
    shard.in_flight.take(0)
    assert clinic.queue.stats().processed == 1


def test_what_is_left_of_an_id_that_is_nowhere_is_removed(store_url: str) -> None:
    rows: list[tuple[str, str, tuple[Any, ...]]] = [
        ("retries", "ZADD", (3, A)),
        ("errors", "HSET", (A, "boom")),
        ("solo", "SADD", (A,)),
        ("crashes", "HSET", (A, 1)),
        ("morgue:errors", "HSET", (A, "given up")),
    ]
    for name, command, values in rows:
        with case(name), new_clinic(store_url) as clinic:
            clinic.push(B)
            clinic.command(command, clinic.key(A, name), *values)
            clinic.finds("leftovers", A, severity="warning")
            assert name not in shard_keys(clinic, A)
            assert clinic.queue.stats().length == 1


def test_payloads_whose_id_is_not_in_the_index_by_time_expire_again_after_a_repair(clinic: Clinic) -> None:
    for version, ttl in ((1, 3600), (2, 60)):
        clinic.push(A, payload={"version": version}, ttl=ttl)
    listed = clinic.command("ZSCORE", clinic.key(A, "expires"), A)
    clinic.command("ZREM", clinic.key(A, "expires"), A)
    clinic.finds("expiry_unindexed", A, severity="warning")
    assert clinic.command("ZSCORE", clinic.key(A, "expires"), A) == listed


def test_what_is_known_of_an_id_in_flight_is_no_leftover_but_a_retry_count_is(clinic: Clinic) -> None:
    clinic.push(A)
    clinic.take(A)
    clinic.command("HSET", clinic.key(A, "errors"), A, "boom")
    clinic.command("SADD", clinic.key(A, "solo"), A)
    clinic.command("HSET", clinic.key(A, "crashes"), A, "1")
    assert clinic.examine() == {}
    clinic.command("ZADD", clinic.key(A, "retries"), 1, A)
    clinic.finds("leftovers", A, severity="warning")
    assert {"errors", "solo", "crashes"} <= shard_keys(clinic, A)


def test_an_id_in_a_shard_that_is_not_its_own_is_left_there(clinic: Clinic) -> None:
    other = next(str(number) for number in range(100) if shard_of(str(number).encode(), SHARDS) == 2)
    clinic.client.run("push", clinic.key(A, ""), "", "token", "", SHARDS, "2 anew=1", 15, "", other, "1")
    finding = clinic.finds("wrong_shard", other, repaired=False)
    assert finding.shards == (1,)


@real_redis_often
def test_many_ids_are_all_counted_and_mended_and_some_are_named(clinic: Clinic) -> None:
    clinic.queue.push({"id": number, "payload": number} for number in range(3000))
    for shard in range(SHARDS):
        clinic.command("DEL", shard_prefix("lowq", "Orders", shard) + "due")
    found = clinic.examine()["orphan_payloads"]
    assert (found.count, len(found.ids), found.shards) == (3000, 10, (0, 1, 2))
    assert found.what == "payloads of 3,000 ids wait, and nothing makes them due"
    assert clinic.examine(repair=True)["orphan_payloads"].repaired == 3000
    assert clinic.examine() == {}
    assert clinic.queue.stats().due == 3000


def test_ids_of_any_bytes_are_found_and_mended(clinic: Clinic) -> None:
    ids = ["payloads:1", "}:x", "a b\n", "*", "ü", "taken:payloads:", "due"]
    for job_id in ids:
        clinic.push(job_id)
        clinic.command("ZREM", clinic.key(job_id, "due"), job_id)
    assert sorted(clinic.examine()["orphan_payloads"].ids) == sorted(ids)
    clinic.examine(repair=True)
    assert clinic.examine() == {}
    assert clinic.queue.stats().length == len(ids)


def test_payloads_in_no_form_of_theirs_are_left(store_url: str) -> None:
    commands = [("SET", "junk"), ("SET", "x y"), ("SET", ""), ("HSET", "a", "b")]
    for command, where in itertools.product(commands, ("payloads:", "taken:payloads:", "morgue:payloads:")):
        with case(command, where), new_clinic(store_url) as clinic:
            clinic.push(B)
            clinic.push(A)
            clinic.push(A, payload={"version": 2}, score=2)
            if where == "taken:payloads:":
                clinic.take(A)
            elif where == "morgue:payloads:":
                clinic.queue.bury(A)
            key = clinic.key(A, where + A)
            clinic.command("DEL", key)
            clinic.command(command[0], key, *command[1:])
            clinic.finds("payloads_unreadable", A, repaired=False)


def test_nothing_is_merged_into_payloads_in_no_form_of_theirs(clinic: Clinic) -> None:
    clinic.push(A)
    clinic.push(A, payload={"version": 2}, score=2)  # two have a key; a single one travels in the record
    clinic.take(A)
    clinic.command("HDEL", clinic.key(A, "taken"), A)
    clinic.command("SET", clinic.key(A, f"payloads:{A}"), "junk")
    found = clinic.examine(repair=True)
    assert found.keys() == {"payloads_unreadable", "orphan_taken_payloads"}
    assert all(finding.wrong for finding in found.values())
    clinic.command("DEL", clinic.key(A, f"payloads:{A}"))
    clinic.finds("orphan_taken_payloads", A)


def test_payloads_in_either_form_wait_again(store_url: str) -> None:
    for payload in ("x", "x" * 5000):
        with case(payload), new_clinic(store_url) as clinic:
            clinic.push(A, payload=payload)
            key, taken = clinic.key(A, f"payloads:{A}"), clinic.key(A, f"taken:payloads:{A}")
            clinic.command("RENAME", key, taken)
            clinic.command("ZREM", clinic.key(A, "due"), A)
            clinic.push(A, payload="newer", score=2)
            clinic.finds("orphan_taken_payloads", A)
            assert handed_over(clinic.shard(A)) == {A: [payload, "newer"]}


def test_what_is_right_by_the_time_of_the_repair_is_not_touched(clinic: Clinic) -> None:
    clinic.push(A, delay=3600)
    before = clinic.command("ZSCORE", clinic.key(A, "due"), A)
    prefix = clinic.key(A, "")
    for what in (*SETS, *(kind.decode() for kind in PAYLOADS)):
        assert clinic.client.run("repair", prefix, "", what, A, B) == [0, 0]
    assert clinic.command("ZSCORE", clinic.key(A, "due"), A) == before
    for what in ("lease_endless", "lease_disagrees", "counters"):
        assert clinic.client.run("repair_shard", prefix, "", what, "1000") == 0
    assert clinic.client.run("repair_shard", prefix, "", "meta_lost", str(SHARDS)) == 0


# --- shards ------------------------------------------------------------------------------------------------------


def test_a_key_of_another_type_is_reported_and_the_other_shards_are_examined(clinic: Clinic) -> None:
    clinic.push(A)
    other = next(str(number) for number in range(100) if shard_of(str(number).encode(), SHARDS) == 2)
    clinic.push(other)
    clinic.command("ZREM", clinic.key(other, "due"), other)
    clinic.command("DEL", clinic.key(A, "due"))
    clinic.command("SET", clinic.key(A, "due"), "x")
    found = clinic.examine(repair=True)
    assert found.keys() == {"wrong_type", "orphan_payloads"}
    assert found["wrong_type"].what == "keys of shard 1 have a type that lowq never gives them: due"
    assert found["wrong_type"].wrong
    assert found["orphan_payloads"].ids == (other,)


def test_another_number_of_shards_is_reported(clinic: Clinic) -> None:
    clinic.push(A)
    clinic.command("HSET", clinic.key(A, "meta"), "shards_count", 7)
    finding = clinic.finds("shards_count", repaired=False)
    assert finding.what == "the registry says 3 shards, and the keys of shard 1 say 7"


def test_shards_beyond_the_number_are_reported(store_url: str) -> None:
    for empty in (False, True):
        with case(empty), new_clinic(store_url) as clinic:
            clinic.push(A)
            beyond = shard_prefix("lowq", "Orders", 9)
            clinic.client.run("push", beyond, "", "token", "", 10, "2 anew=1", 15, "", "1", "1")
            if empty:
                clinic.command("DEL", beyond + "due", beyond + "payloads:1")
            finding = clinic.finds("shard_beyond", severity="warning" if empty else "error", repaired=False)
            assert finding.shards == (9,)
            jobs = "0 jobs" if empty else "1 job"
            assert finding.what.endswith(f"also holds shard 9, with {jobs}")


def test_a_shard_beyond_the_number_of_which_only_payloads_are_left_is_reported(clinic: Clinic) -> None:
    clinic.push(A)
    clinic.command("ZADD", shard_prefix("lowq", "Orders", 9) + "payloads:1", 1, "x")
    assert clinic.examine().keys() == {"shard_beyond", "orphan_payloads"}


def test_a_clock_that_is_ahead_is_left(clinic: Clinic) -> None:
    clinic.push(A)
    now = int(clinic.command("TIME")[0])
    clinic.command("HSET", clinic.key(A, "meta"), "clock", now + 90)
    found = clinic.examine(repair=True)
    assert found.keys() == {"clock_ahead"}
    assert found["clock_ahead"].wrong
    assert "1 min" in found["clock_ahead"].what
    assert clinic.command("HGET", clinic.key(A, "meta"), "clock") == str(now + 90).encode()


def test_a_lost_meta_gets_its_number_of_shards(clinic: Clinic) -> None:
    clinic.push(A)
    clinic.command("DEL", clinic.key(A, "meta"))
    clinic.finds("meta_lost")
    assert clinic.command("HGET", clinic.key(A, "meta"), "shards_count") == b"3"


def test_what_a_shard_uses_is_noted_again_when_meta_was_lost(store_url: str) -> None:
    rows: list[tuple[str, dict[str, Any]]] = [
        ("priority", {"priority": 3}),
        ("ttl", {"ttl": 3600}),
        ("priority", {"priority": 9, "perform_at": 2**33 - 1}),
    ]
    for word, more in rows:
        with case(word, more), new_clinic(store_url) as clinic:
            clinic.push(A, **more)
            noted = clinic.command("HGET", clinic.key(A, "meta"), "features")
            assert word in noted.decode().split()
            clinic.command("HDEL", clinic.key(A, "meta"), "features")
            finding = clinic.finds("features_lost")
            assert finding.what == f"jobs in shard 1 use what `features` in `meta` does not say: {word}"
            assert clinic.command("HGET", clinic.key(A, "meta"), "features") == noted


def test_debounced_jobs_are_noted_again_when_meta_was_lost(clinic: Clinic) -> None:
    queue = clinic.app.queue("Orders", SHARDS, debounce=100, max_wait=1000)
    queue.push({"id": A})
    clinic.command("HDEL", clinic.key(A, "meta"), "features")
    assert clinic.finds("features_lost").what.endswith(": debounce")


def test_an_urgent_job_is_handed_out_again_after_the_repair_of_a_lost_meta(clinic: Clinic) -> None:
    clinic.push(A, priority=3, ttl=3600)
    clinic.command("DEL", clinic.key(A, "meta"))
    shard = clinic.shard(A)
    assert shard.in_flight.take(10).jobs == [], "its time seems to be centuries away"
    shard.lease.surrender()
    found = clinic.examine(repair=True)
    assert found.keys() == {"features_lost"}
    assert found["features_lost"].repaired == 1
    clinic.take(A)


def test_a_time_that_means_never_is_no_priority(clinic: Clinic) -> None:
    clinic.push(A, perform_at=2**34)
    clinic.push(B)
    assert clinic.examine() == {}


def test_a_lease_without_an_end_gets_one_that_its_owner_can_live_with(clinic: Clinic) -> None:
    shard = clinic.shard(A)
    clinic.command("PERSIST", clinic.key(A, "lease"))
    clinic.finds("lease_endless")
    clinic.command("PERSIST", clinic.key(A, "lease"))
    clinic.command("HSET", clinic.key(A, "meta"), "lease_ttl", "15000")
    clinic.examine(repair=True)
    assert 14_000 < clinic.command("PTTL", clinic.key(A, "lease")) <= 15_000
    clinic.command("PERSIST", clinic.key(A, "lease"))
    clinic.command("HDEL", clinic.key(A, "meta"), "lease_ttl")
    clinic.examine(repair=True)
    assert 590_000 < clinic.command("PTTL", clinic.key(A, "lease")) <= 600_000
    shard.in_flight.take(0)  # still the owner


def test_the_holder_of_the_lease_becomes_the_owner(clinic: Clinic) -> None:
    clinic.push(A)
    shard = clinic.take(A)
    assert shard.lease.current is not None
    clinic.command("HSET", clinic.key(A, "meta"), "owner", "somebody", "fence", "7")
    clinic.finds("lease_disagrees", severity="warning")
    fence = clinic.command("HGET", clinic.key(A, "meta"), "fence")
    assert int(fence) == shard.lease.current.fence
    clinic.dies(A)
    lease = shard.lease.acquire(TTL)
    assert isinstance(lease, Lease)
    assert lease.resumed


def test_a_fence_never_goes_back(clinic: Clinic) -> None:
    clinic.shard(A)
    high = str(10**17)
    clinic.command("HSET", clinic.key(A, "meta"), "fence", high)
    found = clinic.examine(repair=True)
    assert found["lease_disagrees"].wrong
    assert clinic.command("HGET", clinic.key(A, "meta"), "fence") == high.encode()


def test_counters_that_are_no_numbers_begin_anew(clinic: Clinic) -> None:
    clinic.push(A)
    clinic.command("HSET", clinic.key(A, "meta"), "buried", "many", "processed", "5")
    finding = clinic.finds("counters", severity="warning")
    assert finding.what == "counters of shard 1 are no numbers: buried"
    assert clinic.queue.stats().processed == 5
    clinic.queue.bury(A)
    assert clinic.queue.stats().buried == 1


def test_keys_that_lowq_does_not_have_are_left(clinic: Clinic) -> None:
    clinic.push(A)
    clinic.command("SET", clinic.key(A, "notes"), "mine")
    found = clinic.examine(repair=True)
    assert found.keys() == {"unknown_keys"}
    assert found["unknown_keys"].what == "the queue has 1 key that lowq does not know: notes"
    assert clinic.command("GET", clinic.key(A, "notes")) == b"mine"


# --- who works what ----------------------------------------------------------------------------------------------


def test_what_a_dead_owner_left_in_flight_is_restored_as_a_new_owner_would(clinic: Clinic) -> None:
    clinic.push(A)
    clinic.take(A).in_flight.fail([Failure(A, "retry", 2, 0.0, b"boom")])
    shard = clinic.take(A)
    assert shard.lease.current is not None
    clinic.push(A, payload={"version": 2}, score=2)
    clinic.dies(A)
    finding = clinic.examine()["ownerless"]
    assert finding.what == "1 job in flight, and nobody holds the lease of shard 1"
    assert (finding.severity, finding.shards, finding.repairable) == ("error", (1,), True)
    clinic.client.server_age = lambda: 1e9  # type: ignore[method-assign]  # the tests' own has just been started
    repaired = clinic.examine(repair=True)["ownerless"]
    assert not repaired.wrong
    assert clinic.examine() == {}
    job = clinic.queue.peek(A)
    assert job is not None
    assert job.state in ("retrying", "due")  # its pause may be over
    assert (job.retry_count, job.crashes, job.error) == (2, 1, "boom")
    assert [payload["version"] for payload, _ in job.payloads] == [1, 2]
    assert clinic.command("SISMEMBER", clinic.key(A, "solo"), A) == 1
    meta = clinic.command("HMGET", clinic.key(A, "meta"), "owner", "fence")
    assert meta[0] is None
    assert int(meta[1]) > shard.lease.current.fence
    assert clinic.command("EXISTS", clinic.key(A, "lease")) == 0


def test_so_are_more_than_one_call_restores(clinic: Clinic) -> None:
    ids = [job_id for job_id in map(str, range(2000)) if clinic.key(job_id, "") == clinic.key(A, "")][:250]
    clinic.queue.push([{"id": job_id} for job_id in ids])
    shard = clinic.shard(A)
    assert len(shard.in_flight.take(500).jobs) == 250
    clinic.dies(A)
    assert not clinic.examine(repair=True)["ownerless"].wrong
    assert clinic.queue.stats().taken == 0
    assert clinic.queue.stats().length == 250


def test_a_server_that_has_just_come_back_charges_nobody(clinic: Clinic) -> None:
    clinic.push(A)
    clinic.take(A)
    clinic.dies(A)
    clinic.client.server_age = lambda: 1.0  # type: ignore[method-assign]
    assert not clinic.examine(repair=True)["ownerless"].wrong
    job = clinic.queue.peek(A)
    assert job is not None
    assert (job.state, job.crashes) == ("due", 0)


def test_what_dies_too_often_is_buried_by_a_repair_too(clinic: Clinic) -> None:
    clinic.push(A)
    clinic.take(A)
    clinic.dies(A)
    clinic.command("HSET", clinic.key(A, "crashes"), A, 2)
    clinic.client.server_age = lambda: 1e9  # type: ignore[method-assign]
    assert not clinic.examine(repair=True)["ownerless"].wrong
    job = clinic.queue.peek(A)
    assert job is not None
    assert job.state == "morgue"
    assert "poison" in (job.error or "")


def test_a_shard_that_gets_an_owner_meanwhile_was_only_in_motion(
    clinic: Clinic, monkeypatch: pytest.MonkeyPatch
) -> None:
    clinic.node("heir..")
    clinic.push(A)
    clinic.take(A)
    clinic.dies(A)
    heirs: list[Shard] = []

    class Clock:
        """Stands for the module `time`: it passes while somebody sleeps, and only then."""

        now = 0.0

        def monotonic(self) -> float:
            return self.now

        def sleep(self, seconds: float) -> None:
            self.now += seconds
            if not heirs:
                heirs.append(clinic.shard(A, nonce="heir.."))

    assert "ownerless" in clinic.examine()
    monkeypatch.setattr("lowq.doctor.members.time", Clock())
    assert "ownerless" not in clinic.examine(patience=30.0, repair=True)
    heirs[0].in_flight.take(0)  # it holds the lease


def test_shards_that_nobody_holds_though_nodes_work_the_queue(clinic: Clinic) -> None:
    clinic.node()
    clinic.push(A)
    clinic.shard(next(str(number) for number in range(100) if shard_of(str(number).encode(), SHARDS) == 0))
    clinic.shard(next(str(number) for number in range(100) if shard_of(str(number).encode(), SHARDS) == 2))
    finding = clinic.finds("shard_unserved", repaired=False)
    assert finding.shards == (1,)
    assert "number_of_nodes" in finding.advice
    clinic.queue.delete(A)
    assert clinic.examine()["shard_unserved"].severity == "warning"


def test_a_queue_that_nobody_works(clinic: Clinic) -> None:
    def unserved() -> list[str]:
        return [finding.what for finding in clinic.app.examine(patience=0) if finding.code == "queue_unserved"]

    clinic.push(A)
    assert unserved() == ["1 job in the queue, and no node works it"]
    clinic.node(quiet=True)
    assert unserved() == ["1 job in the queue, and no node works it"]
    clinic.node()
    assert unserved() == []


def test_a_queue_that_the_registry_does_not_know_is_entered(clinic: Clinic) -> None:
    clinic.push(A)
    clinic.command("DEL", queues_key("lowq"))
    finding = clinic.examine()["queue_unregistered"]
    assert finding.what == "the registry does not know the queue, and 1 job in its shards"
    assert not clinic.examine(repair=True)["queue_unregistered"].wrong
    assert clinic.examine() == {}
    (info,) = clinic.app.queues()
    assert (info.name, info.shards_count) == ("Orders", SHARDS)


def test_ids_of_a_queue_that_the_registry_does_not_know_are_examined_too(clinic: Clinic) -> None:
    clinic.push(A)
    clinic.push(B)
    clinic.command("ZREM", clinic.key(A, "due"), A)
    clinic.command("DEL", clinic.key(B, f"payloads:{B}"), queues_key("lowq"))
    expected = {"queue_unregistered", "orphan_payloads", "due_without_payloads"}
    assert clinic.examine().keys() == expected
    assert clinic.examine("Orders").keys() == expected
    assert not any(finding.wrong for finding in clinic.examine(repair=True).values())
    assert clinic.examine() == {}


def test_a_queue_whose_shards_tell_different_numbers_is_not_entered(clinic: Clinic) -> None:
    clinic.queue.push({"id": number} for number in range(20))
    clinic.command("HSET", clinic.key(A, "meta"), "shards_count", 7)
    clinic.command("DEL", queues_key("lowq"))
    finding = clinic.examine(repair=True)["queue_unregistered"]
    assert (finding.repairable, finding.wrong) == (False, True)


def test_a_queue_that_was_never_used_is_no_problem(clinic: Clinic) -> None:
    clinic.app.register("Mails", 2)
    (finding,) = [finding for finding in clinic.app.examine(patience=0) if finding.queue == "Mails"]
    assert (finding.code, finding.severity, finding.wrong) == ("queue_unused", "ok", False)


def test_a_queue_that_is_paused_in_part(clinic: Clinic) -> None:
    clinic.push(A)
    clinic.client.run("pause", clinic.key(A, ""), "", "", "1")
    finding = clinic.finds("paused_in_part", severity="warning", repaired=False)
    assert finding.what == "the queue is paused only in part: shard 1"
    clinic.queue.pause()
    assert clinic.examine() == {}


def test_an_entry_of_a_queue_that_cannot_be_read(store_url: str) -> None:
    for entry in ("junk", "[]", '{"shards_count": "3"}', '{"shards_count": 0}', '{"options": {}}'):
        with case(entry), new_clinic(store_url) as clinic:
            clinic.command("HSET", queues_key("lowq"), "Orders", entry)
            found = clinic.examine(repair=True)
            assert found.keys() == {"queue_unreadable"}
            assert entry in found["queue_unreadable"].what
            assert clinic.examine("Orders").keys() == {"queue_unreadable"}


def test_an_entry_of_a_node_that_cannot_be_read(clinic: Clinic) -> None:
    living = clinic.node("living", queues=())
    clinic.command("HSET", nodes_key("lowq"), "host:1:abcdef", "junk")
    found = clinic.examine()
    assert found.keys() == {"node_unreadable"}
    assert found["node_unreadable"].nodes == ("host:1:abcdef",)
    assert not clinic.examine(repair=True)["node_unreadable"].wrong
    assert clinic.examine() == {}
    assert clinic.command("HKEYS", nodes_key("lowq")) == [living.encode()]


def test_strange_details_of_a_node_are_left(clinic: Clinic) -> None:
    clinic.command("HSET", nodes_key("lowq"), "host:1:abcdef", f"{4e9} 45 2 {{}}[]")
    assert clinic.examine(repair=True)["node_unreadable"].wrong


def test_a_node_that_went_without_goodbye_is_forgotten(clinic: Clinic) -> None:
    name = clinic.node(ago=100)
    found = clinic.examine()
    assert found.keys() == {"node_silent"}
    assert found["node_silent"].nodes == (name,)
    assert "1 min 40 s" in found["node_silent"].what
    assert not clinic.examine(repair=True)["node_silent"].wrong
    assert clinic.command("EXISTS", nodes_key("lowq")) == 0
    assert clinic.examine() == {}


def test_a_repair_forgets_no_node_that_lives(clinic: Clinic) -> None:
    clinic.node("silent", ago=100, queues=())
    living = clinic.node("living", queues=())
    clinic.examine(repair=True)
    assert clinic.command("HKEYS", nodes_key("lowq")) == [living.encode()]


def test_a_node_whose_leases_are_gone(clinic: Clinic) -> None:
    clinic.push(A)
    name = clinic.node("frozen", queues=(), shards={"Orders": [1]})
    clinic.shard(A)
    found = clinic.examine(repair=True)
    assert found.keys() == {"node_without_leases"}
    assert found["node_without_leases"].nodes == (name,)
    clinic.node("tester", queues=(), shards={"Orders": [1]})
    clinic.command("HDEL", nodes_key("lowq"), name)
    assert clinic.examine() == {}


def test_a_lease_of_somebody_who_is_no_node(clinic: Clinic) -> None:
    def unknown() -> list[Finding]:
        return [finding for finding in clinic.app.examine(patience=0) if finding.code == "lease_unknown"]

    clinic.shard(A, nonce="stranger")
    (finding,) = unknown()
    assert finding.what == "the lease of shard 1 belongs to stranger, which is no node that lives"
    assert (finding.severity, finding.shards) == ("warning", (1,))
    clinic.node("strang")
    assert unknown() == []


def test_nodes_of_different_versions(clinic: Clinic) -> None:
    clinic.node("first.", queues=(), version="1.0")
    assert clinic.examine() == {}
    clinic.node("second", queues=(), version="1.1")
    found = clinic.examine()
    assert found.keys() == {"version_drift"}
    assert found["version_drift"].what.endswith("1.0: host:1:first.; 1.1: host:1:second")


def test_a_keeper_that_runs_late(clinic: Clinic) -> None:
    found = {}
    for late in (4.9, 6.0, 16.0):
        clinic.node(queues=(), late=late)
        found[late] = clinic.examine().get("maintenance_late")
    assert found[4.9] is None
    assert found[6.0] is not None
    assert (found[6.0].severity, found[6.0].nodes) == ("warning", ("host:1:tester",))
    assert found[6.0].what == "the maintenance loop of host:1:tester ran up to 6.0 s late in the last ten minutes"
    assert found[16.0] is not None
    assert found[16.0].severity == "error"


# --- memory ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("store_url", ["redis"], indirect=True)
def test_ids_with_several_long_payloads_are_stored_in_the_large_form(clinic: Clinic) -> None:
    def listpack() -> list[str]:
        return [finding.what for finding in clinic.app.examine(patience=0) if finding.code == "listpack"]

    for number in range(20):
        clinic.push(str(number), payload=f"{number}{'x' * 20}")
        clinic.push(str(number), payload=f"{number}{'y' * 20}")
    assert listpack() == []
    for number in range(20, 30):
        clinic.push(str(number), payload=f"{number}{'x' * 100}")
        clinic.push(str(number), payload=f"{number}{'y' * 100}")
    assert len(listpack()) == 1
    assert listpack()[0].startswith("10 of 30 payload keys")
    clinic.queue.delete(str(number) for number in range(20, 30))
    clinic.command("ZADD", clinic.key(A, f"payloads:{A}"), *(x for n in range(200) for x in (n, f"p{n}")))
    assert listpack() == []


# --- aids --------------------------------------------------------------------------------------------------------


def handed_over(shard: Shard) -> dict[str, list[Any]]:
    return {item.id: item.payloads for item in shard.in_flight.take(100).jobs}


def shard_keys(clinic: Clinic, job_id: str) -> set[str]:
    """Names of all keys of the shard of an id."""
    prefix = clinic.key(job_id, "")
    names = (raw.decode() for raw in clinic.command("KEYS", "*"))
    return {name.removeprefix(prefix) for name in names if name.startswith(prefix)}
