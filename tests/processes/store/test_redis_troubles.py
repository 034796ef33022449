"""Every kind of server goes through the same story; and what a producer is told by one that goes away or is full."""

import asyncio
import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import redis

import lowq
from lowq.errors import RedisUnavailable
from lowq.testing import drain
from tests.processes.support import ROOT
from tests.redis_cluster import share_slots
from tests.redis_server import RedisServer, free_port
from tests.sentinel import Sentinel
from tests.tls import Tls
from tests.waiting import PATIENCE

SECRET = "hunter2"
#: What a server is started with, until the stack is closed; gives the URL, and where to look for keys.
Start = Callable[[ExitStack, Path], tuple[str, list[RedisServer]]]


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
        assert drain(Orders).performed == count
        assert sorted(performed, key=int) == [str(number) for number in range(count)]
        stats = Orders.queue.stats()
        assert (stats.length, stats.taken, stats.processed) == (0, 0, count)
    finally:
        app.close()


def a_unix_socket_with_a_password(stack: ExitStack, folder: Path) -> tuple[str, list[RedisServer]]:
    server = stack.enter_context(RedisServer(unixsocket=f"{folder}/r.sock", requirepass=SECRET))
    return f"unix://:{SECRET}@{folder}/r.sock", [server]


def one_server(stack: ExitStack, folder: Path) -> tuple[str, list[RedisServer]]:
    server = stack.enter_context(RedisServer())
    return server.url, [server]


def tls_of_one_server(stack: ExitStack, folder: Path) -> tuple[str, list[RedisServer]]:
    tls = Tls(folder)
    server = stack.enter_context(tls.server())
    return tls.url(server), [server]


def tls_of_a_sentinel(stack: ExitStack, folder: Path) -> tuple[str, list[RedisServer]]:
    tls = Tls(folder)
    server = stack.enter_context(tls.server())
    return stack.enter_context(Sentinel(folder / "s", server, tls, watches=False)).url, [server]


def tls_of_a_cluster(stack: ExitStack, folder: Path) -> tuple[str, list[RedisServer]]:
    tls = Tls(folder)
    options = [{"tls_port": free_port(), "cluster_port": free_port(), **tls.options} for _ in range(2)]
    made = (RedisServer(cluster_enabled="yes", tls_cluster="yes", **of_one) for of_one in options)
    first, second = servers = [stack.enter_context(server) for server in made]
    share_slots(first, second, options[1]["tls_port"], options[1]["cluster_port"])
    return f"rediss+cluster://127.0.0.1:{options[0]['tls_port']}{tls.query}", servers


@pytest.mark.parametrize(
    "start", [one_server, tls_of_one_server, a_unix_socket_with_a_password, tls_of_a_sentinel, tls_of_a_cluster]
)
def test_every_kind_of_server_also_named_valkey(start: Start, tmp_path_factory: pytest.TempPathFactory) -> None:
    with ExitStack() as stack:
        url, servers = start(stack, tmp_path_factory.mktemp("s"))  # a socket's path must be short
        push_and_perform(url)
        with closing(lowq.Lowq(redis_url=re.sub("^redis", "valkey", url))) as app:
            assert app.queue("Orders").push(1) == 1
        for server in servers:
            with redis.Redis.from_url(server.url) as client:
                assert list(client.scan_iter("lowq:v1:{Orders:*"))


def test_a_sentinel_of_several_and_the_database_of_the_url(
    redis_server: RedisServer, redis_url: str, tmp_path: Path
) -> None:
    with Sentinel(tmp_path, redis_server, watches=False) as sentinel, redis.Redis.from_url(redis_url) as client:
        at = f"127.0.0.1:1,127.0.0.1:{sentinel.port}"
        push_and_perform(f"redis+sentinel://{at}/main/2")
        assert client.dbsize() == 0
        push_and_perform(f"redis+sentinel://{at}/main/0")
        assert client.dbsize() > 0
        app = lowq.Lowq(redis_url=f"redis+sentinel://{at}/other", push_timeout=PATIENCE)
        with pytest.raises(RedisUnavailable, match="No master found for 'other'"):
            app.queue("Orders", 3).push({"id": 1})


# --- troubles ---


def test_a_child_never_shares_a_connection_of_its_parent(redis_url: str) -> None:
    # As under gunicorn --preload: the parent has pushed before it forks, and all push at the same time.
    script = """
        import json, os, sys, threading, lowq

        app = lowq.Lowq(redis_url=sys.argv[1], client_pool_size=3)
        queue = app.queue("Orders", 3)

        def produce(name):
            # Each looks at what it pushed: an answer meant for another process would show.
            for number in range(40):
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
            children.append(os.fork())
            if not children[-1]:
                sys.excepthook = lambda *error: (sys.__excepthook__(*error), os._exit(1))
                produce(f"child{child}")
                os._exit(0)
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
        timeout=2 * PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[0, 0, 0, 0], (3 + 4 + 2) * 40]
