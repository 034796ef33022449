"""`lowq run --health` and `lowq ready`: the health of a node, as a real process."""

import re
import signal
import socket
import threading
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import lowq
from lowq.cli import main
from lowq.cli.health import HealthServer
from lowq.node.node import Node
from lowq.observe.health import Vitals
from tests.processes.cli.support import Cli, Process, Start
from tests.processes.cli.test_web_command import get
from tests.redis_server import RedisServer, free_port
from tests.rows import case
from tests.waiting import PATIENCE, until

#: The job "gil" holds the GIL.
HOLDS = """
import ctypes
from pathlib import Path
import lowq

@lowq.worker(shards_count=2)
class Orders(lowq.Worker):
    def perform(self, payloads_by_id):
        if "gil" in payloads_by_id:
            Path("holds").touch()
            ctypes.PyDLL(None).sleep(600)
"""


def node(start: Start, *options: str, **more: Any) -> tuple[Process, str]:
    """A node with a health server, and its address."""
    process = start("run", "app.py", "-q", "Orders", "--health", "127.0.0.1:0", *options, **more)
    return process, process.address("health server")


def says(at: str, path: str, code: int, text: str = "") -> bool:
    status, body = get(f"{at}{path}")
    return status == code and text in body


def ready(at: str, *options: str) -> tuple[int, str]:
    """Exit code and output of `lowq ready`."""
    done = CliRunner().invoke(main, ["ready", "--health", at.removeprefix("http://"), *options])
    return done.exit_code, done.output


def is_told(at: str, code: int, text: str, *options: str) -> bool:
    """Whether `lowq ready` ends so. It waits five seconds for an answer, and a machine may stand still."""
    found, said = ready(at, *options)
    return found == code and text in said


def figure(at: str, name: str) -> str | None:
    """A sample of /metrics, without its value's zeros."""
    found = re.search(rf"^{re.escape(name)} (\S+)$", get(f"{at}/metrics")[1], re.MULTILINE)
    return found and str(float(found[1]))


def test_a_redis_outage_fails_readiness_and_never_liveness(start: Start, tmp_path: Path) -> None:
    with RedisServer(tmp_path / "redis") as server, closing(lowq.Lowq(redis_url=server.url)) as app:
        process, at = node(start, "--redis-url", server.url)
        process.until(lambda: says(at, "/readyz", 200, "ok"))
        app.queue("Orders", 3).push([{"id": 1}, {"id": 2}])
        process.until(lambda: figure(at, 'lowq_node_processed_total{queue="Orders"}') == "2.0")
        assert figure(at, "lowq_node_ready") == "1.0"
        assert figure(at, 'lowq_node_shards{queue="Orders"}') == "3.0"
        assert figure(at, "lowq_node_threads") == "5.0"
        process.until(lambda: is_told(at, 0, "ok\n"))

        server.kill()
        process.until(lambda: says(at, "/readyz", 503, "Redis has not answered for"))
        assert says(at, "/livez", 200, "ok")
        assert figure(at, "lowq_node_ready") == "0.0"
        process.until(lambda: is_told(at, 1, "lowq: Redis has not answered for"))
        process.until(lambda: is_told(at, 0, "ok\n", "--live"))
        server.start()
        process.until(lambda: says(at, "/readyz", 200))

        process.process.send_signal(signal.SIGTSTP)
        process.until(lambda: says(at, "/readyz", 503, "the node is quiet: it takes no jobs"))
        assert says(at, "/livez", 200)
        assert process.ends_after(signal.SIGTERM) == 0
        code, text = ready(at)
        assert (code, "no node answers at" in text) == (1, True)


