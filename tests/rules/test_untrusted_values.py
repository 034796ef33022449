"""A bad value in Redis costs only its own row: every page, every address of the API and every verb still works.

Each row plants one thing that no lowq writes, next to what is in order, and everything is asked.
"""

import json
import logging
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from click.testing import CliRunner
from starlette.testclient import TestClient

import lowq_web
from lowq import Lowq
from lowq.cli import main
from lowq.codec import load_payload
from lowq.shards.lease import Lease
from lowq.shards.shard import Shard
from lowq.store.keys import audit_key, history_key, nodes_key, queues_key, shard_prefix, tasks_key
from tests.rows import case
from tests.tiers import real_redis_often

PREFIX = shard_prefix("lowq", "Orders", 0)
QUEUES, NODES, AUDIT, HISTORY = queues_key("lowq"), nodes_key("lowq"), audit_key("lowq"), history_key("lowq", "Orders")
TASK = {"who": "bob", "queue": "Orders", "action": "kick", "filter": {}, "owner": "here:1"}
DEEP = b"[" * 100_000 + b"]" * 100_000
HUGE = b"9" * 4000

PAGES = [
    "/", "/?span=day", "/nodes", "/audit", "/tasks", "/metrics", "/search?id=good", "/search?id=bad", "/queues/Orders",
    *(f"/queues/Orders/{page}" for page in ("shards", "times", "job?id=good", "job?id=flying")),
    *(f"/queues/Orders?state={state}" for state in ("due", "scheduled", "retrying", "taken", "morgue")),
    *(f"/queues/Orders?{query}" for query in ("order_by=id", "order_by=retry_count&reverse=1", "match=*o*")),
]  # fmt: skip
API = [
    "stats", "overview", "rates", "queues", "nodes", "audit", "redis", "tasks", "queues/Orders",
    *(f"queues/Orders/{what}" for what in ("rates", "perform-times", "shards", "statistics", "times", "slowest")),
    *(f"queues/Orders/jobs{query}" for query in ("", "?state=taken", "?order_by=retry_count", "?state=morgue")),
    *(f"queues/Orders/job?id={job_id}" for job_id in ("good", "flying")),
]  # fmt: skip
VERBS = [
    "stats", "stats Orders", "nodes", "shards Orders", "jobs Orders", "jobs Orders --order-by retry_count",
    "jobs Orders --state taken", "jobs Orders --state morgue", "jobs Orders --match *o*", "peek Orders good flying",
    "why Orders good flying", "rates Orders", "times Orders", "audit", "statistics", "statistics Orders",
]  # fmt: skip


