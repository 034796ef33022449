"""Producing: from perform_async and push to what is in the queue, on both stores."""

import asyncio
import itertools
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import UTC, datetime, timedelta
from types import MappingProxyType
from typing import Any
from uuid import UUID

import pytest
import redis

import lowq
from lowq.errors import (
    ConfigError,
    JobError,
    LowqError,
    PayloadError,
    PushError,
    PushInterrupted,
    RedisUnavailable,
    ShardsCountError,
    TimeLimitExceeded,
    UnknownQueueError,
)
from lowq.push.push import CHUNK_JOBS
from lowq.queue import Queue
from lowq.sharding import shard_of
from lowq.store import Call, Client, Command, connection, pool
from lowq.store.keys import queues_key, shard_prefix
from tests.batches import Batch, within_batch
from tests.redis_server import RedisServer
from tests.rows import case
from tests.tiers import real_redis_often
from tests.waiting import NEVER, PATIENCE

#: More than two chunks.
MANY = 20_000


@pytest.fixture
def queue(app: lowq.Lowq) -> Queue:
    return app.queue("Orders", 3)


def jobs(count: int, start: int = 0) -> Iterator[dict[str, Any]]:
    return ({"id": number, "payload": {"version": 1}, "score": 1} for number in range(start, start + count))


def payloads(queue: Queue, job_id: str | int) -> list[Any]:
    job = queue.peek(job_id)
    return [] if job is None else [payload for payload, _ in job.payloads]


def in_a_loop(push: Callable[..., Coroutine[Any, Any, int]]) -> Callable[..., int]:
    """An async push as a plain one."""
    return lambda *args, **options: asyncio.run(push(*args, **options))


def all_ids(queue: Queue) -> set[str]:
    ids: set[str] = set()
    cursor = None
    while True:
        page = queue.jobs(limit=1000, after=cursor)
        ids.update(job.id for job in page.jobs)
        cursor = page.cursor
        if cursor is None:
            return ids


# --- jobs in ---


def test_one_mapping_or_any_iterable_of_mappings_is_pushed_and_payloads_are_counted(app: lowq.Lowq) -> None:
    forms: tuple[Callable[[Iterable[Any]], Any], ...] = (list, tuple, deque, iter)
    for number, form in enumerate(forms):
        with case(form):
            queue = app.queue(f"Orders{number}", 3)
            assert queue.push(MappingProxyType({"id": 1, "payload": "a"})) == 1
            assert (
                queue.push(form([{"id": 1, "payload": "a"}, MappingProxyType({"id": 2}), {"id": 1, "payload": "b"}]))
                == 3
            )
            assert queue.push(form([])) == 0
            assert (all_ids(queue), payloads(queue, 1)) == ({"1", "2"}, ["a", "b"])


def test_what_is_no_iterable_of_jobs_is_refused(app: lowq.Lowq, queue: Queue) -> None:
    @app.worker(queue_name="Orders", shards_count=3)
    class Orders(lowq.Worker[int]):
        def perform(self, payloads_by_id: dict[str, list[int]]) -> None: ...

    wrong: Any
    for wrong in (None, 5, "id"):
        for push in (Orders.perform_async, in_a_loop(Orders.aperform_async)):
            with case(wrong), pytest.raises(JobError, match="jobs are one mapping or an iterable of mappings, not"):
                push(wrong)
    for wrong in (["id"], {1, 2}, [[{"id": 1}]], b"id"):
        for push in (in_a_loop(queue.apush), queue.push):
            with case(wrong), pytest.raises(JobError, match=r"queue 'Orders': .*mapping"):
                push(wrong)
    for wrong in ({"id": 42}, [{"id": 42}]):
        for push in (Orders.push, in_a_loop(Orders.apush)):
            with case(wrong), pytest.raises(JobError, match=r"are pushed by Orders\.perform_async\(jobs\)"):
                push(wrong)
    assert queue.stats().length == 0


