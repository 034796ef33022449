"""A queue with a capacity: never more ids than that, nothing lost, and who waits gets in when there is room."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

import lowq
from lowq.errors import ConfigError, QueueFull
from lowq.group_commit import refused
from lowq.queue import Queue
from lowq.store.keys import shard_prefix
from lowq.store.translate import Refusal
from tests.rows import case
from tests.rules.support import NOW, Channel, ShardRig, emptied_rig, exhausted, job, retry
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


class TestScript:
    def test_what_fits_is_pushed(self, rig: ShardRig) -> None:
        assert unfit(rig, "a", "b") == []
        assert rig.read("due").keys() == {"a", "b"}
        assert rig.meta("features") is None

    def test_when_something_does_not_fit_nothing_is_written(self, rig: ShardRig) -> None:
        assert unfit(rig, "a", "b", "c", "a", "d") == [2, 4]
        assert rig.snapshot() == {"meta": {"features": " full "}}

    def test_who_is_refused_after_a_sweep_made_room_for_others_is_told_of_more(self, rig: ShardRig) -> None:
        assert unfit(rig, "a", "b") == []
        rig.push(job("expires", ttl=10))
        assert unfit(rig, "c") == [0]
        assert unfit(rig, "c", now=NOW + 10) == [0], "in place of what has expired, which was one too many"
        assert str(rig.meta("features")).split() == ["ttl", "full"]

    def test_what_fits_after_a_sweep_leaves_no_word_of_a_full_queue(self, rig: ShardRig) -> None:
        rig.push(job("expires", ttl=10), job("b"))
        assert unfit(rig, "c") == [0]
        rig.push(job("c", priority=3), now=NOW + 10, words=" capacity=2")
        assert str(rig.meta("features")).split() == ["ttl", "priority"]

    def test_an_id_that_waits_has_room_for_more(self, rig: ShardRig) -> None:
        unfit(rig, "a", "b")
        assert unfit(rig, "b", "a", "a") == []
        assert unfit(rig, "b", "c", "a", "c") == [1, 3]

    def test_what_is_taken_counts(self, rig: ShardRig) -> None:
        unfit(rig, "a", "b")
        rig.own().in_flight.take(1, NOW + 1)
        assert unfit(rig, "c") == [0]
        assert unfit(rig, "a") == [0]  # it would wait beside the one in flight

    def test_a_capacity_that_became_less_removes_nothing(self, rig: ShardRig) -> None:
        unfit(rig, "a", "b")
        assert unfit(rig, "a", "c", capacity=1) == [1]
        assert rig.read("due").keys() == {"a", "b"}

    def test_a_repeat_of_what_got_through_is_not_refused(self, rig: ShardRig) -> None:
        unfit(rig, "a", "b", token="one")
        assert unfit(rig, "a", "b", token="one", repeat=True) == []

    def test_a_call_that_comes_after_its_refused_repeat_does_nothing(self, rig: ShardRig) -> None:
        unfit(rig, "a", "b")
        assert unfit(rig, "c", token="late", repeat=True) == [0]
        rig.run("delete", "", "", "", "", "a", "b")
        assert unfit(rig, "c", token="late") == []
        assert rig.read("due") == {}


def ack(rig: ShardRig) -> None:
    rig.shard.in_flight.finish(["a"])
    rig.shard.in_flight.take(0, NOW)


ROOM: dict[str, Callable[[ShardRig], object]] = {
    "acknowledged": ack,
    "exhausted": lambda rig: rig.shard.in_flight.fail([exhausted("a")], NOW),
    "retried beside what came meanwhile": lambda rig: rig.shard.in_flight.fail([retry("a")], NOW),
    "released beside what came meanwhile": lambda rig: rig.shard.in_flight.release([("a", None)], NOW),
    "buried while it was taken": lambda rig: rig.shard.in_flight.bury([("a", b"", ())], NOW),
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


def test_why_says_of_an_id_that_is_not_there_that_the_queue_is_full(queue: Queue) -> None:
    queue.push(jobs("a", "b", "c"))
    assert queue.why("d").reason == "absent"
    with pytest.raises(QueueFull):
        queue.push({"id": "d"})
    why = queue.why("d")
    assert (why.state, why.reason) == (None, "over_capacity")
    assert "shard 0 has reached the capacity of the queue" in why.detail
    assert queue.why("a").reason != "over_capacity"
    queue.delete("a")
    assert queue.why("d").reason == "absent"


def test_the_figures_say_how_full_it_is(app: lowq.Lowq, queue: Queue) -> None:
    queue.push(jobs("a", "b"))
    with queue.consumer() as consumer:
        consumer.take()
        (seen,) = app.overview()
        for stats in (queue.stats(), seen.stats):
            assert (stats.capacity, stats.fill) == (3, 2 / 3)


def test_a_queue_without_capacity_is_never_full(app: lowq.Lowq) -> None:
    queue = app.queue("mail", 1)
    queue.push(jobs("a", "b"))
    assert (queue.stats().capacity, queue.stats().fill) == (None, None)


# --- pushing ---


def test_what_does_not_fit_is_handed_back(queue: Queue) -> None:
    with pytest.raises(QueueFull) as caught:
        queue.push(jobs("a", "b", "a", "c", "d", "b", "d"))
    assert (caught.value.accepted, caught.value.rest) == (
        5,
        [{"id": "d", "payload": 4}, {"id": "d", "payload": 6}],
    )
    assert caught.value.capacity == 3
    assert "queue 'mail' is full (capacity=3" in str(caught.value)
    assert ids(queue) == ["a", "b", "c"]
    queue.delete("a")
    assert queue.push(caught.value.rest) == 2
    found = queue.peek("d")
    assert found is not None
    assert [payload for payload, _ in found.payloads] == [4, 6]


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


def test_who_waits_gets_in_when_there_is_room(queue: Queue) -> None:
    queue.push(jobs("a", "b", "c"))
    done: list[int] = []
    thread = threading.Thread(target=lambda: done.append(queue.push(jobs("d", "d", "a"), timeout=LONG)))
    thread.start()
    until(lambda: ids(queue) == ["a", "b", "c"] and queue.fetch(["a"])["a"].payloads_count == 2, "what merges")
    assert thread.is_alive()
    queue.delete("b")
    thread.join(LONG)
    assert done == [3]
    assert ids(queue) == ["a", "c", "d"]


def test_so_does_who_waits_in_a_coroutine(app: lowq.Lowq, queue: Queue) -> None:
    async def produce() -> int:
        pushing = asyncio.create_task(queue.apush({"id": "d"}, timeout=LONG))
        await asyncio.to_thread(until, lambda: is_refused(app), "a refusal")
        await asyncio.to_thread(queue.delete, "b")
        return await pushing

    queue.push(jobs("a", "b", "c"))
    assert asyncio.run(produce()) == 1
    assert ids(queue) == ["a", "c", "d"]


def is_refused(app: lowq.Lowq) -> bool:
    """Whether a push has found the queue's only shard full."""
    features: bytes | None = app.client.command("HGET", PREFIX + "meta", "features", key=PREFIX)
    return features == b" full "


