"""The lines that are made of figures, and the names in them."""

import os
import socket
import threading
from itertools import product
from typing import Any

import pytest

import lowq
from lowq.observe.graphite_statsd import GraphiteFormatter, MetricsExporter, StatsdFormatter, part_of_name
from lowq.observe.sinks import Address, parse_address
from lowq.settings import Config
from tests.rows import case

HOST = part_of_name(socket.gethostname())


def test_an_address_says_where_and_how() -> None:
    rows: list[tuple[str, Address]] = [
        ("graphite.example:2003", Address("tcp", "graphite.example", 2003)),
        ("udp://10.0.0.1:2003", Address("udp", "10.0.0.1", 2003)),
        ("[::1]:2003", Address("tcp", "::1", 2003)),
        ("udp://[fe80::1%eth0]:1", Address("udp", "fe80::1%eth0", 1)),
    ]
    for text, address in rows:
        with case(text):
            assert parse_address(text, ("tcp", "udp")) == address
            assert parse_address(str(address), ("tcp", "udp")) == address


def test_what_is_no_address_or_prefix_is_refused_when_it_is_set() -> None:
    addresses: list[Any] = [
        "", "graphite", ":2003", "graphite:", "graphite:0", "graphite:65536", "graphite:2.3", "a b:1",
        "http://graphite:2003", "::1:2003", "graphite:2003/path", "user@graphite:2003", "graphite:٣", 2003,
    ]  # fmt: skip
    rows = [*product(("graphite", "statsd"), addresses), ("statsd", "tcp://statsd:8125")]
    rows += [("metrics_prefix", prefix) for prefix in ("", "a b", "a..b", ".a", "é", 3)]
    for name, value in rows:
        with case(name, value), pytest.raises(lowq.ConfigError, match=name):
            Config(**{name: value})


def test_a_name_becomes_one_part_of_a_path() -> None:
    assert [part_of_name(name) for name in ("shop.orders", "a b/c:d|e=f", "naïve")] == [
        "shop_orders", "a_b_c_d_e_f", "naive",
    ]  # fmt: skip
    first, second = part_of_name("заказы"), part_of_name("письма")
    assert first != second
    assert first.isascii()
    assert "." not in first


COUNTERS = {("Orders", "processed"): 12, ("Orders", "perform_seconds"): 1.25, ("", "metrics_dropped"): 0}
GAUGES = {("Orders", "lag"): 0.5, ("Orders", "shards"): 3, ("", "threads_busy"): 2}


def test_graphite_gets_what_was_counted_since_the_start() -> None:
    head = f"lowq.{HOST}.{os.getpid()}"
    assert GraphiteFormatter(Config()).lines(COUNTERS, GAUGES, 1_800_000_000.7) == [
        f"{head}.{figure} 1800000000".encode()
        for figure in (
            "queues.Orders.processed 12", "queues.Orders.perform_seconds 1.25", "metrics_dropped 0",
            "queues.Orders.lag 0.5", "queues.Orders.shards 3", "threads_busy 2",
        )
    ]  # fmt: skip
    (line,) = GraphiteFormatter(Config(metrics_prefix="shop.web1")).lines({}, {("", "threads"): 1}, 0)
    assert line == b"shop.web1.threads 1 0"


def test_statsd_gets_what_was_counted_since_the_last_lines_and_once_0_for_a_gauge_that_is_gone() -> None:
    formatter = StatsdFormatter(Config(namespace="shop.eu"))
    lines = formatter.lines(COUNTERS, GAUGES, 0)
    own = f"shop_eu.{HOST}.{os.getpid()}"
    assert {b"shop_eu.queues.Orders.processed:12|c", b"shop_eu.queues.Orders.lag:500|ms"} <= set(lines)
    assert f"{own}.threads_busy:2|g".encode() in lines, "the state of a process has its name"
    counters = {("Orders", "processed"): 15}
    gone = {f"{own}.queues.Orders.shards:0|g".encode(), f"{own}.threads_busy:0|g".encode()}
    assert set(formatter.lines(counters, {}, 0)) == {b"shop_eu.queues.Orders.processed:3|c", *gone}
    assert formatter.lines({}, {}, 0) == []
    (line,) = StatsdFormatter(Config(metrics_prefix="shop.web1")).lines({}, {("", "threads"): 1}, 0)
    assert line == b"shop.web1.threads:1|g"


def test_nothing_is_read_and_no_thread_started_without_an_address() -> None:
    before = set(threading.enumerate())
    end = MetricsExporter(Config()).add(lambda: pytest.fail("it is read"))
    assert set(threading.enumerate()) <= before
    end()
