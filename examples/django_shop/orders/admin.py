"""Orders in the admin, with links to their jobs on lowq's dashboard, which is a page of the admin."""

from django.contrib import admin

from lowq.contrib.django.admin import LowqJobLink
from orders.models import Order
from orders.tasks import send_invoice
from orders.workers import PaymentSync, Reservation


@admin.register(Order)
class OrderAdmin(admin.ModelAdmin):
    list_display = ("id", "article", "status", "payment_job")
    payment_job = LowqJobLink(PaymentSync)
    readonly_fields = (
        "payment_job",
        LowqJobLink(send_invoice, label="Invoice"),
        LowqJobLink(Reservation, "article", label="Reservations of the article"),
    )
