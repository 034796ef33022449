"""A queue with a capacity: never more ids than that, nothing lost, and who waits gets in when there is room."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import lowq
from lowq.errors import ConfigError, QueueFull
from lowq.push import router
from lowq.queue import Queue
from lowq.store.keys import shard_prefix
from lowq.store.translate import Refusal
from tests.rows import case
from tests.rules.support import NOW, Channel, ShardRig, emptied_rig, exhausted, job, report, retry
from tests.tiers import real_redis_often
from tests.waiting import NEVER, until

#: Seconds: longer than any test takes.
LONG = 60.0

#: Of the only shard.
PREFIX = shard_prefix("lowq", "mail", 0)


@pytest.fixture
def queue(app: lowq.Lowq) -> Queue:
    return app.queue("mail", 1, capacity=3, merge="append")


def ids(queue: Queue) -> list[str]:
    return sorted(item.id for item in queue.jobs().jobs)


def jobs(*ids: Any) -> list[dict[str, Any]]:
    return [{"id": job_id, "payload": n} for n, job_id in enumerate(ids)]


# --- the script ---


def unfit(rig: ShardRig, *pushed: str, capacity: int = 2, **options: Any) -> list[int]:
    try:
        rig.push(*map(job, pushed), words=f" capacity={capacity}", **options)
    except Refusal as refusal:
        code, *positions = str(refusal).split()
        return [int(position) for position in positions if code == "QUEUEFULL"]
    return []


def test_what_fits_is_pushed_and_when_something_does_not_fit_nothing_is_written(rig: ShardRig) -> None:
    assert unfit(rig, "a", "b", "c", "a", "d") == [2, 4]
    assert rig.snapshot() == {"meta": {"features": " full "}}
    assert unfit(rig, "a", "b") == []
    assert unfit(rig, "b", "a", "a") == [], "an id that waits has room for more"
    assert unfit(rig, "b", "c", "a", "c") == [1, 3]
    assert unfit(rig, "a", "c", capacity=1) == [1], "a capacity that became less removes nothing"
    assert rig.read("due").keys() == {"a", "b"}
    rig.own().in_flight.take(1, NOW + 1)
    assert unfit(rig, "a", "c") == [0, 1]  # what is taken counts, and "a" would wait beside the one in flight


def test_what_has_expired_makes_room(rig: ShardRig) -> None:
    rig.push(job("expires", ttl=10), job("b"))
    assert unfit(rig, "c") == [0]
    assert str(rig.meta("features")).split() == ["ttl", "full"]
    rig.push(job("c", priority=3), now=NOW + 10, words=" capacity=2")
    assert str(rig.meta("features")).split() == ["ttl", "priority"], "no word of a full queue is left"
    rig.push(job("one too many", ttl=10), now=NOW + 10)
    assert unfit(rig, "d", now=NOW + 20) == [0]
    assert "full" in str(rig.meta("features"))


def test_a_repeat_of_what_got_through_is_not_refused_and_a_call_after_its_refused_repeat_does_nothing(
    rig: ShardRig,
) -> None:
    assert unfit(rig, "a", "b", token="one") == unfit(rig, "a", "b", token="one", repeat=True) == []
    assert unfit(rig, "c", token="late", repeat=True) == [0]
    rig.run("delete", "", "", "", "", "a", "b")
    assert unfit(rig, "c", token="late") == []
    assert rig.read("due") == {}


def ack(rig: ShardRig) -> None:
    rig.shard.in_flight.finish(["a"])
    rig.shard.in_flight.take(0, NOW)


ROOM: dict[str, Callable[[ShardRig], object]] = {
    "acknowledged": ack,
    "exhausted": lambda rig: report(rig.shard, "fail", [exhausted("a")], NOW),
    "retried beside what came meanwhile": lambda rig: report(rig.shard, "fail", [retry("a")], NOW),
    "released beside what came meanwhile": lambda rig: report(rig.shard, "release", [("a", None)], NOW),
    "buried while it was taken": lambda rig: report(rig.shard, "bury", [("a", b"", ())], NOW),
    "buried": lambda rig: rig.run("bury", "", "", "", "", "", "b", "", 0),
    "deleted": lambda rig: rig.run("delete", "", "", "", "", "b"),
    "restored": lambda rig: rig.crash("second"),
}


def test_what_expires_without_having_been_received_makes_room(rig: ShardRig) -> None:
    channel = Channel(rig, "room")
    rig.push(job("a", ttl=10))
    rig.own()
    rig.lose_reply(rig.shard.in_flight.take_call(1, NOW))
    assert unfit(rig, "c", capacity=1) == [0]
    rig.shard.in_flight.take(1, NOW + 10)
    assert channel.messages() == [b""]
    assert rig.meta("features") == " ttl "
    channel.close()


def test_whatever_makes_room_says_so_once(store_url: str) -> None:
    for how, make_room in ROOM.items():
        with case(how), emptied_rig(store_url) as rig:
            channel = Channel(rig, "room")
            rig.push(job("a"))
            rig.own().in_flight.take(1, NOW)
            rig.push(job("a"), job("b"))
            assert unfit(rig, "c", capacity=3) == [0]
            make_room(rig)
            assert channel.messages() == [b""]
            assert rig.meta("features") is None
            assert unfit(rig, "c", capacity=3) == []
            rig.run("delete", "", "", "", "", "c")
            assert channel.messages() == []  # nobody has asked since
            channel.close()


def test_figures_and_why_say_how_full_it_is(app: lowq.Lowq, queue: Queue) -> None:
    queue.push(jobs("a", "b"))
    with queue.consumer() as consumer:
        consumer.take()
        (seen,) = app.overview()
        for stats in (queue.stats(), seen.stats):
            assert (stats.capacity, stats.fill) == (3, 2 / 3)
    queue.push("c")
    assert queue.why("d").reason == "absent"
    with pytest.raises(QueueFull):
        queue.push({"id": "d"})
    why = queue.why("d")
    assert (why.state, why.reason) == (None, "over_capacity")
    assert "shard 0 has reached the capacity of the queue" in why.detail
    assert queue.why("a").reason != "over_capacity"
    queue.delete("a")
    assert queue.why("d").reason == "absent"
    unbounded = app.queue("other", 1)
    unbounded.push("a")
    assert (unbounded.stats().capacity, unbounded.stats().fill) == (None, None)


# --- pushing ---


def test_what_does_not_fit_is_handed_back(queue: Queue) -> None:
    with pytest.raises(QueueFull, match=r"queue 'mail' is full \(capacity=3") as caught:
        queue.push(jobs("a", "b", "a", "c", "d", "b", "d"))
    assert (caught.value.accepted, caught.value.capacity) == (5, 3)
    assert caught.value.rest == [{"id": "d", "payload": 4}, {"id": "d", "payload": 6}]
    assert ids(queue) == ["a", "b", "c"]
    queue.delete("a")
    assert queue.push(caught.value.rest) == 2
    assert [payload for payload, _ in queue.fetch("d")["d"].payloads] == [4, 6]


def test_a_long_push_stops_behind_what_did_not_fit(app: lowq.Lowq) -> None:
    queue = app.queue("mail", 1, capacity=5500)
    with pytest.raises(QueueFull) as caught:
        queue.push({"id": n} for n in range(12_000))
    assert caught.value.accepted == 5500
    assert [item["id"] for item in caught.value.rest] == list(range(5500, 12_000))
    assert queue.stats().length == 5500


def test_a_small_capacity_is_filled_from_a_large_chunk(app: lowq.Lowq) -> None:
    # Several calls for a shard, each of which comes after the one before.
    queue = app.queue("mail", 2, capacity=20)
    with pytest.raises(QueueFull) as caught:
        queue.push([{"id": n} for n in range(5000)])
    assert (caught.value.accepted, len(list(caught.value.rest))) == (20, 4980)
    assert [queue.stats().length, *(shard.length for shard in app.shards("mail"))] == [20, 10, 10]


def is_refused(app: lowq.Lowq) -> bool:
    """Whether a push has found the queue's only shard full."""
    features: bytes | None = app.client.command("HGET", PREFIX + "meta", "features", key=PREFIX)
    return features == b" full "


