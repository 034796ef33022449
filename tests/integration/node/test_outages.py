"""Redis restarted, paused, its scripts flushed, connections cut: under load, with nothing lost and nobody charged."""

import signal
import time
from collections.abc import Callable

import pytest

import lowq
from tests.checker import Report
from tests.contract.thread_rig import ThreadRig
from tests.integration.conftest import MakeRig
from tests.integration.support import NEVER, TTL, NodeProcess, Rig, until
from tests.redis_server import RedisServer
from tests.tiers import often


def problems(report: Report) -> list[str]:
    """All but this: what was finished, and not acknowledged when Redis went away, may come again."""
    return [problem for problem in report.problems if problem not in report.excess]


def load(rig: Rig) -> Callable[[], None]:
    """Two producers that go on until the function is called."""
    return rig.produce(2, ids=30, versions=3, rounds=0, pause=0.1)


def wait(seconds: float) -> None:
    """Lets an outage last."""
    ends_at = time.monotonic() + seconds
    until(lambda: time.monotonic() > ends_at, "end of the outage")


def every_outage_ends(node: NodeProcess) -> bool:
    """Whether each has its lines in the log: away, waiting until its data is loaded, or both; and back."""
    began = len(node.lines("trying until it is back")) + len(node.lines("waiting until it can"))
    return len(node.lines("Redis is back")) <= began <= 2 * len(node.lines("Redis is back"))


def outages(node: NodeProcess) -> tuple[int, int]:
    """How many have begun, and have ended. On a busy machine an answer may come so late that it is one, too."""
    return len(node.lines("trying until it is back")), len(node.lines("Redis is back"))


def is_away(node: NodeProcess) -> bool:
    begun, ended = outages(node)
    return begun > ended


def says_once(nodes: list[NodeProcess], seconds: float) -> None:
    """While Redis is away for so long, each of them says so once, whoever notices, and not that it is back."""
    for node in nodes:
        until(lambda node=node: is_away(node), "a node that says that Redis is away")  # type: ignore[misc]  # a default binds it
    before = [outages(node) for node in nodes]
    wait(seconds)
    assert [outages(node) for node in nodes] == before
    assert [begun - ended for begun, ended in before] == [1] * len(nodes)


def each_ended(node: NodeProcess) -> bool:
    """Whether each outage was said to begin once at most, to be one of a Redis that is not ready, too, and to end."""
    begun, ended = outages(node)
    return max(begun, len(node.lines("waiting until it can"))) <= ended and every_outage_ends(node)


# --- small disturbances ---


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        pytest.param("SCRIPT FLUSH", marks=pytest.mark.slow),
        "CLIENT KILL TYPE normal",
        pytest.param("SCRIPT FLUSH SYNC", marks=pytest.mark.slow),
        pytest.param("CLIENT KILL TYPE pubsub", marks=pytest.mark.slow),
    ],
)
def test_small_disturbances_under_load_lose_nothing(make_rig: MakeRig, command: str) -> None:
    rig = make_rig(ORDERS_WORK=0.001, LOWQ_POLL_INTERVAL=NEVER)
    node = rig.node().holds_all()
    finished = load(rig)
    for number in range(1, 9):
        rig.performed(number * 100)
        rig.client.execute_command(*command.split())
    finished()
    rig.drained()
    # Wake-ups work as before.
    rig.push("afterwards", 1)
    rig.done("afterwards", 1)
    assert node.stop() == 0
    assert problems(rig.report()) == []
    assert rig.merged("crashes") == {}
    assert every_outage_ends(node)


