"""`keep_finished`: what is kept of ids that finished, and of attempts that failed."""

import json
import time
import zlib
from collections.abc import Iterator
from contextlib import closing
from itertools import count
from typing import Any

import pytest
from click.testing import CliRunner
from starlette.testclient import TestClient

import lowq
import lowq.testing
import lowq_web
from lowq.cli import main
from lowq.store.shard_operations import Finished, split_attempts
from tests.rows import case
from tests.rules.support import (
    NOW,
    REMAINS,
    ShardRig,
    emptied_app,
    emptied_rig,
    exhausted,
    handed,
    job,
    report,
    retry,
    solo,
)
from tests.rules.web.shown import Reader, parse
from tests.waiting import NEVER, until

#: What a holder says of a queue that keeps for 100 s.
KEEPS = "100000 text host:1:abc"


@pytest.fixture
def rig(store_url: str) -> Iterator[ShardRig]:
    rig = ShardRig(store_url, keeps=KEEPS)
    yield rig
    rig.close()


def in_a_line(error: BaseException) -> str:
    return f"ValueError: {error}"


def perform(rig: ShardRig, ids: list[str], now: float = NOW) -> None:
    """The ids are taken, and finish."""
    shard = rig.shard
    for start in range(0, len(ids), 500):
        rig.push(*(job(job_id, 1) for job_id in ids[start : start + 500]), now=now)
        shard.in_flight.take(500, now + 1)
        shard.in_flight.finish(ids[start : start + 500])
        shard.in_flight.take(0, now + 1)


def attempts_of(rig: ShardRig, job_id: str, key: str = "errors") -> tuple[bytes, list[Any]]:
    return split_attempts(rig.client.command("HGET", rig.prefix + key, job_id) or b"")


def test_an_id_that_finished_is_kept_by_the_script_that_acknowledges_it_with_its_figures(rig: ShardRig) -> None:
    shard = rig.own()
    rig.push(job("a", 1), job("a", 2), job("b", 1))
    shard.in_flight.take(10, NOW + 1)
    shard.in_flight.finish(["a", "b"])
    rig.lose_reply(shard.in_flight.take_call(0, NOW + 3))
    kept = {"a": f"{NOW + 3:.3f} 2.000 2 host:1:abc", "b": f"{NOW + 3:.3f} 2.000 1 host:1:abc"}
    assert rig.read("finished") == kept
    shard.in_flight.take(0, NOW + 4)  # it is repeated, and finds nothing to acknowledge
    assert rig.read("finished") == kept
    assert rig.count("processed") == 2


def test_nothing_is_kept_of_what_another_delivery_or_owner_has(rig: ShardRig) -> None:
    shard = rig.own()
    rig.push(job("a"))
    shard.in_flight.take(10, NOW)
    shard.in_flight.finish(["a"])
    rig.crash("second")
    with pytest.raises(lowq.LeaseLost):
        shard.in_flight.take(0, NOW)
    assert "finished" not in rig.names()


def test_what_is_too_old_or_too_much_goes_in_two_steps(rig: ShardRig) -> None:
    rig.own()
    perform(rig, ["a"])
    perform(rig, ["b"])
    assert set(rig.read("finished")) == {"a", "b"}
    rig.client.command("PEXPIRE", rig.prefix + "finished", 99_000)  # 101 s have passed
    perform(rig, ["c"])
    assert (set(rig.read("finished")), set(rig.read("finished:before"))) == ({"c"}, {"a", "b"})
    for key, most in (("finished", 200_000), ("finished:before", 100_000)):
        assert 0 < rig.client.command("PTTL", rig.prefix + key) <= most
    many = [f"id{number}" for number in range(5000)]
    perform(rig, many)
    assert len(rig.read("finished")) == 5001
    perform(rig, ["d"])
    assert set(rig.read("finished")) == {"d"}
    assert len(rig.read("finished:before")) == 5001


def test_the_last_five_attempts_go_where_the_error_of_the_job_goes(store_url: str) -> None:
    ends: list[tuple[str, Any, bytes]] = [
        ("fail", [exhausted("a", b"Traceback\n  line\nGone: 9\n")], b"Gone: 9"),
        ("bury", [("a", b"too bad", ())], b"too bad"),
    ]
    for verb, verdict, last in ends:
        with case(verb), emptied_rig(store_url) as made:
            made.shard = made.owner("first", keeps=KEEPS)
            shard = made.own()
            made.push(job("a", 1))
            for number in range(9):
                shard.in_flight.take(1, NOW + 10 * number)
                failed = retry("a", number, 0.0, b"Traceback\n  line\nGone: %d" % number)
                report(shard, "fail", [solo("a") if number == 5 else failed], NOW + 10 * number + 1)
            said, attempts = attempts_of(made, "a")
            assert said == b"Traceback\n  line\nGone: 8"
            words = [b"Gone: 4", b"in company", b"Gone: 6", b"Gone: 7", b"Gone: 8"]
            assert [attempt[3] for attempt in attempts] == words
            assert attempts[-1][1:3] == (1.0, "host:1:abc")
            shard.in_flight.take(1, NOW + 100)
            report(shard, verb, verdict, NOW + 103)
            said, attempts = attempts_of(made, "a", "morgue:errors")
            assert said == verdict[0][1 if verb == "bury" else 4]
            assert [attempt[3] for attempt in attempts] == [*words[1:], last]
            assert attempts[-1][1] == 3.0


