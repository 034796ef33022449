import abc
import asyncio
import math
from collections.abc import Iterable
from datetime import timedelta
from itertools import product
from typing import Any
from unittest import mock

import pytest

import lowq
import lowq.testing
from lowq.errors import ConfigError
from lowq.producer import Jobs
from lowq.retry import default_retry_in
from lowq.workers import Worker, options_of, time_limits_of
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


class TestForms:
    def test_a_subclass_of_worker_stays_the_class_it_is(self, app: lowq.Lowq) -> None:
        class Sync(lowq.Worker[int]):
            def perform(self, payloads_by_id: dict[str, list[int]]) -> None:
                seen.update(payloads_by_id)

        assert app.worker(Sync) is Sync
        assert perform_all(Sync) == {"1": [7]}

    def test_a_plain_class_becomes_a_subclass_of_itself_and_worker(self, app: lowq.Lowq) -> None:
        class Sync(Plain):
            """Keeps orders up to date."""

            def __init__(self) -> None:
                self.ready = True

        made: Any = app.worker(Sync)
        assert issubclass(made, Sync)
        assert issubclass(made, lowq.Worker)
        assert (made.__name__, made.__qualname__, made.__module__) == (
            Sync.__name__,
            Sync.__qualname__,
            Sync.__module__,
        )
        assert made.__doc__ == "Keeps orders up to date."
        assert made().ready
        assert perform_all(made) == {"1": [7]}

    def test_a_function_becomes_a_worker(self, app: lowq.Lowq) -> None:
        @app.worker
        def order_sync(payloads_by_id: PayloadsById) -> None:
            """Keeps orders up to date."""
            seen.update(payloads_by_id)

        assert issubclass(order_sync, lowq.Worker)
        assert order_sync.queue_name == "order_sync"
        assert order_sync.__doc__ == "Keeps orders up to date."
        assert perform_all(order_sync) == {"1": [7]}

    def test_each_form_takes_options(self, app: lowq.Lowq) -> None:
        @app.worker(batch_size=2)
        class Sub(lowq.Worker[int]):
            def perform(self, payloads_by_id: dict[str, list[int]]) -> None: ...

        made: Any = app.worker(batch_size=3, queue_name="Other")(Plain)

        @app.worker(batch_size=4)
        def function(payloads_by_id: PayloadsById) -> None: ...

        assert (Sub.batch_size, made.batch_size, function.batch_size) == (2, 3, 4)
        assert set(app.workers) == {"Sub", "Other", "function"}

    def test_empty_parentheses_are_fine(self, app: lowq.Lowq) -> None:
        made: Any = app.worker()(Plain)
        assert perform_all(made) == {"1": [7]}

    def test_an_abstract_plain_class_with_a_metaclass_of_its_own_is_fine(self, app: lowq.Lowq) -> None:
        class Base(abc.ABC):
            @abc.abstractmethod
            def name(self) -> str: ...

        class Sync(Base, Plain):
            def name(self) -> str:
                return "sync"

        made: Any = app.worker(Sync)
        assert made().name() == "sync"
        assert perform_all(made) == {"1": [7]}

    def test_perform_may_call_super(self, app: lowq.Lowq) -> None:
        class Sync(Plain):
            def perform(self, payloads_by_id: PayloadsById) -> None:
                super().perform({f"{key}!": value for key, value in payloads_by_id.items()})

        made: Any = app.worker(Sync)
        assert perform_all(made) == {"1!": [7]}

    def test_nothing_else_can_be_decorated(self, app: lowq.Lowq) -> None:
        targets: list[Any] = [5, "OrderSync", None, print, abs, [1]]
        for target in targets:
            with case(target), pytest.raises(ConfigError, match="decorates a class or a function, not"):
                app.worker(shards_count=1)(target)


# --- options ---


class TestCalls:
    """A worker is no function, and says so to who calls it like one."""

    def test_a_function(self, app: lowq.Lowq) -> None:
        @app.worker(shards_count=1)
        def sync(job_id: str, payloads: list[Any]) -> None: ...

        with pytest.raises(TypeError, match=r"sync is a worker, .* sync.push\(\)"):
            sync("a", [1])  # type: ignore[call-arg]
        with pytest.raises(NotImplementedError, match="sync has no perform of its own; it may have a perform_one"):
            sync().perform({"a": [1]})


