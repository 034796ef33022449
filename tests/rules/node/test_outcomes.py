"""Whatever an application's objects do, the outcome of a batch is written: by a node's thread and by `drain` alike."""

import asyncio
import gc
import inspect
import itertools
import logging
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import lowq
from lowq.error_policies import find_policy
from lowq.job import Job
from lowq.node.outcome import NO_REDIS_PAUSES
from lowq.sharding import shard_of
from lowq.store.keys import shard_prefix
from lowq.testing import drain
from lowq.workers import Worker, is_async
from tests.leases import run_out
from tests.rows import case
from tests.rules.thread_rig import ThreadRig

pytestmark = pytest.mark.parametrize("store_url", ["redis"], indirect=True)

PayloadsById = dict[str, list[Any]]
Handler = Callable[[PayloadsById], object]
#: Makes an application on the store of the test, with these settings, in a namespace of its own.
MakeApp = Callable[..., lowq.Lowq]
#: Performs what is due, once.
Perform = Callable[[type[Worker[Any]]], None]


@pytest.fixture
def apps() -> Iterator[list[lowq.Lowq]]:
    """Those of the test."""
    apps: list[lowq.Lowq] = []
    yield apps
    for app in apps:
        app.close()


@pytest.fixture
def make_app(store_url: str, apps: list[lowq.Lowq]) -> MakeApp:
    def make(**settings: Any) -> lowq.Lowq:
        apps.append(lowq.Lowq(redis_url=store_url, namespace=f"lowq{len(apps)}", **settings))
        return apps[-1]

    return make


@pytest.fixture(params=["thread", "drain", "async"])
def perform_once(request: pytest.FixtureRequest, apps: list[lowq.Lowq]) -> Perform:
    rigs: dict[type, ThreadRig] = {}

    def by_thread(worker: type[Worker[Any]]) -> None:
        """Once more for the same worker: by the same thread."""
        app = next(app for app in apps if worker in app.workers.values())
        rig = rigs.get(worker) or ThreadRig(app, worker)
        rigs[worker] = rig
        rig.wake()
        rig.turn()

    def by_drain(worker: type[Worker[Any]]) -> None:
        try:
            drain(worker, limit=1)
        except Stop:
            pass  # what stops a process comes out, as the outcome was written

    def by_async_drain(worker: type[Worker[Any]]) -> None:
        make_async(worker)
        by_drain(worker)

    performs: dict[str, Perform] = {"thread": by_thread, "drain": by_drain, "async": by_async_drain}
    return performs[request.param]


def make_async(worker: type[Worker[Any]]) -> None:
    """Makes the worker an async one that does the same."""
    perform, retries_exhausted = worker.perform, worker.retries_exhausted
    if is_async(worker) or inspect.isgeneratorfunction(perform):
        return

    async def aperform(self: Any, payloads_by_id: PayloadsById) -> None:
        await asyncio.sleep(0)
        returned: Any = perform(self, payloads_by_id)
        if returned is not None:
            await returned

    async def aretries_exhausted(self: Any, jobs: list[Job]) -> None:
        await asyncio.sleep(0)
        retries_exhausted(self, jobs)

    worker.perform = aperform  # type: ignore[method-assign]
    worker.retries_exhausted = aretries_exhausted  # type: ignore[method-assign]


class Stop(BaseException):
    """No Exception: what stops a process."""


def make_worker(app: lowq.Lowq, handler: Handler, **options: Any) -> type[Worker[Any]]:
    class Orders(lowq.Worker[Any]):
        exhausted: list[Job] = []  # noqa: RUF012 - one list per worker, as each call makes a class

        def perform(self, payloads_by_id: PayloadsById) -> None:
            handler(payloads_by_id)

        def retry_in(self, retry_count: int) -> float:
            return 100.0

        def retries_exhausted(self, jobs: list[Job]) -> None:
            self.exhausted.extend(jobs)

    return app.worker(**{"shards_count": 1, **options})(Orders)


