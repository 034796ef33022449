"""`lowq web`, `lowq run --web`, and the verbs that came with the dashboard, as real processes."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from click.testing import CliRunner

import lowq
from lowq.cli import main
from tests.processes.support import PATIENCE, until
from tests.redis_server import RedisServer
from tests.rows import case

WORKERS = """
import time
import lowq

@lowq.worker(shards_count=4)
class Orders(lowq.Worker):
    def perform(self, payloads_by_id):
        time.sleep(0.01)
"""


@contextmanager
def process(
    folder: Path, *arguments: str, files: str = "", **environment: str
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A lowq command that serves the dashboard, and where that is. ``files``: as many may be open in each process."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LOWQ_")}
    command = [sys.executable, "-m", "lowq", *arguments]
    if files:
        command = ["bash", "-c", f'ulimit -n {files}; exec "$@"', "--", *command]
    running = subprocess.Popen(
        command, cwd=folder, env=kept | environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        stream = running.stderr if "json" in arguments else running.stdout
        assert stream is not None
        for line in stream:
            if found := re.search(r'the dashboard is at (http[^\s;"]+)', line):
                yield running, found[1]
                return
        raise AssertionError(running.communicate()[1])
    finally:
        if running.poll() is None:
            running.kill()
        running.communicate()


def get(address: str | urllib.request.Request) -> tuple[int, Any]:
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


@pytest.mark.slow
def test_connections_to_the_dashboard_take_no_files_from_jobs(redis_url: str, tmp_path: Path) -> None:
    opens_a_file = WORKERS.replace("time.sleep(0.01)", "open('/dev/null').close()")
    (tmp_path / "app.py").write_text(opens_a_file)
    app = lowq.Lowq(redis_url=redis_url)
    arguments = ("run", "-r", "app.py", "--web", "127.0.0.1:0")
    with ExitStack() as stack, process(tmp_path, *arguments, files="300", LOWQ_REDIS_URL=redis_url) as (running, at):
        until(app.nodes, "a node")
        where = urlsplit(at)
        for _ in range(400):  # nobody says a word on them
            idle = socket.create_connection((where.hostname or "", where.port or 0), timeout=PATIENCE)
            stack.enter_context(closing(idle))
        app.queue("Orders").push([{"id": n} for n in range(100)])
        until(lambda: sum(performed(app)) == 100, "100 performed")
        assert performed(app) == (100, 0)
        until(lambda: answers(f"{at}/healthz"), "end of the connections that are idle")
        running.terminate()
        assert "Too many open files" not in running.communicate()[1]
    app.close()


def performed(app: lowq.Lowq) -> tuple[int, int]:
    """How many ids were performed, and how many failed."""
    stats = app.queue("Orders").stats()
    return stats.processed, stats.failed


def answers(address: str) -> bool:
    """Whether it is served. It may be refused or cut off."""
    try:
        return get(address)[0] == 200
    except OSError:
        return False


def test_a_dashboard_that_dies_is_started_again_and_the_node_goes_on(redis_url: str, tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(WORKERS)
    app = lowq.Lowq(redis_url=redis_url)
    with process(tmp_path, "run", "-r", "app.py", "--web", "127.0.0.1:0", LOWQ_REDIS_URL=redis_url) as (running, at):
        (dashboard,) = children(running.pid)
        assert {node.pid for node in until(app.nodes, "a node")} == {running.pid}
        os.kill(dashboard, signal.SIGKILL)
        app.queue("Orders").push([{"id": n} for n in range(50)])
        until(lambda: performed(app) == (50, 0), "50 performed")
        until(lambda: answers(f"{at}/healthz"), "another dashboard at the same address")
        running.terminate()
        errors = running.communicate()[1]
        assert (
            f"the dashboard (pid {dashboard}) was killed by SIGKILL; started again at once, the node goes on" in errors
        )
        assert running.returncode == 0
    app.close()


def test_the_end_of_a_node_ends_its_dashboard_however_it_comes(redis_url: str, tmp_path: Path) -> None:
    forks = """
import os
import time
import lowq

@lowq.worker(shards_count=1)
class Orders(lowq.Worker):
    def perform(self, payloads_by_id):
        if not os.fork():  # has all that this process has open, and outlives it
            time.sleep(60)
            os._exit(0)
