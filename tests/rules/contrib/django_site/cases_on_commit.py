"""`push_on_commit`: order, one write, rollbacks, databases, failures; sync and async."""

from contextlib import suppress
from datetime import UTC, datetime
from typing import Any
from unittest import mock

from django.db import connection, transaction
from django.db.transaction import TransactionManagementError

import lowq
from lowq.contrib.django import apush_on_commit, push_on_commit
from lowq.contrib.django.test import TestCase, TransactionTestCase
from lowq.errors import ConfigError, JobError, PayloadError, RedisUnavailable
from tests.rules.contrib.django_site import middlewares
from tests.rules.contrib.django_site.models import Order
from tests.rules.contrib.django_site.workers import AsyncSync, OrderSync, TypedSync


def waiting(job_id: object = 1, worker: Any = OrderSync) -> list[Any]:
    """The payloads of an id, in their order."""
    if worker.queue_name not in [info.name for info in lowq.app.queues()]:
        return []
    job = worker.queue.peek(job_id)
    return [] if job is None else [payload for payload, _ in job.payloads]


class Writes:
    """Counts the pushes of the application, as lists of jobs."""

    def __enter__(self) -> "list[list[Any]]":
        self.lists: list[list[Any]] = []
        self._before = OrderSync.__dict__.get("perform_async")
        make = lowq.Worker.perform_async.__func__  # type: ignore[attr-defined]  # a class method

        def perform_async(cls: Any, /, jobs: Any, **options: Any) -> int:
            self.lists.append([job["payload"] for job in jobs])
            count: int = make(cls, jobs, **options)
            return count

        OrderSync.perform_async = classmethod(perform_async)  # type: ignore[assignment, method-assign]
        return self.lists

    def __exit__(self, *_raised: object) -> None:
        del OrderSync.perform_async


