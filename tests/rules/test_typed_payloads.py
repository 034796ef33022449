"""Workers with a type of payloads: what a push takes, what handlers get, and what is not of the type."""

import asyncio
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import msgspec
import pydantic
import pytest

import lowq
from lowq.codec import load_payload
from lowq.errors import ConfigError, JobError, PayloadError
from lowq.node.node import Node
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
    (OrderData, OrderData(1, NOON)),
    (OrderModel, OrderModel(version=1, at=NOON)),
    (Paid | Lost, Lost("in the mail")),
    (list[Order], [Order(1)]),
]


# --- pushing ---


def test_every_way_to_push_writes_the_same_and_handlers_get_the_value(store_url: str) -> None:
    async def push(made: type[lowq.Worker[Any]], value: Any) -> None:
        await made.apush(1, value)
        await made.aperform_async([{"id": 1, "payload": value}])
        await made.queue.apush(iter([{"id": 1, "payload": value}]))

    for kind, value in VALUES:
        with case(kind, value), emptied_app(store_url) as app:
            seen: Seen = []
            made = worker(app, kind, seen)
            assert made.push(1, value) == 1
            made.perform_async([{"id": 1, "payload": value}])
            made.queue.push(1, value)
            app.queue("Orders").push(1, value)
            asyncio.run(push(made, value))
            assert drain(made).performed == 1
            assert seen == [("1", [value])]
            assert type(seen[0][1][0]) is type(value)


def test_what_is_not_of_the_type_is_refused_with_its_place_and_nothing_is_written(app: lowq.Lowq) -> None:
    made = worker(app, Order)
    wrong: Any = Order(2, lines=[Line(Decimal(1)), Line(Decimal(2)), Line("x")])  # type: ignore[arg-type]
    no_order = r"^queue 'Orders': job 42: the payload does not fit type Order: .* - at `\$\.lines\[2\]\.price`$"
    none = r"job .*: there is no payload; the queue takes payloads of type Order$"
    misspelt: Any = {"id": 1, "pyload": Order(1)}
    pushes: list[tuple[Callable[[], object], str]] = [
        (lambda: made.push(42, wrong), no_order),
        (lambda: made.perform_async([{"id": 1, "payload": Order(1)}, {"id": 42, "payload": wrong}]), no_order),
        (lambda: asyncio.run(made.apush(42, wrong)), no_order),
        (lambda: made.perform_async([{"id": 1, "score": 3}]), none),
        (lambda: made.perform_async([misspelt]), r"job 1: unknown field 'pyload'; did you mean 'payload'\?$"),
        (made.queue.put, none),
    ]
    for number, (push, message) in enumerate(pushes):
        with case(number), pytest.raises(JobError, match=message):
            push()
    assert app.queues() == [], "not even made"
    assert made.push(1, Order(1)) == 1
    with pytest.raises(PayloadError, match=no_order):
        made.push(42, wrong)
    assert [job.id for job in made.queue.jobs().jobs] == ["1"]


def test_json_is_taken_for_a_value_of_who_knows_the_type_and_who_does_not(app: lowq.Lowq) -> None:
    """Keys in any order, as the encoder of untyped payloads sorts them as well. Who looks sees it as JSON."""
    seen: Seen = []
    made = worker(app, Order, seen)
    made.push(1, Order(1, NOON, [Line(Decimal("1.50"))]))
    made.push(1, {"version": 1, "at": "2026-05-01T14:00:00+02:00", "lines": [{"price": "1.50"}]})
    shown = {"lines": [{"price": "1.50"}], "version": 1, "at": "2026-05-01T12:00:00Z"}
    push_plain(app, 1, shown)
    with closing(lowq.Lowq(redis_url=app.config.redis_url)) as other:
        for queue in made.queue, other.queue("Orders"):
            assert [payload for payload, _ in queue.fetch([1])["1"].payloads] == [shown]
    drain(made)
    assert seen == [("1", [Order(1, NOON, [Line(Decimal("1.50"))])])]


