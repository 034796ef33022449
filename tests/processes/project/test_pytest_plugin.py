"""The pytest plugin: its fixtures in runs of pytest of their own, and what it costs those that use none."""

import os
import re
from pathlib import Path

import pytest

import lowq_pytest

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


#: What each fixture does, also in async tests; and that no test sees jobs of another. tests/rules/testing has the rest.
WORKING = """
import asyncio
import lowq
import pytest
from workers import Mails, OrderSync, saved

@pytest.mark.parametrize("number", range(6))
def test_alone(number, lowq_app, lowq_drain, lowq_clock, assert_pushed, assert_ordered):
    assert lowq_app is lowq.app
    assert lowq_app.queues() == []
    assert lowq_drain().batches == 0

    @lowq.worker(shards_count=number + 1)
    def Local(payloads_by_id):
        pass

    Local.push(1)
    OrderSync.push(1, {"version": number})
    OrderSync.push("later", {"version": 0}, delay=3600)
    assert lowq_drain().performed == 2
    lowq_clock.travel(3600)
    assert lowq_drain().performed == 1
    assert saved == {"1": [[number]], "later": [[0]]}
    assert [pushed.queue for pushed in assert_pushed(OrderSync, times=2)] == ["OrderSync"] * 2
    assert_ordered()

def test_crash(lowq_drain, lowq_crash):
    OrderSync.push(1, {"version": 1})
    lowq_crash()
    assert lowq_drain().performed == 1
    assert saved == {"1": [[1], [1]]}

async def push_and_drain(lowq_adrain, assert_pushed):
    await asyncio.gather(*(Mails.apush(n) for n in range(3)))
    await OrderSync.apush(9, {"version": 1})
    assert (await lowq_adrain()).performed == 4
    assert_pushed(Mails, times=3)

@pytest.mark.anyio
async def test_anyio(lowq_adrain, assert_pushed):
    await push_and_drain(lowq_adrain, assert_pushed)

@pytest.mark.asyncio
async def test_asyncio(lowq_adrain, assert_pushed):
    await push_and_drain(lowq_adrain, assert_pushed)
"""
#: Assertions that fail, and a crash that never came.
FAILING = """
from workers import OrderSync

def test_other(assert_pushed):
    OrderSync.push(42, {"version": 1}, score=1)
    assert_pushed(OrderSync, id=42, payload={"version": 2})

def test_nothing_to_order(assert_ordered):
    assert_ordered()

def test_nothing_is_performed(lowq_drain, lowq_crash):
    lowq_crash()
    lowq_drain()
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


def test_all_fixtures_work_and_what_fails_says_what_was_there_and_nothing_of_us(project: pytest.Pytester) -> None:
    project.makepyfile(test_working=WORKING, test_failing=FAILING)
    result = run(project, "-p", "randomly", "-o", "asyncio_default_fixture_loop_scope=function")
    result.assert_outcomes(passed=6 + 1 + 2 + 1, failed=2, errors=1)
    failures = said(result)
    assert "pushed to OrderSync (1):\nid '42'  payload {'version': 1}  score 1.0   <- another payload" in failures
    assert "nothing was handed over, so there is no order to be checked; drain first" in failures
    assert "crash() was to lose 1 outcome(s) more, and nothing was performed after that" in failures
    shown = result.stdout.str().partition("= FAILURES =")[2]
    assert "test_failing.py" in shown
    assert "pushes.py" not in shown
    assert "sandbox.py" not in shown


def test_the_application_is_that_of_the_project(project: pytest.Pytester) -> None:
    """And errors are told: `lowq run` has the other rows."""
    project.makepyfile("def test_app(lowq_app):\n    pass\n")
    project.makepyprojecttoml('[tool.lowq]\napp = "nowhere"\n')
    result = run(project)
    result.assert_outcomes(errors=1)
    assert "lowq_app: nowhere: there is no module 'nowhere'" in result.stdout.str()
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