class OnCommitTests(TransactionTestCase):
    databases = {"default", "other"}  # as Django has it

    def test_calls_of_a_transaction_leave_in_their_order_and_in_one_write_at_the_commit(self) -> None:
        with Writes() as writes, transaction.atomic():
            push_on_commit(OrderSync, 1, "a")
            with transaction.atomic():
                push_on_commit(OrderSync, 1, "b")
            push_on_commit(OrderSync, 2, "of another id")
            push_on_commit(AsyncSync, 1, "of another queue")
            push_on_commit(OrderSync, 1, "c")
            self.assertEqual(waiting(), [])
        self.assertEqual(writes, [["a", "b", "of another id", "c"]])
        self.assertEqual(waiting(), ["a", "b", "c"])
        self.assertEqual(waiting(worker=AsyncSync), ["of another queue"])

    def test_calls_of_a_queue_keep_their_order_however_they_are_called(self) -> None:
        with transaction.atomic():
            push_on_commit(OrderSync, 1, "a")
            push_on_commit(OrderSync, 1, "b", robust=True)
            push_on_commit(AsyncSync, 1, "of another queue")
            push_on_commit(OrderSync, 1, "c")
            push_on_commit(lowq.app.queue("OrderSync", OrderSync.shards_count), 1, "d", timeout=5)
            push_on_commit(OrderSync, 1, "e")
        self.assertEqual(waiting(), ["a", "b", "c", "d", "e"])

    def test_handles_of_one_queue_and_its_worker_are_pushed_to_together(self) -> None:
        with mock.patch("lowq.contrib.django.on_commit._push", return_value=None) as push, transaction.atomic():
            for payload in ("a", "b"):
                push_on_commit(lowq.app.queue("OrderSync", OrderSync.shards_count), 1, payload)
            push_on_commit(OrderSync, 1, "c")
        self.assertEqual([[job["payload"] for job in call.args[1]] for call in push.mock_calls], [["a", "b", "c"]])

    def test_a_payload_is_checked_as_the_type_of_its_worker(self) -> None:
        at = datetime(2026, 1, 2, tzinfo=UTC)
        with transaction.atomic():
            push_on_commit(TypedSync, 1, {"at": at})
            with self.assertRaises(PayloadError):
                push_on_commit(TypedSync, 1, {"at": "some day"})
        self.assertEqual(waiting(worker=TypedSync), [{"at": "2026-01-02T00:00:00Z"}])

    async def test_what_is_no_worker_is_refused_with_what_to_write(self) -> None:
        target: Any
        for target in ("OrderSync", object, None):
            with self.assertRaisesRegex(ConfigError, r"write the class, push_on_commit\(OrderSync, 42"):
                push_on_commit(target, 1)
            with self.assertRaisesRegex(ConfigError, "neither a worker nor the handle of a queue"):
                await apush_on_commit(target, 1)

    def test_outside_of_a_transaction_it_pushes_at_once(self) -> None:
        push_on_commit(OrderSync, 1, "a", delay=60)
        self.assertEqual(waiting(), ["a"])
        self.assertEqual(self.lowq.drain().performed, 0)

    def test_a_rollback_drops_and_that_of_a_savepoint_drops_its_own(self) -> None:
        with self.assertRaises(ZeroDivisionError), transaction.atomic():
            push_on_commit(OrderSync, 1, "lost")
            1 / 0  # noqa: B018
        with transaction.atomic():
            push_on_commit(OrderSync, 1, "a")
            with self.assertRaises(ZeroDivisionError), transaction.atomic():
                push_on_commit(OrderSync, 1, "lost")
                with transaction.atomic():
                    push_on_commit(OrderSync, 1, "lost, too")
                1 / 0  # noqa: B018
            push_on_commit(OrderSync, 1, "b")
        self.assertEqual(waiting(), ["a", "b"])

    def test_what_is_first_and_last_in_a_transaction_may_be_dropped(self) -> None:
        with Writes() as writes, transaction.atomic():
            for payload, lost in (("x", True), ("a", False), ("b", False), ("y", True)):
                with transaction.atomic():
                    push_on_commit(OrderSync, 1, payload)
                    transaction.set_rollback(lost)
        self.assertEqual(writes, [["a", "b"]])

    def test_a_transaction_is_that_of_its_database(self) -> None:
        with transaction.atomic(using="other"):
            push_on_commit(OrderSync, 1, "at once")
            push_on_commit(OrderSync, 2, "later", using="other")
            self.assertEqual((waiting(1), waiting(2)), (["at once"], []))
        self.assertEqual(waiting(2), ["later"])

    def test_manual_transaction_management_is_refused(self) -> None:
        transaction.set_autocommit(False)
        try:
            with self.assertRaises(TransactionManagementError):
                push_on_commit(OrderSync, 1, "a")
        finally:
            transaction.rollback()
            transaction.set_autocommit(True)
        connection.close()  # as before the first query of a process
        with mock.patch.dict(connection.settings_dict, AUTOCOMMIT=False):
            with self.assertRaises(TransactionManagementError):
                push_on_commit(OrderSync, 1, "a")
            connection.close()
        self.assertEqual(waiting(), [])

    def test_the_payload_is_that_of_the_call_and_what_is_malformed_is_refused_there(self) -> None:
        payload = {"version": 1}
        with transaction.atomic():
            push_on_commit(OrderSync, 1, payload)
            payload["version"] = 2
            for error, job_id, wrong in ((PayloadError, 1, {"of": {1, 2}}), (JobError, None, "a")):
                with self.assertRaises(error):
                    push_on_commit(OrderSync, job_id, wrong)  # type: ignore[arg-type]
        self.assertEqual(waiting(), [{"version": 1}])

    def test_what_is_malformed_at_the_commit_keeps_nothing_else_out(self) -> None:
        with self.assertRaises(PayloadError), self.assertLogs("lowq", "ERROR") as logs, transaction.atomic():
            Order.objects.create()
            push_on_commit(OrderSync, 1, "a")
            push_on_commit(OrderSync, 1, "x" * 6000)  # more than MAX_PAYLOAD_BYTES
            push_on_commit(OrderSync, 1, "b")
        self.assertEqual((waiting(), Order.objects.count()), (["a", "b"], 1))
        self.assertIn("may not have been pushed (ids 1)", logs.output[0])

    def test_without_redis_the_commit_stands_and_the_caller_learns_of_it_unless_it_is_robust(self) -> None:
        class Away(lowq.Worker[Any]):
            @classmethod
            def perform_async(cls, jobs: Any, **_options: Any) -> int:
                raise RedisUnavailable("Redis is away")

            def perform(self, payloads_by_id: dict[str, list[Any]]) -> None: ...

        worker = lowq.app.worker(Away)
        with self.assertRaises(RedisUnavailable), self.assertLogs("lowq", "ERROR") as logs, transaction.atomic():
            Order.objects.create()
            push_on_commit(worker, 7, "a")
            push_on_commit(OrderSync, 1, "another queue")
        self.assertEqual((Order.objects.count(), waiting()), (1, ["another queue"]))
        self.assertIn("queue 'Away': 1 jobs of a committed transaction", logs.output[0])
        with self.assertLogs("lowq", "ERROR"), transaction.atomic():
            push_on_commit(worker, 7, "a", robust=True)

    async def test_whatever_a_robust_push_raises_is_logged_from_async_code_too(self) -> None:
        class Odd(lowq.Worker[Any]):
            @classmethod
            async def aperform_async(cls, jobs: Any, **_options: Any) -> int:
                raise ZeroDivisionError  # as a middleware may

            def perform(self, payloads_by_id: dict[str, list[Any]]) -> None: ...

        worker = lowq.app.worker(Odd)
        for robust in (True, False):
            with self.assertLogs("lowq", "ERROR") as logs, suppress(ZeroDivisionError):
                await apush_on_commit(worker, 7, robust=robust)
                self.assertTrue(robust)
            self.assertIn("queue 'Odd': 1 jobs of a committed transaction may not", logs.output[0])

    def test_a_drain_performs_and_closes_connections_around_batches(self) -> None:
        order = Order.objects.create()
        with transaction.atomic():
            push_on_commit(OrderSync, order.pk, "synced")
        self.assertEqual(self.lowq.drain(raises=True).performed, 1)
        self.assertEqual(Order.objects.get().status, "synced")
        self.assertEqual(middlewares.queues[-1], "OrderSync")

    async def test_async_code_pushes_at_once_and_drains(self) -> None:
        order = await Order.objects.acreate()
        await apush_on_commit(AsyncSync, order.pk, "async")
        await apush_on_commit(OrderSync, order.pk, "sync")
        self.assertEqual((await self.lowq.adrain(AsyncSync, raises=True)).performed, 1)
        self.assertEqual((await Order.objects.aget()).status, "async")
        self.assertEqual((await self.lowq.adrain(raises=True)).performed, 1)
        self.assertEqual((await Order.objects.aget()).status, "sync")