def test_middlewares_hooks_and_merge_functions_get_values_of_the_type(store_url: str) -> None:
    met: list[Any] = []

    def client(worker: Any, jobs: list[Any], call_next: Callable[[], Any]) -> None:
        met.extend(job["payload"] for job in jobs)
        call_next()

    def server(worker: Any, batch: dict[str, list[Any]], call_next: Callable[[], Any]) -> None:
        met.extend(batch.values())
        call_next()

    def newest(orders: list[Any]) -> list[Any]:
        return [max(orders, key=lambda order: order.version)]

    with closing(lowq.Lowq(redis_url=store_url, client_middlewares=[client], server_middlewares=[server])) as app:

        @app.worker(max_retry_count=0, merge=newest)
        class Orders(lowq.Worker[Order]):
            def perform(self, payloads_by_id: dict[str, list[Order]]) -> None:
                met.extend(job.payloads for job in lowq.current().jobs)
                payloads_by_id["1"][0].version = 7  # what it was given is its own
                raise ValueError

            def retries_exhausted(self, jobs: list[lowq.Job]) -> None:
                met.extend(job.payloads for job in jobs)

        for version in (3, 1):
            Orders.push(1, Order(version), score=version)
        drain(Orders, limit=1)
    both = [(Order(1), 1.0), (Order(3), 3.0)]
    assert met == [Order(3), Order(1), [Order(7)], both, both[:1]]


def test_too_large_a_payload_is_refused(store_url: str) -> None:
    with (
        closing(lowq.Lowq(redis_url=store_url, max_payload_bytes=100)) as app,
        pytest.raises(PayloadError, match=r"the payload has \d+ bytes encoded; max_payload_bytes is 100"),
    ):
        worker(app, Order).push(1, Order(1, lines=[Line(Decimal(1))] * 10))


# --- taking ---


def test_what_is_not_of_the_type_goes_to_the_morgue_as_it_is_and_the_others_are_performed(store_url: str) -> None:
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


def test_it_comes_back_with_code_that_can_read_it(app: lowq.Lowq) -> None:
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


def test_a_node_a_consumer_and_an_async_consumer_give_values_of_the_type_and_bury_others(store_url: str) -> None:
    def by_node(app: lowq.Lowq, seen: Seen) -> None:
        node = Node(app, threads=1)
        node.start()
        until(lambda: seen, "a job that is performed")
        node.stop()

    def by_consumer(app: lowq.Lowq, seen: Seen) -> None:
        with app.queue("Orders").consumer() as consumer:
            for job in consumer.take(timeout=PATIENCE):
                seen.append((job.id, job.payloads))
                job.ack()

    def by_async_consumer(app: lowq.Lowq, seen: Seen) -> None:
        async def take() -> None:
            async with app.queue("Orders").aconsumer() as consumer:
                (job,) = await consumer.take(timeout=PATIENCE)
                seen.append((job.id, [job.payload]))
                await job.ack()

        asyncio.run(take())

    for take in (by_node, by_consumer, by_async_consumer):
        with case(take), emptied_app(store_url) as app:
            seen: Seen = []
            made = worker(app, Order, seen)
            made.push(1, Order(1), score=2)
            push_plain(app, 1, {"version": None}, score=1)
            take(app, seen)
            assert seen == [("1", [Order(1)])]
            assert made.queue.stats().morgue_length == 1


def test_an_async_worker_gets_values_of_the_type(app: lowq.Lowq) -> None:
    seen: list[Any] = []

    @app.worker(max_retry_count=0)
    class Orders(lowq.Worker[Order]):
        async def perform_one(self, job_id: str, payloads: list[Order]) -> None:
            seen.append(payloads)
            raise ValueError

        async def retries_exhausted(self, jobs: list[lowq.Job]) -> None:
            seen.extend(job.payloads for job in jobs)

    Orders.push(1, Order(1), score=3)
    asyncio.run(adrain(Orders))
    assert seen == [[Order(1)], [(Order(1), 3.0)]]
    with execution(Orders, {"1": [Order(1)]}) as current:
        assert current.jobs[0].payloads == [(Order(1), 0.0)]


