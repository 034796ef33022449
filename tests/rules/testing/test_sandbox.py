"""lowq.testing.sandbox: all applications on empty embedded stores, their clock, lost outcomes, and what is asserted."""

import asyncio
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from unittest.mock import ANY

import msgspec
import pytest

import lowq
from lowq.errors import ConfigError, JobError, QueueFull
from lowq.sharding import shard_of
from lowq.store.calls import load_scripts
from lowq.store.keys import shard_prefix
from lowq.testing import Sandbox, drain, sandbox
from lowq.testing.sandbox import WITHOUT_JOBS
from lowq.workers import Worker
from tests.mutants import break_scripts
from tests.rows import case
from tests.rules.support import run_script

PayloadsById = dict[str, list[Any]]
#: What handlers were given, in order.
Seen = list[PayloadsById]


@pytest.fixture
def box() -> Iterator[Sandbox]:
    with sandbox() as box:
        yield box


def new_app(host: str = "127.0.0.1", **options: Any) -> lowq.Lowq:
    # Nothing listens there: whatever went past the store would fail.
    return lowq.Lowq(redis_url=f"redis://{host}:1/0", **options)


@pytest.fixture
def app(box: Sandbox) -> lowq.Lowq:
    return new_app()


@pytest.fixture
def seen() -> Seen:
    return []


def worker(
    app: lowq.Lowq,
    seen: Seen,
    name: str = "Orders",
    handler: Callable[[PayloadsById], object] | None = None,
    **options: Any,
) -> type[Worker[Any]]:
    class Made(lowq.Worker[Any]):
        def perform(self, payloads_by_id: PayloadsById) -> None:
            seen.append({job_id: list(payloads) for job_id, payloads in payloads_by_id.items()})
            if handler is not None:
                handler(payloads_by_id)

    Made.__name__ = name
    return app.worker(**options)(Made)


def async_worker(app: lowq.Lowq, seen: Seen) -> type[Worker[Any]]:
    @app.worker
    class Awaits(lowq.Worker[Any]):
        async def perform(self, payloads_by_id: PayloadsById) -> None:
            await asyncio.sleep(0)
            seen.append(payloads_by_id)

    return Awaits


# --- the stores ---


def test_an_application_is_as_it_was_afterwards(seen: Seen) -> None:
    app = lowq.Lowq(redis_url="memory://before-and-after")
    before = worker(app, [])
    before.push("outside")
    for _ in range(2):  # nothing is left for the next
        with sandbox() as box:
            assert app.queues() == []
            made = worker(app, seen, shards_count=2)  # the same name in another test: another worker
            made.push("inside")
            assert len(box.assert_pushed(made)) == 1
            assert box.drain().performed == 1
        assert app.workers == {"Orders": before}
    with pytest.raises(ZeroDivisionError), sandbox():
        raise ZeroDivisionError
    assert seen == [{"inside": [""]}] * 2
    assert {job.id for job in before.queue.jobs("due")} == {"outside"}
    app.close()


def test_applications_share_a_store_when_they_name_the_same_redis(box: Sandbox) -> None:
    apps = [lowq.Lowq(redis_url=f"{url}://{name}") for url, name in
            [("redis", "a/0"), ("redis", "a/0"), ("redis", "b/0"), ("memory", ""), ("memory", "")]]  # fmt: skip
    apps.append(apps[0].with_own_pool(1))
    for app in (apps[0], apps[2], apps[3]):
        app.queue("Orders", 1).push(1)
    assert [len(app.queues()) for app in apps] == [1, 1, 1, 1, 0, 1]
    assert [pushed.queue for pushed in box.assert_pushed("Orders")] == ["Orders"] * 3


def test_handles_of_applications_with_own_pools_follow_into_an_embedded_store_and_back() -> None:
    app = lowq.Lowq(redis_url="memory://own-pools")
    own = app.with_own_pool(1)
    handles = [each.queue("Orders", 1) for each in (app, own, own.with_own_pool(1))]

    def push_and_count() -> int:
        for handle in handles:
            handle.put()
        return handles[0].count("delete")

    assert push_and_count() == 3
    with app.embedded():
        assert [push_and_count(), push_and_count()] == [3, 6]
    assert push_and_count() == 6
    app.close()