"""
    for code, number in ((WORKERS, signal.SIGTERM), (WORKERS, signal.SIGKILL), (forks, signal.SIGKILL)):
        (tmp_path / "app.py").write_text(code)
        settings = {"LOWQ_REDIS_URL": redis_url, "LOWQ_NAMESPACE": f"n{len(code)}-{number}"}
        app = lowq.Lowq(redis_url=redis_url, namespace=settings["LOWQ_NAMESPACE"])
        with process(tmp_path, "run", "-r", "app.py", "--web", "127.0.0.1:0", **settings) as (running, at):
            (dashboard,) = children(running.pid)
            until(app.nodes, "a node")
            app.queue("Orders").push({"id": 1})
            until(lambda app=app: performed(app) == (1, 0), "a job performed")  # type: ignore[misc]  # a lambda's default
            forked = [pid for pid in children(running.pid) if pid != dashboard]
            running.send_signal(number)
            running.wait(PATIENCE)
            until(lambda pid=dashboard: not lives(pid), "end of the dashboard")  # type: ignore[misc]  # likewise
            with pytest.raises(OSError, match="refused"):
                get(f"{at}/healthz")
            for pid in forked:
                os.kill(pid, signal.SIGKILL)
        app.close()


def children(pid: int) -> list[int]:
    """The processes that it has started and that live (Linux)."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has just ended
        if int(fields[1]) == pid and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_the_dashboard_beside_a_node_takes_the_options_of_the_one_alone(redis_url: str, tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(WORKERS)
    arguments = ("--root-path", "/ops/lowq", "--redact", "card", "--log-format", "json", "--namespace", "other")
    app = lowq.Lowq(redis_url=redis_url, namespace="other")
    app.queue("Only", 1).push({"id": "a", "payload": {"card": "42424242"}, "delay": 60})
    with process(tmp_path, "run", "-r", "app.py", "--web", "127.0.0.1:0", *arguments, LOWQ_REDIS_URL=redis_url) as (
        running,
        at,
    ):
        page = until(lambda: dict([get(f"{at}/queues/Only/job?id=a")]).get(200, ""), "the page of the job")
        assert 'href="/ops/lowq/queues/Only"' in page
        assert ("card" in page, "42424242" in page) == (True, False)
        running.terminate()
        for line in running.communicate()[1].splitlines():
            json.loads(line)
    app.close()


def test_health_tells_that_redis_is_away(tmp_path: Path) -> None:
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


def test_what_can_not_be_served_is_refused_at_the_start(redis_url: str, tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(WORKERS)
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = f"127.0.0.1:{server.getsockname()[1]}"
        no_proxy = ("--auth-header", "X-Forwarded-User", "--admins", "ann,@ops")
        rows: list[tuple[str, tuple[str, ...], str]] = [
            (taken, (), f"the dashboard can't listen on 127.0.0.1 port {taken.rpartition(':')[2]}: "),
            ("0.0.0.0:0", (), "LOWQ_WEB_USER"),
            ("0.0.0.0:0", no_proxy, "--trusted-proxy"),
            ("127.0.0.1:0", ("--root-path", "ops lowq"), "no path such as"),
            ("nonsense", ("--no-auth",), "nonsense"),
            ("127.0.0.1:99999", ("--no-auth",), "99999"),
            ("host.invalid:80", ("--no-auth",), "host.invalid"),
        ]
        for bind, options, says in rows:
            with case(bind, options):
                refused = CliRunner().invoke(main, ["web", "--bind", bind, *options, "--redis-url", redis_url])
                assert (refused.exit_code, says in refused.stderr) == (2, True), refused.output
        for bind, options, says in rows[:3]:
            with case("run", bind, options):
                beside = run(tmp_path, "run", "-r", "app.py", "--web", bind, *options, LOWQ_REDIS_URL=redis_url)
                assert (beside.returncode, says in beside.stderr) == (2, True), beside.stderr
                assert "Traceback" not in beside.stderr


def test_addresses_that_others_reach_need_a_login_a_proxy_that_logs_people_in_or_a_word(
    redis_url: str, tmp_path: Path
) -> None:
    (tmp_path / "app.py").write_text(WORKERS)
    alone, beside = ("web", "--bind"), ("run", "-r", "app.py", "--web")
    proxy = ("--auth-header", "X-Forwarded-User", "--admins", "ann,@ops", "--groups-header", "X-Groups",
             "--trusted-proxy", "127.0.0.1", "--trusted-proxy", "10.0.0.9")  # fmt: skip
    users = {"LOWQ_WEB_USER": "ann", "LOWQ_WEB_PASSWORD": "secret"}
    rows: list[tuple[tuple[str, ...], tuple[str, ...], dict[str, str], int]] = [
        (alone, ("--no-auth",), {}, 200), (alone, (), users, 401), (beside, (), users, 401), (alone, proxy, {}, 401),
        (beside, proxy, {}, 401),
    ]  # fmt: skip
    for verb, options, environment, expected in rows:
        with (
            case(verb, options),
            process(tmp_path, *verb, "0.0.0.0:0", *options, LOWQ_REDIS_URL=redis_url, **environment) as (_, at),
        ):
            at = at.replace("0.0.0.0", "127.0.0.1")
            # On a busy machine Redis may not answer at once: then it says 503.
            until(lambda at=at, expected=expected: get(f"{at}/")[0] == expected, f"an answer {expected}")  # type: ignore[misc]
            if options == proxy:
                request = urllib.request.Request(f"{at}/api/v1/queues", headers={"X-Forwarded-User": "bob"})
                until(lambda request=request: get(request)[0] == 200, "an answer for who is logged in")  # type: ignore[misc]


def test_a_node_is_told_by_name_to_go_quiet_and_to_stop(redis_url: str, tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(WORKERS)
    settings = {"LOWQ_REDIS_URL": redis_url, "LOWQ_LEASE_TTL": "4"}
    unknown = run(tmp_path, "quiet", "nobody", **settings)
    assert (unknown.returncode, "no node 'nobody' lives" in unknown.stderr) == (1, True)
    app = lowq.Lowq(redis_url=redis_url)
    app.queue("Orders", 4).push([{"id": n} for n in range(50)])
    with process(tmp_path, "run", "-r", "app.py", "--web", "127.0.0.1:0", **settings) as (running, _):
        until(lambda: app.nodes() and app.queue("Orders").stats().processed == 50, "50 performed")

        # The history leaves out what ended less than some seconds ago: other nodes may not have reported yet.
        until(lambda: any(rate.processed for rate in app.queue("Orders").rates().rates), "a history")
        found = json.loads(run(tmp_path, "rates", "Orders", "--json", **settings).stdout)
        assert 0 < sum(rate["processed"] or 0 for rate in found["rates"]) * found["step"] <= 50.001
        until(lambda: app.queue("Orders").perform_times().count == 50, "all run times")
        assert app.queue("Orders").perform_times().seconds >= 0.01 * 50

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