def test_poison_keeps_how_it_failed_before_and_a_job_that_finishes_nothing(rig: ShardRig) -> None:
    shard = rig.own()
    rig.push(job("a"), job("b"))
    shard.in_flight.take(10, NOW + 1)
    report(shard, "fail", [retry("a", 0, 0.0, b"first"), retry("b", 0, 9.0, b"first")], NOW)
    for _ in range(3):
        shard.in_flight.take(1, NOW)
        report(shard, "release", [("a", 0.0)], NOW, crashed=True)
    said, attempts = attempts_of(rig, "a", "morgue:errors")
    assert said.startswith(b"poison: ")
    assert [attempt[3] for attempt in attempts] == [b"first"]
    shard.in_flight.take(1, NOW + 10)
    shard.in_flight.finish(["b"])
    shard.in_flight.take(0, NOW + 10)
    assert "errors" not in rig.names()


def test_a_key_of_another_type_does_not_stop_an_acknowledgement(rig: ShardRig) -> None:
    shard = rig.own()
    rig.push(job("a", 1), job("a", 2), job("b", 1))
    shard.in_flight.take(10, NOW + 1)
    key = rig.prefix + "taken:payloads:a"
    rig.client.command("DEL", key)
    rig.client.command("HSET", key, "foreign", "1")
    shard.in_flight.finish(["a", "b"])
    shard.in_flight.take(0, NOW + 1)
    assert rig.count("processed") == 2
    assert {job_id: entry.split()[2] for job_id, entry in rig.read("finished").items()} == {"a": "0", "b": "1"}
    assert rig.names() <= {*REMAINS, "finished"}


def test_a_job_that_is_buried_without_a_reason_shows_its_last_error(rig: ShardRig) -> None:
    shard = rig.own()
    rig.push(job("a", 1))
    shard.in_flight.take(10, NOW)
    report(shard, "fail", [retry("a", 0, 0.0, b"no answer")], NOW)
    shard.in_flight.take(10, NOW)
    report(shard, "bury", [("a", b"", ())], NOW)
    said, attempts = attempts_of(rig, "a", "morgue:errors")
    assert (said, [attempt[3] for attempt in attempts]) == (b"no answer", [b"no answer", b""])


@pytest.mark.slow  # measures a time
def test_many_attempts_whose_errors_have_many_spaces_keep_redis_for_a_moment_only(rig: ShardRig) -> None:
    shard, attempts = rig.own(), count()

    def takes() -> float:
        attempt = next(attempts)
        ids = [f"{attempt}-{number}" for number in range(200)]  # those of an attempt before wait for their retry
        rig.push(*(job(job_id) for job_id in ids))
        assert set(handed(shard.in_flight.take(200, NOW + 1))) == set(ids)
        began = time.monotonic()
        report(shard, "fail", [retry(job_id, 0, 100.0, b"of" + b" " * 1022 + b"spaces ") for job_id in ids], NOW)
        return time.monotonic() - began

    until(lambda: takes() < 1.0, "quick report: it takes 0.02 s, and with the square of the spaces 4 s")


def test_what_others_have_written_stays_an_error_and_is_no_attempt(rig: ShardRig) -> None:
    shard = rig.own()
    mark = b"\0attempts"
    for said in (b"", mark, b"99999999" + mark, b"x00000009" + mark, b"abc00000003" + mark):
        with case(said):
            error, attempts = split_attempts(said)
            assert said.startswith(error)
            assert attempts == []
            rig.push(job("a"))
            rig.client.command("HSET", rig.prefix + "errors", "a", said)
            shard.in_flight.take(10, NOW)
            report(shard, "fail", [retry("a", 0, 0.0, b"new")], NOW)
            error, attempts = attempts_of(rig, "a")
            assert (error, attempts[-1][3]) == (b"new", b"new")
            shard.in_flight.take(10, NOW)
            shard.in_flight.finish(["a"])
            shard.in_flight.take(0, NOW)
    for entry in (b"", b"x", b"1 2", b"nan 1 1 n", b"\xff \xff \xff \xff", b"1 inf 1e99 n"):
        with case(entry):
            found = Finished.of(entry)
            assert found is None or (found.at, found.seconds, found.payloads) == (1.0, found.seconds, 0)


