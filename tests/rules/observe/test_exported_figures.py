"""What nodes and consumers send to Graphite and StatsD, end to end."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

import lowq
from lowq.cli.health import metric_lines
from lowq.consumer import ConsumerJob
from lowq.node.node import Node
from lowq.observe.health import Reading
from tests.receiver import Receiver
from tests.waiting import PATIENCE, until

pytestmark = pytest.mark.parametrize("store_url", ["redis"], indirect=True)


@pytest.fixture
def graphite() -> Iterator[Receiver]:
    with Receiver() as receiver:
        yield receiver


@pytest.fixture
def app(store_url: str, graphite: Receiver) -> Iterator[lowq.Lowq]:
    with closing(lowq.Lowq(redis_url=store_url, metrics_prefix="test", graphite=f"127.0.0.1:{graphite.port}")) as app:
        yield app


def values(receiver: Receiver, name: str) -> list[float]:
    """What was sent under a name, in order."""
    rows = [line.decode().split(" ") for line in receiver.lines]
    assert all(len(row) == 3 and row[2].isdecimal() for row in rows)
    return [float(row[1]) for row in rows if row[0] == f"test.{name}"]


def test_a_node_sends_what_became_of_its_jobs_and_its_last_figures(app: lowq.Lowq, graphite: Receiver) -> None:
    ended: list[str] = []

    @app.worker(queue_name="shop.orders", shards_count=3, max_retry_count=0)
    def work(payloads_by_id: dict[str, list[Any]]) -> None:
        ended.extend(payloads_by_id)
        if "bad" in payloads_by_id:
            raise ValueError
        if "odd" in payloads_by_id:
            lowq.current().bury("odd")

    @app.worker(queue_name="mails", shards_count=1)
    async def mail(payloads_by_id: dict[str, list[Any]]) -> None: ...

    def last(name: str, queue: str = "shop_orders") -> float | None:
        return next(iter(values(graphite, f"queues.{queue}.{name}")[-1:]), None)

    node = Node(app, threads=2)
    node.start()
    try:
        work.perform_async([{"id": job_id} for job_id in ("a", "b", "c", "bad", "odd")])
        # Buried are the one that failed and the one that the handler buried.
        expected = {"processed": 3, "failed": 1, "buried": 2, "shards": 3, "lag": 0}
        until(lambda: {name: last(name) for name in expected} == expected, "all figures")
        mail.perform_async([{"id": number} for number in range(7)])
        until(lambda: (last("processed", "mails"), values(graphite, "tasks_busy")[-1:]) == (7, [0]), "those of tasks")
        work.perform_async([{"id": number} for number in range(20)])
        until(lambda: len(ended) >= 25, "all jobs")
        assert 'lowq_node_buried_total{queue="shop.orders"} 2.0' in metric_lines(node.vitals())  # all have a metric
    finally:
        assert node.stop()
    until(lambda: last("processed") == 23, "the last lines")
    assert values(graphite, "threads")[-1] == 2


def test_consumers_of_a_process_are_added_up_also_when_one_has_ended(app: lowq.Lowq, graphite: Receiver) -> None:
    queue = app.queue("mail", 4)
    queue.push([{"id": number} for number in range(10)])
    with queue.consumer() as first:
        with queue.consumer():
            pass
        jobs: list[ConsumerJob] = []
        while len(jobs) < 10:
            jobs += first.take(10)
        until(lambda: values(graphite, "queues.mail.taken")[-1:] == [10], "those in hand")
        jobs[0].fail("no", delay=3600)
        jobs[1].bury("no")
        for job in jobs[2:6]:
            job.ack()
        first.close()
        with queue.consumer() as second:
            acked = 0
            while acked < 4:
                for job in second.take(10):
                    job.ack()
                    acked += 1
            until(lambda: values(graphite, "queues.mail.processed")[-1:] == [8], "those that finished")
    assert values(graphite, "queues.mail.failed")[-1] == values(graphite, "queues.mail.buried")[-1] == 1


def test_a_source_that_raises_stops_no_other(
    app: lowq.Lowq, graphite: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    def raises() -> dict[str, Reading]:
        raise ValueError("no figures")

    ends = [app.export_metrics(raises), app.export_metrics(lambda: {"q": Reading({"processed": 7}, {})})]
    until(lambda: len(values(graphite, "queues.q.processed")) >= 2, "the other's lines")
    for end in ends:
        end()
    assert caplog.text.count("are not to be had") == 1


#: In a process without threads of others, which could have locks as it forks.
FORKS = """
import os, signal, sys
import lowq
from lowq.observe import graphite_statsd
from lowq.observe.health import Reading

graphite_statsd.CLOSE_SECONDS = 60.0  # the child ends when its lines are sent
app = lowq.Lowq(redis_url=sys.argv[2], metrics_prefix="test", graphite=sys.argv[1])
end = app.export_metrics(lambda: {"parent": Reading({"processed": 1}, {})})
if os.fork() == 0:
    signal.alarm(60)
    end()  # the parent's: nothing happens
    app.export_metrics(lambda: {"child": Reading({"processed": 2}, {})})()
    os._exit(0)
code = os.waitstatus_to_exitcode(os.wait()[1])
end()
os._exit(code)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_child_of_a_fork_sends_figures_of_its_own(store_url: str, graphite: Receiver) -> None:
    command = [sys.executable, "-c", FORKS, f"127.0.0.1:{graphite.port}", store_url]
    assert subprocess.run(command, timeout=3 * PATIENCE, check=False).returncode == 0
    until(lambda: values(graphite, "queues.child.processed"), "the child's lines")
    until(lambda: values(graphite, "queues.parent.processed"), "the parent's lines")
