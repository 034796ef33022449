"""A queue gets another number of shards: all that is known of its jobs moves with them, whatever dies in between."""

import asyncio
import json
import math
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from unittest import mock

import pytest

import lowq
from lowq.admin.reshard import reshard
from lowq.broker.delivery import Failure
from lowq.broker.lease import Lease, LeaseDenied
from lowq.broker.shard import Shard, shards_of
from lowq.consumer import Consumer
from lowq.errors import (
    ConfigError,
    PushInterrupted,
    RedisRefused,
    RedisUnavailable,
    Resharding,
    UnknownQueueError,
)
from lowq.job import Job
from lowq.queue import Queue
from lowq.queue_options import QueueOptions
from lowq.sharding import Layout
from lowq.store import Call, Client, Refusal
from lowq.store.keys import shard_prefix
from tests.leases import run_out
from tests.redis_server import RedisServer
from tests.rows import case
from tests.waiting import PATIENCE, until

NEVER = 3600.0


@pytest.fixture
def app(store_url: str) -> Iterator[lowq.Lowq]:
    app = lowq.Lowq(redis_url=store_url, lease_ttl=60)
    yield app
    app.close()


def another(app: lowq.Lowq) -> lowq.Lowq:
    """The same store as another process sees it."""
    return lowq.Lowq(redis_url=app.config.redis_url, lease_ttl=60)


def prefixes(queue: Queue, namespace: str = "lowq") -> list[str]:
    """Of all shards that pushes may go to or jobs be taken of."""
    return [prefix for layout in queue.layouts.all for prefix in layout.prefixes(namespace, queue.name)]


def field(app: lowq.Lowq, prefix: str, *names: str) -> list[Any]:
    """What Redis knows of a shard."""
    found: list[Any] = app.client.command("HMGET", f"{prefix}meta", *names, key=prefix)
    return found


def run_all_out(app: lowq.Lowq, queue: Queue) -> None:
    """The leases of whoever has died have run out."""
    for prefix in prefixes(queue, app.config.namespace):
        run_out(app.client, prefix)


def lose_layout(app: lowq.Lowq, layout: str) -> None:
    """Redis has lost all shards of it, as a failover does to what replicas had not received."""
    for key in app.client.command("KEYS", f"*{{{layout}:*"):
        app.client.command("DEL", key)


def held(queue: Queue, app: lowq.Lowq) -> list[Shard]:
    """The shards of its present layout, leased."""
    layout = queue.layouts.current
    options = QueueOptions(queue.name, layout.shards_count)
    shards = shards_of(app.client, app.config, options, "a" * 16, layout=layout)
    for shard in shards:
        shard.lease.acquire(60)
    return shards


def give_up(shards: list[Shard]) -> None:
    for shard in shards:
        if shard.lease.current is not None:
            shard.lease.surrender(0.001)


def known(queue: Queue) -> dict[str, list[Job]]:
    """All that people can see of all jobs."""
    found: dict[str, list[Job]] = {}
    for state in (None, "morgue"):
        cursor: str | None = None
        while True:
            page = queue.jobs(state, limit=200, after=cursor)
            for job in page.jobs:
                found.setdefault(job.id, []).append(job)
            cursor = page.cursor
            if cursor is None:
                break
    return found


COUNTERS = ("length", "morgue_length", "retries", "processed", "failed", "buried", "pushed", "taken", "paused")


def counted(queue: Queue) -> list[Any]:
    stats = queue.stats()
    return [getattr(stats, name) for name in COUNTERS]


def fill(queue: Queue, app: lowq.Lowq, chance: random.Random, ids: int = 60) -> None:
    """Jobs in every state that there is."""
    jobs: list[dict[str, Any]] = []
    for _ in range(ids * 3):
        job: dict[str, Any] = {"id": chance.randrange(ids), "payload": {"v": chance.randrange(50)}}
        if chance.random() < 0.3:
            job["score"] = 1e9 + chance.randrange(1000)
        if chance.random() < 0.3:
            job["delay"] = NEVER * chance.randrange(1, 5)
        if chance.random() < 0.2:
            job["ttl"] = 10 * NEVER
        if chance.random() < 0.3:
            job["priority"] = chance.randrange(10)
        if chance.random() < 0.05:
            job["payload"] = {"v": "x" * 100_000, "n": chance.random()}
        jobs.append(job)
    queue.push(jobs)
    shards = held(queue, app)
    for shard in shards:
        for _ in range(3):
            taken = shard.in_flight.take(3).jobs
            failures, reasons = [], []
            for item in taken:
                outcome = chance.random()
                if outcome < 0.3:
                    failures.append(Failure(item.id, "retry", chance.randrange(20), NEVER, b"boom"))
                elif outcome < 0.4:
                    failures.append(Failure(item.id, "solo", -1, 0.0, b"in company"))
                elif outcome < 0.6:
                    reasons.append((item.id, b"bad", ()))
            if failures:
                shard.in_flight.fail(failures)
            if reasons:
                shard.in_flight.bury(reasons)
            shard.in_flight.finish([item.id for item in taken if chance.random() < 0.3])
            shard.in_flight.take(0)
    for _ in range(2):
        give_up(shards)
        run_all_out(app, queue)
        queue.release_all()
    run_all_out(app, queue)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"merge": "append"},
    {"merge": "latest"},
    {"ttl": 10 * NEVER},
    {"priority": 3},
    {"debounce": NEVER},
    {"merge": "latest", "ttl": NEVER, "priority": 1},
]


@pytest.mark.parametrize(("before", "after"), [(4, 8), (6, 4), (5, 3), (1, 4)])
def test_all_that_is_known_of_jobs_moves(app: lowq.Lowq, before: int, after: int) -> None:
    for number, options in enumerate(OPTIONS):
        with case(options):
            queue = app.queue(f"Orders-{number}", before, **options)
            fill(queue, app, random.Random(before))
            jobs, counts = known(queue), counted(queue)
            assert jobs
            progress = queue.reshard(after)
            assert progress is not None
            assert (progress.is_done, progress.shards_moved) == (True, before)
            assert queue.shards_count == after
            assert known(queue) == jobs
            assert counted(queue) == counts
            assert known(another(app).queue(queue.name)) == jobs