#: Options, values that they refuse, and what they must be.
WRONG_OPTIONS: list[tuple[list[str], list[Any], str]] = [
    (["weight"], [0, -1, "3", None, True, math.nan, math.inf, 1e-7, 10**400], "a number above 0"),
    (["max_threads"], [0, -1, "5", 2.0, True, 2**40], "a whole number from 1 to"),
    (
        ["shards_count", "batch_size", "max_payloads", "max_crash_count"],
        [0, -1, "5", 2.0, True, None, 2**40],
        "a whole number from 1 to",
    ),
    (["max_retry_count"], [-1, "5", 2.5, True, None], "a whole number from 0 to"),
    (
        ["time_limit", "ttr"],
        [0, -1, "5", True, math.nan, math.inf, timedelta(0), 2**40],
        "seconds, or a timedelta, of more than 0, and under 272 years",
    ),
]


class TestOptions:
    def test_options_may_be_class_attributes(self, app: lowq.Lowq) -> None:
        @app.worker
        class Sync(lowq.Worker[int]):
            shards_count = 7
            queue_name = "Orders"

            def perform(self, payloads_by_id: dict[str, list[int]]) -> None: ...

        assert (Sync.shards_count, Sync.queue_name, Sync.batch_size) == (7, "Orders", 1)
        assert list(app.workers) == ["Orders"]
        assert Sync.queue.name == "Orders"
        assert Sync.queue.shards_count == 7

    def test_the_decorator_wins_over_the_attributes_of_a_class(self, app: lowq.Lowq) -> None:
        class Sync(Plain):
            shards_count = 7
            queue_name = "Old"

        made: Any = app.worker(queue_name="New")(Sync)
        assert (made.shards_count, made.queue_name) == (7, "New")
        assert list(app.workers) == ["New"]

    def test_options_are_inherited_but_for_the_queues_name(self, app: lowq.Lowq) -> None:
        @app.worker(batch_size=9, queue_name="Bases")
        class Base(lowq.Worker[int]):
            def perform(self, payloads_by_id: dict[str, list[int]]) -> None: ...

        @app.worker(shards_count=2)
        class Derived(Base):
            pass

        assert (Derived.batch_size, Derived.shards_count, Derived.queue_name) == (9, 2, "Derived")
        assert Base.shards_count == 5
        assert Base.queue.name != Derived.queue.name

    @pytest.mark.parametrize(
        ("name", "nearest"),
        [("shard_count", "shards_count"), ("batchsize", "batch_size"), ("max_retries", "max_retry_count")],
    )
    def test_an_unknown_option_is_refused_with_the_nearest_known(self, app: lowq.Lowq, name: str, nearest: str) -> None:
        options: Any = {name: 5}
        with pytest.raises(ConfigError, match=f"Plain: unknown worker option '{name}'; did you mean '{nearest}'"):
            app.worker(**options)(Plain)

    def test_an_option_like_none_is_refused_with_all_that_there_are(self, app: lowq.Lowq) -> None:
        options: Any = {"xyzzy": 5}
        with pytest.raises(
            ConfigError, match=r"options are max_payloads, .*max_crash_count, .*shards_count, batch_size"
        ):
            app.worker(**options)(Plain)

    def test_what_makes_no_sense_is_refused_by_name(self, app: lowq.Lowq) -> None:
        for names, values, message in WRONG_OPTIONS:
            for name, value in product(names, values):
                with case(name, value):
                    options: Any = {name: value}
                    with pytest.raises(ConfigError, match=rf"Plain: {name}=.* must be {message}"):
                        app.worker(**options)(Plain)
                    with pytest.raises(ConfigError, match=rf"Sync: {name}=.* must be {message}"):
                        app.worker(type("Sync", (Plain,), options))
                    assert app.workers == {}

    def test_what_is_in_bounds_is_taken(self) -> None:
        rows: list[tuple[str, list[Any]]] = [
            ("weight", [1, 3, 0.5, 1e-6, 1e6]), ("max_threads", [1, None]), ("max_retry_count", [0]),
        ]  # fmt: skip
        for name, values in rows:
            for value in values:
                with case(name, value):
                    options: Any = {name: value}
                    made = lowq.Lowq(redis_url="memory://").worker(**options)(Plain)
                    assert getattr(made, name) == value

    def test_an_attribute_that_only_looks_like_an_option_is_fine(self, app: lowq.Lowq) -> None:
        app.worker(type("Resize", (Plain,), {"width": 3, "height": 4}))

    def test_limits_are_seconds_or_timedeltas_and_there_are_none_by_default(self, app: lowq.Lowq) -> None:
        made: Any = app.worker(Plain)
        assert time_limits_of(made) == (None, None)
        assert not {"time_limit", "ttr"} & options_of(made).keys()
        limited: Any = app.worker(queue_name="Limited", time_limit=timedelta(minutes=1), ttr=90.5)(
            type("L", (Plain,), {})
        )
        assert time_limits_of(limited) == (60, 90.5)
        assert options_of(limited) | {"time_limit": 60.0, "ttr": 90.5} == options_of(limited)

    @pytest.mark.parametrize("ttr", [60, 30.0, timedelta(seconds=59)])
    def test_ttr_is_for_handlers_that_outlast_their_time_limit(self, app: lowq.Lowq, ttr: Any) -> None:
        with pytest.raises(ConfigError, match=r"Plain: ttr=.* must be more than time_limit=60"):
            app.worker(time_limit=60, ttr=ttr)(Plain)

    def test_a_queue_name_that_would_break_keys_is_refused(self, app: lowq.Lowq) -> None:
        names: list[Any] = [
            "a{b", "a}b", "a b", "", "a\nb", "a\x00", "a\x7f", "a\x9b", "a\u2028b", "\ud800", "x" * 129, 5, None, b"a",
        ]  # fmt: skip
        for name in names:
            with case(name):
                message = "it has 1 to 128 characters, without braces, spaces and control characters"
                with pytest.raises(ConfigError, match=message):
                    app.worker(queue_name=name)(Plain)
                with pytest.raises(ConfigError, match=message):
                    app.queue(name)

    def test_any_other_queue_name_is_fine(self) -> None:
        for name in ["Orders", "orders.v2:eu/1", "Заказы", "x" * 128]:
            with case(name):
                app = lowq.Lowq(redis_url="memory://")
                made: Any = app.worker(queue_name=name)(Plain)
                assert perform_all(made) == {"1": [7]}

    def test_the_handle_of_a_queue_takes_no_senseless_shards_count_either(self, app: lowq.Lowq) -> None:
        values: list[Any] = [0, -1, "5", 1.5, True, 2**40]
        for value in values:
            with case(value):
                with pytest.raises(ConfigError, match=r"shards_count=.* must be a whole number from 1 to"):
                    app.queue("Orders", value).push({"id": 1})
                assert app.queues() == []


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
    (
        "",
        "def perform(self, order_id, payloads): ...",
        r"Sync\.perform\(self, order_id.*perform\(self, payloads_by_id\)",
    ),
    ("", "perform = 5", r"Sync\.perform"),
    (
        "Plain",
        "def perform_one(self, job_id, payloads): ...",
        rf"{BOTH} \(perform comes from Plain\): keep perform, which gets a whol",
    ),
    (
        "lowq.Worker[Any]",
        "def perform(self, payloads_by_id): ...\n    def perform_one(self, job_id, payloads): ...",
        f"{BOTH}: keep perform, which gets a whole batch, or perform_one",
    ),
    (
        "",
        "def perform_one(self, job_id): ...",
        r"Sync\.perform_one\(self, job_id.*write def perform_one\(self, id, payloads\)",
    ),
    ("", "def perform_one(self, job_id, payloads): yield job_id", r"Sync\.perform_one contains yield"),
    ("", "perform_one = 1", r"Sync\.perform_one is no function; write def perform_one\(self, id, payloads\)"),
    (
        "Plain",
        "def setup(self, database): ...",
        r"Sync\.setup\(self, database.*: it is called without arguments; write def setup\(self\)",
    ),
    (
        "Plain",
        "async def setup(self): ...",
        r"Sync\.setup is an async def and Sync\.perform a plain def.*write a plain def setup",
    ),
    (
        "lowq.Worker[Any]",
        "def perform_one(self, job_id, payloads): ...\n    async def teardown(self): ...",
        r"Sync\.teardown is an async def and Sync\.perform_one a plain def",
    ),
    (
        "Plain",
        "def setup(self): yield 1",
        r"Sync\.setup contains yield, so calling it would do nothing; write def setup\(self\)",
    ),
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
        ("def sync(payloads_by_id): yield 1", "sync contains yield"),
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


