"""A queue gets another number of shards: all that is known of its jobs moves with them, whatever dies in between."""

import asyncio
import json
import math
import random
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from typing import Any
from unittest import mock

import pytest

import lowq
from lowq.consumer import Consumer
from lowq.errors import ConfigError, PushInterrupted, RedisRefused, RedisUnavailable, Resharding, UnknownQueueError
from lowq.job import Job
from lowq.operate.reshard import reshard
from lowq.options import QueueOptions
from lowq.queue import Queue
from lowq.sharding import Layout
from lowq.shards.delivery import Failure
from lowq.shards.lease import Lease, LeaseDenied
from lowq.shards.shard import Shard, shards_of
from lowq.store import Call, Client, Refusal
from lowq.store.keys import shard_prefix
from tests.leases import run_out
from tests.redis_server import RedisServer
from tests.rows import case
from tests.rules.support import report, run_script
from tests.tiers import real_redis_often
from tests.waiting import NEVER, PATIENCE, until

TWENTY = [{"id": n} for n in range(20)]
REGISTRY, NODES = "lowq:v1:queues", "lowq:v1:nodes"


@pytest.fixture
def app(store_url: str) -> Iterator[lowq.Lowq]:
    with closing(lowq.Lowq(redis_url=store_url, lease_ttl=60)) as app:
        yield app


def another(app: lowq.Lowq) -> lowq.Lowq:
    """The same store as another process sees it."""
    return lowq.Lowq(redis_url=app.config.redis_url, lease_ttl=60)


def filled(app: lowq.Lowq, shards_count: int, name: str = "Orders") -> Queue:
    queue = app.queue(name, shards_count)
    queue.push(TWENTY)
    return queue


def push_elsewhere(app: lowq.Lowq, name: str, shards_count: int, jobs: Sequence[dict[str, Any]]) -> None:
    """Of a process that knows only its code and the registry."""
    with closing(another(app)) as other:
        assert other.queue(name, shards_count).push(jobs) == len(jobs)


def numbers(*bounds: int) -> set[str]:
    return set(map(str, range(*bounds)))


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


def all_open(queue: Queue, app: lowq.Lowq) -> bool:
    return all(shard.lease.current for shard in held(queue, app))


def known(queue: Queue) -> dict[str, list[Job]]:
    """All that people can see of all jobs."""
    found: dict[str, list[Job]] = defaultdict(list)
    for state in (None, "morgue"):
        page = queue.jobs(state, limit=1000)
        assert page.cursor is None
        for job in page:
            found[job.id].append(job)
    return found


def payloads(queue: Queue) -> dict[int, list[Any]]:
    """Id -> payloads, of what waits."""
    return {int(job_id): [payload for payload, _ in jobs[0].payloads] for job_id, jobs in known(queue).items()}


COUNTERS = ("length", "morgue_length", "retries", "processed", "failed", "buried", "pushed", "taken", "paused")


def counted(queue: Queue) -> list[Any]:
    stats = queue.stats()
    return [getattr(stats, name) for name in COUNTERS]


def fill(queue: Queue, app: lowq.Lowq, chance: random.Random, ids: int = 60) -> None:
    """Jobs in every state that there is."""
    jobs: list[dict[str, Any]] = []
    for _ in range(ids * 3):
        some: list[tuple[float, dict[str, Any]]] = [
            (0.3, {"score": 1e9 + chance.randrange(1000)}),
            (0.3, {"delay": NEVER * chance.randrange(1, 5)}),
            (0.2, {"ttl": 10 * NEVER}),
            (0.3, {"priority": chance.randrange(10)}),
            (0.05, {"payload": {"v": "x" * 100_000, "n": chance.random()}}),
        ]
        job: dict[str, Any] = {"id": chance.randrange(ids), "payload": {"v": chance.randrange(50)}}
        for share, fields in some:
            job |= fields if chance.random() < share else {}
        jobs.append(job)
    queue.push(jobs)
    shards = held(queue, app)
    for shard in shards * 3:
        outcomes: dict[str, list[str]] = defaultdict(list)
        for item in shard.in_flight.take(3).jobs:
            (outcome,) = chance.choices(["retry", "solo", "bury", "finish", "none"], [3, 1, 2, 2, 2])
            outcomes[outcome].append(item.id)
        failures = [Failure(i, "retry", chance.randrange(20), NEVER, b"boom") for i in outcomes["retry"]]
        report(shard, "fail", failures + [Failure(i, "solo", -1, 0.0, b"in company") for i in outcomes["solo"]])
        report(shard, "bury", [(i, b"bad", ()) for i in outcomes["bury"]])
        shard.in_flight.finish(outcomes["finish"])
        shard.in_flight.take(0)
    for shard in shards:
        shard.lease.surrender(0.001)
    for _ in range(2):
        run_all_out(app, queue)
        queue.release_all()
    run_all_out(app, queue)