def test_jobs_of_one_call_may_have_different_fields(queue: Queue) -> None:
    at = datetime(2100, 1, 1, tzinfo=UTC)
    accepted = queue.push(
        [
            {"id": 1},
            {"id": UUID(int=2), "payload": None},
            {"id": "3", "payload": [1], "score": 1e9 + 0.5},
            {"id": 4, "perform_at": at},
            {"id": 5, "perform_in": at.timestamp(), "score": 2e12},
            {"id": 6, "payload": "x", "delay": 3600},
            {"id": 8, "perform_at": 1_000_000_000},
        ]
    )
    assert accepted == 7
    found = queue.fetch([1, UUID(int=2), 3, 4, 5, 6, 8])
    scheduled = {job_id for job_id, job in found.items() if job.state == "scheduled"}
    assert (len(found), scheduled) == (7, {"4", "5", "6"})
    assert found["1"].payloads == [("", found["1"].perform_at)]
    assert found["3"].payloads == [([1], 1e9 + 0.5)]
    assert found["4"].perform_at == found["5"].perform_at == at.timestamp()
    one, six, eight = (found[job_id].perform_at or 0 for job_id in "168")
    assert one + 3599 < six
    assert eight >= one - 1  # the past is clamped to now


def test_each_id_goes_to_its_shard_and_is_kept_as_documented(app: lowq.Lowq, queue: Queue) -> None:
    for job_id in ("42", "\N{SNOWMAN}", "a:{b}"):
        queue.push({"id": job_id, "payload": {"status": "paid", "version": 3}, "score": 5})
        queue.push({"id": job_id, "payload": {"version": 3, "status": "paid"}, "score": 3})
        prefix = shard_prefix("lowq", "Orders", shard_of(job_id.encode(), 3))
        inline = app.client.command("HGET", f"{prefix}payloads", job_id, key=prefix)
        assert inline == b'3 {"status":"paid","version":3}'


def test_the_applications_codec_is_used_both_ways(store_url: str) -> None:
    app = lowq.Lowq(
        redis_url=store_url,
        dump_payload=lambda value: b",".join(b"%d" % item for item in sorted(value)),
        load_payload=lambda data: {int(item) for item in data.split(b",")},
    )
    queue = app.queue("Orders", 1)
    queue.push([{"id": 1, "payload": {3, 1, 2}}, {"id": 1, "payload": {1, 2, 3}}])
    assert payloads(queue, 1) == [{1, 2, 3}]
    app.close()


# --- order ---


def test_producers_in_several_threads_keep_their_order_and_take_turns_with_connections(store_url: str) -> None:
    threads, each, ids = 6, 60, 4
    app = lowq.Lowq(redis_url=store_url, client_pool_size=2)
    queue = app.queue("Orders", 3)

    def produce(thread: int) -> int:
        each_id = [[{"id": job_id, "payload": [thread, n]} for job_id in range(ids)] for n in range(each)]
        return sum(map(queue.push, each_id))

    with ThreadPoolExecutor(threads) as executor:
        assert list(executor.map(produce, range(threads))) == [each * ids] * threads
    for job_id in range(ids):
        got = payloads(queue, job_id)
        assert len(got) == threads * each
        for number in range(threads):
            assert [version for thread, version in got if thread == number] == list(range(each))
    app.close()


# --- streaming ---


class Tracked(dict[str, Any]):
    """A job of which can be told whether it is still in memory."""

    __slots__ = ("__weakref__",)

    def __hash__(self) -> int:  # type: ignore[override]  # a dict has none, and a WeakSet needs one
        return id(self)


@real_redis_often
def test_a_generator_is_read_no_further_ahead_than_two_chunks(queue: Queue, store_url: str) -> None:
    looker = lowq.Lowq(redis_url=store_url)
    alive: weakref.WeakSet[Tracked] = weakref.WeakSet()
    ahead, kept, told = [0], [0], list[int]()

    def source() -> Iterator[Tracked]:
        for number in range(MANY):
            if number % 500 == 499:
                ahead.append(number - looker.queue("Orders").stats().length)
                kept.append(len(alive))
            job = Tracked(id=number)
            alive.add(job)
            yield job

    assert queue.push(source(), on_progress=told.append) == queue.stats().length == MANY
    assert CHUNK_JOBS // 2 < max(ahead) <= 2 * CHUNK_JOBS
    assert CHUNK_JOBS // 2 < max(kept) <= 3 * CHUNK_JOBS
    assert len(alive) <= 1
    assert told == list(range(CHUNK_JOBS, MANY + 1, CHUNK_JOBS))
    looker.close()


