# type: ignore
# ruff: noqa: B018, DTZ005, PGH003, T201
"""Mistakes that mypy --strict and pyright must both find: on each line marked `# rejected`, and on no other.

`tests/unit/project/test_typing.py` checks this file without its first line; it is never run.
"""

from datetime import datetime
from typing import Any, TypedDict

import lowq


class Order(TypedDict):
    version: int


# --- options ---


@lowq.worker(shard_count=24)  # rejected
class WrongOptionName(lowq.Worker[Order]):
    def perform(self, payloads_by_id: dict[str, list[Order]]) -> None: ...


@lowq.worker(shards_count="24")  # rejected
class WrongOptionType(lowq.Worker[Order]):
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
class PayloadsWithoutId(lowq.Worker[Order]):
    def perform(self, payloads: list[Order]) -> None: ...  # rejected


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

    def perform_async(self, jobs: lowq.Jobs) -> int:  # rejected
        return 0


class Handler(lowq.Worker[Order]):
    def perform(self, payloads_by_id: dict[str, list[Order]]) -> None:
        for payloads in payloads_by_id.values():
            print(payloads[-1]["status"])  # rejected


# --- functions ---


@lowq.worker  # rejected
def without_arguments() -> None: ...


@lowq.worker(batch_size=3)  # rejected
def with_two_arguments(job_id: str, payloads: list[Any]) -> None: ...


# --- jobs in ---


@lowq.worker
class Orders(lowq.Worker[Order]):
    def perform(self, payloads_by_id: dict[str, list[Order]]) -> None: ...


Orders.perform_async(42)  # rejected
Orders.perform_async(["42"])  # rejected
Orders.perform_async()  # rejected
Orders.queue.push(42)  # rejected
job: lowq.JobDict = {"id": 1.5}  # rejected
misspelt: lowq.JobDict = {"id": 1, "paylod": 2}  # rejected
without_id: lowq.JobDict = {"payload": 2}  # rejected
as_text: lowq.JobDict = {"id": 1, "score": "3"}  # rejected
delayed_until: lowq.JobDict = {"id": 1, "delay": datetime.now()}  # rejected


async def produce() -> int:
    return Orders.aperform_async({"id": 1})  # rejected


# --- words, handles, settings ---

lowq.current().done()  # rejected
lowq.current().fail("1")  # rejected
lowq.current().release("1", delay="soon")  # rejected
lowq.current().bury("1", reason=5)  # rejected
lowq.current().retry("1")  # rejected
lowq.config.threads_per_node = "5"  # rejected
lowq.config.thread_per_node = 5  # rejected
lowq.config.graphite = 2003  # rejected
lowq.config.on_job_event = "print"  # rejected
Orders.queue.statistics().tasks.raedy  # rejected
Orders.queue.peek(1.5)  # rejected
Orders.queue.jobs(state="dead")  # rejected
Orders.queue.bulk("retry")  # rejected
Orders.queue.lenght  # rejected
lowq.app.queue(Orders)  # rejected
lowq.woker  # rejected