def assert_charged(worker: type[Worker[Any]], job_id: str = "1") -> Job:
    """The id waits for its first retry."""
    job = worker.queue.peek(job_id)
    assert job is not None
    assert (job.state, job.retry_count, job.crashes) == ("retrying", 0, 0)
    assert worker.queue.stats().taken == 0
    return job


def assert_buried(worker: type[Worker[Any]], job_id: str = "1") -> Job:
    job = worker.queue.peek(job_id)
    assert job is not None
    assert job.state == "morgue"
    assert worker.queue.stats().taken == 0
    return job


# --- exceptions with lives of their own ---


def raises(*_: Any) -> Any:
    raise RuntimeError("no such thing")


def stops(*_: Any) -> Any:
    raise Stop("no such thing")


def make_exception(name: str, **body: Any) -> type[Exception]:
    return type(name, (Exception,), body)


def _guarded(self: Any, name: str) -> Any:
    raise RuntimeError(f"{name} is not to be had")


EXCEPTIONS = [
    make_exception("NoText", __str__=raises, __repr__=raises),
    make_exception("NoTextAtAll", __str__=stops, __repr__=stops),
    make_exception("WrongText", __str__=lambda _: 5, __repr__=lambda _: None),
    make_exception("LargeText", __str__=lambda _: "x" * 5_000_000, __repr__=lambda _: "x" * 5_000_000),
    make_exception("NoClass", __class__=property(raises)),
    make_exception("NoCause", __cause__=property(raises)),
    make_exception("StopsForItsCause", __cause__=property(stops)),
    make_exception("NoTraceback", __traceback__=property(raises)),
    make_exception("StopsForItsTraceback", __traceback__=property(stops)),
    make_exception("NoNotes", __notes__=property(raises)),
    make_exception("NoTruth", __bool__=raises, __len__=stops),
    make_exception("NotEqual", __eq__=stops, __hash__=stops),
    make_exception("Nothing", __getattribute__=_guarded),
]


def raise_one(kind: type[Exception]) -> Handler:
    def handler(payloads_by_id: PayloadsById) -> None:
        raise kind("detached")

    return handler


def fail_by_one(kind: type[Exception]) -> Handler:
    return lambda _: lowq.current().fail("1", kind("detached"))


def test_an_exception_is_charged_whatever_it_says_of_itself(make_app: MakeApp, perform_once: Perform) -> None:
    for kind, make_handler, is_last in itertools.product(EXCEPTIONS, [raise_one, fail_by_one], [False, True]):
        with case(kind, make_handler, is_last):
            worker = make_worker(make_app(), make_handler(kind), max_retry_count=0 if is_last else 1)
            worker.perform_async({"id": 1, "payload": "v1", "score": 1})
            perform_once(worker)
            if is_last:  # the payload is buried, and the worker told
                assert_buried(worker)
                (told,) = worker.exhausted  # type: ignore[attr-defined]  # of the class that `make_worker` makes
                assert (told.id, told.payloads) == ("1", [("v1", 1.0)])
            else:
                error = assert_charged(worker).error
                assert error
                assert len(error.encode()) <= 8192


class StopWithoutClass(Stop):
    """Even `isinstance` raises."""

    __class__ = property(raises)


def test_what_stops_a_process_is_a_crash_whatever_it_says_of_itself(make_app: MakeApp) -> None:
    def handler(payloads_by_id: PayloadsById) -> None:
        raise StopWithoutClass

    app = make_app()
    worker = make_worker(app, handler)
    worker.perform_async({"id": 1})
    rig = ThreadRig(app, worker)
    rig.run()
    assert [type(error) for error in rig.failed] == [StopWithoutClass]
    job = worker.queue.peek(1)
    assert job is not None
    assert (job.crashes, job.retry_count) == (1, -1)


# --- what the handler does to what it is given ---


def empty(payloads_by_id: PayloadsById) -> None:
    for payloads in payloads_by_id.values():
        while payloads:
            payloads.pop(0)
    raise ValueError("boom")


def change(payloads_by_id: PayloadsById) -> None:
    for payloads in payloads_by_id.values():
        payloads[0].clear()
        payloads.reverse()
        payloads.append("more")
    payloads_by_id["other"] = []
    raise ValueError("boom")