def test_a_node_that_waits_for_a_replica_to_become_a_primary_is_alive_and_not_ready(
    start: Start, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        primary, replica = (stack.enter_context(RedisServer(tmp_path / name)) for name in ("primary", "replica"))
        app = stack.enter_context(closing(lowq.Lowq(redis_url=replica.url)))
        app.client.command("REPLICAOF", "127.0.0.1", str(primary.port))
        process, at = node(start, "--redis-url", replica.url)
        process.until(lambda: says(at, "/readyz", 503, "replica"))
        assert says(at, "/livez", 200)
        app.client.command("REPLICAOF", "NO", "ONE")
        process.until(lambda: says(at, "/readyz", 200))


def test_a_node_gets_new_code_with_its_health_at_the_same_address(cli: Cli, start: Start) -> None:
    at = f"127.0.0.1:{free_port()}"
    process = start("run", "app.py", environment={"LOWQ_REDIS_URL": cli.url, "LOWQ_HEALTH": at})
    process.until(lambda: ready(at)[0] == 0)
    process.process.send_signal(signal.SIGHUP)
    process.until(lambda: "with new code" in process.err)
    process.until(lambda: ready(at)[0] == 0)
    assert "LOWQ_HEALTH" not in process.err


def test_a_frozen_process_and_one_whose_handler_holds_the_gil_do_not_answer(cli: Cli, start: Start) -> None:
    process, at = node(start, "--redis-url", cli.url, app=HOLDS)
    process.until(lambda: says(at, "/readyz", 200))
    process.process.send_signal(signal.SIGSTOP)
    assert ready(at, "--live")[0] == 1
    process.process.send_signal(signal.SIGCONT)
    process.until(lambda: says(at, "/readyz", 200))
    cli.app.queue("Orders", 2).push({"id": "gil"})
    process.until((process.folder / "holds").exists)
    assert ready(at, "--live")[0] == 1


def test_a_supervisor_serves_the_health_of_its_processes_together(cli: Cli, start: Start) -> None:
    process, at = node(start, "--redis-url", cli.url, "--processes", "2")
    process.until(lambda: says(at, "/metrics", 200, 'lowq_node_threads{process="1.2"} 5.0'))
    process.until(lambda: says(at, "/readyz", 200))
    cli.push({"id": 1}, {"id": 2}, {"id": 3}, {"id": 4})
    samples = [f'lowq_node_processed_total{{process="1.{place}",queue="Orders"}}' for place in (1, 2)]
    process.until(lambda: sum(float(figure(at, name) or 0) for name in samples) == 4)
    process.process.send_signal(signal.SIGTSTP)
    process.until(lambda: says(at, "/readyz", 503, "the node is quiet"))
    assert says(at, "/livez", 200)
    assert process.ends_after(signal.SIGTERM) == 0


def test_connections_that_send_nothing_keep_no_probe_away(cli: Cli, start: Start) -> None:
    process, at = node(start, "--redis-url", cli.url)
    host, _, port = at.removeprefix("http://").rpartition(":")
    with ExitStack() as stack:
        for _ in range(63):
            stack.enter_context(socket.create_connection((host, int(port))))
        process.until(lambda: says(at, "/readyz", 200))
    with socket.create_connection((host, int(port))) as odd:
        odd.sendall(b"\x16\x03\x01 nonsense\r\n\r\n")
        assert b"400" in odd.recv(1000)
    assert says(at, "/", 404, "/livez")
    with case("an address that is in use"):
        second = start("run", "app.py", "--redis-url", cli.url, "--health", f"{host}:{port}")
        assert second.wait() == 2
        assert f"lowq: --health {host}:{port}: Address already in use; choose another address" in second.err
    no_name = f"{'x' * 64}:80"
    for address in ("x:y", no_name):
        with case(address):
            cli("run", "app.py", "--health", address, code=2)
    assert ready(no_name)[0] == 1
    assert ready("nowhere")[0] == 2


def test_clients_that_send_bit_by_bit_keep_no_probe_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowq.cli.health.REQUEST_SECONDS", 0.5)
    monkeypatch.setattr("lowq.cli.health.CONNECTIONS", 2)
    server = HealthServer("127.0.0.1", 0, lambda: Vitals(None, None))
    with ExitStack() as stack:
        server.start()
        stack.callback(server.close)
        host, _, port = server.url.removeprefix("http://").rpartition(":")
        clients = [stack.enter_context(socket.create_connection((host, int(port)))) for _ in range(2)]
        ended = set()

        def all_ended() -> bool:
            for client in clients:
                try:
                    client.sendall(b"x")
                except OSError:
                    ended.add(client)
            return len(ended) == len(clients)

        until(all_ended, "slow clients to be cut off")
        until(lambda: says(server.url, "/livez", 200, "ok"), "a probe that is answered")


def test_an_error_of_our_own_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> Vitals:
        raise ZeroDivisionError

    server = HealthServer("127.0.0.1", 0, fail)
    server.start()
    with closing(server), pytest.raises(OSError, match="closed connection"):
        get(f"{server.url}/metrics")
    until(lambda: "could not answer: ZeroDivisionError()" in caplog.text, "the log")


def test_a_maintenance_loop_that_hangs_is_not_live(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that an application's splitter does not return to."""
    monkeypatch.setattr("lowq.shards.maintenance.HANGS_SECONDS", 0.1)
    hangs, let_go = threading.Event(), threading.Event()

    class Splitter:
        def __call__(self, shards: list[Any]) -> list[list[Any]]:
            return [shards]

        def among(self, shards: list[Any], members: Any, me: str) -> list[list[Any]]:
            if hangs.is_set():
                let_go.wait(PATIENCE)
            return [shards]

    with ExitStack() as stack:
        nodes = []
        for splitter in (Splitter, None):
            app = stack.enter_context(closing(lowq.Lowq(redis_url=cli.url, lease_ttl=0.5, shutdown_timeout=0)))
            app.config.build_splitter = splitter

            @app.worker(shards_count=1)
            def orders(payloads_by_id: dict[str, list[Any]]) -> None: ...

            nodes.append(Node(app))
        first, second = nodes
        first.start()
        stack.callback(first.stop, 5.0)
        stack.callback(let_go.set)
        until(lambda: first.vitals().unready is None, "a node that is ready")
        until(lambda: first.vitals().dead is None, "word that it lives")
        hangs.set()
        second.start()
        stack.callback(second.stop, 5.0)
        dead = until(lambda: first.vitals().dead, "word that it hangs")
        assert dead is not None
        assert dead.startswith("the maintenance loop has been hanging for")
        let_go.set()
        until(lambda: first.vitals().dead is None, "word that it goes on")