class TestRegistry:
    def test_two_workers_with_one_queue_name_are_refused_by_name(self, app: lowq.Lowq) -> None:
        class First(Plain):
            pass

        class Second(Plain):
            pass

        app.worker(queue_name="Orders")(First)
        with pytest.raises(ConfigError, match=r"queue name 'Orders': .*First and .*Second; give one of them another"):
            app.worker(queue_name="Orders")(Second)
        assert app.workers["Orders"].__name__ == "First"

    def test_a_module_that_is_loaded_again_may_bring_its_worker_again(self, app: lowq.Lowq) -> None:
        def load() -> Any:
            class Sync(Plain):
                pass

            return app.worker(Sync)

        load()
        again = load()
        assert app.workers == {"Sync": again}
        assert perform_all(again) == {"1": [7]}

    def test_several_applications_keep_their_workers_and_jobs_apart(self) -> None:
        one, other = lowq.Lowq(redis_url="memory://"), lowq.Lowq(redis_url="memory://")

        def sync(app: lowq.Lowq) -> type[Worker[Any]]:
            @app.worker
            def orders(payloads_by_id: PayloadsById) -> None:
                seen.update(payloads_by_id)

            return orders

        first, second = sync(one), sync(other)
        first.perform_async({"id": 1})
        assert (first.queue.stats().length, second.queue.stats().length if other.queues() else 0) == (1, 0)
        assert lowq.testing.drain(second).performed == 0
        assert lowq.testing.drain(first).performed == 1

    def test_a_class_is_the_worker_of_one_application_only(self, app: lowq.Lowq) -> None:
        class Sync(lowq.Worker[int]):
            def perform(self, payloads_by_id: dict[str, list[int]]) -> None: ...

        app.worker(Sync)
        with pytest.raises(ConfigError, match="another application"):
            lowq.Lowq(redis_url="memory://").worker(Sync)
        assert Sync.perform_async({"id": 1}) == 1
        assert app.queue("Sync").stats().length == 1

    def test_the_default_application_is_the_one_of_the_module(self) -> None:
        assert lowq.worker == lowq.app.worker
        assert lowq.config is lowq.app.config


