"""Handlers that run for too long, or for ever."""

import signal
from pathlib import Path

import pytest

from tests.integration.conftest import MakeRig
from tests.integration.supervising import Supervise, write_code
from tests.integration.support import NEVER, Rig, id_of_shard, until
from tests.redis_server import RedisServer

#: Async workers have tests of their own: test_event_loop.
pytestmark = pytest.mark.threads_only

#: Seconds.
TTR = 0.5


def go(rig: Rig) -> None:
    """Lets all handlers return that wait for that."""
    Path(f"{rig.history.path}.go").touch()


# --- ttr ---


def test_past_ttr_an_id_is_performed_anew_with_a_higher_fence_and_the_late_outcome_counts_for_nothing(
    make_rig: MakeRig,
) -> None:
    rig = make_rig(ORDERS_SHARDS=1, ORDERS_TTR=TTR, LOWQ_THREADS_PER_NODE=3, LOWQ_LEASE_TTL=NEVER)
    node = rig.node().holds_all()
    rig.push("a", 1, do="wait", once=True)
    rig.begun("a", 1)
    rig.push("b", 1)
    rig.done("b", 1)
    rig.done("a", 1)
    node.says("written off and replaced")
    hung, again = rig.performs("a", 1)
    assert again.fence > hung.fence
    assert again.thread != hung.thread
    assert rig.performs("b", 1)[0].fence >= again.fence
    assert rig.merged("crashes") == {}  # forgotten with its success
    rig.push("a", 2, delay=NEVER)
    go(rig)
    until(lambda: len(rig.events("end")) == 3, "end of the handler that hung")
    rig.push("b", 2)
    rig.done("b", 2)
    assert list(rig.merged("due")) == ["a"]
    assert node.stop() == 0
    assert rig.of_shards("taken") == {}
    assert "Traceback" not in node.log


def test_an_id_whose_handler_always_hangs_is_buried_and_the_others_of_its_shard_go_on(make_rig: MakeRig) -> None:
    rig = make_rig(ORDERS_SHARDS=1, ORDERS_TTR=TTR, LOWQ_THREADS_PER_NODE=8)
    node = rig.node().holds_all()
    rig.push("hangs", 1, do="wait")
    rig.begun("hangs", 1)
    for version in (1, 2, 3):
        rig.push("other", version)
        rig.done("other", version)
        rig.begun("hangs", 1, times=version)
    until(lambda: rig.buried() == {("hangs", 1)}, "a job in the morgue")
    fences = [perform.fence for perform in rig.performs("hangs", 1)]
    assert len(fences) == 3
    assert fences == sorted(set(fences))
    until(lambda: rig.app.nodes()[0].written_off == 3, "three written off in the registry")
    assert rig.app.nodes()[0].threads == 8
    assert len(rig.app.nodes()[0].performing) == 8
    assert node.process.poll() is None
    line = node.says("written off and replaced")
    assert "Orders:0 ids hangs for" in line
    assert "in wait_for_go" in node.log
    node.signal(signal.SIGTTIN)
    node.says("written off: it exceeded its ttr with Orders:0 ids hangs")
    # One that comes back is none any more.
    go(rig)
    until(lambda: rig.app.nodes()[0].written_off == 0, "none written off in the registry")
    assert node.stop() == 0


def test_a_batch_taken_in_advance_behind_one_that_hangs_is_not_charged(make_rig: MakeRig) -> None:
    # A single crash would bury a job. Both are of one delivery.
    rig = make_rig(ORDERS_SHARDS=1, ORDERS_TTR=TTR, LOWQ_THREADS_PER_NODE=3, ORDERS_MAX_CRASHES=1, LOWQ_LEASE_TTL=NEVER)
    rig.node().holds_all()
    rig.push("first", 1, do="wait", delay=0.0)
    rig.app.queue("Orders", 1).push([{"id": f"more-{n}", "payload": {"version": 1}, "score": 1} for n in range(20)])
    for number in range(20):
        rig.done(f"more-{number}", 1)
    until(lambda: rig.buried() == {("first", 1)}, "the job that hangs in the morgue")
    go(rig)


def test_a_node_with_half_of_its_threads_hanging_drains_and_asks_for_another(make_rig: MakeRig) -> None:
    rig = make_rig(
        ORDERS_SHARDS=2, ORDERS_TTR=TTR, LOWQ_THREADS_PER_NODE=2, LOWQ_LEASE_TTL=NEVER, LOWQ_SHUTDOWN_TIMEOUT=NEVER
    )
    node = rig.node().holds_all()
    rig.push(id_of_shard(0, 2), 1, do="wait", once=True)
    assert node.wait() == 75
    assert "handlers hang in 1 threads, and it has 2" in node.log
    assert rig.of_shards("lease") == {}
    assert rig.of_shards("taken") == {}
    rig.node()
    rig.done(id_of_shard(0, 2), 1)


def test_term_ends_a_node_with_handlers_that_hang(make_rig: MakeRig) -> None:
    rig = make_rig(
        ORDERS_SHARDS=1, ORDERS_TTR=TTR, LOWQ_THREADS_PER_NODE=4, LOWQ_LEASE_TTL=NEVER, LOWQ_SHUTDOWN_TIMEOUT=NEVER
    )
    node = rig.node().holds_all()
    rig.push("a", 1, do="wait", once=True)
    rig.done("a", 1)
    assert node.stop() == 0
    assert "has stopped" in node.log
    assert rig.of_shards("lease") == {}


