import abc
import asyncio
import math
from collections.abc import Callable
from datetime import timedelta
from itertools import product
from typing import Any
from unittest import mock

import pytest

import lowq
import lowq.testing
from lowq.errors import ConfigError
from lowq.job import Jobs
from lowq.registrations import options_of
from lowq.retry import default_retry_in
from lowq.workers import Worker, time_limits_of
from tests.rows import case

PayloadsById = dict[str, list[Any]]


@pytest.fixture
def app() -> lowq.Lowq:
    return lowq.Lowq(redis_url="memory://")


def perform_all(worker: type[Worker[Any]]) -> PayloadsById:
    """Pushes payload 7 for id 1, drains, and returns what the worker was given, as it noted in `seen`."""
    seen.clear()
    assert worker.perform_async({"id": 1, "payload": 7, "score": 1}) == 1
    assert lowq.testing.drain(worker).performed == 1
    return dict(seen)


seen: PayloadsById = {}


class Plain:
    def perform(self, payloads_by_id: PayloadsById) -> None:
        seen.update(payloads_by_id)


# --- the three forms ---


def test_a_subclass_of_worker_stays_the_class_it_is(app: lowq.Lowq) -> None:
    class Sync(lowq.Worker[int]):
        def perform(self, payloads_by_id: dict[str, list[int]]) -> None:
            seen.update(payloads_by_id)

    assert app.worker(batch_size=2)(Sync) is Sync
    assert (Sync.batch_size, Sync.queue_name) == (2, "Sync")
    assert perform_all(Sync) == {"1": [7]}


def test_a_plain_class_becomes_a_subclass_of_itself_and_worker(app: lowq.Lowq) -> None:
    class Base(abc.ABC):
        @abc.abstractmethod
        def name(self) -> str: ...

    class Sync(Base, Plain):
        """Keeps orders up to date."""

        def __init__(self) -> None:
            self.ready = True

        def name(self) -> str:
            return "sync"

        def perform(self, payloads_by_id: PayloadsById) -> None:
            super().perform({f"{key}!": value for key, value in payloads_by_id.items()})

    made: Any = app.worker()(Sync)
    assert issubclass(made, Sync)
    assert issubclass(made, lowq.Worker)
    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        assert getattr(made, name) == getattr(Sync, name)
    assert made().ready
    assert perform_all(made) == {"1!": [7]}


def test_a_function_becomes_a_worker_which_is_no_function_any_more(app: lowq.Lowq) -> None:
    @app.worker
    def order_sync(payloads_by_id: PayloadsById) -> None:
        """Keeps orders up to date."""
        seen.update(payloads_by_id)

    @app.worker(batch_size=4)
    def single(job_id: str, payloads: list[Any]) -> None: ...

    assert issubclass(order_sync, lowq.Worker)
    assert (order_sync.queue_name, order_sync.__doc__) == ("order_sync", "Keeps orders up to date.")
    assert single.batch_size == 4
    assert perform_all(order_sync) == {"1": [7]}
    with pytest.raises(TypeError, match=r"single is a worker, .* single.push\(\)"):
        single("a", [1])  # type: ignore[call-arg]
    with pytest.raises(NotImplementedError, match="single has no perform of its own; it may have a perform_one"):
        single().perform({"a": [1]})


def test_nothing_else_can_be_decorated(app: lowq.Lowq) -> None:
    targets: list[Any] = [5, None, print]
    for target in targets:
        with case(target), pytest.raises(ConfigError, match="decorates a class or a function, not"):
            app.worker(shards_count=1)(target)


# --- options ---


def test_options_are_those_of_the_decorator_then_of_the_class_and_are_inherited_but_for_the_name(
    app: lowq.Lowq,
) -> None:
    @app.worker(queue_name="New")
    class Base(lowq.Worker[int]):
        shards_count = 7
        queue_name = "Old"
        width = 3  # it only looks like an option

        def perform(self, payloads_by_id: dict[str, list[int]]) -> None: ...

    @app.worker(batch_size=2)
    class Derived(Base):
        pass

    assert (Base.shards_count, Base.queue_name, Base.batch_size) == (7, "New", 1)
    assert (Derived.shards_count, Derived.queue_name, Derived.batch_size) == (7, "Derived", 2)
    assert list(app.workers) == ["New", "Derived"]
    assert (Base.queue.name, Base.queue.shards_count) == ("New", 7)


