"""Orders that change faster than they are saved: the newest version always wins.

    lowq run -r examples/orders.py               # a node; Redis at LOWQ_REDIS_URL
    python examples/orders.py                    # in another terminal: pushes changes

Without Redis: `lowq run -r examples/orders.py --embedded` prints the URL of the store
inside it, to be given to the second command as LOWQ_REDIS_URL.
"""

from typing import TypedDict

import lowq


class Order(TypedDict):
    version: int  # in the payload too: equal payloads are merged into one
    status: str


orders: dict[str, Order] = {}  # stands for your database


@lowq.worker(shards_count=24, batch_size=10)
class OrderSync(lowq.Worker[Order]):
    def perform(self, payloads_by_id: dict[str, list[Order]]) -> None:
        for order_id, payloads in payloads_by_id.items():
            newest = payloads[-1]  # oldest first: the last is the newest
            # No lock: nobody else works on this order now. A version may come late.
            if order_id not in orders or newest["version"] > orders[order_id]["version"]:
                orders[order_id] = newest


if __name__ == "__main__":
    history = ["new", "paid", "packed", "shipped"]
    changes: list[Order] = [{"version": version, "status": status} for version, status in enumerate(history, 1)]
    for change in reversed(changes):  # the wrong way round, as the world sends them
        OrderSync.perform_async({"id": 42, "payload": change, "score": change["version"]})
    print(f"pushed {len(changes)} changes of order 42")
