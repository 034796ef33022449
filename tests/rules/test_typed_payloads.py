"""Workers with a type of payloads: what a push takes, what handlers get, and what is not of the type."""

import asyncio
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, Literal, NotRequired, TypedDict

import msgspec
import pydantic
import pytest

import lowq
from lowq.codec import load_payload
from lowq.errors import ConfigError, JobError, PayloadError
from lowq.testing import adrain, drain, execution
from tests.rows import case
from tests.rules.support import emptied_app
from tests.waiting import PATIENCE, until

#: No store sees of which type a payload is.
pytestmark = pytest.mark.parametrize("store_url", ["redis"], indirect=True)

NOON = datetime(2026, 5, 1, 12, tzinfo=UTC)


class Line(msgspec.Struct):
    price: Decimal


class Order(msgspec.Struct):
    version: int
    at: datetime = NOON
    lines: list[Line] = []


class OrderDict(TypedDict):
    version: int
    at: datetime
    lines: NotRequired[list[dict[str, Decimal]]]


@dataclass
class OrderData:
    version: int
    at: datetime = NOON


class OrderModel(pydantic.BaseModel):
    version: int
    at: datetime = NOON


class Paid(msgspec.Struct, tag=True):
    version: int


class Lost(msgspec.Struct, tag=True):
    why: str


@dataclass
class LostData:
    why: str
    kind: Literal["lost"] = "lost"


class PaidDict(TypedDict):
    kind: Literal["paid"]
    version: int


Seen = list[tuple[str, list[Any]]]


def worker(app: lowq.Lowq, kind: Any, seen: Seen | None = None, **options: Any) -> type[lowq.Worker[Any]]:
    """A worker with that type of payloads, which notes what it is given."""

    class Made(lowq.Worker[kind]):
        def perform(self, payloads_by_id: dict[str, list[Any]]) -> None:
            if seen is not None:
                seen.extend(payloads_by_id.items())

    made: type[lowq.Worker[Any]] = app.worker(queue_name="Orders", **options)(Made)
    return made


def push_plain(app: lowq.Lowq, job_id: object, payload: Any, **options: Any) -> None:
    """As somebody does who does not know the type."""
    with closing(lowq.Lowq(redis_url=app.config.redis_url)) as other:
        other.queue("Orders", 5).push({"id": job_id, "payload": payload, **options})


#: Each kind of types, and a value of it.
VALUES: list[tuple[Any, Any]] = [
    (Order, Order(1, NOON, [Line(Decimal("1.50"))])),
    (OrderDict, {"version": 1, "at": NOON, "lines": [{"price": Decimal("1.50")}]}),
    (OrderData, OrderData(1, NOON)),
    (OrderModel, OrderModel(version=1, at=NOON)),
    (Paid | Lost, Lost("in the mail")),
    (PaidDict | LostData, LostData("in the mail")),
    (list[Order], [Order(1)]),
]