#: Options, values that they refuse, and what they must be.
WRONG_OPTIONS: list[tuple[list[str], list[Any], str]] = [
    (["weight"], [0, -1, "3", None, True, math.nan, math.inf, 1e-7], "a number of at least 1e-06"),
    (["max_threads"], [0, "5", 2.0, True, 2**40], "a whole number from 1 to"),
    (["shards_count", "batch_size"], [0, "5", 2.0, True, None, 2**40], "a whole number from 1 to"),
    (["time_limit"], [0, -1, "5", True, math.nan, timedelta(0), 2**40], "seconds, or a timedelta, of more than 0"),
]


def test_an_option_that_makes_no_sense_is_refused_by_name(app: lowq.Lowq) -> None:
    for names, values, message in WRONG_OPTIONS:
        for name, value in product(names, values):
            with case(name, value):
                options: Any = {name: value}
                with pytest.raises(ConfigError, match=rf"Plain: {name}=.* must be {message}"):
                    app.worker(**options)(Plain)
                with pytest.raises(ConfigError, match=rf"Sync: {name}=.* must be {message}"):
                    app.worker(type("Sync", (Plain,), options))
                assert app.workers == {}
    for name, value in (("weight", 1e-6), ("weight", 3), ("max_threads", None), ("max_retry_count", 0)):
        options = {name: value}
        made: Any = lowq.Lowq(redis_url="memory://").worker(**options)(Plain)
        assert getattr(made, name) == value


def test_an_unknown_option_is_refused_with_the_nearest_known_or_all(app: lowq.Lowq) -> None:
    rows = [
        ("shard_count", "unknown worker option 'shard_count'; did you mean 'shards_count'"),
        ("limits", r"unknown worker option 'limits'; did you mean 'limit'\?"),
        ("xyzzy", "options are shards_count, max_payloads, .*batch_size"),
    ]
    for name, message in rows:
        options: Any = {name: 5}
        with case(name), pytest.raises(ConfigError, match=f"Plain: .*{message}"):
            app.worker(**options)(Plain)


def test_limits_are_seconds_or_timedeltas_and_there_are_none_by_default(app: lowq.Lowq) -> None:
    made: Any = app.worker(Plain)
    assert time_limits_of(made) == (None, None)
    assert not {"time_limit", "ttr"} & options_of(made).keys()
    limited: Any = app.worker(queue_name="Limited", time_limit=timedelta(minutes=1), ttr=90.5)(type("L", (Plain,), {}))
    assert time_limits_of(limited) == (60, 90.5)
    assert options_of(limited) | {"time_limit": 60.0, "ttr": 90.5} == options_of(limited)
    for ttr in (60, timedelta(seconds=59)):
        with pytest.raises(ConfigError, match=r"Plain: ttr=.* must be more than time_limit=60"):
            app.worker(time_limit=60, ttr=ttr)(Plain)


def test_a_queue_name_that_would_break_keys_is_refused_and_any_other_is_fine(app: lowq.Lowq) -> None:
    names: list[Any] = ["a{b", "a}b", "a b", "", "a\n", "a\x9b", "a\u2028b", "\ud800", "x" * 129, 5]
    for name in names:
        with case(name):
            message = "it has 1 to 128 characters, without braces, spaces and control characters"
            with pytest.raises(ConfigError, match=message):
                app.worker(queue_name=name)(Plain)
            with pytest.raises(ConfigError, match=message):
                app.queue(name)
    for name in ("orders.v2:eu/1", "Заказы", "x" * 128):
        with case(name):
            made: Any = app.worker(queue_name=name)(Plain)
            assert perform_all(made) == {"1": [7]}


