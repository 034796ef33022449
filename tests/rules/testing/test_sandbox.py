"""lowq.testing.sandbox: all applications on empty embedded stores, their clock, lost outcomes, and what is asserted."""

import asyncio
import signal
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
from lowq.store import scripts
from lowq.store.keys import shard_prefix
from lowq.store.scripts import load_scripts
from lowq.testing import Sandbox, drain, sandbox
from lowq.testing.sandbox import WITHOUT_JOBS
from lowq.workers import Worker
from tests.mutants import break_scripts
from tests.rows import case

PayloadsById = dict[str, list[Any]]


@pytest.fixture
def box() -> Iterator[Sandbox]:
    with sandbox() as box:
        yield box


@pytest.fixture
def app(box: Sandbox) -> lowq.Lowq:
    # Nothing listens there: whatever went past the store would fail.
    return lowq.Lowq(redis_url="redis://127.0.0.1:1/0")


@pytest.fixture
def seen() -> list[PayloadsById]:
    return []


def worker(
    app: lowq.Lowq,
    seen: list[PayloadsById],
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


# --- the stores ---


class TestStores:
    def test_an_application_that_was_connected_before_is_as_it_was_afterwards(self, seen: list[PayloadsById]) -> None:
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
        assert seen == [{"inside": [""]}] * 2
        assert {job.id for job in before.queue.jobs("due")} == {"outside"}
        app.close()

    def test_workers_of_a_module_stay(self) -> None:
        app = lowq.Lowq()
        with sandbox():
            made = worker(app, [])
            made.__qualname__ = "Orders"  # as of a module that is imported meanwhile
        assert app.workers == {"Orders": made}

    def test_applications_share_a_store_when_they_name_the_same_redis(self, box: Sandbox) -> None:
        first, second, other, own, another = (
            lowq.Lowq(redis_url=url) for url in ("redis://a/0", "redis://a/0", "redis://b/0", "memory://", "memory://")
        )
        for app in (first, other, own):
            app.queue("Orders", 1).push(1)
        assert [len(app.queues()) for app in (first, second, other, own, another)] == [1, 1, 1, 1, 0]
        assert [pushed.queue for pushed in box.assert_pushed("Orders")] == ["Orders"] * 3

    def test_what_holds_a_pool_of_its_own_is_embedded_with_its_application(self, app: lowq.Lowq) -> None:
        other = app.with_own_pool(1)
        app.queue("Orders", 1).push(1)
        assert [queue.name for queue in other.queues()] == ["Orders"]

    def test_an_application_that_is_not_used_any_more_takes_no_jobs(self, seen: list[PayloadsById]) -> None:
        stale = [lowq.Lowq(redis_url="redis://a/0") for _ in range(2)]
        for app in stale:
            worker(app, [], shards_count=7)
        with sandbox() as box:
            app = lowq.Lowq(redis_url="redis://a/0")
            worker(app, seen, shards_count=3).push(1)
            box.drain()
        assert seen == [{"1": [""]}]

    def test_there_is_one_at_a_time(self, box: Sandbox) -> None:
        with pytest.raises(ConfigError, match="there is a sandbox already"), sandbox():
            pass
        assert lowq.Lowq().queues() == []

    def test_another_is_possible_after_one_that_failed(self) -> None:
        with pytest.raises(ZeroDivisionError), sandbox():
            raise ZeroDivisionError
        with sandbox():
            pass


# --- drain ---


class TestDrain:
    def test_workers_of_all_applications_with_what_handlers_push(self, box: Sandbox, seen: list[PayloadsById]) -> None:
        first, second = lowq.Lowq(redis_url="redis://a/0"), lowq.Lowq(redis_url="redis://b/0")
        mails = worker(second, seen, "Mails")
        orders = worker(first, seen, handler=lambda _: mails.push("m"), shards_count=24)
        assert box.drain().batches == 0
        orders.push(1)
        drained = box.drain()
        assert (drained.performed, drained.batches) == (2, 2)
        assert seen == [{"1": [""]}, {"m": [""]}]

    def test_jobs_that_a_handler_pushes_to_other_shards_of_its_queue(
        self, box: Sandbox, app: lowq.Lowq, seen: list[PayloadsById]
    ) -> None:
        def next_one(payloads_by_id: PayloadsById) -> None:
            number = int(next(iter(payloads_by_id)))
            if number < 9:
                made.push(number + 1)

        made = worker(app, seen, handler=next_one, shards_count=24)
        made.push(0)
        assert box.drain().performed == 10
        seen.clear()
        made.push(0)
        assert drain(made).performed == 10

    def test_limit_and_workers_bound_it_also_of_what_another_application_pushed(
        self, box: Sandbox, app: lowq.Lowq, seen: list[PayloadsById]
    ) -> None:
        orders, mails = worker(app, seen, shards_count=3), worker(app, seen, "Mails")
        lowq.Lowq(redis_url="redis://127.0.0.1:1/0").queue("Orders", 3).push({"id": n} for n in range(5))
        mails.push(1)
        assert box.drain(mails).performed == 1
        assert [box.drain(limit=limit).performed for limit in (3, 0, 9)] == [3, 0, 2]
        assert orders.queue.stats().processed == 5

    def test_raises_hands_on_what_the_handler_raises(self, box: Sandbox, app: lowq.Lowq) -> None:
        made = worker(app, [], handler=lambda _: 1 / 0)
        made.push(1)
        with pytest.raises(ZeroDivisionError):
            box.drain(raises=True)

    def test_it_says_what_handlers_raised(self, box: Sandbox, app: lowq.Lowq) -> None:
        made = worker(app, [], handler=lambda payloads_by_id: [1 / 0 for job_id in payloads_by_id if job_id != "good"])
        made.perform_async({"id": n} for n in ["good", *range(20)])
        drained = box.drain()
        assert (drained.performed, drained.failed, len(drained.errors)) == (1, 20, 10)
        assert drained.errors[0] == "ZeroDivisionError('division by zero')"
        assert asyncio.run(box.adrain()).errors == ()

    def test_an_error_that_can_not_be_shown_harms_nothing(self, box: Sandbox, app: lowq.Lowq) -> None:
        class Hostile(Exception):
            def __repr__(self) -> str:
                raise SystemExit("no such thing")

            __str__ = __repr__

        @app.worker
        class Awaits(lowq.Worker[Any]):
            async def perform(self, payloads_by_id: PayloadsById) -> None:
                raise Hostile

        before = signal.getsignal(signal.SIGINT)
        Awaits.push(1)
        assert "Hostile" in repr(box.drain())
        assert signal.getsignal(signal.SIGINT) is before  # asyncio shows the result of a loop's task

    def test_a_shard_that_got_jobs_in_another_way_is_drained_too(
        self, box: Sandbox, app: lowq.Lowq, seen: list[PayloadsById]
    ) -> None:
        made = worker(app, seen, shards_count=3)
        made.push("first")
        shard = shard_of(b"other", 3)
        # As a script would that is not known here.
        app.client.command("SET", f"{shard_prefix('lowq', 'Orders', shard)}payloads:other", "1 5")
        app.client.command("ZADD", f"{shard_prefix('lowq', 'Orders', shard)}due", 1, "other")
        app.client.run("perform_now", shard_prefix("lowq", "Orders", shard), "", "", "", "other")
        assert box.drain().performed == 2
        assert {"other": [5]} in seen

    def test_scripts_that_bring_no_jobs_are_known_by_their_names(self) -> None:
        assert load_scripts().keys() >= WITHOUT_JOBS
        assert not {"push", "kick", "perform_now"} & WITHOUT_JOBS

    def test_in_a_running_loop(self, box: Sandbox, app: lowq.Lowq, seen: list[PayloadsById]) -> None:
        @app.worker
        class Awaits(lowq.Worker[Any]):
            async def perform(self, payloads_by_id: PayloadsById) -> None:
                await asyncio.sleep(0)
                seen.append(payloads_by_id)

        async def story() -> None:
            await asyncio.gather(*(Awaits.apush(n, n) for n in range(5)))
            with pytest.raises(ConfigError, match=r"with the fixtures: await lowq_adrain\(\)"):
                box.drain()
            assert (await box.adrain(limit=2)).performed == 2
            assert (await box.adrain()).performed == 3

        asyncio.run(story())
        assert len(box.assert_pushed(Awaits, times=5)) == 5
        Awaits.push(9)
        assert box.drain().performed == 1

    def test_a_node_may_run_in_it(self, box: Sandbox, app: lowq.Lowq, seen: list[PayloadsById]) -> None:
        made = worker(app, seen, shards_count=2)
        app.config.concurrency = 1
        made.push(1, "b", score=2)
        made.push(1, "a", score=1)
        with made.queue.consumer() as consumer:
            (job,) = consumer.take(timeout=30)
            assert job.payloads == ["a", "b"]
            job.ack()
        box.assert_ordered(made)


# --- the clock ---


class TestClock:
    def test_retries_delays_and_ttl_go_by_it(self, box: Sandbox, app: lowq.Lowq, seen: list[PayloadsById]) -> None:
        def fail(payloads_by_id: PayloadsById) -> None:
            if "bad" in payloads_by_id:
                raise ValueError

        made = worker(app, seen, handler=fail, max_retry_count=1)
        made.push("bad")
        made.push("later", delay=3600)
        made.push("expires", delay=7200, ttl=7300)
        assert box.drain().failed == 1
        assert box.drain().batches == 0
        box.clock.travel(3600)
        drained = box.drain()
        assert (drained.performed, drained.failed) == (1, 1)
        assert made.queue.stats().morgue_length == 1
        box.clock.travel(timedelta(hours=1, minutes=2))
        assert box.drain().batches == 0
        assert made.queue.stats().length == 0
        assert list(map(list, seen)) == [["bad"], ["bad"], ["later"]] or len(seen) == 3

    def test_debounce_goes_by_it(self, box: Sandbox, app: lowq.Lowq, seen: list[PayloadsById]) -> None:
        made = worker(app, seen, debounce=600, max_wait=6000)
        made.push(1, "a")
        box.clock.travel(500)
        made.push(1, "b")
        box.clock.travel(500)
        assert box.drain().batches == 0
        box.clock.travel(100)
        assert box.drain().performed == 1
        assert seen == [{"1": ["a", "b"]}]

    def test_a_time_is_that_of_the_clock(self, box: Sandbox, app: lowq.Lowq, seen: list[PayloadsById]) -> None:
        made = worker(app, seen)
        box.clock.travel(86400)
        assert 86400 - 60 < box.clock.now() - time.time() < 86400 + 60
        made.push("due", perform_at=box.clock.now() - 1)
        made.push("not", perform_at=box.clock.now() + 60)
        # All of these begin at that time, however they get there.
        made.push("delayed", delay=60)
        asyncio.run(made.apush("async", delay=60))
        made.perform_async({"id": f"one of {n}", "delay": 60} for n in range(200))
        assert box.drain().performed == 1
        assert made.queue.why("not").state == "scheduled"
        assert float(app.client.command("TIME")[0]) == pytest.approx(box.clock.now(), abs=60)
        assert made.queue.stats().lag == 0

    def test_a_handler_may_take_long(self, box: Sandbox, app: lowq.Lowq, seen: list[PayloadsById]) -> None:
        made = worker(app, seen, handler=lambda _: box.clock.travel(3600), shards_count=1)
        made.perform_async([{"id": 1}, {"id": 2}])
        assert box.drain().performed == 2
        assert made.queue.stats().processed == 2

    def test_it_does_not_go_back(self, box: Sandbox) -> None:
        seconds: Any
        for seconds in (-1, timedelta(seconds=-1)):
            message = r"travel\(.*\): the clock of Redis goes forward only"
            with case(seconds), pytest.raises(ConfigError, match=message):
                box.clock.travel(seconds)

    def test_nonsense_is_refused(self, box: Sandbox) -> None:
        seconds: Any
        for seconds in ("1", None, float("nan"), True):
            with case(seconds), pytest.raises(ConfigError, match=r"travel\(.*\): write seconds, or a timedelta"):
                box.clock.travel(seconds)


# --- lost outcomes ---


class TestCrash:
    def test_the_next_outcome_is_lost_and_the_job_redelivered(
        self, box: Sandbox, app: lowq.Lowq, seen: list[PayloadsById]
    ) -> None:
        made = worker(app, seen, shards_count=3)
        made.push(1, "a")
        box.crash()
        drained = box.drain()
        assert (drained.performed, drained.failed, drained.batches) == (1, 0, 2)
        assert seen == [{"1": ["a"]}] * 2
        assert made.queue.stats().length == made.queue.stats().taken == 0
        made.push(1, "b")
        assert box.drain().batches == 1
        box.assert_ordered()

    def test_between_two_drains_it_waits_and_is_charged_a_crash(
        self, box: Sandbox, app: lowq.Lowq, seen: list[PayloadsById]
    ) -> None:
        made = worker(app, seen)
        made.push(1)
        box.crash()
        box.drain(limit=1)
        job = made.queue.peek(1)
        assert job is not None
        assert (job.state, job.crashes, job.retry_count) == ("due", 1, -1)
        assert box.drain().performed == 1

    def test_what_kills_its_process_each_time_ends_in_the_morgue(
        self, box: Sandbox, app: lowq.Lowq, seen: list[PayloadsById]
    ) -> None:
        made = worker(app, seen, max_crash_count=2)
        made.push(1)
        box.crash(times=2)
        assert box.drain().performed == 0
        assert made.queue.stats().morgue_length == 1
        assert len(seen) == 2

    def test_other_ids_keep_their_outcomes(self, box: Sandbox, app: lowq.Lowq, seen: list[PayloadsById]) -> None:
        made = worker(app, seen, shards_count=5)
        made.perform_async({"id": n} for n in range(20))
        box.crash()
        assert (box.drain().performed, len(seen)) == (20, 21)

    def test_a_failure_is_lost_as_well(self, box: Sandbox, app: lowq.Lowq, seen: list[PayloadsById]) -> None:
        made = worker(app, seen, handler=lambda _: 1 / (len(seen) - 1))
        made.push(1)
        box.crash()
        drained = box.drain()
        assert (drained.performed, drained.failed) == (1, 0)

    def test_an_instance_is_lost_and_both_are_torn_down(self, box: Sandbox, app: lowq.Lowq) -> None:
        calls: list[str] = []

        @app.worker
        class Orders(lowq.Worker[Any]):
            def __init__(self) -> None:
                self.count = 0

            def setup(self) -> None:
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

    def test_async_workers_lose_it_too(self, box: Sandbox, app: lowq.Lowq, seen: list[PayloadsById]) -> None:
        @app.worker
        class Awaits(lowq.Worker[Any]):
            async def perform(self, payloads_by_id: PayloadsById) -> None:
                seen.append(payloads_by_id)

        Awaits.push(1)
        box.crash()
        assert asyncio.run(box.adrain()).performed == 1
        assert len(seen) == 2

    def test_one_that_never_comes_is_said_at_the_end(self) -> None:
        message = r"crash\(\) was to lose 2 outcome\(s\) more, and nothing was performed after that"
        with pytest.raises(AssertionError, match=message), sandbox() as box:
            box.crash(times=2)

    def test_nonsense_is_refused(self, box: Sandbox) -> None:
        times: Any
        for times in (0, -1, 1.5, True, "1"):
            message = r"crash\(times=.*\): write how many outcomes are to be lost"
            with case(times), pytest.raises(ConfigError, match=message):
                box.crash(times)


# --- assert_pushed ---


class TestAssertPushed:
    def test_by_all_that_a_push_says(self, box: Sandbox, app: lowq.Lowq) -> None:
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

    def test_it_stays_pushed_when_it_was_performed(self, box: Sandbox, app: lowq.Lowq) -> None:
        made = worker(app, [])
        made.push(1, "a")
        box.drain()
        box.assert_pushed(made, id=1, payload="a", times=1)

    def test_each_way_to_push(self, box: Sandbox, app: lowq.Lowq) -> None:
        made = worker(app, [], shards_count=2)
        made.push(1)
        made.perform_async([{"id": n} for n in range(2, 2000)])
        app.queue("Orders").push({"id": 2000})
        app.queue("Orders").put("an id of its own")

        async def some() -> None:
            await asyncio.gather(*(made.apush(n) for n in range(2001, 2010)))

        asyncio.run(some())
        assert len({pushed.id for pushed in box.assert_pushed(made, times=2010)}) == 2010

    def test_what_was_refused_was_not_pushed(self, box: Sandbox, app: lowq.Lowq) -> None:
        made = worker(app, [], shards_count=1, capacity=1)
        made.push(1)
        with pytest.raises(QueueFull):
            made.push(2)
        with pytest.raises(JobError):
            made.push(3, object())
        box.assert_pushed(made, times=1)

    def test_what_middlewares_made_of_it(self, box: Sandbox) -> None:
        def stamp(_worker: Any, jobs: list[Any], call_next: Callable[[], None]) -> None:
            for job in jobs:
                job["payload"] = {"stamped": job["payload"]}
            call_next()

        app = lowq.Lowq(redis_url="redis://127.0.0.1:1/0", client_middlewares=[stamp])
        made = worker(app, [])
        made.push(1, "a")
        box.assert_pushed(made, payload={"stamped": "a"})

    def test_a_queue_without_a_worker(self, box: Sandbox, app: lowq.Lowq) -> None:
        app.queue("mail", 1).push(1)
        box.assert_pushed("mail", id=1)
        with pytest.raises(AssertionError, match=r"^letters: nothing was pushed\nto other queues: mail \(1\)$"):
            box.assert_pushed("letters")

    def test_workers_of_one_name_in_two_stores_are_two(self, box: Sandbox) -> None:
        first, second = (worker(lowq.Lowq(redis_url=f"redis://{host}/0"), []) for host in "ab")
        first.push(1)
        box.assert_pushed(first, times=1)
        box.assert_pushed(second, times=0)

    def test_a_failure_lists_what_was_pushed_the_most_similar_first(self, box: Sandbox, app: lowq.Lowq) -> None:
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
        with pytest.raises(AssertionError) as often:
            box.assert_pushed(made, times=1)
        assert str(often.value).startswith("Orders: pushed 2 times, not once\npushed to Orders (2):\n  id '7'")

    def test_a_failure_is_not_endless(self, box: Sandbox, app: lowq.Lowq) -> None:
        made = worker(app, [])
        made.perform_async({"id": n, "payload": "x" * 1000} for n in range(50))
        with pytest.raises(AssertionError) as found:
            box.assert_pushed(made, id="none")
        lines = str(found.value).splitlines()
        assert lines[-1] == "  and 30 more"
        assert max(map(len, lines)) < 400

    def test_arguments_that_make_no_sense_are_refused(self, box: Sandbox, app: lowq.Lowq) -> None:
        made = worker(app, [])
        for target in (None, 42, int, lowq.Worker):
            with pytest.raises(ConfigError, match=r"is no worker; decorate it with @lowq\.worker"):
                box.assert_pushed(target)  # type: ignore[arg-type]  # which it says
        for times in (-1, 1.5, True, "1"):
            with pytest.raises(ConfigError, match=r"assert_pushed\(times=.*\): write how many times"):
                box.assert_pushed(made, times=times)  # type: ignore[arg-type]  # which it says
        with pytest.raises(ConfigError, match=r"assert_pushed\(job_id=...\): it may be asked for id, payload, score"):
            box.assert_pushed(made, job_id=1)  # type: ignore[call-arg]  # which it says
        with pytest.raises(JobError, match="an id is a str, an int or a UUID"):
            box.assert_pushed(made, id=1.5)  # type: ignore[arg-type]  # which it says
        with pytest.raises(JobError, match="score 'x' is of type str"):
            box.assert_pushed(made, score="x")  # type: ignore[arg-type]  # which it says


# --- assert_ordered ---


def reverse(_worker: Any, batch: PayloadsById, call_next: Callable[[], None]) -> None:
    for payloads in batch.values():
        payloads.reverse()
    call_next()


def only_newest(_worker: Any, batch: PayloadsById, call_next: Callable[[], None]) -> None:
    for payloads in batch.values():
        del payloads[:-1]
    call_next()


def in_envelopes(_worker: Any, batch: PayloadsById, call_next: Callable[[], None]) -> None:
    for payloads in batch.values():
        payloads[:] = [{"envelope": payload} for payload in reversed(payloads)]
    call_next()


def break_script(monkeypatch: pytest.MonkeyPatch, name: str, calls: dict[str, str]) -> None:
    monkeypatch.setitem(scripts.load_scripts(), name, break_scripts([name], calls=calls)[name])


class TestAssertOrdered:
    @pytest.mark.parametrize("merge", ["collapse", "append", "latest"])
    def test_what_a_sound_build_does_is_in_order(
        self, box: Sandbox, app: lowq.Lowq, seen: list[PayloadsById], merge: str
    ) -> None:
        def sometimes(payloads_by_id: PayloadsById) -> None:
            if len(seen) % 3 == 0:
                raise ValueError
            if len(seen) % 5 == 0:
                lowq.current().bury("1", "no")
            if len(seen) % 7 == 0:
                made.push(1, f"pushed meanwhile {len(seen)}", score=1.1e9 - len(seen))

        made = worker(
            app, seen, handler=sometimes, shards_count=2, batch_size=3, max_payloads=4, max_retry_count=1, merge=merge
        )
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

    def test_there_must_be_something_to_check(self, box: Sandbox, app: lowq.Lowq) -> None:
        made, other = worker(app, []), worker(app, [], "Mails")
        with pytest.raises(AssertionError, match="nothing was handed over, so there is no order to be checked; drain"):
            box.assert_ordered()
        other.push(1)
        box.drain()
        box.assert_ordered()
        with pytest.raises(AssertionError, match="nothing of Orders was handed over"):
            box.assert_ordered(made)
        with pytest.raises(ConfigError, match="is no worker"):
            box.assert_ordered("Orders")  # type: ignore[arg-type]  # which it says

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
    def test_a_build_that_hands_over_another_order_is_found(
        self, monkeypatch: pytest.MonkeyPatch, seen: list[PayloadsById], broken: str, said: str
    ) -> None:
        break_script(monkeypatch, "ack_and_take", {"ZRANGE": broken})
        with sandbox() as box:
            made = worker(lowq.Lowq(redis_url="redis://127.0.0.1:1/0"), seen, max_payloads=2)
            for score in (1, 2, 3):
                made.push(42, f"v{score}", score=score)
            box.drain(limit=1)
            with pytest.raises(AssertionError, match=r"^payloads were not handed .*:\n  Orders, id '42'") as found:
                box.assert_ordered(made)
        assert said in str(found.value)

    @pytest.mark.parametrize("scores", [(1, 2), (None, None)], ids=["scores", "scores-by-the-clock"])
    def test_a_build_that_forgets_what_a_dead_owner_had_is_found(
        self, monkeypatch: pytest.MonkeyPatch, seen: list[PayloadsById], scores: tuple[float | None, ...]
    ) -> None:
        break_script(monkeypatch, "acquire", {"HRANDFIELD": "real('DEL', key)"})
        with sandbox() as box:
            made = worker(lowq.Lowq(redis_url="redis://127.0.0.1:1/0"), seen)
            made.push(42, "v1", score=scores[0])
            box.crash()
            box.drain()
            made.push(42, "v2", score=scores[1])
            box.drain()
            message = (
                r"  Orders, id '42': handed over 'v2' \(score .*\), and not what was pushed .*: 'v1' \(score .*\)$"
            )
            with pytest.raises(AssertionError, match=message):
                box.assert_ordered()

    @pytest.mark.parametrize(
        ("middleware", "said"),
        [
            (reverse, "a middleware or the merge function has changed the order: perform got 'v2', 'v1'"),
            (only_newest, "a middleware has left out payloads: perform got 'v2'"),
            (in_envelopes, ""),
        ],
        ids=["reverse", "only_newest", "in_envelopes"],
    )
    def test_middlewares_that_change_what_a_handler_gets(
        self, box: Sandbox, seen: list[PayloadsById], middleware: Any, said: str
    ) -> None:
        app = lowq.Lowq(redis_url="redis://127.0.0.1:1/0", server_middlewares=[middleware])
        made = worker(app, seen)
        made.push(1, "v1", score=1)
        made.push(1, "v2", score=2)
        box.drain()
        if not said:
            box.assert_ordered()
            return
        with pytest.raises(AssertionError) as found:
            box.assert_ordered()
        assert f"  Orders, id '1': {said}" in str(found.value)

    @pytest.mark.parametrize(
        ("merge", "is_ordered"),
        [(lambda payloads: payloads[::-1], False), (lambda payloads: payloads[-1:], True),
         (lambda payloads: [sum(payloads)], True)],
        ids=["reverses", "newest", "sums"],
    )  # fmt: skip
    def test_merge_functions(
        self, box: Sandbox, app: lowq.Lowq, seen: list[PayloadsById], merge: Any, is_ordered: bool
    ) -> None:
        made = worker(app, seen, merge=merge)
        made.push(1, 1, score=1)
        made.push(1, 2, score=2)
        box.drain()
        if is_ordered:
            box.assert_ordered()
        else:
            with pytest.raises(AssertionError, match="the merge function has changed the order: perform got 2, 1"):
                box.assert_ordered()

    def test_a_failure_is_not_endless(self, box: Sandbox, seen: list[PayloadsById]) -> None:
        made = worker(lowq.Lowq(redis_url="redis://127.0.0.1:1/0", server_middlewares=[reverse]), seen)
        made.perform_async({"id": n // 2, "payload": n} for n in range(100))
        box.drain()
        with pytest.raises(AssertionError, match=r"\n  and 30 more$"):
            box.assert_ordered()


class Bought(msgspec.Struct):
    version: int


def test_true_is_not_one_in_what_is_asserted() -> None:
    with sandbox() as box:
        queue = lowq.Lowq().queue("flags", 1)
        queue.push([{"id": 1, "payload": {"paid": 1, "lines": [{"n": 0}]}}, {"id": 2, "payload": {"paid": True}}])
        assert [pushed.id for pushed in box.assert_pushed("flags", payload={"paid": True})] == ["2"]
        assert [pushed.id for pushed in box.assert_pushed("flags", payload={"paid": 1.0, "lines": [ANY]})] == ["1"]
        for wrong in ({"paid": 1}, {"paid": True, "lines": [{"n": 0}]}, {"paid": 1, "lines": [{"n": False}]}, True):
            with pytest.raises(AssertionError):
                box.assert_pushed("flags", payload=wrong)


def test_payloads_of_a_type_are_asserted_as_such() -> None:
    app = lowq.Lowq(redis_url="memory://")
    handed_over: list[Bought] = []

    @app.worker
    class Buys(lowq.Worker[Bought]):
        def perform_one(self, job_id: str, payloads: list[Bought]) -> None:
            handed_over.extend(payloads)

    with lowq.testing.sandbox() as box:
        Buys.push(42, Bought(2), score=2)
        Buys.push(42, Bought(1), score=1)
        assert [pushed.payload for pushed in box.assert_pushed(Buys, 42, Bought(2), times=1)] == [Bought(2)]
        with pytest.raises(AssertionError, match="version=1"):
            box.assert_pushed(Buys, 42, Bought(3))
        assert box.drain().performed == 1
        box.assert_ordered()
    assert handed_over == [Bought(1), Bought(2)]


def test_a_drain_pushes_the_ticks_that_have_come_of_a_worker_that_is_named() -> None:
    app = lowq.Lowq(redis_url="memory://")
    ticks: list[float] = []

    @lowq.every(60)
    @app.worker
    def report(_job_id: str, payloads: list[Any]) -> None:
        ticks.extend(payload["planned_at"] for payload in payloads)

    with lowq.testing.sandbox() as box:
        assert box.drain(report).performed == 0
        box.clock.travel(60)
        assert box.drain(report).performed == 1
        assert ticks[-1] % 60 == 0