def test_there_is_one_at_a_time_and_jobs_go_to_applications_that_are_used(seen: Seen) -> None:
    stale = [new_app() for _ in range(2)]
    for app in stale:
        worker(app, [], shards_count=7)
    with sandbox() as box:
        with pytest.raises(ConfigError, match="there is a sandbox already"), sandbox():
            pass
        worker(new_app(), seen, shards_count=3).push(1)
        box.drain()
    assert seen == [{"1": [""]}]


# --- drain ---


def test_a_drain_performs_for_all_applications_also_what_handlers_push(box: Sandbox, seen: Seen) -> None:
    def next_one(payloads_by_id: PayloadsById) -> None:
        number = int(next(iter(payloads_by_id)))
        if number < 9:
            orders.push(number + 1)
        else:
            mails.push("m")

    mails = worker(new_app("b"), seen, "Mails")
    orders = worker(new_app("a"), seen, handler=next_one, shards_count=24)
    assert box.drain().batches == 0
    orders.push(0)
    drained = box.drain()
    assert (drained.performed, drained.batches) == (11, 11)
    orders.push(0)
    assert drain(orders).performed == 10


def test_it_says_or_raises_what_handlers_raised(box: Sandbox, app: lowq.Lowq) -> None:
    made = worker(app, [], handler=lambda payloads_by_id: [1 / 0 for job_id in payloads_by_id if job_id != "good"])
    made.perform_async({"id": n} for n in ["good", *range(20)])
    drained = box.drain()
    assert (drained.performed, drained.failed, len(drained.errors)) == (1, 20, 10)
    assert drained.errors[0] == "ZeroDivisionError('division by zero')"
    assert asyncio.run(box.adrain()).errors == ()
    made.push("bad")
    with pytest.raises(ZeroDivisionError):
        box.drain(raises=True)


def test_a_shard_that_got_jobs_in_another_way_is_drained_too(box: Sandbox, app: lowq.Lowq, seen: Seen) -> None:
    made = worker(app, seen, shards_count=3)
    made.push("first")
    prefix = shard_prefix("lowq", "Orders", shard_of(b"other", 3))
    # As a script would that is not known here.
    app.client.command("HSET", f"{prefix}payloads", "other", "1 5")
    app.client.command("ZADD", f"{prefix}due", 1, "other")
    run_script(app.client, "perform_now", prefix, "", "", "", "other")
    assert box.drain().performed == 2
    assert {"other": [5]} in seen
    assert load_scripts().keys() >= WITHOUT_JOBS, "scripts that bring no jobs are known by their names"
    assert not {"push", "kick", "perform_now"} & WITHOUT_JOBS


def test_in_a_running_loop(box: Sandbox, app: lowq.Lowq, seen: Seen) -> None:
    made = async_worker(app, seen)

    async def story() -> None:
        await asyncio.gather(*(made.apush(n, n) for n in range(5)))
        with pytest.raises(ConfigError, match=r"with the fixtures: await lowq_adrain\(\)"):
            box.drain()
        assert (await box.adrain(limit=2)).performed == 2
        assert (await box.adrain()).performed == 3
        await made.apush(6)
        box.crash()
        assert (await box.adrain()).performed == 1

    asyncio.run(story())
    assert len(seen) == 7
    made.push(9)
    assert box.drain().performed == 1


# --- the clock ---


def test_retries_delays_debounce_and_ttl_go_by_the_clock(box: Sandbox, app: lowq.Lowq, seen: Seen) -> None:
    def fail(payloads_by_id: PayloadsById) -> None:
        if "bad" in payloads_by_id:
            raise ValueError

    made = worker(app, seen, handler=fail, max_retry_count=1)
    quiet = worker(app, seen, "Quiet", debounce=600, max_wait=6000)
    made.push("bad")
    made.push("later", delay=3600)
    made.push("expires", delay=7200, ttl=7300)
    quiet.push(1, "a")
    assert box.drain().failed == 1
    box.clock.travel(500)
    quiet.push(1, "b")
    box.clock.travel(599)
    assert box.drain(quiet).batches == 0
    box.clock.travel(1)
    assert box.drain(quiet).performed == 1
    assert seen[-1] == {"1": ["a", "b"]}
    box.clock.travel(3600)
    drained = box.drain()
    assert (drained.performed, drained.failed) == (1, 1)
    assert made.queue.stats().morgue_length == 1
    box.clock.travel(timedelta(hours=1, minutes=2))
    assert box.drain().batches == 0
    assert made.queue.stats().length == 0