class TestPush:
    def test_every_way_to_push_writes_the_same_and_handlers_get_the_value(self, store_url: str) -> None:
        async def push(made: type[lowq.Worker[Any]], value: Any) -> None:
            await made.apush(1, value)
            await made.aperform_async([{"id": 1, "payload": value}])
            await made.queue.apush(iter([{"id": 1, "payload": value}]))

        for kind, value in VALUES:
            with case(kind, value), emptied_app(store_url) as app:
                seen: Seen = []
                made, job = worker(app, kind, seen), {"id": 1, "payload": value}
                assert made.push(1, value) == 1
                made.perform_async(job)
                made.perform_async([job])
                made.queue.push(1, value)
                app.queue("Orders").push(1, value)
                app.queue("Orders", made.shards_count).push(1, value)
                asyncio.run(push(made, value))
                assert drain(made).performed == 1
                assert seen == [("1", [value])]
                assert type(seen[0][1][0]) is type(value)

    def test_what_is_not_of_the_type_is_refused_with_its_place_and_nothing_is_written(self, app: lowq.Lowq) -> None:
        made = worker(app, Order)
        wrong: Any = Order(2, lines=[Line(Decimal(1)), Line(Decimal(2)), Line("x")])  # type: ignore[arg-type]
        message = r"^queue 'Orders': job 42: the payload is no Order: .* - at `\$\.lines\[2\]\.price`$"
        pushes: list[Callable[[], object]] = [
            lambda: made.perform_async([{"id": 1, "payload": Order(1)}, {"id": 42, "payload": wrong}]),
            lambda: made.perform_async(iter([{"id": 1, "payload": Order(1)}, {"id": 42, "payload": wrong}])),
            lambda: asyncio.run(made.apush(42, wrong)),
            lambda: asyncio.run(made.aperform_async([{"id": 42, "payload": wrong}])),
        ]
        with pytest.raises(PayloadError, match=message):
            made.push(42, wrong)
        assert app.queues() == [], "not even made"
        for push in pushes:
            with pytest.raises(PayloadError, match=message):
                push()
        assert made.push(1, Order(1)) == 1
        with pytest.raises(PayloadError, match=message):
            made.push(42, wrong)
        assert [job.id for job in made.queue.jobs().jobs] == ["1"]

    def test_a_job_needs_a_payload(self, app: lowq.Lowq) -> None:
        made = worker(app, Order)
        pushes: list[Callable[[], object]] = [
            lambda: made.push(1),
            lambda: made.perform_async({"id": 1}),
            lambda: made.perform_async([{"id": 1, "score": 3}]),
            made.queue.put,
        ]
        for push in pushes:
            with pytest.raises(JobError, match=r"job .*: there is no payload; those of the queue are Order$"):
                push()
        assert app.queues() == []

    def test_json_is_taken_for_a_value_of_who_knows_the_type_and_who_does_not(self, app: lowq.Lowq) -> None:
        """Keys in any order, as the encoder of untyped payloads sorts them as well."""
        seen: Seen = []
        made = worker(app, Order, seen)
        made.push(1, Order(1, NOON, [Line(Decimal("1.50"))]))
        made.push(1, {"version": 1, "at": "2026-05-01T14:00:00+02:00", "lines": [{"price": "1.50"}]})
        push_plain(app, 1, {"lines": [{"price": "1.50"}], "version": 1, "at": "2026-05-01T12:00:00Z"})
        drain(made)
        assert seen == [("1", [Order(1, NOON, [Line(Decimal("1.50"))])])]

    def test_middlewares_get_values_of_the_type(self, store_url: str) -> None:
        pushed: list[Any] = []
        performed: list[Any] = []

        def client(worker: Any, jobs: list[Any], call_next: Callable[[], Any]) -> None:
            pushed.extend(job["payload"] for job in jobs)
            call_next()

        def server(worker: Any, batch: dict[str, list[Any]], call_next: Callable[[], Any]) -> None:
            performed.extend(batch.values())
            call_next()

        with closing(lowq.Lowq(redis_url=store_url, client_middlewares=[client], server_middlewares=[server])) as app:
            made = worker(app, Order)
            made.push(1, Order(1))
            drain(made)
        assert (pushed, performed) == ([Order(1)], [[Order(1)]])

    def test_too_large_a_payload_is_refused(self, store_url: str) -> None:
        with (
            closing(lowq.Lowq(redis_url=store_url, max_payload_bytes=100)) as app,
            pytest.raises(PayloadError, match=r"the payload has \d+ bytes encoded; max_payload_bytes is 100"),
        ):
            worker(app, Order).push(1, Order(1, lines=[Line(Decimal(1))] * 10))