class TestCaseTests(TestCase):
    def setUp(self) -> None:
        push_on_commit(OrderSync, 1, "of setUp, which nobody captures")

    def test_nothing_is_pushed_before_callbacks_are_executed(self) -> None:
        order = Order.objects.create()
        with Writes() as writes:
            with self.captureOnCommitCallbacks(execute=True) as callbacks:
                push_on_commit(OrderSync, order.pk, "a")
                push_on_commit(OrderSync, order.pk, "b")
                self.assertEqual(writes, [])
            self.assertEqual((writes, len(callbacks)), ([["a", "b"]], 2))
        self.assertEqual(self.lowq.drain(raises=True).performed, 1)
        order.refresh_from_db()
        self.assertEqual(order.status, "b")

    def test_async_workers_are_drained_within_the_transaction(self) -> None:
        order = Order.objects.create()
        AsyncSync.push(order.pk, "async")
        OrderSync.push(order.pk + 1, "of another")
        self.assertEqual(self.lowq.drain(raises=True).performed, 2)
        order.refresh_from_db()
        self.assertEqual(order.status, "async")

    def test_what_is_captured_and_not_executed_is_not_pushed(self) -> None:
        with self.captureOnCommitCallbacks() as callbacks:
            push_on_commit(OrderSync, 1, "a")
        self.assertEqual(waiting(), [])
        callbacks[0]()
        self.assertEqual(waiting(), ["a"])

    async def test_an_async_test_has_the_transaction_too(self) -> None:
        order = await Order.objects.acreate()
        async with self.acaptureOnCommitCallbacks(execute=True):
            await apush_on_commit(AsyncSync, order.pk, "async")
            self.assertEqual(waiting(order.pk, AsyncSync), [])
        self.assertEqual((await self.lowq.adrain(raises=True)).performed, 1)
        await order.arefresh_from_db()
        self.assertEqual(order.status, "async")
