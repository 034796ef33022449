# type: ignore
# ruff: noqa: B018, DTZ005, PGH003, T201
"""Mistakes that mypy --strict and pyright must both find: on each line marked `# rejected`, and on no other.

`tests/rules/project/test_typing.py` checks this file without its first line; it is never run.
"""

from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypedDict

import msgspec

import lowq
from lowq.job import Jobs


class Order(TypedDict):
    version: int


# --- options ---


@lowq.worker(shard_count=24)  # rejected
class WrongOptionName(lowq.Worker[Order]):
    def perform(self, payloads_by_id: dict[str, list[Order]]) -> None: ...


@lowq.worker("Orders")  # rejected
class NameInsteadOfOption(lowq.Worker[Order]):
    def perform(self, payloads_by_id: dict[str, list[Order]]) -> None: ...


@lowq.worker
class WrongAttribute(lowq.Worker[Order]):
    batch_size = "10"  # rejected

    def perform(self, payloads_by_id: dict[str, list[Order]]) -> None: ...


lowq.app.queue("mail", batch_size=3)  # rejected
lowq.app.queue("mail", ttl="1h")  # rejected


# --- methods ---


@lowq.worker
class OtherPayloads(lowq.Worker[Order]):
    def perform(self, payloads_by_id: dict[str, list[str]]) -> None: ...  # rejected


@lowq.worker
class MoreArguments(lowq.Worker[Order]):
    def perform(self, payloads_by_id: dict[str, list[Order]], worker: str) -> None: ...  # rejected


@lowq.worker
class RetryAsText(lowq.Worker[Order]):
    def perform(self, payloads_by_id: dict[str, list[Order]]) -> None: ...

    def retry_in(self, retry_count: int) -> str:  # rejected
        return "soon"


@lowq.worker
class InstanceMethod(lowq.Worker[Order]):
    def perform(self, payloads_by_id: dict[str, list[Order]]) -> None: ...

    def perform_async(self, jobs: Jobs) -> int:  # rejected
        return 0


class Handler(lowq.Worker[Order]):
    def perform(self, payloads_by_id: dict[str, list[Order]]) -> None:
        for payloads in payloads_by_id.values():
            print(payloads[-1]["status"])  # rejected


class PerId(lowq.Worker[Order]):
    def perform_one(self, job_id: str, payloads: list[int]) -> None: ...  # rejected


@lowq.worker(bury_on=ValueError)  # rejected
class BuriesOnOne(lowq.Worker[Order]):
    def perform(self, payloads_by_id: dict[str, list[Order]]) -> None: ...


@lowq.worker(release_on={TimeoutError: "30"})  # rejected
class ReleasesForAText(lowq.Worker[Order]):
    def perform(self, payloads_by_id: dict[str, list[Order]]) -> None: ...


class SetsUpWithMore(lowq.Worker[Order]):
    def setup(self, database: str) -> None: ...  # rejected


# --- functions ---


@lowq.worker  # rejected
def without_arguments() -> None: ...


@lowq.worker(batch_size=3)  # rejected
def with_three_arguments(job_id: str, payloads: list[Any], more: int) -> None: ...


@lowq.worker(batch_size=3)  # rejected
def with_payloads_first(payloads: list[Any], job_id: str) -> None: ...


# --- jobs in ---


@lowq.worker
class Orders(lowq.Worker[Order]):
    def perform(self, payloads_by_id: dict[str, list[Order]]) -> None: ...


class OrderStruct(msgspec.Struct):
    version: int


@dataclass
class OrderData:
    version: int


@lowq.worker
class OfStruct(lowq.Worker[OrderStruct]):
    def perform(self, payloads_by_id: dict[str, list[OrderStruct]]) -> None:
        print(payloads_by_id["1"][0].versoin)  # rejected
        print(payloads_by_id["1"][0]["version"])  # rejected


@lowq.worker
class OfData(lowq.Worker[OrderData]):
    def perform_one(self, job_id: str, payloads: list[OrderStruct]) -> None: ...  # rejected


@lowq.worker
class OfUnion(lowq.Worker[OrderStruct | Order]):
    def perform_one(self, job_id: str, payloads: list[OrderStruct | Order]) -> None: ...


@lowq.worker
def of_struct(payloads_by_id: dict[str, list[OrderStruct]]) -> None: ...


Orders.perform_async(42)  # rejected
Orders.perform_async()  # rejected
Orders.push({"id": 42})  # rejected
Orders.push(42, {"version": "2"})  # rejected
Orders.push(42, {"version": 2}, scroe=3)  # rejected
Orders.push(42, {"version": 2}, 3)  # rejected
Orders.perform_async({"id": 42, "payload": {"versoin": 2}})  # rejected
Orders.perform_async([{"id": 42, "payload": 2}])  # rejected
Orders.queue.push({"id": 42, "payload": {"versoin": 2}})  # rejected
of_struct.perform_async({"id": 42, "payload": {"version": 2}})  # rejected
OfStruct.queue.push([{"id": 42, "payload": OrderData(2)}])  # rejected
OfStruct.push(42, {"version": 2})  # rejected
OfStruct.push(42, OrderData(2))  # rejected
OfData.push(42, OrderStruct(2))  # rejected
OfUnion.push(42, OrderData(2))  # rejected
of_struct.push(42, OrderData(2))  # rejected
struct_job: lowq.JobDict[OrderStruct] = {"id": 42, "payload": {"version": 2}}  # rejected
other: lowq.JobDict[Order] = {"id": 1, "payload": {"versoin": 3}}  # rejected
job: lowq.JobDict = {"id": 1.5}  # rejected
misspelt: lowq.JobDict = {"id": 1, "paylod": 2}  # rejected
without_id: lowq.JobDict = {"payload": 2}  # rejected
delayed_until: lowq.JobDict = {"id": 1, "delay": datetime.now()}  # rejected


async def produce() -> int:
    await OfStruct.apush(42, OrderData(2))  # rejected
    return Orders.aperform_async({"id": 1})  # rejected


# --- words, handles, settings ---

lowq.current().done()  # rejected
lowq.current().fail("1")  # rejected
lowq.current().release("1", delay="soon")  # rejected
lowq.config.threads_per_node = "5"  # rejected
lowq.Lowq(redis_ulr="redis://localhost")  # rejected
lowq.Lowq(threads_per_node="5")  # rejected
lowq.config.thread_per_node = 5  # rejected
lowq.config.on_job_event = "print"  # rejected
Orders.queue.statistics().tasks.raedy  # rejected
Orders.queue.peek(1.5)  # rejected
Orders.queue.jobs(state="dead")  # rejected
Orders.queue.bulk("retry")  # rejected
Orders.queue.lenght  # rejected
lowq.app.queue(Orders)  # rejected
lowq.woker  # rejected


# --- schedules ---


@lowq.every("0 8 * * 1", missed="none")  # rejected
@lowq.worker
def wrong_missed(job_id: str, payloads: list[Any]) -> None: ...


@lowq.app.on_loop_start  # rejected
def connect(state: object) -> None: ...


lowq.worker(retry_in="soon")  # rejected


# --- limits around calls ---

lowq.limit("erp", 5)  # rejected
lowq.limit("erp", lowq.Rate(5), timeout="3")  # rejected
with lowq.limit("erp") as limit:
    limit.defer("5")  # rejected
lowq.app.queue("Orders").bulk("cancell")  # rejected
