"""What customers and the payment service send."""

import json

from django.db import transaction
from django.http import HttpRequest, JsonResponse
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST

from lowq.contrib import outbox
from lowq.contrib.django import push_on_commit
from orders.models import Order
from orders.tasks import send_invoice
from orders.workers import PaymentSync, Reservation


@csrf_exempt
@require_POST
def create(request: HttpRequest) -> JsonResponse:
    """A new order. What it pushes is pushed when it is in the database, and not when it is rolled back.

    The reservation is in the outbox, so it is made even if this process dies, or Redis is away, right after the commit.
    """
    with transaction.atomic():
        order = Order.objects.create(article=request.POST["article"], email=request.POST["email"])
        send_invoice.enqueue(order.pk)
        push_on_commit(PaymentSync, order.pk, {"version": 1, "status": "waiting"})
        outbox.push(Reservation, order.article, order.pk, using="default")
        if order.article != "book":
            transaction.set_rollback(True)
            return JsonResponse({"error": "we have only books"}, status=400)
    return JsonResponse({"id": order.pk}, status=201)


@csrf_exempt
@require_POST
def payment(request: HttpRequest) -> JsonResponse:
    """An event of the payment service, which may come twice, late and out of order. It is pushed, and answered."""
    event = json.loads(request.body)
    PaymentSync.push(event["order"], {"version": event["version"], "status": event["status"]})
    return JsonResponse({}, status=202)