def test_who_waits_is_woken_when_there_is_room(app: lowq.Lowq, queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "ASK_AGAIN", LONG)
    queue.push(jobs("a", "b", "c"))
    done: list[int] = []
    thread = threading.Thread(target=lambda: done.append(queue.push(jobs("d", "d", "a"), timeout=LONG)))
    thread.start()
    until(lambda: queue.fetch(["a"])["a"].payloads_count == 2, "what merges meanwhile")
    until(lambda: app.client.command("PUBSUB", "SHARDNUMSUB", PREFIX + "room", key=PREFIX)[1] == 1, "its subscription")
    until(lambda: is_refused(app), "that it has asked")
    with queue.consumer() as consumer:
        taken = {job.id: job for job in consumer.take(3)}
        taken["b"].ack()
        thread.join(LONG)
    assert done == [3]
    assert ids(queue) == ["a", "c", "d"]


def test_room_for_many_is_used_by_many(app: lowq.Lowq, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "ASK_AGAIN", LONG)
    monkeypatch.setattr(router, "TOGETHER", 10)
    queue = app.queue("mail", 1, capacity=100)

    async def produce() -> list[int]:
        pushes = [asyncio.create_task(queue.apush(f"new {n}", timeout=LONG)) for n in range(100)]
        await asyncio.to_thread(until, lambda: is_refused(app), "a refusal")
        await asyncio.to_thread(queue.delete, [str(n) for n in range(100)])
        return await asyncio.gather(*pushes)

    queue.push(jobs(*range(100)))
    assert asyncio.run(produce()) == [1] * 100


