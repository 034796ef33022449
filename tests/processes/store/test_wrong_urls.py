"""URLs that are wrong, or behind which nobody answers, or somebody else than they say: each error says what is wrong
and what to do, and never a password.
"""

import asyncio
import os
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest
import redis
from click.testing import CliRunner

import lowq
from lowq.cli import main
from lowq.errors import ConfigError, LowqError, RedisNotReady, RedisRefused, RedisUnavailable
from tests.processes.support import ROOT, answered, until
from tests.redis_cluster import RedisCluster
from tests.redis_server import RedisServer
from tests.rows import case
from tests.tls import Tls
from tests.waiting import PATIENCE

SECRET = "hunter2"
#: A port that nobody listens on: nobody may without being root.
NOBODY = 1


def push(url: str) -> int:
    """Pushes a job to each shard, as a producer that has just started."""
    with closing(lowq.Lowq(redis_url=url, pool_timeout=PATIENCE, push_timeout=PATIENCE)) as app:
        return app.queue("Orders", 5).push([{"id": number} for number in range(20)])


def refused_push(url: str, kind: type[LowqError]) -> str:
    """What a push that must fail says. No part of the error shows a password."""
    with pytest.raises(kind) as caught:
        push(url)
    assert type(caught.value) is kind
    assert SECRET not in "".join(traceback.format_exception(caught.value))
    return str(caught.value)


def test_a_url_that_is_wrong_is_shown_with_what_is_wrong() -> None:
    unknown = "has an option that lowq doesn't know: "
    rows = [
        ("redis://host:port/0", "(LOWQ_REDIS_URL): the port must be a number, not 'port'"),
        ("redis://host/orders", "the database must be a number, not 'orders'"),
        ("rediss://host/0;", "the database must be a number, not '0;'"),
        ("redis://host/1/2", "the database must be a number, not '1/2'"),
        ("redis://[::1", "Invalid IPv6 URL"),
        ("redis://:hunter2@..:1", "redis_url='redis://..:1'"),
        ("redis://:hun/ter2@host:1/0", "in a password write %2F for /"),
        ("redis+cluster://:hun?ter2@h:1", "%3F for ?"),
        ("redis+sentinel://:hun#ter2@h:1/main", "%23 for #"),
        ("redis://host/0?foo=1", "it has an option that redis-py doesn't know: 'foo'"),
        ("redis://host/0?socket_timeout=soon", "socket_timeout"),
        ("redis://host/0?decode_responses=true", "decode_responses"),
        ("redis+sentinel://host:26379", "it names no service; write redis+sentinel://host:port/service/db"),
        ("redis+sentinel://host:26379/main/first", "the database must be a number, not 'first'"),
        ("redis+cluster://host:port", "the port must be a number, not 'port'"),
        ("redis://h/0?protocol=4", "is unknown; write protocol=3 for RESP3"),
        ("redis+cluster://h:1?db=3", unknown + "db; here it takes protocol"),
        ("rediss+cluster://h:1?ssl_validate_ocsp=true", unknown + "ssl_validate_ocsp"),
        ("rediss+cluster://h:1?ssl_cert_reqs=some", "redis-py refuses one of its options: "),
        ("rediss+sentinel://h/main?ssl_ca_cert=", unknown + "ssl_ca_cert; here it takes protocol, ssl_ca_certs,"),
        ("rediss+sentinel://h/main?ssl_password=a@hunter2", "in an option write %40 for @"),
    ]
    for url, said in rows:
        with case(url):
            text = refused_push(url, ConfigError)
            assert text.startswith("redis_url='")
            assert said in text
            assert "hun" not in text
            assert "ter2" not in text


def test_nobody_is_there(tmp_path: Path) -> None:
    at = f"127.0.0.1:{NOBODY}"
    rows = [
        (f"rediss://:{SECRET}@{at}", "does not answer: Error 111"),
        (f"unix://{tmp_path}/redis.sock", "does not answer"),
        ("redis://nobody.invalid", "does not answer: Error -2 connecting to nobody.invalid:6379"),
        (f"redis+cluster://:{SECRET}@{at},{at}", "does not answer: Error 111"),
        (f"redis+sentinel://:{SECRET}@{at}/main", "No master found for 'main'"),
        ("redis+sentinel://nobody.invalid/main", "none of the sentinels does (Error -2 connecting to nobody.invalid"),
    ]
    for url, said in rows:
        with case(url):
            text = refused_push(url, RedisUnavailable)
            assert text.startswith(f"Redis at {url.replace(f':{SECRET}@', '')}")
            assert said in text


