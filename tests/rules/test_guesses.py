"""Names that people guess: each error names lowq's own word."""

import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from click.testing import CliRunner

import lowq
import lowq.guesses
import lowq.testing
from lowq.cli import main
from lowq.options import WORKER_OPTIONS
from lowq.settings import SETTINGS
from tests.rows import case


@pytest.fixture
def app() -> lowq.Lowq:
    return lowq.Lowq(redis_url="memory://")


def add_worker(app: lowq.Lowq, **body: Any) -> Any:
    decorate: Any = app.worker
    return decorate(type("Orders", (lowq.Worker,), {"perform": lambda _self, _payloads: None, **body}))


def said_by(kind: type[Exception], call: Callable[..., object], *args: Any, **options: Any) -> str:
    with pytest.raises(kind) as raised:
        call(*args, **options)
    return str(raised.value)


def test_an_option_of_a_worker_or_a_queue_and_a_setting(app: lowq.Lowq) -> None:
    decorate: Any = app.worker
    make: Any = lowq.Lowq
    queue: Any = app.queue
    for name, word in (
        ("max_retries", "max_retry_count"), ("retries", "max_retry_count"), ("timeout", "time_limit"),
        ("delay", "push(42, payload, delay=60)"), ("countdown", "delay=60"), ("eta", "perform_at"),
        ("on_startup", "def setup(self)"),
    ):  # fmt: skip
        with case(name):
            options = {name: 5}
            assert word in said_by(lowq.ConfigError, decorate(**options), _Plain)
            assert word in said_by(lowq.ConfigError, queue, "mail", 5, **options)
    for name, word in (("on_startup", "on_server_init"), ("retries", "max_retry_count"), ("timeout", "time_limit")):
        with case(name):
            assert word in said_by(lowq.ConfigError, make, **{name: 5})
    said = said_by(lowq.ConfigError, add_worker, app, max_retries=3)
    assert "did you mean the worker option 'max_retry_count'" in said
    add_worker(app, timeout=3, retries=3)  # which may well be the worker's own


class _Plain:
    def perform(self, payloads_by_id: dict[str, list[Any]]) -> None: ...


def test_a_field_of_a_job(app: lowq.Lowq) -> None:
    worker = add_worker(app)
    queue: Any = app.queue("Orders", 5)
    for name, word in (
        ("countdown", "delay"), ("eta", "perform_at"), ("retries", "max_retry_count"), ("args", "payload"),
        ("max_retries", "max_retry_count"),
    ):  # fmt: skip
        with case(name):
            options = {name: 5}
            for push, given in (
                (worker.push, [42, {}]), (worker.perform_async, [{"id": 42, **options}]), (queue.push, [42, {}]),
            ):  # fmt: skip
                said = said_by(lowq.JobError, push, *given, **({} if len(given) == 1 else options))
                assert f"unknown field {name!r}; " in said
                assert word in said.partition("; ")[2]
    assert "the worker says it" in said_by(lowq.JobError, worker.perform_async, {"id": 42, "timeout": 5})


def test_the_call_of_another_library(app: lowq.Lowq) -> None:
    worker: Any = add_worker(app)

    def run(push: Callable[..., Any]) -> Callable[..., object]:
        return lambda *given: asyncio.run(push(*given))

    for push, given, said in (
        (worker.perform_async, (42, {}), "write Orders.push(42, payload)"),
        (worker.perform_async, ([{"id": 1}], {}), "write Orders.push(42, payload)"),
        (run(worker.aperform_async), ("a", {}), "write Orders.push(42, payload)"),
        (worker.push, (1, {}, {}), "all else by name: Orders.push(42, payload, delay=60)"),
        (run(worker.apush), (1, {}, {}), "all else by name: Orders.push(42, payload, delay=60)"),
    ):
        with case(push, given):
            assert said in said_by(lowq.JobError, push, *given)


