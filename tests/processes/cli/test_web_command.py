"""`lowq web`, and `lowq run --web`, as real processes."""

import json
import os
import re
import signal
import socket
import urllib.error
import urllib.request
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import lowq
from tests.processes.cli.support import Cli, Process, Start
from tests.processes.support import PATIENCE, until
from tests.redis_server import RedisServer
from tests.rows import case

BESIDE = ("run", "-r", "app.py", "-q", "Orders", "--web", "127.0.0.1:0")


def get(address: str | urllib.request.Request) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(address, timeout=PATIENCE) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def answers(address: str, code: int = 200) -> bool:
    """Whether it is served. It may be refused or cut off."""
    try:
        return get(address)[0] == code
    except OSError:
        return False


def answer(address: str) -> tuple[int, Any]:
    """As `get`, when there is one: on a busy machine Redis may not answer at once, and it says 503."""
    return until(lambda: found if (found := get(address))[0] != 503 else None, "an answer") or (503, "")


def ends_while_somebody_looks(process: Process, at: str) -> int:
    """Its exit code, after TERM."""

    def opened() -> Any:
        try:
            stream = urllib.request.urlopen(f"{at}/live", timeout=PATIENCE)
        except urllib.error.HTTPError as error:
            stream = error
        if stream.readline() == b"event: figures\n":
            return stream
        stream.close()  # on a busy machine it tells of a Redis that is away
        return None

    stream: Any = until(opened, "a stream of figures")
    with stream:
        return process.ends_after(signal.SIGTERM)


def test_the_dashboard_alone(cli: Cli, start: Start) -> None:
    cli.app.queue("Orders", 4).push({"id": "a/b", "payload": {"card": "4242"}, "delay": 60})
    cli.app.queue("x/y%2F", 2).push({"id": 1})
    process = start("web", "--bind", "127.0.0.1:0", "--redact", "card", "--redis-url", cli.url)
    at = process.address("dashboard")
    assert answer(f"{at}/healthz") == (200, '{"status":"ok"}')
    assert '"length": 1' in answer(f"{at}/api/v1/stats")[1]
    status, page = answer(f"{at}/queues/Orders/job?id=a%2Fb")
    assert (status, "4242" in page) == (200, False)
    assert answer(f"{at}/queues/x%252Fy%25252F")[0] == 200  # a slash in a queue's name is escaped twice
    assert answer(f"{at}/queues/nobody")[0] == 404
    assert ends_while_somebody_looks(process, at) in (0, -signal.SIGTERM)


def test_the_dashboard_beside_a_node_takes_the_options_of_the_one_alone(start: Start) -> None:
    """And the store may be inside."""
    options = ("--root-path", "/ops/lowq", "--redact", "card", "--log-format", "json", "--namespace", "other")
    process = start(*BESIDE, "--embedded", *options)
    at, store = process.address("dashboard"), process.address("store")
    until(lambda: get(f"{at}/healthz")[0] == 200, "a node that is well")
    nodes = json.loads(answer(f"{at}/api/v1/nodes")[1])["nodes"]
    assert [node["pid"] for node in nodes] == [process.process.pid]
    with closing(lowq.Lowq(redis_url=store, namespace="other")) as app:
        app.queue("Only", 1).push({"id": "a", "payload": {"card": "42424242"}, "delay": 60})
    page = until(lambda: dict([get(f"{at}/queues/Only/job?id=a")]).get(200, ""), "the page of the job")
    assert 'href="/ops/lowq/queues/Only"' in page
    assert ("card" in page, "42424242" in page) == (True, False)
    assert ends_while_somebody_looks(process, at) == 0
    for line in process.err.splitlines():
        json.loads(line)


def test_a_dashboard_that_dies_is_started_again_and_tells_that_redis_is_away(start: Start) -> None:
    """The node goes on."""
    with RedisServer() as server:
        cli = Cli(server.url)
        process = start(*BESIDE, environment={"LOWQ_REDIS_URL": server.url, "LOWQ_LEASE_TTL": "1"})
        at = process.address("dashboard")
        (dashboard,) = children(process.process.pid)
        assert {node.pid for node in until(cli.app.nodes, "a node")} == {process.process.pid}
        os.kill(dashboard, signal.SIGKILL)
        cli.push(*({"id": n} for n in range(50)))
        until(lambda: cli.app.queue("Orders").stats().processed == 50, "50 performed")
        until(lambda: answers(f"{at}/healthz"), "another dashboard at the same address")
        server.stop()
        until(lambda: answers(f"{at}/healthz", 503), "word of it")
        assert "Redis" in get(f"{at}/healthz")[1]
        server.start()
        until(lambda: answers(f"{at}/healthz"), "a node that is well again")
        assert process.ends_after(signal.SIGTERM) == 0
        said = f"the dashboard (pid {dashboard}) was killed by SIGKILL; started again at once, the node goes on"
        assert said in process.err
        with pytest.raises(OSError, match="refused"):
            get(f"{at}/healthz")
        cli.app.close()


