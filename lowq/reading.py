"""Readings: what a node or consumer says of its queues and its process in figures, for Graphite and StatsD."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Reading:
    """What a source knows of a queue, or of its process, at a moment."""

    #: What has happened since the source began: name -> how often, or how many seconds.
    counters: Mapping[str, float] = field(default_factory=dict)
    #: How it is now: name -> value.
    gauges: Mapping[str, float] = field(default_factory=dict)


#: queue -> its reading; "" stands for the process. It waits for nobody, as it is called each second.
Source = Callable[[], Mapping[str, Reading]]