def test_a_script_that_pushes_without_redis_is_told_what_to_do() -> None:
    said = (
        f"Redis at redis://127.0.0.1:{NOBODY}/0 does not answer: Error 111 connecting to 127.0.0.1:{NOBODY}. "
        "Connection refused."
    )
    what_to_do = "start Redis, or say where it is with redis_url or LOWQ_REDIS_URL"
    with closing(lowq.Lowq(redis_url=f"redis://:{SECRET}@127.0.0.1:{NOBODY}/0")) as app:
        queue = app.queue("Orders", 1)
        for call in (lambda: queue.push(1), lambda: asyncio.run(queue.apush(1)), queue.stats, app.nodes):
            with pytest.raises(RedisUnavailable) as caught:
                call()
            assert (str(caught.value), caught.value.__notes__) == (said, [what_to_do])


def test_an_outage_is_not_taken_for_a_wrong_url() -> None:
    with RedisServer() as server, closing(lowq.Lowq(redis_url=server.url, push_timeout=0.5)) as app:
        queue = app.queue("Orders", 1)
        until(lambda: answered(lambda: queue.push(1) == 1), "a push: a busy machine may need longer")
        server.kill()
        with pytest.raises(RedisUnavailable) as caught:
            queue.push(2)
        assert not hasattr(caught.value, "__notes__")


def test_the_command_line_names_the_url_and_where_it_comes_from() -> None:
    url = f"redis+cluster://127.0.0.1:{NOBODY}"
    environment = {**os.environ, "LOWQ_REDIS_URL": url, "ORDERS_HISTORY": os.devnull}
    command = [sys.executable, "-m", "lowq", "run", "-r", "tests.processes.app_orders:app"]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    shown = CliRunner(env=environment).invoke(main, ["nodes"])
    for code, text in ((ended.returncode, ended.stderr), (shown.exit_code, shown.stderr)):
        assert code == 1
        assert f"lowq: Redis at {url} does not answer: Error 111" in text
        assert "LOWQ_REDIS_URL" in text
        assert "object at 0x" not in text


def test_clusters_and_single_servers_are_told_apart(cluster: RedisCluster, redis_server: RedisServer) -> None:
    """One server of a cluster also where it is a replica."""
    for server in (cluster.servers[0], cluster.servers[-1]):
        with case(server.port):
            said = "the server is part of a cluster; use redis+cluster:// in redis_url"
            assert said in refused_push(server.url, RedisRefused)
            shown = CliRunner().invoke(main, ["nodes", "--redis-url", server.url])
            assert (shown.exit_code, said in shown.stderr) == (1, True)
    single = f"redis+cluster://127.0.0.1:{redis_server.port}"
    assert "is no cluster: use redis:// for a single server" in refused_push(single, RedisRefused)
    with RedisServer(cluster_enabled="yes") as server:
        said = refused_push(f"redis+cluster://127.0.0.1:{server.port}", RedisUnavailable)
    assert "serves any slot; make the cluster first: redis-cli --cluster create" in said


def test_some_servers_of_the_url_are_enough(cluster: RedisCluster) -> None:
    url = f"redis+cluster://nobody.invalid:1,127.0.0.1:{NOBODY},127.0.0.1:{cluster.servers[-1].port}"
    assert push(url) == 20


def test_a_replica_is_no_primary() -> None:
    with RedisServer(replicaof=f"127.0.0.1 {NOBODY}") as replica:
        error = refused_push(replica.url, RedisNotReady)
    assert error.startswith(f"Redis at redis://127.0.0.1:{replica.port}/0 is a read-only replica; ")
    assert "redis_url must name the primary" in error


def test_users_passwords_and_rights() -> None:
    with RedisServer(requirepass=SECRET) as server, redis.Redis.from_url(server.url) as client:
        client.execute_command("ACL SETUSER strange on >a/b?c#d@e:f ~* &* +@all")
        client.execute_command(f"ACL SETUSER reader on >{SECRET} ~* &* +@read +info +ping")
        client.execute_command(f"ACL SETUSER caller reset on >{SECRET} ~* &* +@scripting +info")
        at = f"127.0.0.1:{server.port}"
        for login in (f":{SECRET}", f"default:{SECRET}", "strange:a%2Fb%3Fc%23d%40e%3Af"):
            with case(login):
                assert push(f"redis://{login}@{at}") == 20
        refused = f"Redis at redis://{at}/0 refused the user or password: "
        rows = [
            (f":{SECRET}3@", refused),
            ("", f"{refused}Authentication required"),
            (f"reader:{SECRET}@", "does not allow what lowq needs"),
            (f"caller:{SECRET}@", "does not allow what lowq needs (docs/operations.md#rights)"),
        ]
        for login, said in rows:
            with case(login):
                assert said in refused_push(f"redis://{login}{at}/0", RedisRefused)


