"""Whatever an application's objects do, the outcome of a batch is written, by whoever performs it."""

import asyncio
import gc
import itertools
import logging
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest

import lowq
from lowq.node.node import Node
from lowq.retry import find_policy
from lowq.store.keys import shard_prefix
from lowq.testing import drain
from tests.leases import run_out
from tests.rows import case
from tests.rules.node.conftest import MakeApp
from tests.rules.node.drivers import NAMES, Driver, job_of, running, states
from tests.waiting import PATIENCE, until

PayloadsById = dict[str, list[Any]]
Handler = Callable[[PayloadsById], object]

CHARGED, BURIED = {"1": ("retrying", 0)}, {"1": ("morgue", -1)}


class Stop(BaseException):
    """No Exception: what stops a process."""


def raises(*_: Any) -> Any:
    raise RuntimeError("no such thing")


def stops(*_: Any) -> Any:
    raise Stop("no such thing")


def fails(payloads_by_id: PayloadsById) -> None:
    raise ValueError("boom")


# --- exceptions with lives of their own ---


def make_exception(name: str, **body: Any) -> type[Exception]:
    return type(name, (Exception,), body)


EXCEPTIONS = [
    make_exception("NoText", __str__=raises, __repr__=stops),
    make_exception("WrongText", __str__=lambda _: 5, __repr__=lambda _: None),
    make_exception("LargeText", __str__=lambda _: "x" * 5_000_000, __repr__=lambda _: "x" * 5_000_000),
    make_exception("NoClass", __class__=property(raises)),
    make_exception("NoCause", __cause__=property(stops)),
    make_exception("NoTraceback", __traceback__=property(raises)),
    make_exception("NotEqual", __eq__=stops, __hash__=stops, __bool__=raises),
    make_exception("Nothing", __getattribute__=raises),
]


def test_an_exception_is_charged_whatever_it_says_of_itself(make_app: MakeApp, driver: Driver) -> None:
    """Raised, and named by the handler; with a retry left, and without."""

    def handler(payloads_by_id: PayloadsById) -> None:
        lowq.current().fail("said", kind("detached"))
        raise kind("detached")

    for kind in EXCEPTIONS:
        for retries in (0, 1):
            with case(kind, retries):
                app = make_app()
                worker = driver.worker(app, handler, max_retry_count=retries, batch_size=1 + retries)
                worker.perform_async(
                    [{"id": 1, "payload": "v1", "score": 1}, {"id": "said", "score": 1}][: 1 + retries]
                )
                driver.perform(app, worker)
                if not retries:  # the payload is buried, and the worker told
                    assert states(worker, "1") == BURIED
                    assert [(job.id, job.payloads) for job in driver.exhausted] == [("1", [("v1", 1.0)])]
                    continue
                assert states(worker, ["1", "said"]) == {"1": ("due", -1), "said": ("retrying", 0)}
                error = job_of(worker, "said").error
                assert error
                assert len(error.encode()) <= 8192


def test_a_setup_that_raises_it_keeps_the_node_from_starting_and_nobody_waits_for_ever(make_app: MakeApp) -> None:
    for kind, is_async in itertools.product(EXCEPTIONS, (False, True)):
        with case(kind, is_async):
            app = make_app()

            def setup(_self: object, kind: type[Exception] = kind) -> None:
                raise kind("no database")

            async def asetup(_self: object, setup: Callable[[object], None] = setup) -> None:
                setup(_self)

            async def aperform(payloads_by_id: PayloadsById) -> None: ...

            worker: Any = app.worker(queue_name="Orders")(aperform if is_async else fails)
            worker.setup = asetup if is_async else setup
            raised: list[type[BaseException]] = []

            def start(app: lowq.Lowq = app, raised: list[type[BaseException]] = raised) -> None:
                try:
                    Node(app, threads=1).start()
                except BaseException as error:
                    raised.append(type(error))

            starts = threading.Thread(target=start, daemon=True)
            starts.start()
            starts.join(PATIENCE)
            assert raised == [kind]


class StopWithoutClass(Stop):
    """Even `isinstance` raises."""

    __class__ = property(raises)