class Site:
    """An emptied store with a queue: a job that is due, one in flight and one that is buried. There is a node, and a
    word in the audit log.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.app = Lowq(redis_url=url)
        self.do = self.app.client.command
        self.do("FLUSHALL")  # of the row before
        queue = self.app.queue("Orders", 1)
        queue.push({"id": "flying", "payload": {"n": 1}})
        self.shard = Shard(
            self.app.client, "lowq", "Orders", 0, shards_count=1, nonce="abcdef", load_payload=load_payload
        )
        assert isinstance(self.shard.lease.acquire(600), Lease)
        assert [job.id for job in self.shard.in_flight.take(1).jobs] == ["flying"]
        queue.push([{"id": "good", "payload": {"n": 2}}, {"id": "dead"}])
        queue.bury("dead")
        self.app.note("alice", "kick", "Orders", 3)
        self.node(b"fine:1:abcdef", b'{"host": "fine", "performing": [null]}')

    def node(self, name: bytes, details: bytes, head: bytes | None = None) -> None:
        """A heartbeat."""
        head = head or f"{time.time():f} 600".encode()
        self.do("HSET", NODES, name, head + b" 2 {}" + details)

    def node_says(self, **details: Any) -> None:
        self.node(b"bad:1:fedcba", json.dumps(details).encode())

    def registered(self, name: bytes, entry: bytes) -> object:
        return self.do("HSET", QUEUES, name, entry)

    def noted(self, text: bytes) -> None:
        self.do("LPUSH", AUDIT, text)

    def says(self, **entry: Any) -> None:
        good = {"who": "bob", "action": "kick", "target": "Orders", "count": 1, "detail": {}}
        self.noted(b"1800000000 " + json.dumps(good | entry).encode())

    def task(self, facts: str, head: str = "done 1800000000 1800000000 1800000000 1 1 0") -> None:
        self.do("HSET", tasks_key("lowq"), "bad", f"{head} {len(facts)} {facts}")

    def recorded(self, written: str) -> None:
        """A stretch of the last hour."""
        number = int(time.time() // 10) - 3
        self.do("HSET", HISTORY, f"10:{number % 360}", written.format(number))

    def waiting(self, payload: bytes, score: bytes = b"1", due: str = "1900000000") -> object:
        """The job "bad"."""
        self.do("ZADD", PREFIX + "due", due, "bad")
        return self.do("HSET", PREFIX + "payloads", "bad", score + b" " + payload)

    def retrying(self, retry_count: str) -> object:
        self.waiting(b"1")
        return self.do("ZADD", PREFIX + "retries", retry_count, "bad")


PLANTS: dict[str, Callable[[Site], object]] = {
    "task: deep": lambda site: site.task(DEEP.decode()),
    "task: huge": lambda site: site.task("{}", f"done {HUGE.decode()} 1 1 {HUGE.decode()} 1 0"),
    "task: a queue that is none": lambda site: site.task(json.dumps({**TASK, "queue": "../x y"})),
    "task: an id that is none": lambda site: site.do("HSET", tasks_key("lowq"), b"\xff/..", b"done 1 1 1 1 1 0 2 {}"),
    "queue: deep": lambda site: site.registered(b"Bad", DEEP),
    "queue: no shards": lambda site: site.registered(b"Bad", b'{"shards_count": 0}'),
    "queue: text": lambda site: site.registered(b"Bad", b'{"shards_count": "5"}'),
    "queue: far too many": lambda site: site.registered(b"Bad", b'{"shards_count": 200000}'),
    "queue: huge": lambda site: site.registered(b"Bad", b'{"shards_count": ' + HUGE + b"}"),
    "queue: name of other bytes": lambda site: site.registered(b"\xff\xfe", b'{"shards_count": 1}'),
    "queue: name with braces": lambda site: site.registered(b"{}", b'{"shards_count": 1}'),
    "queue: name with controls": lambda site: site.registered(b"a\x00\xe2\x80\xae", b'{"shards_count": 1}'),
    "queue: option": lambda site: site.registered(
        b"Orders", b'{"shards_count": 1, "options": {"max_retry_count": NaN, "a": [[[[[[1]]]]]], "b": ' + HUGE + b"}}"
    ),
    "queue: keys of another type": lambda site: (
        site.registered(b"Bad", b'{"shards_count": 1}'),
        site.do("SET", shard_prefix("lowq", "Bad", 0) + "due", "x"),
    ),
    "meta: counters": lambda site: site.do("HSET", PREFIX + "meta", "processed", "x", "failed", "inf", "buried", "-1"),
    "meta: paused": lambda site: site.do("HSET", PREFIX + "meta", "paused", "x", "paused_by", b"\xff"),
    "meta: clock": lambda site: site.do("HSET", PREFIX + "meta", "clock", "x"),
    "lease: other bytes": lambda site: site.do("SET", PREFIX + "lease", b"\xff\xfe:" + HUGE),
    "node: garbage": lambda site: site.do("HSET", NODES, "bad", "garbage"),
    "node: name of other bytes": lambda site: site.node(b"\xff\xfe:1:fedcba", b"{}"),
    "node: deep": lambda site: site.node(b"bad:1:fedcba", b'{"shards": ' + DEEP + b"}"),
    "node: heartbeat NaN": lambda site: site.node(b"bad:1:fedcba", b"{}", b"nan 600"),
    "node: performs nonsense": lambda site: site.node_says(
        performing=[
            {"queue": 5, "shard": "x", "ids": 7, "seconds": "y"},
            {"queue": "Orders", "shard": 0, "ids": [1, None, "", "\ud800", "\udcff"], "seconds": float("inf")},
            *({"queue": name, "shard": 0, "ids": ["a"], "seconds": 1} for name in ("", "\ud800", "{}")),
        ]
    ),
    "node: shards": lambda site: site.node_says(shards={"Orders": 5, "": [1], "Other": ["x", None, -1]}),
    "node: queues": lambda site: site.node_says(queues=[1, None, "", "\ud800", ["x"]]),
    "node: times": lambda site: site.node_says(started_at=float("nan"), late=float("inf"), memory=-5, pid=1.5),
    "node: huge": lambda site: site.node(b"bad:1:fedcba", b'{"started_at": %b, "memory": %b}' % (HUGE, HUGE)),
    "audit: deep": lambda site: site.noted(b"1 " + DEEP),
    "audit: time": lambda site: site.noted(b'inf {"who": "x", "action": "kick", "target": "t"}'),
    "audit: huge": lambda site: site.noted(b'1 {"who": "x", "action": "kick", "target": "t", "count": %b}' % HUGE),
    "audit: count NaN": lambda site: site.says(count=float("nan")),
    "audit: details": lambda site: site.says(detail={"a": {"b": [float("inf")]}, "ids": [["x"], None, 1, "\ud800"]}),
    "audit: action": lambda site: site.says(action=[1]),
    "history: bytes": lambda site: site.do("HSET", HISTORY, f"10:{int(time.time() // 10 - 3) % 360}", b"\xff"),
    "history: infinite": lambda site: site.recorded("{} inf 0 1"),
    "history: absurd": lambda site: site.recorded("{} 1e308 1e308 1e308"),
    "history: huge performs": lambda site: site.do("HSET", HISTORY, "perform:0", HUGE, "perform:seconds", "nan"),
    "job: no JSON": lambda site: site.waiting(b"\xff\xfe\x00"),
    "job: deeper": lambda site: site.waiting(b'{"a":' * 900 + b"1" + b"}" * 900),
    "job: score NaN": lambda site: site.waiting(b"1", b"nan"),
    "job: neither score nor payload": lambda site: (
        site.waiting(b"1"),
        site.do("HSET", PREFIX + "payloads", "bad", "garbage"),
    ),
    "job: payloads of another type": lambda site: (
        site.waiting(b"1"),
        site.do("HDEL", PREFIX + "payloads", "bad"),
        site.do("RPUSH", PREFIX + "payloads:bad", "x"),
    ),
    "job: no payload": lambda site: site.do("ZADD", PREFIX + "due", "1900000000", "bad"),
    "job: due in ages": lambda site: site.waiting(b"1", due="1e300"),
    "job: infinite retries": lambda site: site.retrying("+inf"),
    "job: crashes": lambda site: (site.waiting(b"1"), site.do("HSET", PREFIX + "crashes", "bad", "x")),
    "job: error": lambda site: (site.retrying("1"), site.do("HSET", PREFIX + "errors", "bad", b"\xff\x00\x1b[31m")),
    "job: in flight, NaN": lambda site: site.do("HSET", PREFIX + "taken", "bad", "1 nan nan 0 nan"),
    "job: buried": lambda site: site.do("ZADD", PREFIX + "morgue", "+inf", "bad"),
    "job: id of other bytes": lambda site: site.do("ZADD", PREFIX + "due", "1900000000", b"\xff\xfe"),
    "job: long id": lambda site: site.do("ZADD", PREFIX + "due", "1900000000", b"x" * 5000),
}


#: Every fourth is in `make test`, for the pages and for the verbs another; the others are in `make test-slow`.
PLANTED = {
    kind: [
        pytest.param(list(PLANTS)[first::4], id="often"),
        *(pytest.param(list(PLANTS)[n::4], id=f"{n}", marks=pytest.mark.slow) for n in range(4) if n != first),
    ]
    for kind, first in (("pages", 0), ("verbs", 2))
}


@contextmanager
def new_site(store_url: str) -> Iterator[Site]:
    """A site in the emptied store."""
    site = Site(store_url)
    try:
        yield site
    finally:
        site.app.close()


@pytest.fixture
def site(store_url: str) -> Iterator[Site]:
    with new_site(store_url) as site:
        yield site


@pytest.mark.parametrize("planted", PLANTED["pages"])
@pytest.mark.parametrize("redact", [pytest.param((), marks=pytest.mark.slow), ("card",)])
@real_redis_often
def test_every_page_and_address_still_answers(store_url: str, planted: list[str], redact: tuple[str, ...]) -> None:
    for plant in planted:
        with case(plant), new_site(store_url) as site:
            PLANTS[plant](site)
            ask_pages(site, plant, redact)


def ask_pages(site: Site, plant: str, redact: tuple[str, ...]) -> None:
    client = TestClient(
        lowq_web.create_app(site.app, redact=list(redact) or None), base_url="http://127.0.0.1", follow_redirects=False
    )
    for path in (*PAGES, "/queues/Orders/job?id=bad", "/queues/Orders/job?id=%ff%fe"):
        if plant == "queue: keys of another type" and path.startswith("/search"):
            continue  # it asks every queue for the id, and can't say that it is not in this one
        answer = client.get(path)
        expected = (200, 303, 404) if path.endswith(("bad", "%ff%fe")) else (200, 303)
        assert answer.status_code in expected, f"{path}: {answer.status_code} {answer.text[:500]}"
        assert "The list ended early" not in answer.text, path
    assert "good" in client.get("/queues/Orders").text
    assert "fine" in client.get("/nodes").text
    assert "alice" in client.get("/audit").text
    for path in API:
        answer = client.get(f"/api/v1/{path}")
        assert answer.status_code == 200, f"{path}: {answer.status_code} {answer.text[:500]}"
        json.loads(answer.content, parse_constant=pytest.fail)


@pytest.mark.parametrize("planted", PLANTED["verbs"])
@real_redis_often
def test_every_verb_still_works(store_url: str, planted: list[str]) -> None:
    for plant in planted:
        with case(plant), new_site(store_url) as site:
            PLANTS[plant](site)
            run_verbs(site)


def run_verbs(site: Site) -> None:
    for verb in VERBS:
        for more in ((), ("--json",)):
            result = CliRunner().invoke(main, [*verb.split(), *more, "--redis-url", site.url])
            assert result.exit_code == 0, f"{verb}: {result.exit_code} {result.output[:500]} {result.exception!r}"
            if more:
                json.loads(result.stdout, parse_constant=pytest.fail)
    runner = CliRunner(env={"LOWQ_LEASE_TTL": "1"})  # what is suspicious is looked at for as long as leases last
    result = runner.invoke(main, ["doctor", "--redis-url", site.url])
    assert result.exit_code in (0, 1), f"doctor: {result.output[:500]} {result.exception!r}"
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)


def test_what_is_left_out_is_said_once(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    name = uuid.uuid4().hex.encode()  # nobody else in this process has said anything of it
    site.registered(name, b"{}")
    site.do("HSET", NODES, name, "garbage")
    site.noted(name)
    with caplog.at_level(logging.WARNING, "lowq.store"):
        for _ in range(3):
            assert [info.name for info in site.app.queues()] == ["Orders"]
            assert [node.name for node in site.app.nodes()] == ["fine:1:abcdef"]
            assert [entry.who for entry in site.app.audit()] == ["alice"]
    said = [record.args for record in caplog.records if record.name == "lowq.store"]
    assert sorted(str(args[0]) for args in said if isinstance(args, tuple)) == ["audit", "node", "queue"]


def test_figures_of_the_past_that_can_not_be_read_are_not_known(site: Site) -> None:
    site.recorded("{} x y z")
    assert all(rate.processed is None for rate in site.app.queue("Orders").rates().rates)


def test_what_a_job_says_wrong_is_not_known_of_it(site: Site) -> None:
    site.waiting(b"[" * 300 + b"]" * 300, b"x", due="+inf")
    site.do("HSET", PREFIX + "crashes", "bad", "x")
    bad = site.app.queue("Orders").peek("bad")
    assert bad is not None
    ((payload, score),) = bad.payloads
    assert payload.startswith("undecodable payload: [[[")
    assert score != score
    assert (bad.perform_at, bad.crashes, bad.state) == (None, 0, "scheduled")


def test_an_id_of_any_bytes_can_be_looked_up_and_removed(site: Site) -> None:
    """As it is shown. To push one like that is refused."""
    queue = site.app.queue("Orders")
    site.app.client.commands(
        [("ZADD", PREFIX + "due", "1900000000", b"caf\xe9"), ("HSET", PREFIX + "payloads", b"caf\xe9", "1 2")]
    )
    (shown,) = [job.id for job in queue.jobs() if job.id != "good"]
    assert shown == "caf\udce9"
    job = queue.peek(shown)
    assert job is not None
    assert job.payloads == [(2, 1.0)]
    assert queue.why(shown).reason == "not_due"
    assert queue.delete(shown).done == 1
    assert queue.peek(shown) is None
