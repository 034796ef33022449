"""Tasks of the shop."""

from asgiref.sync import sync_to_async
from django.core.mail import send_mail
from django.db.models import F

from lowq.contrib.django.tasks import task
from orders.models import Order


@task(key="order_id", queue_name="mail")  # of one order they are performed one after the other
async def send_invoice(order_id: int) -> None:
    """Sends the invoice. It may be called again after a crash, as every task."""
    order = await Order.objects.aget(pk=order_id)
    text = f"One {order.article}."
    await sync_to_async(send_mail)(f"Invoice for order {order.pk}", text, "shop@example.com", [order.email])
    await Order.objects.filter(pk=order_id).aupdate(invoices=F("invoices") + 1)