def test_the_death_of_a_node_ends_its_dashboard_though_others_have_all_that_it_had_open(cli: Cli, start: Start) -> None:
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
    process = start(*BESIDE, "--redis-url", cli.url, app=forks)
    at = process.address("dashboard")
    (dashboard,) = children(process.process.pid)
    until(cli.app.nodes, "a node")
    cli.app.queue("Orders").push({"id": 1})
    until(lambda: cli.app.queue("Orders").stats().processed == 1, "a job performed")
    (forked,) = [pid for pid in children(process.process.pid) if pid != dashboard]
    try:
        process.ends_after(signal.SIGKILL)
        until(lambda: not answers(f"{at}/healthz"), "end of the dashboard")
    finally:
        os.kill(forked, signal.SIGKILL)


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


def test_what_can_not_be_served_is_refused_at_the_start(cli: Cli, start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        taken = f"can't listen on 127.0.0.1 port {port}: Address already in use; choose another address, or port 0"
        no_proxy = ("--auth-header", "X-Forwarded-User", "--admins", "ann,@ops")
        rows: list[tuple[str, tuple[str, ...], str]] = [
            (f"127.0.0.1:{port}", (), taken),
            ("0.0.0.0:0", (), "LOWQ_WEB_USER"),
            ("0.0.0.0:0", no_proxy, "--trusted-proxy"),
            ("127.0.0.1:0", ("--root-path", "ops lowq"), "no path such as"),
            ("nonsense", ("--no-auth",), "nonsense"),
            ("127.0.0.1:99999", ("--no-auth",), "99999"),
            ("host.invalid:80", ("--no-auth",), "host.invalid"),
            ("127.0.0.1:0", ("--redis-url", "redis://127.0.0.1/orders"), "must be a number, not 'orders'"),
        ]
        for bind, options, says in rows:
            with case(bind, options):
                assert says in cli("web", "--bind", bind, *options, code=2).stderr
        beside = start(*BESIDE[:-1], f"127.0.0.1:{port}", "--redis-url", cli.url)
        assert (beside.wait(), taken in beside.err, "Traceback" in beside.err) == (2, True, False), beside.err


def test_a_dashboard_without_redis_says_so_and_goes_on(start: Start) -> None:
    process = start("web", "--bind", "127.0.0.1:0", "--redis-url", "redis://127.0.0.1:1/0")
    at = process.address("dashboard")
    process.until(lambda: re.search(r"Redis at \S+ does not answer: .*The dashboard goes on", process.err))
    process.until(lambda: get(f"{at}/healthz")[0] == 503)


def test_addresses_that_others_reach_need_a_login_a_proxy_that_logs_people_in_or_a_word(cli: Cli, start: Start) -> None:
    proxy = ("--auth-header", "X-Forwarded-User", "--admins", "ann,@ops", "--groups-header", "X-Groups",
             "--trusted-proxy", "127.0.0.1", "--trusted-proxy", "10.0.0.9")  # fmt: skip
    users = {"LOWQ_WEB_USER": "ann", "LOWQ_WEB_PASSWORD": "a secret of ann"}
    anywhere = ("web", "--bind", "0.0.0.0:0")
    rows: list[tuple[tuple[str, ...], dict[str, str], int]] = [
        ((*anywhere, "--no-auth"), {}, 200),
        ((*BESIDE[:-1], "0.0.0.0:0"), users, 401),
        ((*anywhere, *proxy), {}, 401),
    ]
    at = ""
    for args, environment, expected in rows:
        with case(args):
            process = start(*args, "--redis-url", cli.url, environment=environment)
            at = process.address("dashboard").replace("0.0.0.0", "127.0.0.1")
            # On a busy machine Redis may not answer at once: then it says 503.
            until(lambda at=at, expected=expected: answers(f"{at}/", expected), f"an answer {expected}")  # type: ignore[misc]
    request = urllib.request.Request(f"{at}/api/v1/queues", headers={"X-Forwarded-User": "bob"})
    until(lambda: get(request)[0] == 200, "an answer for who is logged in")
