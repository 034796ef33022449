"""Debounce: a fresh id runs when nothing came for it for a while, and after max_wait at the latest."""

import time
from collections.abc import Callable
from typing import Any

import pytest

import lowq
import lowq.testing
from lowq.queue import Queue
from lowq.store.keys import shard_prefix
from tests.rows import case
from tests.rules.support import NOW, ShardRig, emptied_rig, job, report, retry

WORDS = " debounce=2.0 max_wait=5.0"


def push(rig: ShardRig, job_id: str, now: float, **options: Any) -> float:
    """When the id is due, in seconds after `NOW`."""
    rig.push(job(job_id, **options), now=NOW + now, words=WORDS)
    due: dict[str, float] = rig.read("due")
    return round(due[job_id] - NOW, 6)


def test_a_fresh_id_is_due_when_nothing_came_for_a_while_and_after_max_wait_at_the_latest(rig: ShardRig) -> None:
    assert [push(rig, "x", at) for at in (0, 1.5, 3, 4.5)] == [2, 3.5, 5, 5]
    assert rig.read("debounced") == {"x": NOW + 5}
    assert push(rig, "y", 4.5) == 6.5, "ids do not wait for each other"
    assert [push(rig, "x", at) for at in (5, 60)] == [5, 5], "what is due keeps its place"


def test_all_payloads_of_one_call_count_as_one_and_a_repeated_call_as_none(rig: ShardRig) -> None:
    rig.push(*(job("x", n) for n in range(50)), job("y"), words=WORDS)
    rig.push(job("z"), token="one", words=WORDS)
    rig.push(job("z"), token="one", words=WORDS, now=NOW + 1, repeat=True)
    assert rig.read("due") == {"x": NOW + 2, "y": NOW + 2, "z": NOW + 2}


def test_an_id_that_was_given_a_time_keeps_it(rig: ShardRig) -> None:
    assert push(rig, "x", 0, perform_at=NOW + 60) == push(rig, "x", 1) == 60
    assert push(rig, "y", 0, delay=60.0) == push(rig, "y", 1) == 60
    assert rig.read("debounced") == {}
    push(rig, "z", 0)
    assert push(rig, "z", 1, delay=60) == 3, "which puts off like any other when the id waits"


def test_an_id_that_comes_back_keeps_its_time(store_url: str) -> None:
    def fail(rig: ShardRig) -> None:
        report(rig.shard, "fail", [retry("x", delay=30)], NOW + 3)

    def release(rig: ShardRig) -> None:
        report(rig.shard, "release", [("x", 10)], NOW + 3)

    rows: list[tuple[Callable[[ShardRig], object], float]] = [
        (fail, 33), (release, 13), (lambda rig: rig.crash("second", NOW + 3), 3),
    ]  # fmt: skip
    for come_back, due in rows:
        with case(due), emptied_rig(store_url) as rig:
            push(rig, "x", 0)
            rig.own().in_flight.take(1, NOW + 3)
            assert rig.read("debounced") == {}
            push(rig, "x", 3)  # meanwhile
            assert rig.read("debounced") == {"x": NOW + 8}
            come_back(rig)
            assert rig.read("debounced") == {}
            comes_back_at = round(rig.read("due")["x"] - NOW, 6)
            assert due <= comes_back_at <= due + 1
            assert push(rig, "x", 3.1) == comes_back_at


def test_when_the_servers_clock_steps_back_max_wait_counts_from_then(rig: ShardRig) -> None:
    push(rig, "x", 0)
    assert push(rig, "x", -100) <= -98
    assert rig.read("debounced") == {"x": NOW - 95}
    assert push(rig, "x", -96) <= -95


def test_somebody_who_decides_about_it_ends_the_wait(store_url: str) -> None:
    rows: list[tuple[str, list[Any]]] = [
        ("perform_now", ["", "", "x"]), ("delete", ["", "", "", "x"]), ("bury", ["", "", "", "", "x", "", 0]),
    ]  # fmt: skip
    for script, args in rows:
        with case(script), emptied_rig(store_url) as rig:
            push(rig, "x", 0)
            rig.run(script, repr(NOW), *args)
            assert rig.read("debounced") == {}
            push(rig, "x", 1)
            rig.run("kick", repr(NOW + 1), "", "", "x")
            if script == "bury":
                assert (rig.read("due"), rig.read("debounced")) == ({"x": NOW + 1}, {})


def test_without_the_option_what_waits_keeps_its_time_and_the_shard_forgets(rig: ShardRig) -> None:
    push(rig, "x", 0)
    rig.push(job("x"), job("y"), now=NOW + 1)
    assert rig.read("due")["x"] == NOW + 2
    assert rig.meta("features") == " debounce "
    rig.own().in_flight.take(5, NOW + 3)
    rig.push(job("z"), now=NOW + 3)
    assert rig.meta("features") is None


# --- through the queue ---


@pytest.fixture
def queue(app: lowq.Lowq) -> Queue:
    return app.queue("mail", 1, debounce=100, max_wait=300)


def test_a_worker_gets_all_that_came_in_one_run(app: lowq.Lowq) -> None:
    seen: list[Any] = []

    @app.worker(debounce=100, shards_count=1)
    def sync(payloads_by_id: dict[str, list[Any]]) -> None:
        seen.append(payloads_by_id)

    for payload in (1, 2, 3):
        sync.perform_async({"id": "x", "payload": payload})
    lowq.testing.drain(sync)
    assert seen == []
    lowq.testing.drain(sync, now=time.time() + 101)
    assert seen == [{"x": [1, 2, 3]}]


def test_why_says_that_it_waits_for_more(queue: Queue) -> None:
    queue.push({"id": "x"})
    why = queue.why("x")
    assert (why.state, why.reason) == ("scheduled", "debounced")
    assert why.detail.startswith("debounced: due in 1 min ")
    assert why.detail.endswith(" at the latest")
    queue.perform_now("x")
    assert queue.why("x").reason != "debounced"


ENDS: list[Callable[[Queue], object]] = [Queue.clear, lambda queue: queue.delete("x"), Queue.drop]


def test_nothing_is_left_of_what_is_gone(app: lowq.Lowq) -> None:
    for number, end in enumerate(ENDS):
        with case(number):
            queue = app.queue(f"mail{number}", 1, debounce=100, max_wait=300)
            queue.push({"id": "x"})
            prefix = shard_prefix("lowq", f"mail{number}", 0)
            end(queue)
            assert app.client.command("EXISTS", prefix + "debounced", key=prefix) == 0


def test_the_doctor_removes_what_is_left_of_ids_that_are_nowhere(app: lowq.Lowq, queue: Queue) -> None:
    queue.push({"id": "x"})
    assert not [finding for finding in app.examine("mail") if finding.code == "leftovers"]
    prefix = shard_prefix("lowq", "mail", 0)
    app.client.command("ZADD", prefix + "debounced", "5", "gone", key=prefix)
    (finding,) = [finding for finding in app.examine("mail", repair=True) if finding.code == "leftovers"]
    assert finding.count == finding.repaired == 1
    assert app.client.command("ZRANGE", prefix + "debounced", 0, -1, key=prefix) == [b"x"]