def test_large_payloads_are_split_over_calls(queue: Queue) -> None:
    large = [{"id": number % 7, "payload": [number, "x" * 200_000], "score": number} for number in range(40)]
    assert queue.push(large) == 40
    for job_id, job in queue.fetch(range(7)).items():
        assert [payload[0] for payload, _ in job.payloads] == [int(job_id) + 7 * n for n in range(5)]  # 1 MiB of them


def test_an_error_of_the_generator_comes_out_as_it_is_after_what_was_read_before(queue: Queue) -> None:
    def source(error: BaseException) -> Iterator[dict[str, Any]]:
        yield from jobs(CHUNK_JOBS + 10)
        raise error

    for error in (KeyError("the database is gone"), KeyboardInterrupt()):
        with case(error):
            with pytest.raises(type(error)) as caught:
                queue.push(source(error))
            assert caught.value is error
            assert queue.stats().length == CHUNK_JOBS
            assert queue.push({"id": 1, "score": 1}) == 1  # the connection is in order


# --- bad jobs ---


class TestBadJobs:
    def test_nothing_of_a_chunk_with_a_bad_job_is_written(self, app: lowq.Lowq, queue: Queue) -> None:
        bad: list[tuple[dict[str, Any], type[Exception], str]] = [
            ({"payload": 1}, JobError, "queue 'Orders': a job has no id"),
            ({"id": 7, "score": float("nan")}, JobError, "queue 'Orders': job 7: score nan"),
            ({"id": 7, "payload": {1}}, PayloadError, "queue 'Orders': job 7: .* is of type set"),
        ]
        for good_before, (job, error, message) in itertools.product((0, 3, CHUNK_JOBS - 1), bad):
            with case(good_before, job):
                with pytest.raises(error, match=message) as caught:
                    queue.push([*jobs(good_before), job, *jobs(3)])
                assert not isinstance(caught.value, PushError)
                assert queue.stats().length == 0
                assert [key for key in app.client.command("KEYS", "*") if b"payloads" in key] == []

    @pytest.mark.parametrize("listed", [True, False])
    @real_redis_often
    def test_a_bad_job_in_a_later_chunk_says_what_is_in_and_hands_back_the_rest(
        self, queue: Queue, listed: bool
    ) -> None:
        source = [*jobs(CHUNK_JOBS + 5), {"id": "bad", "score": "high"}, *jobs(3 * CHUNK_JOBS, start=CHUNK_JOBS + 5)]
        with pytest.raises(PushError, match=f"queue 'Orders': {CHUNK_JOBS} payloads are in.*score 'high'") as caught:
            queue.push(source if listed else iter(source))
        assert isinstance(caught.value.__cause__, JobError)
        assert queue.stats().length == caught.value.accepted == CHUNK_JOBS
        assert isinstance(caught.value.rest, list) == listed
        rest = list(caught.value.rest)
        assert rest == source[CHUNK_JOBS:]
        assert queue.push(job for job in rest if job["id"] != "bad") == len(rest) - 1
        assert queue.stats().length == 4 * CHUNK_JOBS + 5

    def test_a_first_push_or_consumer_that_is_refused_leaves_no_entry_in_the_registry(self, app: lowq.Lowq) -> None:
        queue = app.queue("fresh", 2)
        uses: list[Callable[[], object]] = [
            *(lambda wrong=wrong, push=push: push(wrong)
              for wrong in ({"id": ""}, {"id": 1, "ttl": -1}, [{"id": 1}, {"id": 2, "score": "x"}], [5], 5.5)
              for push in (queue.push, in_a_loop(queue.apush))),
            lambda: queue.push("a", timeout=-1), lambda: queue.consumer(ttr=0), lambda: queue.consumer(session=""),
        ]  # fmt: skip
        for number, use in enumerate(uses):
            with case(number):
                with pytest.raises((JobError, ConfigError)):
                    use()
                assert app.client.command("DBSIZE") == 0
        assert queue.push("a") == 1


# --- queues and their shards ---


