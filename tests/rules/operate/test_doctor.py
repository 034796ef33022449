"""The doctor: everything that should not be is planted, found, explained, and repaired as the queue's rules demand."""

import itertools
from contextlib import closing
from typing import Any

import pytest

from lowq import Lowq
from lowq.errors import UnknownQueueError
from lowq.operate.integrity import PAYLOADS, SETS
from lowq.shards.delivery import Failure
from lowq.shards.lease import Lease
from lowq.store.keys import shard_prefix
from tests.rows import case
from tests.rules.operate.clinic import OTHER, SHARDS, TTL, A, B, Clinic, ids_of, new_clinic
from tests.rules.support import report, run_script
from tests.tiers import real_redis_often

VERSIONS = {A: [{"version": 1}, {"version": 2}]}


# --- nothing is wrong --------------------------------------------------------------------------------------------


def test_nothing_is_wrong_with_an_empty_queue_nor_with_jobs_in_every_state(clinic: Clinic) -> None:
    failed, taken, buried, never = itertools.islice(ids_of(1), 4)
    assert clinic.examine() == {}
    clinic.node()
    for shard in range(SHARDS):  # each has an owner
        clinic.shard(next(ids_of(shard)))
    clinic.push_two(failed)
    report(clinic.take(failed), "fail", [Failure(failed, "retry", 0, 3600.0, b"boom")])
    clinic.push(taken)
    clinic.take(taken)
    clinic.push(taken)
    clinic.push(buried)
    clinic.queue.bury(buried)
    clinic.push(never, perform_at=2**34)  # the latest time that there is means no priority
    clinic.queue.pause()
    states = {state: clinic.queue.jobs(state).jobs for state in ("scheduled", "retrying", "due", "taken", "morgue")}
    assert all(states.values()), states
    assert clinic.examine(repair=True) == {}


def test_only_the_queues_named_are_examined_and_an_unknown_one_is_refused(clinic: Clinic) -> None:
    clinic.push(A)
    clinic.app.queue("Mails", 1).push({"id": 1})
    clinic.do("ZREM", "due", A)
    assert clinic.examine("Mails") == {}
    assert clinic.examine("Mails", "Orders").keys() == {"orphan_payloads"}
    with pytest.raises(UnknownQueueError, match="did you mean 'Orders'"):
        clinic.examine("Ordrs")


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
        with closing(app):
            (found,) = [finding for finding in app.examine(patience=0) if finding.code == "orphan_payloads"]
            assert found.count == 1


# --- ids ---------------------------------------------------------------------------------------------------------


def test_payloads_that_nothing_makes_due_become_due_and_keep_their_past(clinic: Clinic) -> None:
    clinic.push(A)
    report(clinic.take(), "fail", [Failure(A, "retry", 4, 3600.0, b"boom")])
    clinic.do("ZREM", "due", A)
    finding = clinic.finds("orphan_payloads", A)
    assert (finding.what, finding.shards) == ("payloads of 1 id wait, and nothing makes them due", (1,))
    job = clinic.job()
    assert (job.state, job.retry_count, job.error) == ("due", 4, "boom")
    assert clinic.handed_over() == {A: [{"version": 1}]}


def test_payloads_in_flight_that_nobody_knows_of_join_newer_ones_when_these_are_due(store_url: str) -> None:
    for newer in ([], [{"version": 3}]):
        with case(newer), new_clinic(store_url) as clinic:
            clinic.push_two(A)
            clinic.take()
            for payload in newer:
                clinic.push(A, payload=payload, score=3, delay=3600)
            due = clinic.do("ZSCORE", "due", A)
            clinic.do("HDEL", "taken", A)
            clinic.finds("orphan_taken_payloads", A)
            assert [payload for payload, _ in clinic.job().payloads] == VERSIONS[A] + newer
            assert clinic.job().state == ("scheduled" if newer else "due")
            assert due in (None, clinic.do("ZSCORE", "due", A))