class TestTake:
    def test_what_is_not_of_the_type_goes_to_the_morgue_as_it_is_and_the_others_are_performed(
        self, store_url: str
    ) -> None:
        wrong = {"version": "one", "why": 7, "kind": "lost", "type": "Lost"}
        for kind, value in VALUES:
            with case(kind, value), emptied_app(store_url) as app:
                seen: Seen = []
                made = worker(app, kind, seen)
                made.queue.push(1, value, score=2)
                made.push(2, value)
                push_plain(app, 1, wrong, score=1)
                assert drain(made).performed == 2
                assert sorted(seen) == [("1", [value]), ("2", [value])]
                buried = made.queue.peek(1)
                assert buried is not None
                assert (buried.state, buried.payloads, buried.retry_count) == ("morgue", [(wrong, 1.0)], -1)
                assert (buried.error or "").startswith("the payload can't be decoded: ")
                assert "`$" in (buried.error or "") or "`array`, got `object`" in (buried.error or "")

    def test_it_comes_back_with_code_that_can_read_it(self, app: lowq.Lowq) -> None:
        class Later(msgspec.Struct):
            version: int
            at: str

        seen: Seen = []
        old, new = worker(app, Order, seen), worker(lowq.Lowq(redis_url=app.config.redis_url), Later, seen)
        new.push(1, Later(1, "in May"))
        assert drain(old).performed == 0
        assert old.queue.stats().morgue_length == 1
        assert new.queue.kick(1).done == 1
        assert drain(new).performed == 1
        assert seen == [("1", [Later(1, "in May")])]

    def test_a_node_gives_values_of_the_type_and_buries_others(self, app: lowq.Lowq) -> None:
        seen: Seen = []
        made = worker(app, Order, seen)
        made.push(1, Order(1), score=2)
        push_plain(app, 1, {"version": None}, score=1)
        node = lowq.Node(app, threads=1)
        node.start()
        until(lambda: seen, "a job that is performed")
        node.stop()
        assert seen == [("1", [Order(1)])]
        assert made.queue.stats().morgue_length == 1

    def test_current_and_retries_exhausted_have_values_of_the_type(self, app: lowq.Lowq) -> None:
        current: list[Any] = []
        exhausted: list[Any] = []

        @app.worker(max_retry_count=0)
        class Orders(lowq.Worker[Order]):
            def perform(self, payloads_by_id: dict[str, list[Order]]) -> None:
                current.extend(job.payloads for job in lowq.current().jobs)
                payloads_by_id["1"][0].version = 7  # what it was given is its own
                raise ValueError

            def retries_exhausted(self, jobs: list[lowq.Job]) -> None:
                exhausted.extend(job.payloads for job in jobs)

        Orders.push(1, Order(1), score=3)
        drain(Orders)
        assert current == exhausted == [[(Order(1), 3.0)]]

    def test_an_async_worker_gets_values_of_the_type(self, app: lowq.Lowq) -> None:
        seen: Seen = []
        exhausted: list[Any] = []

        @app.worker(max_retry_count=0)
        class Orders(lowq.Worker[Order]):
            async def perform_one(self, job_id: str, payloads: list[Order]) -> None:
                seen.append((job_id, payloads))
                raise ValueError

            async def retries_exhausted(self, jobs: list[lowq.Job]) -> None:
                exhausted.extend(job.payloads for job in jobs)

        Orders.push(1, Order(1), score=3)
        asyncio.run(adrain(Orders))
        assert seen == [("1", [Order(1)])]
        assert exhausted == [[(Order(1), 3.0)]]

    def test_each_merge_policy_has_values_of_the_type(self, store_url: str) -> None:
        def newest(orders: list[Any]) -> list[Any]:
            return [max(orders, key=lambda order: order.version)]

        rows: list[tuple[Any, list[int]]] = [("append", [1, 3, 3]), ("latest", [3]), (newest, [3])]
        for merge, versions in rows:
            with case(merge), emptied_app(store_url) as app:
                seen: Seen = []
                made = worker(app, Order, seen, merge=merge)
                made.perform_async({"id": 1, "payload": Order(version), "score": 1} for version in (1, 3, 3))
                drain(made)
                assert seen == [("1", [Order(version) for version in versions])]

    def test_a_consumer_gets_values_of_the_type_and_buries_others(self, app: lowq.Lowq) -> None:
        made = worker(app, Order)
        made.push(1, Order(1), score=2)
        push_plain(app, 1, {"version": None}, score=1)
        push_plain(app, 2, {"version": None})
        with made.queue.consumer() as consumer:
            jobs = consumer.take(limit=10, timeout=PATIENCE)
            assert [(job.id, job.payloads) for job in jobs] == [("1", [Order(1)])]
            jobs[0].ack()
        assert made.queue.stats().morgue_length == 2

    def test_an_async_consumer_gets_values_of_the_type(self, app: lowq.Lowq) -> None:
        made = worker(app, OrderModel)
        made.push(1, OrderModel(version=1))

        async def take() -> list[Any]:
            async with app.queue("Orders").aconsumer() as consumer:
                (job,) = await consumer.take(timeout=PATIENCE)
                await job.ack()
                return [job.payload]

        assert asyncio.run(take()) == [OrderModel(version=1)]

    def test_who_looks_sees_json_with_and_without_the_worker(self, app: lowq.Lowq) -> None:
        made = worker(app, Order)
        made.push(1, Order(1, NOON, [Line(Decimal("1.50"))]))
        shown = {"version": 1, "at": "2026-05-01T12:00:00Z", "lines": [{"price": "1.50"}]}
        with closing(lowq.Lowq(redis_url=app.config.redis_url)) as other:
            for queue in made.queue, app.queue("Orders"), other.queue("Orders"):
                (job,) = queue.jobs().jobs
                assert [payload for payload, _ in job.payloads] == [shown]

    def test_the_execution_of_a_test_has_what_it_is_given(self, app: lowq.Lowq) -> None:
        with execution(worker(app, Order), {"1": [Order(1)]}) as current:
            assert current.jobs[0].payloads == [(Order(1), 0.0)]


class Older(msgspec.Struct):
    version: int


class Newer(msgspec.Struct):
    version: int
    note: str | None = None


class OlderDict(TypedDict):
    version: int


class NewerDict(TypedDict):
    version: int
    note: NotRequired[str]


class OlderModel(pydantic.BaseModel):
    version: int


class NewerModel(pydantic.BaseModel):
    version: int
    note: str | None = None