# --- wrong forms ---

NO_PERFORM = r"Sync has no method perform\(self, payloads_by_id\)"
BOTH = "Sync has both perform and perform_one"
ON_THE_CLASS = r"Sync\.perform_async is called on the class; write @classmethod above it"
#: What the class is derived from, what is in it, and what is said of that.
WRONG_CLASSES: list[tuple[str, str, str]] = [
    ("", "async def perform(self, payloads_by_id): yield 1", r"Sync\.perform contains yield"),
    ("", "def perform(self, payloads_by_id): yield 1", r"Sync\.perform contains yield"),
    ("", "def run(self): ...", NO_PERFORM),
    ("lowq.Worker[int]", "pass", NO_PERFORM),
    ("", "def perform(self): ...", r"Sync\.perform\(self\).*perform\(self, payloads_by_id\)"),
    ("", "def perform(self, a, b): ...", r"Sync\.perform\(self, a.*perform\(self, payloads_by_id\)"),
    ("", "perform = 5", r"Sync\.perform"),
    ("Plain", "def perform_one(self, job_id, payloads): ...", rf"{BOTH} \(perform comes from Plain\): keep perform"),
    ("", "def perform_one(self, job_id): ...", r"Sync\.perform_one\(self.*write def perform_one\(self, id, payloads\)"),
    ("", "def perform_one(self, job_id, payloads): yield job_id", r"Sync\.perform_one contains yield"),
    ("", "perform_one = 1", r"Sync\.perform_one is no function; write def perform_one\(self, id, payloads\)"),
    ("Plain", "def setup(self, database): ...", r"Sync\.setup\(self, database.*: write def setup\(self\)"),
    ("Plain", "async def setup(self): ...", r"Sync\.setup is an async def and Sync\.perform a plain def.*a plain def"),
    ("Plain", "def setup(self): yield 1", r"Sync\.setup contains yield, so calling it would do nothing"),
    ("Plain", "teardown = 'close'", r"Sync\.teardown is no function; write def teardown\(self\)"),
    ("Plain", "def perform_async(self, jobs): return 0", ON_THE_CLASS),
    ("Plain", "@staticmethod\n    def perform_async(jobs): return 0", ON_THE_CLASS),
    ("Plain", "queue = 'orders'", r"Sync\.queue hides what every worker has; give it another name"),
]


def test_a_wrong_class_is_refused_at_decoration_with_the_fix(app: lowq.Lowq) -> None:
    for bases, body, message in WRONG_CLASSES:
        with case(bases, body):
            names = dict(globals())
            exec(f"class Sync({bases}):\n    {body}\n", names)
            with pytest.raises(ConfigError, match=message):
                app.worker(names["Sync"])
            assert app.workers == {}


def test_a_wrong_function_is_refused_at_decoration_with_the_fix(app: lowq.Lowq) -> None:
    takes = "takes one argument, payloads_by_id, or two, id and payloads"
    rows = [
        ("async def sync(payloads_by_id): yield 1", "sync contains yield"),
        ("sync = lambda: None", takes),
        ("sync = lambda a, b, c: None", takes),
        ("sync = lambda *, payloads: None", takes),
    ]
    for source, message in rows:
        with case(source):
            names: dict[str, Any] = {}
            exec(source, names)
            with pytest.raises(ConfigError, match=message):
                app.worker(names["sync"])


# --- one queue, one worker ---


def test_two_workers_with_one_queue_name_are_refused_by_name(app: lowq.Lowq) -> None:
    class First(Plain):
        pass

    class Second(Plain):
        pass

    app.worker(queue_name="Orders")(First)
    with pytest.raises(ConfigError, match=r"queue name 'Orders': .*First and .*Second; give one of them another"):
        app.worker(queue_name="Orders")(Second)
    assert app.workers["Orders"].__name__ == "First"