class Older(msgspec.Struct):
    version: int


class Newer(msgspec.Struct):
    version: int
    note: str | None = None


class OlderModel(pydantic.BaseModel):
    version: int


class NewerModel(pydantic.BaseModel):
    version: int
    note: str | None = None


def test_an_optional_field_more_is_no_break(store_url: str) -> None:
    """New code performs what old code has pushed, and old code that still runs what new code has."""
    rows: list[tuple[Any, Any]] = [(Older, Newer), (OlderModel, NewerModel)]
    for older, newer in rows:
        with case(older), emptied_app(store_url) as app, closing(lowq.Lowq(redis_url=store_url)) as other:
            seen: Seen = []
            old, new = worker(app, older, seen), worker(other, newer, seen)
            push_plain(app, 0, {"version": 0, "status": "paid"})  # from before there was a type
            old.push(1, older(version=1))
            assert drain(new).performed == 2
            new.push(2, newer(version=2, note="new"))
            assert drain(old).performed == 1
            found = [(job_id, payload) for job_id, (payload,) in seen]
            assert sorted(found[:2]) == [("0", newer(version=0)), ("1", newer(version=1))]
            assert found[2:] == [("2", older(version=2))]


def test_a_type_of_jsons_own_is_left_to_type_checkers(app: lowq.Lowq) -> None:
    seen: Seen = []
    made = worker(app, dict[str, Any], seen)
    made.perform_async({"id": 1})
    drain(made)
    assert seen == [("1", [""])]


# --- decoration ---


def test_the_annotation_of_a_function_is_the_type_and_that_of_a_method_is_none(app: lowq.Lowq) -> None:
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
    with pytest.raises(PayloadError, match="the payload does not fit type Order: "):
        batch.push(1, wrong)


def test_a_codec_of_ones_own_beside_a_type_is_refused_and_beside_none_used(store_url: str) -> None:
    message = r"^Made: its payloads are Order, which says how they are encoded, and so do the settings dump_payload"
    with closing(lowq.Lowq(redis_url=store_url, dump_payload=str.encode, load_payload=bytes.decode)) as app:
        with pytest.raises(ConfigError, match=message):
            worker(app, Order)
        seen: Seen = []
        made = worker(app, Any, seen)
        made.push(1, "plain")
        drain(made)
        assert seen == [("1", ["plain"])]
    with closing(lowq.Lowq(redis_url=store_url)) as app:
        made = worker(app, Order)
        app.config.load_payload = bytes.decode
        with pytest.raises(ConfigError, match=message):
            made.push(1, Order(1))
        app.config.load_payload = load_payload
        assert made.push(1, Order(1)) == 1


def test_a_codec_of_the_worker_and_a_type_that_has_no_form_are_refused(app: lowq.Lowq) -> None:
    class Unknown:
        pass

    def sync(payloads_by_id: dict[str, list[Unknown]]) -> None: ...

    message = r"^Made: payloads can't be Unknown: it has no form in JSON\. Write a TypedDict"
    with pytest.raises(ConfigError, match=message):
        worker(app, Unknown)
    with pytest.raises(ConfigError, match=r"^sync: payloads can't be Unknown: "):
        app.worker(sync)
    for name in ("dump_payload", "load_payload"):

        class Orders(lowq.Worker[Order]):
            def perform(self, payloads_by_id: dict[str, list[Order]]) -> None: ...

        setattr(Orders, name, staticmethod(str))
        with case(name), pytest.raises(ConfigError, match=rf"^Orders\.{name} would do nothing: its payloads are Order"):
            app.worker(Orders)
    assert app.workers == {}
