"""Builds of lowq that are broken on purpose, one guarantee each: the checker has to catch every one of them.

``CHAOS_BROKEN=fencing`` in the environment of the application under test. lowq itself never looks at that: what is
changed here is changed in the process's memory, before the node starts.
"""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lowq.broker import dispatcher, maintenance
from lowq.broker.delivery import Delivery, TakenJob
from lowq.broker.in_flight import InFlight
from lowq.broker.lease import ShardLease
from lowq.broker.shard import Shard
from lowq.node.worker_thread import WorkerThread
from lowq.store.scripts import load_scripts


def apply(name: str) -> None:
    """Breaks this process's lowq; '' leaves it as it is."""
    if name:
        BUILDS[name]()


def _lua(pattern: str, new: str, *scripts: str) -> None:
    """Replaces what matches, once, in these scripts, or in all that have it. It has to be there: a build that isn't
    broken any more would show nothing.
    """
    found = load_scripts()
    broken = {}
    for name, script in found.items():
        source, count = re.subn(pattern, lambda _: new, script.source, count=1)
        if count and (not scripts or name in scripts):
            broken[name] = replace(script, source=source)
    if not broken or len(broken) < len(scripts):
        raise AssertionError(f"{pattern!r} is not in the scripts {', '.join(scripts) or 'at all'}: break it otherwise")
    found.update(broken)


def fencing() -> None:
    """Whoever had the lease once may go on writing."""
    _lua(r"if redis\.call\('GET', prefix \.\. 'lease'\) ~= token then", "if false then")


def exclusion() -> None:
    """A lease can be had while another holds it."""
    _lua("if holder and .* then", "if false then", "acquire")


def restore() -> None:
    """What a dead owner left in flight is forgotten."""
    _lua(
        r"local records = redis\.call\('HGETALL', prefix \.\. 'taken'\)",
        "redis.call('DEL', prefix .. 'taken') local records = {}",
        "acquire",
    )


def order() -> None:
    """Payloads are handed over newest first."""
    decode = InFlight._decode

    def reversed_(self: InFlight, raw: list[bytes], delivery: Delivery) -> TakenJob:
        job = decode(self, raw, delivery)
        return job._replace(payloads=job.payloads[::-1])

    InFlight._decode = reversed_  # type: ignore[method-assign]


def ack_by_id() -> None:
    """An acknowledgement finishes an id, whatever delivery it is of."""
    _lua(r"if record and string\.sub\(record, 1, #head\) == head then", "if record then", "ack_and_take")


def push_twice() -> None:
    """A repeat of a push whose reply was lost pushes again."""
    _lua(r"if redis\.call\('LPOS', prefix \.\. 'pushed', token\) then", "if false then", "push")


def ticks() -> None:
    """Payloads without a score that are pushed together get one and the same."""
    _lua(r"clock = clock \+ 0\.000001\n", "", "push")


def claims() -> None:
    """Two threads of a node may work one shard."""

    def is_ready(_thread: int, now: float, shard: Shard) -> bool:
        state = shard.dispatch
        return state.next_due is not None and state.next_due <= now and not state.paused and now < shard.lease.deadline

    setattr(dispatcher, "is_ready", is_ready)  # noqa: B010  # mypy and a function of a module


def deadline() -> None:
    """A node doesn't look whether its lease has run out, and takes much work in advance."""
    forever: Any = property(lambda self: math.inf if self.current else 0.0, lambda _self, _value: None)
    ShardLease.deadline = forever
    _take_much()


def fence() -> None:
    """The fencing token doesn't grow."""
    _lua(r"fence = math\.max\(.*\)", "fence = 1", "acquire")


def leak() -> None:
    """An acknowledgement leaves the payloads in Redis."""
    _lua(r"redis\.call\('UNLINK', unpack\(acked_payloads\)\)", "", "ack_and_take")


def late_acks() -> None:
    """Much is performed before any of it is acknowledged."""
    _take_much()
    setattr(maintenance.MaintenanceLoop, "_acknowledge_early", lambda _self: False)  # noqa: B010  # mypy and a method's type


def _take_much() -> None:
    """Deliveries of a hundred jobs, however slow they are."""
    setattr(WorkerThread, "_limit", lambda _self, _shard: 100)  # noqa: B010  # mypy and a method's type


#: name -> what breaks it
BUILDS: dict[str, Callable[[], None]] = {
    build.__name__: build
    for build in (
        fencing, exclusion, restore, order, ack_by_id, push_twice, ticks, claims, deadline, fence, leak, late_acks,
    )
}  # fmt: skip