def test_a_time_is_that_of_the_clock(box: Sandbox, app: lowq.Lowq, seen: Seen) -> None:
    made = worker(app, seen, handler=lambda _: box.clock.travel(10))
    box.clock.travel(86400)
    assert box.clock.now() == pytest.approx(time.time() + 86400, abs=60)
    made.push("due", perform_at=box.clock.now() - 1)
    made.push("not", perform_at=box.clock.now() + 60)
    # All of these begin at that time, however they get there.
    made.push("delayed", delay=60)
    asyncio.run(made.apush("async", delay=60))
    made.perform_async({"id": f"one of {n}", "delay": 60} for n in range(200))
    assert box.drain().performed == 1
    assert made.queue.why("not").state == "scheduled"
    assert float(app.client.command("TIME")[0]) == pytest.approx(box.clock.now(), abs=60)
    box.clock.travel(50)
    assert box.drain(limit=5).performed == 5, "a handler may take long"


def test_a_drain_pushes_the_ticks_that_have_come_of_a_worker_that_is_named(box: Sandbox, app: lowq.Lowq) -> None:
    ticks: list[float] = []

    @lowq.every(60)
    @app.worker
    def report(_job_id: str, payloads: list[Any]) -> None:
        ticks.extend(payload["planned_at"] for payload in payloads)

    assert box.drain(report).performed == 0
    box.clock.travel(60)
    assert box.drain(report).performed == 1
    assert ticks[-1] % 60 == 0


# --- lost outcomes ---


def test_the_next_outcome_is_lost_and_the_job_redelivered(box: Sandbox, app: lowq.Lowq, seen: Seen) -> None:
    made = worker(app, seen, shards_count=3, handler=lambda _: 1 / (len(seen) - 1))
    made.push(1, "a")
    box.crash()  # a failure is lost as well
    drained = box.drain()
    assert (drained.performed, drained.failed, drained.batches) == (1, 0, 2)
    assert seen == [{"1": ["a"]}] * 2
    assert made.queue.stats().length == made.queue.stats().taken == 0
    box.assert_ordered()
    made.perform_async({"id": n} for n in range(20))
    box.crash()
    assert (box.drain().performed, len(seen)) == (20, 23)


def test_it_is_charged_a_crash_each_time_until_it_ends_in_the_morgue(box: Sandbox, app: lowq.Lowq, seen: Seen) -> None:
    made = worker(app, seen, max_crash_count=2)
    made.push(1)
    box.crash(times=2)
    box.drain(limit=1)
    job = made.queue.peek(1)
    assert job is not None
    assert (job.state, job.crashes, job.retry_count) == ("due", 1, -1)
    assert box.drain().performed == 0
    assert made.queue.stats().morgue_length == 1
    assert len(seen) == 2


def test_an_instance_is_lost_and_both_are_torn_down(box: Sandbox, app: lowq.Lowq) -> None:
    calls: list[str] = []

    @app.worker
    class Orders(lowq.Worker[Any]):
        def setup(self) -> None:
            self.count = 0
            calls.append("setup")

        def teardown(self) -> None:
            calls.append("teardown")

        def perform(self, payloads_by_id: PayloadsById) -> None:
            self.count += 1
            calls.append(f"perform {self.count}")

    Orders.push(1)
    box.crash()
    box.drain()
    assert calls == ["setup", "perform 1", "setup", "perform 1", "teardown", "teardown"]


def test_a_crash_that_never_comes_is_said_at_the_end() -> None:
    message = r"crash\(\) was to lose 2 outcome\(s\) more, and nothing was performed after that"
    with pytest.raises(AssertionError, match=message), sandbox() as box:
        box.crash(times=2)


# --- assert_pushed ---


