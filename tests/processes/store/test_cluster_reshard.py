"""A queue gets another number of shards on servers with replicas: a failover loses what no replica has confirmed, so
nothing is deleted before what replaces it was.
"""

import socket
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

import pytest

import lowq
from lowq.admin import ReshardProgress
from lowq.operate.reshard import reshard
from lowq.store import Call
from tests.redis_cluster import RedisCluster
from tests.redis_server import RedisServer
from tests.rows import case
from tests.waiting import PATIENCE, until

IDS = [str(number) for number in range(300)]
#: Scripts from whose writes a reshard goes on.
STEPS = {"set_layout", "prepare_shard", "seal", "move_out", "move_in", "open_shard"}


def filled(app: lowq.Lowq, shards_count: int, **options: Any) -> lowq.Queue:
    queue = app.queue("Orders", shards_count)
    queue.push(({"id": job_id, "payload": job_id} for job_id in IDS), **options)
    return queue


def has_all(queue: lowq.Queue) -> bool:
    return len(queue.fetch(IDS)) == queue.stats().length == len(IDS)


def until_replicas_are_waited_for(steps: Iterator[ReshardProgress], of: str = "") -> None:
    """Until those of this primary are. On a busy machine others may be late, too."""
    next(progress for progress in steps if progress.waits_for_replicas == (of,))


def test_replicas_confirm_each_step_where_there_are_any(
    cluster_url: str, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # They may be slow, and confirm it all the same.
    monkeypatch.setattr("lowq.operate.layout_switch.CONFIRM_SECONDS", PATIENCE)
    for url, expected in ((cluster_url, STEPS), (redis_url, set())):
        with case(url), closing(lowq.Lowq(redis_url=url)) as app:
            queue, start, confirmed = filled(app, 5), app.client.start, set[str]()

            def start_noted(calls: Sequence[Call[Any]], **options: Any) -> Any:
                if options.get("wait") is not None:
                    confirmed.update(call.script for call in calls)  # noqa: B023  # called at once
                return start(calls, **options)  # noqa: B023

            monkeypatch.setattr(app.client, "start", start_noted)
            progress: list[ReshardProgress] = []
            queue.reshard(7, on_progress=progress.append)
            assert not any(step.waits_for_replicas for step in progress)
            assert has_all(queue)
            assert confirmed == expected


def test_a_failover_in_the_middle_loses_nothing_of_what_was_confirmed() -> None:
    """A primary is cut off from its replica and from the others, while clients still reach it."""
    with RedisCluster() as cluster, closing(lowq.Lowq(redis_url=cluster.url)) as app:
        queue = filled(app, 6, durability="replicated")
        for number, shards_count in enumerate((8, 5)):
            victim = cluster.primaries()[number]
            # The first one when the reshard begins, the other one while it is under way.
            steps = reshard(app, "Orders", shards_count)
            if number:
                next(step for step in steps if step.shards_moved)
            cluster.cut_off(victim)
            until_replicas_are_waited_for(steps, f"127.0.0.1:{victim.port}")
            cluster.replaced(victim)
            assert next(steps).waits_for_replicas, "there is none that has what was written"
            cluster.heal(victim)
            assert [*steps][-1].is_done
            assert queue.layouts.all == (queue.layouts.current,)
            assert queue.stats().shards_count == shards_count
            assert has_all(queue)
            until(cluster.is_replicated, "replicas in order")


def test_a_single_server_is_waited_for_too_unless_the_operator_says_otherwise(caplog: pytest.LogCaptureFixture) -> None:
    with (
        RedisServer(repl_diskless_sync_delay=0) as primary,
        RedisServer(replicaof=f"127.0.0.1 {primary.port}") as replica,
        closing(lowq.Lowq(redis_url=primary.url)) as app,
    ):
        until(lambda: RedisCluster.ask(replica, "INFO", "replication")["master_link_status"] == "up", "a replica")
        queue = filled(app, 4)
        steps = reshard(app, "Orders", 6)
        next(step for step in steps if step.jobs_moved)
        replica.pause()
        until_replicas_are_waited_for(steps)
        assert "--unconfirmed" in caplog.text
        # Another one that goes on waits for what the primary had at the beginning.
        until_replicas_are_waited_for(reshard(app, "Orders", 6))
        assert queue.reshard(6, unconfirmed=True) is not None
        replica.cont()
        assert [*steps][-1].is_done
        assert has_all(queue)


def test_a_replica_that_joins_in_the_middle_is_waited_for_too() -> None:
    """As after a failover: the new primary has no replica when the reshard begins, and its replica may be the next."""
    with (
        RedisServer(repl_diskless_sync_delay=0) as primary,
        RedisServer(repl_diskless_sync_delay=0) as replica,
        closing(lowq.Lowq(redis_url=primary.url)) as app,
    ):
        queue = filled(app, 4)
        steps = reshard(app, "Orders", 6)
        next(step for step in steps if step.jobs_moved)
        RedisCluster.ask(replica, "REPLICAOF", "127.0.0.1", primary.port)
        until(lambda: RedisCluster.ask(replica, "INFO", "replication")["master_link_status"] == "up", "a replica")
        next(steps)
        replica.pause()
        until_replicas_are_waited_for(steps)
        replica.cont()
        assert [*steps][-1].is_done
        assert has_all(queue)


def test_a_program_that_copies_the_data_is_not_waited_for() -> None:
    """As a backup by ``redis-cli --rdb``: it confirms nothing, and is gone before the reshard has ended."""
    with (
        RedisServer(repl_diskless_sync_delay=0) as primary,
        closing(lowq.Lowq(redis_url=primary.url)) as app,
    ):
        queue = filled(app, 4)
        steps = reshard(app, "Orders", 6)
        next(step for step in steps if step.jobs_moved)
        with socket.create_connection(("127.0.0.1", primary.port)) as copying:
            copying.sendall(b"SYNC\r\n")
            until(lambda: RedisCluster.ask(primary, "INFO", "replication")["connected_slaves"] == 1, "it copies")
            for step in steps:
                assert not step.waits_for_replicas
        assert step.is_done
        assert has_all(queue)
