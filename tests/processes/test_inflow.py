"""A node learns what comes in to its shards from the renewals of its leases, and says so in the queue's history."""

import lowq
from lowq.node.node import Node
from tests.processes.support import until


def test_a_node_records_what_came_in_and_what_it_performed(redis_url: str) -> None:
    app = lowq.Lowq(redis_url=redis_url, lease_ttl=6)

    @app.worker(queue_name="Orders", shards_count=1)
    class Orders(lowq.Worker[int]):
        def perform(self, payloads_by_id: dict[str, list[int]]) -> None:
            pass

    def recorded() -> list[tuple[int, ...]]:
        """Payloads that came in, change of the backlog, jobs performed, failures; empty while nothing is known."""
        fields = app.client.command("HGETALL", "lowq:v1:history:Orders")
        flows = [raw.split()[1:] for name, raw in zip(fields[::2], fields[1::2], strict=True) if b"flow:" in name]
        columns = zip(*flows, strict=True)
        return [tuple(round(sum(map(float, column))) for column in columns)] if flows else []

    Orders.perform_async([{"id": "before", "payload": 1, "delay": 3600}])
    node = Node(app, threads=1)
    node.start()
    try:
        until(lambda: bool(recorded()), "two renewals: from here on it is known what came in between")
        assert recorded() == [(0, 0, 0, 0)], "what was there before does not count"
        Orders.perform_async([{"id": number, "payload": version} for number in range(20) for version in range(3)])
        until(lambda: recorded() == [(60, 0, 20, 0)], "what came in, and what was performed")
    finally:
        node.stop()
        app.close()