def test_a_push_is_found_by_all_that_it_says(box: Sandbox, app: lowq.Lowq) -> None:
    made = worker(app, [], ttl=600)
    at = datetime(2100, 1, 1, tzinfo=UTC)
    made.push(42, {"b": 1, "a": [2]}, score=1e9, delay=timedelta(minutes=1), priority=3)
    made.push("x", perform_at=at, ttl=5)
    (pushed,) = box.assert_pushed(made, id=42, payload={"a": [2], "b": 1}, score=1e9, delay=60, priority=3, ttl=600)
    assert (pushed.queue, pushed.id, pushed.payload, pushed.score) == ("Orders", "42", {"a": [2], "b": 1}, 1e9)
    matches: list[dict[str, Any]] = [
        {"id": "42"}, {"payload": {"a": ANY, "b": ANY}}, {"perform_at": at}, {"ttl": 5}, {"times": 2},
        {"perform_at": at.timestamp(), "priority": 0}, {"id": "x", "payload": "", "score": None},
    ]  # fmt: skip
    for options in matches:
        assert box.assert_pushed(made, **options), options
    others: list[dict[str, Any]] = [
        {"id": 43}, {"payload": {"a": [2]}}, {"score": 8}, {"delay": 61}, {"ttl": 6}, {"priority": 1},
        {"perform_at": 1e10}, {"times": 1}, {"times": 0}, {"id": 42, "score": None},
    ]  # fmt: skip
    for options in others:
        with pytest.raises(AssertionError, match="Orders: "):
            box.assert_pushed(made, **options)
    assert box.assert_pushed(made, id=43, times=0) == []


def test_true_is_not_one_in_what_is_asserted(box: Sandbox) -> None:
    queue = lowq.Lowq().queue("flags", 1)
    queue.push([{"id": 1, "payload": {"paid": 1, "lines": [{"n": 0}]}}, {"id": 2, "payload": {"paid": True}}])
    assert [pushed.id for pushed in box.assert_pushed("flags", payload={"paid": True})] == ["2"]
    assert [pushed.id for pushed in box.assert_pushed("flags", payload={"paid": 1.0, "lines": [ANY]})] == ["1"]
    for wrong in ({"paid": 1}, {"paid": True, "lines": [{"n": 0}]}, {"paid": 1, "lines": [{"n": False}]}, True):
        with case(wrong), pytest.raises(AssertionError):
            box.assert_pushed("flags", payload=wrong)


def test_each_way_to_push_counts_and_what_was_refused_does_not(box: Sandbox, app: lowq.Lowq) -> None:
    made, full = worker(app, [], shards_count=2), worker(app, [], "Full", shards_count=1, capacity=1)
    made.push(1)
    made.perform_async([{"id": n} for n in range(2, 2000)])
    app.queue("Orders").push({"id": 2000})
    app.queue("Orders").put("an id of its own")

    async def some() -> None:
        await asyncio.gather(*(made.apush(n) for n in range(2001, 2010)))

    asyncio.run(some())
    assert len({pushed.id for pushed in box.assert_pushed(made, times=2010)}) == 2010
    full.push(1, "a")
    with pytest.raises(QueueFull):
        full.push(2)
    with pytest.raises(JobError):
        full.push(3, object())
    box.drain(full)
    box.assert_pushed(full, id=1, payload="a", times=1)
    box.assert_pushed(worker(new_app("b"), [], "Full"), times=0)  # in another store


def test_what_middlewares_made_of_it_was_pushed(box: Sandbox) -> None:
    def stamp(_worker: Any, jobs: list[Any], call_next: Callable[[], None]) -> None:
        for job in jobs:
            job["payload"] = {"stamped": job["payload"]}
        call_next()

    made = worker(new_app(client_middlewares=[stamp]), [])
    made.push(1, "a")
    box.assert_pushed(made, payload={"stamped": "a"})


def test_a_failure_lists_what_was_pushed_the_most_similar_first(box: Sandbox, app: lowq.Lowq) -> None:
    made = worker(app, [])
    with pytest.raises(AssertionError) as nothing:
        box.assert_pushed(made, id=42)
    assert str(nothing.value) == "Orders: nothing was pushed with id '42'; nothing was pushed at all"
    made.push(7, {"version": 1}, delay=30)
    made.push(42, {"version": 1}, score=1, priority=2)
    with pytest.raises(AssertionError) as other:
        box.assert_pushed(made, id=42, payload={"version": 2}, score=1)
    assert str(other.value) == (
        "Orders: nothing was pushed with id '42', payload {'version': 2}, score 1.0\n"
        "pushed to Orders (2):\n"
        "  id '42'  payload {'version': 1}  score 1.0  priority 2   <- another payload\n"
        "  id '7'  payload {'version': 1}  delay 30.0   <- another id, payload, score"
    )
    with pytest.raises(AssertionError, match=r"^Orders: pushed 2 times, not once\npushed to Orders \(2\):\n  id '7'"):
        box.assert_pushed(made, times=1)
    with pytest.raises(AssertionError, match=r"^letters: nothing was pushed\nto other queues: Orders \(2\)$"):
        box.assert_pushed("letters")
    mails = worker(app, [], "Mails")
    mails.perform_async({"id": n, "payload": "x" * 1000} for n in range(50))
    with pytest.raises(AssertionError) as found:
        box.assert_pushed(mails, id="none")
    lines = str(found.value).splitlines()
    assert lines[-1] == "  and 30 more"
    assert max(map(len, lines)) < 400


