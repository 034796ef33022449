"""The installed app: settings.LOWQ and its checks, workers, connections, `manage.py lowq`."""

import asyncio
import io
import logging
from typing import Any
from unittest import mock

from asgiref.sync import sync_to_async
from django.apps import apps
from django.core.checks import run_checks
from django.core.exceptions import ImproperlyConfigured
from django.core.management import CommandError, call_command
from django.db import connection, connections, transaction
from django.test import SimpleTestCase, override_settings

import lowq
from lowq.contrib.django.apps import CloseConnections, apply_settings, check_settings, close_connections
from lowq.contrib.django.test import TransactionTestCase
from tests.rules.contrib.django_site import middlewares
from tests.rules.contrib.django_site.workers import OrderSync


class SettingsTests(SimpleTestCase):
    def tearDown(self) -> None:
        apply_settings(lowq.Config())

    def test_the_settings_of_the_project_are_those_of_its_application(self) -> None:
        self.assertEqual(lowq.app.config.redis_url, "memory://")
        self.assertEqual(lowq.app.config.max_payload_bytes, 5000)
        self.assertEqual(lowq.app.config.server_middlewares, [close_connections, middlewares.seen])
        self.assertIs(lowq.app.workers["OrderSync"], OrderSync)
        self.assertLessEqual({"default", "mail", "loop", "at_once"}, lowq.app.workers.keys())

    def test_every_setting_can_be_written_and_what_holds_code_by_its_path(self) -> None:
        scratch, changed = lowq.Config(), lowq.Config()
        paths = {
            "retry_in": "lowq.retry.default_retry_in",
            "bury_on": ["builtins.KeyError"],
            "release_on": {"builtins.OSError": 5},
            "workers": ["tests.rules.contrib.django_site.workers.OrderSync"],
        }
        names = [name for name in lowq.Config.__annotations__ if not name.startswith("_")]
        written = {name.upper(): paths.get(name, getattr(scratch, name)) for name in names}
        with override_settings(LOWQ=written):
            apply_settings(changed)
            self.assertEqual([problem for problem in check_settings() if problem.id != "lowq.W001"], [])
        self.assertEqual((changed.bury_on, changed.release_on), ((KeyError,), {OSError: 5.0}))
        self.assertEqual(changed.workers, [OrderSync])

    def test_what_is_wrong_is_found_by_checks_and_then_pushes_are_refused(self) -> None:
        rows: list[tuple[Any, str, str, str]] = [
            (["redis://"], "lowq.E001", "LOWQ is a list", 'Write LOWQ = {"REDIS_URL"'),
            ({"REDIS_ULR": "redis://"}, "lowq.E002", "LOWQ['REDIS_ULR'] is no setting", 'Write "REDIS_URL".'),
            ({"redis_url": "redis://"}, "lowq.E002", "LOWQ['redis_url']", 'Write "REDIS_URL".'),
            ({5: 5}, "lowq.E002", "LOWQ[5] is no setting", "Settings are REDIS_URL, NAMESPACE"),
            ({"ON_SERVER_INIT": "shop.gone"}, "lowq.E003", "LOWQ['ON_SERVER_INIT']: No module", "dotted path"),
            ({"BURY_ON": ["KeyError"]}, "lowq.E003", "LOWQ['BURY_ON']: KeyError", "dotted path"),
            ({"LEASE_TTL": "long"}, "lowq.E004", "LOWQ['LEASE_TTL']: lease_ttl='long'", "settings.md"),
            ({"REDIS_URL": "http://:secret@x"}, "lowq.E004", "is not a URL that lowq knows", "settings.md"),
        ]
        for given, number, text, hint in rows:
            with self.subTest(given), override_settings(LOWQ=given):
                app = lowq.Lowq(redis_url="memory://")
                apply_settings(app.config)
                (problem,) = (found for found in run_checks(tags=["lowq"]) if found.is_serious())
                self.assertEqual(problem.id, number)
                self.assertIn(text, problem.msg)
                self.assertIn(hint, str(problem.hint))
                self.assertNotIn("secret", str(problem))
                with self.assertRaisesMessage(ImproperlyConfigured, number):
                    app.queue("Orders", 5).push(1)
                with self.assertRaisesMessage(ImproperlyConfigured, number):
                    asyncio.run(app.queue("Orders", 5).apush(1))

    def test_the_environment_and_a_store_in_memory(self) -> None:
        with mock.patch.dict("os.environ", LOWQ_LEASE_TTL="long"):
            self.assertEqual([problem.id for problem in check_settings()], ["lowq.E005", "lowq.W001"])
        with mock.patch.dict("os.environ", LOWQ_REDIS_URL="shop"), mock.patch.object(lowq, "app", lowq.Lowq()):
            self.assertEqual([problem.id for problem in check_settings()], ["lowq.E005"])
        with override_settings(DEBUG=True):
            self.assertEqual(check_settings(), [])

    def test_a_database_whose_outbox_is_relayed_is_one_of_the_project(self) -> None:
        for name, found in (("gone", ["lowq.E004"]), ("other", []), ("postgresql://db/shop", [])):
            app = lowq.Lowq(redis_url="memory://", outbox=name)
            with self.subTest(name), override_settings(DEBUG=True), mock.patch.object(lowq, "app", app):
                self.assertEqual([problem.id for problem in check_settings()], found)

    def test_queues_of_tasks_are_checked(self) -> None:
        backend = "lowq.contrib.django.tasks.LowqBackend"
        rows: list[tuple[dict[str, Any], str, str]] = [
            ({"QUEUES": []}, "lowq.E010", "QUEUES is empty"),
            ({"OPTIONS": {"result_tll": 5}}, "lowq.E011", "OPTIONS has no 'result_tll'"),
            ({"OPTIONS": {"result_cache": "gone"}}, "lowq.E014", "CACHES has no 'gone'"),
            ({"QUEUES": ["a b"]}, "lowq.E012", "the queue 'a b'"),
            ({"QUEUES": ["mail"], "OPTIONS": {"queue_options": {"mail": {"shards": 5}}}}, "lowq.E012", "shards"),
        ]
        for params, number, text in rows:
            with self.subTest(params), override_settings(TASKS={"default": {"BACKEND": backend, **params}}):
                (problem,) = (found for found in run_checks() if found.is_serious())
                self.assertEqual(problem.id, number)
                self.assertIn(text, problem.msg)
        two = {name: {"BACKEND": backend, "QUEUES": ["mail"]} for name in ("default", "other")}
        with override_settings(TASKS=two):
            self.assertEqual([found.id for found in run_checks() if found.is_serious()], ["lowq.E013"])

    def test_loggers_that_logging_has_turned_off_log_again(self) -> None:
        logger = logging.getLogger("lowq.node")
        logger.disabled = True
        with mock.patch("lowq.contrib.django.apps.autodiscover_modules"):
            apps.get_app_config("lowq").ready()
        self.assertFalse(logger.disabled)
        self.assertEqual(lowq.app.config.server_middlewares.count(close_connections), 1)


