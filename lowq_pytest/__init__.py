"""pytest's plugin of lowq: fixtures for tests of applications, on embedded stores and in the test's process.

pytest loads it in every run in which lowq is installed. So it is a package beside lowq, which would be loaded, too, if
the plugin were inside of it. Only a fixture that is used imports lowq.
"""

from __future__ import annotations  # they name what is imported for type checkers only

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import lowq
    from lowq.testing import Sandbox, SandboxClock


@pytest.fixture
def _lowq_sandbox() -> Iterator[Sandbox]:
    import lowq.testing

    with lowq.testing.sandbox() as box:
        yield box


@pytest.fixture
def lowq_app(_lowq_sandbox: Sandbox, pytestconfig: pytest.Config) -> lowq.Lowq:
    """The application, on an empty embedded store: that of `[tool.lowq] app` in pyproject.toml, otherwise the default
    one. All others of the process are embedded as well.
    """
    import lowq
    from lowq.cli.loading import app_of_project, load_app
    from lowq.cli.output import Failure

    try:
        found = app_of_project(pytestconfig.rootpath)
        return lowq.app if found is None else load_app(found[0], workers=False, folder=found[1].parent)
    except Failure as failure:
        pytest.fail(f"lowq_app: {failure.trace or ''}{failure.message}", pytrace=False)


@pytest.fixture
def lowq_drain(_lowq_sandbox: Sandbox) -> Callable[..., Any]:
    """`lowq_drain()` performs everything that is due, in the test's thread; `lowq_drain(OrderSync)` of one worker.
    Returns how many were `performed` and `failed`. `raises=True` raises what a handler raises, `limit=` bounds the
    batches.
    """
    return _lowq_sandbox.drain


@pytest.fixture
def lowq_adrain(_lowq_sandbox: Sandbox) -> Callable[..., Any]:
    """`await lowq_adrain()`: as `lowq_drain`, in the running event loop, for async tests."""
    return _lowq_sandbox.adrain


@pytest.fixture
def lowq_clock(_lowq_sandbox: Sandbox) -> SandboxClock:
    """`lowq_clock.travel(3600)`: an hour later for all that waits. `lowq_clock.now()`: Unix time there."""
    return _lowq_sandbox.clock


@pytest.fixture
def lowq_crash(_lowq_sandbox: Sandbox) -> Callable[..., None]:
    """`lowq_crash()`: the process dies after the next `perform`, before its outcome is written, and the jobs are
    performed again. `times=` of so many batches.
    """
    return _lowq_sandbox.crash


@pytest.fixture
def assert_pushed(_lowq_sandbox: Sandbox) -> Callable[..., Any]:
    """`assert_pushed(OrderSync, id=42, payload=..., score=..., times=...)`: such a payload was pushed."""
    return _lowq_sandbox.assert_pushed


@pytest.fixture
def assert_ordered(_lowq_sandbox: Sandbox) -> Callable[..., None]:
    """`assert_ordered()`: the payloads of each id were handed over in the order of their scores, without gaps."""
    return _lowq_sandbox.assert_ordered
