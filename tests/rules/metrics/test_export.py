"""The lines that are made of figures, and the names in them."""

import os
import socket
import threading
from itertools import product
from typing import Any

import pytest

import lowq
from lowq.address import Address, parse_address
from lowq.metrics.export import GraphiteFormatter, MetricsExporter, StatsdFormatter, part_of_name
from lowq.reading import Reading
from lowq.settings import Config
from tests.rows import case

HOST = part_of_name(socket.gethostname())


def test_an_address_says_where_and_how() -> None:
    rows: list[tuple[str, Address]] = [
        ("graphite.example:2003", Address("tcp", "graphite.example", 2003)),
        ("tcp://10.0.0.1:2003", Address("tcp", "10.0.0.1", 2003)),
        ("udp://10.0.0.1:2003", Address("udp", "10.0.0.1", 2003)),
        ("[::1]:2003", Address("tcp", "::1", 2003)),
        ("udp://[fe80::1%eth0]:1", Address("udp", "fe80::1%eth0", 1)),
    ]
    for text, address in rows:
        with case(text, address):
            assert parse_address(text, ("tcp", "udp")) == address
            assert parse_address(str(address), ("tcp", "udp")) == address


def test_what_is_no_address_or_prefix_is_refused_when_it_is_set() -> None:
    addresses: list[Any] = [
        "", "graphite", "2003", ":2003", "graphite:", "graphite:0", "graphite:65536", "graphite:-1", "graphite:2.3",
        "a b:1", "http://graphite:2003", "udp:graphite:2003", "::1:2003", "graphite:2003/path", "user@graphite:2003",
        "graphite:٣", 2003, ("graphite", 2003), b"graphite:2003", True,
    ]  # fmt: skip
    rows = [*product(("graphite", "statsd"), addresses), ("statsd", "tcp://statsd:8125")]
    rows += [("metrics_prefix", prefix) for prefix in ("", "a b", "a..b", ".a", "a.", "é", 3)]
    for name, value in rows:
        with case(name, value), pytest.raises(lowq.ConfigError, match=name):
            Config(**{name: value})
    assert Config(statsd="udp://statsd:8125").statsd == "udp://statsd:8125"


def test_a_name_becomes_one_part_of_a_path() -> None:
    rows: list[tuple[str, str]] = [
        ("Orders", "Orders"), ("shop.orders", "shop_orders"), ("a b/c:d;e=f", "a_b_c_d_e_f"), ("naïve", "naive"),
        ("x|y@z#", "x_y_z_"),
    ]  # fmt: skip
    for name, part in rows:
        with case(name, part):
            assert part_of_name(name) == part
    first, second = part_of_name("заказы"), part_of_name("письма")
    assert first != second
    assert first.isascii()
    assert "." not in first


COUNTERS = {("Orders", "processed"): 12, ("Orders", "perform_seconds"): 1.25, ("", "metrics_dropped"): 0}
GAUGES = {("Orders", "lag"): 0.5, ("Orders", "shards"): 3, ("", "threads_busy"): 2}


def test_graphite_gets_what_was_counted_since_the_start() -> None:
    lines = GraphiteFormatter(Config()).lines(COUNTERS, GAUGES, 1_800_000_000.7)
    head = f"lowq.{HOST}.{os.getpid()}"
    assert lines == [
        f"{head}.queues.Orders.processed 12 1800000000".encode(),
        f"{head}.queues.Orders.perform_seconds 1.25 1800000000".encode(),
        f"{head}.metrics_dropped 0 1800000000".encode(),
        f"{head}.queues.Orders.lag 0.5 1800000000".encode(),
        f"{head}.queues.Orders.shards 3 1800000000".encode(),
        f"{head}.threads_busy 2 1800000000".encode(),
    ]


def test_statsd_gets_what_was_counted_since_the_last_lines_and_lags_as_timings() -> None:
    formatter = StatsdFormatter(Config(namespace="shop.eu"))
    lines = formatter.lines(COUNTERS, GAUGES, 0)
    assert {b"shop_eu.queues.Orders.processed:12|c", b"shop_eu.queues.Orders.lag:500|ms"} <= set(lines)
    assert f"shop_eu.{HOST}.{os.getpid()}.threads_busy:2|g".encode() in lines, "the state of a process has its name"
    assert b"shop_eu.queues.Orders.processed:3|c" in formatter.lines({("Orders", "processed"): 15}, {}, 0)


def test_a_gauge_that_is_gone_becomes_0_in_statsd_once() -> None:
    formatter = StatsdFormatter(Config(metrics_prefix="shop.web1"))
    formatter.lines({}, GAUGES, 0)
    assert set(formatter.lines({}, {}, 0)) == {b"shop.web1.queues.Orders.shards:0|g", b"shop.web1.threads_busy:0|g"}
    assert formatter.lines({}, {}, 0) == []


def test_a_prefix_stands_before_every_name() -> None:
    config = Config(metrics_prefix="shop.web1")
    lines = GraphiteFormatter(config).lines(COUNTERS, GAUGES, 0) + StatsdFormatter(config).lines(COUNTERS, GAUGES, 0)
    assert all(line.startswith(b"shop.web1.") for line in lines)


def test_nothing_is_read_and_no_thread_started_without_an_address() -> None:
    reads: list[int] = []

    def read() -> dict[str, Reading]:
        reads.append(1)
        return {}

    before = set(threading.enumerate())
    end = MetricsExporter(Config()).add(read)
    assert set(threading.enumerate()) <= before
    end()
    assert reads == []
