"""Test cases whose jobs are in a store of their own, which is empty when a test begins::

    class OrderTests(lowq.contrib.django.test.TestCase):
        def test_an_order_is_invoiced(self):
            with self.captureOnCommitCallbacks(execute=True):
                self.client.post("/orders", {"article": "book"})
            self.lowq.drain(raises=True)
            self.assertEqual(Order.objects.get().status, "invoiced")

A drain performs jobs in the thread of the test, so on its connections and within its transaction. In an async test,
``await self.lowq.adrain()`` and ``async with self.acaptureOnCommitCallbacks(execute=True)``.
"""

import unittest
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from asgiref.sync import async_to_sync, sync_to_async
from django import test

from lowq import testing

if TYPE_CHECKING:
    _Base = unittest.TestCase
else:
    _Base = object


class LowqTestMixin(_Base):
    """Adds ``self.lowq``, a `lowq.testing.Sandbox`, to a test case of any kind: list it first."""

    lowq: testing.Sandbox

    def run(self, result: unittest.TestResult | None = None) -> unittest.TestResult | None:
        """Runs the test inside of a sandbox."""
        with testing.sandbox() as self.lowq:
            # Django binds a connection to its thread. By asgiref, async workers have that of the test, too.
            self.lowq.drain = async_to_sync(self.lowq.adrain)  # type: ignore[method-assign]
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
