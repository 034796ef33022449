"""Figures of nodes and consumers: one line per figure and second, to Graphite and StatsD.

::

    sources (nodes, consumers) --each second--> MetricsExporter --lines--> Sink --> Graphite, StatsD

An application has one exporter, which adds up several consumers of a queue in one process. Jobs do not wait for it:
sources are read by its own thread, and sinks send in theirs.
"""

import os
import re
import socket
import threading
import time
import unicodedata
from collections.abc import Callable, Mapping
from functools import partial
from hashlib import blake2b

from lowq.clock import Lock
from lowq.logs import get_log
from lowq.observe.health import Reading
from lowq.observe.sinks import Sink, parse_address
from lowq.settings import GRAPHITE_TRANSPORTS, STATSD_TRANSPORTS, Config

log = get_log("lowq.observe")

#: Seconds from one line of a figure to the next.
INTERVAL = 1.0
#: Seconds that the end of the last source waits for the last lines to be sent.
CLOSE_SECONDS = 1.0


#: Returns queue -> its reading; "" stands for the process. Called each second, so it must not wait.
Source = Callable[[], Mapping[str, Reading]]
#: (queue, name) -> value; "" as queue: of the process.
Figures = dict[tuple[str, str], float]


class MetricsExporter:
    """Reads sources each second, and sends their figures. Safe for threads. A forked child begins anew."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._begin()

    def _begin(self) -> None:
        #: Guards what follows. Held while the last lines are sent: the next source begins after it.
        self._lock = Lock()
        self._pid = os.getpid()
        self._sources: list[Source] = []
        #: Ends the thread that reads the sources; None: there is no thread, as there are no sources.
        self._stop: threading.Event | None = None
        #: Counters of sources that have ended: counters never go back.
        self._ended: Figures = {}
        #: Made for the first source, when the settings are frozen. They stay when the last source ends, so that
        #: StatsD's counters go on from there.
        self._sinks: list[tuple[Sink, GraphiteFormatter | StatsdFormatter]] = []
        self._said = ""

    def add(self, source: Source) -> Callable[[], None]:
        """Reads the source from now on, if the settings name Graphite or StatsD. Returns a function that ends this,
        after one more reading. The end of the last source waits a moment for its lines to be sent.
        """
        config = self._config
        if config.graphite is None and config.statsd is None:
            return lambda: None
        if self._pid != os.getpid():
            self._begin()
        with self._lock:
            if not self._sinks:
                for name, address, transports, formatter in (
                    ("Graphite", config.graphite, GRAPHITE_TRANSPORTS, GraphiteFormatter),
                    ("StatsD", config.statsd, STATSD_TRANSPORTS, StatsdFormatter),
                ):
                    if address is not None:
                        self._sinks.append((Sink(name, parse_address(address, transports)), formatter(config)))
            self._sources.append(source)
            if self._stop is None:
                self._stop = threading.Event()
                threading.Thread(target=self._run, args=[self._stop], name="lowq-metrics", daemon=True).start()
        return partial(self._remove, source)

    def _remove(self, source: Source) -> None:
        if self._pid != os.getpid():
            return  # the source is the parent's
        with self._lock:
            if source not in self._sources:
                return
            self._sources.remove(source)
            _add_up(self._read(source), self._ended, {})
            if self._sources or self._stop is None:
                return
            self._stop.set()
            self._stop = None
            self._send()
            deadline = time.monotonic() + CLOSE_SECONDS
            for sink, _ in self._sinks:
                sink.flush(max(deadline - time.monotonic(), 0.0))

    def close(self) -> None:
        """Drops the lines that are not sent yet, unless there are sources. The next source begins anew."""
        if self._pid != os.getpid():
            return
        with self._lock:
            if not self._sources:
                for sink, _ in self._sinks:
                    sink.close()
                self._sinks = []
                self._ended.clear()

    def _run(self, stop: threading.Event) -> None:
        due = time.monotonic()
        while not stop.wait(max(due - time.monotonic(), 0.0)):
            with self._lock:
                if not stop.is_set():
                    self._send()
            due = max(due + INTERVAL, time.monotonic())  # no line is sent for a moment that was missed

    def _send(self) -> None:
        counters, gauges = dict(self._ended), Figures()
        for source in self._sources:
            _add_up(self._read(source), counters, gauges)
        counters["", "metrics_dropped"] = sum(sink.dropped for sink, _ in self._sinks)
        now = time.time()
        for sink, formatter in self._sinks:
            sink.put(formatter.lines(counters, gauges, now))

    def _read(self, source: Source) -> Mapping[str, Reading]:
        try:
            return source()
        except Exception as error:
            if str(error) != self._said:  # once, and not each second
                self._said = str(error)
                log.exception("figures for Graphite or StatsD are not to be had")
            return {}


def _add_up(readings: Mapping[str, Reading], counters: Figures, gauges: Figures) -> None:
    """Adds readings to figures by queue and name. The longest lag counts."""
    for queue, reading in readings.items():
        part = part_of_name(queue) if queue else ""
        for name, value in reading.counters.items():
            counters[part, name] = counters.get((part, name), 0) + value
        for name, value in reading.gauges.items():
            before = gauges.get((part, name), 0)
            gauges[part, name] = max(before, value) if name == "lag" else before + value


class GraphiteFormatter:
    """``lowq.web1.4711.queues.Orders.processed 120 1800000000``: counters as they have grown since the start."""

    def __init__(self, config: Config) -> None:
        self._prefix = config.metrics_prefix or process_prefix(config.namespace)

    def lines(
        self, counters: Mapping[tuple[str, str], float], gauges: Mapping[tuple[str, str], float], now: float
    ) -> list[bytes]:
        """``now``: Unix time, seconds."""
        return [
            f"{_path(self._prefix, key)} {_number(value)} {int(now)}".encode()
            for key, value in (*counters.items(), *gauges.items())
        ]


class StatsdFormatter:
    """``lowq.queues.Orders.processed:12|c``: the growth of counters since the last line, as StatsD adds up the lines of
    all processes. The lag is a timing in milliseconds: StatsD has the longest and the mean of all. The state of one
    process has its host and pid in the name.
    """

    def __init__(self, config: Config) -> None:
        self._shared_prefix = config.metrics_prefix or part_of_name(config.namespace)
        self._own_prefix = config.metrics_prefix or process_prefix(config.namespace)
        self._sent: Figures = {}
        #: Gauges that were sent: StatsD keeps them until it is told another value.
        self._standing: set[tuple[str, str]] = set()

    def lines(
        self, counters: Mapping[tuple[str, str], float], gauges: Mapping[tuple[str, str], float], _now: float
    ) -> list[bytes]:
        """The lines since the last call."""
        lines = []
        for key, value in counters.items():
            more = value - self._sent.get(key, 0)
            lines.append(f"{_path(self._shared_prefix, key)}:{_number(max(more, 0))}|c")
        self._sent = dict(counters)
        for key, value in gauges.items():
            if key[1] == "lag":
                lines.append(f"{_path(self._shared_prefix, key)}:{_number(value * 1000)}|ms")
        standing = {key: value for key, value in gauges.items() if key[1] != "lag"}
        for key, value in (dict.fromkeys(self._standing, 0) | standing).items():
            lines.append(f"{_path(self._own_prefix, key)}:{_number(value)}|g")
        self._standing = set(standing)
        return [line.encode() for line in lines]


def _path(prefix: str, key: tuple[str, str]) -> str:
    part, name = key
    return f"{prefix}.queues.{part}.{name}" if part else f"{prefix}.{name}"


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.6f}".rstrip("0").rstrip(".")


def process_prefix(namespace: str) -> str:
    """The prefix of the names of a process's own figures."""
    return f"{part_of_name(namespace)}.{part_of_name(socket.gethostname())}.{os.getpid()}"


def part_of_name(text: str) -> str:
    """A text as one part of a figure's name: letters and digits of ASCII, ``-`` and ``_``. Accents are removed,
    everything else becomes ``_``. A digest follows if letters were lost: names in another script would all be the same.
    """
    plain = "".join(char for char in unicodedata.normalize("NFKD", text) if not unicodedata.combining(char))
    part = re.sub(r"[^A-Za-z0-9_-]", "_", plain) or "_"
    if not plain.isascii():
        part += "-" + blake2b(text.encode("utf-8", "surrogatepass"), digest_size=3).hexdigest()
    return part