@real_redis_often
@pytest.mark.parametrize(("before", "after"), [(4, 8), (6, 4), (5, 3), (1, 4)])
def test_all_that_is_known_of_jobs_moves(app: lowq.Lowq, before: int, after: int) -> None:
    rows: list[dict[str, Any]] = [
        {}, {"merge": "append"}, {"merge": "latest"}, {"ttl": 10 * NEVER}, {"priority": 3}, {"debounce": NEVER},
        {"merge": "latest", "ttl": NEVER, "priority": 1},
    ]  # fmt: skip
    for number, options in enumerate(rows):
        with case(options):
            queue = app.queue(f"Orders-{number}", before, **options)
            fill(queue, app, random.Random(before))
            jobs, counts = known(queue), counted(queue)
            assert jobs
            progress = queue.reshard(after)
            assert progress is not None
            assert (progress.is_done, progress.shards_moved, queue.shards_count) == (True, before, after)
            assert (known(queue), counted(queue)) == (jobs, counts)
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


@real_redis_often
@pytest.mark.parametrize("is_carried_out", [True, False])
def test_a_mover_may_die_at_every_step(store_url: str, is_carried_out: bool) -> None:
    number, survived = 0, False
    while not survived:
        number += 1
        with closing(lowq.Lowq(redis_url=store_url, namespace=f"n{number}", lease_ttl=60)) as app:
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
    assert number > 15


def test_a_producer_that_knows_nothing_of_it_follows_and_order_holds(app: lowq.Lowq) -> None:
    producer = another(app).queue("Orders", 4)
    expected: list[int] = []

    def push() -> None:  # without scores: what comes later comes later
        expected.append(len(expected))
        assert producer.push([{"id": n, "payload": expected[-1]} for n in range(40)]) == 40

    push()
    for shards_count in (6, 3):
        for _ in reshard(app, "Orders", shards_count):
            push()
        push()
    assert payloads(app.queue("Orders")) == dict.fromkeys(range(40), expected)


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


@real_redis_often
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
    queue.push([{"id": "a", "payload": 1, "ttl": 0.001}, {"id": "b", "payload": 1}])
    until(lambda: queue.why("a").reason == "expired", "the end of the payload's time")
    queue.reshard(3)
    assert set(known(queue)) == {"b"}
    assert (queue.stats().length, queue.stats().expired) == (1, 1)