def test_arguments_that_make_no_sense_are_refused(box: Sandbox, app: lowq.Lowq) -> None:
    made = worker(app, [])
    rows: list[tuple[Callable[..., object], tuple[Any, ...], dict[str, Any], type[Exception], str]] = [
        (box.assert_pushed, (42,), {}, ConfigError, r"is no worker; decorate it with @lowq\.worker"),
        (box.assert_pushed, (lowq.Worker,), {}, ConfigError, r"is no worker; decorate it with @lowq\.worker"),
        (box.assert_pushed, (made,), {"times": -1}, ConfigError, r"assert_pushed\(times=-1\): write how many times"),
        (box.assert_pushed, (made,), {"times": True}, ConfigError, r"\(times=True\): write how many times"),
        (box.assert_pushed, (made,), {"job_id": 1}, ConfigError, r"\(job_id=...\): it may be asked for id, payload,"),
        (box.assert_pushed, (made,), {"id": 1.5}, JobError, "an id is a str, an int or a UUID"),
        (box.assert_pushed, (made,), {"score": "x"}, JobError, "score 'x' is of type str"),
        (box.assert_ordered, ("Orders",), {}, ConfigError, "is no worker"),
        (box.crash, (), {"times": 0}, ConfigError, r"crash\(times=0\): write how many outcomes are to be lost"),
        (box.crash, (), {"times": True}, ConfigError, r"crash\(times=True\): write how many outcomes"),
        (box.clock.travel, (timedelta(seconds=-1),), {}, ConfigError, "the clock of Redis goes forward only"),
        (box.clock.travel, (float("nan"),), {}, ConfigError, r"travel\(nan\): write seconds, or a timedelta"),
        (box.clock.travel, ("1",), {}, ConfigError, r"travel\('1'\): write seconds, or a timedelta"),
    ]
    for function, arguments, options, kind, message in rows:
        with case(message), pytest.raises(kind, match=message):
            function(*arguments, **options)


# --- assert_ordered ---


@pytest.mark.parametrize("merge", ["collapse", "append", "latest"])
def test_what_a_sound_build_does_is_in_order(box: Sandbox, app: lowq.Lowq, seen: Seen, merge: str) -> None:
    def sometimes(payloads_by_id: PayloadsById) -> None:
        if len(seen) % 3 == 0:
            raise ValueError
        if len(seen) % 5 == 0:
            lowq.current().bury("1", "no")
        if len(seen) % 7 == 0:
            made.push(1, f"pushed meanwhile {len(seen)}", score=1.1e9 - len(seen))

    options: dict[str, Any] = {"shards_count": 2, "batch_size": 3, "max_payloads": 4, "max_retry_count": 1}
    made = worker(app, seen, handler=sometimes, merge=merge, **options)
    for step in range(24):
        for n in range(10):
            made.push(n % 3 + 1, (step * n) % 7, score=1.1e9 + (step * 31 + n) % 11 if n % 2 else None)
        if step % 4 == 0:
            box.crash()
        box.drain(limit=4)
        box.clock.travel(60 * step)
        if step % 6 == 0:
            made.queue.delete(["2"])
        if step > 15:  # from then on less is followed
            made.queue.kick_oldest(1)
    box.drain()
    made.push(1)
    box.drain()
    box.assert_ordered()
    box.assert_ordered(made)


def test_there_must_be_something_to_check(box: Sandbox, app: lowq.Lowq) -> None:
    made, other = worker(app, []), worker(app, [], "Mails")
    with pytest.raises(AssertionError, match="nothing was handed over, so there is no order to be checked; drain"):
        box.assert_ordered()
    other.push(1)
    box.drain()
    box.assert_ordered()
    with pytest.raises(AssertionError, match="nothing of Orders was handed over"):
        box.assert_ordered(made)