def test_what_the_handler_does_to_its_payloads_changes_no_outcome(make_app: MakeApp, perform_once: Perform) -> None:
    for handler in (empty, change):
        with case(handler):
            worker = make_worker(make_app(), handler, max_retry_count=0)
            worker.perform_async([{"id": 1, "payload": {"version": n}, "score": n} for n in (1, 2)])
            perform_once(worker)
            (told,) = worker.exhausted  # type: ignore[attr-defined]  # of the class that `make_worker` makes
            assert (told.payloads, told.payloads_count) == ([({"version": 1}, 1.0)], 1)
            buried, waiting = worker.queue.peek(1, "morgue"), worker.queue.peek(1, "due")
            assert buried is not None
            assert waiting is not None
            assert (buried.payloads, waiting.payloads) == ([({"version": 1}, 1.0)], [({"version": 2}, 2.0)])


def test_current_tells_the_jobs_as_they_were_taken(make_app: MakeApp, perform_once: Perform) -> None:
    told: list[Job] = []

    def handler(payloads_by_id: PayloadsById) -> None:
        payloads_by_id["1"].pop()["version"] = 7
        told.extend(lowq.current().jobs)

    worker = make_worker(make_app(), handler)
    worker.perform_async({"id": 1, "payload": {"version": 1}, "score": 1})
    perform_once(worker)
    assert [job.payloads for job in told] == [[({"version": 1}, 1.0)]]


class OddText(str):
    """A text with a mind of its own."""

    __slots__ = ()

    def encode(self, *args: Any, **kwargs: Any) -> bytes:
        raise RuntimeError("no bytes")

    def __len__(self) -> int:
        raise RuntimeError("no length")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("not comparable")

    def __hash__(self) -> int:
        raise RuntimeError("no hash")

    __str__ = __repr__ = __format__ = raises


class OddId:
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


def test_odd_words_of_a_handler_lose_nothing(make_app: MakeApp, perform_once: Perform) -> None:
    rows: list[tuple[str, Handler]] = [
        ("an odd error", lambda _: lowq.current().fail("1", OddText("boom"))),
        ("an odd text as id", lambda _: lowq.current().fail(OddText("1"), "boom")),
        ("an odd id", lambda _: lowq.current().fail(OddId(), "boom")),
        ("no error", lambda _: lowq.current().fail("1", OddId())),  # type: ignore[arg-type]  # that is what is odd
        ("an odd reason", lambda _: lowq.current().bury("1", OddText("enough"))),
    ]
    for name, handler in rows:
        with case(name):
            worker = make_worker(make_app(), handler)
            worker.perform_async({"id": 1})
            perform_once(worker)
            if name == "an odd reason":
                assert assert_buried(worker).error == "enough"
            else:
                assert_charged(worker)


# --- a perform that has not run ---


async def a_coroutine(payloads_by_id: PayloadsById) -> None:
    raise AssertionError("nobody awaits it")


def a_generator(payloads_by_id: PayloadsById) -> Iterator[None]:
    yield


async def an_async_generator(payloads_by_id: PayloadsById) -> AsyncIterator[None]:
    yield


class Awaited:
    def __await__(self) -> Iterator[None]:
        raise AssertionError("nobody awaits it")


def an_awaitable(payloads_by_id: PayloadsById) -> Awaited:
    return Awaited()


def hide(function: Callable[[PayloadsById], object]) -> Handler:
    """A decorator as many are: without functools.wraps."""

    def call(payloads_by_id: PayloadsById) -> object:
        return function(payloads_by_id)

    return call


def as_function(app: lowq.Lowq, handler: Handler) -> type[Worker[Any]]:
    handler.__name__ = "Orders"
    return app.worker(shards_count=1)(handler)  # type: ignore[arg-type]  # that is what is wrong with it


def as_class(app: lowq.Lowq, handler: Handler) -> type[Worker[Any]]:
    class Orders:
        def perform(self, payloads_by_id: PayloadsById) -> object:
            return handler(payloads_by_id)

    decorate: Any = app.worker(shards_count=1)
    made: type[Worker[Any]] = decorate(Orders)
    return made


