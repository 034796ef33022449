"""What a producer is told when Redis is not there, not the right one, or not willing; and every kind of URL."""

import asyncio
import json
import socket
import subprocess
import sys
import textwrap
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

import lowq
import lowq.testing
from lowq.admin import tasks
from lowq.errors import ConfigError, LowqError, PushError, RedisFull, RedisNotReady, RedisRefused, RedisUnavailable
from lowq.sharding import shard_of
from lowq.store import Call, Client
from lowq.store.keys import shard_prefix, tasks_key
from tests.integration.support import answered
from tests.redis_cluster import share_slots
from tests.redis_server import RedisServer, free_port
from tests.sentinel import Sentinel
from tests.tls import Tls
from tests.waiting import PATIENCE, until

ROOT = Path(__file__).parents[3]
SECRET = "hunter2"


def push(url: str) -> int:
    """Pushes one job, as a producer that has just started."""
    app = lowq.Lowq(redis_url=url, pool_timeout=1)
    try:
        return app.queue("Orders", 3).push({"id": 1})
    finally:
        app.close()


def refused_push(url: str, kind: type[LowqError]) -> str:
    """What a push that must fail says. No part of the error shows a password."""
    with pytest.raises(kind) as caught:
        push(url)
    assert type(caught.value) is kind
    assert SECRET not in "".join(traceback.format_exception(caught.value))
    return str(caught.value)


def push_and_perform(url: str, count: int = 200) -> None:
    """Pushes jobs over several shards, at once, from threads and from coroutines; performs them, and finds nothing
    left.
    """
    app = lowq.Lowq(redis_url=url)
    performed: list[str] = []

    @app.worker(shards_count=7, batch_size=5)
    class Orders(lowq.Worker[Any]):
        def perform(self, payloads_by_id: dict[str, list[Any]]) -> None:
            performed.extend(payloads_by_id)

    try:
        alone, each = count // 2, count // 4
        assert Orders.perform_async({"id": number, "payload": number} for number in range(alone)) == alone
        with ThreadPoolExecutor(8) as pool:
            pushes = pool.map(Orders.perform_async, [{"id": number} for number in range(alone, alone + each)])
            assert list(pushes) == [1] * each

        async def produce() -> list[int]:
            first = [await Orders.aperform_async({"id": count - number}) for number in (1, 2, 3)]
            coming = [Orders.aperform_async({"id": number}) for number in range(alone + each, count - 3)]
            return first + await asyncio.gather(*coming)

        assert asyncio.run(produce()) == [1] * each
        stats = Orders.queue.stats()
        assert (stats.length, stats.shards_count) == (count, 7)
        assert lowq.testing.drain(Orders).performed == count
        assert sorted(performed, key=int) == [str(number) for number in range(count)]
        stats = Orders.queue.stats()
        assert (stats.length, stats.taken, stats.processed) == (0, 0, count)
    finally:
        app.close()


def plain_client(url: str) -> "redis.Redis":
    return redis.Redis.from_url(url, decode_responses=True, retry=Retry(NoBackoff(), 0))


@pytest.fixture
def unused_port() -> Iterator[int]:
    with socket.socket() as bound:  # and not listening: nobody else can
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


# --- not there ---