class Killed(BaseException):
    """The mover's process ends here."""


Calls = Sequence[Any]


@contextmanager
def hooked(
    app: lowq.Lowq, before: Callable[[Calls], object] = len, after: Callable[[Calls], object] = len
) -> Iterator[None]:
    """Does something before each write of the application, and behind it."""
    run_many = app.client.run_many

    def hook(calls: Calls, *args: Any, **options: Any) -> Any:
        before(calls)
        replies = run_many(calls, *args, **options)
        after(calls)
        return replies

    with mock.patch.object(app.client, "run_many", hook):
        yield


@contextmanager
def disturbed(
    app: lowq.Lowq, script: str, do: Callable[[], object], *, number: int = 1, first: bool = False, key: str = ""
) -> Iterator[None]:
    """Does something once, behind the write with that number that begins with a call of the script, or of any for "";
    ``first``: before it. ``key``: of calls for that shard alone.
    """
    count = 0

    def look(calls: Calls) -> None:
        nonlocal count
        call = calls[0]
        if script in ("", getattr(call, "script", "")) and (not key or call.key == key):
            count += 1
            if count == number:
                do()

    with hooked(app, before=look) if first else hooked(app, after=look):
        yield


def die() -> None:
    raise Killed


@pytest.mark.parametrize("is_carried_out", [True, False])
def test_a_mover_may_die_at_every_step(store_url: str, is_carried_out: bool) -> None:
    number, survived = 0, False
    while not survived:
        number += 1
        app = lowq.Lowq(redis_url=store_url, namespace=f"n{number}", lease_ttl=60)
        queue = app.queue("Orders", 3)
        fill(queue, app, random.Random(number), 12)
        jobs, counts = known(queue), counted(queue)
        with suppress(Killed), disturbed(app, "", die, number=number, first=not is_carried_out):
            queue.reshard(2)
            survived = True
        run_all_out(app, queue)
        queue.reshard(2)
        assert queue.layouts.current.shards_count == 2
        assert (known(queue), counted(queue)) == (jobs, counts), f"killed at call {number}"
        app.close()
    assert number > 15


def test_a_producer_that_knows_nothing_of_it_follows_and_order_holds(app: lowq.Lowq) -> None:
    stale = another(app)
    producer = stale.queue("Orders", 4)
    expected: dict[str, list[int]] = {str(n): [] for n in range(40)}

    def push(number: int) -> None:
        # Without scores: what comes later comes later.
        assert producer.push([{"id": n, "payload": number} for n in range(40)]) == 40
        for payloads in expected.values():
            payloads.append(number)

    push(0)
    for number, _ in enumerate(reshard(app, "Orders", 6), 1):
        push(number)
    push(100)
    for number, _ in enumerate(reshard(app, "Orders", 3), 101):
        push(number)
    push(200)
    found = {job_id: [payload for payload, _ in job.payloads] for job_id, (job,) in known(app.queue("Orders")).items()}
    assert found == expected


def test_what_was_pushed_meanwhile_joins_what_waited_before(app: lowq.Lowq) -> None:
    queue = app.queue("Orders", 2)
    queue.push({"id": "a", "payload": 1, "score": 5, "delay": NEVER, "priority": 4})
    queue.push({"id": "a", "payload": 2, "score": 7, "priority": 4})
    before = queue.peek("a")
    steps = reshard(app, "Orders", 4)
    next(steps)
    for progress in steps:
        if progress.shards_moved < 2:
            queue.push({"id": "a", "payload": 1, "score": 3, "priority": 2})
            queue.push({"id": "a", "payload": 3, "score": 6, "priority": 5})
    after = queue.peek("a")
    assert before is not None
    assert after is not None
    assert after.payloads == [(1, 3.0), (3, 6.0), (2, 7.0)]
    assert (after.perform_at, after.priority) == (before.perform_at, 2)


def test_a_large_id_comes_in_several_steps(app: lowq.Lowq) -> None:
    queue = app.queue("Orders", 1)
    queue.push({"id": "a", "payload": {"n": n, "x": "x" * 1000}, "score": n} for n in range(2500))
    queue.push({"id": "b", "payload": n, "score": n, "ttl": NEVER} for n in range(3000))
    before = known(queue)
    progress = queue.reshard(3)
    assert progress is not None
    assert progress.jobs_moved > 10
    assert known(queue) == before


def test_what_has_expired_is_left_behind(app: lowq.Lowq) -> None:
    queue = app.queue("Orders", 2)
    queue.push({"id": "a", "payload": 1, "ttl": 0.001})
    queue.push({"id": "b", "payload": 1})
    until(lambda: queue.why("a").reason == "expired", "the end of the payload's time")
    queue.reshard(3)
    assert set(known(queue)) == {"b"}
    stats = queue.stats()
    assert (stats.length, stats.expired) == (1, 1)


def test_a_queue_that_is_paused_stays_so_and_goes_on_when_told(app: lowq.Lowq) -> None:
    queue = app.queue("Orders", 2)
    queue.push({"id": "a"})
    queue.pause(by="ann")
    queue.reshard(4)
    assert queue.stats().paused
    assert "ann" in queue.why("a").detail
    steps = reshard(app, "Orders", 8)
    next(steps)
    assert queue.resume()
    list(steps)
    assert not queue.stats().paused


