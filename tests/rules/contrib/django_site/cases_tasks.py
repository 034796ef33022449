"""`LowqBackend`: the rules of django-tasks' own suite, and its own: keys, commits, retries, results."""

from collections.abc import Callable
from datetime import timedelta
from threading import Thread
from typing import Any
from unittest import mock

import django
from asgiref.sync import async_to_sync
from django.db import OperationalError, connection, transaction
from django.test import override_settings
from django.utils import timezone

import lowq
from lowq.contrib.django import push_on_commit
from lowq.contrib.django.tasks import InvalidTask, LowqBackend, LowqTask
from lowq.contrib.django.tasks import task as lowq_task
from lowq.contrib.django.test import TestCase, TransactionTestCase
from tests.rules.contrib.django_site import tasks

if django.VERSION >= (6,):
    from django.tasks import TaskResultStatus, default_task_backend, task_backends
    from django.tasks.exceptions import TaskResultDoesNotExist, TaskResultMismatch
    from django.tasks.signals import task_enqueued, task_finished, task_started

    LOGGER = "django.tasks"
else:
    from django_tasks import TaskResultStatus, default_task_backend, task_backends
    from django_tasks.exceptions import TaskResultDoesNotExist, TaskResultMismatch
    from django_tasks.signals import task_enqueued, task_finished, task_started

    LOGGER = "django_tasks"


