"""Typed uses of lowq that mypy --strict and pyright must accept, each as an application would write it.

`tests/rules/project/test_typing.py` checks this file; it is never run.
"""

from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Annotated, Any, ClassVar, NotRequired, TypedDict, assert_type
from uuid import UUID

import msgspec
import pydantic

import lowq
import lowq.testing
from lowq import inspection
from lowq.shards.scheduler import Schedulable, Scheduler, SeqScheduler
from lowq.shards.splitter import ByNodeSplitter


class Order(TypedDict):
    version: int
    status: NotRequired[str]


# --- workers ---


@lowq.worker
class Bare(lowq.Worker[Order]):
    def perform(self, payloads_by_id: dict[str, list[Order]]) -> None:
        for order_id, payloads in payloads_by_id.items():
            assert_type(order_id, str)
            assert_type(payloads[-1]["version"], int)


@lowq.worker(shards_count=24)
class WithoutType(lowq.Worker):  # its payloads may be anything
    def perform_one(self, order_id: str, payloads: list[Any]) -> None:
        assert_type(payloads[-1], Any)


@lowq.worker(
    shards_count=24,
    batch_size=10,
    max_retry_count=5,
    queue_name="Orders",
    max_payloads=50,
    max_crash_count=2,
    weight=0.5,
    max_threads=3,
    time_limit=60,
    ttr=timedelta(minutes=2),
    bury_on=(ValueError, KeyError),
    release_on={TimeoutError: 30, ConnectionError: timedelta(minutes=1)},
)
class OrderSync(lowq.Worker[Order]):
    def __init__(self) -> None:
        self.seen = 0

    def perform(self, payloads_by_id: dict[str, list[Order]]) -> None:
        self.seen += len(payloads_by_id)

    def setup(self) -> None: ...

    def teardown(self) -> None: ...

    def retry_in(self, retry_count: int, error: BaseException | str) -> float | timedelta:
        return 60 if isinstance(error, TimeoutError) else super().retry_in(retry_count)

    def retries_exhausted(self, jobs: list[lowq.Job]) -> None:
        for job in jobs:
            assert_type(job.id, str)
            assert_type(job.payloads, list[tuple[Any, float]])


def on_event(event: lowq.JobEvent) -> None:
    assert_type(event.id, str)
    assert_type(event.payloads_count, int | None)


@lowq.worker
class ObservesItself(lowq.Worker[Order]):
    def perform(self, payloads_by_id: dict[str, list[Order]]) -> None: ...

    @staticmethod
    def on_event(event: lowq.JobEvent) -> None:
        assert_type(event.at, float)


lowq.config.on_job_event = on_event
lowq.config.graphite = "udp://graphite:2003"
assert_type(ObservesItself.queue.statistics().tasks.ready, int)


@lowq.worker()
class OptionsAsAttributes(lowq.Worker[Any]):
    shards_count = 7
    queue_name = "Invoices"
    bury_on = (ValueError,)
    release_on: ClassVar = {TimeoutError: 30}

    def perform(self, payloads_by_id: dict[str, list[Any]]) -> None: ...

    def retry_in(self, retry_count: int) -> float:
        return 10 * (retry_count + 1)


@lowq.worker
class Plain:
    def perform(self, payloads_by_id: dict[str, list[int]]) -> None: ...


@lowq.worker
def order_sync(payloads_by_id: dict[str, list[Order]]) -> None: ...


@lowq.worker(batch_size=100)
def invoice_sync(payloads_by_id: dict[str, list[Any]]) -> None: ...


@lowq.worker
class Overriding(lowq.Worker[Order]):
    @classmethod
    def perform_async(
        cls, jobs: Any, *, on_progress: Callable[[int], object] | None = None,
        timeout: float | timedelta | None = None, durability: lowq.Durability | None = None,
    ) -> int:  # fmt: skip
        return super().perform_async(jobs, on_progress=on_progress, timeout=timeout, durability=durability)

    def perform(self, payloads_by_id: dict[str, list[Order]]) -> None: ...


assert_type(OrderSync().seen, int)
assert_type(OrderSync.shards_count, int)
assert_type(OrderSync.queue_name, str)