def pass_on(worker: Any, batch: Any, call_next: Callable[[], Any]) -> None:
    call_next()


@pytest.mark.parametrize("perform_once", ["thread", "drain"], indirect=True)  # an async worker awaits it
def test_a_perform_that_returns_before_it_has_run_has_failed(make_app: MakeApp, perform_once: Perform) -> None:
    functions: list[Any] = [a_coroutine, a_generator, an_async_generator, an_awaitable]
    middlewares: list[list[Any]] = [[], [pass_on]]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # "was never awaited"
        for function, form, around in itertools.product(functions, [as_function, as_class], middlewares):
            with case(function, form, around):
                worker = form(make_app(server_middlewares=around), hide(function))
                worker.perform_async({"id": 1})
                perform_once(worker)
                error = assert_charged(worker).error or ""
                kind = function.__name__.replace("_", " ")
                assert f"Orders.perform returned {kind}, which nobody runs, so nothing was done" in error
                assert "write a plain def" in error
        gc.collect()


async def async_middleware(worker: Any, batch: Any, call_next: Callable[[], Any]) -> None:
    call_next()


def lazy_middleware(worker: Any, batch: Any, call_next: Callable[[], Any]) -> Any:
    call_next()
    return async_middleware(worker, batch, call_next)


@pytest.mark.parametrize("perform_once", ["thread", "drain"], indirect=True)
def test_an_async_middleware_around_a_plain_worker_is_refused(make_app: MakeApp, perform_once: Perform) -> None:
    worker = make_worker(make_app(server_middlewares=[async_middleware]), lambda _: None)
    worker.perform_async({"id": 1})
    with pytest.raises(lowq.ConfigError, match=r"Orders.perform is a plain def and middleware async_middleware is an"):
        perform_once(worker)
    assert worker.queue.stats().length == 1


@pytest.mark.parametrize("perform_once", ["thread", "drain"], indirect=True)  # an async worker awaits it
def test_a_middleware_that_has_not_run_fails_the_batch(make_app: MakeApp, perform_once: Perform) -> None:
    worker = make_worker(make_app(server_middlewares=[lazy_middleware]), lambda _: None)
    worker.perform_async({"id": 1})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        perform_once(worker)
        gc.collect()
    error = assert_charged(worker).error or ""
    assert "middleware lazy_middleware returned a coroutine, which nobody runs; write a plain def" in error


@pytest.mark.parametrize("perform_once", ["thread", "drain"], indirect=True)  # an async worker awaits it
def test_an_async_retries_exhausted_is_said_to_have_done_nothing(
    make_app: MakeApp, perform_once: Perform, caplog: pytest.LogCaptureFixture
) -> None:
    async def tell(self: Any, jobs: list[Job]) -> None:
        raise AssertionError("nobody awaits it")

    worker = make_worker(make_app(), empty, max_retry_count=0)
    worker.retries_exhausted = tell  # type: ignore[method-assign]
    worker.perform_async({"id": 1})
    perform_once(worker)
    assert_buried(worker)
    assert "Orders.retries_exhausted returned a coroutine" in caplog.text


# --- a lease that is lost while a handler stops the process ---


def test_what_stops_a_process_stops_it_also_when_the_lease_was_lost_meanwhile(make_app: MakeApp) -> None:
    def handler(payloads_by_id: PayloadsById) -> None:
        run_out(app.client, rig.shards[0].prefix)
        raise KeyboardInterrupt

    app = make_app()
    worker = make_worker(app, handler)
    worker.perform_async({"id": 1})
    rig = ThreadRig(app, worker)
    rig.run()
    assert [repr(error) for error in rig.failed] == ["KeyboardInterrupt()"]
    assert rig.maintenance.doubted == rig.shards