def test_what_stops_a_process_stops_it_whatever_else_is_wrong(make_app: MakeApp) -> None:
    """It says nothing of itself, and the lease was lost meanwhile."""
    for name, loses_lease in itertools.product(NAMES, (False, True)):
        with case(name, loses_lease):
            app, driver = make_app(), Driver(name)

            def handler(payloads_by_id: PayloadsById, app: lowq.Lowq = app, loses_lease: bool = loses_lease) -> None:
                if loses_lease:
                    run_out(app.client, shard_prefix(app.config.namespace, "Orders", 0))
                raise StopWithoutClass

            worker = driver.worker(app, handler)
            worker.push("1")
            assert type(driver.perform(app, worker)) is StopWithoutClass
            if not loses_lease:
                assert states(worker, "1") == {"1": ("crashed", -1)}


class OddText(str):
    """A text with a mind of its own."""

    __slots__ = ()

    def encode(self, *args: Any, **kwargs: Any) -> bytes:
        raise RuntimeError("no bytes")

    __len__ = __eq__ = __hash__ = __str__ = __repr__ = __format__ = raises


def test_odd_words_of_a_handler_lose_nothing_and_long_ones_are_cut(make_app: MakeApp, driver: Driver) -> None:
    large = "é" * 10_000_000
    rows: list[tuple[Callable[[], object], str, dict[str, tuple[str, int]]]] = [
        (lambda: lowq.current().fail("1", OddText("boom")), "", CHARGED),
        (lambda: lowq.current().fail(OddText("1"), "boom"), "", CHARGED),
        (lambda: lowq.current().fail("1", object()), "say the exception or a text", CHARGED),  # type: ignore[arg-type]
        (lambda: lowq.current().bury("1", OddText("enough")), "enough", BURIED),
        (lambda: lowq.current().bury("1", "file \udc80"), "file ", BURIED),
        (lambda: lowq.current().fail("1", large), "bytes left out", CHARGED),
        (lambda: lowq.current().fail("1", ValueError(large)), "bytes left out", CHARGED),
        (lambda: lowq.current().bury("1", large), "bytes left out", BURIED),
    ]
    for number, (say, text, state) in enumerate(rows):
        with case(number):
            app = make_app()
            worker = driver.worker(app, lambda _, say=say: say())
            worker.push("1")
            driver.perform(app, worker)
            assert states(worker, "1") == state
            error = job_of(worker).error or ""
            assert text in error
            assert len(error.encode()) <= 8192


def test_a_reason_of_people_is_cut_as_well(make_app: MakeApp) -> None:
    for bulk in (False, True):
        with case(bulk):
            queue = make_app().queue("Orders", 1)
            queue.push("1")
            if bulk:
                assert list(queue.bulk("bury", reason="é" * 10_000_000))
            else:
                queue.bury("1", "é" * 10_000_000)
            job = queue.peek("1")
            assert job is not None
            assert "bytes left out" in (job.error or "")
            assert len((job.error or "").encode()) <= 8192


# --- a perform that has not run ---


async def a_coroutine(payloads_by_id: PayloadsById) -> None:
    raise AssertionError("nobody awaits it")


def a_generator(payloads_by_id: PayloadsById) -> Iterator[None]:
    yield


class Awaited:
    def __await__(self) -> Iterator[None]:
        raise AssertionError("nobody awaits it")


def an_awaitable(payloads_by_id: PayloadsById) -> Awaited:
    return Awaited()


async def async_middleware(worker: Any, batch: Any, call_next: Callable[[], Any]) -> None:
    call_next()


def lazy_middleware(worker: Any, batch: Any, call_next: Callable[[], Any]) -> Any:
    call_next()
    return async_middleware(worker, batch, call_next)


