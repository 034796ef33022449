"""A node that is left in peace: order, wake-ups, delays, what it costs when idle, its hooks, producers."""

import os
import time
from pathlib import Path

import pytest

from lowq.sharding import shard_of
from tests.integration.conftest import MakeRig
from tests.integration.support import NEVER, id_of_shard, until

#: Seconds by which the clocks of Redis and of the tests may differ over a second.
CLOCKS = 0.02

# --- order ---


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"ORDERS_PREFETCH": 1}, id="prefetch", marks=pytest.mark.slow),
        pytest.param({"ORDERS_PREFETCH": 0}, id="no-prefetch", marks=pytest.mark.slow),
        pytest.param({"ORDERS_BATCH": 10, "ORDERS_MAX_PAYLOADS": 3, "ORDERS_WORK": 0.001}, id="batches"),
        pytest.param({"ORDERS_SCHEDULER": "seq"}, id="seq-scheduler", marks=pytest.mark.slow),
        pytest.param({"ORDERS_SCHEDULER": "own", "ORDERS_SPLITTER": "own"}, id="own-scheduler-and-splitter"),
    ],
)
def test_each_id_is_performed_in_order_and_by_one_thread_at_a_time(
    make_rig: MakeRig, settings: dict[str, object]
) -> None:
    rig = make_rig(ORDERS_SHARDS=7, **settings)
    node = rig.node()
    rig.produce(2, ids=100, versions=5, rounds=6)()
    rig.drained()
    assert node.stop() == 0
    report = rig.report()
    assert report.problems == []
    assert report.accepted == 4 * 50 * 5 * 6
    assert report.repeats == 0


@pytest.mark.slow
def test_nodes_of_a_static_splitter_share_the_work(make_rig: MakeRig) -> None:
    rig = make_rig(ORDERS_SHARDS=6, ORDERS_WORK=0.001)
    nodes = [rig.node(ORDERS_SPLITTER=f"{number}/2") for number in range(2)]
    rig.produce(2, ids=50, versions=5, rounds=4)()
    rig.drained()
    assert [node.stop() for node in nodes] == [0, 0]
    report = rig.report()
    assert report.problems == []
    assert report.repeats == 0
    shards = [{perform.shard for perform in rig.performs() if perform.pid == node.pid} for node in nodes]
    assert shards == [{0, 2, 4}, {1, 3, 5}]


def test_a_failing_id_delays_nobody_else(make_rig: MakeRig) -> None:
    rig = make_rig(ORDERS_SHARDS=1, ORDERS_BATCH=10, ORDERS_MAX_RETRIES=2)
    rig.push("bad", 1, do="raise")
    for job_id in range(20):
        rig.push(job_id, 1)
    node = rig.node()
    rig.drained()
    assert node.stop() == 0
    report = rig.report()
    assert report.problems == []
    assert rig.buried() == {("bad", 1)}
    (*_, last) = rig.performs("bad")
    assert all(perform.start < last.start for perform in rig.performs() if perform.ok)
    assert len({job_id for perform in rig.performs() if perform.ok for job_id in perform.jobs}) == 20


# --- waking up ---


def test_jobs_are_started_by_wake_ups_alone(make_rig: MakeRig) -> None:
    rig = make_rig(LOWQ_POLL_INTERVAL=3600)
    node = rig.node().holds_all()
    for version in range(1, 6):
        rig.push(f"id {version}", version)
        rig.done(f"id {version}", version)
    rig.push("later", 1, delay=0.1)
    rig.done("later", 1)
    assert "listening for wake-ups failed" not in node.log
    assert node.stop() == 0


def test_shards_change_hands_by_messages_alone(make_rig: MakeRig) -> None:
    rig = make_rig(ORDERS_SHARDS=4, LOWQ_POLL_INTERVAL=3600, LOWQ_LEASE_TTL=3600)
    first = rig.node().holds_all()
    second = rig.node()
    until(lambda: second.held() == first.held() == 2, "two shards of each node")
    assert first.stop() == 0
    second.holds_all()
    for version in range(1, 9):
        rig.push(version, version)
    rig.drained()
    assert second.stop() == 0
    assert rig.report().problems == []


