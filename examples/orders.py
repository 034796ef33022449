"""Orders that change faster than they are saved: the newest version always wins.

    lowq run -r examples/orders.py               # a node; Redis at LOWQ_REDIS_URL
    python examples/orders.py                    # in another terminal: pushes changes

Without Redis: `lowq run -r examples/orders.py --embedded` prints the URL of the store inside it, to be given to the
second command as LOWQ_REDIS_URL.
"""

import logging
from typing import TypedDict

import lowq


class Order(TypedDict):
    version: int  # in the payload, not only in the score: equal payloads are merged into one
    status: str


orders: dict[str, Order] = {}  # stands for your database
log = logging.getLogger("orders")


@lowq.worker(shards_count=24, batch_size=10)
class OrderSync(lowq.Worker[Order]):
    def perform(self, payloads_by_id: dict[str, list[Order]]) -> None:
        for order_id, payloads in payloads_by_id.items():
            newest = payloads[-1]  # oldest first: the last is the newest
            # No lock, as nobody else works on this order now. An old version may still come late.
            if order_id not in orders or newest["version"] > orders[order_id]["version"]:
                orders[order_id] = newest
                log.info("order %s is %s: the newest of %d changes", order_id, newest["status"], len(payloads))


if __name__ == "__main__":
    story = enumerate(["new", "paid", "packed", "shipped"], start=1)
    changes: list[Order] = [{"version": version, "status": status} for version, status in story]
    changes.reverse()  # as the world sends them
    jobs = [{"id": 42, "payload": change, "score": change["version"]} for change in changes]
    print(f"pushed {OrderSync.perform_async(jobs)} changes of order 42")
