"""Test cases whose jobs are in a store of their own, which is empty when a test begins::

    class OrderTests(lowq.contrib.django.test.TestCase):
        def test_an_order_is_invoiced(self):
            with self.captureOnCommitCallbacks(execute=True):
                self.client.post("/orders", {"article": "book"})
            self.lowq.drain(raises=True)
            self.assertEqual(Order.objects.get().status, "invoiced")

A drain performs jobs in the thread of the test, so on its connections and within its transaction. In an async test,
``await self.lowq.adrain()`` and ``async with self.acaptureOnCommitCallbacks(execute=True)``.

What ``setUpClass`` and ``setUpTestData`` push is in a store of the class, ``cls.lowq``, which its tests do not see.
"""

import unittest
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

from asgiref.sync import async_to_sync, sync_to_async
from django import test
from django.db import connections

from lowq import testing
from lowq.contrib.outbox import table
from lowq.testing import drainer

if TYPE_CHECKING:
    _Base = unittest.TestCase
else:
    _Base = object


@contextmanager
def _sandbox(outer: testing.Sandbox | None = None) -> Iterator[testing.Sandbox]:
    """A sandbox. It takes the place of ``outer`` meanwhile, if that is open.

    Raises:
        ConfigError: another one is open.
    """
    with ExitStack() as stack:
        if outer is not None and drainer.watchers == [outer]:
            box = testing.Sandbox()
            stack.enter_context(box._open())
        else:
            box = stack.enter_context(testing.sandbox())
        # Django binds a connection to its thread. By asgiref, async workers have that of the test, too.
        box.drain = async_to_sync(box.adrain)  # type: ignore[method-assign]
        yield box


class LowqTestMixin(_Base):
    """Adds ``self.lowq``, a `lowq.testing.Sandbox`, to a test case of any kind: list it first. Before the
    tests, ``cls.lowq`` is one of the class: what is pushed there does not go to the store that the settings name.
    """

    lowq: testing.Sandbox

    @classmethod
    def setUpClass(cls) -> None:
        """Opens the sandbox of the class, before Django calls ``setUpTestData``."""
        cls.lowq = cls.enterClassContext(_sandbox())
        super().setUpClass()

    def run(self, result: unittest.TestResult | None = None) -> unittest.TestResult | None:
        """Runs the test inside of a sandbox of its own, which is empty."""
        with _sandbox(getattr(type(self), "lowq", None)) as self.lowq:
            return super().run(result)


class TestCase(LowqTestMixin, test.TestCase):
    """Django's, whose transaction is rolled back: ``on_commit`` runs in ``captureOnCommitCallbacks(execute=True)``."""

    @classmethod
    @asynccontextmanager
    async def acaptureOnCommitCallbacks(cls, **options: Any) -> AsyncIterator[list[Callable[[], object]]]:  # noqa: N802
        """``captureOnCommitCallbacks`` for async tests: Django's own looks at connections of the wrong thread there."""
        capture = cls.captureOnCommitCallbacks(**options)
        callbacks = await sync_to_async(capture.__enter__)()
        try:
            yield callbacks
        except BaseException as error:
            if not await sync_to_async(capture.__exit__)(type(error), error, error.__traceback__):
                raise
        else:
            await sync_to_async(capture.__exit__)(None, None, None)


class TransactionTestCase(LowqTestMixin, test.TransactionTestCase):
    """Django's, whose transactions are committed, and ``on_commit`` runs as in production."""

    def run(self, result: unittest.TestResult | None = None) -> unittest.TestResult | None:
        """Empties the outbox after the test, too: it is no table of Django's, which empties its own."""
        self.addCleanup(self._empty_outbox)
        return super().run(result)

    def _empty_outbox(self) -> None:
        for alias in connections if self.databases == "__all__" else self.databases:
            connection = connections[alias]
            if connection.vendor in ("postgresql", "sqlite"):
                with connection.cursor() as cursor:
                    cursor.execute(table.exists_query(connection.vendor))
                    if cursor.fetchone()[0]:
                        cursor.execute("DELETE FROM lowq_outbox")
