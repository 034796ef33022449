"""Limits of a queue over all nodes, and what is granted of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lowq.duration import duration
from lowq.inspection.calls import ask
from lowq.limits import Concurrency, Limit, Rate, registered_limits
from lowq.store import Client, Command, untrusted
from lowq.store.keys import limit_key
from lowq.store.scripts import time_of

#: How many slots a rate has within its time: see ``take_permits.lua``.
_SLOTS = 400


@dataclass(frozen=True, slots=True)
class LimitState:
    """A limit of a queue as it is at one moment, over all nodes and all queues that share it."""

    limit: Limit
    #: Of a `lowq.Rate`: jobs that began within its time. Of a `lowq.Concurrency`: batches that run, and those that a
    #: node keeps a place for.
    used: int
    #: Seconds until more may begin; 0.0: more may now; None: as soon as a batch ends.
    wait: float | None

    @property
    def is_reached(self) -> bool:
        """Whether nothing more may begin now."""
        return self.wait != 0.0

    def __str__(self) -> str:
        shared = f", shared as {self.limit.key!r}" if self.limit.key else ""
        if isinstance(self.limit, Rate):
            return f"{self.used:,} of {self.limit.limit:,} jobs in {duration(self.limit.seconds)}{shared}"
        return f"{self.used:,} of {self.limit.limit:,} batches at once{shared}"


def read_limits(client: Client, namespace: str, queue: str, options: Mapping[str, Any]) -> list[LimitState]:
    """Of each limit in the queue's options, as the registry has them, what is granted.

    Raises:
        RedisUnavailable
    """
    limits = registered_limits(options.get("limit"))
    if not limits:
        return []
    keys = [limit_key(namespace, limit.name(queue)) for limit in limits]
    calls = [Command(keys[0], "TIME"), *(Command(key, "HGETALL", key) for key in keys)]
    time, *replies = ask(client, calls, len(calls))
    now = time_of(time)
    return [_state(limit, reply, now) for limit, reply in zip(limits, replies, strict=True)]


def _state(limit: Limit, reply: list[bytes], now: float) -> LimitState:
    fields = dict(zip(reply[::2], reply[1::2], strict=True))
    if isinstance(limit, Concurrency):
        used = sum(_held(record, now) for name, record in fields.items() if name.startswith(b"holder:"))
        return LimitState(limit, used, 0.0 if used < limit.limit else None)
    width = limit.seconds / _SLOTS
    slots = {
        untrusted.finite(name[5:], 0.0): int(untrusted.finite(count, 0.0))
        for name, count in fields.items()
        if name.startswith(b"slot:")
    }
    ends = {slot: (slot + _SLOTS + 2) * width for slot in slots}
    used = sum(count for slot, count in slots.items() if ends[slot] > now)
    wait, left = 0.0, used
    for slot in sorted(slots):
        if left < limit.limit:
            break
        if ends[slot] > now:
            wait, left = min(ends[slot] - now, limit.seconds), left - slots[slot]
    return LimitState(limit, used, wait)


def _held(record: bytes, now: float) -> int:
    """What a holder has that was heard of within its ttl; what is no record has nothing."""
    words = record.split()
    if len(words) != 8:
        return 0
    held, asked, ttl = (untrusted.finite(words[position], 0.0) for position in (1, 6, 7))
    return int(held) if abs(now - asked) < ttl else 0
