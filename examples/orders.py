"""Orders that change faster than they are saved: the newest version always wins.

    lowq run examples/orders.py               # a node; Redis at LOWQ_REDIS_URL
    python examples/orders.py                    # in another terminal: pushes changes

Without Redis: `lowq run examples/orders.py --embedded` prints the URL of the store inside it, to be given to the
second command as LOWQ_REDIS_URL.
"""

import logging

import lowq

orders = {}  # stands for your database
log = logging.getLogger("orders")


@lowq.worker(shards_count=24, score="version")
class OrderSync(lowq.Worker):
    def perform_one(self, order_id, payloads):
        newest = payloads[-1]  # oldest first: the last is the newest
        if order_id not in orders or newest["version"] > orders[order_id]["version"]:
            orders[order_id] = newest  # no lock: nobody else works on this order now
            log.info("order %s is %s, the newest of %d changes", order_id, newest["status"], len(payloads))


if __name__ == "__main__":
    for version, status in [(3, "shipped"), (1, "new"), (2, "paid")]:  # as the world sends them
        OrderSync.push(42, {"version": version, "status": status}, delay=1)