def test_payloads_in_flight_join_those_of_either_form(store_url: str) -> None:
    for payload in ("x", "x" * 5000):
        with case(payload), new_clinic(store_url) as clinic:
            clinic.push(A, payload="x" * 6000)
            clinic.do("RENAME", f"payloads:{A}", clinic.key(f"taken:payloads:{A}"))
            clinic.do("ZREM", "due", A)
            clinic.push(A, payload=payload, score=2)
            clinic.finds("orphan_taken_payloads", A)
            assert clinic.handed_over() == {A: ["x" * 6000, payload]}


def test_many_payloads_in_flight_wait_again_in_bounded_calls(clinic: Clinic) -> None:
    clinic.push(A)
    pairs = [part for number in range(2000) for part in (number, b'{"version":%d}' % number)]
    clinic.do("ZADD", f"taken:payloads:{A}", *pairs)
    clinic.finds("orphan_taken_payloads", A)
    assert clinic.job().payloads_count == 2000


def test_buried_payloads_that_the_morgue_does_not_list_are_put_back_there(store_url: str) -> None:
    for lost, error in (("reason", "lowq doctor"), ("", "a test")):
        with case(lost), new_clinic(store_url) as clinic:
            clinic.push(A)
            clinic.queue.bury(A, reason="a test")
            clinic.command("DEL", clinic.key("morgue"), *[clinic.key("morgue:errors")] * bool(lost))
            clinic.finds("orphan_morgue_payloads", A)
            job = clinic.job()
            assert (job.state, job.payloads) == ("morgue", [({"version": 1}, 1.0)])
            assert error in (job.error or "")
            assert clinic.queue.kick(A).done == 1


def test_an_entry_in_due_without_payloads_is_removed_with_its_past_and_when_they_would_expire(store_url: str) -> None:
    for payloads in (1, 2):
        with case(payloads), new_clinic(store_url) as clinic:
            for number in range(payloads):
                clinic.push(A, payload=number, ttl=3600)
            report(clinic.take(), "fail", [Failure(A, "retry", 0, 60.0, b"boom")])
            clinic.lose("payloads", A)
            assert "push what they stand for again" in clinic.finds("due_without_payloads", A).advice
            assert clinic.queue.stats().length == 0
            assert clinic.key_names() == {"meta", "pushed", "lease"}


def test_an_entry_in_due_without_payloads_leaves_the_past_of_what_is_in_flight(clinic: Clinic) -> None:
    clinic.push(A)
    report(clinic.take(), "fail", [Failure(A, "solo", -1, 0.0, b"in company")])
    clinic.take()
    clinic.push(A)
    clinic.lose("payloads", A)
    clinic.finds("due_without_payloads", A)
    assert {"taken", "errors", "solo"} <= clinic.key_names()


def test_an_id_in_flight_without_payloads_is_left_to_its_owner_and_removed_without_one(store_url: str) -> None:
    for is_owned in (True, False):
        with case(is_owned), new_clinic(store_url) as clinic:
            clinic.push_two(A)
            clinic.take()
            clinic.do("DEL", f"taken:payloads:{A}")
            if not is_owned:
                clinic.dies()
            found = clinic.examine(repair=True)
            assert found.keys() == {"taken_without_payloads"}
            assert found["taken_without_payloads"].wrong == is_owned
            if is_owned:
                clinic.finish()
                assert clinic.queue.stats().processed == 1
            assert clinic.examine() == {}
            assert clinic.key_names() - {"lease"} == {"meta", "pushed"}


def test_a_buried_id_without_payloads_is_left_as_the_last_trace(clinic: Clinic) -> None:
    clinic.push(A)
    clinic.queue.bury(A)
    clinic.lose("morgue:payloads", A)
    finding = clinic.finds("morgue_without_payloads", A, severity="warning", repaired=False)
    assert "lowq delete Orders ID" in finding.advice
    assert clinic.queue.delete(A).done == 1


def test_an_entry_in_taken_that_nobody_can_read_waits_again(store_url: str) -> None:
    for record in ("", "junk", "1 now -1 0 0"):
        with case(record), new_clinic(store_url) as clinic:
            clinic.push_two(A)
            clinic.take()
            clinic.do("HSET", "taken", A, record)
            clinic.finds("taken_unreadable", A)
            clinic.finish()  # the word of the owner that has performed it is too late
            assert clinic.queue.stats().processed == 0
            assert clinic.handed_over() == VERSIONS


