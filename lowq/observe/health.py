"""The health and the figures of a process at a moment, as they are read, reported and shown."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Reading:
    """The figures of a queue, or of a process, at a moment."""

    #: Totals since the source began: name -> count, or seconds.
    counters: Mapping[str, float] = field(default_factory=dict)
    #: The present state: name -> value.
    gauges: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Vitals:
    """How a process is at a moment."""

    #: Why it has to be restarted; None: it has not.
    dead: str | None
    #: Why it takes no jobs; None: it takes them.
    unready: str | None
    #: Process of a supervisor ("" without one) -> queue ("" for the process itself) -> figures.
    readings: Mapping[str, Mapping[str, Reading]] = field(default_factory=dict)

    def shown(self) -> dict[str, Any]:
        """As a process reports it to its supervisor, as JSON."""
        (figures,) = self.readings.values() or [{}]
        readings = {queue: [reading.counters, reading.gauges] for queue, reading in figures.items()}
        return {"dead": self.dead, "unready": self.unready, "readings": readings}


def worst(troubles: Iterable[str | None]) -> str | None:
    """The first trouble if all are in trouble; None: some are not."""
    found = list(troubles)
    return found[0] if found and all(trouble is not None for trouble in found) else None
