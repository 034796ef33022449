"""lowq at work in one process, without Redis: `make demo`, or `python examples/demo.py`. Ctrl-C ends it.

A producer sends changes of 50 orders as the world does: faster than they can be saved, in the wrong order,
some of them twice. A node works them with the worker of orders.py, except that a save takes as long as in a
real database. So changes of an order pile up, and are handed over together: most need no save of their own.
In the end the newest version of each order must be the one that was saved.
"""

import random
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import click
from orders import OrderSync, orders

import lowq
from lowq.cli.web import dashboard
from lowq.node.node import Node
from lowq.store import memory_store
from lowq.store.embedded import serving

#: The command, which may not be on the PATH.
LOWQ = "lowq" if shutil.which("lowq") else str(Path(sys.executable).with_name("lowq"))
ORDERS = range(1, 51)
#: Seconds that a save of a batch takes.
SAVING = 0.2
#: Changes of a push, and seconds between two: the store runs in this process, too, and is to leave it mostly idle.
CHANGES = 20
PAUSE = 0.5


class Tally:
    """What has happened so far. Its lock guards all of it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.pushed = 0
        self.performed = 0  #: saves
        self.handed = 0  #: changes that came with them
        self.newest = dict.fromkeys(ORDERS, 0)  #: order -> highest version pushed

    def count_pushed(self, jobs: list[dict[str, Any]]) -> None:
        with self.lock:
            self.pushed += len(jobs)
            for job in jobs:
                self.newest[job["id"]] = max(self.newest[job["id"]], job["score"])

    def save_slowly(self, _worker: Any, batch: dict[str, list[Any]], call_next: Callable[[], None]) -> None:
        """A server middleware: what it does before and after `call_next` surrounds the worker's `perform`."""
        time.sleep(SAVING)
        call_next()
        with self.lock:
            self.performed += len(batch)
            self.handed += sum(len(payloads) for payloads in batch.values())

    def line(self) -> str:
        stats = OrderSync.queue.stats()
        with self.lock:
            return (
                f"pushed {self.pushed:,}  performed {self.performed:,}  "
                f"merged {self.handed - self.performed:,}  waiting {stats.length}  lag {stats.lag:.2f} s"
            )


def stream() -> Iterator[list[dict[str, Any]]]:
    """Changes without end: versions in the wrong order, one in ten twice, some much later than the rest."""
    version = dict.fromkeys(ORDERS, 0)
    late: list[dict[str, Any]] = []
    while True:
        changes = late
        for order in random.choices(ORDERS, k=CHANGES):
            version[order] += 1
            payload = {"version": version[order], "status": random.choice(["new", "paid", "shipped"])}
            job = {"id": order, "payload": payload, "score": version[order]}
            changes += [job, job] if random.random() < 0.1 else [job]
        random.shuffle(changes)
        late = changes[: CHANGES // 10]
        yield changes[CHANGES // 10 :]


def produce(tally: Tally, stop: threading.Event) -> None:
    """Pushes until told to stop."""
    for changes in stream():
        OrderSync.perform_async(changes)
        tally.count_pushed(changes)
        if stop.wait(PAUSE):
            break


def watch(tally: Tally, producer: Future[None], seconds: float) -> None:
    """Shows the tally until Ctrl-C, or for some seconds: one line on a terminal, else a line a second."""
    rewrite = sys.stdout.isatty()
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0 and not producer.done():
        time.sleep(min(left, 0.2 if rewrite else 1))
        click.echo(f"\r{tally.line()}\x1b[K" if rewrite else tally.line(), nl=not rewrite)


@click.command(help="Runs a node, its store and a producer in one process. Ctrl-C ends it.")
@click.option("--seconds", default=float("inf"), help="End by itself after so many seconds.")
@click.option("--web", is_flag=True, help="The dashboard, too, on a free port (extra: web).")
def main(seconds: float, web: bool) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # a script's job in the background inherits that INT is ignored
        signal.signal(number, signal.default_int_handler)
    tally, stop = Tally(), threading.Event()
    lowq.config.redis_url = "memory://demo"
    lowq.config.server_middlewares = [tally.save_slowly]
    node = Node(lowq.app)
    node.start()
    with ExitStack() as stack, ThreadPoolExecutor(1, "producer") as threads:
        url = stack.enter_context(serving(memory_store(lowq.config.redis_url)))
        click.echo(f"the store listens at {url} for other terminals: LOWQ_REDIS_URL={url} {LOWQ} stats")
        if web:
            stack.enter_context(dashboard([f"--redis-url={url}"], ("127.0.0.1", 0), ".", health=node.trouble))
        click.echo(
            "pushed: changes sent, performed: saves, merged: changes that needed none, "
            "waiting: orders to save, lag: wait of the oldest"
        )
        producer = threads.submit(produce, tally, stop)
        try:
            with suppress(KeyboardInterrupt):
                watch(tally, producer, seconds)
        finally:
            stop.set()
    click.echo("\nstopping: nothing more is pushed, the node finishes what waits")
    while (stats := OrderSync.queue.stats()).length or stats.taken:
        time.sleep(0.05)
    node.stop()
    producer.result()  # raises what ended it, if it wasn't us
    sys.exit(summary(tally))


def summary(tally: Tally) -> int:
    """Compares what was saved with what was pushed; returns the exit code."""
    click.echo(tally.line())
    click.echo(f"{tally.pushed - tally.handed:,} changes equal to one that waited already were merged in the queue")
    click.echo("saved versions, order by order:")
    saved = {order: orders.get(str(order), {"version": 0})["version"] for order in ORDERS}
    for first in ORDERS[::10]:
        click.echo("  " + " ".join(f"{saved[order]:>7,}" for order in range(first, first + 10)))
    stale = [order for order in ORDERS if saved[order] != tally.newest[order]]
    if stale:
        click.echo(f"not the newest: orders {', '.join(map(str, stale))}")
        return 1
    click.echo(f"each of the {len(ORDERS)} orders was saved in its newest version")
    return 0


if __name__ == "__main__":
    main()