def test_a_subscription_that_was_cut_while_idle_is_made_anew(make_rig: MakeRig) -> None:
    rig = make_rig(LOWQ_POLL_INTERVAL=NEVER)
    node = rig.node().holds_all()
    channel = f"{rig.prefix(0)}wake"
    until(lambda: rig.client.pubsub_shardnumsub(channel)[0][1] == 1, "subscription")
    rig.client.client_kill_filter(_type="pubsub")
    rig.push("a", 1)  # nobody listens just now
    rig.done("a", 1)
    until(lambda: rig.client.pubsub_shardnumsub(channel)[0][1] == 1, "new subscription")
    rig.client.spublish(channel, "no message of lowq's")
    rig.push("a", 2)
    rig.done("a", 2)
    assert node.stop() == 0


# --- outages ---


@pytest.mark.parametrize("nodes", often([1, 2], [2]))
def test_redis_away_for_longer_than_the_lease_loses_nothing_and_charges_nobody(
    make_rig: MakeRig, own_server: RedisServer, nodes: int
) -> None:
    # A single crash would bury a job.
    rig = make_rig(own_server.url, ORDERS_WORK=0.001, ORDERS_BATCH=3, ORDERS_MAX_CRASHES=1)
    node = rig.node().holds_all()
    standby = [rig.node(ORDERS_SPLITTER="all").stands_by() for _ in range(nodes - 1)]
    finished = load(rig)
    rig.performed(200)
    rig.push("slow", 1, do="sleep", for_=2 * TTL)
    rig.begun("slow", 1)
    own_server.stop()
    says_once([node, *standby], TTL * 1.5)
    own_server.start()
    finished()
    rig.done("slow", 1)
    rig.drained()
    assert rig.buried() == set()
    assert rig.merged("crashes") == {}
    report = rig.report()
    assert problems(report) == []
    if nodes == 1:
        assert report.fenced == []
        assert len({perform.fence for perform in rig.performs() if perform.shard == 0}) == 1  # resumed
    for one in [node, *standby]:
        until(lambda one=one: each_ended(one), "a node that says that Redis is back")  # type: ignore[misc]  # a default binds it
        assert one.stop() == 0
    assert rig.of_shards("lease") == {}


def test_redis_killed_and_restarted_at_once_loses_nothing(make_rig: MakeRig, own_server: RedisServer) -> None:
    rig = make_rig(own_server.url, ORDERS_WORK=0.001, ORDERS_MAX_CRASHES=1)
    node = rig.node().holds_all()
    finished = load(rig)
    for number in range(1, 4):
        rig.performed(number * 200)
        own_server.kill()
        own_server.start()
    finished()
    rig.drained()
    assert node.stop() == 0
    report = rig.report()
    assert problems(report) == []
    assert report.fenced == []
    assert rig.buried() == set()
    # Each kill is noticed by each of five threads, the maintenance loop and the listener once, at most.
    assert every_outage_ends(node)
    assert len(node.lines("Redis is back")) <= 3 * 7


@pytest.mark.parametrize("seconds", [pytest.param(TTL * 0.8, marks=pytest.mark.slow), TTL * 2.5])
def test_redis_that_hangs_for_a_while_loses_nothing(make_rig: MakeRig, own_server: RedisServer, seconds: float) -> None:
    rig = make_rig(own_server.url, ORDERS_WORK=0.001, ORDERS_MAX_CRASHES=1, LOWQ_POLL_INTERVAL=NEVER)
    node = rig.node().holds_all()
    finished = load(rig)
    rig.performed(100)
    own_server.pause()
    before, _ = outages(node)
    wait(seconds)
    meanwhile, _ = outages(node)
    own_server.cont()
    finished()
    rig.drained()
    until(lambda: each_ended(node), "a node that says that Redis is back")  # before it stops
    assert node.stop() == 0
    report = rig.report()
    assert problems(report) == []
    assert report.fenced == []
    assert rig.buried() == set()
    assert meanwhile - before <= 1


