"""What lowq may be told to connect with: TLS, RESP3, redis-py without hiredis. Each goes through the same story."""

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis

import lowq
from lowq.errors import ConfigError
from lowq.store import Client
from lowq.store.replies import as_resp2
from tests.integration.support import ROOT, Rig, until
from tests.redis_server import RedisServer
from tests.sentinel import Sentinel
from tests.tls import Tls
from tests.waiting import PATIENCE

#: A folder whose hiredis can't be imported.
WITHOUT_HIREDIS = ROOT / "tests" / "without_hiredis"


@dataclass(frozen=True)
class Kind:
    """How processes connect to a server."""

    url: str
    variables: dict[str, str]


@pytest.fixture(params=["resp3", "tls", "tls-resp3", "without-hiredis", "without-hiredis-resp3"])
def kind(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Kind]:
    words = request.param
    variables = {"PYTHONPATH": f"{WITHOUT_HIREDIS}{os.pathsep}{ROOT}"} if "without-hiredis" in words else {}
    tls = Tls(tmp_path / "tls") if "tls" in words else None
    with RedisServer() if tls is None else tls.server() as server:
        url = server.url.partition("?")[0] if tls is None else tls.url(server)
        if "resp3" in words:
            url += "&protocol=3" if "?" in url else "?protocol=3"
        yield Kind(url, variables)