def test_an_idle_node_starts_a_job_at_once_without_polling(make_rig: MakeRig) -> None:
    rig = make_rig(LOWQ_POLL_INTERVAL=NEVER)
    rig.node().holds_all()
    for version in range(1, 11):
        rig.push(version % 3, version)
        rig.done(version % 3, version)


def test_a_delayed_job_runs_on_time_without_polling(make_rig: MakeRig) -> None:
    rig = make_rig(LOWQ_POLL_INTERVAL=NEVER)
    rig.node().holds_all()
    rig.push("later", 1, delay=0.9)
    rig.push("sooner", 1, delay=0.4)
    (later, sooner) = rig.events("pushing")
    assert rig.done("sooner", 1).start - sooner["at"] > 0.4 - CLOCKS
    assert rig.done("later", 1).start - later["at"] > 0.9 - CLOCKS


def test_a_retry_runs_on_time_without_polling(make_rig: MakeRig) -> None:
    rig = make_rig(LOWQ_POLL_INTERVAL=NEVER)
    rig.node().holds_all()
    rig.push("a", 1, do="raise", once=True)
    again = rig.done("a", 1)
    (first, second) = rig.performs()
    assert second.name == again.name
    assert second.start - first.end > 0.1 - CLOCKS


def test_an_id_that_changes_while_it_is_performed_is_performed_again_at_once(make_rig: MakeRig) -> None:
    rig = make_rig(LOWQ_POLL_INTERVAL=NEVER, ORDERS_SHARDS=1)
    rig.node().holds_all()
    rig.push("a", 1, do="wait")
    rig.begun("a", 1)
    rig.push("a", 2)
    Path(f"{rig.history.path}.go").touch()
    assert rig.done("a", 2).start > rig.done("a", 1).end


def test_what_a_handler_pushes_for_its_own_id_is_kept_for_the_next_run(make_rig: MakeRig) -> None:
    rig = make_rig(LOWQ_POLL_INTERVAL=NEVER)
    rig.node().holds_all()
    rig.push("a", 1, do="push", once=True)
    rig.done("a", 2)
    # Version 1 without "do" is another payload; it is there beside version 2.
    assert [perform.jobs["a"] for perform in rig.performs()] == [[1], [1, 2]]
    assert rig.report().problems == []


def test_a_paused_queue_goes_on_at_once_when_resumed(make_rig: MakeRig) -> None:
    rig = make_rig(LOWQ_POLL_INTERVAL=NEVER)
    rig.node().holds_all()
    queue = rig.app.queue("Orders", rig.shards_count)
    queue.pause()
    rig.push("a", 1)
    rig.push("a", 2)
    assert rig.performs() == []
    queue.resume()
    rig.done("a", 2)
    assert rig.report().problems == []


def test_acknowledgements_are_not_kept_waiting_by_a_slow_job(make_rig: MakeRig) -> None:
    rig = make_rig(LOWQ_POLL_INTERVAL=NEVER, ORDERS_SHARDS=1, LOWQ_THREADS_PER_NODE=1)
    node = rig.node().holds_all()
    for round_ in range(1, 4):  # fast jobs teach the node to take several at a time
        with rig.history.pushing([(str(job_id), round_, round_) for job_id in range(100)]):
            jobs = [{"id": str(job_id), "payload": {"version": round_}, "score": round_} for job_id in range(100)]
            rig.app.queue("Orders", 1).push(jobs)
        rig.drained()
    with rig.history.pushing([(job_id, 9, 9) for job_id in "abcd"]):
        jobs = [{"id": job_id, "payload": {"version": 9}, "score": 9} for job_id in "abcd"]
        jobs[-1]["payload"] = {"version": 9, "do": "sleep", "for": 20, "once": True}
        rig.app.queue("Orders", 1).push(jobs)
    rig.begun("d", 9)
    until(lambda: set(rig.merged("taken")) == {"d"}, "acknowledgement of the fast ones")
    node.kill()
    rig.node()
    rig.done("d", 9)
    report = rig.report()
    assert report.problems == []
    assert report.repeats == 1  # d itself


# --- idle ---


