"""The options of a queue in the registry: declared in one place, known in all."""

import itertools
import json
import logging
from typing import Any

import pytest

import lowq
from lowq.errors import ConfigError, ScriptError, ShardsCountError
from lowq.node.node import Node
from lowq.queue import Queue
from lowq.store import Call, Client
from lowq.store.keys import queues_key
from tests.rows import case
from tests.rules.conftest import MakeApp
from tests.waiting import NEVER, until


def entry(app: lowq.Lowq) -> Any:
    key = queues_key("lowq")
    return json.loads(app.client.command("HGET", key, "mail", key=key))


def declared(app: lowq.Lowq, **options: Any) -> Queue:
    queue = app.queue("mail", **options)
    queue.push([])
    return queue


def decorated(app: lowq.Lowq, **options: Any) -> type[lowq.Worker[Any]]:
    made: type[lowq.Worker[Any]] = app.worker(queue_name="mail", **options)(lambda _payloads_by_id: None)
    return made


def use(app: lowq.Lowq, how: str) -> None:
    """Uses the queue "mail" of two shards, which is entered in the registry first."""
    if how == "node":
        decorated(app, shards_count=2)
        Node(app, threads=1).start()
    elif how == "consume":
        app.queue("mail", 2).consumer()
    elif how == "declare":
        app.queue("mail", 2, ttl=5).push({"id": 1})
    else:
        app.queue("mail", 2).push({"id": 1})


def test_an_entry_that_cannot_be_read_is_named_with_what_to_do(make_app: MakeApp, store_url: str) -> None:
    entries = [b"[]", b'{"shards_count":"2"}', b'{"shards_count":-1}']
    if not store_url.startswith("memory:"):  # there the decoder of JSON raises an error of Python's
        entries += [b"", b"\xff"]
    message = r"queue 'mail' has an entry in the registry that can't be read.*HDEL"
    for how, written in itertools.product(("push", "declare", "consume", "node"), entries):
        with case(how, written):
            app, key = make_app(), queues_key("lowq")
            app.client.command("FLUSHALL")
            app.client.command("HSET", key, "mail", written, key=key)
            with pytest.raises(ScriptError, match=message) as said:
                use(app, how)
            assert said.value.key == key
            assert app.client.command("HGET", key, "mail", key=key) == written
            app.client.command("HDEL", key, "mail", key=key)
            assert app.queue("mail", 2).push({"id": 1}) == 1


def test_what_is_declared_with_the_name_is_known_to_who_only_knows_the_name(make_app: MakeApp) -> None:
    app, other = make_app(), make_app()
    queue = declared(app, shards_count=4, ttl=3600, merge="append")
    assert entry(app) == {"shards_count": 4, "options": {"ttl": 3600.0, "merge": "append"}}
    for name_only in (other.queue("mail"), other.queue("mail", 4)):
        assert name_only.shards_count == 4
        name_only.push([{"id": "x", "payload": "same"}] * 2)
        job = queue.fetch("x")["x"]
        assert (job.payloads_count, job.expires_at is None) == (2, False)
        queue.delete("x")
    queue.drop()
    queue.push({"id": 1})
    assert entry(app) == {"shards_count": 4, "options": {"ttl": 3600.0, "merge": "append"}}, "it is entered again"
    queue.drop()
    declared(make_app(), shards_count=4)
    assert entry(app) == {"shards_count": 4, "options": {}}


def test_an_option_is_changed_and_the_others_stay(make_app: MakeApp, caplog: pytest.LogCaptureFixture) -> None:
    decorated(make_app(), shards_count=2, batch_size=7, ttl=60, priority=3).perform_async({"id": 1})
    app = make_app()
    with caplog.at_level(logging.WARNING, "lowq"):
        declared(app, ttl=90, debounce=1)
    assert "queue 'mail' is declared with other options than before" in caplog.text
    assert "debounce: None -> 1.0, ttl: 60.0 -> 90.0" in caplog.text
    options = entry(app)["options"]
    assert options | {"batch_size": 7, "ttl": 90.0, "priority": 3, "debounce": 1.0} == options
    caplog.clear()
    with caplog.at_level(logging.WARNING, "lowq"):
        declared(make_app(), ttl=90, debounce=1)
    assert "queue 'mail'" not in caplog.text, "the same again is not worth a word"
    declared(make_app(), ttl=None)
    assert "ttl" not in entry(app)["options"]