def test_an_optional_field_more_is_no_break(store_url: str) -> None:
    """New code performs what old code has pushed, and old code that still runs what new code has."""
    rows: list[tuple[Any, Any]] = [
        (Older, Newer),
        (OlderDict, NewerDict),
        (dataclass(type("Old", (), {"__annotations__": {"version": int}})), OrderData),
        (OlderModel, NewerModel),
    ]
    for older, newer in rows:
        with case(older), emptied_app(store_url) as app, closing(lowq.Lowq(redis_url=store_url)) as other:
            seen: Seen = []
            old, new = worker(app, older, seen), worker(other, newer, seen)
            old.push(1, older(version=1))
            assert drain(new).performed == 1
            note = {"at": NOON} if newer is OrderData else {"note": "new"}
            new.push(2, newer(version=2, **note))
            assert drain(old).performed == 1
            assert seen == [("1", [newer(version=1)]), ("2", [older(version=2)])]
            assert old.queue.stats().morgue_length == 0


def test_payloads_from_before_there_was_a_type_are_performed(app: lowq.Lowq) -> None:
    seen: Seen = []
    push_plain(app, 1, {"version": 1, "status": "paid"})
    drain(worker(app, Newer, seen))
    assert seen == [("1", [Newer(1)])]


def test_a_type_of_jsons_own_is_left_to_type_checkers(app: lowq.Lowq) -> None:
    seen: Seen = []
    made = worker(app, dict[str, Any], seen)
    made.perform_async({"id": 1})
    drain(made)
    assert seen == [("1", [""])]


class TestDecoration:
    def test_the_annotation_of_a_function_is_the_type_and_that_of_a_method_is_none(self, app: lowq.Lowq) -> None:
        seen: Seen = []

        @app.worker
        def batch(payloads_by_id: dict[str, list[Order]]) -> None:
            seen.extend(payloads_by_id.items())

        @app.worker
        async def single(job_id: str, payloads: list[OrderData]) -> None:
            seen.append((job_id, payloads))

        @app.worker
        class Untyped:
            def perform(self, payloads_by_id: dict[str, list[Order]]) -> None:
                seen.extend(payloads_by_id.items())

        untyped: Any = Untyped
        batch.push(1, Order(1))
        single.push(2, OrderData(2))
        untyped.push(3, "anything")
        drain(batch, single, untyped)
        assert seen == [("1", [Order(1)]), ("2", [OrderData(2)]), ("3", ["anything"])]
        wrong: Any = {"versoin": 1}
        with pytest.raises(PayloadError, match="the payload is no Order: "):
            batch.push(1, wrong)

    def test_a_codec_of_ones_own_beside_a_type_is_refused(self, store_url: str) -> None:
        message = r"^Made: its payloads are Order, which says how they are encoded, and so do the settings dump_payload"
        for settings in {"dump_payload": str.encode}, {"load_payload": bytes.decode}:
            with pytest.raises(ConfigError, match=message):
                worker(lowq.Lowq(redis_url=store_url, **settings), Order)
        with closing(lowq.Lowq(redis_url=store_url)) as app:
            made = worker(app, Order)
            app.config.load_payload = bytes.decode
            with pytest.raises(ConfigError, match=message):
                made.push(1, Order(1))
            app.config.load_payload = load_payload
            assert made.push(1, Order(1)) == 1

    def test_a_codec_of_ones_own_beside_a_worker_without_a_type(self, store_url: str) -> None:
        seen: Seen = []
        with closing(lowq.Lowq(redis_url=store_url, dump_payload=str.encode, load_payload=bytes.decode)) as app:
            made = worker(app, Any, seen)
            made.push(1, "plain")
            drain(made)
        assert seen == [("1", ["plain"])]

    def test_codec_functions_on_a_worker_are_refused(self, app: lowq.Lowq) -> None:
        for name in ("dump_payload", "load_payload"):

            class Orders(lowq.Worker[Order]):
                def perform(self, payloads_by_id: dict[str, list[Order]]) -> None: ...

            setattr(Orders, name, staticmethod(str))
            message = rf"^Orders\.{name} would do nothing: its payloads are Order"
            with case(name), pytest.raises(ConfigError, match=message):
                app.worker(Orders)

    def test_a_type_that_has_no_form_is_refused(self, app: lowq.Lowq) -> None:
        class Unknown:
            pass

        def sync(payloads_by_id: dict[str, list[Unknown]]) -> None: ...

        message = r"^Made: payloads can't be Unknown: it has no form in JSON\. Write a TypedDict"
        with pytest.raises(ConfigError, match=message):
            worker(app, Unknown)
        with pytest.raises(ConfigError, match=r"^sync: payloads can't be Unknown: "):
            app.worker(sync)
        assert app.workers == {}
