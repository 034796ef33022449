"""The dashboard beside a node: when it is started again, and what it knows of the node."""

import os
import random
import threading
from collections.abc import Iterator
from itertools import pairwise

import pytest

from lowq.supervisor.dashboard import DashboardProcess, NodeWatcher
from lowq.supervisor.process import SILENCE, Child


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Watcher(NodeWatcher):
    """One that does not end this process when its node has ended."""

    def __init__(self, given: str, clock: Clock) -> None:
        self.ended = threading.Event()
        super().__init__(given, clock)

    def orphaned(self) -> None:
        self.ended.set()


@pytest.fixture
def watcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[NodeWatcher, Clock]]:
    monkeypatch.setattr("multiprocessing.current_process", type("Process", (), {}))
    report, life = os.pipe(), os.pipe()
    clock = Clock()
    node = Watcher(f"web:{report[1]}:{life[0]}", clock)
    yield node, clock
    os.close(life[1])
    assert node.ended.wait(20)
    for end in (life[0], *report):
        os.close(end)


def test_a_node_is_as_it_says_until_it_says_nothing_more(watcher: tuple[NodeWatcher, Clock]) -> None:
    node, clock = watcher
    assert node.trouble() == "the node has not started yet"
    node.heard(b'{"trouble": "Redis has not answered for 2.0 s"}')
    assert node.trouble() == "Redis has not answered for 2.0 s"
    node.heard(b'{"trouble": null}')
    clock.now += SILENCE - 1
    assert node.trouble() is None
    clock.now += 1
    assert node.trouble() == f"the node has said nothing for {SILENCE:.0f} s"
    node.heard(b'{"trouble": null}')
    assert node.trouble() is None


def test_it_is_started_again_after_growing_pauses_and_never_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random, "uniform", lambda low, high: (low + high) / 2)
    now, tries = 1000.0, []

    def start(*_: object) -> Child:
        tries.append(now)
        raise OSError("no room for a process")

    monkeypatch.setattr(Child, "start", start)
    process = DashboardProcess(["lowq", "web"], "127.0.0.1:0", ".", lambda: None)
    for _ in range(40_000):
        process._look(now)
        now += 0.25
    pauses = [after - before for before, after in pairwise(tries)]
    assert pauses[:8] == [0.25, 0.25, 0.5, 1, 2, 4, 8, 15]
    assert set(pauses[8:]) == {15}
    assert len(pauses) > 600