def test_a_node_that_is_stopping_writes_off_what_hangs(make_rig: MakeRig) -> None:
    rig = make_rig(
        ORDERS_SHARDS=1, ORDERS_TTR=TTR, LOWQ_THREADS_PER_NODE=1, LOWQ_LEASE_TTL=NEVER, LOWQ_SHUTDOWN_TIMEOUT=NEVER
    )
    node = rig.node().holds_all()
    rig.push("a", 1, do="wait", once=True)
    rig.begun("a", 1)
    assert node.stop() == 0  # it need not be replaced
    assert "written off" in node.log
    assert rig.of_shards("lease") == {}
    assert rig.of_shards("taken") == {}
    assert list(rig.merged("due")) == ["a"]


def test_a_supervisor_replaces_a_node_whose_handlers_hang_at_once(make_rig: MakeRig, supervise: Supervise) -> None:
    rig = make_rig(ORDERS_SHARDS=2)
    write_code(rig, 1, ORDERS_TTR=TTR, LOWQ_THREADS_PER_NODE=1, LOWQ_LEASE_TTL=15)
    supervisor = supervise(rig, "--processes", "1")
    for version in (1, 2, 3):  # a process that dies as often would be waited for
        rig.push("a", version, do="wait", once=True)
        rig.done("a", version)
        until(lambda: supervisor.log.count("replaced at once") >= version, "replacement")  # noqa: B023
    assert supervisor.log.count("exited with code 75") == 3
    assert "replaced in" not in supervisor.log
    assert supervisor.stop() == 0


def test_an_id_that_exceeds_its_ttr_while_redis_is_away_is_performed_anew_when_it_is_back(
    make_rig: MakeRig, own_server: RedisServer
) -> None:
    rig = make_rig(own_server.url, ORDERS_SHARDS=1, ORDERS_TTR=TTR, LOWQ_THREADS_PER_NODE=3)
    node = rig.node().holds_all()
    rig.push("a", 1, do="wait", once=True)
    rig.begun("a", 1)
    own_server.stop()

    def is_written_off() -> bool:
        node.signal(signal.SIGTTIN)
        return "written off: it exceeded" in node.log

    until(is_written_off, "a thread that was written off")
    own_server.start()
    rig.done("a", 1)
    hung, *_, again = rig.performs("a", 1)
    assert again.fence > hung.fence
    rig.drained()
    assert node.stop() == 0


def test_touch_gives_a_handler_more_time(make_rig: MakeRig) -> None:
    rig = make_rig(ORDERS_SHARDS=2, ORDERS_TTR=TTR, LOWQ_THREADS_PER_NODE=4, LOWQ_LEASE_TTL=NEVER)
    rig.node().holds_all()
    more, hangs = id_of_shard(0, 2), id_of_shard(1, 2)
    rig.push(more, 1, do="touch", for_=NEVER)
    rig.begun(more, 1)
    rig.push(hangs, 1, do="wait", once=True)
    rig.begun(hangs, 1, times=2)  # so the other would have been written off, too
    go(rig)
    assert rig.done(more, 1).ok
    assert len(rig.performs(more, 1)) == 1


# --- time_limit ---


def test_past_its_time_limit_an_id_is_charged_a_retry(make_rig: MakeRig) -> None:
    rig = make_rig(ORDERS_SHARDS=1, ORDERS_TIME_LIMIT=0.3, ORDERS_MAX_RETRIES=1, LOWQ_LEASE_TTL=NEVER)
    node = rig.node().holds_all()
    rig.push("a", 1, do="spin", for_=NEVER)
    until(lambda: rig.buried() == {("a", 1)}, "a job in the morgue")
    assert [perform.ok for perform in rig.performs("a", 1)] == [False, False]
    assert rig.merged("crashes") == {}
    (job,) = rig.app.queue("Orders", 1).jobs(state="morgue")
    assert "TimeLimitExceeded: the batch has run for longer than its time_limit of 0.3 s" in str(job.error)
    rig.push("b", 1)
    assert rig.done("b", 1).pid == node.pid
    assert len({perform.fence for perform in rig.performs()}) == 1
    assert node.stop() == 0


def test_a_batch_that_exceeds_its_time_limit_is_tried_again_id_by_id(make_rig: MakeRig) -> None:
    rig = make_rig(ORDERS_SHARDS=1, ORDERS_BATCH=5, ORDERS_TIME_LIMIT=0.3, ORDERS_MAX_RETRIES=0, LOWQ_LEASE_TTL=NEVER)
    rig.push("slow", 1, do="spin", for_=NEVER)
    for number in range(4):
        rig.push(f"fast-{number}", 1)
    rig.node()
    for number in range(4):
        rig.done(f"fast-{number}", 1)
    until(lambda: rig.buried() == {("slow", 1)}, "the slow one in the morgue")


@pytest.mark.parametrize("do", ["wait", "spin"])
def test_a_batch_that_runs_for_long_is_named_in_the_log(make_rig: MakeRig, do: str) -> None:
    rig = make_rig(ORDERS_SHARDS=1, LOWQ_WARN_AFTER=0.2, LOWQ_LEASE_TTL=NEVER)
    node = rig.node().holds_all()
    rig.push("slow", 1, do=do, for_=1.5)
    node.says("still performs Orders:0 ids slow for")
    until(lambda: len(node.lines("still performs")) >= 2, "another warning")
    go(rig)
    rig.done("slow", 1)
    assert node.stop() == 0
