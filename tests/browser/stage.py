"""A stage for browsers: queues with all kinds of jobs, a node that works them, and the dashboard over HTTP."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.routing import Mount

import lowq
import lowq_web
from tests.rules.web.hand import Hand
from tests.rules.web.served import served
from tests.waiting import PATIENCE, until


class Stage:
    """An application on an empty Redis, whose queues are filled by hand."""

    def __init__(self, redis_url: str) -> None:
        # So long that no node is held for dead, or loses its shards, while a busy machine keeps its threads waiting.
        self.app = lowq.Lowq(redis_url=redis_url, lease_ttl=15.0)
        self._nodes: list[lowq.Node] = []

    def close(self) -> None:
        for node in self._nodes:
            node.stop(5.0)
        self.app.close()

    def stopping(self) -> bool:
        """Whether any of its nodes is to stop."""
        return any(node.stopping.is_set() for node in self._nodes)

    def start_node(self, threads: int = 3) -> lowq.Node:
        """A node of all workers of the application, in this process."""
        node = lowq.Node(self.app, threads=threads)
        node.start()
        self._nodes.append(node)
        until(lambda: any(found.name == node.name for found in self.app.nodes()), "heartbeat of the node")
        return node

    def fail(self, queue: str, job_id: str, error: str, *, retry_count: int = 0, delay: float = 3600.0) -> None:
        """It alone is due in its shard, is taken, and fails. The queue must have no node."""
        now, hand = time.time(), Hand(self.app, queue, self.app.queue(queue).shards_count)
        hand.fail(job_id, now, now + delay, retry_count=retry_count, error=error)
        hand.die(hand.index(job_id))

    @contextmanager
    def serving(self, below: str = "", **options: Any) -> Iterator[str]:
        """The address of the dashboard, or of an application that has it ``below`` a path."""
        application = lowq_web.create_app(self.app, **options)
        with served(Starlette(routes=[Mount(below, application)]) if below else application) as address:
            try:
                yield address
            finally:
                application.state.context.open_streams.close()


TRACEBACK = """Traceback (most recent call last):
  File "/srv/shop/sync.py", line 48, in perform
    self.warehouse.book(order)
  File "/srv/shop/warehouse.py", line 112, in book
    raise TimeoutError("warehouse did not answer within 5 s")
TimeoutError: warehouse did not answer within 5 s
"""


class Shop:
    """A busy little shop, for screenshots: four queues with jobs in every state, two nodes, and work going on."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []
        app = stage.app
        rng = random.Random(7)

        def slowly(mean: float) -> Callable[[Any, dict[str, list[Any]]], None]:
            def perform(_self: Any, payloads_by_id: dict[str, list[Any]]) -> None:
                self._over.wait(min(rng.expovariate(1 / mean), mean * 6))
                if any(job_id.endswith("13") for job_id in payloads_by_id):
                    raise TimeoutError("warehouse did not answer within 5 s")

            return perform

        for name, shards, mean in (
            ("OrderSync", 24, 0.004),
            ("Invoices", 8, 0.05),
            ("SearchIndex", 40, 0.002),
            ("ImportCatalog", 12, 0.01),
        ):
            kind = type(name, (lowq.Worker,), {"perform": slowly(mean)})
            app.worker(shards_count=shards, batch_size=5)(kind)

    def fill(self) -> None:
        """Jobs in every state, and a history of an hour and a month."""
        app, now = self.stage.app, time.time()
        imports = app.queue("ImportCatalog", 12)
        imports.push(
            {"id": f"sku-{n}", "payload": {"version": 1, "price": n * 1.25, "stock": n % 40}, "score": 1}
            for n in range(3200)
        )
        orders = app.queue("OrderSync")
        orders.push(
            {
                "id": str(90_000 + n),
                "payload": {"version": n % 7, "status": "paid"},
                "score": n % 7,
                "delay": 600 + 13 * n,
            }
            for n in range(480)
        )
        orders.push({"id": "4711", "payload": {"version": 3, "status": "new", "card_number": "4242 4242"}, "score": 3})
        orders.push({"id": "4711", "payload": {"version": 4, "status": "paid", "total": 59.9}, "score": 4})
        self.stage.fail("OrderSync", "4711", TRACEBACK, retry_count=3, delay=1490.0)
        orders.push(
            {"id": f"{4000 + n}", "payload": {"version": 2, "status": "shipped"}, "score": 2, "delay": 60}
            for n in range(31)
        )
        orders.bury([f"{4000 + n}" for n in range(31)], TRACEBACK)
        self.history(now)
        app.note("ann", "kick", "OrderSync", 12, {"state": "morgue", "match": "39*", "outcome": "done"})
        app.note("bob", "pause", "ImportCatalog")
        imports.pause(by="bob")

    def history(self, now: float) -> None:
        """As nodes would have recorded it."""
        from lowq.metrics.counters import BOUNDS, RINGS, Counted, record_call

        rng, nothing = random.Random(3), Counted(0, 0, 0.0, (0,) * (len(BOUNDS) + 1))
        for queue, mean in (("OrderSync", 90), ("Invoices", 14), ("SearchIndex", 160)):
            for step, count in ((7200, 340), (300, 280), (10, 358)):
                for back in range(count, 0, -1):
                    at = now - back * step
                    wave = 1 + 0.45 * _wave(at, step * 90) + 0.2 * _wave(at, step * 23)
                    done = max(mean * wave * rng.uniform(0.85, 1.15), 0) * step
                    failed = done * 0.01 * rng.random() * (4 if 30 < back % 140 < 40 else 1)
                    lag = max(rng.gauss(0.6, 0.3), 0) + (22 * rng.random() if 30 < back % 140 < 40 else 0)
                    after = Counted(int(done), int(failed), 0.0, nothing.lengths)
                    call = record_call(f"lowq:v1:history:{queue}", nothing, after, float(step), lag, at)
                    # Of the three rings at the end only that of this step.
                    *args, spans = call.args[: -2 * len(RINGS)]
                    assert spans == len(RINGS)
                    slots = next(slots for width, slots in RINGS.values() if width == step)
                    self.stage.app.client.run(call.script, call.key, *args, 1, step, slots)

    def open(self) -> None:
        """Work goes on until `close`."""

        def customers() -> None:
            rng, version = random.Random(11), 0
            while not self._over.wait(0.05):
                version += 1
                for queue, count in (("OrderSync", 9), ("Invoices", 1), ("SearchIndex", 14)):
                    self.stage.app.queue(queue).push(
                        {
                            "id": str(rng.randrange(3000)),
                            "payload": {"version": version, "status": "paid"},
                            "score": version,
                        }
                        for _ in range(count)
                    )

        self.stage.start_node(5)
        self.stage.start_node(4)
        thread = threading.Thread(target=customers, daemon=True)
        thread.start()
        self._threads.append(thread)

    def close(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(PATIENCE)


def _wave(at: float, period: float) -> float:
    phase = (at % period) / period
    return 4 * abs(phase - 0.5) - 1
