"""Tests of the shop: no Redis, no waiting. ``manage.py test``"""

import json

from django.contrib.auth.models import User
from django.core import mail

import lowq
from lowq.contrib import outbox
from lowq.contrib.django.test import TestCase, TransactionTestCase
from orders.models import Order
from orders.tasks import send_invoice
from orders.workers import PaymentSync


def send(client, order, version, status):
    event = {"order": order.pk, "version": version, "status": status}
    return client.post("/webhooks/payment", json.dumps(event), content_type="application/json")


class OrderTests(TestCase):
    def test_an_invoice_is_sent_when_an_order_is_committed(self):
        with self.captureOnCommitCallbacks(execute=True):
            answer = self.client.post("/orders", {"article": "book", "email": "ann@example.com"})
        self.assertEqual(answer.status_code, 201)
        self.assertEqual(self.lowq.drain(raises=True).performed, 2)
        order = Order.objects.get(pk=answer.json()["id"])
        self.assertEqual((order.invoices, order.status), (1, "waiting"))
        self.assertEqual([message.to for message in mail.outbox], [["ann@example.com"]])

    def test_payments_are_applied_in_their_order(self):
        order = Order.objects.create(article="book", email="ann@example.com")
        for version, status in ((3, "refunded"), (2, "paid"), (2, "paid")):
            self.assertEqual(send(self.client, order, version, status).status_code, 202)
        self.assertEqual(self.lowq.drain(raises=True).batches, 1)
        order.refresh_from_db()
        self.assertEqual((order.version, order.status), (3, "refunded"))
        send(self.client, order, 1, "late")
        self.lowq.drain(raises=True)
        order.refresh_from_db()
        self.assertEqual(order.status, "refunded")
        self.lowq.assert_ordered(PaymentSync)

    async def test_from_async_code(self):
        order = await Order.objects.acreate(article="book", email="ann@example.com")
        async with self.acaptureOnCommitCallbacks(execute=True):
            await send_invoice.aenqueue(order.pk)
        await self.lowq.adrain(raises=True)
        await order.arefresh_from_db()
        self.assertEqual(order.invoices, 1)

    def test_the_page_of_an_order_links_to_its_jobs(self):
        self.client.force_login(User.objects.create_superuser("ann"))
        order = Order.objects.create(article="book", email="ann@example.com")
        send(self.client, order, 1, "paid")
        page = self.client.get(f"/admin/orders/order/{order.pk}/change/")
        link = f"/admin/lowq/dashboard/queues/PaymentSync/job?id={order.pk}"
        self.assertContains(page, f'href="{link}"')
        self.assertContains(self.client.get(link), "paid")


class CommitTests(TransactionTestCase):
    def test_an_article_is_reserved_when_the_order_is_committed(self):
        self.client.post("/orders", {"article": "book", "email": "ann@example.com"})
        self.assertEqual(outbox.Relay(lowq.app, "default").run_once(), 1)
        self.lowq.drain(raises=True)
        self.assertTrue(Order.objects.get().is_reserved)

    def test_nothing_is_sent_when_the_order_is_rolled_back(self):
        answer = self.client.post("/orders", {"article": "car", "email": "ann@example.com"})
        self.assertEqual(answer.status_code, 400)
        self.assertEqual((self.lowq.drain().performed, Order.objects.count()), (0, 0))
        self.lowq.assert_pushed(PaymentSync, times=0)
        self.assertEqual(outbox.Relay(lowq.app, "default").run_once(), 0)