class TestNotThere:
    def test_no_server(self, unused_port: int) -> None:
        said = refused_push(f"redis://127.0.0.1:{unused_port}/0", RedisUnavailable)
        assert said.startswith(f"Redis at redis://127.0.0.1:{unused_port}/0 does not answer: ")
        assert "refused" in said

    def test_no_such_host(self) -> None:
        assert "redis://no-such-host.invalid does not answer" in refused_push(
            "redis://no-such-host.invalid", RedisUnavailable
        )

    def test_no_socket(self, tmp_path: Path) -> None:
        url = f"unix://{tmp_path}/redis.sock"
        assert f"Redis at {url} does not answer" in refused_push(url, RedisUnavailable)

    @pytest.mark.parametrize("scheme", ["rediss", "redis+cluster"])
    def test_other_kinds_of_urls(self, scheme: str, unused_port: int) -> None:
        url = f"{scheme}://:{SECRET}@127.0.0.1:{unused_port}"
        assert f"{scheme}://127.0.0.1:{unused_port} does not answer" in refused_push(url, RedisUnavailable)

    def test_no_sentinel(self, unused_port: int) -> None:
        said = refused_push(f"redis+sentinel://:{SECRET}@127.0.0.1:{unused_port}/main", RedisUnavailable)
        assert "/main does not answer" in said
        assert "No master found for 'main'" in said

    def test_a_server_that_comes_back_is_used_again(self) -> None:
        with RedisServer() as server:
            app = lowq.Lowq(redis_url=server.url)
            queue = app.queue("Orders", 3)
            queue.push({"id": 1})
            server.stop()
            with pytest.raises(RedisUnavailable):
                queue.push({"id": 2})
            with pytest.raises(RedisUnavailable):
                queue.stats()
            server.start()
            assert queue.push({"id": 3}) == 1
            app.close()


# --- the wrong URL ---


class TestWrongUrl:
    @pytest.mark.parametrize(
        ("url", "said"),
        [
            ("redis://host:port/0", "Port could not be cast"),
            ("redis://host:99999", "Port out of range"),
            ("redis://[::1", "Invalid IPv6 URL"),
            ("redis://:hunter2@..:1", "redis_url='redis://..:1'"),
            ("redis://:hun/ter2@host:1/0", "in a password write %2F for /"),
            ("redis://:hun?ter2@host:1/0", "%3F for ?"),
            ("redis://:hun#ter2@host:1/0", "%23 for #"),
            ("redis://host/0?foo=1", "foo"),
            ("redis://host/0?socket_timeout=soon", "socket_timeout"),
            ("redis://host/0?decode_responses=true", "decode_responses"),
            ("redis+sentinel://host:26379", "it names no service; write redis+sentinel://host:port/service/db"),
            ("redis+sentinel://host:26379/main/first", "first"),
            ("redis+sentinel://host:port/main", "port"),
            ("redis+cluster://host:port", "port"),
        ],
    )
    def test_it_is_shown_with_what_is_wrong(self, url: str, said: str) -> None:
        text = refused_push(url, ConfigError)
        assert text.startswith("redis_url='redis")
        assert said in text
        assert "hun" not in text
        assert "ter2" not in text

    def test_a_web_server_is_no_redis(self) -> None:
        with FakeServer(lambda _: b"HTTP/1.1 400 Bad Request\r\n\r\n") as server:
            assert f"what answers at {server.url} is no Redis" in refused_push(server.url, RedisRefused)

    def test_a_database_that_the_server_does_not_have(self, redis_server: RedisServer) -> None:
        url = redis_server.url.removesuffix("/0") + "/99"
        assert "DB index is out of range" in refused_push(url, RedisRefused)

    def test_a_cluster_that_is_none(self, redis_server: RedisServer) -> None:
        url = f"redis+cluster://127.0.0.1:{redis_server.port}"
        assert "cluster support disabled" in refused_push(url, RedisRefused)

    def test_redis_pys_own_options_in_a_url_change_nothing_that_lowq_relies_on(self, redis_url: str) -> None:
        push_and_perform(f"{redis_url}?protocol=3&max_connections=2&socket_timeout=3")


# --- password and rights ---


@pytest.fixture(scope="module")
def locked_server() -> Iterator[RedisServer]:
    """A server with a password."""
    with RedisServer(requirepass=SECRET) as server:
        yield server