assert_type(
    lowq.app.queue("mail", 16, ttl=timedelta(hours=1), priority=3, merge=lambda payloads: payloads[-1:]), lowq.Queue
)
lowq.app.queue("mail", score="version")
lowq.app.queue("mail", score=lambda payload: payload["at"])
lowq.app.queue("mail", merge="append", debounce=2, max_wait=30, capacity=None, latency_goal=5, morgue_max=1000)
assert_type(lowq.app.queue("mail", durability="replicated").push(1, durability="fsynced"), int)

# --- jobs in ---

assert_type(OrderSync.perform_async({"id": 1}), int)
OrderSync.perform_async(
    [
        {"id": 1},
        {"id": "2", "payload": {"version": 7, "status": "paid"}, "score": 7},
        {"id": UUID(int=3), "payload": {"version": 1}, "perform_at": datetime(2027, 1, 1, tzinfo=UTC)},
        {"id": 4, "payload": {"version": 2}, "delay": 60},
        {"id": 5, "delay": timedelta(minutes=5)},
    ]
)
OrderSync.perform_async({"id": number, "score": number} for number in range(100_000))
invoice_sync.perform_async({"id": 1, "payload": "x"})
invoice_sync.queue.push([{"id": 1}])

job: lowq.JobDict = {"id": 1, "payload": {"version": 3}, "score": 3}
listed: list[lowq.JobDict] = [job]
OrderSync.perform_async(job)
OrderSync.perform_async(listed)
rows: list[dict[str, object]] = []
invoice_sync.perform_async(rows)
WithoutType.perform_async(rows)
lowq.app.queue("mail").push(rows)


def read() -> Iterator[dict[str, Any]]:
    yield {"id": 1}


def read_orders() -> Iterator[lowq.JobDict[Order]]:
    yield {"id": 1}


WithoutType.queue.push(read())
OrderSync.queue.push(read_orders())


def show(accepted: int) -> None: ...


OrderSync.queue.push(read_orders(), show)
WithoutType.queue.push(read(), on_progress=show)
assert_type(OrderSync.queue, lowq.Queue[Order])
assert_type(OrderSync.push(42, {"version": 2}, score=2, delay=timedelta(minutes=1)), int)
OrderSync.push("42", {"version": 2, "status": "paid"}, perform_at=datetime(2027, 1, 1, tzinfo=UTC), timeout=5)
OrderSync.push(UUID(int=3), payload={"version": 1}, ttl=60, priority=3)
order_sync.push(1)
assert_type(OrderSync.queue.push(42, {"version": 2}, score=2), int)


async def produce() -> None:
    assert_type(await OrderSync.aperform_async([{"id": 1}, {"id": 2, "score": 2.5}]), int)
    await order_sync.aperform_async({"id": 1})
    assert_type(await OrderSync.apush(42, {"version": 2}, score=2), int)
    assert_type(await OrderSync.queue.apush(42, {"version": 2}), int)


try:
    OrderSync.perform_async(read_orders())
except lowq.PushError as error:
    assert_type(error.accepted, int)
    OrderSync.perform_async(error.rest)
except (lowq.JobError, lowq.ShardsCountError, lowq.RedisUnavailable):
    raise

# --- inside perform ---


@lowq.worker(batch_size=10)
class Words(lowq.Worker[Order]):
    def perform(self, payloads_by_id: dict[str, list[Order]]) -> None:
        execution = lowq.current()
        assert_type(execution, lowq.Execution)
        assert_type(execution.fence, int)
        assert_type(execution.jobs, list[lowq.Job])
        assert_type(execution.deadline, float | None)
        execution.touch(30)
        execution.touch(timedelta(seconds=30))
        for order_id in payloads_by_id:
            execution.done(order_id)
            execution.fail(order_id, ValueError("no such order"))
            execution.fail(order_id, "no such order")
            execution.release(order_id)
            execution.release(order_id, delay=60)
            execution.release(order_id, delay=timedelta(minutes=1))
            execution.bury(order_id, reason="cancelled")


# --- an application of one's own, and its settings ---


def log(worker: type, batch: dict[str, list[Any]], call_next: Callable[[], object]) -> None:
    call_next()


