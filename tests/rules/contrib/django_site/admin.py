"""Orders with links to their jobs."""

from django.contrib import admin

from lowq.contrib.django.admin import LowqJobLink
from tests.rules.contrib.django_site.models import Order
from tests.rules.contrib.django_site.tasks import invoice
from tests.rules.contrib.django_site.workers import OrderSync


@admin.register(Order)
class OrderAdmin(admin.ModelAdmin):
    list_display = ("id", "job")
    readonly_fields = ("job", LowqJobLink(invoice, lambda order: f"{order.status}/{order.pk}", label="Invoice"))
    job = LowqJobLink(OrderSync)