class TestPasswords:
    def test_the_right_one(self, locked_server: RedisServer) -> None:
        assert push(f"redis://:{SECRET}@127.0.0.1:{locked_server.port}") == 1
        assert push(f"redis://default:{SECRET}@127.0.0.1:{locked_server.port}") == 1

    def test_a_wrong_one(self, locked_server: RedisServer) -> None:
        said = refused_push(f"redis://:{SECRET}3@127.0.0.1:{locked_server.port}/0", RedisRefused)
        assert said.startswith(f"Redis at redis://127.0.0.1:{locked_server.port}/0 refused the user or password: ")

    def test_none_where_one_is_needed(self, locked_server: RedisServer) -> None:
        assert "refused the user or password: Authentication required" in refused_push(
            f"redis://127.0.0.1:{locked_server.port}", RedisRefused
        )

    def test_one_where_none_is_set(self, redis_server: RedisServer) -> None:
        said = refused_push(f"redis://:{SECRET}@127.0.0.1:{redis_server.port}", RedisRefused)
        assert "refused the user or password" in said

    def test_a_password_with_any_characters_when_they_are_escaped(self, locked_server: RedisServer) -> None:
        client = plain_client(locked_server.url)
        client.execute_command("ACL SETUSER strange on >a/b?c#d@e:f ~* &* +@all")
        assert push(f"redis://strange:a%2Fb%3Fc%23d%40e%3Af@127.0.0.1:{locked_server.port}") == 1
        client.close()

    def test_a_user_who_may_not_run_scripts(self, locked_server: RedisServer) -> None:
        client = plain_client(locked_server.url)
        client.execute_command(f"ACL SETUSER reader on >{SECRET} ~* &* +@read +info +ping")
        said = refused_push(f"redis://reader:{SECRET}@127.0.0.1:{locked_server.port}", RedisRefused)
        assert "does not allow what lowq needs" in said
        assert "script" in said
        client.close()

    def test_a_user_who_may_run_scripts_but_not_what_they_do(self, locked_server: RedisServer) -> None:
        client = plain_client(locked_server.url)
        client.execute_command(f"ACL SETUSER caller reset on >{SECRET} ~* &* +@scripting +info")
        said = refused_push(f"redis://caller:{SECRET}@127.0.0.1:{locked_server.port}", RedisRefused)
        assert "does not allow what lowq needs (docs/rights.md)" in said
        client.close()


# --- a server that can't or won't ---


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
            with connection:
                self._talk(connection)

    def _talk(self, connection: socket.socket) -> None:
        with connection.makefile("rb") as incoming:
            try:
                while count := incoming.readline():  # *2, and for each word $3 and the word
                    words = [incoming.read(int(incoming.readline()[1:]) + 2)[:-2] for _ in range(int(count[1:]))]
                    connection.sendall(self._answer(words))
            except ConnectionError:
                pass


class TestTooOld:
    @pytest.mark.parametrize("version", ["6.2.14", "5.0.7", "2.8.0"])
    def test_the_version_is_named_with_the_one_that_is_needed(self, version: str) -> None:
        def answer(command: list[bytes]) -> bytes:
            if command[0] == b"INFO":
                info = f"# Server\r\nredis_version:{version}\r\nuptime_in_seconds:5\r\n".encode()
                return b"$%d\r\n%s\r\n" % (len(info), info)
            if command[0] == b"SCRIPT":  # as such a server says to the flags line of a newer script
                return b"-ERR Error compiling script (new function): user_script:1: unexpected symbol near '#'\r\n"
            return b"+OK\r\n"

        with FakeServer(answer) as server:
            said = refused_push(server.url, RedisRefused)
        assert f"the server is Redis {version}; lowq needs Redis 7.0 or Valkey 7.2" in said


class TestReadOnlyReplica:
    def test_the_error_says_to_name_the_primary(self) -> None:
        with (
            RedisServer(repl_diskless_sync_delay=0) as primary,
            RedisServer(replicaof=f"127.0.0.1 {primary.port}") as replica,
        ):
            client = plain_client(replica.url)
            until(lambda: client.info("replication")["master_link_status"] == "up")
            client.close()
            said = refused_push(replica.url, RedisNotReady)
        assert f"Redis at redis://127.0.0.1:{replica.port}/0 is a read-only replica" in said
        assert "redis_url must name the primary" in said


