"""The options of a queue in the registry: declared in one place, known in all."""

import itertools
import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import lowq
from lowq.errors import ConfigError, ScriptError, ShardsCountError
from lowq.queue import Queue
from lowq.queue_options import QueueOptions
from lowq.store.keys import queues_key
from tests.rows import case

MakeApp = Callable[[], lowq.Lowq]


@pytest.fixture
def make_app(store_url: str) -> Iterator[MakeApp]:
    made: list[lowq.Lowq] = []

    def make() -> lowq.Lowq:
        made.append(lowq.Lowq(redis_url=store_url))
        return made[-1]

    yield make
    for app in made:
        app.close()


def options_of(queue: Queue) -> QueueOptions:
    return queue._target().options


def entry(app: lowq.Lowq) -> Any:
    key = queues_key("lowq")
    return json.loads(app.client.command("HGET", key, "mail", key=key))


def use(app: lowq.Lowq, how: str) -> None:
    """Uses the queue "mail" of two shards, which is entered in the registry first."""
    if how == "node":
        work: Any = type("Work", (lowq.Worker,), {"perform": lambda _self, _payloads_by_id: None})
        app.worker(queue_name="mail", shards_count=2)(work)
        lowq.Node(app, threads=1).start()
    elif how == "consume":
        app.queue("mail", 2).consumer()
    elif how == "declare":
        app.queue("mail", 2, ttl=5).push({"id": 1})
    else:
        app.queue("mail", 2).push({"id": 1})


def test_an_entry_that_cannot_be_read_is_named_with_what_to_do(make_app: MakeApp, store_url: str) -> None:
    entries = [b"[]", b"5", b'{"shards_count":"2"}', b'{"shards_count":-1}']
    if not store_url.startswith("memory:"):  # there the decoder of JSON raises an error of Python's
        entries += [b"", b"\xff", b"null"]
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


def declared(app: lowq.Lowq, **options: Any) -> Queue:
    queue = app.queue("mail", **options)
    queue.push([])
    return queue


def test_what_is_declared_with_the_name_is_known_to_who_only_knows_the_name(make_app: MakeApp) -> None:
    app, other = make_app(), make_app()
    declared(app, shards_count=4, ttl=3600, merge="append")
    assert entry(app) == {"shards_count": 4, "options": {"ttl": 3600.0, "merge": "append"}}
    assert options_of(other.queue("mail")) == QueueOptions("mail", 4, ttl=3600.0, merge="append")
    assert options_of(other.queue("mail", 4)) == QueueOptions("mail", 4, ttl=3600.0, merge="append")
    assert options_of(other.queue("mail")) == options_of(app.queue("mail"))


def test_a_queue_without_options_has_none_in_the_registry(make_app: MakeApp) -> None:
    app = make_app()
    declared(app, shards_count=4)
    assert entry(app) == {"shards_count": 4, "options": {}}


def test_who_has_the_worker_goes_by_it(make_app: MakeApp) -> None:
    app, other = make_app(), make_app()

    @app.worker(queue_name="mail", shards_count=2, capacity=7)
    def mail(payloads_by_id: dict[str, list[Any]]) -> None: ...

    mail.perform_async({"id": 1})
    assert options_of(app.queue("mail")).capacity == 7
    assert options_of(other.queue("mail")).capacity == 7


def test_an_option_is_changed_and_the_others_stay(make_app: MakeApp, caplog: pytest.LogCaptureFixture) -> None:
    app, other = make_app(), make_app()

    @app.worker(queue_name="mail", shards_count=2, batch_size=7, ttl=60, priority=3)
    def mail(payloads_by_id: dict[str, list[Any]]) -> None: ...

    mail.perform_async({"id": 1})
    with caplog.at_level(logging.WARNING, "lowq"):
        declared(other, ttl=90, debounce=1)
    assert "queue 'mail' is declared with other options than before" in caplog.text
    assert "debounce: None -> 1.0, ttl: 60.0 -> 90.0" in caplog.text
    assert (
        entry(app)["options"] | {"batch_size": 7, "ttl": 90.0, "priority": 3, "debounce": 1.0} == entry(app)["options"]
    )
    declared(make_app(), ttl=None)
    assert "ttl" not in entry(app)["options"]


def test_the_same_declaration_again_is_not_worth_a_word(make_app: MakeApp, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "lowq"):
        for _ in range(2):
            declared(make_app(), shards_count=4, ttl=3600)
    assert not caplog.records


