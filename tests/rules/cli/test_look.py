"""What `lowq nodes` says of a node besides its figures, and how often `lowq stats --watch` looks."""

import time
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from lowq import Lowq
from lowq.cli import main, stats
from lowq.clock import LONGEST_WAIT
from lowq.operate.nodes import NodeInfo
from tests.rows import case


def test_remarks_on_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[tuple[dict[str, Any], str]] = [
        ({}, ""),
        ({"quiet": True, "waiting": True, "written_off": 1}, "waiting, quiet, written off: 1"),
    ]
    for fields, remarks in rows:
        with case(fields, remarks):
            found = [NodeInfo("me:1:abc", 0.0, 0.0, **fields)]
            monkeypatch.setattr(Lowq, "nodes", lambda _, lost=False, found=found: [] if lost else found)
            _, line = CliRunner().invoke(main, ["nodes", "--redis-url", "memory://nodes"]).stdout.splitlines()
            assert line.partition(" ago")[2].strip() == remarks


def test_the_seconds_of_watch_are_told_from_a_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    slept = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        raise KeyboardInterrupt

    monkeypatch.setattr(stats, "time", SimpleNamespace(time=time.time, monotonic=time.monotonic, sleep=sleep))
    for text, seconds in (("2", 2.0), (".5", 0.5), ("0", 0.1), ("9" * 30, LONGEST_WAIT)):
        with case(text):
            CliRunner().invoke(main, ["stats", "--watch", text, "--redis-url", "memory://watch"])
            assert slept.pop() == seconds
    for text in ("Orders", "1e9"):
        with case(text):
            shown = CliRunner().invoke(main, ["stats", "--watch", text, "--redis-url", "memory://watch"])
            assert f"queue '{text}' does not exist" in shown.stderr