def test_a_worker_that_is_declared_otherwise_wins_as_the_last(
    make_app: MakeApp, caplog: pytest.LogCaptureFixture
) -> None:
    declared(make_app(), shards_count=5, ttl=3600, capacity=5)
    app = make_app()
    with caplog.at_level(logging.WARNING, "lowq"):
        decorated(app, capacity=6).perform_async({"id": 1})
    assert "capacity: 5 -> 6, ttl: 3600.0 -> None" in caplog.text
    assert entry(app)["options"].get("ttl") is None
    assert make_app().queue("mail").stats().capacity == app.queue("mail").stats().capacity == 6


def test_another_number_of_shards_is_that_of_the_registry_and_the_options_are_the_callers(
    make_app: MakeApp, caplog: pytest.LogCaptureFixture
) -> None:
    app, other = make_app(), make_app()
    declared(app, shards_count=4, ttl=3600)
    with pytest.raises(ShardsCountError):
        declared(make_app(strict_shards_count=True), shards_count=5, ttl=60)
    assert entry(app) == {"shards_count": 4, "options": {"ttl": 3600.0}}, "who is strict changes nothing"
    with caplog.at_level(logging.WARNING, "lowq"):
        for _ in range(2):
            declared(other, shards_count=5, ttl=60)
    assert entry(app) == {"shards_count": 4, "options": {"ttl": 60.0}}
    assert other.queue("mail").shards_count == 4
    assert caplog.text.count("has 4 shards in Redis, and the code of this process says shards_count=5") == 1


def test_what_contradicts_the_other_options_is_refused_and_nothing_changes(make_app: MakeApp) -> None:
    app = make_app()
    declared(app, shards_count=4, debounce=5)
    with pytest.raises(ConfigError, match=r"max_wait=4.0 must not be less than debounce=5.0"):
        declared(make_app(), max_wait=4)
    assert entry(app) == {"shards_count": 4, "options": {"debounce": 5.0}}
    key = queues_key("lowq")
    app.client.command("HSET", key, "mail", '{"shards_count": 4, "options": [5]}', key=key)
    declared(make_app(), ttl=60)
    assert entry(app) == {"shards_count": 4, "options": {"ttl": 60.0}}, "a foreign entry is no obstacle"


def test_two_that_declare_different_options_at_once_lose_none(
    make_app: MakeApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, other = make_app(), make_app()
    declared(app, shards_count=4)
    call, declares = Client.call, [False]

    def meanwhile(client: Client, asked: Call[Any], **options: Any) -> Any:
        if client is app.client and "ttl" in str(asked.args) and not declares[0]:
            declares[0] = True
            declared(other, capacity=5)
        return call(client, asked, **options)

    monkeypatch.setattr(Client, "call", meanwhile)
    declared(app, ttl=60)
    assert declares == [True]
    assert entry(app)["options"] == {"ttl": 60.0, "capacity": 5}


def test_a_consumer_has_the_ttr_of_the_queue_unless_it_says_another(make_app: MakeApp) -> None:
    queue = declared(make_app(), shards_count=1, ttr=0.2)
    queue.push("x")
    name_only = make_app().queue("mail")
    with name_only.consumer() as consumer:
        assert consumer.take(1)
        until(lambda: queue.fetch("x")["x"].crashes, "that its ttr has passed")
    with name_only.consumer(ttr=NEVER) as consumer:
        (job,) = consumer.take()
        job.ack()
    assert queue.stats().length == 0


def test_jobs_that_say_nothing_of_their_own_have_what_the_queue_says_beside_others(make_app: MakeApp) -> None:
    queue = make_app().queue("mail", 1, ttl=3600, priority=3)
    queue.push([{"id": "usual"}, {"id": "urgent", "priority": 1}, {"id": "for good", "ttl": None}])
    queue.push("alone")
    queue.push({"id": "first", "priority": 0, "ttl": None})
    ids = ("usual", "urgent", "for good", "alone", "first")
    found = queue.fetch(ids)
    assert [found[job_id].priority for job_id in ids] == [3, 1, 3, 3, 0]
    assert [job_id for job_id in ids if found[job_id].expires_at is None] == ["for good", "first"]
    queue.push([{"id": "first"}, {"id": "urgent", "priority": 2}, {"id": "usual", "priority": 2}])
    assert [queue.fetch(job_id)[job_id].priority for job_id in ("first", "urgent", "usual")] == [0, 1, 2]
