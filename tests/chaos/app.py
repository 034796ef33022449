"""The application under chaos: that of the tests of processes, with more that a job can do, and with harm built in.

    python -m tests.chaos.app run                              a node
    python -m tests.chaos.app produce SEED NUMBER LOAD         a producer; LOAD is JSON

===================  ==============================================================
environment          what it does
===================  ==============================================================
CHAOS_DIE            the process kills itself at that moment (`tests.chaos.death`)
CHAOS_BROKEN         lowq is broken in that way (`tests.chaos.broken`)
CHAOS_TAKES          what is taken gets into the history, too
CHAOS_TICKS          a second worker has a schedule of a tick a second; what it performs is
                     written to `<history>.ticks`
===================  ==============================================================
"""

import json
import logging
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lowq
from lowq.operate.integrity import Place
from lowq.shards.delivery import Delivery, InFlight
from lowq.store import Call
from tests.chaos import broken, death
from tests.chaos.load import Load, produce
from tests.processes import app_orders
from tests.processes.app_orders import Orders, history

if os.environ.get("CHAOS_TICKS"):

    @lowq.every(1, name="tick", missed="all")
    @app_orders.app.worker(queue_name="Ticks", shards_count=1)
    def perform_ticks(_job_id: str, payloads: list[Any]) -> None:
        with Path(f"{history.path}.ticks").open("a") as file:
            file.write("".join(f"{payload['planned_at']}\n" for payload in payloads))


MIB = 2**20
#: MiB that `allocate` may have, and that `devour` takes before it is killed.
MEMORY = 96
LIMIT = resource.getrlimit(resource.RLIMIT_AS)
allocating = threading.Lock()


def hang(_seconds: float) -> None:
    time.sleep(3600)  # somebody kills the process


def busy(seconds: float) -> None:
    """Holds the GIL, computing, in one call into C."""
    history.frozen(os.getpid())  # its other threads, too
    began = time.perf_counter()
    sum(range(10**6))
    pace = time.perf_counter() - began
    sum(range(int(10**6 * seconds / pace)))
    history.thawed(os.getpid())


def allocate(_seconds: float) -> None:
    """Allocates until there is no more: the whole process may have only so much beyond what it has, meanwhile."""
    with allocating:  # the limit is the process's
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY * MIB, LIMIT[1]))
        try:
            blocks = [bytearray(4 * MIB) for _ in range(MEMORY)]
        finally:
            resource.setrlimit(resource.RLIMIT_AS, LIMIT)
        raise AssertionError(f"{len(blocks)} blocks were allocated, and the limit was not reached")


def release(_seconds: float) -> None:
    """Says of the whole batch that it is to wait again. It hasn't finished: so the history has to have it."""
    batch = lowq.current()
    for job in batch.jobs:
        batch.release(job.id)
    raise RuntimeError("told to release")


def devour(_seconds: float) -> None:
    """Allocates until it is killed, as the kernel does it when memory is short."""
    blocks = [bytearray(4 * MIB) for _ in range(MEMORY // 4)]
    if blocks:
        os.kill(os.getpid(), signal.SIGKILL)


def record_acknowledgements() -> None:
    """Into the history, as soon as the answer to an acknowledgement is there."""
    took = InFlight.read_delivery

    def noting(self: InFlight, reply: Any) -> Delivery:
        finished = list(self.unacknowledged)
        delivery = took(self, reply)
        if finished:
            history.acked(number_of_prefix(self._scripts.prefix), finished)
        return delivery

    InFlight.read_delivery = noting  # type: ignore[method-assign]  # only in this process


def number_of_prefix(prefix: str) -> int:
    """A shard as the history names it, from what its keys begin with."""
    place = Place.of_tag(prefix.rpartition("{")[2].partition("}")[0])
    assert place is not None
    return place.shard + 100_000 * place.epoch


def record_takes() -> None:
    """Into the history: what each take brought, and when it was sent."""
    take_call, took = InFlight.take_call, InFlight.read_delivery
    sent: dict[InFlight, float] = {}

    def sending(self: InFlight, limit: int, now: float | None = None) -> Call[Any]:
        sent[self] = time.monotonic()
        return take_call(self, limit, now)

    def noting(self: InFlight, reply: Any) -> Delivery:
        delivery = took(self, reply)
        if delivery.jobs:
            history.taken(sent[self], {job.id: [*map(app_orders.version_of, job.payloads)] for job in delivery.jobs})
        return delivery

    InFlight.take_call, InFlight.read_delivery = sending, noting  # type: ignore[method-assign]  # only in this process


def prepare() -> None:
    """What a node needs before it starts."""
    app_orders.ACTIONS.update(
        {
            "hang": hang,
            "stall": hang,  # an async worker awaits it
            "late": time.sleep,  # longer than ttr
            "busy": busy,
            "allocate": allocate,
            "devour": devour,
            "release": release,
            "poison": app_orders.die,
        }
    )
    record_acknowledgements()
    if os.environ.get("CHAOS_TAKES"):
        record_takes()
    death.arm(os.environ.get("CHAOS_DIE", ""), history)


def main(arguments: Iterable[str]) -> int:
    verb, *rest = arguments
    broken.apply(os.environ.get("CHAOS_BROKEN", ""))
    if verb == "run":
        prepare()
        return app_orders.run()
    logging.basicConfig(level=logging.INFO)
    seed, number, load = rest
    produce(Orders, history, int(seed), int(number), Load(**json.loads(load)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
