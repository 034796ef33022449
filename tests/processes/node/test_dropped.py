"""A queue that is dropped and made anew with another number of shards, for producers that know the old one."""

import threading
from typing import Any

import lowq
from lowq.store.keys import shard_prefix
from tests.processes.node.conftest import Start
from tests.waiting import until


def test_what_old_producers_push_afterwards_is_performed(app: lowq.Lowq, start: Start) -> None:
    producers = [lowq.Lowq(redis_url=app.config.redis_url) for _ in range(2)]
    old = [producer.queue("orders", 12) for producer in producers]
    for queue in old:
        queue.push([{"id": f"before {number}"} for number in range(100)])
    app.queue("orders", 12).drop()
    performed: set[str] = set()

    class Orders(lowq.Worker[Any]):
        def perform(self, payloads_by_id: dict[str, list[Any]]) -> None:
            performed.update(payloads_by_id)

    producers.append(lowq.Lowq(redis_url=app.config.redis_url))
    producers[-1].queue("orders", 5).push("new code")

    def produce(index: int) -> None:
        for number in range(200):
            old[index].push({"id": f"single {number}"})
            old[index].push([{"id": f"of {index}: {number} {n}"} for n in range(5)])

    threads = [threading.Thread(target=produce, args=[index], daemon=True) for index in range(2)]
    for thread in threads:
        thread.start()
    app.worker(shards_count=5, queue_name="orders")(Orders)
    start(threads=2)
    for thread in threads:
        thread.join()
    expected = {"new code", *(f"single {n}" for n in range(200))}
    expected |= {f"of {index}: {number} {n}" for index in range(2) for number in range(200) for n in range(5)}
    until(lambda: performed >= expected, "all that was pushed since")
    beyond = [shard_prefix("lowq", "orders", shard) + "meta" for shard in range(5, 12)]
    assert [app.client.command("EXISTS", key, key=key) for key in beyond] == [0] * 7
    for producer in producers:
        producer.close()