def test_a_producer_needs_only_the_queues_name_once_it_is_known(app: lowq.Lowq, store_url: str) -> None:
    @app.worker(shards_count=7, batch_size=3)
    class Orders(lowq.Worker[int]):
        def perform(self, payloads_by_id: dict[str, list[int]]) -> None: ...

    producer = lowq.Lowq(redis_url=store_url)
    with pytest.raises(UnknownQueueError, match="queue 'Orders'"):
        producer.queue("Orders").push({"id": 1})
    assert producer.queues() == []
    assert app.queue("Orders").push({"id": "a"}) == 1, "the worker of the application is found by the name"
    assert producer.queue("Orders").push([{"id": "b"}, {"id": "c"}]) == 2
    assert all_ids(Orders.queue) == {"a", "b", "c"}
    (info,) = producer.queues()
    assert (info.shards_count, info.options["batch_size"]) == (7, 3)  # the producer has not overwritten them
    producer.close()


class TestAnIdAndItsPayload:
    """``push(id, payload, score=...)``, of queues and workers, from threads and coroutines."""

    def test_is_a_job_with_the_options_given_whichever_way_it_is_pushed(self, app: lowq.Lowq) -> None:
        @app.worker(shards_count=3)
        class Orders(lowq.Worker[Any]):
            def perform(self, payloads_by_id: dict[str, list[Any]]) -> None: ...

        queue = app.queue("Orders")
        pushes: list[Callable[..., int]] = [queue.push, in_a_loop(queue.apush), Orders.push, in_a_loop(Orders.apush)]
        for number, push in enumerate(pushes):
            with case(number):
                assert push(42, {"version": 3}, score=3, priority=2, ttl=7200, delay=timedelta(hours=1)) == 1
                assert push("42", {"version": 2}, score=2, priority=2) == 1
                (job,) = queue.jobs().jobs
                assert job.payloads == [({"version": 2}, 2.0), ({"version": 3}, 3.0)]
                assert (job.id, job.state, job.priority, job.expires_at is None) == ("42", "scheduled", 2, False)
                queue.drop()
                push(1, score=None, delay=None, perform_at=None, ttl=None, priority=None, timeout=None)
                push(UUID(int=7), payload=None, perform_at=2e9, timeout=5)
                job, other = queue.jobs(order_by="perform_at").jobs
                assert (job.state, job.expires_at, job.priority, job.payloads[0][0]) == ("due", None, 0, "")
                assert (other.payloads[0][0], other.perform_at) == (None, 2e9)
                queue.drop()

    def test_what_is_wrong_or_a_mixture_of_the_two_forms_is_refused_and_nothing_written(self, queue: Queue) -> None:
        rows: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
            ((42, {}), {"scroe": 3}, "unknown field 'scroe'; did you mean 'score'"),
            ((42, {}), {"delay": 1, "perform_at": 2e9}, "three ways to say one thing"),
            ((42, {1, 2}), {}, "payload"),
            (("", {}), {}, "an id is empty"),
            ((42, {}), {"id": 7}, "two ids are given, 42 and id=7: write push"),
            ((42, {}, 3), {}, "push takes an id and a payload, and all else by name"),
            ((42, {}), {"payload": {}}, "push takes an id and a payload, and all else by name"),
            ((42,), {"on_progress": print}, "unknown field 'on_progress'"),
            (({"id": 42},), {"score": 3}, "score beside jobs: each job says it for itself"),
            (([{"id": 42}], {"version": 2}), {}, "has neither an id"),
            ((4.2,), {}, "jobs are one mapping or an iterable of mappings, not float"),
        ]
        for args, options, message in rows:
            with case(args, options):
                for push in queue.push, in_a_loop(queue.apush):
                    with pytest.raises(JobError, match=message):
                        push(*args, **options)
        wrong: Any = {"id": 7}
        with pytest.raises(JobError, match="two ids are given"):
            queue.put("a", **wrong)
        assert queue.stats().length == 0


# --- the number of shards ---