def test_who_waits_is_woken(app: lowq.Lowq, queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refused, "ASK_AGAIN", LONG)
    queue.push(jobs("a", "b", "c"))
    done: list[str] = []
    thread = threading.Thread(target=lambda: done.append(queue.put("x", timeout=LONG)))
    thread.start()
    until(lambda: app.client.command("PUBSUB", "SHARDNUMSUB", PREFIX + "room", key=PREFIX)[1] == 1, "its subscription")
    until(lambda: is_refused(app), "that it has asked")
    with queue.consumer() as consumer:
        consumer.take()[0].ack()
        thread.join(LONG)
    assert len(done) == 1


def test_room_for_many_is_used_by_many(app: lowq.Lowq, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refused, "ASK_AGAIN", LONG)
    monkeypatch.setattr(refused, "TOGETHER", 10)
    queue = app.queue("mail", 1, capacity=100)

    async def produce() -> list[int]:
        pushes = [asyncio.create_task(queue.apush(f"new {n}", timeout=LONG)) for n in range(100)]
        await asyncio.to_thread(until, lambda: is_refused(app), "a refusal")
        await asyncio.to_thread(queue.delete, [str(n) for n in range(100)])
        return await asyncio.gather(*pushes)

    queue.push(jobs(*range(100)))
    assert asyncio.run(produce()) == [1] * 100


@pytest.mark.parametrize("timeout", [0, 0.05])
def test_the_wait_ends(queue: Queue, timeout: float) -> None:
    queue.push(jobs("a", "b", "c"))
    with pytest.raises(QueueFull) as caught:
        queue.push(jobs("d", "a", "e"), timeout=timeout)
    assert caught.value.accepted == 1
    assert [item["id"] for item in caught.value.rest] == ["d", "e"]


def test_a_cancelled_wait_pushes_nothing_more(app: lowq.Lowq, queue: Queue) -> None:
    async def produce() -> None:
        pushing = asyncio.create_task(queue.apush({"id": "d"}, timeout=LONG))
        await asyncio.to_thread(until, lambda: is_refused(app), "a refusal")
        pushing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pushing

    queue.push(jobs("a", "b", "c"))
    asyncio.run(produce())
    queue.delete("b")
    assert ids(queue) == ["a", "c"]


def test_a_timeout_is_a_length_of_time(queue: Queue) -> None:
    timeout: Any
    for timeout in (-1, float("nan"), float("inf"), "5", True, 2**40):
        with case(timeout):
            for push in (queue.push, lambda *args, **options: asyncio.run(queue.apush(*args, **options))):
                with pytest.raises(ConfigError, match=r"timeout=.* must be seconds"):
                    push({"id": "a"}, timeout=timeout)
            assert ids(queue) == []


def test_twenty_producers_share_a_small_capacity(app: lowq.Lowq) -> None:
    capacity, each = 6, 9
    queue = app.queue("mail", 2, capacity=capacity)
    queue.push([])
    errors: list[BaseException] = []
    apps = [lowq.Lowq(redis_url=app.config.redis_url) for _ in range(4)]

    def produce(number: int) -> None:
        handle = apps[number % 4].queue("mail")
        try:
            for start in range(0, each, 3):
                items = [{"id": f"{number}-{n}", "payload": n} for n in range(start, start + 3)]
                if number % 2:
                    assert handle.push(items, timeout=NEVER) == 3
                else:
                    assert asyncio.run(handle.apush(items, timeout=NEVER)) == 3
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=produce, args=(number,), daemon=True) for number in range(20)]
    seen: set[str] = set()
    most = 0
    with queue.consumer() as consumer:
        for thread in threads:
            thread.start()
        while len(seen) < 20 * each and not errors:
            taken = consumer.take(4, timeout=0.2)
            stats = [shard.length + shard.taken for shard in app.shards("mail")]
            most = max([most, *stats])
            for item in taken:
                seen.add(item.id)
                item.ack()
        for thread in threads:
            thread.join(LONG)
    for other in apps:
        other.close()
    assert errors == []
    assert len(seen) == 20 * each
    assert most <= capacity / 2
