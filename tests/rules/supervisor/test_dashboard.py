"""The dashboard beside a node: when it is started again, and what it knows of the node."""

import os
import threading
from collections.abc import Iterator

import pytest

from lowq.supervisor.dashboard import NodeWatcher
from lowq.supervisor.process import SILENCE


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