def test_a_node_waits_quietly_for_redis_and_goes_on_soon(make_rig: MakeRig, own_server: RedisServer) -> None:
    rig = make_rig(own_server.url, ORDERS_SHARDS=20, LOWQ_POLL_INTERVAL=NEVER)
    node = rig.node().holds_all()
    for job_id in range(100):  # due while Redis is away, on all shards
        rig.push(job_id, 1, delay=1.0)
    own_server.kill()
    says_once([node], TTL * 2.5)
    own_server.start()
    rig.drained()
    until(lambda: each_ended(node), "a node that says that Redis is back")
    assert problems(rig.report()) == []
    assert rig.merged("crashes") == {}


@pytest.mark.slow
def test_a_node_that_waits_for_redis_uses_little_processor_time(make_rig: MakeRig, own_server: RedisServer) -> None:
    node = make_rig(own_server.url, ORDERS_SHARDS=20).node().holds_all()
    own_server.kill()
    node.says("does not answer")
    wait(TTL)
    used = node.processor_seconds()
    wait(3.0)
    assert node.processor_seconds() - used < 0.9


def test_redis_that_lost_its_data_is_worked_on_as_before(make_rig: MakeRig, own_server: RedisServer) -> None:
    rig = make_rig(own_server.url, LOWQ_POLL_INTERVAL=NEVER)
    node = rig.node().holds_all()
    rig.push("a", 1)
    rig.done("a", 1)
    rig.drained()
    rig.client.flushall()
    node.holds_all()
    rig.push("b", 1)
    rig.done("b", 1)
    fences = [perform.fence for perform in rig.performs()]
    assert fences == sorted(fences)
    assert node.stop() == 0
    assert problems(rig.report()) == []


# --- stopping meanwhile ---


def test_a_node_stops_while_redis_is_away(make_rig: MakeRig, own_server: RedisServer) -> None:
    rig = make_rig(own_server.url, LOWQ_SHUTDOWN_TIMEOUT=1)
    node = rig.node().holds_all()
    own_server.kill()
    node.says("does not answer")
    assert node.stop() == 0


def test_a_node_that_stops_while_redis_is_away_tells_it_what_finished(
    make_rig: MakeRig, own_server: RedisServer
) -> None:
    rig = make_rig(own_server.url, LOWQ_LEASE_TTL=NEVER)
    node = rig.node().holds_all()
    rig.push("a", 1, do="sleep", for_=0.3)
    rig.begun("a", 1)
    own_server.kill()
    rig.done("a", 1)
    node.signal(signal.SIGTERM)
    node.says(" stops")
    own_server.start()
    assert node.wait() == 0
    assert rig.of_shards("taken") == {}
    assert rig.of_shards("due") == {}


# --- handlers that push ---


def test_a_handler_whose_push_finds_no_redis_is_performed_again_when_it_is_back_and_not_charged(
    own_server: RedisServer,
) -> None:
    app = lowq.Lowq(redis_url=own_server.url)
    found: list[lowq.LowqError | None] = []

    def start_again() -> None:  # from the main thread, as the server ends with the thread that started it
        until(lambda: rig.broker.outage.seconds, "outage that the thread has noticed")
        own_server.start()

    @app.worker(shards_count=1)
    class Orders(lowq.Worker[str]):
        def perform(self, payloads_by_id: dict[str, list[str]]) -> None:
            if not found:
                own_server.stop()
            else:
                rig.dispatcher.close()
            try:
                app.queue("Mail", shards_count=1).push({"id": 1})
            except lowq.RedisUnavailable as error:
                found.append(error)
                raise
            found.append(None)

        def retry_in(self, retry_count: int) -> float:
            return 3600.0

    Orders.perform_async({"id": 1})
    rig = ThreadRig(app, Orders)
    rig.run(meanwhile=start_again)
    assert isinstance(found[0], lowq.RedisUnavailable)
    assert found[1:] == [None]
    stats = Orders.queue.stats()
    assert (stats.processed, stats.failed, stats.length, stats.taken) == (1, 0, 0, 0)
    assert app.queue("Mail").stats().length == 1
    app.close()