app = lowq.Lowq(redis_url="memory://", server_middlewares=[log], threads_per_node=3)
app.config.lease_ttl = 30
app.config.build_splitter = lambda: ByNodeSplitter(3, 0, 5)
app.config.build_scheduler = SeqScheduler


def latest_first(shards: Sequence[Schedulable], now: float, ready: Callable[[Schedulable], bool]) -> Schedulable | None:
    return max(filter(ready, shards), key=lambda shard: (shard.queue, shard.index, shard.next_due or 0), default=None)


own_scheduler: Scheduler[Schedulable] = latest_first
app.config.build_scheduler = lambda: latest_first
lowq.config.server_middlewares.append(log)
lowq.config.redis_url = "redis://localhost"


@app.worker
def mine(payloads_by_id: dict[str, list[int]]) -> None: ...


mine.perform_async({"id": 1})
app.config.workers = [mine, OrderSync]

# --- the queue's handle ---

queue = app.queue("Orders")
assert_type(queue.stats().length, int)
assert_type(queue.peek(42), lowq.Job | None)
found = queue.peek("42")
if found is not None:
    assert_type(found.perform_at, float | None)
queue.perform_now([1, "2", UUID(int=3)])
queue.bury("42", reason="cancelled")
queue.kick(str(number) for number in range(10))
queue.delete(42)
assert_type(queue.cancel([42, "43"]).running, tuple[str, ...])
for step in queue.bulk("kick", state="morgue", match="4*"):
    assert_type(step.done, int)
    assert_type(step.total, int)
queue.bulk("cancel", "taken", match="4*", older_than=timedelta(hours=1))
page = queue.jobs(state="retrying", match="4*", order_by="perform_at", reverse=False, limit=50)
assert_type([item.id for item in page.jobs], list[str])
queue.jobs(after=page.cursor)
assert_type([item.name for item in app.queues()], list[str])
assert_type([item.threads for item in app.nodes()], list[int])
assert_type([item.owner for item in app.shards(queue)], list[str | None])
assert_type(queue.why("42").until, float | None)
assert_type(queue.describe("42").jobs, tuple[lowq.Job, ...])
assert_type(queue.describe("42").shard.owner, str | None)
queue.bulk("delete", inspection.JobFilter(state="morgue", max=1.5))
assert_type(queue.pause(), bool)
queue.resume()
OrderSync.queue.drop()

# --- testing ---

with lowq.testing.embedded(OrderSync, order_sync):
    assert_type(lowq.testing.drain(OrderSync, order_sync, now=1.8e9, limit=3, raises=True).performed, int)
with lowq.testing.execution(OrderSync, {"1": [{"version": 1}]}) as current:
    current.done("1")


def ids(jobs: Iterable[lowq.Job]) -> list[str]:
    return [item.id for item in jobs]


@lowq.worker
async def async_function(payloads_by_id: dict[str, list[Any]]) -> None: ...


async_function.perform_async({"id": 1})


@lowq.worker
class Awaits(lowq.Worker[Order]):
    async def setup(self) -> None: ...
    async def perform(self, payloads_by_id: dict[str, list[Order]]) -> None: ...
    async def teardown(self) -> None: ...


# --- one id at a time ---


@lowq.worker(batch_size=10)
class PerId(lowq.Worker[Order]):
    def perform_one(self, job_id: str, payloads: list[Order]) -> None:
        assert_type(payloads[-1]["version"], int)


@lowq.worker(batch_size=10)
def per_id(job_id: str, payloads: list[Any]) -> None: ...


@lowq.worker
async def per_id_awaits(job_id: str, payloads: list[Any]) -> None: ...


assert_type(per_id, type[lowq.Worker[Any]])


# --- settings ---


lowq.config.bury_on = (ValueError,)
lowq.config.release_on = {TimeoutError: 30}
lowq.config.retry_in = lambda retry_count, error: 60 if isinstance(error, TimeoutError) else retry_count


lowq.config.on_server_stop = lowq.app.close


# --- schedules ---


@lowq.every("0 8 * * 1", tz="Europe/Berlin", missed="all", name="weekly")
@lowq.every(timedelta(hours=1))
@lowq.worker
def scheduled(job_id: str, payloads: list[Any]) -> None: ...


