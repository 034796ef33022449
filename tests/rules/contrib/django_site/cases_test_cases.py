"""The test cases of `lowq.contrib.django.test`: what a class pushes, and what tests leave."""

import unittest
from typing import Any

from django.db import connection

import lowq
from lowq.contrib import outbox
from lowq.contrib.django.test import TestCase, TransactionTestCase
from tests.rules.contrib.django_site.cases_on_commit import waiting
from tests.rules.contrib.django_site.workers import OrderSync


class ClassLevelTests(unittest.TestCase):
    def test_what_a_class_pushes_is_in_a_store_of_its_own_and_not_in_those_of_its_tests(self) -> None:
        found: list[list[Any]] = []

        class Inner(TestCase):
            @classmethod
            def setUpTestData(cls) -> None:
                OrderSync.push(1, "of the class")
                found.append(waiting())
                cls.lowq.assert_pushed(OrderSync, 1, "of the class")

            def test_one(self) -> None:
                found.append(waiting())
                OrderSync.push(1, "of a test")

            test_two = test_one

            @classmethod
            def tearDownClass(cls) -> None:
                found.append(waiting())
                super().tearDownClass()

        result = unittest.TestResult()
        unittest.defaultTestLoader.loadTestsFromTestCase(Inner)(result)
        self.assertEqual((result.errors, result.failures, result.testsRun), ([], [], 2))
        self.assertEqual(found, [["of the class"], [], [], ["of the class"]])
        self.assertEqual(waiting(), [])

    def test_what_a_test_leaves_in_the_outbox_is_not_there_in_the_next(self) -> None:
        found: list[tuple[int, int]] = []

        class Inner(TransactionTestCase):
            databases = {"default", "other"}  # the other one has no table

            def setUp(self) -> None:
                outbox.create_table(connection)

            def test_one(self) -> None:
                found.append(outbox.Relay(lowq.app, "default").count_rows())
                outbox.push(OrderSync, 42, 1, using="default")

            test_two = test_one

        result = unittest.TestResult()
        unittest.defaultTestLoader.loadTestsFromTestCase(Inner)(result)
        with connection.cursor() as cursor:
            for table in ("lowq_outbox", "lowq_outbox_state"):
                cursor.execute(f"DROP TABLE {table}")
        self.assertEqual((result.errors, result.failures, result.testsRun), ([], [], 2))
        self.assertEqual(found, [(0, 0), (0, 0)])