def test_it_comes_out_of_a_drain_too(make_app: MakeApp) -> None:
    def handler(payloads_by_id: PayloadsById) -> None:
        run_out(app.client, shard_prefix(app.config.namespace, "Orders", 0))
        raise KeyboardInterrupt

    app = make_app()
    worker = make_worker(app, handler)
    worker.perform_async({"id": 1})
    with pytest.raises(KeyboardInterrupt):
        drain(worker)


# --- a handler that finds no Redis ---


def push_to(url: str) -> None:
    """A push of another application, to a Redis that does not answer."""
    other = lowq.Lowq(redis_url=url)
    try:
        other.queue("Mail", shards_count=1).push({"id": 1})
    finally:
        other.close()


NOBODY = "redis://127.0.0.1:1"


class OwnUnavailable(lowq.RedisUnavailable):
    """A subclass of the application's own."""


def chained(error: lowq.LowqError, cause: BaseException) -> Exception:
    error.__cause__ = cause
    return error


def raise_this(error: Exception) -> Handler:
    def handler(payloads_by_id: PayloadsById) -> None:
        raise error

    return handler


class TestNoRedis:
    """It is nobody's failure: the job waits again, uncharged; with growing pauses, and not for ever."""

    def test_it_is_not_charged_and_tried_again_at_once(self, make_app: MakeApp, perform_once: Perform) -> None:
        refused = lowq.RedisNotReady("Redis at redis://h is a read-only replica", "is a read-only replica")
        rows: list[Handler] = [
            lambda _: push_to(NOBODY),
            raise_this(refused),
            raise_this(chained(lowq.PushInterrupted("Orders", 0, [], refused), refused)),
        ]
        for number, handler in enumerate(rows):
            with case(number):
                worker = make_worker(make_app(), handler)
                worker.perform_async([{"id": 1, "payload": "v1", "score": 1}])
                before = worker.queue.peek(1)
                perform_once(worker)
                assert worker.queue.peek(1) == before  # due since then, never failed

    def test_while_redis_answers_the_node_the_pauses_grow_and_in_the_end_it_is_charged(self, make_app: MakeApp) -> None:
        app = make_app()
        worker = make_worker(app, lambda _: push_to(NOBODY))
        worker.perform_async({"id": 1})
        rig = ThreadRig(app, worker)
        for pause in NO_REDIS_PAUSES:
            before = rig.server_time()
            rig.wake()
            rig.turn()
            job = worker.queue.peek(1)
            assert job is not None
            assert job.perform_at is not None
            assert (job.retry_count, job.crashes, worker.queue.stats().taken) == (-1, 0, 0)
            if pause is None:
                assert job.perform_at <= before
            else:
                assert before + pause - 0.001 <= job.perform_at <= rig.server_time() + pause + 0.001
            worker.queue.perform_now(1)
        rig.wake()
        rig.turn()
        assert "does not answer" in (assert_charged(worker).error or "")

    def test_only_times_in_a_row_count(self, make_app: MakeApp) -> None:
        finds_none = True

        def handler(payloads_by_id: PayloadsById) -> None:
            if finds_none:
                raise lowq.RedisUnavailable("not heard")

        app = make_app()
        worker = make_worker(app, handler)
        rig = ThreadRig(app, worker)
        for _ in range(2 * len(NO_REDIS_PAUSES)):
            for found in (True, False):
                finds_none = found
                worker.perform_async({"id": 1})
                worker.queue.perform_now(1)
                rig.wake()
                rig.turn()
        assert (worker.queue.stats().failed, rig.shards[0].in_flight.found_no_redis) == (0, {})

    def test_what_else_was_not_to_be_had_is_charged_as_ever(self, make_app: MakeApp, perform_once: Perform) -> None:
        for error in (
            OwnUnavailable("mine"),
            lowq.RedisFull("maxmemory"),
            chained(lowq.PushInterrupted("Orders", 0, [], lowq.RedisFull("full")), lowq.RedisFull("maxmemory")),
            chained(ValueError("wrapped"), lowq.RedisUnavailable("not heard")),  # type: ignore[arg-type]
            ConnectionError("of something else"),
            # A push that had no time left: the handler was late, not Redis.
            chained(lowq.PushInterrupted("Orders", 0, [], lowq.TimeLimitExceeded()), lowq.TimeLimitExceeded()),
        ):
            with case(error):
                worker = make_worker(make_app(), raise_this(error))
                worker.perform_async({"id": 1})
                perform_once(worker)
                assert_charged(worker)

    def test_words_win_over_it(self, make_app: MakeApp, perform_once: Perform) -> None:
        def handler(payloads_by_id: PayloadsById) -> None:
            lowq.current().fail("1", "it did it")
            raise lowq.RedisUnavailable("not heard")

        worker = make_worker(make_app(), handler, batch_size=2)
        worker.perform_async([{"id": 1}, {"id": 2}])
        perform_once(worker)
        assert_charged(worker, "1")
        job = worker.queue.peek(2)
        assert job is not None
        assert (job.state, job.retry_count) == ("due", -1)