@lowq.every(30, missed="skip")
@lowq.worker(batch_size=2)
class ScheduledPlain:
    def perform(self, payloads_by_id: dict[str, list[Any]]) -> None: ...


assert_type(ScheduledPlain().perform({}), None)
assert_type(scheduled.push("weekly", {"planned_at": 1.5}), int)
assert_type(lowq.app.schedules(), list[inspection.ScheduleInfo])
assert_type(lowq.app.run_schedule_now("weekly"), float)
assert_type(lowq.app.pause_schedule("weekly", by="ann"), bool)


# --- types of payloads ---


class LineStruct(msgspec.Struct):
    price: float


class OrderStruct(msgspec.Struct):
    version: int
    lines: list[LineStruct] = []


@dataclass
class OrderData:
    version: int
    at: datetime | None = None


class OrderModel(pydantic.BaseModel):
    version: int


class Paid(msgspec.Struct, tag=True):
    amount: int


class Lost(msgspec.Struct, tag=True):
    why: str


Event = Annotated[OrderModel | Order, pydantic.Field(discriminator="kind")]


@lowq.worker
class OfStruct(lowq.Worker[OrderStruct]):
    def perform(self, payloads_by_id: dict[str, list[OrderStruct]]) -> None:
        for payloads in payloads_by_id.values():
            assert_type(payloads[-1].lines[0].price, float)


@lowq.worker
class OfData(lowq.Worker[OrderData]):
    def perform_one(self, job_id: str, payloads: list[OrderData]) -> None:
        assert_type(payloads[-1].at, datetime | None)


@lowq.worker
class OfUnion(lowq.Worker[Paid | Lost]):
    def perform_one(self, job_id: str, payloads: list[Paid | Lost]) -> None:
        for payload in payloads:
            match payload:
                case Paid(amount=amount):
                    assert_type(amount, int)
                case Lost(why=why):
                    assert_type(why, str)


@lowq.worker
class OfAnnotated(lowq.Worker[Event]):
    def perform_one(self, job_id: str, payloads: list[Event]) -> None: ...


@lowq.worker
def of_struct(job_id: str, payloads: list[OrderStruct]) -> None: ...


assert_type(of_struct, type[lowq.Worker[OrderStruct]])
OfStruct.push(42, OrderStruct(2, [LineStruct(1.5)]), score=2)
OfData.push(42, OrderData(2))
OfAnnotated.push(42, payload=OrderModel(version=2))
OfUnion.push(42, Lost("in the mail"))
of_struct.push(42, OrderStruct(2))
typed_job: lowq.JobDict[OrderStruct] = {"id": 42, "payload": OrderStruct(2), "score": 2}
OfStruct.perform_async(typed_job)
OfStruct.perform_async([typed_job])


async def stream() -> AsyncIterator[lowq.JobDict[OrderStruct]]:
    yield typed_job


async def produce_typed() -> None:
    assert_type(await OfStruct.aperform_async(stream(), on_progress=print), int)
    assert_type(await OfStruct.queue.apush(stream(), print), int)
    assert_type(await OfStruct.apush(42, OrderStruct(2)), int)
    await OfStruct.aperform_async([typed_job])


# --- what async workers share ---


@lowq.app.on_loop_start
async def connect(state: SimpleNamespace) -> None:
    state.answer = 42


@lowq.app.on_loop_stop
async def disconnect() -> None: ...


@lowq.worker(retry_in=timedelta(minutes=5))
async def shares(payloads_by_id: dict[str, list[Any]]) -> None:
    assert_type(lowq.current().state, SimpleNamespace)


# --- limits around calls ---


async def call() -> None:
    erp = lowq.limit("erp", lowq.Rate(20, per=1, strict=True), lowq.Concurrency(5), timeout=timedelta(seconds=3))
    assert_type(erp, lowq.Limit)
    async with erp as limit:
        await limit.adefer(timedelta(seconds=5))
    with app.limit("erp", timeout=0) as limit:
        limit.defer(5)
    lowq.Limit.defer("erp", 5)


lowq.worker(retry_in=5)
lowq.worker(retry_in=lambda retry_count: 10 * 2**retry_count)
lowq.Lowq(shutdown_timeout=timedelta(minutes=1), retry_in=30)
assert_type(lowq.config.shutdown_timeout, float)