def test_an_idle_node_asks_little(make_rig: MakeRig) -> None:
    rig = make_rig(ORDERS_SHARDS=20, LOWQ_LEASE_TTL=15, LOWQ_POLL_INTERVAL=1)
    rig.node().holds_all()
    channels = [f"{rig.prefix(shard)}wake" for shard in range(20)]
    until(lambda: all(count for _, count in rig.client.pubsub_shardnumsub(*channels)), "subscription")

    def calls() -> dict[str, int]:
        return {name: fields["calls"] for name, fields in rig.client.info("commandstats").items()}

    began = time.monotonic()
    rig.client.config_resetstat()
    until(lambda: calls().get("cmdstat_evalsha", 0) >= 3 * 20, "refreshes")
    counted = calls()
    seconds = int(time.monotonic() - began) + 1
    # A refresh of 20 shards each second, every 5 s a round of renewals with a heartbeat; each round is one write.
    assert counted["cmdstat_evalsha"] <= (seconds + 1) * 20 + (seconds // 5 + 1) * (20 + 4)
    assert counted.get("cmdstat_ssubscribe", 0) == 0


# --- hooks ---


def test_on_server_init_is_called_before_anything_is_performed(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.push("a", 1)
    node = rig.node()
    rig.done("a", 1)
    assert node.stop() == 0
    (init,) = rig.events("init")
    assert init["pid"] == node.pid
    assert init["at"] < rig.performs()[0].start
    assert rig.events("last_words") == []


def test_a_node_that_finds_no_redis_says_so_and_ends(make_rig: MakeRig) -> None:
    rig = make_rig(url="redis://127.0.0.1:1/0")
    node = rig.node()
    assert node.wait() == 1
    (said,) = rig.events("last_words")
    assert "RedisUnavailable" in said["error"]
    assert "127.0.0.1:1" in node.log


# --- producers ---


def test_parent_and_child_of_a_fork_push_side_by_side(make_rig: MakeRig) -> None:
    rig = make_rig()
    node = rig.node()
    rig.push("before", 1)  # connections exist
    child = os.fork()
    if child == 0:
        code = 1
        try:
            for version in range(1, 101):
                rig.push("child", version)
            code = 0
        finally:
            os._exit(code)
    for version in range(1, 101):
        rig.push("parent", version)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    rig.push("after", 1)
    rig.drained()
    assert node.stop() == 0
    report = rig.report()
    assert report.problems == []
    assert report.accepted == 202


# --- shards ---


def test_a_slow_job_delays_only_its_own_shard(make_rig: MakeRig) -> None:
    rig = make_rig(ORDERS_SHARDS=10, LOWQ_THREADS_PER_NODE=2, LOWQ_POLL_INTERVAL=NEVER)
    rig.node().holds_all()
    slow = id_of_shard(0, 10)
    rig.push(slow, 1, do="wait")
    rig.begun(slow, 1)
    for shard in range(1, 10):  # also those that the splitter gave to the busy thread
        rig.push(id_of_shard(shard, 10), 1)
        rig.done(id_of_shard(shard, 10), 1)
    assert rig.performs(slow, 1)[0].ok is None


def test_the_shards_of_a_thread_that_is_long_with_a_job_do_not_wait_for_the_rest(make_rig: MakeRig) -> None:
    # Two threads with two shards each. The one that is free has work for a long time, so it never helps for boredom.
    shards, jobs = 4, 400
    rig = make_rig(ORDERS_SHARDS=shards, ORDERS_WORK=0.01, ORDERS_SCHEDULER="seq", LOWQ_THREADS_PER_NODE=2)
    rig.node().holds_all()
    slow = id_of_shard(0, shards)
    rig.push(slow, 1, do="wait")
    rig.begun(slow, 1)
    queue = rig.app.queue(rig.queue_name, shards)
    busy = [f"{number}" for number in range(shards * jobs) if shard_of(f"{number}".encode(), shards) > 0]
    for start in range(0, len(busy), 30):  # who helps takes the oldest first: no shard has all of the oldest jobs
        queue.push({"id": job_id, "payload": {"version": 1}} for job_id in busy[start : start + 30])
    until(lambda: {perform.shard for perform in rig.performs()} == set(range(shards)), "a perform in every shard")
    # Otherwise both of its own shards would be empty by then.
    order = [perform.shard for perform in rig.performs()]
    before = order[: max(order.index(shard) for shard in range(shards))]
    assert all(before.count(shard) < jobs * 0.8 for shard in range(1, shards))
    assert rig.performs(slow, 1)[0].ok is None