class SuiteTests(TransactionTestCase):
    """Cases of django-tasks' suite."""

    def setUp(self) -> None:
        tasks.calls.clear()

    def test_the_backend_and_what_it_says_of_itself(self) -> None:
        self.assertEqual(default_task_backend, task_backends["default"])
        self.assertIsInstance(task_backends["default"], LowqBackend)
        self.assertIsInstance(tasks.noop_task, LowqTask)
        for name in ("supports_defer", "supports_async_task", "supports_priority"):
            self.assertIs(getattr(default_task_backend, name), True)
        # The cache of these tests is in the memory of one process.
        self.assertIs(default_task_backend.supports_get_result, False)
        self.assertEqual([problem.id for problem in default_task_backend.check()], ["lowq.W010"])
        self.assertEqual(list(task_backends["no_results"].check()), [])

    def test_enqueue_and_perform(self) -> None:
        for task in (tasks.noop_task, tasks.noop_task_async, tasks.noop_task_from_bare_decorator):
            with self.subTest(task):
                result = task.enqueue(1, two=3)
                self.assertEqual(result.status, TaskResultStatus.READY)
                self.assertFalse(result.is_finished)
                self.assertEqual((result.started_at, result.finished_at, result.attempts), (None, None, 0))
                self.assertEqual((result.task, result.args, result.kwargs), (task, [1], {"two": 3}))
                with self.assertRaisesMessage(ValueError, "Task has not finished yet"):
                    result.return_value  # noqa: B018
                self.assertEqual(self.lowq.drain(raises=True).performed, 1)
                result.refresh()
                self.assertEqual(result.status, TaskResultStatus.SUCCESSFUL)
                self.assertGreaterEqual(result.started_at, result.enqueued_at)
                self.assertGreaterEqual(result.finished_at, result.started_at)
                self.assertEqual((result.return_value, result.attempts, result.errors), (None, 1, []))

    async def test_aenqueue_and_perform(self) -> None:
        for task in (tasks.noop_task, tasks.noop_task_async):
            with self.subTest(task):
                result = await task.aenqueue()
                self.assertEqual((await self.lowq.adrain(raises=True)).performed, 1)
                await result.arefresh()
                self.assertEqual((result.status, result.attempts), (TaskResultStatus.SUCCESSFUL, 1))

    def test_result_is_read_by_id_and_of_one_task(self) -> None:
        result = tasks.calculate_meaning_of_life.enqueue()
        self.lowq.drain(raises=True)
        self.assertEqual(tasks.calculate_meaning_of_life.get_result(result.id).return_value, 42)
        with self.assertRaises(TaskResultMismatch):
            tasks.noop_task.get_result(result.id)
        with self.assertRaises(TaskResultDoesNotExist):
            default_task_backend.get_result("123")

    def test_failures_end_as_failed_results(self) -> None:
        for task, kind, message in (
            (tasks.failing_task_value_error, ValueError, "This task failed due to ValueError"),
            (tasks.failing_task_system_exit, SystemExit, "This task failed due to SystemExit"),
            (tasks.failing_task_time_limit, lowq.TimeLimitExceeded, "This task took too long"),
            (tasks.complex_exception, ValueError, "This task failed"),
            (tasks.complex_return_value, TypeError, "Unsupported type"),
        ):
            with self.subTest(task):
                result = task.enqueue()
                with self.assertLogs(LOGGER, "ERROR") as logs:
                    self.assertEqual(self.lowq.drain().failed, 1)
                self.assertIn(result.id, logs.output[0])
                result.refresh()
                self.assertEqual((result.status, result.is_finished), (TaskResultStatus.FAILED, True))
                with self.assertRaisesMessage(ValueError, "Task failed"):
                    result.return_value  # noqa: B018
                self.assertIs(result.errors[0].exception_class, kind)
                self.assertIn(message, result.errors[0].traceback)

    def test_signals_and_logs(self) -> None:
        seen: list[tuple[str, str]] = []

        def note(signal: Any, task_result: Any, **_more: Any) -> None:
            seen.append((names[signal], str(task_result.status)))

        names = {task_enqueued: "enqueued", task_started: "started", task_finished: "finished"}
        for signal in names:
            signal.connect(note)
            self.addCleanup(signal.disconnect, note)
        with self.assertLogs(LOGGER, "DEBUG") as logs:
            result = tasks.noop_task.enqueue()
            self.lowq.drain(raises=True)
        self.assertEqual(seen, [("enqueued", "READY"), ("started", "RUNNING"), ("finished", "SUCCESSFUL")])
        self.assertEqual([result.id in line for line in logs.output], [True] * 3)

    def test_what_is_invalid_is_refused(self) -> None:
        def inner() -> None: ...

        rows: list[Callable[[], object]] = [
            lambda: tasks.noop_task.using(queue_name="unknown"),
            lambda: tasks.noop_task.using(priority=101),
            lambda: tasks.noop_task.using(run_after=timezone.now().replace(tzinfo=None)),
            lambda: lowq_task()(inner),
            lambda: lowq_task(key="number")(tasks.calculate_meaning_of_life.func),
            lambda: lowq_task(key=7)(tasks.noop_task.func),  # type: ignore[arg-type]
            lambda: lowq_task(takes_context=True)(tasks.noop_task.func),
            lambda: tasks.invoice.enqueue(None, 1),
        ]
        for wrong in rows:
            with self.assertRaises(InvalidTask):
                wrong()
        with self.assertRaises(TypeError):
            tasks.noop_task.enqueue(object())
        self.assertEqual(self.lowq.drain().performed, 0)

    def test_a_queue_is_validated_when_enqueuing(self) -> None:
        only = {"default": {"BACKEND": "lowq.contrib.django.tasks.LowqBackend"}}
        with override_settings(TASKS=only), self.assertRaises(InvalidTask):
            tasks.failing_task_value_error.enqueue()

    def test_takes_context(self) -> None:
        result = tasks.get_task_id.enqueue()
        self.lowq.drain(raises=True)
        result.refresh()
        self.assertEqual(result.return_value, result.id)

    async def test_async_tasks_in_the_event_loop(self) -> None:
        result = await tasks.think.aenqueue(7)
        self.assertEqual((await self.lowq.adrain(raises=True)).performed, 1)
        await result.arefresh()
        self.assertEqual(result.return_value, 7)

    def test_without_results_there_are_none(self) -> None:
        result = tasks.at_once.enqueue(1)
        self.assertIs(task_backends["no_results"].supports_get_result, False)
        self.lowq.drain(raises=True)
        self.assertEqual(tasks.calls, [1])
        with self.assertRaises(NotImplementedError):
            result.refresh()


