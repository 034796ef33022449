"""`lowq web`, `lowq run --web`, and the verbs that came with the dashboard, as real processes."""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import lowq
from tests.integration.support import PATIENCE, until

WORKERS = """
import time
import lowq

@lowq.worker(shards_count=4)
class Orders(lowq.Worker):
    def perform(self, payloads_by_id):
        time.sleep(0.01)
"""


@contextmanager
def process(folder: Path, *arguments: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A lowq command that serves the dashboard, and where that is."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LOWQ_")}
    command = [sys.executable, "-m", "lowq", *arguments]
    running = subprocess.Popen(
        command, cwd=folder, env=kept | environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert running.stdout is not None
        for line in running.stdout:
            if line.startswith("the dashboard is at "):
                yield running, line.split()[4].rstrip(";")
                return
        raise AssertionError(running.communicate()[1])
    finally:
        if running.poll() is None:
            running.kill()
        running.communicate()


def get(address: str) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(address, timeout=PATIENCE) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def run(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LOWQ_")}
    return subprocess.run(
        [sys.executable, "-m", "lowq", *arguments], cwd=folder, env=kept | environment, capture_output=True,
        text=True, timeout=60, check=False,
    )  # fmt: skip


def test_the_dashboard_alone(redis_url: str, tmp_path: Path) -> None:
    app = lowq.Lowq(redis_url=redis_url)
    app.queue("Orders", 4).push({"id": "a/b", "payload": {"card": "4242"}, "delay": 60})
    app.queue("x/y%2F", 2).push({"id": 1})
    with process(tmp_path, "web", "--bind", "127.0.0.1:0", "--redact", "card", LOWQ_REDIS_URL=redis_url) as (
        running,
        at,
    ):
        assert get(f"{at}/healthz") == (200, '{"status":"ok"}')
        assert '"length": 1' in get(f"{at}/api/v1/stats")[1]
        status, page = get(f"{at}/queues/Orders/job?id=a%2Fb")
        assert (status, "4242" in page) == (200, False)
        assert get(f"{at}/queues/x%252Fy%25252F")[0] == 200  # a slash in a queue's name is escaped twice
        assert get(f"{at}/queues/nobody")[0] == 404
        stream = urllib.request.urlopen(f"{at}/live", timeout=PATIENCE)
        assert stream.readline() == b"event: figures\n"
        running.send_signal(signal.SIGTERM)
        assert running.wait(PATIENCE) in (0, -signal.SIGTERM)
        stream.close()
    app.close()


def test_below_a_path_of_a_proxy(redis_url: str, tmp_path: Path) -> None:
    lowq.Lowq(redis_url=redis_url).queue("Orders", 4).push({"id": 1, "delay": 60})
    settings = {"LOWQ_REDIS_URL": redis_url}
    with process(tmp_path, "web", "--bind", "127.0.0.1:0", "--root-path", "/ops/lowq/", **settings) as (_, at):
        status, page = get(f"{at}/queues/Orders")  # the proxy has stripped the path
        links = re.findall(r'(?:href|src|action)="([^"]+)"', page)
        assert status == 200
        assert links
        assert all(link.startswith(("/ops/lowq/", "#")) for link in links)
        assert get(f"{at}/healthz")[0] == 200
    refused = run(tmp_path, "web", "--root-path", "ops lowq", **settings)
    assert (refused.returncode, "no path such as" in refused.stderr) == (2, True)


def test_a_node_with_the_dashboard_and_the_store_inside(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(WORKERS)
    arguments = ("run", "-r", "app.py", "--embedded", "--web", "127.0.0.1:0")
    with process(tmp_path, *arguments) as (running, at):
        until(lambda: get(f"{at}/healthz")[0] == 200, "a node that is well")
        nodes = json.loads(get(f"{at}/api/v1/nodes")[1])["nodes"]
        assert [node["pid"] for node in nodes] == [running.pid]
        stream = urllib.request.urlopen(f"{at}/live", timeout=PATIENCE)
        assert stream.readline() == b"event: figures\n"
        running.send_signal(signal.SIGTERM)
        assert running.wait(PATIENCE) == 0
        stream.close()


def test_a_node_masks_fields_on_its_dashboard(redis_url: str, tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(WORKERS)
    app = lowq.Lowq(redis_url=redis_url)
    app.queue("Masked", 4).push({"id": "a", "payload": {"card": "42424242", "n": 1}, "delay": 60})
    arguments = ("run", "-r", "app.py", "--web", "127.0.0.1:0", "--redact", "card")
    with process(tmp_path, *arguments, LOWQ_REDIS_URL=redis_url) as (_, at):
        status, page = get(f"{at}/queues/Masked/job?id=a")
        assert (status, "card" in page, "42424242" in page) == (200, True, False)
    app.close()


def test_health_tells_that_redis_is_away(tmp_path: Path) -> None:
    from tests.redis_server import RedisServer

    (tmp_path / "app.py").write_text(WORKERS)
    with RedisServer() as server:
        settings = {"LOWQ_REDIS_URL": server.url, "LOWQ_LEASE_TTL": "1"}
        with process(tmp_path, "run", "-r", "app.py", "--web", "127.0.0.1:0", **settings) as (_, at):
            until(lambda: get(f"{at}/healthz")[0] == 200, "a node that is well")
            server.stop()
            until(lambda: get(f"{at}/healthz")[0] == 503, "word of it")
            assert "Redis" in get(f"{at}/healthz")[1]
            server.start()
            until(lambda: get(f"{at}/healthz")[0] == 200, "a node that is well again")


@pytest.mark.parametrize("verb", [("web", "--bind"), ("run", "-r", "app.py", "--web")])
def test_addresses_that_others_reach_need_authentication(redis_url: str, tmp_path: Path, verb: tuple[str, ...]) -> None:
    (tmp_path / "app.py").write_text(WORKERS)
    refused = run(tmp_path, *verb, "0.0.0.0:0", LOWQ_REDIS_URL=redis_url)
    assert refused.returncode == 2
    assert "LOWQ_WEB_USER" in refused.stderr
    assert "--no-auth" in refused.stderr
    with process(tmp_path, *verb, "0.0.0.0:0", "--no-auth", LOWQ_REDIS_URL=redis_url) as (_, at):
        assert get(f"{at.replace('0.0.0.0', '127.0.0.1')}/")[0] == 200
    users = {"LOWQ_WEB_USER": "ann", "LOWQ_WEB_PASSWORD": "secret"}
    with process(tmp_path, *verb, "0.0.0.0:0", LOWQ_REDIS_URL=redis_url, **users) as (_, at):
        assert get(f"{at.replace('0.0.0.0', '127.0.0.1')}/")[0] == 401


@pytest.mark.parametrize("address", ["nonsense", "127.0.0.1:99999", "127.0.0.1:-1", "host.invalid:80"])
def test_wrong_addresses_are_refused(redis_url: str, tmp_path: Path, address: str) -> None:
    refused = run(tmp_path, "web", "--bind", address, "--no-auth", LOWQ_REDIS_URL=redis_url)
    assert refused.returncode == 2
    assert "Traceback" not in refused.stderr


def test_a_node_is_told_by_name_to_go_quiet_and_to_stop(redis_url: str, tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(WORKERS)
    settings = {"LOWQ_REDIS_URL": redis_url, "LOWQ_LEASE_TTL": "1.5"}
    unknown = run(tmp_path, "quiet", "nobody", **settings)
    assert (unknown.returncode, "no node 'nobody' lives" in unknown.stderr) == (1, True)
    app = lowq.Lowq(redis_url=redis_url)
    app.queue("Orders", 4).push([{"id": n} for n in range(50)])
    with process(tmp_path, "run", "-r", "app.py", "--web", "127.0.0.1:0", **settings) as (running, _):
        until(lambda: app.nodes() and app.queue("Orders").stats().processed == 50, "50 performed")

        def told() -> dict[str, Any]:
            found: dict[str, Any] = json.loads(run(tmp_path, "rates", "Orders", "--json", **settings).stdout)
            return found

        # In the history what ended less than some seconds ago is not told yet: other nodes may not have spoken.
        rates = until(lambda: [rate for rate in told()["rates"] if rate["processed"]], "a history")
        assert sum(rate["processed"] for rate in rates) * told()["step"] <= 50.001
        times = app.queue("Orders").perform_times()
        assert times.count == 50
        assert times.seconds >= 0.01 * 50

        name = app.nodes()[0].name
        assert run(tmp_path, "quiet", name, **settings).returncode == 0
        until(lambda: app.nodes()[0].quiet, "a quiet node")
        assert running.poll() is None
        assert run(tmp_path, "stop", name, **settings).returncode == 0
        assert running.wait(PATIENCE) == 0
    app.note("ann", "kick", "Orders", 3)
    listed = run(tmp_path, "audit", **settings)
    assert "ann" in listed.stdout
    assert json.loads(run(tmp_path, "audit", "--json", **settings).stdout)["audit"][0]["count"] == 3
    app.close()