class ConnectionTests(TransactionTestCase):
    def setUp(self) -> None:
        connection.ensure_connection()

    def test_old_connections_are_closed_before_and_after_a_batch_but_not_in_a_transaction(self) -> None:
        with mock.patch.object(connection, "close_if_unusable_or_obsolete") as close:
            close_connections(OrderSync, {}, lambda: None)
            self.assertEqual(close.call_count, 2)
            with self.assertRaises(ZeroDivisionError):
                close_connections(OrderSync, {}, lambda: 1 / 0)
            self.assertEqual(close.call_count, 4)
            with transaction.atomic():
                close_connections(OrderSync, {}, lambda: None)
            self.assertEqual(close.call_count, 4)

    async def test_an_async_batch_closes_none_that_another_may_read_from_unless_it_is_broken(self) -> None:
        middleware = CloseConnections()
        shared: Any = await sync_to_async(lambda: connections["default"])()  # that of the thread of all async code
        with mock.patch.object(shared, "close_if_unusable_or_obsolete") as close:
            began, ends = asyncio.Event(), asyncio.Event()

            async def read() -> None:
                began.set()
                await ends.wait()

            running = asyncio.create_task(middleware.acall(OrderSync, {}, read))
            await began.wait()
            await middleware.acall(OrderSync, {}, _nothing)
            self.assertEqual(close.call_count, 1)
            with (
                mock.patch.object(shared, "errors_occurred", True),
                mock.patch.object(shared, "is_usable", return_value=False),
                mock.patch.object(shared, "close") as broken,
            ):
                await middleware.acall(OrderSync, {}, _nothing)
            self.assertEqual((close.call_count, broken.call_count), (1, 2))
            ends.set()
            await running
            self.assertEqual(close.call_count, 2)


async def _nothing() -> None:
    return None


class CommandTests(TransactionTestCase):
    def test_verbs_work_on_the_application_of_the_project(self) -> None:
        OrderSync.push(42, "a")
        out = io.StringIO()
        call_command("lowq", "stats", "OrderSync", stdout=out)
        self.assertIn("OrderSync", out.getvalue())
        out = io.StringIO()
        call_command("lowq", "peek", "OrderSync", "42", "--json", stdout=out)
        self.assertIn('"42"', out.getvalue())
        call_command("lowq", "delete", "OrderSync", "42", stdout=io.StringIO())
        self.assertIsNone(OrderSync.queue.peek(42))
        with self.assertRaisesMessage(CommandError, "Nobody"):
            call_command("lowq", "stats", "Nobody", stdout=io.StringIO())

    def test_a_node_is_refused_without_workers_and_anything_with_wrong_settings(self) -> None:
        with mock.patch.dict(lowq.app.workers, clear=True), self.assertRaisesMessage(CommandError, "workers.py"):
            call_command("lowq", "run")
        self.addCleanup(apply_settings, lowq.Config())
        with override_settings(LOWQ={"REDIS_ULR": "x"}), self.assertRaisesMessage(CommandError, "lowq.E002"):
            apply_settings(lowq.Config())
            call_command("lowq", "stats")
