"""Pushes that wait until a replica, or the disk, has what they wrote; and what a failover leaves of them."""

import asyncio
import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

import lowq
from lowq.errors import ConfigError, NotReplicated, PushInterrupted, RedisRefused
from lowq.push import push as pushing
from lowq.queue import Queue
from lowq.store import Client, Command, Durability, NotConfirmed, Wait
from lowq.store.keys import shard_prefix
from tests.chaos.proxy import Proxy
from tests.processes.support import until
from tests.redis_cluster import RedisCluster
from tests.redis_server import RedisServer
from tests.sentinel import Sentinel
from tests.waiting import PATIENCE, auntil

MakeQueue = Callable[..., Queue]


class Pair:
    """A primary, and a replica that gets everything through a proxy."""

    def __init__(self, folder: Path, proxy: Proxy, primary: RedisServer) -> None:
        self.proxy = proxy
        self.primary = primary
        self.replica = RedisServer(folder / "replica", replicaof=f"127.0.0.1 {proxy.port}")
        self.replica.start()
        self.ask: Any = redis.Redis.from_url(primary.url, decode_responses=True)
        self.in_step()

    def in_step(self) -> None:
        self.proxy.heal()
        until(lambda: self.ask.info("replication").get("slave0", {}).get("state") == "online", "replica")
        until(lambda: self.ask.wait(1, 100) == 1, "replica that confirms")

    def is_waited_for(self, count: int = 1) -> bool:
        """Whether so many clients wait for a confirmation."""
        return int(self.ask.info("clients")["blocked_clients"]) == count

    def fail_over(self) -> str:
        """The primary dies, what is on its way is lost, and the replica is the next primary. Returns its URL."""
        self.proxy.hold()
        self.primary.kill()
        self.proxy.cut(refuse=True)
        with redis.Redis.from_url(self.replica.url) as client:
            client.replicaof("NO", "ONE")
        return self.replica.url

    def close(self) -> None:
        self.proxy.heal()
        self.ask.close()
        self.replica.close()


@contextmanager
def new_pair(folder: Path) -> Iterator[Pair]:
    with (
        RedisServer(folder / "primary", repl_diskless_sync_delay=0) as primary,
        Proxy(primary.port) as proxy,
        closing(Pair(folder, proxy, primary)) as pair,
    ):
        yield pair


@pytest.fixture(scope="module")
def shared_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with new_pair(tmp_path_factory.mktemp("pair")) as pair:
        yield pair


@pytest.fixture
def pair(shared_pair: Pair) -> Iterator[Pair]:
    """An empty one that no test breaks: held replies are let go afterwards."""
    shared_pair.ask.flushall()
    yield shared_pair
    shared_pair.in_step()


@pytest.fixture
def mortal_pair(tmp_path: Path) -> Iterator[Pair]:
    """One whose primary may die."""
    with new_pair(tmp_path) as pair:
        yield pair


@pytest.fixture
def make_queue() -> Iterator[MakeQueue]:
    apps: list[lowq.Lowq] = []

    def make(url: str, durability: Durability = "replicated", shards_count: int = 2, **settings: Any) -> Queue:
        app = lowq.Lowq(redis_url=url, **settings)
        apps.append(app)
        return app.queue("Durable", shards_count=shards_count, durability=durability)

    yield make
    for app in apps:
        app.close()


def in_background(work: Callable[[], Any]) -> "Future[Any]":
    executor = ThreadPoolExecutor(1)
    future = executor.submit(work)
    executor.shutdown(wait=False)
    return future


def ids_at(url: str) -> set[str]:
    with redis.Redis.from_url(url, decode_responses=True) as client:
        return {job_id for key in client.keys("lowq:v1:{Durable:*}:due") for job_id in client.zrange(key, 0, -1)}


def accepted(queue: Queue, job_id: int, payload: Any) -> bool:
    try:
        return queue.push(job_id, payload) == 1
    except lowq.RedisUnavailable:
        return False


def payloads_of(queue: Queue, job_id: int) -> list[Any]:
    job = queue.peek(job_id)
    assert job is not None
    return [payload for payload, _ in job.payloads]