def test_a_second_number_of_shards_is_refused_by_who_is_strict_and_otherwise_the_registry_is_followed(
    app: lowq.Lowq, queue: Queue, store_url: str
) -> None:
    # Of 3 shards one has been used. The other two are untouched and would take anything.
    queue.push({"id": 1, "score": 1})
    strict = lowq.Lowq(redis_url=store_url, strict_shards_count=True)
    with pytest.raises(ShardsCountError, match=r"queue 'Orders' has shards_count=3 .* shards_count=4") as caught:
        strict.queue("Orders", 4).push({"id": 2})
    assert (caught.value.existing, caught.value.wanted) == (3, 4)
    assert queue.stats().length == 1
    assert app.queue("Orders", 4).push(jobs(20)) == 20
    assert len(all_ids(queue)) == queue.stats().length == 20
    strict.close()


def test_each_shard_refuses_another_number_too_when_the_registry_is_lost(
    app: lowq.Lowq, queue: Queue, store_url: str
) -> None:
    queue.push(jobs(20))
    app.client.command("DEL", queues_key("lowq"))
    other = lowq.Lowq(redis_url=store_url)
    with pytest.raises(ShardsCountError, match=r"shards_count=3 .* shards_count=2"):
        other.queue("Orders", 2).push(jobs(20, start=100))
    # In the shards themselves: people see what the registry says, which is the other's number by now.
    keys = [shard_prefix("lowq", "Orders", shard) + "due" for shard in range(3)]
    found = [raw for key in keys for raw in app.client.command("ZRANGE", key, 0, -1, key=key)]
    assert sorted(found) == sorted(b"%d" % number for number in range(20))
    other.close()


def test_a_producer_follows_a_queue_that_was_dropped_and_made_anew(store_url: str) -> None:
    apps = [lowq.Lowq(redis_url=store_url) for _ in range(3)]
    old, operator, new = (app.queue("Orders", count) for app, count in zip(apps, (12, 12, 5), strict=True))
    assert old.push(jobs(60)) == 60
    operator.drop()
    new.push(jobs(2))
    assert old.push({"id": 7, "payload": 7, "score": 7}) == 1
    assert old.push(jobs(60)) == 60

    async def produce() -> list[int]:
        return await asyncio.gather(*(handle.apush(next(jobs(1))) for handle in (old, operator, new)))

    assert asyncio.run(produce()) == [1] * 3
    assert len(all_ids(new)) == new.stats().length == 60
    for shard in range(5, 12):
        key = shard_prefix("lowq", "Orders", shard) + "meta"
        assert apps[0].client.command("EXISTS", key, key=key) == 0, shard
    for app in apps:
        app.close()


def test_who_has_written_something_is_not_told_that_nothing_was(app: lowq.Lowq, queue: Queue) -> None:
    queue.push(jobs(20))
    key = shard_prefix("lowq", "Orders", 0) + "meta"
    app.client.command("HSET", key, "shards_count", 12, key=key)
    with pytest.raises(PushError) as caught:
        queue.push(jobs(20, start=100))
    assert isinstance(caught.value.__cause__, ShardsCountError)
    assert 0 < caught.value.accepted == 20 - len(list(caught.value.rest))


# --- client middlewares ---


def with_middlewares(*middlewares: Any) -> lowq.Lowq:
    """What they do concerns no store."""
    return lowq.Lowq(redis_url="memory://", client_middlewares=list(middlewares))


def test_middlewares_surround_each_chunk_the_first_outermost_and_know_the_worker() -> None:
    events: list[str] = []

    def named(name: str) -> Callable[..., None]:
        def middleware(worker: Any, batch: list[Any], call_next: Callable[[], None]) -> None:
            events.append(f"{name} {getattr(worker, '__name__', worker)} {len(batch)}")
            call_next()
            events.append(f"/{name}")

        return middleware

    app = with_middlewares(named("a"), named("b"))
    app.worker(queue_name="Mail")(type("Mails", (lowq.Worker,), {"perform": lambda _self, _payloads_by_id: None}))
    assert app.queue("Orders", 3).push(jobs(CHUNK_JOBS + 1)) == CHUNK_JOBS + 1
    app.queue("Mail").push(jobs(1))
    of_chunks = [(f"a {whose}", f"b {whose}", "/b", "/a") for whose in (f"Orders {CHUNK_JOBS}", "Orders 1", "Mails 1")]
    assert events == [event for of_chunk in of_chunks for event in of_chunk]


