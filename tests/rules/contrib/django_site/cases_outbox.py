"""The outbox in a database of Django: through its connections and cursors, and relayed by its alias."""

import io
from typing import Any
from unittest import mock

from django.core.management import CommandError, call_command
from django.db import connection, connections, transaction

import lowq
from lowq.contrib import outbox
from lowq.contrib.django.test import TransactionTestCase
from lowq.errors import ConfigError
from tests.rules.contrib.django_site.workers import OrderSync


class OutboxTests(TransactionTestCase):
    def setUp(self) -> None:
        outbox.create_table(connection)

    def tearDown(self) -> None:
        with connection.cursor() as cursor:
            for table in ("lowq_outbox", "lowq_outbox_state"):
                cursor.execute(f"DROP TABLE {table}")

    def test_rows_are_written_in_the_transaction_and_relayed_by_the_alias(self) -> None:
        with transaction.atomic(), connection.cursor() as cursor:
            outbox.push(OrderSync, 42, 1, using="default")
            outbox.push(OrderSync, 42, 2, connection=cursor)
        with self.assertRaises(ZeroDivisionError), transaction.atomic():
            outbox.push(OrderSync, 42, 3, using="default")
            raise ZeroDivisionError
        relay = outbox.Relay(lowq.app, "default")
        self.assertEqual(relay.run_once(), 2)
        job = OrderSync.queue.peek(42)
        assert job is not None
        self.assertEqual([payload for payload, _ in job.payloads], [1, 2])
        self.assertEqual(relay.count_rows(), (0, 0))

    def test_the_command_takes_the_database_of_the_settings(self) -> None:
        outbox.push(OrderSync, 42, 1, using="default")
        call_command("lowq", "outbox", "--once", stdout=io.StringIO())
        self.assertIsNotNone(OrderSync.queue.peek(42))
        with self.assertRaisesMessage(CommandError, "it has default, other"):
            call_command("lowq", "outbox", "elsewhere", "--once", stdout=io.StringIO())

    def test_what_is_no_database_of_the_outbox_is_refused(self) -> None:
        with self.assertRaisesMessage(ConfigError, "it has default, other"):
            outbox.Relay(lowq.app, "elsewhere")
        with self.assertRaisesMessage(ConfigError, "opens one as Django does"):
            outbox.Relay(lowq.app, lambda: connection).run_once()
        of_mysql: Any = connections["other"]
        with mock.patch.object(type(of_mysql), "vendor", "mysql"):
            for use in (lambda: outbox.Relay(lowq.app, "other"), lambda: outbox.push(OrderSync, 1, using="other")):
                with self.assertRaisesMessage(ConfigError, "not with 'mysql'"):
                    use()
