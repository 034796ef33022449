"""Tasks of the shop."""

from django.core.mail import send_mail
from django.db.models import F

from lowq.contrib.django.tasks import task
from orders.models import Order


@task(key="order_id", queue_name="mail")  # of one order they are performed one after the other
def send_invoice(order_id: int) -> None:
    """Sends the invoice. It may be called again after a crash, as every task."""
    order = Order.objects.get(pk=order_id)
    send_mail(f"Invoice for order {order.pk}", f"One {order.article}.", "shop@example.com", [order.email])
    Order.objects.filter(pk=order_id).update(invoices=F("invoices") + 1)