def test_an_attribute_is_not_there_and_its_error_says_what_is(app: lowq.Lowq) -> None:
    worker = add_worker(app)
    for owner, name, words in (
        (
            worker,
            "delay",
            "Orders has no 'delay': Orders.push(42, payload) pushes a job, and Orders.push(42, payload, ",
        ),
        (worker, "enqueue", "Orders.push(42, payload)"),
        (worker(), "enqueue", "Orders.push(42, payload)"),
        (worker, "perform_in", "Orders.push(42, payload, delay=60) pushes a job for later"),
        (worker.queue, "perform_at", "queue.push(42, payload, perform_at=...) pushes a job for later"),
        (worker, "push_many", "Orders.perform_async(jobs) pushes any iterable of jobs"),
        (worker.queue, "delay", "queue.push(42, payload, delay=60)"),
        (worker.queue, "enqueue", "queue.push(42, payload)"),
        (worker.queue, "push_many", "queue.push(jobs)"),
        (app, "on_startup", "@app.on_loop_start"),
        (lowq, "on_startup", "@app.on_loop_start"),
        (lowq, "task", "@lowq.worker"),
    ):
        with case(owner, name):
            assert words in said_by(AttributeError, getattr, owner, name)
            assert not hasattr(owner, name)
    assert "has no attribute 'unheard_of'" in said_by(AttributeError, getattr, lowq, "unheard_of")


def test_an_attribute_of_the_workers_own_of_such_a_name_stays(app: lowq.Lowq) -> None:
    worker = add_worker(app, delay=7, enqueue=lambda _self: "mine")
    assert worker.delay == 7
    instance = worker()
    instance.send = 8
    assert (instance.enqueue(), instance.send) == ("mine", 8)


def test_an_attribute_of_such_a_name_may_come_from_a_base_after_the_worker(app: lowq.Lowq) -> None:
    class Sender:
        delay = 7

        def send(self, to: str) -> str:
            return f"sent to {to}"

    @app.worker
    class Mail(lowq.Worker[Any], Sender):
        def perform(self, payloads_by_id: dict[str, list[Any]]) -> None: ...

    mail: Any = Mail()
    assert (Mail.delay, mail.send("ann")) == (7, "sent to ann")
    assert "Mail.push(42, payload)" in said_by(AttributeError, getattr, mail, "enqueue")


def test_a_verb_of_the_command_line() -> None:
    for verb, word in (
        ("top", "lowq stats --watch"), ("queues", "lowq stats"), ("status", "lowq nodes"), ("drain", "lowq quiet NODE"),
    ):  # fmt: skip
        with case(verb):
            found = CliRunner().invoke(main, [verb])
            assert found.exit_code == 2
            assert f"there is no verb {verb!r}; " in found.stderr
            assert word in found.stderr


def test_what_is_named_instead_is_there() -> None:
    """The table itself: a word for a verb is a verb, and no guess is a name of lowq's."""
    for verb, hint in lowq.guesses.VERBS.items():
        with case(verb):
            assert verb not in main.commands
            meant = [words.split()[0] for words in hint.split("lowq ")[1:]]
            assert meant
            assert set(meant) <= main.commands.keys()
    assert not lowq.guesses.OPTIONS.keys() & WORKER_OPTIONS.keys()
    assert not lowq.guesses.SETTINGS.keys() & SETTINGS.keys()
    assert not lowq.guesses.JOB_FIELDS.keys() & lowq.JobDict.__annotations__.keys()
    for names, owner in ((lowq.guesses.PUSHES, lowq.Worker), (lowq.guesses.APPLICATION, lowq.Lowq)):
        assert all(isinstance(vars(owner)[name], lowq.guesses.Guess) for name in names)


def test_without_asyncio_it_is_said_what_is_needed(app: lowq.Lowq) -> None:
    worker = add_worker(app)
    worker.push(1)
    for coroutine in (worker.apush(42), worker.aperform_async([{"id": 42}]), lowq.testing.adrain(worker)):
        with case(coroutine):
            said = said_by(lowq.ConfigError, coroutine.send, None)  # as trio would
            assert "need a running event loop of asyncio" in said
            assert "trio.to_thread.run_sync(OrderSync.push, 42, payload)" in said
            coroutine.close()


def test_settings_in_seconds_take_a_timedelta() -> None:
    app = lowq.Lowq(shutdown_timeout=timedelta(minutes=1), push_timeout=timedelta(seconds=2))
    assert (app.config.shutdown_timeout, app.config.push_timeout) == (60.0, 2.0)
    wrong: Any = timedelta(-1)
    with pytest.raises(lowq.ConfigError, match="lease_ttl"):
        lowq.Lowq(lease_ttl=wrong)