def break_script(monkeypatch: pytest.MonkeyPatch, name: str, calls: dict[str, str]) -> None:
    monkeypatch.setitem(load_scripts(), name, break_scripts([name], calls=calls)[name])


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ("if string.find(key, 'payloads:', 1, true) then args[5] = 'REV' args[4] = 'WITHSCORES' end",
         "'v3' (score 3)"),
        ("if string.find(key, 'payloads:', 1, true) then args[2] = args[2] + 1 end",
         "and not what was pushed before and comes first: 'v1'"),
    ],
    ids=["newest-first", "oldest-left-behind"],
)  # fmt: skip
def test_a_build_with_another_order_is_found(monkeypatch: pytest.MonkeyPatch, broken: str, said: str) -> None:
    break_script(monkeypatch, "ack_and_take", {"ZRANGE": broken})
    with sandbox() as box:
        made = worker(new_app(), [], max_payloads=2)
        for score in (1, 2, 3):
            made.push(42, f"v{score}", score=score)
        box.drain(limit=1)
        with pytest.raises(AssertionError, match=r"^payloads were not handed .*:\n  Orders, id '42'") as found:
            box.assert_ordered(made)
    assert said in str(found.value)


@pytest.mark.parametrize("scores", [(1, 2), (None, None)], ids=["scores", "scores-by-the-clock"])
def test_a_build_that_forgets_what_a_dead_owner_had_is_found(
    monkeypatch: pytest.MonkeyPatch, scores: tuple[float | None, ...]
) -> None:
    break_script(monkeypatch, "acquire", {"HRANDFIELD": "real('DEL', key)"})
    message = r"  Orders, id '42': handed over 'v2' \(score .*\), and not what was pushed .*: 'v1' \(score .*\)$"
    with sandbox() as box:
        made = worker(new_app(), [])
        made.push(42, "v1", score=scores[0])
        box.crash()
        box.drain()
        made.push(42, "v2", score=scores[1])
        box.drain()
        with pytest.raises(AssertionError, match=message):
            box.assert_ordered()


def changing(change: Callable[[list[Any]], list[Any]]) -> dict[str, Any]:
    """A middleware that changes what handlers get."""

    def middleware(_worker: Any, batch: PayloadsById, call_next: Callable[[], None]) -> None:
        for payloads in batch.values():
            payloads[:] = change(payloads)
        call_next()

    return {"server_middlewares": [middleware]}


def test_middlewares_and_merge_functions_that_change_the_order_are_found(box: Sandbox) -> None:
    has_changed = "a middleware or the merge function has changed the order: perform got 2, 1"
    rows: list[tuple[str, dict[str, Any], Any, str]] = [
        ("reverses", changing(lambda payloads: payloads[::-1]), "collapse", has_changed),
        ("newest", changing(lambda payloads: payloads[1:]), "collapse", "a middleware has left out payloads: perform"),
        ("envelopes", changing(lambda payloads: [{"of": payload} for payload in payloads[::-1]]), "collapse", ""),
        ("merge-reverses", {}, lambda payloads: payloads[::-1], has_changed),
        ("merge-newest", {}, lambda payloads: payloads[-1:], ""),
        ("merge-sums", {}, lambda payloads: [sum(payloads)], ""),
    ]
    for name, options, merge, said in rows:
        with case(name):
            made = worker(new_app(**options), [], name, merge=merge)
            made.push(1, 1, score=1)
            made.push(1, 2, score=2)
            box.drain()
            if not said:
                box.assert_ordered(made)
                continue
            with pytest.raises(AssertionError) as found:
                box.assert_ordered(made)
            assert f"  {name}, id '1': {said}" in str(found.value)


class Bought(msgspec.Struct):
    version: int


def test_payloads_of_a_type_are_asserted_as_such(box: Sandbox, app: lowq.Lowq) -> None:
    handed_over: list[Bought] = []

    @app.worker
    class Buys(lowq.Worker[Bought]):
        def perform_one(self, job_id: str, payloads: list[Bought]) -> None:
            handed_over.extend(payloads)

    Buys.push(42, Bought(2), score=2)
    Buys.push(42, Bought(1), score=1)
    assert [pushed.payload for pushed in box.assert_pushed(Buys, 42, Bought(2), times=1)] == [Bought(2)]
    with pytest.raises(AssertionError, match="version=1"):
        box.assert_pushed(Buys, 42, Bought(3))
    assert box.drain().performed == 1
    box.assert_ordered()
    assert handed_over == [Bought(1), Bought(2)]