class TestHanging:
    def test_a_reply_that_does_not_come_in_time_is_an_outage(self) -> None:
        with RedisServer() as server:
            client = Client(server.url, size=1, timeout=1.0, socket_timeout=0.3)
            until(lambda: answered(lambda: client.command("PING")), "a connection")
            server.pause()
            (result,) = client.run_many([Call("fetch_jobs", "x:", ["", "", 1, 1])], repeats=0)
            assert isinstance(result, RedisUnavailable)
            assert str(result) == f"Redis at {server.url} does not answer: nothing was heard in time"
            client.close()


class TestFull:
    def test_pushes_are_refused_and_everything_that_drains_still_works(self) -> None:
        performed: list[str] = []
        with RedisServer(maxmemory_policy="noeviction") as server:
            app = lowq.Lowq(redis_url=server.url)

            @app.worker(shards_count=2)
            class Orders(lowq.Worker[Any]):
                def perform(self, payloads_by_id: dict[str, list[Any]]) -> None:
                    performed.extend(payloads_by_id)
                    if "fails" in payloads_by_id:
                        raise ValueError("boom")

            Orders.perform_async([{"id": "a"}, {"id": "b"}, {"id": "fails"}, {"id": "later", "delay": 3600}])
            app.client.command("CONFIG", "SET", "maxmemory", "1")
            with pytest.raises(PushError) as caught:
                Orders.perform_async([{"id": "c"}, {"id": "d"}])
            assert isinstance(caught.value.__cause__, RedisFull)
            assert "queue 'Orders': 0 payloads are in" in str(caught.value)
            assert "is full (maxmemory reached)" in str(caught.value)
            assert sorted(job["id"] for job in caught.value.rest) == ["c", "d"]

            drained = lowq.testing.drain(Orders)
            assert (drained.performed, drained.failed) == (2, 1)
            assert Orders.queue.stats().retries == 1
            assert Orders.queue.bury("later").done == 1
            assert Orders.queue.delete("later").done == 1

            app.client.command("CONFIG", "SET", "maxmemory", "0")
            assert Orders.perform_async(caught.value.rest) == 2
            assert lowq.testing.drain(Orders).performed == 2
            app.close()
        assert sorted(performed) == ["a", "b", "c", "d", "fails"]


# --- forks ---


class TestForks:
    def test_a_child_never_shares_a_connection_of_its_parent(self, redis_url: str) -> None:
        # As under gunicorn --preload: the parent has pushed before it forks, and all push at the same time.
        script = """
            import json, os, sys, threading, lowq

            app = lowq.Lowq(redis_url=sys.argv[1], client_pool_size=3)
            queue = app.queue("Orders", 3)

            def produce(name):
                # Each looks at what it pushed: an answer meant for another process would show.
                for number in range(100):
                    assert queue.push([{"id": f"{name}-{number}", "payload": [name, number]}]) == 1
                    (job,) = queue.fetch([f"{name}-{number}"]).values()
                    assert job.payloads[0][0] == [name, number]

            warm = [threading.Thread(target=produce, args=(f"warm{n}",)) for n in range(3)]
            for thread in warm:
                thread.start()
            for thread in warm:
                thread.join()
            children = []
            for child in range(4):
                pid = os.fork()
                if pid == 0:
                    try:
                        produce(f"child{child}")
                        os._exit(0)
                    except BaseException:
                        import traceback
                        traceback.print_exc()
                        os._exit(1)
                children.append(pid)
            produce("parent")
            codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
            produce("parent again")
            print(json.dumps([codes, queue.stats().length]))
        """
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script), redis_url],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout) == [[0, 0, 0, 0], (3 + 4 + 2) * 100]


# --- every kind of server ---


