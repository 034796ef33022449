"""The example of Django: its own tests, and all of it as processes. gunicorn and uvicorn serve it, nodes are
``manage.py lowq run``, its data are in a PostgreSQL and a Redis of the test's own.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from html import unescape
from http.client import HTTPException
from http.cookiejar import CookieJar
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import psycopg
import pytest

import lowq
from tests.postgres_server import PostgresServer
from tests.redis_server import RedisServer, free_port
from tests.waiting import PATIENCE, until

ROOT = Path(__file__).resolve().parents[3]
SHOP = ROOT / "examples" / "django_shop"
MANAGE = SHOP / "manage.py"
#: The servers, as commands to which the address is added.
SERVERS = {
    "gunicorn": ("gunicorn", "shop.wsgi", "--workers=1", "--threads=4", "--bind"),
    "uvicorn": ("uvicorn", "shop.asgi:application", "--lifespan=off", "--port"),
}


class Shop:
    """The shop in a folder of its own, with a Redis that keeps its data, and a PostgreSQL."""

    def __init__(self, folder: Path, redis: RedisServer, postgres: PostgresServer) -> None:
        self.folder, self.redis, self.postgres = folder, redis, postgres
        self.database = postgres.empty_database()
        self.environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "web"), str(SHOP), os.environ.get("PYTHONPATH", "")]),
            "DATABASE_URL": self.database,
            "REDIS_URL": redis.url,
            "LOWQ_LEASE_TTL": "1",
            "DJANGO_SUPERUSER_PASSWORD": "correct horse",
        }
        self.app = lowq.Lowq(redis_url=redis.url, namespace="shop")
        self.processes: list[tuple[subprocess.Popen[bytes], Path]] = []

    def manage(self, *arguments: str) -> str:
        """Runs a command to its end; its output."""
        command = [sys.executable, "-W", "error", str(MANAGE), *arguments]
        ran = subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=2 * PATIENCE,
            check=False,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran.stdout + ran.stderr

    def start(self, *command: str) -> subprocess.Popen[bytes]:
        log_path = self.folder / f"process-{len(self.processes)}.log"
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, *command], cwd=self.folder, env=self.environment, stdout=log, stderr=log
            )
        self.processes.append((process, log_path))
        return process

    def log_of(self, process: subprocess.Popen[bytes]) -> str:
        return next(log.read_text(errors="replace") for known, log in self.processes if known is process)

    def node(self, *options: str, awaited: bool = True) -> subprocess.Popen[bytes]:
        """Starts ``manage.py lowq run``, and waits until it works."""
        node = self.start(str(MANAGE), "lowq", "run", *options)

        def works() -> bool:
            assert node.poll() is None, self.log_of(node)
            return " starts: " in self.log_of(node)

        if awaited:
            until(works, "the start of a node")
        return node

    def serve(self, name: str, port: int) -> subprocess.Popen[bytes]:
        module, *options = SERVERS[name]
        return self.start("-m", module, *options, f"127.0.0.1:{port}" if name == "gunicorn" else str(port))

    def select(self, what: str) -> list[Any]:
        with psycopg.connect(self.database) as connection:
            return [row[0] for row in connection.execute(f"SELECT {what} FROM orders_order ORDER BY id")]

    def pay(self, version: int) -> None:
        """What the payment service says of all orders, twice."""
        jobs = [{"id": order, "payload": {"version": version, "status": f"v{version}"}} for order in self.select("id")]
        self.app.queue("PaymentSync", 5, score="version").push([*jobs, *jobs])

    def close(self) -> None:
        for process, log in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()
            print(f"--- {process.args!r}\n{log.read_text(errors='replace')}")  # noqa: T201
        self.app.close()


class Browser:
    """Somebody with cookies, at a server of the shop."""

    def __init__(self, port: int) -> None:
        self.root = f"http://127.0.0.1:{port}"
        self._cookies = CookieJar()
        self._opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(self._cookies))

    def open(self, path: str, data: Any = None, **headers: str) -> str:
        body = urlencode(data).encode() if isinstance(data, dict) else data
        request = urllib.request.Request(self.root + path, body, headers)

        def read() -> str:
            try:
                with self._opener.open(request, timeout=PATIENCE) as answer:
                    return str(answer.read().decode())
            except urllib.error.HTTPError as error:
                if error.code == 503 and "/dashboard/" in path:  # Redis took more than 2 s, as the machine is busy
                    return ""
                raise

        return until(read, f"an answer to {path}")

    def log_in(self, name: str, password: str) -> None:
        self.open("/admin/login/")
        token = next(cookie.value for cookie in self._cookies if cookie.name == "csrftoken")
        form = {"username": name, "password": password, "csrfmiddlewaretoken": token, "next": "/admin/"}
        assert "Log out" in self.open("/admin/login/", form)

    def is_served(self) -> bool:
        with suppress(OSError):
            socket.create_connection(("127.0.0.1", int(self.root.rpartition(":")[2])), timeout=5).close()
            return True
        return False


@pytest.fixture
def shop(tmp_path: Path, own_postgres: PostgresServer) -> Iterator[Shop]:
    with RedisServer(tmp_path / "redis", appendonly="yes", appendfsync="always") as redis:
        made = Shop(tmp_path, redis, own_postgres)
        try:
            yield made
        finally:
            made.close()


def test_the_tests_of_the_example_pass() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "web")])}
    ran = subprocess.run(
        [sys.executable, "-W", "error", "manage.py", "test"], cwd=SHOP, env=environment, capture_output=True,
        text=True, timeout=2 * PATIENCE, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "Ran 6 tests" in ran.stderr


@pytest.mark.redis
def test_gunicorn_and_uvicorn_serve_the_shop_and_the_dashboard_beside_a_node(shop: Shop) -> None:
    shop.manage("migrate", "--verbosity", "0")
    browsers = {name: Browser(free_port()) for name in SERVERS}
    for name, browser in browsers.items():
        shop.serve(name, int(browser.root.rpartition(":")[2]))
    node = shop.node(awaited=False)
    shop.manage("createsuperuser", "--noinput", "--username", "ann", "--email", "ann@example.com")
    for name, browser in browsers.items():
        until(browser.is_served, f"{name} serves")
        order = re.findall(r"\d+", browser.open("/orders", {"article": "book", "email": "ann@example.com"}))[0]
        browser.open("/webhooks/payment", b'{"order": %s, "version": 2, "status": "paid"}' % order.encode())
        assert 'name="password"' in browser.open("/admin/lowq/dashboard/"), "the login comes first"
        browser.log_in("ann", "correct horse")
        assert "PaymentSync" in browser.open("/admin/lowq/dashboard/")
        links = re.findall(r'href="(/admin/lowq/[^"]+/job[^"]+)"', browser.open(f"/admin/orders/order/{order}/change/"))
        assert [link.split("/")[5] for link in links] == ["PaymentSync", "mail", "Reservation"]
        for link in links:
            # The job may be done: then the page says so with the status 404.
            with suppress(urllib.error.HTTPError):
                assert "why" in browser.open(unescape(link)).lower()
        assert browser.open("/admin/lowq/dashboard/live").startswith("event: figures\n")
        for action, paused in (("pause", True), ("resume", False)):
            path = f"/admin/lowq/dashboard/api/v1/queues/PaymentSync/{action}"
            browser.open(path, b"{}", **{"content-type": "application/json"})
            assert shop.app.queue("PaymentSync").stats().paused is paused
    until(lambda: shop.select("status") == ["paid"] * 2, "all payments")
    until(lambda: shop.select("is_reserved") == [True] * 2, "all reservations, out of the outbox")
    until(lambda: min(shop.select("invoices")) >= 1, "all invoices")
    for process, _ in shop.processes:
        process.send_signal(signal.SIGTERM)
    assert node.wait(PATIENCE) == 0


@pytest.mark.slow
@pytest.mark.redis
def test_what_was_ordered_is_done_whatever_is_killed(shop: Shop) -> None:
    """Customers go on ordering while the node, the web server, Redis and the database are killed and started again."""
    shop.environment["LOWQ_PUSH_TIMEOUT"] = "2"
    shop.manage("migrate", "--verbosity", "0")
    browser = Browser(free_port())
    port = int(browser.root.rpartition(":")[2])
    web, node = shop.serve("gunicorn", port), shop.node()
    until(browser.is_served, "gunicorn serves")
    accepted: list[int] = []
    stopped = threading.Event()

    def order() -> None:
        while not stopped.wait(0.02):
            with suppress(OSError, HTTPException):
                answer = Browser(port).open("/orders", {"article": "book", "email": "ann@example.com"})
                accepted.append(int(re.findall(r"\d+", answer)[0]))

    customer = threading.Thread(target=order)
    customer.start()
    try:
        for harm in ("node", "web", "redis", "database", "node", "redis"):
            if harm == "node":
                node.kill()
                node = shop.node(awaited=False)
            elif harm == "web":
                web.kill()  # its workers notice, and end
                web.wait()
                until(lambda: not browser.is_served(), "the workers have ended")
                web = shop.serve("gunicorn", port)
            elif harm == "redis":
                shop.redis.kill()
                shop.redis.start()
            else:
                shop.postgres.kill()
                shop.postgres.start()
            before = len(accepted)
            until(lambda count=before: len(accepted) > count + 10, f"orders are taken again after: {harm}")  # type: ignore[misc]
    finally:
        stopped.set()
        customer.join()
    until(lambda: all(shop.select("is_reserved")), "each order in the database is reserved: the outbox loses none")
    invoices = dict(zip(shop.select("id"), shop.select("invoices"), strict=True))
    assert set(accepted) <= invoices.keys()
    until(
        lambda: all(dict(zip(shop.select("id"), shop.select("invoices"), strict=True))[order] for order in accepted),
        "each order that was answered has its invoice",
    )


@pytest.mark.slow
@pytest.mark.redis
def test_nodes_get_new_code_and_may_be_several_processes(shop: Shop) -> None:
    shop.manage("migrate", "--verbosity", "0")
    with psycopg.connect(shop.database) as connection:
        connection.execute(
            "INSERT INTO orders_order (article, email, status, version, invoices, is_reserved) "
            "SELECT 'book', 'ann@example.com', 'new', 0, 0, false FROM generate_series(1, 20)"
        )
    shop.pay(1)
    assert "PaymentSync" in shop.manage("lowq", "stats")
    node = shop.node()
    until(lambda: shop.select("status") == ["v1"] * 20, "all orders up to date")
    # New code in the same process, under the same leases: it is loaded as `lowq run lowq.contrib.django.node`.
    node.send_signal(signal.SIGHUP)
    until(lambda: " starts with new code: " in shop.log_of(node), "the new code")
    shop.pay(2)
    until(lambda: shop.select("status") == ["v2"] * 20, "all orders up to date with the new code")
    node.send_signal(signal.SIGTERM)
    assert node.wait(PATIENCE) == 0
    # Several processes, which the supervisor starts.
    node = shop.node("--processes", "2")
    shop.pay(3)
    until(lambda: shop.select("status") == ["v3"] * 20, "all orders up to date by several processes")
    node.send_signal(signal.SIGTERM)
    assert node.wait(PATIENCE) == 0
