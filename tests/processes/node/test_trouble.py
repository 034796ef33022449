"""One part in trouble: the others go on."""

from typing import Any

import lowq
from lowq.store.keys import shard_prefix
from tests.processes.node.conftest import MakeApp, Start, ids_of_shards
from tests.rows import case
from tests.waiting import NEVER, until


def test_a_shard_whose_keys_were_spoilt_stops_no_other(make_app: MakeApp, start: Start) -> None:
    for key in ("meta", "solo"):
        with case(key):
            app = make_app(poll_interval=NEVER)
            performed: list[str] = []

            @app.worker(shards_count=5, queue_name=f"with-{key}")
            def work(payloads_by_id: dict[str, list[Any]], performed: list[str] = performed) -> None:
                performed.extend(payloads_by_id)

            first, spoilt, *others = ids_of_shards(5)
            work.perform_async({"id": job_id} for job_id in (first, spoilt, *others))
            name = shard_prefix("lowq", f"with-{key}", 1) + key
            app.client.command("DEL", name)
            app.client.command("SET", name, "not what lowq writes")
            start(of=app, threads=2)
            until(lambda: len(performed) == 4, "the jobs of the four sound shards")  # noqa: B023  # called at once
            for number in range(20):
                work.push(first, number)
                until(lambda: len(performed) == 5 + number, "a later job")  # noqa: B023  # called at once
            assert spoilt not in performed


def test_a_lone_node_has_all_its_shards_back_at_once_after_redis_lost_its_data(make_app: MakeApp, start: Start) -> None:
    app = make_app(poll_interval=NEVER)
    fences: dict[int, list[int]] = {shard: [] for shard in range(20)}

    @app.worker(shards_count=20)
    def work(payloads_by_id: dict[str, list[Any]]) -> None:
        fences[lowq.current().shard].append(lowq.current().fence)

    start(of=app)
    for count in (100, 200):
        work.perform_async({"id": number} for number in range(100))
        until(lambda: sum(map(len, fences.values())) == count, "all jobs")  # noqa: B023  # called at once
        app.client.command("FLUSHALL")
    assert all(of_shard == sorted(of_shard) for of_shard in fences.values())
    until(lambda: "work" in [info.name for info in app.queues()], "its queue in the registry")