def test_an_unreadable_entry_in_taken_gives_up_the_payload_it_carries_unless_nobody_can_read_it(clinic: Clinic) -> None:
    clinic.push(A)
    clinic.take()
    record = clinic.do("HGET", "taken", A)
    clinic.do("HSET", "taken", A, b'{"version": 1}\n')
    clinic.finds("taken_unreadable", A, repaired=False)
    clinic.do("HSET", "taken", A, b"junk" + record)
    clinic.finds("taken_unreadable", A)
    assert clinic.handed_over() == {A: [{"version": 1}]}


def test_the_counter_of_deliveries_catches_up_with_what_was_handed_out(clinic: Clinic) -> None:
    clinic.push(A)
    for _ in range(3):
        report(clinic.take(), "release", [(A, None)])
    clinic.take()
    clinic.do("HDEL", "meta", "delivery")
    clinic.finds("delivery_behind", A, severity="warning")
    assert clinic.do("HGET", "meta", "delivery") == b"4"
    clinic.finish()
    assert clinic.queue.stats().processed == 1


def test_what_is_left_of_an_id_that_is_nowhere_is_removed(store_url: str) -> None:
    rows: list[tuple[str, str, tuple[Any, ...]]] = [
        ("retries", "ZADD", (3, A)), ("errors", "HSET", (A, "boom")), ("solo", "SADD", (A,)),
        ("crashes", "HSET", (A, 1)), ("morgue:errors", "HSET", (A, "given up")),
    ]  # fmt: skip
    for name, command, values in rows:
        with case(name), new_clinic(store_url) as clinic:
            clinic.push(B)
            clinic.do(command, name, *values)
            clinic.finds("leftovers", A, severity="warning")
            assert name not in clinic.key_names()
            assert clinic.queue.stats().length == 1


def test_what_is_known_of_an_id_in_flight_is_no_leftover_but_a_retry_count_is(clinic: Clinic) -> None:
    clinic.push(A)
    clinic.take()
    clinic.do("HSET", "errors", A, "boom")
    clinic.do("SADD", "solo", A)
    clinic.do("HSET", "crashes", A, "1")
    assert clinic.examine() == {}
    clinic.do("ZADD", "retries", 1, A)
    clinic.finds("leftovers", A, severity="warning")
    assert {"errors", "solo", "crashes"} <= clinic.key_names()


def test_payloads_whose_id_is_not_in_the_index_by_time_expire_again_after_a_repair(clinic: Clinic) -> None:
    for version, ttl in ((1, 3600), (2, 60)):
        clinic.push(A, payload={"version": version}, ttl=ttl)
    listed = clinic.do("ZSCORE", "expires", A)
    clinic.do("ZREM", "expires", A)
    clinic.finds("expiry_unindexed", A, severity="warning")
    assert clinic.do("ZSCORE", "expires", A) == listed


def test_an_id_in_a_shard_that_is_not_its_own_is_left_there(clinic: Clinic) -> None:
    run_script(clinic.client, "push", clinic.key(""), "", "token", "", SHARDS, "2 anew=1", 15, "", OTHER, "1")
    assert clinic.finds("wrong_shard", OTHER, repaired=False).shards == (1,)


@real_redis_often
def test_many_ids_of_any_bytes_are_all_counted_and_mended_and_some_are_named(clinic: Clinic) -> None:
    ids = ["payloads:1", "}:x", "a b\n", "*", "ü", "taken:payloads:", "due", *map(str, range(3000))]
    clinic.queue.push({"id": job_id, "payload": 1} for job_id in ids)
    for shard in range(SHARDS):
        clinic.command("DEL", shard_prefix("lowq", "Orders", shard) + "due")
    found = clinic.examine()["orphan_payloads"]
    assert (found.count, len(found.ids), found.shards) == (3007, 10, (0, 1, 2))
    assert found.what == "payloads of 3,007 ids wait, and nothing makes them due"
    assert clinic.examine(repair=True)["orphan_payloads"].repaired == 3007
    assert clinic.examine() == {}
    assert clinic.queue.stats().due == 3007