def test_the_wait_ends(queue: Queue) -> None:
    queue.push(jobs("a", "b", "c"))
    for timeout in (0, 0.05):
        with case(timeout), pytest.raises(QueueFull) as caught:
            queue.push(jobs("d", "a", "e"), timeout=timeout)
        assert caught.value.accepted == 1
        assert [item["id"] for item in caught.value.rest] == ["d", "e"]
    wrong: Any
    for wrong in (-1, float("nan"), "5", True, 2**40):
        with case(wrong), pytest.raises(ConfigError, match=r"timeout=.* must be seconds"):
            queue.push({"id": "f"}, timeout=wrong)
    assert ids(queue) == ["a", "b", "c"]


@real_redis_often
def test_twenty_producers_share_a_small_capacity(app: lowq.Lowq) -> None:
    capacity, each = 6, 9
    queue = app.queue("mail", 2, capacity=capacity)
    queue.push([])
    apps = [lowq.Lowq(redis_url=app.config.redis_url) for _ in range(4)]

    def produce(number: int) -> int:
        handle = apps[number % 4].queue("mail")
        accepted = 0
        for start in range(0, each, 3):
            items = [{"id": f"{number}-{n}", "payload": n} for n in range(start, start + 3)]
            if number % 2:
                accepted += handle.push(items, timeout=NEVER)
            else:
                accepted += asyncio.run(handle.apush(items, timeout=NEVER))
        return accepted

    seen: set[str] = set()
    most = 0
    with queue.consumer() as consumer, ThreadPoolExecutor(20) as threads:
        producers = [threads.submit(produce, number) for number in range(20)]
        while len(seen) < 20 * each and not any(producer.done() and producer.exception() for producer in producers):
            taken = consumer.take(4, timeout=0.2)
            most = max([most, *(shard.length + shard.taken for shard in app.shards("mail"))])
            for item in taken:
                seen.add(item.id)
                item.ack()
    for other in apps:
        other.close()
    assert [producer.result() for producer in producers] == [each] * 20
    assert len(seen) == 20 * each
    assert most <= capacity / 2
