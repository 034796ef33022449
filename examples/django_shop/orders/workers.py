"""Workers of the shop: lowq imports every installed app's workers.py."""

from typing import TypedDict

import lowq
from orders.models import Order


class Event(TypedDict):
    version: int
    status: str


@lowq.worker(score="version")  # oldest first, whatever order they came in
class PaymentSync(lowq.Worker[Event]):
    """Brings an order up to date. No other thread or node has the same order at the same time."""

    def perform_one(self, job_id: str, payloads: list[Event], /) -> None:
        newest = payloads[-1]
        # What came before this batch may have been newer.
        Order.objects.filter(pk=job_id, version__lt=newest["version"]).update(**newest)


@lowq.worker
class Reservation(lowq.Worker[int]):
    """Reserves an article for orders: one id for each article, as the warehouse takes one request for it at a time."""

    def perform_one(self, article: str, orders: list[int], /) -> None:
        Order.objects.filter(pk__in=orders).update(is_reserved=True)