def test_payloads_in_no_form_of_theirs_are_left(store_url: str) -> None:
    commands = [("SET", "junk"), ("SET", "x y"), ("HSET", "a", "b")]
    for (command, *words), where in itertools.product(commands, ("payloads:", "taken:payloads:", "morgue:payloads:")):
        with case(command, words, where), new_clinic(store_url) as clinic:
            clinic.push(B)
            clinic.push_two(A)
            if where == "taken:payloads:":
                clinic.take()
            elif where == "morgue:payloads:":
                clinic.queue.bury(A)
            clinic.do("DEL", where + A)
            clinic.do(command, where + A, *words)
            clinic.finds("payloads_unreadable", A, repaired=False)


def test_nothing_is_merged_into_payloads_in_no_form_of_theirs(clinic: Clinic) -> None:
    clinic.push_two(A)
    clinic.take()
    clinic.do("HDEL", "taken", A)
    clinic.do("SET", f"payloads:{A}", "junk")
    found = clinic.examine(repair=True)
    assert found.keys() == {"payloads_unreadable", "orphan_taken_payloads"}
    assert all(finding.wrong for finding in found.values())
    clinic.do("DEL", f"payloads:{A}")
    clinic.finds("orphan_taken_payloads", A)


def test_what_is_right_by_the_time_of_the_repair_is_not_touched(clinic: Clinic) -> None:
    clinic.push(A, delay=3600)
    before = clinic.do("ZSCORE", "due", A)
    for what in (*SETS, *(kind.decode() for kind in PAYLOADS)):
        assert run_script(clinic.client, "repair", clinic.key(""), "", what, A, B) == [0, 0]
    assert clinic.do("ZSCORE", "due", A) == before
    for what in ("lease_endless", "lease_disagrees", "counters", "meta_lost"):
        assert run_script(clinic.client, "repair_shard", clinic.key(""), "", what, str(SHARDS)) == 0


# --- shards ------------------------------------------------------------------------------------------------------


def test_a_key_of_another_type_is_reported_and_the_other_shards_are_examined(clinic: Clinic) -> None:
    clinic.push(A)
    clinic.push(OTHER)
    clinic.command("ZREM", clinic.key("due", OTHER), OTHER)
    clinic.do("DEL", "due")
    clinic.do("SET", "due", "x")
    found = clinic.examine(repair=True)
    assert found.keys() == {"wrong_type", "orphan_payloads"}
    assert found["wrong_type"].what == "keys of shard 1 have a type that lowq never gives them: due"
    assert found["wrong_type"].wrong
    assert found["orphan_payloads"].ids == (OTHER,)


def test_what_only_a_person_can_tell_of_a_shard_is_left(store_url: str) -> None:
    rows: list[tuple[tuple[Any, ...], str, str]] = [
        (("HSET", "meta", "shards_count", 7), "shards_count", "says 3 shards, and the keys of shard 1 say 7"),
        (("HSET", "meta", "clock", 4_000_000_000), "clock_ahead", "ahead"),
        (("HSET", "meta", "fence", 10**17), "lease_disagrees", ""),
        (("SET", "notes", "mine"), "unknown_keys", "the queue has 1 key that lowq does not know: notes"),
    ]
    for damage, code, what in rows:
        with case(code), new_clinic(store_url) as clinic:
            clinic.push(A)
            clinic.shard()
            clinic.do(*damage)
            before = clinic.do("HGETALL", "meta"), clinic.key_names()
            found = clinic.examine(repair=True)
            assert found.keys() == {code}
            assert found[code].wrong
            assert what in found[code].what
            assert (clinic.do("HGETALL", "meta"), clinic.key_names()) == before


