"""The clock that leases are counted by goes on while the machine is suspended, where there is such a clock."""

import importlib
import sys
import time

import pytest

from lowq import clock
from tests.rows import case


def test_it_is_the_one_that_counts_suspension_or_else_the_monotonic_one(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        ("linux", "CLOCK_BOOTTIME", 86_400.5), ("darwin", "CLOCK_MONOTONIC", 86_400.5), ("linux", "", 7.25),
        ("win32", "", 7.25),
    ]  # fmt: skip
    for platform, name, now in rows:
        with case(platform, name), monkeypatch.context() as patched:
            patched.setattr(sys, "platform", platform)
            patched.setattr(time, "monotonic", lambda: 7.25)
            if name:
                patched.setattr(time, name, 4711, raising=False)

            def gettime(number: int) -> float:
                if number != 4711:
                    raise OSError("no such clock")
                return 86_400.5

            patched.setattr(time, "clock_gettime", gettime)
            importlib.reload(clock)
            found = clock.now()
        importlib.reload(clock)
        assert found == now