def test_handles_say_it_and_how_an_error_is_encoded_counts(store_url: str) -> None:
    dumps: list[tuple[Any, Any, str, str]] = [
        (None, None, "short", "ValueError: short"),
        (None, None, "x" * 1999, "ValueError: " + "x" * 188),
        (None, None, "-" + "é" * 600, "ValueError: -" + "é" * 93),
        (lambda text: zlib.compress(text.encode()), lambda data: zlib.decompress(data).decode(), "", "ValueError: "),
        (lambda text: text.encode() * 80, bytes.decode, "short", ""),
    ]  # fmt: skip
    for dump, load, message, shown in dumps:
        codec = {} if dump is None else {"dump_error": dump, "load_error": load, "format_error": in_a_line}
        with emptied_app(store_url):
            pass
        with case(message, shown), closing(lowq.Lowq(redis_url=store_url, **codec)) as app:

            @app.worker(keep_finished=NEVER, max_retry_count=0, batch_size=2, shards_count=1)
            def work(payloads_by_id: dict[str, list[Any]], message: str = message) -> None:
                if "bad" in payloads_by_id:
                    raise ValueError(message)

            handle = app.queue("work")
            handle.push([{"id": "good", "payload": 1}, {"id": "good", "payload": 2}, {"id": "bad"}])
            lowq.testing.drain(work)
            last = handle.why("good").finished
            assert last is not None
            assert (last.payloads, last.node) == (2, "drain")
            assert "it finished" in handle.why("good").detail
            (buried,) = handle.places("bad")
            assert [attempt.error for attempt in buried.attempts] == [shown] * 2  # in company, and alone
            assert buried.attempts[0].node == "drain"
            assert "attempts" not in (buried.error or "")
            handle.push("good")
            assert "; it finished" in handle.why("good").detail
            assert handle.describe("good").why.finished == last
            handle.kick("bad")
            assert handle.places("bad")[0].attempts == ()


def test_consumers_keep_it_too_a_reshard_takes_attempts_along_and_forgets_what_finished(app: lowq.Lowq) -> None:
    queue = app.queue("mail", 2, keep_finished=100)
    queue.push([{"id": "good"}, {"id": "bad"}])
    with queue.consumer(session="s") as consumer:
        for _ in range(2):
            (taken,) = consumer.take(timeout=NEVER)
            if taken.id == "good":
                taken.ack()
            else:
                taken.fail("no such address", delay=NEVER)
    finished = queue.why("good").finished
    assert finished is not None
    assert finished.node.startswith("session:")
    queue.reshard(3)
    (waiting,) = queue.places("bad")
    assert [attempt.error for attempt in waiting.attempts] == ["no such address"]
    assert queue.why("good").finished is None
    assert not any("finished" in key.decode() for key in app.client.command("KEYS", "*"))


def test_a_dropped_queue_leaves_nothing_and_a_queue_without_it_keeps_nothing(app: lowq.Lowq) -> None:
    every: list[dict[str, Any]] = [{"keep_finished": 100}, {}]
    for options in every:
        with case(options):

            @app.worker(queue_name="Kept", **options)
            def work(payloads_by_id: dict[str, list[Any]]) -> None:
                pass

            app.queue("Kept").push([{"id": number} for number in range(20)])
            lowq.testing.drain(work)
            kept = [key for key in app.client.command("KEYS", "*") if b"finished" in key]
            assert bool(kept) == bool(options)
            app.queue("Kept").drop()
            assert not [key for key in app.client.command("KEYS", "*") if b"Kept" in key]


@pytest.mark.parametrize("store_url", ["memory"], indirect=True)
def test_people_are_shown_both_everywhere(app: lowq.Lowq, store_url: str) -> None:
    @app.worker(queue_name="Shown", keep_finished=NEVER, max_retry_count=0, shards_count=1)
    def work(payloads_by_id: dict[str, list[Any]]) -> None:
        if "bad" in payloads_by_id:
            raise ValueError("no <such> customer")

    work.push("good", 1)
    work.push("bad")
    lowq.testing.drain(work)

    def shown(*words: str) -> str:
        return CliRunner().invoke(main, [*words, "--redis-url", store_url]).stdout

    (told,) = json.loads(shown("why", "Shown", "good", "--json"))["why"]
    assert (told["finished"]["payloads"], told["finished"]["node"]) == (1, "drain")
    assert "it finished" in shown("why", "Shown", "good")
    lines = shown("peek", "Shown", "bad").splitlines()
    assert lines[-2] == "  last attempts:"
    assert lines[-1].endswith(": ValueError: no <such> customer")
    assert " on drain, " in lines[-1]
    client = TestClient(lowq_web.create_app(app), base_url="http://127.0.0.1")
    good, bad = (client.get(f"/api/v1/queues/Shown/job?id={job_id}").json() for job_id in ("good", "bad"))
    assert good["why"]["finished"] == told["finished"]
    assert good["jobs"] == []
    (attempt,) = bad["jobs"][0]["attempts"]
    assert (attempt["node"], attempt["error"]) == ("drain", "ValueError: no <such> customer")
    page = Reader(client).page("/queues/Shown/job?id=bad")
    assert "on drain" in next(part for part in page.every("ol") if "attempts" in part.classes).text
    client.cookies.clear()
    page = parse(client.get("/queues/Shown/job?id=good").text)
    assert "on drain" in page.facts["Finished last"].text
    assert "1 payload" in page.facts["Finished last"].text