class OwnTests(TransactionTestCase):
    """What lowq adds."""

    def setUp(self) -> None:
        tasks.calls.clear()

    def test_calls_with_a_key_are_jobs_of_one_id_in_order_and_each_call_is_performed(self) -> None:
        for version in (1, 2, 2):
            tasks.invoice.enqueue(42, version)
        tasks.invoice.enqueue(order_id=43, version=1)
        self.assertEqual(self.lowq.drain(raises=True).batches, 4)
        self.assertEqual([call for call in tasks.calls if call[0] == 42], [(42, 1), (42, 2), (42, 2)])
        self.lowq.assert_pushed("default", 42, times=3)
        tasks.ship.enqueue({"id": 5}, to="work")
        self.lowq.assert_pushed("mail", "order:5", times=1)

    def test_run_after_delays_and_does_not_hold_up_others_of_its_key(self) -> None:
        later = tasks.invoice.using(run_after=timezone.now() + timedelta(hours=1))
        later.enqueue(42, 1)
        tasks.invoice.enqueue(42, 2)
        tasks.calculate_meaning_of_life.using(run_after=timezone.now() + timedelta(hours=1)).enqueue()
        self.lowq.drain(raises=True)
        self.assertEqual(tasks.calls, [(42, 2)])
        self.lowq.clock.travel(3700)
        self.assertEqual(self.lowq.drain(raises=True).performed, 3)  # one of them joins the others of its key first
        self.assertEqual(tasks.calls, [(42, 2), (42, 1)])

    def test_after_run_after_a_call_has_the_priority_that_it_says_or_that_of_its_queue(self) -> None:
        for order_id, priority in ((1, 0), (2, 100)):
            later = timezone.now() + timedelta(hours=1)
            task = tasks.invoice.using(run_after=later, queue_name="patient", priority=priority)
            task.enqueue(order_id, 1)
        self.lowq.clock.travel(3700)
        worker: Any = lowq.app.workers["patient"]
        self.lowq.drain(worker)
        pushed = {one.id: one.priority for one in self.lowq.assert_pushed("patient")}
        self.assertEqual((pushed["1"], pushed["2"]), (7, 0))

    def test_a_call_that_is_pushed_again_is_performed_once(self) -> None:
        tasks.invoice.enqueue(42, 1)
        queue: Any = lowq.app.queue("default")
        ((payload, _),) = queue.peek(42).payloads
        queue.push(42, payload)  # as by a process that dies when it has done so, after run_after
        self.assertEqual(self.lowq.drain(raises=True).batches, 1)
        self.assertEqual(tasks.calls, [(42, 1)])

    def test_a_worker_that_is_faster_than_the_record_of_the_enqueuing_has_the_last_word(self) -> None:
        def push_and_perform(*args: Any, **options: Any) -> None:
            push_on_commit(*args, **options)
            self.lowq.drain(raises=True)

        with mock.patch("lowq.contrib.django.tasks.push_on_commit", push_and_perform):
            result = tasks.calculate_meaning_of_life.enqueue()
        result.refresh()
        self.assertEqual(result.return_value, 42)

    def test_priority_is_mapped_to_that_of_lowq(self) -> None:
        for priority, expected in ((-100, 9), (-1, 4), (0, 4), (1, 4), (50, 2), (100, 0)):
            result = tasks.noop_task.using(priority=priority).enqueue()
            queue: Any = lowq.app.queue("default")
            self.assertEqual(queue.peek(result.id).priority, expected)

    def test_a_failed_call_is_ready_for_its_next_attempt_and_keeps_its_error(self) -> None:
        result = tasks.second_time_lucky.enqueue()
        self.assertEqual(self.lowq.drain().failed, 1)
        result.refresh()
        self.assertEqual((result.status, result.attempts), (TaskResultStatus.READY, 1))
        self.assertIs(result.errors[0].exception_class, ConnectionError)
        self.lowq.clock.travel(3600)
        self.assertEqual(self.lowq.drain(raises=True).performed, 1)
        result.refresh()
        self.assertEqual((result.status, result.return_value), (TaskResultStatus.SUCCESSFUL, 2))

    def test_a_call_that_is_released_has_not_failed(self) -> None:
        finished: list[str] = []

        def note(task_result: Any, **_more: Any) -> None:
            finished.append(str(task_result.status))

        task_finished.connect(note)
        self.addCleanup(task_finished.disconnect, note)
        tasks.errors[:] = [
            ValueError("a failure"), TimeoutError("released, though no retry is left"),
            lowq.RedisUnavailable("released, too: the handler found no Redis"),
        ]  # fmt: skip
        result = tasks.patient.enqueue()
        for status in (TaskResultStatus.READY, TaskResultStatus.READY, TaskResultStatus.SUCCESSFUL):
            self.lowq.drain()
            result.refresh()
            self.assertEqual(result.status, status)
            self.lowq.clock.travel(3600)
        self.assertEqual(finished, ["SUCCESSFUL"])

    def test_a_queue_that_says_it_buries_on_nothing_does_not_bury_on_what_the_settings_say(self) -> None:
        tasks.errors[:] = [KeyError("a failure")]
        self.addCleanup(setattr, lowq.app.config, "bury_on", lowq.app.config.bury_on)
        lowq.app.config.bury_on = (KeyError,)
        result = tasks.patient.enqueue()
        self.lowq.drain()
        result.refresh()
        self.assertEqual(result.status, TaskResultStatus.READY)

    def test_a_task_is_enqueued_at_the_commit_or_not_at_all(self) -> None:
        with transaction.atomic():
            result = tasks.invoice.enqueue(1, 1)
            now = tasks.at_once.enqueue(1)
            self.assertEqual((result.enqueued_at, now.enqueued_at is None), (None, False))
            with self.assertRaises(TaskResultDoesNotExist):
                result.refresh()
        self.assertIsNotNone(result.enqueued_at)
        with self.assertRaises(ZeroDivisionError), transaction.atomic():
            lost = tasks.invoice.enqueue(2, 1)
            1 / 0  # noqa: B018
        self.lowq.drain(raises=True)
        self.assertEqual(tasks.calls, [1, (1, 1)])
        self.assertIsNone(lost.enqueued_at)

    def test_a_task_is_enqueued_while_a_database_that_it_does_not_need_is_away(self) -> None:
        connection.close()
        with mock.patch.object(connection, "connect", side_effect=OperationalError):
            result = tasks.invoice.enqueue(1, 1)
            async_to_sync(tasks.invoice.aenqueue)(1, 2)
        self.assertIsNotNone(result.enqueued_at)
        self.lowq.drain(raises=True)
        self.assertEqual(tasks.calls, [(1, 1), (1, 2)])

    def test_all_threads_have_the_same_workers(self) -> None:
        before = dict(lowq.app.workers)
        found: list[str] = []
        thread = Thread(target=lambda: found.append(tasks.noop_task.enqueue().id))
        thread.start()
        thread.join()
        self.assertEqual(lowq.app.workers, before)
        self.assertEqual(self.lowq.drain(raises=True).performed, 1)
        tasks.noop_task.get_result(found[0])

    def test_a_task_that_does_not_exist_fails(self) -> None:
        queue: Any = lowq.app.queue("mail")
        queue.push("x", {"task": "shop.gone", "id": "x", "args": [], "kwargs": {}, "backend": "default", "at": 0})
        drained = self.lowq.drain(lowq.app.workers["mail"])
        self.assertIn("shop", drained.errors[0])


class TestCaseTests(TestCase):
    async def test_async_tests_have_one_connection(self) -> None:
        async with self.acaptureOnCommitCallbacks(execute=True):
            await tasks.think.aenqueue(1)
        self.assertEqual((await self.lowq.adrain(raises=True)).performed, 1)