def test_a_worker_that_is_declared_otherwise_wins_as_the_last(
    make_app: MakeApp, caplog: pytest.LogCaptureFixture
) -> None:
    declared(make_app(), shards_count=5, ttl=3600, capacity=5)
    app = make_app()

    @app.worker(queue_name="mail", capacity=6)
    def mail(payloads_by_id: dict[str, list[Any]]) -> None: ...

    with caplog.at_level(logging.WARNING, "lowq"):
        mail.perform_async({"id": 1})
    assert "capacity: 5 -> 6, ttl: 3600.0 -> None" in caplog.text
    assert options_of(make_app().queue("mail")) == QueueOptions("mail", 5, capacity=6)


def test_another_number_of_shards_is_refused_by_who_is_strict_and_nothing_changes(make_app: MakeApp) -> None:
    app, strict = make_app(), make_app()
    declared(app, shards_count=4, ttl=3600)
    strict.config.__dict__["strict_shards_count"] = True
    with pytest.raises(ShardsCountError):
        declared(strict, shards_count=5, ttl=60)
    assert entry(app) == {"shards_count": 4, "options": {"ttl": 3600.0}}


def test_another_number_of_shards_is_that_of_the_registry_and_the_options_are_the_callers(
    make_app: MakeApp, caplog: pytest.LogCaptureFixture
) -> None:
    app, other = make_app(), make_app()
    declared(app, shards_count=4, ttl=3600)
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


def test_two_that_declare_different_options_at_once_lose_none(
    make_app: MakeApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, other = make_app(), make_app()
    declared(app, shards_count=4)
    register = lowq.Lowq._register

    def meanwhile(self: lowq.Lowq, *args: Any, **options: Any) -> bytes:
        if self is app and options.get("entry") and not options["based_on"].count(b"capacity"):
            declared(other, capacity=5)
        return register(self, *args, **options)

    monkeypatch.setattr(lowq.Lowq, "_register", meanwhile)
    declared(app, ttl=60)
    assert entry(app)["options"] == {"ttl": 60.0, "capacity": 5}


def test_after_the_registry_was_lost_a_declaration_is_entered_again(make_app: MakeApp) -> None:
    app = make_app()
    queue = declared(app, shards_count=4, ttl=60)
    queue.drop()
    queue.push({"id": 1})
    assert entry(app) == {"shards_count": 4, "options": {"ttl": 60.0}}


def test_a_foreign_entry_is_no_obstacle(make_app: MakeApp) -> None:
    app = make_app()
    key = queues_key("lowq")
    app.client.command("HSET", key, "mail", '{"shards_count": 4, "options": [5]}', key=key)
    declared(app, ttl=60)
    assert entry(app) == {"shards_count": 4, "options": {"ttl": 60.0}}


def test_a_consumer_has_the_ttr_of_the_queue_unless_it_says_another(make_app: MakeApp) -> None:
    app = make_app()
    queue = declared(app, shards_count=1, ttr=60)
    for handle in (queue, make_app().queue("mail")):
        with handle.consumer() as consumer:
            assert consumer._ttr == 60
        with handle.consumer(ttr=5) as consumer:
            assert consumer._ttr == 5


def test_jobs_that_say_nothing_of_their_own_have_what_the_queue_says_beside_others(
    make_app: Callable[..., lowq.Lowq],
) -> None:
    queue = make_app().queue("mail", 1, ttl=3600, priority=3)
    queue.push([{"id": "usual"}, {"id": "urgent", "priority": 1}, {"id": "for good", "ttl": None}])
    queue.push("alone")
    queue.push({"id": "first", "priority": 0, "ttl": None})

    def said(job_id: str) -> tuple[int, bool]:
        job = queue.peek(job_id)
        assert job is not None
        return job.priority, job.expires_at is not None

    assert {job_id: said(job_id) for job_id in ("usual", "urgent", "for good", "alone", "first")} == {
        "usual": (3, True),
        "urgent": (1, True),
        "for good": (3, False),
        "alone": (3, True),
        "first": (0, False),
    }
    queue.push([{"id": "first"}, {"id": "urgent", "priority": 2}, {"id": "usual", "priority": 2}])
    assert [said(job_id)[0] for job_id in ("first", "urgent", "usual")] == [0, 1, 2]
