"""What a later release may add to Redis does not disturb this one, and stays: docs/compatibility.md promises it."""

import json
from typing import Any

import lowq
from lowq.node.node import Node
from lowq.store.keys import nodes_key, queues_key, shard_prefix
from tests.rules.support import run_script
from tests.waiting import PATIENCE, until

PREFIX = shard_prefix("lowq", "Orders", 0)
META = f"{PREFIX}meta"


def work(queue: lowq.Queue) -> None:
    """Jobs go every way that there is."""
    queue.push([{"id": name, "payload": name} for name in ("done", "failed", "released", "buried", "deleted")])
    queue.push({"id": "later", "delay": 3600})
    with queue.consumer(ttr=60) as consumer:
        taken: dict[str, Any] = {}
        while len(taken) < 5:
            taken |= {job.id: job for job in consumer.take(5, timeout=PATIENCE)}
        taken["done"].ack()
        taken["failed"].fail("no")
        taken["released"].release(60)
        taken["buried"].bury("no")
        taken["deleted"].bury("no")
    queue.kick(["buried"])
    queue.delete(["deleted"])
    queue.pause()
    queue.resume()
    assert queue.stats().length == 4


def test_fields_and_keys_of_a_shard_that_are_not_known_stay(app: lowq.Lowq) -> None:
    queue = app.queue("Orders", 1)
    queue.push({"id": "first"})
    queue.delete(["first"])
    app.client.command("HSET", META, "novelty", "7", "features", " novelty ", key=PREFIX)
    novelties = (f"{PREFIX}novelty", "lowq:v1:novelty")  # of the shard, and of the namespace
    for key in novelties:
        app.client.command("SET", key, "kept", key=key)
    work(queue)
    queue.push({"id": "short-lived", "ttl": 3600})  # a word of its own beside the other
    assert app.client.command("HGET", META, "novelty", key=PREFIX) == b"7"
    assert b" novelty " in app.client.command("HGET", META, "features", key=PREFIX)
    codes = {finding.code: finding for finding in app.examine(patience=0, repair=True)}
    assert "novelty" in codes["unknown_keys"].what
    assert not {finding.severity for finding in codes.values()} & {"error"}
    queue.drop()
    assert [app.client.command("GET", key, key=key) for key in novelties] == [b"kept"] * 2


def test_options_of_a_queue_that_are_not_known_are_left_out(app: lowq.Lowq) -> None:
    entry = {"shards_count": 1, "novelty": True, "options": {"max_payloads": 5, "novelty": {"a": 1}}}
    key = queues_key("lowq")
    app.client.command("HSET", key, "Orders", json.dumps(entry), key=key)
    work(app.queue("Orders"))
    (info,) = app.queues()
    assert (info.shards_count, info.options["max_payloads"]) == (1, 5)
    assert json.loads(app.client.command("HGET", key, "Orders", key=key)) == entry


def test_a_node_of_another_release_has_its_share_and_is_listed(app: lowq.Lowq) -> None:
    queue = app.queue("Orders", 1)
    part = json.dumps({"queues": {"Orders": 1}, "novelty": [1]})
    details: dict[str, Any] = {"host": "h", "version": "99.0", "queues": ["Orders"], "novelty": {"deep": []}}
    key = nodes_key("lowq")
    run_script(app.client, "heartbeat", key, "", "h:1:abcdef", part, json.dumps(details), 60)
    (node,) = app.nodes()
    assert (node.name, node.version, node.host) == ("h:1:abcdef", "99.0", "h")
    queue.push({"id": 1})
    run_script(app.client, "heartbeat", key, "", "h:2:abcdef", part, json.dumps(details | {"version": "98.0"}), 60)
    assert "version_drift" in {finding.code for finding in app.examine(patience=0)}


def test_a_command_that_is_not_known_is_ignored_by_nodes_and_consumers(app: lowq.Lowq) -> None:
    done: list[str] = []

    @app.worker(shards_count=1)
    def orders(payloads_by_id: dict[str, list[Any]]) -> None:
        done.extend(payloads_by_id)

    queue, channel = app.queue("mail", 1), nodes_key("lowq")
    node = Node(app, threads=1)
    node.start()
    try:
        with queue.consumer() as consumer:
            for name in (node.name, consumer.name):
                message = json.dumps({"to": name, "do": "novelty"})
                until(lambda: app.client.command("SPUBLISH", channel, message, key=channel) == 2, "that both listen")  # noqa: B023
            orders.push("a")
            queue.push("b")
            assert [job.id for job in consumer.take(timeout=PATIENCE)] == ["b"]
            until(lambda: done == ["a"], "that the node goes on")
    finally:
        node.stop()
