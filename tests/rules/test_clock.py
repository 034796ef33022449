"""The clock that leases are counted by goes on while the machine is suspended, where there is such a clock."""

import importlib
import sys
import time
from collections.abc import Iterator

import pytest

from lowq import clock


@pytest.fixture(autouse=True)
def _clock_as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield
    monkeypatch.undo()  # first: what is loaded anew finds its clock then
    importlib.reload(clock)


@pytest.mark.parametrize(("platform", "name"), [("linux", "CLOCK_BOOTTIME"), ("darwin", "CLOCK_MONOTONIC")])
def test_it_is_the_one_that_counts_suspension(monkeypatch: pytest.MonkeyPatch, platform: str, name: str) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(time, name, 4711, raising=False)
    monkeypatch.setattr(time, "clock_gettime", {4711: 86_400.5}.__getitem__)
    importlib.reload(clock)
    assert clock.now() == 86_400.5


@pytest.mark.parametrize("platform", ["linux", "win32"])
def test_where_there_is_none_it_is_the_monotonic_one(monkeypatch: pytest.MonkeyPatch, platform: str) -> None:
    def refuse(number: int) -> float:
        raise OSError("no such clock")

    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(time, "clock_gettime", refuse)
    monkeypatch.setattr(time, "monotonic", lambda: 7.25)
    importlib.reload(clock)
    assert clock.now() == 7.25