def test_middlewares_may_rewrite_drop_and_add_jobs_which_are_validated_and_must_call_the_next() -> None:
    def rewrite(worker: Any, batch: list[Any], call_next: Callable[[], None]) -> None:
        batch[:] = [{**job, "id": f"tenant-{job['id']}" if job["id"] else ""} for job in batch if job["id"] != 2]
        batch.append({"id": "audit"})
        call_next()

    queue = with_middlewares(rewrite).queue("Orders", 3)
    given = [{"id": 1}, {"id": 2}, {"id": 3}]
    assert queue.push(given) == 3
    assert all_ids(queue) == {"tenant-1", "tenant-3", "audit"}
    assert given == [{"id": 1}, {"id": 2}, {"id": 3}]
    with pytest.raises(JobError, match="an id is empty"):
        queue.push({"id": ""})
    queue = with_middlewares(lambda _worker, _batch, _call_next: None).queue("Orders", 3)
    with pytest.raises(LowqError):
        queue.push(jobs(3))
    assert queue.stats().length == 0


@pytest.mark.parametrize("form", [list, iter])
def test_a_middleware_that_raises_in_a_later_chunk_leaves_the_caller_in_no_doubt(form: Callable[[Any], Any]) -> None:
    met: list[int] = []

    def fail_once(worker: Any, batch: list[Any], call_next: Callable[[], None]) -> None:
        met.append(len(batch))
        batch[:] = batch[:1]
        if len(met) == 2:
            raise PermissionError("closed on Sundays")
        batch[:] = batch * met[0]
        call_next()

    source = list(jobs(2 * CHUNK_JOBS + 5))
    with pytest.raises(PushError, match="PermissionError: closed on Sundays") as caught:
        with_middlewares(fail_once).queue("Orders", 3).push(form(source))
    assert not isinstance(caught.value, RedisUnavailable)
    assert isinstance(caught.value.__cause__, PermissionError)
    assert (caught.value.accepted, list(caught.value.rest)) == (CHUNK_JOBS, source[CHUNK_JOBS:])


# --- order, whatever Redis refuses ---