def test_jobs_that_are_being_moved_are_left_alone(app: lowq.Lowq, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowq.queue.RESHARD_SECONDS", 0.0)
    queue = app.queue("Orders", 2)
    queue.push([{"id": n} for n in range(20)])
    shards = held(queue, app)
    steps = reshard(app, "Orders", 3)
    next(steps)
    taken = {shard: shard.in_flight.take(1).jobs[0].id for shard in shards}
    waits = next(steps)
    assert waits.waits_for == (0, 1)
    state = queue.reshard_progress()
    assert state is not None
    assert (state.shards_moved, state.waits_for) == (0, (0, 1))
    left = next(str(n) for n in range(20) if str(n) not in taken.values())
    assert queue.why(left).reason == "resharding"
    for act in (queue.kick, queue.delete, queue.perform_now, queue.bury):
        with pytest.raises(Resharding, match="being moved"):
            act(left)
    assert queue.peek(left) is not None
    assert queue.stats().length == 18
    for shard in shards:  # what is in flight is finished, and nothing more is taken
        shard.in_flight.finish([taken[shard]])
        assert shard.in_flight.take(5).jobs == []
        shard.lease.surrender()
    *_, last = steps
    assert last.is_done
    assert queue.stats().processed == 2
    assert queue.delete(left).done == 1
    assert queue.bury(list(range(20))).done == 17


def test_two_movers_at_once_get_it_done_once(app: lowq.Lowq) -> None:
    queue = app.queue("Orders", 4)
    fill(queue, app, random.Random(1))
    jobs, counts = known(queue), counted(queue)
    first, second = reshard(app, "Orders", 6), reshard(another(app), "Orders", 6)
    turns = random.Random(7)
    running = [first, second]
    while running:
        steps = turns.choice(running)
        if next(steps, None) is None:
            running.remove(steps)
    assert (known(queue), counted(queue)) == (jobs, counts)


def test_what_can_not_be_done(app: lowq.Lowq) -> None:
    queue = app.queue("Orders", 2)
    with pytest.raises(UnknownQueueError):
        app.queue("Nobody").reshard(3)
    queue.push({"id": 1})
    for wrong in (0, -1, 16385, True, "3", 2.5, None):
        with pytest.raises(ConfigError, match="shards_count"):
            queue.reshard(wrong)  # type: ignore[arg-type]
    assert queue.reshard(2) is None
    next(reshard(app, "Orders", 3))
    with pytest.raises(Resharding, match="lowq reshard Orders 3"):
        queue.reshard(4)
    with pytest.raises(Resharding, match="lowq reshard Orders 3"):
        queue.reshard(2)
    assert queue.reshard(3) is not None


@pytest.mark.parametrize("when", ["before a page", "before a page, and a producer was first", "before it is opened"])
def test_new_shards_that_redis_has_lost_are_prepared_anew(
    app: lowq.Lowq, caplog: pytest.LogCaptureFixture, when: str
) -> None:
    """A failover of their primaries to replicas that were behind."""
    queue = app.queue("Orders", 2)
    expected = set(map(str, range(20)))
    queue.push([{"id": n} for n in range(20)])
    queue.pause()
    if when == "before it is opened":  # what was moved would be lost with them
        queue.delete(range(20))
        expected = set()

    def lose() -> None:
        lose_layout(app, "Orders@1")
        if "producer" in when:
            other = another(app)
            other.queue("Orders", 2).push([{"id": n} for n in range(20, 40)])
            expected.update(map(str, range(20, 40)))
            other.close()

    is_last = when == "before it is opened"
    with (
        caplog.at_level("WARNING", logger="lowq.reshard"),
        disturbed(app, "open_shard" if is_last else "seal", lose, first=is_last),
    ):
        assert queue.reshard(3) is not None
    said = [record for record in caplog.records if getattr(record, "event", "") == "reshard_prepared_anew"]
    assert bool(said) == ("producer" not in when)
    assert {job.id for job in queue.jobs(limit=100)} == expected
    metas = [field(app, prefix, "paused", "fed") for prefix in prefixes(queue)]
    assert [(paused is None, fed) for paused, fed in metas] == [(False, None)] * 3
    assert all(shard.lease.current for shard in held(queue, app))


def test_a_shard_of_which_redis_has_lost_that_it_is_open_can_be_resharded(app: lowq.Lowq) -> None:
    queue = closed_again(app)
    assert not any(shard.lease.current for shard in held(queue, app))
    assert queue.reshard(2) is not None
    assert {job.id for job in queue.jobs(limit=100)} == set(map(str, range(20)))
    assert all(shard.lease.current for shard in held(queue, app))


def test_a_consumer_opens_shards_of_which_redis_has_lost_that(app: lowq.Lowq) -> None:
    """Nobody else would: the reshard has ended."""
    queue = closed_again(app)
    with queue.consumer() as consumer:
        taken: list[str] = []
        while len(taken) < 20:
            jobs = consumer.take(20, timeout=PATIENCE)
            assert jobs
            taken += [job.id for job in jobs]
    assert len(set(taken)) == 20
    metas = [app.client.command("HKEYS", f"{prefix}meta", key=prefix) for prefix in prefixes(queue)]
    assert not [name for names in metas for name in names if name == b"fed" or name.startswith(b"moved:")]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_push_that_shards_and_registry_send_here_and_there_is_refused(app: lowq.Lowq, *, is_async: bool) -> None:
    """A failover has lost that a reshard had begun, after it had sealed shards."""
    queue = app.queue("Orders", 1)
    queue.push(1)
    (prefix,) = prefixes(queue)
    app.client.command("HSET", f"{prefix}meta", "sealed", "3 1", key=prefix)
    with pytest.raises(PushInterrupted, match="shards and the registry disagree") as caught:
        asyncio.run(queue.apush({"id": "a"})) if is_async else queue.push({"id": "a"})
    assert (caught.value.accepted, caught.value.rest) == (0, [{"id": "a"}])
    assert queue.reshard(3) is not None
    assert queue.push(caught.value.rest) == 1
    assert {job.id for job in queue.jobs().jobs} == {"1", "a"}


def test_a_registry_that_does_not_answer_is_asked_once_and_not_where_a_shard_says_where_its_jobs_belong(
    app: lowq.Lowq, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each shard would take as long as the caller has time."""
    queue = app.queue("Orders", 4)
    by_shard = {queue.shard_of(n): n for n in range(40)}
    ids = [by_shard[shard] for shard in range(4)]
    queue.push([{"id": job_id} for job_id in ids])
    stale = shard_prefix("lowq", "Orders", 0), shard_prefix("lowq", "Orders", 1)
    assert another(app).queue("Orders").reshard(3) is not None
    for prefix in stale:
        app.client.command("DEL", f"{prefix}meta", key=prefix)
    run_many, asked = Client.run_many, []

    def away(client: Client, calls: Any, **options: Any) -> Any:
        if any(call.script == "register" for call in calls):
            asked.append(1)
            return [RedisUnavailable("the registry does not answer") for _ in calls]
        return run_many(client, calls, **options)

    monkeypatch.setattr(Client, "run_many", away)
    jobs = [{"id": job_id, "payload": "newer"} for job_id in ids]
    with pytest.raises(PushInterrupted, match="the registry does not answer") as caught:
        queue.push(jobs)
    assert (caught.value.accepted, caught.value.rest, len(asked)) == (2, jobs[:2], 1)


def test_a_lost_entry_is_entered_anew_by_who_serves_a_later_epoch_as_that(app: lowq.Lowq) -> None:
    """Not with the number of its code: pushes would go to shards of an epoch that is over."""
    queue = app.queue("Orders", 3)
    queue.push([{"id": n, "score": 1} for n in range(10)])
    assert queue.reshard(5) is not None
    key, nodes = "lowq:v1:queues", "lowq:v1:nodes"
    with queue.consumer() as consumer:
        app.client.command("HDEL", key, "Orders", key=key)
        app.client.command("SPUBLISH", nodes, "lost", key=nodes)
        entry = until(lambda: app.client.command("HGET", key, "Orders", key=key), "an entry")
        assert json.loads(entry) == {"shards_count": 5, "epoch": 1, "options": {}}
        fresh = another(app)  # knows only what the registry says
        fresh.queue("Orders", 3).push([{"id": n, "payload": "newer", "score": 2} for n in range(10)])
        fresh.close()
        taken: dict[str, list[Any]] = {}
        while len(taken) < 10:
            jobs = consumer.take(10, timeout=PATIENCE)
            taken |= {job.id: job.payloads for job in jobs}
    assert set(map(len, taken.values())) == {2}


def test_a_push_that_has_entered_lost_shards_anew_follows_their_seal(app: lowq.Lowq) -> None:
    queue, other = another(app).queue("Orders", 1), app.queue("Orders", 1)
    queue.push(0)
    other.reshard(2)
    queue.push(1)
    lose_layout(app, "Orders@1")

    def jobs() -> Iterator[dict[str, Any]]:
        for number in range(30_000):
            if number == 15_000:
                other.reshard(3)
            yield {"id": number}

    assert queue.push(jobs()) == 30_000
    assert another(app).queue("Orders", 3).stats().length == 30_000


def closed_again(app: lowq.Lowq) -> Queue:
    """With 20 jobs in 3 shards, as a failover leaves them to replicas that had not received that they were opened."""
    queue = app.queue("Orders", 2)
    queue.push([{"id": n} for n in range(20)])
    assert queue.reshard(3) is not None
    for prefix in Layout(3, 1).prefixes("lowq", "Orders"):
        app.client.command("HSET", f"{prefix}meta", "fed", 1, "moved:0", 7, key=prefix)
    return queue


def test_a_new_shard_that_is_not_fed_any_more_ends_it_and_it_says_how_to_go_on(app: lowq.Lowq) -> None:
    queue = app.queue("Orders", 2)
    queue.push([{"id": n} for n in range(20)])
    lost = Layout(3, 1).prefix("lowq", "Orders", 2) + "meta"
    with (
        disturbed(app, "seal", lambda: app.client.command("HDEL", lost, "fed", key=lost)),
        pytest.raises(RedisRefused, match=f"redis-cli -c HSET '{lost}' fed 1; .* lowq reshard Orders 3"),
    ):
        queue.reshard(3)
    app.client.command("HSET", lost, "fed", 1, key=lost)
    queue.push({"id": "since"})
    assert queue.reshard(3) is not None
    assert {job.id for job in queue.jobs(limit=100)} == {"since", *map(str, range(20))}
    assert all(shard.lease.current for shard in held(queue, app))


def replica_of(app: lowq.Lowq, prefix: str) -> Callable[[], None]:
    """A replica of a shard that gets nothing more from now on. Returns what has it take over."""
    names = app.client.command("KEYS", f"{prefix}*", key=prefix)
    replica = {name.decode(): app.client.command("DUMP", name, key=prefix) for name in names}

    def fail_over() -> None:
        for name in app.client.command("KEYS", f"{prefix}*", key=prefix):
            app.client.command("DEL", name, key=prefix)
        for name, value in replica.items():
            app.client.command("RESTORE", name, 0, value, key=prefix)

    return fail_over


@pytest.mark.parametrize("is_killed", [True, False])
def test_a_seal_that_redis_has_lost_costs_no_push(app: lowq.Lowq, is_killed: bool) -> None:
    """A failover of the shard's primary to a replica that was behind, when some of its jobs are in the new shards."""
    merges: list[Any] = ["collapse", "append"]
    for merge in merges:
        with case(merge):
            _lose_a_seal(app, app.queue(f"Orders-{merge}", 1, merge=merge), is_killed)


def _lose_a_seal(app: lowq.Lowq, queue: Queue, is_killed: bool) -> None:
    queue.push([{"id": n, "payload": "before"} for n in range(600)])
    (prefix,) = prefixes(queue)
    fail_over = replica_of(app, prefix)

    def lose() -> None:
        fail_over()
        other = another(app)
        assert other.queue(queue.name, 1).push([{"id": n, "payload": "since"} for n in range(700)]) == 700
        other.close()
        if is_killed:
            raise Killed

    with disturbed(app, "move_in", lose, number=2):
        if is_killed:
            with pytest.raises(Killed):
                queue.reshard(2)
        else:
            queue.reshard(2)
    if is_killed:
        queue.reshard(2)
    found = {int(job.id): [payload for payload, _ in job.payloads] for job in queue.fetch(range(700)).values()}
    assert found == {n: ["before", "since"] if n < 600 else ["since"] for n in range(700)}
    assert all(shard.lease.current for shard in held(queue, app))


@pytest.mark.parametrize("when", ["before the end", "after the end"])
def test_old_shards_are_looked_at_once_more(app: lowq.Lowq, when: str) -> None:
    """A failover has lost that one was sealed, when its jobs are moved and its new shards open already."""
    queue = app.queue("Orders", 2)
    queue.push([{"id": n, "payload": "before"} for n in range(100)])
    fail_over = replica_of(app, prefixes(queue)[0])

    def lose() -> None:
        fail_over()
        other = another(app)
        assert other.queue("Orders", 2).push([{"id": n, "payload": "since"} for n in range(200)]) == 200
        other.close()

    if when == "before the end":
        with disturbed(app, "open_shard", lose):
            assert queue.reshard(4) is not None
    else:
        assert queue.reshard(4) is not None
        lose()
        assert queue.reshard(4) is not None, "the same number again checks, and repairs"
    assert queue.reshard(4) is None
    found = {int(job.id): [payload for payload, _ in job.payloads] for job in queue.fetch(range(200)).values()}
    assert found == {n: ["before", "since"] if n < 100 else ["since"] for n in range(200)}
    assert all(shard.lease.current for shard in held(queue, app))


def test_jobs_that_have_come_do_not_come_again_when_it_is_lost_that_they_had(app: lowq.Lowq) -> None:
    queue, fail_over = app.queue("Orders", 1), list[Callable[[], None]]()
    queue.push([{"id": n} for n in range(600)])
    (prefix,) = prefixes(queue)
    with disturbed(app, "move_out", lambda: fail_over.append(replica_of(app, prefix)), number=2):
        queue.reshard(2)
    assert queue.delete(range(600)).done == 600
    fail_over[0]()
    run_out(app.client, prefix)  # the lease of the mover
    assert queue.reshard(2) is not None
    assert queue.stats().length == 0
    assert field(app, prefix, "moved") == [b"1"]


# --- what the registry has lost -----------------------------------------------------------------------------------


REGISTRY = "lowq:v1:queues"


def entry(app: lowq.Lowq, queue: str = "Orders") -> bytes:
    found = app.client.command("HGET", REGISTRY, queue, key=REGISTRY)
    assert isinstance(found, bytes)
    return found


def enter(app: lowq.Lowq, text: bytes, queue: str = "Orders") -> None:
    app.client.command("HSET", REGISTRY, queue, text, key=REGISTRY)
    app.forget_registered()


@pytest.mark.parametrize("lost", ["its end", "its beginning, and another one was begun", "all of it", "two of them"])
def test_a_reshard_that_the_registry_has_lost_is_found_in_the_shards(
    app: lowq.Lowq, lost: str, caplog: pytest.LogCaptureFixture
) -> None:
    queue = app.queue("Orders", 3)
    queue.push([{"id": n} for n in range(20)])
    before = entry(app)
    next(reshard(app, "Orders", 6))
    begun = entry(app)
    assert queue.reshard(6) is not None
    if lost == "two of them":
        assert queue.reshard(5) is not None
    # What was begun anew used the epoch of the one that was lost.
    strange = b'{"shards_count": 3, "reshard": {"shards_count": 7, "epoch": 1}, "options": {}}'
    enter(app, {"its end": begun, "its beginning, and another one was begun": strange}.get(lost, before))
    other = another(app).queue("Orders", 3)
    if lost == "its end":
        with pytest.raises(Resharding, match="lowq reshard Orders 6"):
            other.reshard(7)
        assert other.reshard(6) is not None
    assert other.reshard(7) is not None
    assert ("registry was put right" in caplog.text) == (lost != "its end")
    assert other.layouts.all == (Layout(7, 3 if lost == "two of them" else 2),)
    assert set(known(other)) == set(map(str, range(20)))
    assert all(shard.lease.current for shard in held(other, app))


@pytest.mark.parametrize("sealed", [0, 1])
def test_an_epoch_is_never_used_again(app: lowq.Lowq, sealed: int) -> None:
    """The registry has lost that a reshard had begun: shards of it were made, and perhaps old ones sealed."""
    queue = app.queue("Orders", 2)
    queue.push([{"id": n} for n in range(20)])
    before = entry(app)
    steps = reshard(app, "Orders", 4)
    while next(steps).shards_moved < sealed:
        pass
    app.client.run("prepare_shard", Layout(4, 1).prefix("lowq", "Orders", 0), "", 4, "", "")
    enter(app, before)
    if sealed:
        with pytest.raises(Resharding, match="lowq reshard Orders 4"):
            queue.reshard(3)
        assert queue.reshard(4) is not None
    assert queue.reshard(3) is not None
    assert queue.layouts.current == Layout(3, 2)
    assert set(known(queue)) == set(map(str, range(20)))
    assert all(shard.lease.current for shard in held(queue, app))


def announced(app: lowq.Lowq, condition: Callable[[], Any], what: str) -> Any:
    """Waits, and has everybody read the registry meanwhile: heartbeats are seconds apart."""

    def look() -> Any:
        app.client.command("SPUBLISH", "lowq:v1:nodes", "changed", key="lowq:v1:nodes")
        return condition()

    return until(look, what)


def takes(consumer: Consumer, count: int) -> set[str]:
    """The ids of the next jobs, so many."""
    taken: set[str] = set()
    while len(taken) < count:
        jobs = consumer.take(count, timeout=PATIENCE)
        assert jobs
        taken |= {job.id for job in jobs}
        for job in jobs:
            job.ack()
    return taken


@pytest.mark.parametrize("said", ["what it was before", "the number of somebody's code", "that it has not ended"])
def test_who_serves_a_layout_does_not_go_back_but_repairs_the_registry(app: lowq.Lowq, said: str) -> None:
    """A failover has lost an entry, or somebody who knows only their code was the first to enter it anew."""
    queue = app.queue("Orders", 3)
    queue.push([{"id": n, "score": 1} for n in range(20)])
    before = entry(app)
    next(reshard(app, "Orders", 5))
    begun = entry(app)
    assert queue.reshard(5) is not None
    with queue.consumer() as consumer:
        (job,) = consumer.take(timeout=PATIENCE)
        text = {"what it was before": before, "that it has not ended": begun}.get(said, b'{"shards_count": 8}')
        app.client.command("HSET", REGISTRY, "Orders", text, key=REGISTRY)
        repaired = {"shards_count": 5, "epoch": 1, "options": {}}
        announced(app, lambda: json.loads(entry(app)) == repaired, "a repaired registry")
        fresh = another(app)  # knows only what the registry says
        fresh.queue("Orders", 3).push([{"id": n, "payload": "newer", "score": 2} for n in range(30)])
        fresh.close()
        job.ack()
        assert takes(consumer, 30) == set(map(str, range(30)))
    assert queue.stats().length == 0


@pytest.mark.parametrize("knows", ["served them", "knows the registry alone"])
def test_the_registry_gets_the_number_for_which_all_shards_were_made(app: lowq.Lowq, knows: str) -> None:
    """A failover has lost the entry, and somebody whose code says another number was the first to enter it anew."""
    for count in (2, 5):
        with case(count):
            _enter_another_number(app, f"Orders-{count}", b'{"shards_count": %d, "options": {}}' % count, knows)


def _enter_another_number(app: lowq.Lowq, name: str, said: bytes, knows: str) -> None:
    queue = app.queue(name, 3)
    queue.push([{"id": n} for n in range(20)])
    if knows == "knows the registry alone":
        enter(app, said, name)
    fresh = another(app)
    with fresh.queue(name, 3).consumer() as consumer:
        jobs = []
        if knows == "served them":
            jobs = consumer.take(timeout=PATIENCE)
            enter(app, said, name)
            fresh.forget_registered()
        announced(app, lambda: json.loads(entry(app, name))["shards_count"] == 3, "a repaired registry")
        for job in jobs:
            job.ack()
        expected = set(map(str, range(20))) - {job.id for job in jobs}
        assert takes(consumer, len(expected)) == expected
        assert fresh.queue(name, 3).push([{"id": n} for n in range(20, 40)]) == 20
        assert takes(consumer, 20) == set(map(str, range(20, 40)))
    assert queue.stats().length == 0
    fresh.close()


def test_nor_is_a_shard_lost_that_was_only_leased_for_the_wrong_number(app: lowq.Lowq) -> None:
    """Nothing was pushed to it, so nothing says that it was made for the right one."""
    queue = app.queue("Orders", 3)
    ids = [n for n in range(20) if Layout(3).shard_of(str(n).encode()) == 0]
    queue.push([{"id": n} for n in ids])
    enter(app, b'{"shards_count": 5, "options": {}}')
    fresh = another(app)
    with fresh.queue("Orders", 5).consumer() as consumer:
        announced(app, lambda: json.loads(entry(app))["shards_count"] == 3, "a repaired registry")
        assert takes(consumer, len(ids)) == set(map(str, ids))
        app.forget_registered()
        assert queue.push([{"id": n} for n in range(20)]) == 20
        assert takes(consumer, 20) == set(map(str, range(20)))
    fresh.close()


def test_what_was_taken_of_a_shard_before_the_registry_was_right_is_not_taken_again(
    app: lowq.Lowq, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "lowq")
    enter(app, b'{"shards_count": 5, "options": {}}')
    other = another(app)
    with other.queue("Orders", 5).consumer() as consumer:
        held = [f"{Layout(5).prefix('lowq', 'Orders', shard)}lease" for shard in range(5)]
        until(lambda: all(app.client.command("EXISTS", key, key=key) for key in held), "all leases")
        enter(app, b'{"shards_count": 3, "options": {}}')
        app.queue("Orders", 3).push({"id": 1})
        assert [job.id for job in consumer.take(timeout=PATIENCE)] == ["1"]
        announced(app, lambda: "3 shards now" in caplog.text, "a consumer that knows")
        assert consumer.take(timeout=1) == []
    other.close()


@pytest.mark.parametrize("lost", ["all of it", "its beginning"])
def test_who_finds_shards_sealed_for_a_layout_that_the_registry_lacks_repairs_it(app: lowq.Lowq, lost: str) -> None:
    """Nobody who still knows better is left: only the shards do."""
    queue = app.queue("Orders", 3)
    queue.push([{"id": n} for n in range(20)])
    before = entry(app)
    if lost == "all of it":
        assert queue.reshard(6) is not None
    else:
        steps = reshard(app, "Orders", 6)
        while next(steps).shards_moved < 1:
            pass
        del steps
    enter(app, before)
    fresh = another(app)
    with fresh.queue("Orders", 3).consumer() as consumer:
        repaired = (Layout(6, 1),) if lost == "all of it" else (Layout(3), Layout(6, 1))
        announced(app, lambda: queue.layouts.all == repaired, "a repaired registry")
        assert (queue.reshard(6) is None) == (lost == "all of it")
        assert takes(consumer, 20) == set(map(str, range(20)))
    fresh.close()


#: At once, as nobody may look or write in between.
DROP_AND_MAKE_ANEW = """\
for _, key in ipairs(redis.call('KEYS', '*{' .. ARGV[1] .. '*')) do redis.call('DEL', key) end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])"""


@pytest.mark.parametrize("when", ["it had ended", "it was under way"])
def test_a_queue_that_is_gone_and_made_anew_is_followed(app: lowq.Lowq, when: str) -> None:
    """Its epochs begin anew, and nothing of its shards is left that would say otherwise."""
    for count in (3, 2, 5):
        with case(count):
            _make_anew(app, f"Orders-{count}", when, count)


def _make_anew(app: lowq.Lowq, name: str, when: str, count: int) -> None:
    queue = app.queue(name, 3)
    queue.push([{"id": n} for n in range(20)])
    with queue.consumer() as consumer:
        steps = reshard(app, name, 6)
        while not (step := next(steps)).is_done and (when == "it had ended" or step.shards_moved < 3):
            pass
        del steps
        made_anew = b'{"shards_count": %d, "options": {}}' % count
        app.client.command("EVAL", DROP_AND_MAKE_ANEW, 1, REGISTRY, name, made_anew)
        app.forget_registered()
        fresh = another(app)
        fresh.queue(name, count).push([{"id": n} for n in range(100, 120)])
        held = f"{Layout(count).prefix('lowq', name, 0)}lease"
        announced(app, lambda: app.client.command("EXISTS", held, key=held), "a lease of the queue that was made anew")
        assert takes(consumer, 20) == set(map(str, range(100, 120)))
        assert json.loads(entry(app, name)) == {"shards_count": count, "options": {}}
        fresh.close()


# --- whose crash it is --------------------------------------------------------------------------------------------


def test_a_job_is_charged_when_its_holder_died_and_not_when_redis_was_frozen() -> None:
    with RedisServer() as server:
        for is_frozen in (False, True):
            with case(is_frozen):
                # A mover takes Redis for away once an answer took a third of a lease: also where the machine is busy.
                app = lowq.Lowq(redis_url=server.url, lease_ttl=1 if is_frozen else NEVER)
                app.client.server_age = lambda: math.inf  # type: ignore[method-assign]  # older than any lease
                queue = app.queue(f"Orders{is_frozen:d}", 1)
                queue.push({"id": "a"})
                steps = reshard(app, queue.name, 2)
                next(steps)
                (shard,) = shards_of(app.client, app.config, QueueOptions(queue.name, 1), "a" * 16)
                shard.lease.acquire(PATIENCE)
                assert shard.in_flight.take(1).jobs
                next(step for step in steps if step.waits_for)
                run_out(app.client, shard.prefix)
                if is_frozen:
                    server.pause()
                    threading.Timer(3.0, server.cont).start()
                assert [*steps][-1].is_done
                crashes = [app.client.command("HGETALL", f"{prefix}crashes", key=prefix) for prefix in prefixes(queue)]
                assert any(crashes) != is_frozen
                app.close()


def test_who_is_strict_is_told(app: lowq.Lowq) -> None:
    app.queue("Orders", 2).push({"id": 1})
    app.queue("Orders").reshard(3)
    strict = lowq.Lowq(redis_url=app.config.redis_url, strict_shards_count=True)
    with pytest.raises(lowq.ShardsCountError, match="lowq reshard Orders 2"):
        strict.queue("Orders", 2).push({"id": 2})
    assert strict.queue("Orders", 3).push({"id": 2}) == 1


def test_a_dropped_queue_leaves_nothing_of_any_layout(app: lowq.Lowq) -> None:
    queue = app.queue("Orders", 2)
    queue.push([{"id": n} for n in range(20)])
    queue.reshard(3)
    queue.reshard(5)
    next(reshard(app, "Orders", 4))
    assert queue.drop() == 20
    keys = {key.decode() for key in app.client.command("KEYS", "*") if b"{" in key}
    assert {key for key in keys if not key.endswith((":pushed", ":superseded"))} == set()
    assert app.queue("Orders", 2).push({"id": 1}) == 1


def test_calls_that_come_late_change_nothing(app: lowq.Lowq) -> None:
    """Those of a mover that was replaced, out of a connection that hung."""
    queue = app.queue("Orders", 2)
    queue.push([{"id": n, "payload": n} for n in range(30)])
    scripts, sent = {"move_out", "move_in", "open_shard", "prepare_shard", "seal"}, list[Call]()
    with hooked(app, after=lambda calls: sent.extend(call for call in calls if call.script in scripts)):
        queue.reshard(3)
    assert {call.script for call in sent} == scripts
    queue.delete([1, 2, 3])
    shards = held(queue, app)
    for shard in shards:
        shard.in_flight.take(1)
    jobs, counts = known(queue), counted(queue)
    random.Random(5).shuffle(sent)
    app.client.run_many(sent)
    assert (known(queue), counted(queue)) == (jobs, counts)
    assert all(len(shard.in_flight.take(2).jobs) == 2 for shard in shards)


def test_a_layout_has_prefixes_of_its_own() -> None:
    assert Layout(3, 2).prefix("lowq", "Orders", 1) != Layout(3, 1).prefix("lowq", "Orders", 1)
    with pytest.raises(ConfigError):
        lowq.Lowq(redis_url="memory://names").queue("Orders@1", 3)


def test_nothing_is_taken_of_a_new_shard_before_all_that_feeds_it_has_come(app: lowq.Lowq) -> None:
    queue = app.queue("Orders", 2)
    queue.push([{"id": n} for n in range(20)])
    after = Layout(3, 1)
    news = shards_of(app.client, app.config, QueueOptions("Orders", 3), "b" * 16, layout=after)
    # Before it is prepared, as a node may hear of the layout first; and as long as an old shard is left.
    assert all(isinstance(shard.lease.acquire(60), LeaseDenied) for shard in news)
    held_by_a_node = held(queue, app)[0]
    other = shards_of(app.client, app.config, QueueOptions("Orders", 2), "a" * 16)[1]
    run_out(app.client, other.prefix)
    steps = reshard(app, "Orders", 3)
    for progress in steps:
        denied = [shard.lease.acquire(60) for shard in news]
        assert all(isinstance(lease, LeaseDenied) and not lease.is_sealed for lease in denied)
        if progress.shards_moved == 1 and progress.waits_for == (0,):
            break
    assert held_by_a_node.lease.surrender()
    list(steps)
    assert all(isinstance(shard.lease.acquire(60), Lease) for shard in news)
    assert sum(len(shard.in_flight.take(20).jobs) for shard in news) == 20
    sealed = held_by_a_node.lease.acquire(60)
    assert isinstance(sealed, LeaseDenied)
    assert sealed.is_sealed


def test_a_repeat_of_a_push_that_came_in_before_is_known_and_any_other_is_sent_on(app: lowq.Lowq) -> None:
    app.queue("Orders", 1).push({"id": "a", "payload": 0})
    prefix = Layout(1).prefix("lowq", "Orders", 0)

    def push(token: str, payload: str, repeat: str = "", after: str = "") -> object:
        call = Call("push", prefix, ["", token, repeat, 1, "2", 15, after, "a", payload])
        return app.client.run_many([call])[0]

    assert push("one", "1") == 1
    app.queue("Orders").reshard(2)
    assert push("one", "1", repeat="1") == 1
    for refusal in (push("two", "2"), push("two", "2", repeat="1"), push("three", "3", after="two")):
        assert isinstance(refusal, Refusal)
        assert refusal.code == "SEALED"
        assert refusal.detail.startswith("2 1 ")
    assert push("one", "1") == 1, "the first call may come after its repeat"
    (job,) = known(app.queue("Orders"))["a"]
    assert [payload for payload, _ in job.payloads] == [0, 1]


def test_nothing_else_changes_a_sealed_shard(app: lowq.Lowq) -> None:
    """Not even calls that need no lease, and were held back in a connection."""
    queue = app.queue("Orders", 1, ttl=0.001, morgue_ttl=1)
    queue.push([{"id": n} for n in range(5)])
    queue.push({"id": "buried", "ttl": NEVER})
    queue.bury("buried", now=1.0)
    until(lambda: all(queue.why(n).reason == "expired" for n in range(5)), "the end of the payloads' time")
    prefix = Layout(1).prefix("lowq", "Orders", 0)
    steps = reshard(app, "Orders", 2)
    next(steps)
    app.client.run("seal", prefix, "", 1, 2, 1)
    before = queue.stats()
    assert app.client.run("sweep", prefix, "", 100, 1, 0)[:2] == [0, 0]
    assert app.client.run("set_schedule", prefix, "", "tick", "", "{}") == 0
    assert app.client.run("repair", prefix, "", "leftovers", "0") == [3]
    assert (queue.stats().length, queue.stats().morgue_length) == (before.length, before.morgue_length) == (5, 1)
    list(steps)
    assert queue.stats().expired == 5


# --- what is not there any more -----------------------------------------------------------------------------------


@pytest.mark.parametrize("loses", ["its queue", "all data", "its shards"])
def test_a_producer_of_a_layout_that_is_gone_pushes_to_the_one_that_nodes_serve(app: lowq.Lowq, loses: str) -> None:
    """It may run for weeks, and its queue be dropped or Redis lose its data meanwhile. The jobs would wait for ever."""
    for name, is_async in (("Orders", False), ("Async", True)):
        with case(name):
            _push_to_what_is_gone(app, name, loses, is_async=is_async)


def _push_to_what_is_gone(app: lowq.Lowq, name: str, loses: str, *, is_async: bool) -> None:
    old, other = another(app).queue(name, 3), app.queue(name, 3)
    old.push(1)
    other.reshard(5)
    old.push(2)
    old.layouts  # noqa: B018 - it knows the layout by now
    if loses == "its queue":
        other.drop()
    elif loses == "all data":
        app.client.command("FLUSHALL")
    else:
        lose_layout(app, f"{name}@1")
    expected = Layout(5, 1) if loses == "its shards" else Layout(3)
    if is_async:
        asyncio.run(old.apush({"id": "one"}))
    else:
        old.push("one")
    assert old.push({"id": number} for number in range(50)) == 50
    assert another(app).queue(name, 3).layouts.current == expected
    assert another(app).queue(name, 3).stats().length == 51
    assert old.stats().length == 51


def test_ticks_do_not_go_to_a_layout_that_is_gone(app: lowq.Lowq) -> None:
    queue = another(app).queue("Orders", 3)
    queue.push(1)
    app.queue("Orders").reshard(5)
    queue.push("nightly")
    app.queue("Orders").drop()
    assert not queue.push_ticks("nightly", [1.0], b"", b"record")
    assert queue.push_ticks("nightly", [1.0], b"", b"record")
    assert another(app).queue("Orders", 3).stats().length == 1


def test_ticks_go_to_a_shard_that_redis_has_lost(app: lowq.Lowq) -> None:
    queue = app.queue("Orders", 3)
    queue.push(1)
    queue.reshard(5)
    lose_layout(app, "Orders@1")
    assert queue.push_ticks("nightly", [1.0], b"", b"record")
    assert queue.stats().length == 1


def test_a_drop_that_was_interrupted_finds_the_layouts_before_again(app: lowq.Lowq) -> None:
    """What is left of one would send the pushes of a queue with that name to where nobody takes them."""
    queue = app.queue("Orders", 4)
    queue.push([{"id": n} for n in range(20)])
    queue.reshard(2)
    with pytest.raises(Killed), disturbed(app, "drop", die, first=True, key=Layout(4).prefix("lowq", "Orders", 2)):
        queue.drop()
    queue.drop()
    again = another(app).queue("Orders", 4)
    again.push([{"id": n} for n in range(20)])
    assert again.stats().length == 20


@pytest.mark.parametrize("script", ["prepare_shard", "move_in"])
def test_a_pause_or_its_end_in_the_middle_of_a_step_holds(app: lowq.Lowq, script: str) -> None:
    """The mover has read that the queue is paused, or not, and writes when somebody has changed it meanwhile."""
    for resumes in (True, False):
        with case(resumes):
            _change_the_pause(app, f"Orders-{resumes}", script, resumes)


def _change_the_pause(app: lowq.Lowq, name: str, script: str, resumes: bool) -> None:
    queue, mover = app.queue(name, 2), another(app)
    queue.push([{"id": n} for n in range(20)])
    if resumes:
        queue.pause()
    done: list[bool] = []

    def change(calls: Calls) -> None:
        is_it = any(isinstance(call, Call) and call.script == script for call in calls)
        is_last = script == "prepare_shard" or any(b"rest" in getattr(call, "data", ()) for call in calls)
        if is_it and is_last and not done:
            done.append(queue.resume() if resumes else queue.pause(by="Eve"))

    with hooked(mover, before=change):
        mover.queue(name).reshard(3)
    assert done == [True]
    metas = [field(app, prefix, "paused", "paused_by") for prefix in Layout(3, 1).prefixes("lowq", name)]
    assert [(at is None, by) for at, by in metas] == [(resumes, None if resumes else b"Eve")] * 3


def test_a_mover_leaves_another_queue_of_the_name_alone(app: lowq.Lowq) -> None:
    """It was held up while the queue was dropped and made anew: its pushes are not to go to where nobody takes them."""
    queue = app.queue("Orders", 4)
    queue.push({"id": 1})
    steps = reshard(another(app), "Orders", 8)
    next(steps)
    is_dropped = False
    while not is_dropped:
        next(steps)
        try:
            queue.drop()
            is_dropped = True
        except lowq.QueueInUse:  # between two classes it holds no lease
            pass
    again = another(app).queue("Orders", 4)
    again.push([{"id": n} for n in range(20)])
    with pytest.raises(Resharding, match="made anew"):
        list(steps)
    again.push([{"id": n} for n in range(20, 40)])
    assert again.stats().length == 40
    assert not any(info.sealed for info in app.shards("Orders"))