class TestReplicated:
    def test_what_returned_survives_a_failover(self, mortal_pair: Pair, make_queue: MakeQueue) -> None:
        queue = make_queue(mortal_pair.primary.url, shards_count=5, push_timeout=0.5)
        mortal_pair.proxy.delay(0.02)  # without the wait, what was answered in such a time would be lost
        returned: list[str] = []
        stop = threading.Event()

        def produce(name: int) -> None:
            for number in itertools.count():
                if stop.is_set():
                    return
                ids = [f"{name}-{number}-{part}" for part in range(1 if name else 20)]
                try:
                    queue.push([{"id": job_id} for job_id in ids])
                except lowq.PushError:  # the primary has died; or a busy machine needs longer than a push waits
                    continue
                returned.extend(ids)

        threads = [threading.Thread(target=produce, args=(name,)) for name in range(4)]
        for thread in threads:
            thread.start()
        until(lambda: len(returned) >= 100, "pushes that returned")
        url = mortal_pair.fail_over()
        stop.set()
        for thread in threads:
            thread.join()
        assert set(returned) - ids_at(url) == set()

    def test_a_push_may_ask_for_it(self, pair: Pair, make_queue: MakeQueue) -> None:
        queue = make_queue(pair.primary.url, "none", durability_timeout=0.1)
        pair.proxy.hold()
        assert queue.push(1) == 1
        with pytest.raises(NotReplicated):
            queue.push(2, durability="replicated")
        with pytest.raises(NotReplicated):
            queue.put("text", durability="replicated")

        async def push() -> None:
            await queue.aput("text", durability="replicated")

        with pytest.raises(NotReplicated):
            asyncio.run(push())
        assert queue.stats().length == 4

    def test_no_replica_confirms_it_in_time(self, pair: Pair, make_queue: MakeQueue) -> None:
        queue = make_queue(pair.primary.url, durability_timeout=0.1)
        pair.proxy.hold()
        with pytest.raises(NotReplicated) as caught:
            queue.push(1, {"version": 1})
        error = caught.value
        assert (error.accepted, error.unsafe, list(error.rest)) == (1, [{"id": 1, "payload": {"version": 1}}], [])
        assert (error.replicas, error.durability) == (0, "replicated")
        assert "0 of 1 replica confirmed them within 0.1 s" in str(error)
        assert payloads_of(queue, 1) == [{"version": 1}]
        pair.proxy.heal()
        assert make_queue(pair.primary.url, durability_timeout=60.0).push(error.unsafe) == 1
        assert payloads_of(queue, 1) == [{"version": 1}]

    def test_nothing_is_sent_behind_a_chunk_that_is_not_confirmed(
        self, pair: Pair, make_queue: MakeQueue, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(pushing, "CHUNK_JOBS", 10)
        queue = make_queue(pair.primary.url, durability_timeout=0.1)
        taken: list[int] = []

        def jobs() -> Iterator[dict[str, Any]]:
            for number in range(40):
                taken.append(number)
                if number == 10:
                    pair.proxy.hold()
                yield {"id": number}

        with pytest.raises(NotReplicated) as caught:
            queue.push(jobs())
        error = caught.value
        unsafe = [job["id"] for job in error.unsafe]
        assert error.accepted == max(unsafe) + 1 <= 20
        assert set(unsafe) <= set(range(20))
        assert [job["id"] for job in error.rest] == list(range(error.accepted, 40))
        assert queue.stats().length == error.accepted

    def test_coroutines_wait_together_and_keep_nobody_else_waiting(self, pair: Pair, make_queue: MakeQueue) -> None:
        queue = make_queue(pair.primary.url, durability_timeout=60.0)
        impatient = make_queue(pair.primary.url, durability_timeout=0.1)

        async def push() -> None:
            for _ in range(3):  # the loop's own connection is made after the second write
                assert await asyncio.gather(*(queue.apush(number) for number in range(50))) == [1] * 50
            before = pair.ask.info("commandstats")["cmdstat_wait"]["calls"]
            assert await asyncio.gather(*(queue.apush(number) for number in range(50))) == [1] * 50
            assert pair.ask.info("commandstats")["cmdstat_wait"]["calls"] - before == 2  # the first one goes at once
            pair.proxy.hold()
            waiting = [asyncio.ensure_future(queue.apush(number)) for number in range(100, 103)]
            await asyncio.sleep(0)
            assert await queue.apush(200, durability="none") == 1
            assert not any(task.done() for task in waiting)
            pair.proxy.heal()
            assert await asyncio.gather(*waiting) == [1] * 3
            pair.proxy.hold()
            for _ in range(4):
                pushes = (impatient.apush(number) for number in range(100, 103))
                results = await asyncio.gather(*pushes, return_exceptions=True)
                assert [type(result) for result in results] == [NotReplicated] * 3
                unsafe: list[Any] = [result.unsafe for result in results]  # type: ignore[union-attr]
                assert unsafe == [[{"id": number, "payload": ""}] for number in range(100, 103)]

        asyncio.run(push())
        assert queue.stats().length == 54

    def test_pushes_of_an_id_keep_their_order_whatever_they_wait_for(self, pair: Pair, make_queue: MakeQueue) -> None:
        queue = make_queue(pair.primary.url, shards_count=1, durability_timeout=60.0)
        durabilities: list[Durability] = ["replicated", "none"]

        async def push() -> None:
            for start in range(0, 200, 20):  # with the loop's own connections, and while there are none
                pushes = (queue.apush(42, n, durability=durabilities[n % 3 % 2]) for n in range(start, start + 20))
                assert await asyncio.gather(*pushes) == [1] * 20

        asyncio.run(push())
        assert payloads_of(queue, 42) == list(range(200))

    def test_a_cancelled_one_under_way_is_not_overtaken_by_one_that_waits_for_less(
        self, pair: Pair, make_queue: MakeQueue
    ) -> None:
        queue = make_queue(pair.primary.url, shards_count=1, durability_timeout=60.0)
        queue.push(0)

        async def push() -> None:
            pair.proxy.hold()
            cancelled = asyncio.create_task(queue.apush(42, 1))
            await auntil(pair.is_waited_for, "push that waits")
            cancelled.cancel()
            await asyncio.wait([cancelled])
            later = asyncio.create_task(queue.apush(42, 2, durability="none"))
            await asyncio.sleep(0)
            assert await queue.apush(7, durability="none") == 1
            assert not later.done()
            pair.proxy.heal()
            assert await later == 1

        asyncio.run(push())
        assert payloads_of(queue, 42) == [1, 2]

    def test_nor_does_a_reshard_change_the_order_of_an_id(self, pair: Pair, make_queue: MakeQueue) -> None:
        queue = make_queue(pair.primary.url, shards_count=1, durability_timeout=60.0)
        mover = make_queue(pair.primary.url, shards_count=1)
        durabilities: list[Durability] = ["replicated", "none"]

        async def push(start: int) -> None:
            pushes = (queue.apush(42, n, durability=durabilities[n % 2]) for n in range(start, start + 20))
            assert await asyncio.gather(*pushes) == [1] * 20

        for start, count in (0, 2), (20, 3), (40, 4):
            queue.push(0)
            mover.reshard(count)
            asyncio.run(push(start))
        assert payloads_of(mover, 42) == list(range(60))

    def test_those_who_wait_hold_no_connection_that_others_need(self, pair: Pair, make_queue: MakeQueue) -> None:
        queue = make_queue(pair.primary.url, client_pool_size=1, durability_timeout=60.0)
        queue.push(0)
        pair.proxy.hold()
        single = in_background(lambda: queue.push(1))
        bulk = in_background(lambda: queue.push({"id": number} for number in range(1000)))
        until(lambda: pair.is_waited_for(2), "pushes that wait")
        assert queue.push(2000, durability="none") == 1
        assert not single.done()
        pair.proxy.heal()
        assert (single.result(), bulk.result()) == (1, 1000)

    def test_a_connection_that_breaks_while_it_waits_and_scripts_that_are_gone(
        self, pair: Pair, make_queue: MakeQueue
    ) -> None:
        queue = make_queue(pair.primary.url, shards_count=1, durability_timeout=60.0)
        queue.push(0)
        pair.proxy.hold()
        push = in_background(lambda: queue.push(1, {"version": 1}))
        for number in range(3):  # of the second repeat nothing is new to Redis but that it came
            if number:
                pair.ask.script_flush()
                pair.ask.client_kill_filter(_type="normal", skipme=True)
            until(lambda: pair.is_waited_for() or push.done(), "push that waits")
            assert not push.done()
        assert pair.ask.zcard(shard_prefix("lowq", "Durable", 0) + "repeated") == 1
        pair.proxy.heal()
        assert push.result() == 1
        assert payloads_of(queue, 1) == [{"version": 1}]

    def test_the_primary_dies_while_it_is_waited_for(
        self, mortal_pair: Pair, make_queue: MakeQueue, tmp_path: Path
    ) -> None:
        with (
            RedisServer(tmp_path / "next") as other,
            Sentinel(tmp_path / "sentinel", mortal_pair.primary, watches=False) as sentinel,
        ):
            until(lambda: sentinel.replicas() == 1, "sentinel that knows the replica")
            queue = make_queue(sentinel.url, durability_timeout=60.0)
            queue.push(0)
            with redis.Redis(port=other.port) as client:
                client.replicaof("127.0.0.1", mortal_pair.replica.port)
            mortal_pair.proxy.hold()
            push = in_background(lambda: queue.push(1, {"version": 1}))
            until(mortal_pair.is_waited_for, "push that waits")
            mortal_pair.primary.kill()
            mortal_pair.proxy.cut(refuse=True)  # the replica never had it
            sentinel.watch()
            error: Any = push.exception()
            # Somebody may be the next primary by now.
            if error is not None:
                assert isinstance(error, PushInterrupted)
                assert (error.accepted, error.unsafe, error.rest) == (0, [], [{"id": 1, "payload": {"version": 1}}])
            until(lambda: sentinel.primary_port() == mortal_pair.replica.port, "next primary")
            until(lambda: accepted(queue, 1, {"version": 1}), "push to the next primary, and its replica")
            with redis.Redis.from_url(other.url) as client:
                client.replicaof("NO", "ONE")
            assert ids_at(other.url) == {"0", "1"}


def test_each_primary_of_a_cluster_confirms_its_own(cluster: RedisCluster, make_queue: MakeQueue) -> None:
    with_replica, *others = cluster.primaries()
    cluster.replicated()
    for replica in cluster.servers:
        if replica not in cluster.primaries() and cluster.ask(replica, "INFO", "replication")["master_port"] in {
            server.port for server in others
        }:
            replica.kill()
    queue = make_queue(cluster.url, shards_count=12, durability_timeout=0.2)
    queue.push([{"id": number} for number in range(200)], durability="none")
    safe = ids_at(with_replica.url)
    assert 0 < len(safe) < 200

    def push() -> set[str]:
        with pytest.raises(NotReplicated) as caught:
            queue.push([{"id": number} for number in range(200)])
        assert caught.value.accepted == 200
        return {str(number) for number in range(200)} - {str(job["id"]) for job in caught.value.unsafe}

    async def apush() -> set[str]:
        pushes = (queue.apush(number) for number in range(200))
        results = await asyncio.gather(*pushes, return_exceptions=True)
        assert {type(result) for result in results} <= {int, NotReplicated}
        return {str(number) for number, result in enumerate(results) if result == 1}

    for confirmed in push, lambda: asyncio.run(apush()):
        # A replica that has no time confirms a part, or nothing.
        found: set[str] = set()
        while found != safe:
            found = confirmed()
            assert found <= safe


def has_waitaof(server: RedisServer) -> bool:
    with redis.Redis.from_url(server.url) as client:
        major, minor, *_ = client.info("server")["redis_version"].split(".")
        return (int(major), int(minor)) >= (7, 2)


@pytest.fixture
def needs_waitaof(redis_server: RedisServer) -> None:
    if not has_waitaof(redis_server):
        pytest.skip("the server is older than 7.2 and has no WAITAOF")


class TestFsynced:
    @pytest.mark.usefixtures("needs_waitaof")
    def test_it_is_on_the_disk_or_the_error_says_why_not(self, tmp_path: Path, make_queue: MakeQueue) -> None:
        with RedisServer(tmp_path / "redis", appendonly="yes", appendfsync="everysec") as server:
            queue = make_queue(server.url, "fsynced")
            assert queue.push(1) == 1
            assert queue.push({"id": number} for number in range(2, 100)) == 98
            server.kill()
            server.start()
            assert ids_at(server.url) == {str(number) for number in range(1, 100)}
            impatient = make_queue(server.url, "fsynced", durability_timeout=0.1)
            with redis.Redis.from_url(server.url) as client:
                client.config_set("appendfsync", "no")
                with pytest.raises(NotReplicated, match="not written to the server's disk within") as caught:
                    impatient.push(100)
                assert (caught.value.accepted, caught.value.durability) == (1, "fsynced")
                client.config_set("appendonly", "no")
            with pytest.raises(NotReplicated, match="appendonly is disabled"):
                queue.push(2)

    def test_a_server_that_can_not_is_refused_before_anything_is_written(
        self, redis_server: RedisServer, redis_url: str, make_queue: MakeQueue
    ) -> None:
        queue = make_queue(redis_url, "fsynced")
        why = "append-only file" if has_waitaof(redis_server) else "WAITAOF, which comes with Redis 7.2"
        with pytest.raises(RedisRefused, match=why):
            queue.push(1)
        with pytest.raises(RedisRefused, match="so nothing was written"):
            asyncio.run(queue.apush(1))
        with pytest.raises(RedisRefused, match="so nothing was written"):
            queue.push({"id": number} for number in range(200))
        assert queue.push(2, durability="none") == 1
        assert ids_at(redis_url) == {"2"}


def test_a_confirmation_may_take_longer_than_a_reply(redis_url: str) -> None:
    """A server that waits for a replica, as it is told, is none that does not answer."""
    with closing(Client(redis_url, size=1, timeout=PATIENCE, socket_timeout=1.0)) as client:

        def unconfirmed() -> bool:
            (reply,) = client.start([Command("any", "SET", "any", "value")], wait=Wait("replicated", 1.5))()
            return isinstance(reply, NotConfirmed)  # a server that stalls does not answer

        until(unconfirmed, "a write that none confirms")


def test_a_store_in_memory_is_refused() -> None:
    app = lowq.Lowq(redis_url="memory://")
    queue = app.queue("Durable", shards_count=1, durability="replicated")
    with pytest.raises(ConfigError, match="in the memory of this process"):
        queue.push(1)
    assert queue.push(1, durability="none") == 1
    with pytest.raises(ConfigError, match="must be one of 'none', 'replicated', 'fsynced'"):
        queue.push(1, durability="safe")  # type: ignore[call-overload]
    app.close()


def test_what_is_interrupted_says_what_else_is_not_safe(
    pair: Pair, make_queue: MakeQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make_queue(pair.primary.url, shards_count=2, durability_timeout=0.1)
    start = Client.start

    def start_one_in_vain(self: Client, calls: Any, **options: Any) -> Callable[[], list[Any]]:
        if options.get("wait") is None:
            return start(self, calls, **options)
        away, unsafe = lowq.RedisUnavailable("away"), NotConfirmed(1, options["wait"], 0)
        return lambda: [unsafe if call.key == shard_prefix("lowq", "Durable", 0) else away for call in calls]

    monkeypatch.setattr(Client, "start", start_one_in_vain)
    with pytest.raises(PushInterrupted) as caught:
        queue.push([{"id": number} for number in range(20)])
    error = caught.value
    assert error.accepted == len(error.unsafe) > 0
    assert len(error.unsafe) + len(list(error.rest)) == 20