class TestTls:
    def test_push_and_perform(self, tmp_path: Path) -> None:
        tls = Tls(tmp_path)
        with tls.server() as server:
            push_and_perform(tls.url(server))

    def test_a_sentinel_and_its_primary(self, tmp_path: Path) -> None:
        tls = Tls(tmp_path)
        with tls.server() as server, Sentinel(tmp_path / "s", server, tls, watches=False) as sentinel:
            push_and_perform(sentinel.url)

    def test_all_primaries_of_a_cluster(self, tmp_path: Path) -> None:
        tls = Tls(tmp_path)
        options = [{"tls_port": free_port(), "cluster_port": free_port(), **tls.options} for _ in range(2)]
        first, second = (RedisServer(cluster_enabled="yes", tls_cluster="yes", **of_one) for of_one in options)
        with first, second:
            share_slots(first, second, options[1]["tls_port"], options[1]["cluster_port"])
            push_and_perform(f"rediss+cluster://127.0.0.1:{options[0]['tls_port']}{tls.query}")
            for server in first, second:
                with plain_client(server.url) as client:
                    assert list(client.scan_iter("lowq:v1:{Orders:*"))

    @pytest.mark.parametrize("url", ["rediss://{}", "rediss+cluster://{}", "rediss+sentinel://{}/main"])
    def test_a_certificate_that_nobody_vouches_for(self, url: str, tmp_path: Path) -> None:
        tls = Tls(tmp_path)
        with tls.server() as server:
            said = refused_push(url.format(f"127.0.0.1:{tls.port(server)}"), RedisUnavailable)
            assert "certificate verify failed" in said


class TestUnixSocket:
    @pytest.mark.parametrize("login", ["", f":{SECRET}@"])
    def test_push_and_perform(self, login: str, tmp_path_factory: pytest.TempPathFactory) -> None:
        folder = tmp_path_factory.mktemp("s")  # a socket's path must be short
        options: dict[str, Any] = {"unixsocket": folder / "r.sock"}
        if login:
            options["requirepass"] = SECRET
        with RedisServer(**options):
            push_and_perform(f"unix://{login}{folder}/r.sock?db=1")