def test_a_password_or_a_database_that_the_server_does_not_have(redis_server: RedisServer) -> None:
    at = f"127.0.0.1:{redis_server.port}"
    said = "has no password: leave it out of redis_url"
    assert said in refused_push(f"redis://:{SECRET}@{at}", RedisRefused)
    assert "has no such database" in refused_push(f"redis://{at}/99", RedisRefused)


def test_a_certificate_that_nobody_vouches_for(tmp_path: Path) -> None:
    tls = Tls(tmp_path)
    with tls.server() as server:
        at = f"127.0.0.1:{tls.port(server)}"
        for url in (f"rediss://{at}", f"rediss+cluster://{at}", f"rediss+sentinel://{at}/main"):
            with case(url):
                assert "certificate verify failed" in refused_push(url, RedisUnavailable)


# --- somebody else, or a server that is too old ------------------------------------------------------------------


class FakeServer:
    """Speaks just enough of Redis's protocol: `answer` gets a command's words and gives the raw reply."""

    def __init__(self, answer: Callable[[list[bytes]], bytes]) -> None:
        self._answer = answer
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self) -> "FakeServer":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(PATIENCE)

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection, connection.makefile("rb") as incoming:
                try:
                    while count := incoming.readline():  # *2, and for each word $3 and the word
                        words = [incoming.read(int(incoming.readline()[1:]) + 2)[:-2] for _ in range(int(count[1:]))]
                        connection.sendall(self._answer(words))
                except ConnectionError:
                    pass


def test_a_web_server_or_a_redis_that_is_too_old_is_named() -> None:
    with FakeServer(lambda _: b"HTTP/1.1 400 Bad Request\r\n\r\n") as server:
        assert f"what answers at {server.url} is no Redis" in refused_push(server.url, RedisRefused)

    def answer(command: list[bytes]) -> bytes:
        if command[0] == b"INFO":
            info = b"# Server\r\nredis_version:6.2.14\r\nuptime_in_seconds:5\r\n"
            return b"$%d\r\n%s\r\n" % (len(info), info)
        if command[0] == b"SCRIPT":  # as such a server says to the flags line of a newer script
            return b"-ERR Error compiling script (new function): user_script:1: unexpected symbol near '#'\r\n"
        return b"+OK\r\n"

    with FakeServer(answer) as server:
        said = refused_push(server.url, RedisRefused)
        assert "the server is Redis 6.2.14; lowq needs Redis 7.0 or Valkey 7.2" in said


def test_a_server_that_hangs_up_may_be_no_redis() -> None:
    with hanging_up(greeting=b"") as port:
        said = refused_first_call(f"redis://127.0.0.1:{port}/0")
    assert "before any answer; it may be no Redis" in said


def test_a_server_without_tls_is_named() -> None:
    """It hangs up, answers in plain text, or waits for more, as Redis does."""
    for greeting in (b"", b"-ERR unknown command\r\n"):
        with case(greeting), hanging_up(greeting=greeting) as port:
            said = refused_first_call(f"rediss://127.0.0.1:{port}/0")
            assert said.startswith(f"what listens at rediss://127.0.0.1:{port}/0 may speak no TLS (")
            assert said.endswith("; try redis://")
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the system takes connections, and nobody answers
        url = f"rediss://127.0.0.1:{silent.getsockname()[1]}/0?socket_timeout=0.2"
        assert "may speak no TLS" in refused_first_call(url)


def refused_first_call(url: str) -> str:
    """What the first command of a process says."""
    with closing(lowq.Lowq(redis_url=url)) as app, pytest.raises(RedisUnavailable) as caught:
        app.client.command("PING")
    return str(caught.value)


@contextmanager
def hanging_up(greeting: bytes) -> Iterator[int]:
    """The port of a server that reads a little, says the greeting and closes each connection."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                with connection, suppress(OSError):
                    connection.recv(2**16)
                    connection.sendall(greeting)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listening.getsockname()[1]
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join(PATIENCE)
