"""Stopping, going quiet, dumping, and handlers that end the process."""

import signal
from pathlib import Path

import pytest

from tests.processes.conftest import MakeRig
from tests.processes.support import NEVER, Rig, id_of_shard, until


def go(rig: Rig) -> None:
    """Lets all handlers return that wait for that."""
    Path(f"{rig.history.path}.go").touch()


def test_ttin_dumps_the_stacks_and_term_finishes_what_runs_and_gives_up_the_leases(make_rig: MakeRig) -> None:
    rig = make_rig(LOWQ_LEASE_TTL=15)
    node = rig.node().holds_all()
    rig.push("a", 1, do="wait")
    rig.begun("a", 1)
    node.signal(signal.SIGTTIN)
    assert "ids a" in node.says(", performing Orders:")
    node.says("in perform")
    rig.push("a", 2)
    node.signal(signal.SIGTERM)
    node.says(" stops")
    go(rig)
    assert node.wait() == 0
    assert [(perform.jobs, perform.ok) for perform in rig.performs()] == [({"a": [1]}, True)]
    assert rig.of_shards("lease") == {}
    assert rig.of_shards("taken") == {}
    assert list(rig.merged("due")) == ["a"]
    assert rig.merged("crashes") == {}
    assert rig.client.hlen("lowq:v1:nodes") == 0
    assert "has stopped" in node.log
    (stopped,) = rig.events("server_stop")
    assert stopped["pid"] == node.pid


def test_past_the_shutdown_timeout_or_with_a_second_int_it_ends_and_its_jobs_come_again_uncharged(
    make_rig: MakeRig,
) -> None:
    rig = make_rig(ORDERS_SHARDS=2, ORDERS_MAX_CRASHES=1)
    node = rig.node(LOWQ_SHUTDOWN_TIMEOUT=NEVER).holds_all()
    slow, other = id_of_shard(0, 2), id_of_shard(1, 2)
    rig.push(slow, 1, do="sleep", for_=NEVER, once=True)
    rig.begun(slow, 1)
    node.signal(signal.SIGINT)
    node.says(" stops")
    assert node.process.poll() is None
    node.signal(signal.SIGINT)
    assert node.wait() == 3
    node = rig.node(LOWQ_SHUTDOWN_TIMEOUT=0.3)
    rig.done(slow, 1)
    rig.push(slow, 2, do="sleep", for_=NEVER, once=True)
    rig.begun(slow, 2)
    rig.push(other, 1)
    rig.done(other, 1)
    assert node.stop() == 3
    assert slow in node.lines("it still performs")[0]
    assert list(rig.of_shards("lease")) in ([], [0])  # runs out shortly; the other shard's is given up
    rig.node()
    rig.done(slow, 2)
    rig.drained()
    assert rig.report().problems == []
    assert rig.buried() == set()  # one crash would have buried it
    assert rig.merged("crashes") == {}


@pytest.mark.slow
@pytest.mark.threads_only
def test_a_job_that_outlasts_every_stop_is_poison_in_the_end(make_rig: MakeRig) -> None:
    rig = make_rig(LOWQ_SHUTDOWN_TIMEOUT=0.1, ORDERS_SHARDS=1, ORDERS_MAX_CRASHES=1)
    rig.push("a", 1, do="sleep", for_=600)
    for times in (1, 2, 3):
        node = rig.node()
        rig.begun("a", 1, times)
        assert rig.buried() == set()
        assert node.stop() == 3
    node = rig.node().holds_all()
    node.says("id 'a' is buried as poison")
    assert rig.buried() == {("a", 1)}
    assert rig.is_drained()
    assert len(rig.performs("a")) == 3
    assert node.stop() == 0


@pytest.mark.slow
@pytest.mark.threads_only
def test_signals_that_the_kernel_gives_to_other_threads_are_heard(make_rig: MakeRig) -> None:
    rig = make_rig()
    for _ in range(8):  # one in four or so goes to a thread that is not the main one
        node = rig.node()
        node.says(" starts: ")
        for number in (signal.SIGSTOP, signal.SIGTTIN, signal.SIGTERM, signal.SIGCONT):
            node.signal(number)
        assert node.wait() == 0


def test_tstp_takes_nothing_more_and_finishes_what_runs(make_rig: MakeRig) -> None:
    rig = make_rig(LOWQ_LEASE_TTL=15)
    node = rig.node().holds_all()
    rig.push("a", 1, do="wait")
    rig.begun("a", 1)
    node.signal(signal.SIGTSTP)
    node.says("goes quiet")
    rig.push("a", 2)
    rig.push("b", 1)
    go(rig)
    rig.done("a", 1)
    until(lambda: not rig.of_shards("taken"), "acknowledgement of what ran")
    assert node.process.poll() is None
    assert len(rig.performs()) == 1
    successor = rig.node()
    assert rig.done("a", 2).pid == rig.done("b", 1).pid == successor.pid
    assert node.stop() == 0
    report = rig.report()
    assert report.problems == []
    assert report.repeats == 0
    assert report.fenced == []


def test_a_handler_that_exits_stops_the_node_after_the_others(make_rig: MakeRig) -> None:
    rig = make_rig(ORDERS_SHARDS=2, LOWQ_THREADS_PER_NODE=2)
    node = rig.node().holds_all()
    exiting, slow = id_of_shard(0, 2), id_of_shard(1, 2)
    rig.push(slow, 1, do="wait")
    rig.begun(slow, 1)
    rig.push(exiting, 1, do="exit", once=True)
    node.says(" stops, waiting")
    go(rig)
    assert node.wait() == 1
    assert rig.performs(slow)[0].ok is True
    assert [event["error"] for event in rig.events("last_words")] == ["KeyboardInterrupt('told to exit')"]
    assert rig.of_shards("lease") == {}
    assert rig.merged("crashes") == {exiting: "1"}
    rig.node()
    rig.done(exiting, 1)
    rig.drained()
    assert rig.merged("crashes") == {}
    assert rig.report().problems == []
