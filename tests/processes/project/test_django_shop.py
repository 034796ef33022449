"""The example of Django: its own tests, and its nodes as ``manage.py lowq run`` with a real Redis."""

import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import lowq
from tests.redis_server import RedisServer
from tests.waiting import PATIENCE, until

ROOT = Path(__file__).resolve().parents[3]
MANAGE = ROOT / "examples" / "django_shop" / "manage.py"

ORDERS = """
from django.db import transaction
from orders.models import Order
from orders.tasks import send_invoice

with transaction.atomic():
    for number in range(20):
        send_invoice.enqueue(Order.objects.create(article="book", email=f"{number}@example.com").pk)
"""


class Shop:
    """The shop in a folder of its own, with a Redis that keeps its data."""

    def __init__(self, folder: Path, redis: RedisServer) -> None:
        self.folder, self.redis = folder, redis
        self.database = folder / "shop.sqlite3"
        self.environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "web")]),
            "DATABASE": str(self.database),
            "REDIS_URL": redis.url,
            "LOWQ_LEASE_TTL": "1",
        }
        self.app = lowq.Lowq(redis_url=redis.url, namespace="shop")
        self.nodes: list[subprocess.Popen[bytes]] = []

    def manage(self, *arguments: str) -> str:
        """Runs a command to its end; its output."""
        command = [sys.executable, "-W", "error", str(MANAGE), *arguments]
        ran = subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=2 * PATIENCE,
            check=False,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran.stdout + ran.stderr

    @property
    def log_path(self) -> Path:
        return self.folder / f"node-{len(self.nodes)}.log"

    def node(self, *options: str) -> subprocess.Popen[bytes]:
        """Starts ``manage.py lowq run``, and waits until it works."""
        command = [sys.executable, str(MANAGE), "lowq", "run", *options]
        with self.log_path.open("wb") as log:
            node = subprocess.Popen(command, cwd=self.folder, env=self.environment, stdout=log, stderr=log)
        log_path = self.log_path
        self.nodes.append(node)

        def works() -> bool:
            text = log_path.read_text()
            assert node.poll() is None, text
            return " starts: " in text

        until(works, "the start of a node")
        return node

    def select(self, what: str) -> list[Any]:
        with sqlite3.connect(self.database, timeout=PATIENCE) as connection:
            found = [row[0] for row in connection.execute(f"SELECT {what} FROM orders_order ORDER BY id")]
        connection.close()
        return found

    def pay(self, version: int) -> None:
        """What the payment service says of all orders, twice."""
        jobs = [{"id": order, "payload": {"version": version, "status": f"v{version}"}} for order in self.select("id")]
        self.app.queue("PaymentSync", 5, score="version").push([*jobs, *jobs])

    def close(self) -> None:
        for number, node in enumerate(self.nodes):
            if node.poll() is None:
                node.kill()
            node.wait()
            print(f"--- node {number}\n{(self.folder / f'node-{number}.log').read_text()}")  # noqa: T201
        self.app.close()


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    with RedisServer(tmp_path / "redis", appendonly="yes", appendfsync="always") as redis:
        made = Shop(tmp_path, redis)
        yield made
        made.close()


def test_the_tests_of_the_example_pass(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "DATABASE": str(tmp_path / "shop.sqlite3")}
    ran = subprocess.run(
        [sys.executable, "-W", "error", "manage.py", "test"], cwd=MANAGE.parent, env=environment, capture_output=True,
        text=True, timeout=2 * PATIENCE, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "Ran 4 tests" in ran.stderr


@pytest.mark.slow
@pytest.mark.redis
def test_a_shop_goes_on_when_its_node_is_killed_and_its_redis_restarted(shop: Shop) -> None:
    shop.manage("migrate", "--verbosity", "0")
    shop.manage("shell", "-c", ORDERS)
    shop.pay(1)
    assert "PaymentSync" in shop.manage("lowq", "stats")
    node = shop.node()
    until(lambda: max(shop.select("version")) == 1, "the first order that is up to date")
    node.kill()
    shop.pay(2)
    node = shop.node()
    until(lambda: shop.select("status") == ["v2"] * 20, "all orders up to date")
    until(lambda: min(shop.select("invoices")) >= 1, "all invoices")
    shop.redis.restart()
    shop.pay(3)
    until(lambda: shop.select("status") == ["v3"] * 20, "all orders up to date after Redis was away")
    # New code in the same process, under the same leases: it is loaded as `lowq run lowq.contrib.django.node`.
    log = shop.folder / "node-1.log"
    node.send_signal(signal.SIGHUP)
    until(lambda: " starts with new code: " in log.read_text(), "the new code")
    shop.pay(4)
    until(lambda: shop.select("status") == ["v4"] * 20, "all orders up to date with the new code")
    node.send_signal(signal.SIGTERM)
    assert node.wait(PATIENCE) == 0
    # Several processes, which the supervisor starts.
    node = shop.node("--processes", "2")
    shop.pay(5)
    until(lambda: shop.select("status") == ["v5"] * 20, "all orders up to date by several processes")
    node.send_signal(signal.SIGTERM)
    assert node.wait(PATIENCE) == 0
