"""Figures out of nodes and consumers: one line per figure and second, to Graphite and StatsD.

::

    sources (nodes, consumers) --each second--> MetricsExporter --lines--> Sink --> Graphite, StatsD

An application has one exporter, so several consumers of a queue in one process are added up. Nobody who works waits for
it: sources are read by its own thread, and sinks send in theirs.
"""

import os
import re
import socket
import threading
import time
import unicodedata
from collections.abc import Callable, Mapping
from hashlib import blake2b

from lowq.address import parse_address
from lowq.backend import Reading, Source
from lowq.logs import get_log
from lowq.observe.sinks import Sink
from lowq.settings import GRAPHITE_TRANSPORTS, STATSD_TRANSPORTS, Config

log = get_log("lowq.observe")

#: Seconds from one line of a figure to the next.
INTERVAL = 1.0
#: Seconds that the end of the last source waits for the last lines to be sent.
CLOSE_SECONDS = 1.0


class MetricsExporter:
    """Reads sources each second, and has what they say sent. Safe for threads. A child of a fork begins anew."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._begin()

    def _begin(self) -> None:
        #: Guards what follows. Held while the last lines of a run are sent: the next one begins after it.
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._run: _Run | None = None
        #: What sources had counted that have ended: counters never go back.
        self._ended: dict[tuple[str, str], float] = {}
        #: Made for the first source, when the settings are frozen. They go on where they were, too, when sources come
        #: after others have gone.
        self._sinks: list[tuple[Sink, _Formatter]] = []

    def add(self, source: Source) -> Callable[[], None]:
        """Reads the source from now on, if the settings name Graphite or StatsD. Returns what ends that, after one more
        reading; the end of the last source waits a moment for its lines to be sent.
        """
        config = self._config
        if config.graphite is None and config.statsd is None:
            return lambda: None
        if self._pid != os.getpid():
            self._begin()
        with self._lock:
            if self._run is None:
                self._sinks = self._sinks or self._new_sinks()
                self._run = _Run(self._sinks, self._ended)
                self._run.start()
            run = self._run
            run.add(source)

        def remove() -> None:
            if self._pid != os.getpid():
                return  # it is the parent's
            with self._lock:
                is_last = run.remove(source)
                if is_last and self._run is run:
                    self._run = None
                    run.close()

        return remove

    def _new_sinks(self) -> "list[tuple[Sink, _Formatter]]":
        config = self._config
        sinks: list[tuple[Sink, _Formatter]] = []
        if config.graphite is not None:
            address = parse_address(config.graphite, GRAPHITE_TRANSPORTS)
            sinks.append((Sink("Graphite", address), GraphiteFormatter(config)))
        if config.statsd is not None:
            sinks.append((Sink("StatsD", parse_address(config.statsd, STATSD_TRANSPORTS)), StatsdFormatter(config)))
        return sinks

    def close(self) -> None:
        """What is still to be sent is dropped, unless there are sources; the next one begins anew."""
        if self._pid != os.getpid():
            return
        with self._lock:
            if self._run is None:
                for sink, _ in self._sinks:
                    sink.close()
                self._sinks = []
                self._ended.clear()


class _Run:
    """From the first source to the end of the last one."""

    def __init__(self, sinks: "list[tuple[Sink, _Formatter]]", ended: dict[tuple[str, str], float]) -> None:
        self._sinks = sinks
        #: Guards the two below.
        self._lock = threading.Lock()
        self._sources: list[Source] = []
        self._ended = ended
        self._closing = threading.Event()
        self._said = ""
        self._thread = threading.Thread(target=self._loop, name="lowq-metrics", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def add(self, source: Source) -> None:
        with self._lock:
            self._sources.append(source)

    def remove(self, source: Source) -> bool:
        """Whether none is left."""
        with self._lock:
            if source in self._sources:
                self._sources.remove(source)
                _add_up(self._read(source), self._ended, {})
            return not self._sources

    def close(self) -> None:
        self._closing.set()
        deadline = time.monotonic() + CLOSE_SECONDS
        self._thread.join(CLOSE_SECONDS)
        for sink, _ in self._sinks:
            sink.flush(max(deadline - time.monotonic(), 0.0))

    def _loop(self) -> None:
        due = time.monotonic()
        while not self._closing.wait(max(due - time.monotonic(), 0.0)):
            self._send()
            due = max(due + INTERVAL, time.monotonic())  # what was missed is missed: a line says how it is now
        self._send()

    def _send(self) -> None:
        counters: dict[tuple[str, str], float]
        gauges: dict[tuple[str, str], float] = {}
        with self._lock:
            counters = dict(self._ended)
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
            if str(error) != self._said:  # not once a second for as long as it lasts
                self._said = str(error)
                log.exception("figures for Graphite or StatsD are not to be had")
            return {}


def _add_up(
    readings: Mapping[str, Reading], counters: dict[tuple[str, str], float], gauges: dict[tuple[str, str], float]
) -> None:
    """Adds them to figures by queue and name. Of lags the longest counts."""
    for queue, reading in readings.items():
        part = part_of_name(queue) if queue else ""
        for name, value in reading.counters.items():
            counters[part, name] = counters.get((part, name), 0) + value
        for name, value in reading.gauges.items():
            before = gauges.get((part, name), 0)
            gauges[part, name] = max(before, value) if name == "lag" else before + value


class _Formatter:
    """Makes lines of figures. For one thread."""

    def lines(
        self, counters: Mapping[tuple[str, str], float], gauges: Mapping[tuple[str, str], float], now: float, /
    ) -> list[bytes]:
        """``now``: Unix time, seconds."""
        raise NotImplementedError


class GraphiteFormatter(_Formatter):
    """``lowq.web1.4711.queues.Orders.processed 120 1800000000``: counters as they have grown since the start."""

    def __init__(self, config: Config) -> None:
        self._prefix = config.metrics_prefix or process_prefix(config.namespace)

    def lines(
        self, counters: Mapping[tuple[str, str], float], gauges: Mapping[tuple[str, str], float], now: float
    ) -> list[bytes]:
        return [
            f"{_path(self._prefix, key)} {_number(value)} {int(now)}".encode()
            for key, value in (*counters.items(), *gauges.items())
        ]


class StatsdFormatter(_Formatter):
    """``lowq.queues.Orders.processed:12|c``: counters by how much they have grown since the last line, as StatsD adds
    up what all processes send. The lag is a timing in milliseconds: StatsD has the longest and the mean of all. What
    is the state of one process has its host and pid in the name.
    """

    def __init__(self, config: Config) -> None:
        self._shared_prefix = config.metrics_prefix or part_of_name(config.namespace)
        self._own_prefix = config.metrics_prefix or process_prefix(config.namespace)
        self._sent: dict[tuple[str, str], float] = {}
        #: Gauges that StatsD has, and keeps for good.
        self._standing: set[tuple[str, str]] = set()

    def lines(
        self, counters: Mapping[tuple[str, str], float], gauges: Mapping[tuple[str, str], float], _now: float
    ) -> list[bytes]:
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
    """What the names of a process's own figures begin with."""
    return f"{part_of_name(namespace)}.{part_of_name(socket.gethostname())}.{os.getpid()}"


def part_of_name(text: str) -> str:
    """A text as one part of a figure's name: letters and digits of ASCII, ``-`` and ``_``. Accents go, everything else
    becomes ``_``. If letters got lost by that, a digest follows: names in another script would all be the same.
    """
    plain = "".join(char for char in unicodedata.normalize("NFKD", text) if not unicodedata.combining(char))
    part = re.sub(r"[^A-Za-z0-9_-]", "_", plain) or "_"
    if not plain.isascii():
        part += "-" + blake2b(text.encode("utf-8", "surrogatepass"), digest_size=3).hexdigest()
    return part