@pytest.fixture(scope="module")
def sentinel(redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of a sentinel that watches the shared server under the name "main"."""
    with Sentinel(tmp_path_factory.mktemp("sentinel"), redis_server, watches=False) as sentinel:
        yield sentinel.port


class TestSentinel:
    def test_push_and_perform(self, sentinel: int, redis_url: str, unused_port: int) -> None:
        # Of several sentinels one answers.
        push_and_perform(f"redis+sentinel://127.0.0.1:{unused_port},127.0.0.1:{sentinel}/main/0")
        client = plain_client(redis_url)
        assert list(client.scan_iter("lowq:v1:{Orders:*"))
        client.close()

    def test_the_database_is_that_of_the_url(self, sentinel: int, redis_url: str) -> None:
        push_and_perform(f"redis+sentinel://127.0.0.1:{sentinel}/main/2")
        client = plain_client(redis_url)
        assert client.dbsize() == 0
        client.close()

    def test_a_service_that_it_does_not_know(self, sentinel: int) -> None:
        url = f"redis+sentinel://127.0.0.1:{sentinel}/other"
        assert "No master found for 'other'" in refused_push(url, RedisUnavailable)


@pytest.fixture(scope="module")
def cluster() -> Iterator[list[RedisServer]]:
    """Three primaries that serve all slots."""
    nodes = [RedisServer(cluster_enabled="yes", cluster_node_timeout=60_000) for _ in range(3)]
    try:
        for number, node in enumerate(nodes):
            node.start()
            with plain_client(node.url) as client:
                client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
                client.execute_command("CLUSTER", "ADDSLOTSRANGE", number * 5500, min(number * 5500 + 5499, 16383))
                client.execute_command("CLUSTER", "MEET", "127.0.0.1", nodes[0].port)
        for node in nodes:
            until(lambda node=node: knows_all_nodes(node))  # type: ignore[misc]  # node is bound
        yield nodes
    finally:
        for node in nodes:
            node.close()


def knows_all_nodes(node: RedisServer) -> bool:
    with plain_client(node.url) as client:
        state = client.execute_command("CLUSTER INFO")["cluster_state"]
        return bool(state == "ok" and len(client.execute_command("CLUSTER", "SLOTS")) == 3)


@pytest.fixture
def nodes(cluster: list[RedisServer]) -> list[RedisServer]:
    """The primaries of the cluster, emptied."""
    for node in cluster:
        with plain_client(node.url) as client:
            client.flushall()
    return cluster


class TestCluster:
    def test_push_and_perform_over_all_primaries(self, nodes: list[RedisServer]) -> None:
        push_and_perform(f"redis+cluster://127.0.0.1:{nodes[1].port},127.0.0.1:{nodes[2].port}")
        for node in nodes:
            with plain_client(node.url) as client:
                assert list(client.scan_iter("lowq:v1:{Orders:*"))

    def test_a_url_of_a_single_server_is_told_to_be_a_clusters(self, nodes: list[RedisServer]) -> None:
        said = ""
        for node in nodes:  # one of them has the registry's slot, and would refuse only later
            try:
                push(f"redis://127.0.0.1:{node.port}")
            except RedisRefused as error:
                said = str(error)
        assert "use redis+cluster://" in said

    def test_a_shard_is_followed_to_another_primary(self, nodes: list[RedisServer]) -> None:
        app = lowq.Lowq(redis_url=f"redis+cluster://127.0.0.1:{nodes[0].port}")
        performed: list[str] = []

        @app.worker(shards_count=5)
        class Moving(lowq.Worker[Any]):
            def perform(self, payloads_by_id: dict[str, list[Any]]) -> None:
                performed.extend(payloads_by_id)

        Moving.perform_async({"id": number} for number in range(50))
        prefix = shard_prefix("lowq", "Moving", shard_of(b"7", 5))
        self.move_slot_of(prefix, nodes)
        assert Moving.perform_async({"id": number} for number in range(50, 100)) == 50
        assert Moving.queue.stats().length == 100
        assert lowq.testing.drain(Moving).performed == 100
        assert len(set(performed)) == 100
        app.close()

    def test_a_task_goes_on_when_its_registry_moves_to_another_primary(self, nodes: list[RedisServer]) -> None:
        apps = [lowq.Lowq(redis_url=f"redis+cluster://127.0.0.1:{node.port}") for node in nodes[:2]]
        task = tasks.begin(apps[0], tasks.Task("one", "ann", "Orders", "kick", lowq.JobFilter(), "here:1", 0.0, 0.0))
        assert tasks.all_tasks(apps[1]) == [task]
        self.move_slot_of(tasks_key("lowq"), nodes)
        assert tasks.cancel(apps[1], "one")
        assert tasks.report(apps[0], "one", "running", 3, 7) == ("running", True)
        (found,) = tasks.all_tasks(apps[1])
        assert (found.done, found.total, found.cancelling) == (3, 7, True)
        for app in apps:
            app.close()

    @staticmethod
    def move_slot_of(key: str, nodes: list[RedisServer]) -> None:
        """Moves the slot of a key, with all that is in it, from its primary to the next one."""
        clients = [plain_client(node.url) for node in nodes]
        slot = clients[0].execute_command("CLUSTER", "KEYSLOT", key)
        source = next(number for number in range(3) if number * 5500 <= slot < (number + 1) * 5500)
        target = (source + 1) % 3
        names = [client.execute_command("CLUSTER", "MYID") for client in clients]
        clients[target].execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", names[source])
        clients[source].execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", names[target])
        keys = clients[source].execute_command("CLUSTER", "GETKEYSINSLOT", slot, 1000)
        assert keys
        arguments = ["127.0.0.1", nodes[target].port, "", 0, 5000, "KEYS", *keys]
        clients[source].execute_command("MIGRATE", *arguments)
        for number in (target, source):
            clients[number].execute_command("CLUSTER", "SETSLOT", slot, "NODE", names[target])
        for client in clients:
            client.close()