@pytest.fixture
def rig(kind: Kind, tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(kind.url, tmp_path, **kind.variables, LOWQ_POLL_INTERVAL=3600, ORDERS_MAX_RETRIES=1, ORDERS_BATCH=3)
    yield rig
    rig.close()


def lowq_says(rig: Rig, *words: str, code: int = 0) -> str:
    """What a verb of the command line prints."""
    done = subprocess.run(
        [sys.executable, "-m", "lowq", *words],
        cwd=ROOT, env=rig.environment({}), capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("asynchronous", ["", "1"], ids=["threads", "event-loop"])
def test_producers_nodes_wake_ups_and_the_command_line(rig: Rig, asynchronous: str) -> None:
    rig.settings["ORDERS_ASYNC"] = asynchronous
    node = rig.node().holds_all()
    for number in range(20):
        rig.push(number, 1)  # a node that only polls would not see them for an hour
    rig.push("bad", 1, do="raise")
    rig.push("later", 1, delay=0.2)
    rig.done("later", 1)
    until(lambda: rig.buried() == {("bad", 1)}, "burial of what fails each time")
    finish = rig.produce(1, ids=10, versions=2, rounds=1, first=1000)
    finish()
    rig.drained()
    before = len(rig.performs("bad"))
    assert lowq_says(rig, "kick", "Orders", "bad").strip() != ""
    until(lambda: len(rig.performs("bad")) == before + 2, "two more performs of what fails each time")
    until(lambda: rig.buried() == {("bad", 1)}, "its second burial")
    assert '"severity": "error"' not in lowq_says(rig, "doctor", "--json", code=1)  # it warns of the server's settings
    assert json.loads(lowq_says(rig, "stats", "Orders", "--json"))
    assert node.stop() == 0
    assert rig.report().problems == []


def test_the_protocol_is_the_one_of_the_url(rig: Rig) -> None:
    rig.push("a", 1)
    rig.node().holds_all()
    rig.done("a", 1)
    mine, wanted = rig.client.client_id(), "3" if "protocol=3" in rig.url else "2"

    def spoken() -> set[str]:
        # Of those that have sent something of lowq's: every connection begins with RESP2.
        others = [client for client in rig.client.client_list() if int(client["id"]) != mine]
        return {client["resp"] for client in others if client["cmd"] in ("evalsha", "subscribe")}

    until(lambda: spoken() == {wanted}, f"connections that speak RESP{wanted}, and no others")


def test_without_hiredis_there_is_none() -> None:
    asked = (
        "import lowq, lowq.store.pool as pool, redis.utils as utils; print(pool.pack.__name__, utils.HIREDIS_AVAILABLE)"
    )
    environment = os.environ | {"PYTHONPATH": f"{WITHOUT_HIREDIS}{os.pathsep}{ROOT}"}
    done = subprocess.run([sys.executable, "-c", asked], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["pack_slowly", "False"]


#: The plain commands that lowq sends besides scripts, and others whose replies differ between the protocols.
COMMANDS: list[tuple[str | int, ...]] = [
    ("ZRANGE", "zset", 0, -1, "WITHSCORES"),
    ("ZRANGE", "zset", 0, -1),
    ("ZRANGE", "none", 0, -1, "WITHSCORES"),
    ("ZSCORE", "zset", "half"),
    ("ZMSCORE", "zset", "one", "none", "endless"),
    ("ZCARD", "zset"),
    ("HGETALL", "hash"),
    ("HGETALL", "none"),
    ("HGET", "hash", "a"),
    ("HGET", "hash", "none"),
    ("HMGET", "hash", "a", "none"),
    ("HKEYS", "hash"),
    ("HLEN", "hash"),
    ("SMEMBERS", "set"),
    ("SISMEMBER", "set", "a"),
    ("LRANGE", "list", 0, -1),
    ("TYPE", "zset"),
    ("OBJECT", "ENCODING", "zset"),
    ("MEMORY", "USAGE", "none"),
    ("CONFIG", "GET", "appendfsync"),
    ("SCRIPT", "EXISTS", "0" * 40),
    ("SCAN", 0, "COUNT", 1000),
    ("EVAL", "return {redis.call('HGETALL', 'hash'), redis.call('ZSCORE', 'zset', 'half'), false, true, {}}", 0),
]


@pytest.fixture
def filled(redis_url: str) -> str:
    url = redis_url.partition("?")[0]
    with redis.Redis.from_url(url) as client:
        client.zadd("zset", {"one": 1, "half": 0.5, "endless": float("inf"), "large": 2.0**53})
        client.hset("hash", mapping={"a": "1", "b": ""})
        client.sadd("set", "a")
        client.rpush("list", "a", "b")
    return url


@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: f"{words[0]}-{words[1]}")
def test_replies_are_the_same_with_both_protocols(filled: str, command: tuple[str | int, ...]) -> None:
    replies = []
    for protocol in (2, 3):
        client = Client(f"{filled}?protocol={protocol}", size=1, timeout=1)
        replies.append(client.command(*command))
        client.close()
    assert replies[0] == replies[1]


def test_what_servers_say_of_themselves_is_the_same_with_both_protocols(filled: str) -> None:
    for protocol in (2, 3):
        app = lowq.Lowq(redis_url=f"{filled}?protocol={protocol}")
        assert app.redis_info().version.split()[0] in ("Redis", "Valkey")
        app.close()


@pytest.mark.parametrize(
    ("reply", "plain"),
    [
        ({b"a": b"1", b"b": [b"2"]}, [b"a", b"1", b"b", [b"2"]]),
        ({b"a"}, [b"a"]),
        ([[b"a", 1.0], [b"b", 2.5]], [b"a", b"1", b"b", b"2.5"]),
        ([[b"a", b"1"], [b"b", b"2"]], [[b"a", b"1"], [b"b", b"2"]]),
        ([], []),
        (True, 1),
        (float("-inf"), b"-inf"),
        ("txt", b"txt"),
        (None, None),
    ],
)
def test_a_reply_of_resp3_as_resp2_has_it(reply: Any, plain: Any) -> None:
    assert as_resp2(reply) == plain


def test_a_name_server_that_does_not_answer_keeps_no_known_server_away(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    look_up: Any = socket.getaddrinfo
    answers = threading.Event()
    answers.set()

    def getaddrinfo(host: str, *more: Any, flags: int = 0, **named: Any) -> Any:
        if host == "redis.test":
            if flags == socket.AI_NUMERICHOST:
                raise socket.gaierror(socket.EAI_NONAME, "no address")
            answers.wait(PATIENCE)
            host = "127.0.0.1"
        return look_up(host, *more, flags=flags, **named)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    app = lowq.Lowq(redis_url=f"redis://redis.test:{redis_server.port}", push_timeout=PATIENCE / 2)
    queue = app.queue("Orders", 1)
    queue.push({"id": 1})
    answers.clear()
    with redis.Redis(port=redis_server.port) as client:
        client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    queue.push({"id": 2})
    assert not answers.is_set()
    answers.set()
    app.close()


class TestUrls:
    @pytest.mark.parametrize(
        "url",
        [
            "redis://h/0?protocol=4",
            "unix:///s?protocol=1",
            "redis+cluster://h:1,h:2?protocol=4",
            "redis+sentinel://h/main/0?protocol=",
        ],
    )
    def test_a_protocol_that_there_is_not(self, url: str) -> None:
        with pytest.raises(ConfigError, match=r"protocol=.* is unknown; write protocol=3 for RESP3"):
            Client(url, size=1, timeout=1)

    @pytest.mark.parametrize("url", ["redis+cluster://h:1?db=3", "redis+sentinel://h/main?socket_timeout=3"])
    def test_another_option_where_there_is_none(self, url: str) -> None:
        with pytest.raises(ConfigError, match=r"has an option that lowq doesn't know: \w+; here it takes protocol"):
            Client(url, size=1, timeout=1)

    @pytest.mark.parametrize("url", ["rediss+cluster://h:1", "rediss+sentinel://h/main"])
    @pytest.mark.parametrize(
        ("option", "said"),
        [
            ("db=3", "lowq doesn't know: db; here it takes protocol, ssl_ca_certs,"),
            ("ssl_validate_ocsp=true", "lowq doesn't know: ssl_validate_ocsp"),  # of a URL redis-py takes it for no
            ("ssl_ca_cert=", "lowq doesn't know: ssl_ca_cert;"),
            ("ssl_cert_reqs=some", "redis-py refuses one of its options: .*some"),
            ("ssl_password=a@hunter2", "in an option write %40 for @"),
            ("ssl_ca_certs=a#b", "%23 for # in an option"),
        ],
    )
    def test_options_of_tls(self, url: str, option: str, said: str) -> None:
        with pytest.raises(ConfigError, match=said) as caught:
            Client(f"{url}?{option}", size=1, timeout=1)
        assert "hunter2" not in str(caught.value)

    @pytest.mark.parametrize("url", ["redis+cluster://:a?b@h:1", "redis+sentinel://:a?b@h:1/main"])
    def test_a_question_mark_in_a_password(self, url: str) -> None:
        with pytest.raises(ConfigError, match=r"in a password write .* %3F for"):
            Client(url, size=1, timeout=1)

    def test_a_cluster_with_resp3(self, cluster_url: str) -> None:
        assert pushed_with_resp3(cluster_url) == {3}

    def test_sentinels_with_resp3(self, tmp_path: Path) -> None:
        with RedisServer() as primary, Sentinel(tmp_path / "s", primary, watches=False) as sentinel:
            assert pushed_with_resp3(sentinel.url) == {3}


def pushed_with_resp3(url: str) -> set[int]:
    """Pushes jobs of several shards, looks at them, and returns the protocols of the connections."""
    app = lowq.Lowq(redis_url=f"{url}?protocol=3")
    queue = app.queue("Orders", 5)
    queue.push([{"id": number} for number in range(50)])
    assert queue.stats().length == 50
    assert len(app.queues()) == 1
    protocols = {connection.protocol for pool in app.client._pools().values() for connection in pool._idle}
    app.close()
    return protocols