def test_shards_beyond_the_number_are_reported(store_url: str) -> None:
    beyond = shard_prefix("lowq", "Orders", 9)
    for severity, jobs in (("error", "1 job"), ("warning", "0 jobs")):
        with case(jobs), new_clinic(store_url) as clinic:
            clinic.push(A)
            run_script(clinic.client, "push", beyond, "", "token", "", 10, "2 anew=1", 15, "", "1", "1")
            if severity == "warning":
                clinic.command("DEL", beyond + "due", beyond + "payloads")
            finding = clinic.finds("shard_beyond", severity=severity, repaired=False)
            assert finding.shards == (9,)
            assert finding.what.endswith(f"also holds shard 9, with {jobs}")
            clinic.command("DEL", beyond + "due", beyond + "meta")
            clinic.command("ZADD", beyond + "payloads:2", 1, "x")  # only payloads are left of it
            assert clinic.examine().keys() == {"shard_beyond", "orphan_payloads"}


def test_a_lost_meta_gets_its_number_of_shards(clinic: Clinic) -> None:
    clinic.push(A)
    clinic.do("DEL", "meta")
    clinic.finds("meta_lost")
    assert clinic.do("HGET", "meta", "shards_count") == b"3"


def test_what_a_shard_uses_is_noted_again_when_meta_was_lost(store_url: str) -> None:
    rows: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("priority", {"priority": 3}, {}),
        ("ttl", {"ttl": 3600}, {}),
        ("priority", {"priority": 9, "perform_at": 2**33 - 1}, {}),
        ("debounce", {}, {"debounce": 100, "max_wait": 1000}),
    ]
    for word, more, options in rows:
        with case(word, more), new_clinic(store_url) as clinic:
            clinic.app.queue("Orders", SHARDS, **options).push({"id": A, **more})
            noted = clinic.do("HGET", "meta", "features")
            assert word in noted.decode().split()
            clinic.do("HDEL", "meta", "features")
            finding = clinic.finds("features_lost")
            assert finding.what == f"jobs in shard 1 use what `features` in `meta` does not say: {word}"
            assert clinic.do("HGET", "meta", "features") == noted


def test_a_lease_without_an_end_gets_one_that_its_owner_can_live_with(clinic: Clinic) -> None:
    shard = clinic.shard()
    rows = [(("HSET", "meta", "lease_ttl", "500000"), 500_000), (("HDEL", "meta", "lease_ttl"), 600_000)]
    for command, lease_ttl in rows:
        clinic.do("PERSIST", "lease")
        clinic.do(*command)
        clinic.finds("lease_endless")
        assert lease_ttl - 90_000 < clinic.do("PTTL", "lease") <= lease_ttl
    shard.in_flight.take(0)  # still the owner


def test_the_holder_of_the_lease_becomes_the_owner(clinic: Clinic) -> None:
    clinic.push(A)
    shard = clinic.take()
    assert shard.lease.current is not None
    clinic.do("HSET", "meta", "owner", "somebody", "fence", "7")
    clinic.finds("lease_disagrees", severity="warning")
    assert int(clinic.do("HGET", "meta", "fence")) == shard.lease.current.fence
    clinic.dies()
    lease = shard.lease.acquire(TTL)
    assert isinstance(lease, Lease)
    assert lease.resumed


def test_counters_that_are_no_numbers_begin_anew(clinic: Clinic) -> None:
    clinic.push(A)
    clinic.do("HSET", "meta", "buried", "many", "deleted", "-1", "processed", "5")
    finding = clinic.finds("counters", severity="warning")
    assert finding.what == "counters of shard 1 are no numbers: buried, deleted"
    assert clinic.queue.stats().processed == 5
    clinic.queue.bury(A)
    assert clinic.queue.stats().buried == 1


@pytest.mark.parametrize("store_url", ["redis"], indirect=True)
def test_ids_with_several_long_payloads_are_stored_in_the_large_form(clinic: Clinic) -> None:
    for number in range(30):
        if number == 20:
            assert clinic.finding("listpack") is None
        for letter in "xy":
            clinic.push(str(number), payload=f"{number}{letter * (20 if number < 20 else 100)}")
    found = clinic.finding("listpack")
    assert found is not None
    assert found.what.startswith("10 of 30 payload keys")
    clinic.queue.delete(str(number) for number in range(20, 30))
    clinic.do("ZADD", f"payloads:{A}", *(x for n in range(200) for x in (n, f"p{n}")))
    assert clinic.finding("listpack") is None