def test_a_module_that_is_loaded_again_may_bring_its_worker_again(app: lowq.Lowq) -> None:
    def load() -> Any:
        class Sync(Plain):
            pass

        return app.worker(Sync)

    load()
    again = load()
    assert app.workers == {"Sync": again}
    assert perform_all(again) == {"1": [7]}


def test_several_applications_keep_their_workers_and_jobs_apart() -> None:
    one, other = lowq.Lowq(redis_url="memory://"), lowq.Lowq(redis_url="memory://")

    class Sync(lowq.Worker[int]):
        def perform(self, payloads_by_id: dict[str, list[int]]) -> None: ...

    first = one.worker(Sync)
    second: Any = other.worker(queue_name="Sync")(type("Other", (Plain,), {}))
    with pytest.raises(ConfigError, match="another application"):
        other.worker(first)
    first.perform_async({"id": 1})
    assert first.queue.stats().length == 1
    assert lowq.testing.drain(second).performed == 0
    assert lowq.testing.drain(first).performed == 1
    assert lowq.worker == lowq.app.worker, "the default application is the one of the module"


def test_a_class_that_is_not_decorated_has_no_queue_also_when_its_parent_has_one(app: lowq.Lowq) -> None:
    made: Any = app.worker(Plain)
    made.perform_async({"id": 1})
    derived: Any = type("Derived", (made,), {})
    uses: list[Callable[[], object]] = [
        lambda: type("Derived", (lowq.Worker,), {}).perform_async({"id": 1}),  # type: ignore[attr-defined]
        lambda: derived.perform_async({"id": 1}), lambda: derived.queue, lambda: lowq.testing.drain(derived),
    ]  # fmt: skip
    for number, use in enumerate(uses):
        with case(number), pytest.raises(ConfigError, match="is no worker"):
            use()
    assert made.queue.stats().length == 1


# --- what a worker has ---


def test_perform_async_may_be_overridden_and_serves_all_ways_to_push_but_the_handle(app: lowq.Lowq) -> None:
    @app.worker
    class Sync(lowq.Worker[Any]):
        @classmethod
        def perform_async(cls, jobs: Any) -> int:  # type: ignore[override]  # as it was before timeout
            jobs = [jobs] if isinstance(jobs, dict) else jobs
            return super().perform_async([{**job, "payload": job["payload"] + 1} for job in jobs])

        def perform(self, payloads_by_id: dict[str, list[int]]) -> None:
            seen.update(payloads_by_id)

    Sync.perform_async([{"id": 1, "payload": 0}])
    asyncio.run(Sync.aperform_async([{"id": 2, "payload": 0}]))
    Sync.push(3, 0)
    asyncio.run(Sync.apush(4, 0))
    Sync.queue.push({"id": 5, "payload": 0})
    app.queue("Sync").push({"id": 6, "payload": 0})
    seen.clear()
    lowq.testing.drain(Sync)
    assert seen == {"1": [1], "2": [1], "3": [1], "4": [1], "5": [0], "6": [0]}
    with mock.patch.object(Sync, "perform_async", return_value=7) as pushed:
        assert asyncio.run(Sync.aperform_async({"id": 1})) == 7
    pushed.assert_called_once_with({"id": 1})


def test_perform_async_may_be_overridden_in_a_plain_class(app: lowq.Lowq) -> None:
    class Sync(Plain):
        @classmethod
        def perform_async(cls, jobs: Jobs) -> int:
            parent: Any = super()
            accepted: int = parent.perform_async({**jobs, "payload": 8})  # type: ignore[dict-item]
            return accepted

    made: Any = app.worker(Sync)
    assert perform_all(made) == {"1": [8]}


def test_the_default_retry_in_is_lowkiqs() -> None:
    for retry_count in range(30):
        least = retry_count**4 + 15
        delays = [default_retry_in(retry_count) for _ in range(50)]
        assert all(least <= delay <= least + 30 * (retry_count + 1) for delay in delays)
        assert len(set(delays)) > 1  # spread, so that what failed together does not retry together
    assert default_retry_in(0) >= 15
