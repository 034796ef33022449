"""Found by the app, as it is named so."""

from datetime import datetime
from typing import Any

import lowq
from tests.rules.contrib.django_site.models import Order


@lowq.worker
class OrderSync(lowq.Worker[Any]):
    merge = "append"

    def perform_one(self, job_id: str, payloads: list[Any], /) -> None:
        Order.objects.filter(pk=job_id).update(status=payloads[-1])


@lowq.worker
class AsyncSync(lowq.Worker[Any]):
    merge = "append"

    async def perform_one(self, job_id: str, payloads: list[Any], /) -> None:
        await Order.objects.filter(pk=job_id).aupdate(status=payloads[-1])


@lowq.worker
class TypedSync(lowq.Worker[dict[str, datetime]]):
    def perform_one(self, job_id: str, payloads: list[dict[str, datetime]], /) -> None: ...
