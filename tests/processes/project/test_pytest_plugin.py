"""The pytest plugin: its fixtures in runs of pytest of their own, and what it costs those that use none."""

import os
import re
from pathlib import Path

import pytest

import lowq_pytest
from tests.rows import case

pytest_plugins = ["pytester"]

WORKERS = """
import lowq

saved = {}

@lowq.worker(shards_count=24, max_retry_count=1)
class OrderSync(lowq.Worker):
    def perform(self, payloads_by_id):
        for order, payloads in payloads_by_id.items():
            saved.setdefault(order, []).append([payload["version"] for payload in payloads])

@lowq.worker
class Mails(lowq.Worker):
    async def perform(self, payloads_by_id):
        saved.update(dict.fromkeys(payloads_by_id, "sent"))
"""
CLEAR = """
import pytest
import workers

@pytest.fixture(autouse=True)
def _clear():
    workers.saved.clear()

@pytest.fixture
def anyio_backend():
    return "asyncio"
"""


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """With two workers, and a Redis that is not there: whatever went to it would fail."""
    for name in [name for name in os.environ if name.startswith(("LOWQ_", "PYTEST_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("LOWQ_REDIS_URL", "redis://127.0.0.1:1/0")
    pytester.makepyfile(workers=WORKERS, conftest=CLEAR)
    pytester.makepyprojecttoml('[tool.lowq]\napp = "workers"\n[tool.pytest.ini_options]\npythonpath = ["."]\n')
    return pytester


def run(project: pytest.Pytester, *args: str) -> pytest.RunResult:
    # Only what a run needs: some of these take longer to load than the tests.
    given = " ".join(args)
    left_out = [name for name in ("asyncio", "randomly", "hypothesispytest", "schemathesis") if name not in given]
    more = [word for name in left_out for word in ("-p", f"no:{name}")]
    return project.runpytest_subprocess("-W", "error", "-p", "no:cacheprovider", *more, *args, timeout=240)


def said(result: pytest.RunResult) -> str:
    """The failures, without the margin."""
    return "\n".join(line[1:].strip() for line in result.outlines if line[:1] == "E")


def test_it_loads_nothing_of_lowq_unless_a_fixture_is_used(project: pytest.Pytester) -> None:
    project.makepyfile(
        """
        import sys

        import pytest

        def test_nothing(pytestconfig):
            assert pytestconfig.pluginmanager.has_plugin("lowq")
            loaded = [name for name in sys.modules if name.partition(".")[0] in ("lowq", "redis", "fakeredis", "lupa")]
            assert loaded == []
            assert "lowq_pytest" in sys.modules

        @pytest.mark.usefixtures("lowq_drain")
        def test_what_is_looked_for_would_be_found():
            assert {"lowq.testing", "redis", "fakeredis"} <= sys.modules.keys()
        """
    )
    project.path.joinpath("conftest.py").unlink()
    run(project).assert_outcomes(passed=2)


def test_each_fixture_works(project: pytest.Pytester) -> None:
    project.makepyfile(
        """
        import lowq
        import pytest
        from workers import Mails, OrderSync, saved

        def test_app(lowq_app):
            assert lowq_app is lowq.app
            lowq_app.queue("OrderSync").push(1, {"version": 1})
            assert OrderSync.queue.stats().length == 1

        def test_drain(lowq_drain):
            OrderSync.push(1, {"version": 2}, score=2)
            OrderSync.push(1, {"version": 1}, score=1)
            Mails.push("m")
            assert lowq_drain(OrderSync).performed == 1
            assert saved == {"1": [[1, 2]]}
            assert lowq_drain().performed == 1

        def test_raises(lowq_drain):
            OrderSync.push(1, {})
            with pytest.raises(KeyError):
                lowq_drain(raises=True)

        def test_clock(lowq_drain, lowq_clock):
            OrderSync.push(1, {})
            OrderSync.push(2, {"version": 1}, delay=3600)
            assert lowq_drain().failed == 1
            assert lowq_drain().batches == 0
            lowq_clock.travel(3600)
            drained = lowq_drain()
            assert (drained.performed, drained.failed) == (1, 1)

        def test_crash(lowq_drain, lowq_crash, assert_ordered):
            OrderSync.push(1, {"version": 1})
            lowq_crash()
            assert lowq_drain().performed == 1
            assert saved == {"1": [[1], [1]]}
            assert_ordered()

        def test_pushed(assert_pushed):
            OrderSync.push(42, {"version": 2}, score=2)
            (pushed,) = assert_pushed(OrderSync, id=42, payload={"version": 2}, score=2, times=1)
            assert pushed.queue == "OrderSync"
            assert_pushed(Mails, times=0)

        def test_an_application_of_its_own(lowq_drain):
            app = lowq.Lowq()

            @app.worker
            def orders(payloads_by_id):
                saved.update(payloads_by_id)

            orders.push(1, "x")
            assert lowq_drain().performed == 1
            assert saved == {"1": ["x"]}
        """
    )
    run(project).assert_outcomes(passed=7)


def test_async_tests_with_anyio_and_with_pytest_asyncio(project: pytest.Pytester) -> None:
    body = """
            await asyncio.gather(*(Mails.apush(n) for n in range(3)))
            await OrderSync.apush(9, {"version": 1})
            assert (await lowq_adrain()).performed == 4
            assert_pushed(Mails, times=3)
            with pytest.raises(lowq.ConfigError, match="await lowq_adrain"):
                Mails.push(1)
                lowq_drain()
    """
    tests = [
        f"""
        @pytest.mark.{mark}
        async def test_{mark}_{number}(lowq_adrain, lowq_drain, assert_pushed):{body}
        """
        for mark in ("anyio", "asyncio")
        for number in range(2)
    ]
    head = "import asyncio\n        import lowq\n        import pytest\n        from workers import Mails, OrderSync\n"
    project.makepyfile(f"\n        {head}" + "".join(tests))
    run(project, "-o", "asyncio_default_fixture_loop_scope=function").assert_outcomes(passed=4)


@pytest.mark.parametrize("args", [(), ("-p", "xdist", "-n", "2")], ids=["one process", "xdist"])
def test_tests_do_not_see_each_others_jobs_in_any_order(project: pytest.Pytester, args: tuple[str, ...]) -> None:
    project.makepyfile(
        """
        import lowq
        import pytest
        from workers import OrderSync, saved

        @pytest.mark.parametrize("number", range(12))
        def test_alone(number, lowq_app, lowq_drain, lowq_clock, assert_pushed, assert_ordered):
            assert lowq_app.queues() == []
            assert lowq_drain().batches == 0

            @lowq.worker(shards_count=number + 1)
            def Local(payloads_by_id):
                pass

            Local.push(1)
            OrderSync.push(1, {"version": number})
            OrderSync.push("left", {"version": 0}, delay=number % 2)
            lowq_clock.travel(number)
            assert lowq_drain().performed >= 2
            assert saved["1"] == [[number]]
            assert_pushed(OrderSync, times=2)
            assert_ordered()
        """
    )
    run(project, "-p", "randomly", *args).assert_outcomes(passed=12)


def test_a_failed_assertion_says_what_was_there_and_nothing_of_us(project: pytest.Pytester) -> None:
    project.makepyfile(
        """
        import lowq
        import pytest
        from workers import Mails, OrderSync

        def test_other(assert_pushed):
            OrderSync.push(42, {"version": 1}, score=1)
            assert_pushed(OrderSync, id=42, payload={"version": 2})

        def test_none(assert_pushed):
            OrderSync.push(42, {"version": 1}, score=1)
            assert_pushed(Mails)

        def test_often(assert_pushed):
            OrderSync.push(42, {"version": 1})
            OrderSync.push(42, {"version": 1})
            assert_pushed(OrderSync, id=42, times=1)

        def test_nothing_to_order(assert_ordered):
            assert_ordered()

        def test_order(lowq_drain, assert_ordered):
            def reverse(worker, batch, call_next):
                for payloads in batch.values():
                    payloads.reverse()
                call_next()

            app = lowq.Lowq(server_middlewares=[reverse])

            @app.worker
            def orders(payloads_by_id):
                pass

            orders.push(7, "old", score=1)
            orders.push(7, "new", score=2)
            lowq_drain()
            assert_ordered()
        """
    )
    result = run(project)
    result.assert_outcomes(failed=5)
    assert said(result).splitlines() == [
        "AssertionError: OrderSync: nothing was pushed with id '42', payload {'version': 2}",
        "pushed to OrderSync (1):",
        "id '42'  payload {'version': 1}  score 1.0   <- another payload",
        "AssertionError: Mails: nothing was pushed",
        "to other queues: OrderSync (1)",
        "AssertionError: OrderSync: pushed 2 times with id '42', not once",
        "pushed to OrderSync (2):",
        "id '42'  payload {'version': 1}",
        "id '42'  payload {'version': 1}",
        "AssertionError: nothing was handed over, so there is no order to be checked; drain first",
        "AssertionError: payloads were not handed over in order:",
        "orders, id '7': a middleware or the merge function has changed the order: perform got 'new', 'old'",
    ]
    assert "pushes.py" not in result.stdout.str()
    assert "sandbox.py" not in result.stdout.str()


def test_a_crash_that_never_came_is_an_error(project: pytest.Pytester) -> None:
    project.makepyfile(
        """
        def test_nothing_is_performed(lowq_drain, lowq_crash):
            lowq_crash()
            lowq_drain()

        def test_the_next_one_is_as_ever(lowq_drain):
            assert lowq_drain().batches == 0
        """
    )
    result = run(project)
    result.assert_outcomes(passed=2, errors=1)
    assert "crash() was to lose 1 outcome(s) more, and nothing was performed after that" in said(result)


def test_the_application_is_that_of_the_project(project: pytest.Pytester) -> None:
    """Whatever names a project's application is told, and errors are: `lowq run` has the other rows."""
    path = '[tool.pytest.ini_options]\npythonpath = ["."]\n'
    project.makepyfile(shop="import lowq\napplication = lowq.Lowq()\n", broken="1 / 0\n")
    project.makepyfile(
        """
        import shop

        def test_app(lowq_app):
            assert lowq_app is shop.application
            lowq_app.queue("Orders", 1).push(1)
        """
    )
    for app, error in (
        ("shop:application", None),
        ("nowhere", "lowq_app: nowhere: there is no module 'nowhere'"),
        ("broken", "ZeroDivisionError"),
    ):
        with case(app):
            (project.path / "pyproject.toml").write_text(f'[tool.lowq]\napp = "{app}"\n{path}')
            result = run(project)
            result.assert_outcomes(passed=int(error is None), errors=int(error is not None))
            assert error is None or error in result.stdout.str()
            assert "lowq_pytest" not in result.stdout.str()


def test_without_fakeredis_a_fixture_says_what_to_install(project: pytest.Pytester) -> None:
    project.makepyfile(fakeredis="raise ImportError('No module named fakeredis')")
    project.makepyfile("def test_one(lowq_drain):\n    pass\n")
    result = run(project)
    result.assert_outcomes(errors=1)
    assert "pip install 'lowq[embedded]'" in said(result)


def test_the_names_are_those_of_the_page() -> None:
    page = (Path(__file__).parents[3] / "docs" / "testing.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"^\| `(?:await )?((?:lowq|assert)_\w+)", page, re.MULTILINE))
    assert {name for name in vars(lowq_pytest) if name.startswith(("lowq_", "assert_"))} == documented