class Refusing:
    """Has Redis refuse some of the calls of `push`, by their number."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answers: Mapping[int, str]) -> None:
        #: The calls that were sent so far.
        self.calls = 0
        start = Client.start

        def refuse(client: Client, calls: Sequence[Call[Any]], **options: Any) -> Any:
            sent = list(calls)
            for position, call in enumerate(calls):
                if call.script == "push":
                    if self.calls in answers:
                        script = f"return redis.error_reply('{answers[self.calls]}')"
                        sent[position] = Command(call.key, "EVAL", script, "0")
                    self.calls += 1
            return start(client, sent, **options)

        monkeypatch.setattr(Client, "start", refuse)


FULL = "OOM command not allowed when used memory > maxmemory."
BUSY = "BUSY Redis is busy running a script."


def push_patiently(queue: Queue, source: Iterable[Mapping[str, Any]]) -> int:
    """As docs/producing.md has it."""
    accepted = 0
    while True:
        try:
            return accepted + queue.push(source)
        except lowq.PushInterrupted as error:
            accepted += error.accepted
            source = error.rest


class TestOrderWhateverIsRefused:
    """Payloads for one id: five calls for its shard in a chunk, three chunks."""

    COUNT = 120

    @pytest.fixture(autouse=True)
    def _small_chunks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("lowq.push.target.CALL_JOBS", 10)
        monkeypatch.setattr("lowq.push.push.CHUNK_JOBS", 50)

    @pytest.fixture
    def queue(self, app: lowq.Lowq) -> Queue:
        return self.new_queue(app, "Orders")

    def new_queue(self, app: lowq.Lowq, name: str) -> Queue:
        queue = app.queue(name, 1)
        queue.push([{"id": "other"}])
        return queue

    @pytest.mark.parametrize(
        "rows",
        [
            pytest.param([[0], [5], [11], [2, 5, 6, 8]], id="often"),
            pytest.param([[1], [4], [0, 5], [1, 2, 7]], id="others", marks=pytest.mark.slow),
        ],
    )
    @pytest.mark.parametrize("middleware", [False, True], ids=["", "middleware"])
    def test_who_pushes_the_rest_again_keeps_it(
        self, app: lowq.Lowq, monkeypatch: pytest.MonkeyPatch, rows: list[list[int]], middleware: bool
    ) -> None:
        if middleware:
            app.config.client_middlewares.append(lambda _worker, _jobs, call_next: call_next())
        for number, (answer, refused) in enumerate(itertools.product((FULL, BUSY), rows)):
            with case(answer, refused), monkeypatch.context() as patched:
                queue = self.new_queue(app, f"Orders{number}")
                Refusing(patched, dict.fromkeys(refused, answer))
                accepted = push_patiently(queue, ({"id": "x", "payload": number} for number in range(self.COUNT)))
                assert accepted == self.COUNT
                assert payloads(queue, "x") == list(range(self.COUNT))

    def test_what_comes_after_a_refused_call_is_in_the_rest_in_order(
        self, queue: Queue, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        refusing = Refusing(monkeypatch, {1: FULL})
        source = [{"id": "x", "payload": number} for number in range(self.COUNT)]
        with pytest.raises(lowq.PushInterrupted, match="is full") as caught:
            queue.push(source)
        assert caught.value.accepted == 10
        assert caught.value.rest == source[10:]
        assert refusing.calls == 5, "nothing is repeated, as its turn has not come"

    def test_what_fails_when_it_is_sent_again_keeps_back_what_came_behind(
        self, app: lowq.Lowq, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Another id did not fit, so the rest of its call and the next one are sent again."""
        monkeypatch.setattr("lowq.push.target.CALL_JOBS", 2)
        queue = app.queue("Full", 1, capacity=1)
        queue.push({"id": "x", "payload": 0})
        Refusing(monkeypatch, {2: FULL})
        source: list[Any] = [{"id": "x", "payload": 1}, {"id": "new"}, {"id": "x", "payload": 2}]
        with pytest.raises(lowq.PushInterrupted) as caught:
            queue.push(source)
        assert caught.value.accepted == 0
        assert sorted(caught.value.rest, key=source.index) == source
        assert payloads(queue, "x") == [0]

    def test_a_connection_that_breaks_before_some_answers_keeps_it(
        self, app: lowq.Lowq, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        read = connection.read_reply
        number, lost = -1, [0]

        def break_at(connection: Any) -> Any:
            nonlocal number
            number += 1
            reply = read(connection)
            if number in lost:
                connection.disconnect()
                raise redis.exceptions.ConnectionError("cut")
            return reply

        for row, lost in enumerate([[0], [1], [0, 1], [4], [5]]):
            with case(lost):
                queue, number = self.new_queue(app, f"Orders{row}"), -1
                with monkeypatch.context() as patched:
                    patched.setattr(pool, "read_reply", break_at)
                    assert queue.push({"id": "x", "payload": payload} for payload in range(self.COUNT)) == self.COUNT
                assert payloads(queue, "x") == list(range(self.COUNT))

    def test_scripts_that_are_gone_in_the_middle_change_nothing(self, app: lowq.Lowq, queue: Queue) -> None:
        def source() -> Iterator[dict[str, Any]]:
            for number in range(self.COUNT):
                if number in (20, 70):
                    app.client.command("SCRIPT", "FLUSH")
                yield {"id": "x", "payload": number}

        assert queue.push(source()) == self.COUNT
        assert payloads(queue, "x") == list(range(self.COUNT))

    def test_a_redis_that_has_lost_what_it_answered_takes_nothing_out_of_turn(
        self, queue: Queue, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        Refusing(monkeypatch, {1: BUSY})
        start, prefix = Client.start, shard_prefix("lowq", "Orders", 0)

        def lose(self: Client, calls: list[Call[Any]], **options: Any) -> Any:
            if calls[0].script == "push" and calls[0].data[2] == b"1":
                self.command("DEL", prefix + "pushed")
            return start(self, calls, **options)

        monkeypatch.setattr(Client, "start", lose)
        with pytest.raises(lowq.PushInterrupted, match="restarted without its data") as caught:
            queue.push({"id": "x", "payload": number} for number in range(50))
        assert caught.value.accepted == 10


# --- Redis goes away half way ---


def test_when_redis_goes_away_half_way_what_was_accepted_is_in_and_the_rest_of_a_generator_goes_on() -> None:
    total = 6 * CHUNK_JOBS
    read = [0]
    with RedisServer(appendonly="yes") as server, closing(lowq.Lowq(redis_url=server.url)) as app:
        queue = app.queue("Orders", 3)

        def source() -> Iterator[dict[str, Any]]:
            for job in jobs(total):
                if read[0] == 2 * CHUNK_JOBS + 100:
                    server.stop()
                read[0] += 1
                yield job

        with pytest.raises(PushInterrupted, match=r"queue 'Orders': \d+ payloads are in, .*PushError\.rest") as caught:
            queue.push(source())
        error = caught.value
        assert CHUNK_JOBS <= error.accepted <= 2 * CHUNK_JOBS
        assert not isinstance(error.rest, list)
        assert read[0] <= 4 * CHUNK_JOBS  # the rest of it was not read
        server.start()
        assert queue.stats().length >= error.accepted
        assert queue.push(error.rest) == total - error.accepted
        assert read[0] == total
        assert all_ids(queue) == {str(number) for number in range(total)}


def test_a_push_without_redis_says_so_in_few_lines() -> None:
    app = lowq.Lowq(redis_url="redis://127.0.0.1:1", push_timeout=0.1)
    with pytest.raises(lowq.RedisUnavailable) as caught:
        app.queue("Orders", 3).push(1)
    lines = "".join(traceback.format_exception(caught.value)).splitlines()
    assert not [line for line in lines if "site-packages" in line]
    assert lines[0] == "Traceback (most recent call last):"
    assert len([line for line in lines if line.startswith("  File ")]) <= 4
    # Where nothing answers, and what to do.
    assert lines[-2].startswith("lowq.errors.RedisUnavailable: Redis at redis://127.0.0.1:1 does not answer: ")
    assert lines[-1] == "start Redis, or say where it is with redis_url or LOWQ_REDIS_URL"
    assert lines.count(lines[0]) == 1


def test_a_source_may_use_the_application_while_it_is_read_even_with_one_connection(store_url: str) -> None:
    app = lowq.Lowq(redis_url=store_url, client_pool_size=1, pool_timeout=PATIENCE)
    queue, other = app.queue("Orders", 3), app.queue("Other", 1)

    def source() -> Iterator[dict[str, Any]]:
        for number in range(3 * CHUNK_JOBS):
            if number % CHUNK_JOBS == 7:
                other.push({"id": number})
            yield {"id": number}

    assert queue.push(source()) == 3 * CHUNK_JOBS
    assert other.stats().length == 3


# --- inside of a batch that has to end in time ---


def test_past_the_deadline_of_a_batch_nothing_is_pushed_and_it_is_said_as_when_redis_is_away(queue: Queue) -> None:
    assert queue.push({"id": 1}) == 1
    with within_batch(0.0) as batch:
        with pytest.raises(PushInterrupted, match=r"0 payloads are in, .* the deadline of the batch") as caught:
            queue.push([{"id": 2}, {"id": 3}])
        assert (caught.value.accepted, caught.value.rest) == (0, [{"id": 2}, {"id": 3}])
        assert isinstance(caught.value.__cause__, TimeLimitExceeded)
        with pytest.raises(JobError):  # what is malformed is refused as ever
            queue.push({"nothing": 1})
        batch.seconds = None
        assert queue.push(caught.value.rest) == 2
    assert queue.stats().length == 3


def test_when_it_passes_between_two_chunks_the_first_is_in_and_the_rest_is_handed_back(queue: Queue) -> None:
    def source(batch: Batch) -> Iterator[dict[str, Any]]:
        for number in range(CHUNK_JOBS * 2 + 10):
            if number == CHUNK_JOBS + 1:
                batch.seconds = 0.0
            yield {"id": number}

    queue.push([{"id": number} for number in range(20)])  # all shards are there
    with within_batch(NEVER) as batch, pytest.raises(PushInterrupted) as caught:
        queue.push(source(batch))
    assert caught.value.accepted == CHUNK_JOBS
    assert queue.push(caught.value.rest) == CHUNK_JOBS + 10