# --- hooks ---


class OddBytes(bytes):
    __slots__ = ()

    def __len__(self) -> int:
        raise RuntimeError("no length")

    def __bytes__(self) -> bytes:
        raise RuntimeError("no bytes")


def test_a_hook_of_the_settings_that_fails_keeps_no_outcome_from_being_written(
    make_app: MakeApp, perform_once: Perform
) -> None:
    hooks = ["format_error", "dump_error", "load_error"]
    for hook, wrong, max_retry_count in itertools.product(hooks, [raises, stops, lambda _: None], [0, 5]):
        with case(hook, wrong, max_retry_count):
            worker = make_worker(make_app(**{hook: wrong}), empty, max_retry_count=max_retry_count)
            worker.perform_async({"id": 1})
            perform_once(worker)
            stats = worker.queue.stats()
            assert (stats.taken, stats.retries, stats.morgue_length) == ((0, 1, 0) if max_retry_count else (0, 0, 1))


def test_what_dump_error_gives_is_bytes_of_bounded_length_or_not_used(make_app: MakeApp, perform_once: Perform) -> None:
    rows: list[tuple[str, Any]] = [
        ("odd", OddBytes(b"odd")), ("large", b"x" * 5_000_000), ("bytearray", bytearray(b"x")), ("None", None),
    ]  # fmt: skip
    for name, dumped in rows:
        with case(name):
            worker = make_worker(make_app(dump_error=lambda _, dumped=dumped: dumped), empty)
            worker.perform_async({"id": 1})
            perform_once(worker)
            error = assert_charged(worker).error
            assert error is not None
            assert error == "odd" or "boom" in error
            assert len(error) <= 8192


def test_a_hook_of_the_worker_that_fails_keeps_no_outcome_from_being_written(
    make_app: MakeApp, perform_once: Perform
) -> None:
    for hook, wrong in itertools.product(["retry_in", "max_retry_count", "retries_exhausted"], [raises, stops]):
        with case(hook, wrong):
            worker = make_worker(make_app(), empty, max_retry_count=0 if hook == "retries_exhausted" else 5)
            worker.perform_async({"id": 1})
            setattr(worker, hook, property(wrong) if hook == "max_retry_count" else wrong)
            perform_once(worker)
            if hook == "retries_exhausted":
                assert_buried(worker)
            else:
                assert_charged(worker)


def test_a_hook_that_stops_the_process_does_so_once_the_outcome_is_written(make_app: MakeApp) -> None:
    for hook in ("retry_in", "retries_exhausted", "format_error", "dump_error"):
        with case(hook):
            app = make_app(**({hook: stops} if "error" in hook else {}))
            worker = make_worker(app, empty, max_retry_count=0 if hook == "retries_exhausted" else 5)
            if "error" not in hook:
                setattr(worker, hook, stops)
            worker.perform_async({"id": 1})
            rig = ThreadRig(app, worker)
            rig.run()
            assert [type(error) for error in rig.failed] == [Stop]
            stats = worker.queue.stats()
            assert (stats.taken, stats.retries + stats.morgue_length) == (0, 1)