class TestUndecorated:
    def test_a_class_that_is_not_decorated_has_no_queue(self) -> None:
        class Sync(lowq.Worker[int]):
            pass

        with pytest.raises(ConfigError, match=r"Sync is no worker yet; decorate it with @lowq\.worker"):
            Sync.perform_async({"id": 1})

    def test_an_undecorated_subclass_does_not_push_into_its_parents_queue(self, app: lowq.Lowq) -> None:
        made: Any = app.worker(Plain)
        derived: Any = type("Derived", (made,), {})
        with pytest.raises(ConfigError, match="Derived is no worker yet"):
            derived.perform_async({"id": 1})
        with pytest.raises(ConfigError, match="Derived is no worker yet"):
            _ = derived.queue

    def test_nor_is_its_parents_queue_drained_with_it(self, app: lowq.Lowq) -> None:
        made: Any = app.worker(Plain)
        made.perform_async({"id": 1})
        with pytest.raises(ConfigError, match="is no worker"):
            lowq.testing.drain(type("Derived", (made,), {}))
        assert made.queue.stats().length == 1


# --- what a worker has ---


class TestPerformAsync:
    def test_it_may_be_overridden_calling_super(self, app: lowq.Lowq) -> None:
        @app.worker
        class Sync(lowq.Worker[Any]):
            @classmethod
            def perform_async(cls, jobs: Jobs) -> int:  # type: ignore[override]  # as it was before timeout
                assert isinstance(jobs, list)
                return super().perform_async([{**job, "payload": job["payload"] + 1} for job in jobs])

            def perform(self, payloads_by_id: dict[str, list[int]]) -> None:
                seen.update(payloads_by_id)

        Sync.perform_async([{"id": 1, "payload": 6, "score": 1}])
        asyncio.run(Sync.aperform_async([{"id": 2, "payload": 7, "score": 1}]))
        seen.clear()
        lowq.testing.drain(Sync)
        assert seen == {"1": [7], "2": [8]}

    def test_a_mock_in_its_place_stands_for_both_forms(self, app: lowq.Lowq) -> None:
        @app.worker
        class Sync(lowq.Worker[int]):
            def perform(self, payloads_by_id: dict[str, list[int]]) -> None: ...

        with mock.patch.object(Sync, "perform_async", return_value=7) as pushed:
            assert asyncio.run(Sync.aperform_async({"id": 1})) == 7
        pushed.assert_called_once_with({"id": 1})

    def test_it_may_be_overridden_in_a_plain_class(self, app: lowq.Lowq) -> None:
        class Sync(Plain):
            @classmethod
            def perform_async(cls, jobs: Iterable[dict[str, Any]]) -> int:
                parent: Any = super()
                accepted: int = parent.perform_async([{**job, "payload": 7} for job in jobs])
                return accepted

        made: Any = app.worker(Sync)
        seen.clear()
        assert made.perform_async([{"id": 1}]) == 1
        lowq.testing.drain(made)
        assert seen == {"1": [7]}

    def test_what_the_handle_pushes_goes_past_an_override(self, app: lowq.Lowq) -> None:
        class Sync(Plain):
            @classmethod
            def perform_async(cls, _jobs: Jobs) -> int:
                raise AssertionError("not asked")

        made: Any = app.worker(Sync)
        assert made.queue.push({"id": 1}) == 1
        assert app.queue("Sync").push({"id": 2}) == 1


def test_the_default_retry_in_is_lowkiqs() -> None:
    for retry_count in range(30):
        least = retry_count**4 + 15
        delays = [default_retry_in(retry_count) for _ in range(50)]
        assert all(least <= delay <= least + 30 * (retry_count + 1) for delay in delays)
        assert max(delays) - min(delays) > retry_count  # spread, so that what failed together does not retry together
    assert lowq.Worker[int]().retry_in(0) >= 15