def test_what_returns_before_it_has_run_has_failed(make_app: MakeApp) -> None:
    """As a decorator without functools.wraps makes of an async def."""
    rows: list[tuple[Callable[[Any], object], list[Any], str]] = [
        (a_coroutine, [], "orders.perform returned a coroutine, which nobody runs"),
        (a_generator, [], "orders.perform returned a generator, which nobody runs"),
        (an_awaitable, [], "orders.perform returned an awaitable, which nobody runs"),
        (lambda _: None, [lazy_middleware], "middleware lazy_middleware returned a coroutine, which nobody runs"),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # "was never awaited"
        for function, middlewares, says in rows:
            with case(says):
                app = make_app(server_middlewares=middlewares)

                def orders(payloads_by_id: PayloadsById, run: Callable[[Any], Any] = function) -> Any:
                    return run(payloads_by_id)

                def per_id(job_id: str, payloads: list[Any], run: Callable[[Any], Any] = function) -> Any:
                    return run({job_id: payloads})

                worker = app.worker(shards_count=1)(orders)
                worker.push("1")
                drain(worker)
                assert states(worker, "1") == CHARGED
                assert says in (job_of(worker).error or "")
                assert "write a plain def" in (job_of(worker).error or "")
                if not middlewares:
                    one = app.worker(shards_count=1, batch_size=2)(per_id)
                    one.perform_async({"id": job_id} for job_id in "12")
                    drain(one, limit=1)
                    assert says.replace("orders.perform", "per_id.perform_one") in (job_of(one).error or "")
    gc.collect()


def test_an_async_middleware_around_a_plain_worker_is_refused(make_app: MakeApp) -> None:
    for driver, per_id in itertools.product((Driver("thread"), Driver("drain")), (False, True)):
        with case(per_id):
            app = make_app(server_middlewares=[async_middleware])
            worker = driver.worker(app, lambda *_: None, per_id=per_id)
            worker.push("1")
            method = "perform_one" if per_id else "perform"
            with pytest.raises(
                lowq.ConfigError, match=rf"\.{method} is a plain def and middleware async_middleware is"
            ):
                driver.perform(app, worker)
            assert worker.queue.stats().length == 1


# --- hooks and codecs ---

HOOKS = ("format_error", "dump_error", "load_error", "retry_in", "retries_exhausted")


async def cancelled(*_: Any) -> None:
    future = asyncio.get_running_loop().create_future()
    future.cancel()
    await future


def test_a_hook_that_fails_keeps_no_outcome_from_being_written(
    make_app: MakeApp, driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    """What one raises to stop the process does so afterwards, where it is asked for."""
    rows: list[tuple[str, Any]] = [*itertools.product(HOOKS, (raises, stops, lambda *_: None))]
    rows += [
        ("max_retry_count", property(raises)),
        ("retries_exhausted", cancelled),
    ]
    for hook, wrong in rows:
        with case(hook, wrong):
            app = make_app(**({hook: wrong} if hook.endswith("_error") else {}))
            worker = driver.worker(app, fails, max_retry_count=0 if hook in ("load_error", "retries_exhausted") else 5)
            if not hook.endswith("_error"):
                setattr(worker, hook, wrong)
            worker.push("1")
            stop = driver.perform(app, worker)
            stats = worker.queue.stats()
            assert (stats.taken, stats.retries + stats.morgue_length) == (0, 1)
            assert (type(stop) is Stop) is (wrong is stops)
            if wrong is cancelled:
                assert ("retries_exhausted returned a coroutine" in caplog.text) is not driver.is_async


def test_what_dump_error_gives_is_bytes_of_bounded_length_or_not_used(make_app: MakeApp) -> None:
    class OddBytes(bytes):
        __len__ = __bytes__ = raises

    for dumped, says in ((OddBytes(b"odd"), "odd"), (b"x" * 5_000_000, "boom"), (bytearray(b"x"), "boom")):
        with case(says):
            app = make_app(dump_error=lambda _, dumped=dumped: dumped)
            worker = app.worker(shards_count=1)(fails)
            worker.push("1")
            drain(worker, limit=1)
            assert states(worker, "1") == CHARGED
            assert says in (job_of(worker).error or "")
            assert len(job_of(worker).error or "") <= 8192


def test_when_nothing_works_any_more_the_charge_is_a_plain_one(
    app: lowq.Lowq, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handler may leave next to no memory; whatever is tried then may fail."""
    calls: list[int] = []

    def fails_at_first(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise MemoryError
        return find_policy(*args)

    monkeypatch.setattr("lowq.work.outcome.find_policy", fails_at_first)
    worker = driver.worker(app, fails)
    worker.push("1")
    driver.perform(app, worker)
    assert states(worker, "1") == CHARGED
    assert job_of(worker).error


def test_a_payload_that_can_not_be_decoded_is_buried_whatever_the_codec_raises(
    make_app: MakeApp, driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    def load(data: bytes) -> Any:
        if data == b'"bad"':
            raise EXCEPTIONS[0]
        return data.decode()

    app = make_app(load_payload=load)
    worker = driver.worker(app, lambda _: None)
    worker.perform_async({"id": number, "payload": payload} for number, payload in ((1, "bad"), (2, "good")))
    driver.perform(app, worker)
    assert states(worker, "12") == {"1": ("morgue", -1), "2": None}
    assert "can't be decoded" in (job_of(worker).error or "")
    assert "queue 'Orders', id '1': " in caplog.text


def test_what_a_codec_raises_to_stop_the_process_stops_the_node(make_app: MakeApp) -> None:
    for name in ("thread", "loop"):
        with case(name):
            app, driver = make_app(load_payload=stops), Driver(name)
            worker = driver.worker(app, fails)
            worker.push("1", "payload")
            assert type(driver.perform(app, worker)) is Stop
            assert worker.queue.stats().taken == 1


def test_a_codec_that_fails_the_second_time_keeps_the_worker_from_nothing(make_app: MakeApp, driver: Driver) -> None:
    calls: list[bytes] = []

    def load(data: bytes) -> Any:
        calls.append(data)
        if len(calls) == 2:
            raise EXCEPTIONS[0]
        return data.decode()

    app = make_app(load_payload=load)
    worker = driver.worker(app, fails, max_retry_count=0)
    worker.perform_async({"id": 1, "payload": "v1", "score": 1})
    driver.perform(app, worker)
    (told,) = driver.exhausted
    assert (told.id, '"v1"' in told.payloads[0][0]) == ("1", True)
    assert states(worker, "1") == BURIED


# --- what is around a handler ---


def test_an_exit_of_what_surrounds_a_handler_is_a_failure_of_the_batch_or_the_id(
    make_app: MakeApp, driver: Driver
) -> None:
    def run_argparse(*_: Any) -> Any:
        raise SystemExit(2)

    def merge(payloads: list[Any]) -> list[Any]:
        return run_argparse() if "bad" in payloads else payloads

    class Middleware:
        """For workers of both kinds."""

        def __call__(self, worker: Any, batch: Any, call_next: Callable[[], Any]) -> None:
            run_argparse()

        async def acall(self, worker: Any, batch: Any, call_next: Callable[[], Any]) -> None:
            run_argparse()

    rows: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"server_middlewares": [Middleware()]}, {}, "a middleware raised SystemExit(2)"),
        ({}, {"merge": merge}, "the merge function raised SystemExit(2)"),
        ({"format_error": run_argparse}, {}, "ValueError"),
    ]
    for settings, options, error in rows:
        for per_id in (False, True):
            with case(error, per_id):
                app = make_app(**settings)
                worker = driver.worker(app, raise_value_error, per_id=per_id, **options)
                worker.perform_async({"id": 1, "payload": "bad"})
                assert driver.perform(app, worker) is None
                assert states(worker, "1") == CHARGED
                assert error in (job_of(worker).error or "")


def raise_value_error(*_: Any) -> None:
    raise ValueError


# --- the log ---


class Raising(logging.Handler):
    """A chat that is down."""

    def __init__(self, error: type[BaseException]) -> None:
        super().__init__()
        self.error = error

    def handle(self, record: logging.LogRecord) -> bool:
        raise self.error("the chat is down")


@contextmanager
def broken_logging(part: str) -> Iterator[None]:
    """Whatever is logged meanwhile raises, in this part of logging."""
    logger, node_logger, factory = (
        logging.getLogger("lowq"),
        logging.getLogger("lowq.node"),
        logging.getLogRecordFactory(),
    )
    handler = Raising(SystemExit if part == "exiting handler" else RuntimeError)
    if part == "filter":
        node_logger.addFilter(raises)
    elif part == "factory":
        logging.setLogRecordFactory(raises)
    else:
        logger.addHandler(handler)
    try:
        yield
    finally:
        logging.setLogRecordFactory(factory)
        logger.removeHandler(handler)
        node_logger.removeFilter(raises)


def test_where_logging_is_broken_outcomes_are_written_and_the_shard_goes_on(make_app: MakeApp, driver: Driver) -> None:
    def handler(payloads_by_id: PayloadsById) -> None:
        if "1" in payloads_by_id:
            raise ValueError("boom")

    for part in ("handler", "exiting handler", "filter", "factory"):
        with case(part), broken_logging(part):
            app = make_app(dump_error=raises, load_error=raises)  # remarks on hooks stop nothing either
            worker = driver.worker(app, handler, batch_size=1, max_retry_count=0)
            setattr(worker, "retries_exhausted", raises)  # noqa: B010
            worker.perform_async({"id": job_id} for job_id in "12")
            for _ in range(2):
                assert driver.perform(app, worker) is None
            assert states(worker, "12") == {**BURIED, "2": None}


def test_nothing_of_an_error_begins_a_line_of_the_log(
    make_app: MakeApp, driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    """Charged, released as `release_on` says, and of a hook."""
    TwoLines = make_exception("TwoLines", __repr__=lambda _: "one\nERROR two")  # noqa: N806 - a class

    def handler(payloads_by_id: PayloadsById) -> None:
        raise TwoLines

    caplog.set_level(logging.INFO, "lowq")
    rows: list[dict[str, Any]] = [{}, {"release_on": {TwoLines: 50}}]
    for options in rows:
        app = make_app()
        worker = driver.worker(app, handler, **options)
        setattr(worker, "retry_in", lambda *_: TwoLines())  # noqa: B010
        worker.push("1")
        driver.perform(app, worker)
    messages = [record.getMessage() for record in caplog.records if record.name == "lowq.node"]
    assert any("as release_on says" in message for message in messages) is driver.is_node
    assert not [message for message in messages if "\n" in message]


def test_the_outcome_is_written_before_the_log_is_told(make_app: MakeApp, driver: Driver) -> None:
    """A handler that blocks, such as a chat that does not answer, delays no outcome."""
    seen: list[str] = []

    class Looks(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "Orders" in record.getMessage() or "dump_error" in record.getMessage():
                seen.append(job_of(worker).state)

    app = make_app(dump_error=raises)
    worker = driver.worker(app, fails)
    worker.push("1")
    handler = Looks(logging.WARNING)
    logging.getLogger("lowq").addHandler(handler)
    try:
        driver.perform(app, worker)
    finally:
        logging.getLogger("lowq").removeHandler(handler)
    assert seen  # what is wrong with the hook, and in a node the failure
    assert set(seen) == {"retrying"}


@pytest.mark.parametrize("is_async", [False, True], ids=["thread", "loop"])
def test_a_shard_whose_reply_cannot_be_read_rests_and_delays_no_other(
    app: lowq.Lowq, caplog: pytest.LogCaptureFixture, is_async: bool
) -> None:
    async def awaits(_payloads_by_id: dict[str, list[Any]]) -> None:
        pass

    def calls(_payloads_by_id: dict[str, list[Any]]) -> None:
        pass

    handler: Any = awaits if is_async else calls
    broken, sound = (app.worker(queue_name=name, shards_count=1)(handler) for name in ("Broken", "Sound"))
    broken.push("1")
    sound.push("1")
    with closing(app.connect(1)) as client:  # as by somebody's own command: no script writes such a score
        prefix = shard_prefix(app.config.namespace, "Broken", 0)
        client.command("ZADD", f"{prefix}retries", "inf", "1", key=prefix)
    with running(Node(app, threads=1)):
        until(lambda: any(getattr(record, "event", "") == "trouble" for record in caplog.records), "the trouble")
        until(lambda: sound.queue.stats().processed == 1, "the other queue's job")
    errors = [record for record in caplog.records if record.levelname == "ERROR"]
    said = [record.getMessage() for record in errors if record.name == "lowq.node"]
    assert {text.partition(":")[0] for text in said} == {"Broken"}, said
