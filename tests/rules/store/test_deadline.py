"""How long callers wait for Redis."""

import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from lowq.store import Call, Client
from lowq.store.calls import Deadline, caller_deadline, caller_limit, deadlines
from lowq.store.pool import MAX_WRITE, Pool
from tests.rows import case


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which stands still until it is set."""
    now = [100.0]
    monkeypatch.setattr("lowq.store.calls.time.monotonic", lambda: now[0])
    return now


@pytest.fixture
def caller(now: list[float]) -> Iterator[SimpleNamespace]:
    """It has to end in three seconds."""
    caller = SimpleNamespace(deadline=now[0] + 3.0)
    token = caller_limit.set(caller)
    yield caller
    caller_limit.reset(token)


def shares(seconds: float, attempts: int) -> list[float]:
    return [deadline.seconds for deadline in deadlines(seconds, attempts)]


def test_all_attempts_together_have_the_time(now: list[float]) -> None:
    assert shares(8.0, 3) == [4.0, 2.0, 2.0]
    assert shares(8.0, 1) == [8.0]
    assert caller_deadline() == float("inf")


def test_all_attempts_together_have_no_more_than_the_caller_has(caller: SimpleNamespace) -> None:
    assert shares(8.0, 2) == [1.5, 1.5]
    assert shares(2.0, 2) == [1.0, 1.0]
    caller.deadline = None
    assert shares(8.0, 2) == [4.0, 4.0]


def test_progress_begins_it_anew_and_what_is_left_is_never_nothing(now: list[float]) -> None:
    deadline = Deadline(5.0)
    now[0] += 4.0
    assert (deadline.left(), deadline.passed) == (1.0, False)
    deadline.restart()
    now[0] += 4.5
    assert (deadline.left(), deadline.passed) == (0.5, False)
    now[0] += 1.5
    # A socket with the timeout 0 does not wait, and one with none waits for ever.
    assert (deadline.left(), deadline.passed) == (0.001, True)


def test_progress_gives_no_more_time_than_the_caller_has(now: list[float], caller: SimpleNamespace) -> None:
    (deadline,) = deadlines(8.0, 1)
    now[0] += 2.0
    deadline.restart()
    assert (deadline.left(), deadline.passed) == (1.0, False)


def test_a_reply_is_waited_for_no_longer_than_is_left(now: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float | None] = []

    class Connection:
        """Takes a second to read a reply, and to write what does not fit into the buffers of the kernel."""

        def __init__(self) -> None:
            self._sock = socket.socket()  # where redis-py has it

        def send_packed_command(self, packed: list[bytes], check_health: bool) -> None:
            now[0] += sum(map(len, packed)) > 2**14

        def read_response(self) -> int:
            waited.append(self._sock.gettimeout())
            now[0] += 1.0
            return 1

        def disconnect(self) -> None:
            self._sock.close()

    pools = {key: Pool(Connection, 1, 1.0, shebang=False) for key in "ab"}
    topology = SimpleNamespace(
        pool_for=lambda key, _deadline: pools[key], only_pool=None, is_partial=False, has_several_primaries=True
    )
    monkeypatch.setattr("lowq.store.client.topology_of", lambda *_: topology)
    client = Client("redis://nowhere", size=1, timeout=1.0)
    for key in pools:
        assert client.start([Call[Any]("push", key, ())])() == [1]  # it is prepared
    rows: list[tuple[str, str, list[int], list[float]]] = [
        ("a small call is written at once", "a", [10], [3.0]),
        ("the second reply has what the first left", "aa", [10, 10], [3.0, 2.0]),
        ("so has that of another server", "ab", [10, 10], [3.0, 2.0]),
        ("a large call takes time", "a", [100_000], [2.0]),
        ("so does a large one behind a small one", "aa", [10, MAX_WRITE], [2.0, 1.0]),
    ]
    for rule, keys, sizes, expected in rows:
        with case(rule):
            waited.clear()
            calls = [Call[Any]("push", key, (), [b"x" * size]) for key, size in zip(keys, sizes, strict=True)]
            assert client.start(calls, deadline=Deadline(60.0, until=now[0] + 3.0))() == [1] * len(calls)
            assert waited == expected
    for pool in pools.values():
        pool.close()
