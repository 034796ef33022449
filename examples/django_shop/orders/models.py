"""Orders, and what the payment service has said of them."""

from django.db import models


class Order(models.Model):
    article = models.CharField(max_length=100)
    email = models.EmailField()
    #: What the payment service has said last, and the number of that event.
    status = models.CharField(max_length=20, default="new")
    version = models.PositiveIntegerField(default=0)
    #: The warehouse keeps the article for this order.
    is_reserved = models.BooleanField(default=False)
    #: How many invoices were sent.
    invoices = models.PositiveIntegerField(default=0)