def test_jobs_that_are_being_moved_are_left_alone(app: lowq.Lowq, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowq.operate.actions.RESHARD_SECONDS", 0.0)
    queue = filled(app, 2)
    shards = held(queue, app)
    steps = reshard(app, "Orders", 3)
    next(steps)
    taken = [shard.in_flight.take(1).jobs[0].id for shard in shards]
    assert next(steps).waits_for == (0, 1)
    state = queue.reshard_progress()
    assert state is not None
    assert (state.shards_moved, state.waits_for) == (0, (0, 1))
    left = min(numbers(20) - {*taken})
    assert queue.why(left).reason == "resharding"
    for act in (queue.kick, queue.delete, queue.perform_now, queue.bury):
        with pytest.raises(Resharding, match="being moved"):
            act(left)
    with pytest.raises(Resharding, match="being moved to another shard"):
        list(queue.bulk("delete"))
    assert (queue.peek(left) is not None, queue.stats().length) == (True, 18)
    for shard, job_id in zip(shards, taken, strict=True):  # what is in flight is finished, and nothing more is taken
        shard.in_flight.finish([job_id])
        assert shard.in_flight.take(5).jobs == []
        shard.lease.surrender()
    assert [*steps][-1].is_done
    assert queue.stats().processed == 2
    assert (queue.delete(left).done, queue.bury(list(range(20))).done) == (1, 17)


def test_what_a_bulk_action_has_found_is_acted_on_where_it_has_been_moved_since(app: lowq.Lowq) -> None:
    queue = app.queue("Orders", 1)
    queue.push({"id": number} for number in range(300))
    steps = queue.bulk("cancel", match="*")  # an action has 200 ids at most
    while not next(steps).done:
        pass
    queue.reshard(3)
    *_, step = steps
    assert (step.done, queue.stats().length) == (300, 0)


def test_two_movers_at_once_get_it_done_once(app: lowq.Lowq) -> None:
    queue = app.queue("Orders", 4)
    fill(queue, app, random.Random(1))
    jobs, counts = known(queue), counted(queue)
    running = [reshard(app, "Orders", 6), reshard(another(app), "Orders", 6)]
    turns = random.Random(7)
    while running:
        steps = turns.choice(running)
        if next(steps, None) is None:
            running.remove(steps)
    assert (known(queue), counted(queue)) == (jobs, counts)


def test_what_can_not_be_done(app: lowq.Lowq) -> None:
    with pytest.raises(UnknownQueueError):
        app.queue("Nobody").reshard(3)
    with pytest.raises(ConfigError):
        app.queue("Orders@1", 3)  # a name that a layout would have
    queue = filled(app, 2)
    wrong: list[Any] = [0, 16385, True, "3"]
    for count in wrong:
        with case(count), pytest.raises(ConfigError, match="shards_count"):
            queue.reshard(count)
    assert queue.reshard(2) is None
    heartbeat = partial(run_script, app.client, "heartbeat", NODES, "", "host:1:a", "")
    heartbeat(json.dumps({"queues": ["Orders"], "strict": True}), 60)
    with pytest.raises(ConfigError, match="strict about"):
        queue.reshard(3)
    heartbeat("", 60)
    next(reshard(app, "Orders", 3))
    for count in (4, 2):
        with case(count), pytest.raises(Resharding, match="lowq reshard Orders 3"):
            queue.reshard(count)
    assert queue.reshard(3) is not None
    strict = lowq.Lowq(redis_url=app.config.redis_url, strict_shards_count=True)
    with pytest.raises(lowq.ShardsCountError, match="lowq reshard Orders 2"):
        strict.queue("Orders", 2).push({"id": 2})
    assert strict.queue("Orders", 3).push({"id": 2}) == 1


@pytest.mark.parametrize("store_url", ["redis"], indirect=True)
def test_replicas_are_counted_before_anything_is_begun_and_waited_for_by_whoever_goes_on(
    app: lowq.Lowq, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_client: Client, _keys: Sequence[str]) -> list[int]:
        raise RedisRefused("INFO is not allowed")

    monkeypatch.setattr("lowq.operate.layout_switch.CONFIRM_SECONDS", 0.01)
    queue = filled(app, 2)
    monkeypatch.setattr(Client, "replicas_of", refuse)
    with pytest.raises(RedisRefused, match="--unconfirmed"):
        reshard(app, "Orders", 3)
    assert queue.reshard_progress() is None
    monkeypatch.setattr(Client, "replicas_of", lambda _client, keys: [1] * len(keys))
    reshard(app, "Orders", 3)  # it dies before its first step
    monkeypatch.setattr(Client, "replicas_of", lambda _client, keys: [0] * len(keys))  # and so did the replicas
    steps = reshard(another(app), "Orders", 3)
    next(step for step in steps if step.waits_for_replicas)
    assert not any(info.sealed for info in app.shards("Orders")), "it goes on from what no replica has"
    assert queue.reshard(3, unconfirmed=True) is not None
    assert set(known(queue)) == numbers(20)


# --- what a failover has lost of shards ---------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before a page", "before a page, and a producer was first", "before it is opened"])
def test_new_shards_that_redis_has_lost_are_prepared_anew(
    app: lowq.Lowq, caplog: pytest.LogCaptureFixture, when: str
) -> None:
    queue, expected = filled(app, 2), numbers(20)
    queue.pause(by="ann")
    is_last = when == "before it is opened"
    if is_last:  # what was moved would be lost with them
        queue.delete(range(20))
        expected = set()

    def lose() -> None:
        lose_layout(app, "Orders@1")
        if "producer" in when:
            push_elsewhere(app, "Orders", 2, [{"id": n} for n in range(20, 40)])
            expected.update(numbers(20, 40))

    with (
        caplog.at_level("WARNING", logger="lowq.reshard"),
        disturbed(app, "open_shard" if is_last else "seal", lose, first=is_last),
    ):
        assert queue.reshard(3) is not None
    said = any(getattr(record, "event", "") == "reshard_prepared_anew" for record in caplog.records)
    assert said == ("producer" not in when)
    assert set(known(queue)) == expected
    metas = [field(app, prefix, "paused", "paused_by", "fed") for prefix in prefixes(queue)]
    assert [(at is None, by, fed) for at, by, fed in metas] == [(False, b"ann", None)] * 3
    assert all_open(queue, app)


def closed_again(app: lowq.Lowq) -> Queue:
    """With 20 jobs in 3 shards, as a failover leaves them to replicas that had not received that they were opened."""
    queue = filled(app, 2)
    assert queue.reshard(3) is not None
    for prefix in Layout(3, 1).prefixes("lowq", "Orders"):
        app.client.command("HSET", f"{prefix}meta", "fed", 1, "moved:0", 7, key=prefix)
    return queue


@pytest.mark.parametrize("by", ["a reshard", "a consumer"])
def test_shards_of_which_redis_has_lost_that_they_are_open_are_opened(app: lowq.Lowq, by: str) -> None:
    """A failover to replicas that had not received it, after the reshard had ended."""
    queue = filled(app, 2)
    assert queue.reshard(3) is not None
    for prefix in prefixes(queue):
        app.client.command("HSET", f"{prefix}meta", "fed", 1, "moved:0", 7, key=prefix)
    assert not any(shard.lease.current for shard in held(queue, app))
    if by == "a reshard":
        assert queue.reshard(2) is not None
        assert set(known(queue)) == numbers(20)
    else:
        with queue.consumer() as consumer:
            assert takes(consumer, 20) == numbers(20)
    assert [field(app, prefix, "fed", "moved:0") for prefix in prefixes(queue)] == [[None, None]] * len(prefixes(queue))
    assert all_open(queue, app)


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
    assert set(known(queue)) == {"1", "a"}


def test_a_registry_that_does_not_answer_is_asked_once_and_not_where_a_shard_says_where_its_jobs_belong(
    app: lowq.Lowq, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each shard would take as long as the caller has time."""
    queue = app.queue("Orders", 4)
    by_shard = {queue.shard_of(n): n for n in range(40)}
    jobs = [{"id": by_shard[shard], "payload": "newer"} for shard in range(4)]
    queue.push(jobs)
    assert another(app).queue("Orders").reshard(3) is not None
    for prefix in Layout(4).prefixes("lowq", "Orders")[:2]:
        app.client.command("DEL", f"{prefix}meta", key=prefix)
    run_many, asked = Client.run_many, []

    def away(client: Client, calls: Any, **options: Any) -> Any:
        if any(call.script == "register" for call in calls):
            asked.append(1)
            return [RedisUnavailable("the registry does not answer") for _ in calls]
        return run_many(client, calls, **options)

    monkeypatch.setattr(Client, "run_many", away)
    with pytest.raises(PushInterrupted, match="the registry does not answer") as caught:
        queue.push(jobs)
    assert (caught.value.accepted, caught.value.rest, len(asked)) == (2, jobs[:2], 1)


@real_redis_often
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


def test_a_new_shard_that_is_not_fed_any_more_ends_it_and_it_says_how_to_go_on(app: lowq.Lowq) -> None:
    queue = filled(app, 2)
    lost = Layout(3, 1).prefix("lowq", "Orders", 2) + "meta"
    with (
        disturbed(app, "seal", lambda: app.client.command("HDEL", lost, "fed", key=lost)),
        pytest.raises(RedisRefused, match=f"redis-cli -c HSET '{lost}' fed 1; .* lowq reshard Orders 3"),
    ):
        queue.reshard(3)
    app.client.command("HSET", lost, "fed", 1, key=lost)
    queue.push({"id": "since"})
    assert queue.reshard(3) is not None
    assert set(known(queue)) == {"since"} | numbers(20)
    assert all_open(queue, app)


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


@real_redis_often
@pytest.mark.parametrize("is_killed", [True, False])
@pytest.mark.parametrize("merge", ["collapse", "append"])
def test_a_seal_that_redis_has_lost_costs_no_push(app: lowq.Lowq, merge: Any, is_killed: bool) -> None:
    """A failover of the shard's primary to a replica that was behind, when some of its jobs are in the new shards."""
    queue = app.queue("Orders", 1, merge=merge)
    queue.push([{"id": n, "payload": "before"} for n in range(600)])
    fail_over = replica_of(app, *prefixes(queue))

    def lose() -> None:
        fail_over()
        push_elsewhere(app, "Orders", 1, [{"id": n, "payload": "since"} for n in range(700)])
        if is_killed:
            raise Killed

    with suppress(Killed), disturbed(app, "move_in", lose, number=2):
        queue.reshard(2)
    if is_killed:
        assert queue.reshard(2) is not None
    assert payloads(queue) == {n: ["before", "since"] if n < 600 else ["since"] for n in range(700)}
    assert all_open(queue, app)


@pytest.mark.parametrize("is_over", [False, True])
def test_old_shards_are_looked_at_once_more(app: lowq.Lowq, is_over: bool) -> None:
    """A failover has lost that one was sealed, when its jobs are moved and its new shards open already."""
    queue = app.queue("Orders", 2)
    queue.push([{"id": n, "payload": "before"} for n in range(100)])
    fail_over = replica_of(app, prefixes(queue)[0])

    def lose() -> None:
        fail_over()
        push_elsewhere(app, "Orders", 2, [{"id": n, "payload": "since"} for n in range(200)])

    with disturbed(app, "open_shard", lose, number=10**9 if is_over else 1):
        assert queue.reshard(4) is not None
    if is_over:
        lose()
        assert queue.reshard(4) is not None, "the same number again checks, and repairs"
    assert queue.reshard(4) is None
    assert payloads(queue) == {n: ["before", "since"] if n < 100 else ["since"] for n in range(200)}
    assert all_open(queue, app)


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


def test_jobs_that_a_failover_has_brought_back_are_moved_before_another_reshard_begins(app: lowq.Lowq) -> None:
    """Of the layout before: that of the layout before it is looked at by nobody."""
    queue = filled(app, 2)
    fail_over = [replica_of(app, prefix) for prefix in prefixes(queue)]
    assert queue.reshard(3) is not None
    queue.clear()
    for bring_back in fail_over:
        bring_back()
    assert queue.reshard(4) is not None
    assert set(known(queue)) == numbers(20)


# --- what the registry has lost -----------------------------------------------------------------------------------


def entry(app: lowq.Lowq, queue: str = "Orders") -> bytes:
    found = app.client.command("HGET", REGISTRY, queue, key=REGISTRY)
    assert isinstance(found, bytes)
    return found


def enter(app: lowq.Lowq, text: bytes, queue: str = "Orders") -> None:
    app.client.command("HSET", REGISTRY, queue, text, key=REGISTRY)
    app.registrations.forget()


def announced(app: lowq.Lowq, condition: Callable[[], Any], what: str) -> Any:
    """Waits, and has everybody read the registry meanwhile: heartbeats are seconds apart."""

    def look() -> Any:
        app.client.command("SPUBLISH", NODES, "changed", key=NODES)
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


@pytest.mark.parametrize("lost", ["its end", "its beginning, and another one was begun", "all of it", "two of them"])
def test_a_reshard_that_the_registry_has_lost_is_found_in_the_shards(
    app: lowq.Lowq, lost: str, caplog: pytest.LogCaptureFixture
) -> None:
    queue = filled(app, 3)
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
    assert set(known(other)) == numbers(20)
    assert all_open(other, app)


@pytest.mark.parametrize("sealed", [0, 1])
def test_an_epoch_is_never_used_again(app: lowq.Lowq, sealed: int) -> None:
    """The registry has lost that a reshard had begun: shards of it were made, and perhaps old ones sealed."""
    queue = filled(app, 2)
    before = entry(app)
    steps = reshard(app, "Orders", 4)
    next(step for step in steps if step.shards_moved >= sealed)
    run_script(app.client, "prepare_shard", Layout(4, 1).prefix("lowq", "Orders", 0), "", 4, "", "")
    enter(app, before)
    if sealed:
        with pytest.raises(Resharding, match="lowq reshard Orders 4"):
            queue.reshard(3)
        assert queue.reshard(4) is not None
    assert queue.reshard(3) is not None
    assert queue.layouts.current == Layout(3, 2)
    assert set(known(queue)) == numbers(20)
    assert all_open(queue, app)


@pytest.mark.parametrize("says", ["nothing", "what it was before", "somebody's code", "that it has not ended"])
def test_who_serves_a_layout_does_not_go_back_but_repairs_the_registry(app: lowq.Lowq, says: str) -> None:
    """A failover has lost an entry, or somebody who knows only their code was the first to enter it anew."""
    queue = app.queue("Orders", 3)
    queue.push([{"id": n, "score": 1} for n in range(20)])
    before = entry(app)
    next(reshard(app, "Orders", 5))
    begun = entry(app)
    assert queue.reshard(5) is not None
    with queue.consumer() as consumer:
        (job,) = consumer.take(timeout=PATIENCE)
        if says == "nothing":
            app.client.command("HDEL", REGISTRY, "Orders", key=REGISTRY)
        else:
            text = {"what it was before": before, "that it has not ended": begun}.get(says, b'{"shards_count": 8}')
            app.client.command("HSET", REGISTRY, "Orders", text, key=REGISTRY)
        repaired = {"shards_count": 5, "epoch": 1, "options": {}}
        has_entry = partial(app.client.command, "HGET", REGISTRY, "Orders", key=REGISTRY)
        announced(app, lambda: json.loads(has_entry() or "{}") == repaired, "a repaired registry")
        push_elsewhere(app, "Orders", 3, [{"id": n, "payload": "newer", "score": 2} for n in range(30)])
        job.ack()
        assert takes(consumer, 30) == numbers(30)
    assert queue.stats().length == 0


@pytest.mark.parametrize("says", ["that it is under way", "that it is over"])
def test_a_reshard_that_was_set_back_goes_on_before_anything_of_it_is_taken(app: lowq.Lowq, says: str) -> None:
    """A failover has brought jobs back to the old shards. Whoever has seen the end of the reshard leaves newer payloads
    in the new ones, until the older ones have come.
    """
    queue = app.queue("Orders", 2)
    queue.push([{"id": n, "payload": "older", "score": 1} for n in range(20)])
    next(reshard(app, "Orders", 3))
    begun, all_prefixes = entry(app), [*Layout(2).prefixes("lowq", "Orders"), *Layout(3, 1).prefixes("lowq", "Orders")]
    fail_over = list[Callable[[], None]]()
    with disturbed(app, "seal", lambda: fail_over.extend(replica_of(app, prefix) for prefix in all_prefixes)):
        assert queue.reshard(3) is not None
    with queue.consumer() as consumer:
        assert takes(consumer, 20) == numbers(20)
        for bring_back in fail_over:
            bring_back()
        if says == "that it is under way":
            app.client.command("HSET", REGISTRY, "Orders", begun, key=REGISTRY)
        push_elsewhere(app, "Orders", 2, [{"id": n, "payload": "newer", "score": 2} for n in range(20)])
        assert consumer.take(timeout=1) == []
        announced(app, lambda: json.loads(entry(app)).get("reshard"), "a registry that says that it is under way")
        assert consumer.take(timeout=1) == []
        app.registrations.forget()
        assert queue.reshard(3) is not None
        taken = dict[str, list[Any]]()
        while len(taken) < 20:
            jobs = consumer.take(20, timeout=PATIENCE)
            assert jobs
            taken |= {job.id: [*job.payloads] for job in jobs}
    assert taken == {job_id: ["older", "newer"] for job_id in numbers(20)}
    assert all_open(queue, app)


@pytest.mark.parametrize("knows", ["served them", "knows the registry alone"])
def test_the_registry_gets_the_number_for_which_all_shards_were_made(app: lowq.Lowq, knows: str) -> None:
    """A failover has lost the entry, and somebody whose code says another number was the first to enter it anew. What
    nothing was pushed to, and was only leased for the wrong number, is not lost with that.
    """
    some = [n for n in range(20) if Layout(3).shard_of(b"%d" % n) == 0]
    for count, ids in ((2, range(20)), (5, range(20)), (5, some)):
        with case(count, ids):
            _enter_another_number(app, f"Orders-{count}-{len(ids)}", count, ids, knows)


def _enter_another_number(app: lowq.Lowq, name: str, count: int, ids: Sequence[int], knows: str) -> None:
    queue, said = app.queue(name, 3), b'{"shards_count": %d, "options": {}}' % count
    queue.push([{"id": n} for n in ids])
    if knows == "knows the registry alone":
        enter(app, said, name)
    with closing(another(app)) as fresh, fresh.queue(name, 3).consumer() as consumer:
        jobs = []
        if knows == "served them":
            jobs = consumer.take(timeout=PATIENCE)
            enter(app, said, name)
            fresh.registrations.forget()
        announced(app, lambda: json.loads(entry(app, name))["shards_count"] == 3, "a repaired registry")
        for job in jobs:
            job.ack()
        expected = set(map(str, ids)) - {job.id for job in jobs}
        assert takes(consumer, len(expected)) == expected
        assert fresh.queue(name, 3).push([{"id": n} for n in range(20, 40)]) == 20
        assert takes(consumer, 20) == numbers(20, 40)
    assert queue.stats().length == 0


def test_what_was_taken_of_a_shard_before_the_registry_was_right_is_not_taken_again(
    app: lowq.Lowq, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "lowq")
    enter(app, b'{"shards_count": 5, "options": {}}')
    with closing(another(app)) as other, other.queue("Orders", 5).consumer() as consumer:
        leases = [f"{prefix}lease" for prefix in Layout(5).prefixes("lowq", "Orders")]
        until(lambda: all(app.client.command("EXISTS", key, key=key) for key in leases), "all leases")
        enter(app, b'{"shards_count": 3, "options": {}}')
        app.queue("Orders", 3).push({"id": 1})
        assert [job.id for job in consumer.take(timeout=PATIENCE)] == ["1"]
        announced(app, lambda: "3 shards now" in caplog.text, "a consumer that knows")
        assert consumer.take(timeout=1) == []


@pytest.mark.parametrize("is_over", [False, True])
def test_who_finds_shards_sealed_for_a_layout_that_the_registry_lacks_repairs_it(app: lowq.Lowq, is_over: bool) -> None:
    """Nobody who still knows better is left: only the shards do."""
    queue = filled(app, 3)
    before = entry(app)
    steps = reshard(app, "Orders", 6)
    next(step for step in steps if (step.is_done if is_over else step.shards_moved))
    del steps
    enter(app, before)
    with closing(another(app)) as fresh, fresh.queue("Orders", 3).consumer() as consumer:
        repaired = (Layout(6, 1),) if is_over else (Layout(3), Layout(6, 1))
        announced(app, lambda: queue.layouts.all == repaired, "a repaired registry")
        assert (queue.reshard(6) is None) == is_over
        assert takes(consumer, 20) == numbers(20)


#: At once, as nobody may look or write in between.
DROP_AND_MAKE_ANEW = """\
for _, key in ipairs(redis.call('KEYS', '*{' .. ARGV[1] .. '*')) do redis.call('DEL', key) end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])"""


@pytest.mark.parametrize("count", [3, 2, 5])
@pytest.mark.parametrize("is_over", [False, True])
def test_a_queue_that_is_gone_and_made_anew_is_followed(app: lowq.Lowq, is_over: bool, count: int) -> None:
    """Its epochs begin anew, and nothing of its shards is left that would say otherwise."""
    queue = filled(app, 3)
    with queue.consumer() as consumer:
        steps = reshard(app, "Orders", 6)
        next(step for step in steps if step.is_done or (not is_over and step.shards_moved == 3))
        del steps
        made_anew = b'{"shards_count": %d, "options": {}}' % count
        app.client.command("EVAL", DROP_AND_MAKE_ANEW, 1, REGISTRY, "Orders", made_anew)
        app.registrations.forget()
        push_elsewhere(app, "Orders", count, [{"id": n} for n in range(100, 120)])
        lease = f"{Layout(count).prefix('lowq', 'Orders', 0)}lease"
        announced(app, lambda: app.client.command("EXISTS", lease, key=lease), "a lease of what was made anew")
        assert takes(consumer, 20) == numbers(100, 120)
        assert json.loads(entry(app)) == {"shards_count": count, "options": {}}


# --- whose crash it is --------------------------------------------------------------------------------------------


def test_a_job_is_charged_when_its_holder_died_and_not_when_redis_was_frozen() -> None:
    with RedisServer() as server:
        for is_frozen in (False, True):
            # A mover takes Redis for away once an answer took a third of a lease, also where the machine is busy, and
            # until a lease after that. In between it tries again, a third of a lease later.
            app = lowq.Lowq(redis_url=server.url, lease_ttl=9 if is_frozen else NEVER)
            with case(is_frozen), closing(app):
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
                thaw = threading.Timer(4.0, server.cont)

                def ask(calls: Calls, thaw: threading.Timer = thaw) -> None:
                    if calls[0].script == "GET" and not (server.answers or thaw.is_alive()):
                        thaw.start()

                if is_frozen:
                    server.pause()
                with hooked(app, before=ask):
                    assert [*steps][-1].is_done
                crashes = [app.client.command("HGETALL", f"{prefix}crashes", key=prefix) for prefix in prefixes(queue)]
                assert any(crashes) != is_frozen


# --- late calls, and what is sealed -------------------------------------------------------------------------------


def test_calls_that_come_late_change_nothing(app: lowq.Lowq) -> None:
    """Those of a mover that was replaced, out of a connection that hung."""
    queue = app.queue("Orders", 2)
    queue.push([{"id": n, "payload": n} for n in range(30)])
    scripts, sent = {"move_out", "move_in", "open_shard", "prepare_shard", "seal"}, list[Call[Any]]()
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


def test_nothing_is_taken_of_a_new_shard_before_all_that_feeds_it_has_come(app: lowq.Lowq) -> None:
    queue = filled(app, 2)
    news = shards_of(app.client, app.config, QueueOptions("Orders", 3), "b" * 16, layout=Layout(3, 1))
    # Before it is prepared, as a node may hear of the layout first; and as long as an old shard is left.
    assert all(isinstance(shard.lease.acquire(60), LeaseDenied) for shard in news)
    of_a_node, other = held(queue, app)
    run_out(app.client, other.prefix)
    steps = reshard(app, "Orders", 3)
    for progress in steps:
        denied = [shard.lease.acquire(60) for shard in news]
        assert all(isinstance(lease, LeaseDenied) and not lease.is_sealed for lease in denied)
        if progress.shards_moved == 1 and progress.waits_for == (0,):
            break
    assert of_a_node.lease.surrender()
    list(steps)
    assert all(isinstance(shard.lease.acquire(60), Lease) for shard in news)
    assert sum(len(shard.in_flight.take(20).jobs) for shard in news) == 20
    sealed = of_a_node.lease.acquire(60)
    assert isinstance(sealed, LeaseDenied)
    assert sealed.is_sealed


def test_a_repeat_of_a_push_that_came_in_before_is_known_and_any_other_is_sent_on(app: lowq.Lowq) -> None:
    app.queue("Orders", 1).push({"id": 0, "payload": 0})

    def push(token: str, payload: str, repeat: str = "", after: str = "") -> object:
        args: list[str | int] = ["", token, repeat, 1, "2", 15, after, "0", payload]
        return app.client.run_many([Call("push", shard_prefix("lowq", "Orders", 0), args)])[0]

    assert push("one", "1") == 1
    app.queue("Orders").reshard(2)
    assert push("one", "1", repeat="1") == 1
    for refusal in (push("two", "2"), push("two", "2", repeat="1"), push("three", "3", after="two")):
        assert isinstance(refusal, Refusal)
        assert (refusal.code, refusal.detail[:4]) == ("SEALED", "2 1 ")
    assert push("one", "1") == 1, "the first call may come after its repeat"
    assert payloads(app.queue("Orders")) == {0: [0, 1]}


def test_nothing_else_changes_a_sealed_shard(app: lowq.Lowq) -> None:
    """Not even calls that need no lease, and were held back in a connection."""
    queue = app.queue("Orders", 1, ttl=0.001, morgue_ttl=1)
    queue.push([{"id": n} for n in range(5)])
    queue.push({"id": "buried", "ttl": NEVER})
    queue.bury("buried", now=1.0)
    until(lambda: all(queue.why(n).reason == "expired" for n in range(5)), "the end of the payloads' time")
    prefix = shard_prefix("lowq", "Orders", 0)
    steps = reshard(app, "Orders", 2)
    next(steps)
    run_script(app.client, "seal", prefix, "", 1, 2, 1)
    assert run_script(app.client, "sweep", prefix, "", 100, 1, 0)[:2] == [0, 0]
    assert run_script(app.client, "set_schedule", prefix, "", "tick", "", "{}") == 0
    assert run_script(app.client, "repair", prefix, "", "leftovers", "0") == [3]
    assert (queue.stats().length, queue.stats().morgue_length) == (5, 1)
    list(steps)
    assert queue.stats().expired == 5


@pytest.mark.parametrize("script", ["prepare_shard", "move_in"])
@pytest.mark.parametrize("resumes", [True, False])
def test_a_pause_or_its_end_in_the_middle_of_a_step_holds(app: lowq.Lowq, script: str, resumes: bool) -> None:
    """The mover has read that the queue is paused, or not, and writes when somebody has changed it meanwhile."""
    queue, mover = filled(app, 2), another(app)
    if resumes:
        queue.pause()
    done: list[bool] = []

    def change(calls: Calls) -> None:
        is_it = any(isinstance(call, Call) and call.script == script for call in calls)
        is_last = script == "prepare_shard" or any(b"rest" in getattr(call, "data", ()) for call in calls)
        if is_it and is_last and not done:
            done.append(queue.resume() if resumes else queue.pause(by="Eve"))

    with hooked(mover, before=change):
        mover.queue("Orders").reshard(3)
    assert done == [True]
    metas = [field(app, prefix, "paused", "paused_by") for prefix in Layout(3, 1).prefixes("lowq", "Orders")]
    assert [(at is None, by) for at, by in metas] == [(resumes, None if resumes else b"Eve")] * 3


# --- what is not there any more -----------------------------------------------------------------------------------


@pytest.mark.parametrize("loses", ["its queue", "all data", "its shards"])
@pytest.mark.parametrize("is_async", [False, True])
def test_a_producer_of_a_layout_that_is_gone_pushes_to_the_one_that_nodes_serve(
    app: lowq.Lowq, monkeypatch: pytest.MonkeyPatch, loses: str, *, is_async: bool
) -> None:
    """It may run for weeks, and its queue be dropped or Redis lose its data meanwhile. The jobs would wait for ever."""
    for where in ("lowq.sharding", "lowq.operate.queues"):  # else a slow machine reads the registry besides
        monkeypatch.setattr(f"{where}.READ_AGAIN", NEVER)
    old, other = another(app).queue("Orders", 3), app.queue("Orders", 3)
    old.push(1)
    other.reshard(5)
    old.push(2)
    old.layouts  # noqa: B018 - it knows the layout by now
    if loses == "its queue":
        other.drop()
    elif loses == "all data":
        app.client.command("FLUSHALL")
    else:
        lose_layout(app, "Orders@1")
    asyncio.run(old.apush({"id": "one"})) if is_async else old.push("one")
    assert old.push({"id": number} for number in range(50)) == 50
    fresh = another(app).queue("Orders", 3)
    assert fresh.layouts.current == (Layout(5, 1) if loses == "its shards" else Layout(3))
    assert fresh.stats().length == old.stats().length == 51


def test_ticks_go_to_a_shard_that_redis_has_lost_and_not_to_a_layout_that_is_gone(app: lowq.Lowq) -> None:
    queue, other = app.queue("Orders", 3), another(app).queue("Orders", 3)
    other.push(1)
    queue.reshard(5)
    other.push("nightly")
    lose_layout(app, "Orders@1")
    assert queue.push_ticks("nightly", [1.0], b"", b"record")
    assert queue.stats().length == 1
    queue.drop()
    assert [other.push_ticks("nightly", [1.0], b"", b"record") for _ in range(2)] == [False, True]
    assert another(app).queue("Orders", 3).stats().length == 1


def test_a_dropped_queue_leaves_nothing_of_any_layout(app: lowq.Lowq) -> None:
    queue = filled(app, 2)
    queue.reshard(3)
    queue.reshard(5)
    next(reshard(app, "Orders", 4))
    assert queue.drop() == 20
    keys = {key.decode() for key in app.client.command("KEYS", "*") if b"{" in key}
    assert {key for key in keys if not key.endswith((":pushed", ":superseded"))} == set()
    assert app.queue("Orders", 2).push({"id": 1}) == 1


def test_a_drop_that_was_interrupted_finds_the_layouts_before_again(app: lowq.Lowq) -> None:
    """What is left of one would send the pushes of a queue with that name to where nobody takes them."""
    queue = filled(app, 4)
    queue.reshard(2)
    with pytest.raises(Killed), disturbed(app, "drop", die, first=True, key=shard_prefix("lowq", "Orders", 2)):
        queue.drop()
    queue.drop()
    assert filled(another(app), 4).stats().length == 20


def test_a_mover_leaves_another_queue_of_the_name_alone(app: lowq.Lowq) -> None:
    """It was held up while the queue was dropped and made anew: its pushes are not to go to where nobody takes them."""
    queue = app.queue("Orders", 4)
    queue.push({"id": 1})
    steps = reshard(another(app), "Orders", 8)
    next(steps)
    is_dropped = False
    while not is_dropped:
        next(steps)
        with suppress(lowq.QueueInUse):  # between two classes it holds no lease
            queue.drop()
            is_dropped = True
    again = filled(another(app), 4)
    with pytest.raises(Resharding, match="made anew"):
        list(steps)
    again.push([{"id": n} for n in range(20, 40)])
    assert again.stats().length == 40
    assert not any(info.sealed for info in app.shards("Orders"))
