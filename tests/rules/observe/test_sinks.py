"""Figures on their way to Graphite and StatsD: real sockets that accept, close, refuse and hang."""

import socket
import threading
from collections.abc import Iterator

import pytest

from lowq.observe.sinks import Address, Sink
from tests.receiver import Receiver
from tests.waiting import NEVER, until


@pytest.fixture
def sinks() -> Iterator[list[Sink]]:
    made: list[Sink] = []
    yield made
    for sink in made:
        sink.close()


def graphite(sinks: list[Sink], port: int, *, max_lines: int = 1000, timeout: float = 60.0) -> Sink:
    sink = Sink("Graphite", Address("tcp", "127.0.0.1", port), max_lines=max_lines, timeout=timeout)
    sinks.append(sink)
    return sink


def numbered(start: int, stop: int) -> list[bytes]:
    return [b"lowq.figure %d 1800000000" % number for number in range(start, stop)]


def events(caplog: pytest.LogCaptureFixture, *places: object) -> list[str]:
    """What the log says of these ports or hosts: threads of the test before may be there a moment longer."""
    told = [record for record in caplog.records if any(str(place) in record.getMessage() for place in places)]
    return [record.event for record in told if hasattr(record, "event")]


def senders() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "lowq-metrics-send"}


def test_lines_arrive_in_order_and_who_flushes_waits_for_that(sinks: list[Sink]) -> None:
    with Receiver() as receiver:
        sink = graphite(sinks, receiver.port)
        assert sink.flush(NEVER)
        sink.put(numbered(0, 500))
        sink.put(numbered(500, 700))
        assert sink.flush(NEVER)
        until(lambda: receiver.lines == numbered(0, 700), "all lines")


def test_no_line_gets_lost_when_the_connection_is_closed(sinks: list[Sink], caplog: pytest.LogCaptureFixture) -> None:
    with Receiver() as receiver:
        sink = graphite(sinks, receiver.port)
        sink.put(numbered(0, 3))
        until(lambda: len(receiver.lines) == 3, "the first lines")
        receiver.drop_connections()
        sink.put(numbered(3, 6))
        until(lambda: set(receiver.lines) == set(numbered(0, 6)), "the lines behind them")
        assert len(receiver.connections) == 1
    assert events(caplog, receiver.port) == [], "nothing was wrong"


def test_what_gathers_while_nobody_listens_is_sent_later(sinks: list[Sink], caplog: pytest.LogCaptureFixture) -> None:
    receiver = Receiver()
    sink = graphite(sinks, receiver.port)
    sink.put(numbered(0, 5))
    assert not sink.flush(NEVER), "who flushes does not wait for one that is away"
    until(lambda: "metrics_away" in events(caplog, receiver.port), "the log says so")
    sink.put(numbered(5, 10))
    with receiver:
        until(lambda: receiver.lines == numbered(0, 10), "all lines")
        until(lambda: "metrics_back" in events(caplog, receiver.port), "the log says so")
    assert events(caplog, receiver.port) == ["metrics_away", "metrics_back"]
    assert f"Graphite at tcp://127.0.0.1:{receiver.port} can't be reached" in caplog.text


def test_a_full_buffer_drops_the_oldest_lines_and_counts_them(sinks: list[Sink]) -> None:
    receiver = Receiver()
    sink = graphite(sinks, receiver.port, max_lines=10)
    for start in range(0, 100, 5):
        sink.put(numbered(start, start + 5))
    until(lambda: sink.dropped == 90, "all but ten are dropped")
    with receiver:
        until(lambda: receiver.lines == numbered(90, 100), "the latest lines")


def test_one_that_never_reads_keeps_nobody_waiting(sinks: list[Sink], caplog: pytest.LogCaptureFixture) -> None:
    large = [b"x" * 60_000] * 200  # more than the buffers of the kernel hold
    with Receiver(reads=False) as receiver:
        sink = graphite(sinks, receiver.port, max_lines=100, timeout=0.05)
        for _ in range(3):
            sink.put(large)
        until(lambda: "metrics_away" in events(caplog, receiver.port), "the log says so")
        until(lambda: len(receiver.connections) > 1, "another attempt")
        assert sink.dropped > 0
        assert events(caplog, receiver.port) == ["metrics_away"]


def test_without_lines_the_thread_ends(sinks: list[Sink], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowq.observe.buffer.IDLE_SECONDS", 0.01)
    before = senders()
    with Receiver() as receiver:
        sink = graphite(sinks, receiver.port)
        for number in range(3):
            sink.put(numbered(number, number + 1))
            until(lambda: senders() <= before, "its end")
        until(lambda: receiver.lines == numbered(0, 3), "all lines")
    sink.put(numbered(3, 4))  # nobody listens any more
    sink.close()
    until(lambda: senders() <= before, "the end of its thread")
    sink.put(numbered(4, 5))
    assert senders() <= before


def test_datagrams_hold_whole_lines(sinks: list[Sink]) -> None:
    with socket.socket(type=socket.SOCK_DGRAM) as receiver:
        receiver.bind(("127.0.0.1", 0))
        receiver.settimeout(60)
        sink = Sink("StatsD", Address("udp", "127.0.0.1", receiver.getsockname()[1]))
        sinks.append(sink)
        sink.put(numbered(0, 100))
        lines: list[bytes] = []
        while len(lines) < 100:
            datagram = receiver.recv(65536)
            assert len(datagram) <= 1400
            assert datagram.endswith(b"\n")
            lines += datagram.split(b"\n")[:-1]
        assert lines == numbered(0, 100)


def test_datagrams_to_nobody_are_no_error(sinks: list[Sink], caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket(type=socket.SOCK_DGRAM) as reserved:
        # It keeps the port from others, and being connected gets nothing that comes from elsewhere.
        reserved.bind(("127.0.0.1", 0))
        reserved.connect(("127.0.0.1", 1))
        port = reserved.getsockname()[1]
        sinks.append(Sink("StatsD", Address("udp", "127.0.0.1", port)))
        for number in range(20):
            sinks[-1].put(numbered(number, number + 1))
            assert sinks[-1].flush(NEVER)
    assert events(caplog, port) == []