def test_when_nothing_works_any_more_the_charge_is_a_plain_one(
    make_app: MakeApp, perform_once: Perform, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handler may leave next to no memory; whatever is tried then may fail."""
    calls: list[int] = []

    def fails_at_first(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise MemoryError
        return find_policy(*args)

    monkeypatch.setattr("lowq.node.outcome.find_policy", fails_at_first)
    worker = make_worker(make_app(), empty)
    worker.perform_async({"id": 1})
    perform_once(worker)
    assert assert_charged(worker).error


# --- codecs ---


NoText = EXCEPTIONS[0]


def test_a_payload_that_can_not_be_decoded_is_buried_whatever_the_codec_raises(
    make_app: MakeApp, perform_once: Perform, caplog: pytest.LogCaptureFixture
) -> None:
    def load(data: bytes) -> Any:
        raise NoText

    worker = make_worker(make_app(load_payload=load), lambda _: None)
    worker.perform_async({"id": 1})
    perform_once(worker)
    assert "can't be decoded" in (assert_buried(worker).error or "")
    assert "queue 'Orders', id '1': " in caplog.text


def test_a_codec_that_fails_the_second_time_keeps_the_worker_from_nothing(
    make_app: MakeApp, perform_once: Perform
) -> None:
    calls: list[bytes] = []

    def load(data: bytes) -> Any:
        calls.append(data)
        if len(calls) == 2:
            raise NoText
        return data.decode()

    worker = make_worker(make_app(load_payload=load), empty, max_retry_count=0)
    worker.perform_async({"id": 1, "payload": "v1", "score": 1})
    perform_once(worker)
    assert_buried(worker)
    (told,) = worker.exhausted  # type: ignore[attr-defined]  # of the class that `make_worker` makes
    assert told.id == "1"
    assert '"v1"' in told.payloads[0][0]


# --- the log ---


class Raising(logging.Handler):
    """A chat that is down."""

    def __init__(self, error: type[BaseException]) -> None:
        super().__init__()
        self.error = error

    def handle(self, record: logging.LogRecord) -> bool:
        raise self.error("the chat is down")


class RaisingFilter(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        raise RuntimeError("the chat is down")


@contextmanager
def broken_logging(part: str) -> Iterator[None]:
    """Whatever is logged meanwhile raises, in this part of logging."""
    logger, factory = logging.getLogger("lowq"), logging.getLogRecordFactory()
    loggers = [logging.getLogger(name) for name in ("lowq.node",)]
    handler: logging.Handler = Raising(SystemExit if part == "exiting handler" else RuntimeError)
    refuse = RaisingFilter()
    if "handler" in part:
        logger.addHandler(handler)
    elif part == "filter":
        for item in loggers:
            item.addFilter(refuse)
    else:
        logging.setLogRecordFactory(raises)
    try:
        yield
    finally:
        logging.setLogRecordFactory(factory)
        logger.removeHandler(handler)
        for item in loggers:
            item.removeFilter(refuse)


class TestBrokenLogging:
    PARTS = ("handler", "exiting handler", "filter", "factory")

    def test_the_outcome_is_written(self, make_app: MakeApp, perform_once: Perform) -> None:
        for part in self.PARTS:
            with case(part), broken_logging(part):
                # Remarks on hooks stop nothing either.
                worker = make_worker(make_app(dump_error=raises, load_error=raises), empty, max_retry_count=1)
                worker.retries_exhausted = raises  # type: ignore[method-assign, assignment]
                worker.perform_async({"id": 1})
                perform_once(worker)
                assert_charged(worker)
                worker.queue.perform_now(1)
                perform_once(worker)
                assert_buried(worker)
                undecodable = make_worker(make_app(load_payload=raises), lambda _: None)
                undecodable.perform_async({"id": 1})
                perform_once(undecodable)
                assert_buried(undecodable)

    def test_the_shard_goes_on_with_its_other_jobs(self, make_app: MakeApp) -> None:
        for part in self.PARTS:
            with case(part), broken_logging(part):
                self.perform_others(make_app())

    def perform_others(self, app: lowq.Lowq) -> None:
        performed: list[str] = []

        def handler(payloads_by_id: PayloadsById) -> None:
            (job_id,) = payloads_by_id
            performed.append(job_id)
            if job_id == "ill":
                raise ValueError("boom")
            if len(performed) == 21:
                rig.dispatcher.close()

        worker = make_worker(app, handler)
        worker.perform_async([{"id": "ill"}, *({"id": number} for number in range(20))])
        rig = ThreadRig(app, worker)
        rig.run()
        assert sorted(performed) == sorted(["ill", *map(str, range(20))])
        assert rig.failed == []

    def test_a_lost_lease_ends_no_thread(self, make_app: MakeApp) -> None:
        for part in self.PARTS:
            with case(part), broken_logging(part):
                self.lose_lease(make_app())

    def lose_lease(self, app: lowq.Lowq) -> None:
        performed: list[str] = []

        def handler(payloads_by_id: PayloadsById) -> None:
            performed.extend(payloads_by_id)
            if len(performed) == 1:
                run_out(app.client, rig.shards[0].prefix)
                rig.dispatcher.wake(rig.shards[1])
            else:
                rig.dispatcher.close()
            raise ValueError("boom")

        worker = make_worker(app, handler, shards_count=2)
        first, second = "b0", "a"  # of shard 0, of shard 1
        assert [shard_of(job_id.encode(), 2) for job_id in (first, second)] == [0, 1]
        worker.perform_async([{"id": first}, {"id": second}])
        rig = ThreadRig(app, worker)
        rig.shards[1].dispatch.next_due = None  # the first shard comes first
        rig.run()
        assert performed == [first, second]
        assert rig.maintenance.doubted == [rig.shards[0]]


def test_the_outcome_is_written_before_the_log_is_told(make_app: MakeApp) -> None:
    """A handler that blocks, such as a chat that does not answer, delays no outcome."""
    seen: list[str] = []

    class Looks(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            job = worker.queue.peek(1)
            seen.append("nothing" if job is None else job.state)

    app = make_app(dump_error=raises)
    worker = make_worker(app, empty)
    worker.perform_async({"id": 1})
    rig, handler = ThreadRig(app, worker), Looks(logging.WARNING)
    logging.getLogger("lowq").addHandler(handler)
    try:
        rig.turn()
    finally:
        logging.getLogger("lowq").removeHandler(handler)
    assert len(seen) >= 2  # the failure, and what is wrong with the hook
    assert set(seen) == {"retrying"}


# --- texts are cut, wherever they come from ---

LARGE = "é" * 10_000_000


def test_what_a_handler_says_is_cut(make_app: MakeApp, perform_once: Perform) -> None:
    rows: list[tuple[str, Handler]] = [
        ("fail with a text", lambda _: lowq.current().fail("1", LARGE)),
        ("fail with an exception", lambda _: lowq.current().fail("1", ValueError(LARGE))),
        ("bury", lambda _: lowq.current().bury("1", LARGE)),
        ("format_error", empty),
    ]
    for name, handler in rows:
        with case(name):
            app = make_app(format_error=lambda error: str(error) + LARGE) if handler is empty else make_app()
            worker = make_worker(app, handler)
            worker.perform_async({"id": 1})
            perform_once(worker)
            job = worker.queue.peek(1)
            assert job is not None
            assert "bytes left out" in (job.error or "")
            prefix = shard_prefix(app.config.namespace, "Orders", 0)
            kept = app.client.command("HVALS", f"{prefix}errors", key=prefix) + app.client.command(
                "HVALS", f"{prefix}morgue:errors", key=prefix
            )
            assert [len(data) <= 8192 for data in kept] == [True]


def test_a_reason_of_people_is_cut(make_app: MakeApp) -> None:
    for bulk in (False, True):
        with case(bulk):
            worker = make_worker(make_app(), empty)
            worker.perform_async({"id": 1})
            if bulk:
                for _ in worker.queue.bulk("bury", reason=LARGE):
                    pass
            else:
                worker.queue.bury(1, LARGE)
            error = assert_buried(worker).error or ""
            assert len(error.encode()) <= 8192
            assert "bytes left out" in error
