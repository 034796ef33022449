"""Who the primary is when sentinels answer, disagree or say nothing; and what becomes of connections to it."""

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial

import pytest
from redis import exceptions
from redis.sentinel import MasterNotFoundError

from lowq.store import sentinels as module
from lowq.store.pool import Pool
from lowq.store.sentinels import Answer, FollowedPrimary
from tests.waiting import PATIENCE, until

OLD, NEXT = ("127.0.0.1", 1), ("127.0.0.1", 2)


class Connection:
    def __init__(self) -> None:
        self._sock, self.other_end = socket.socketpair()

    def close(self) -> None:
        self._sock.close()
        self.other_end.close()

    def is_broken(self) -> bool:
        self.other_end.setblocking(False)
        try:
            return self.other_end.recv(1) == b""
        except BlockingIOError:
            return False


class Sentinels:
    """Three: what each says, an error, or "" when it says nothing at all."""

    def __init__(self) -> None:
        self.says: list[Answer | Exception | str | None] = [Answer(OLD, 1)] * 3
        self.asked = [0, 0, 0]
        self.thawed = threading.Event()
        self.primary = FollowedPrimary("main", [partial(lambda index: partial(self.ask, index), i) for i in range(3)])

    def ask(self, index: int) -> Answer | None:
        self.asked[index] += 1
        if self.says[index] == "":
            self.thawed.wait(PATIENCE)
        said = self.says[index]
        if isinstance(said, Exception):
            raise said
        return said if isinstance(said, Answer) else None

    def hear_all(self) -> None:
        """Has those that answer asked twice: what they say now is known then."""
        before = list(self.asked)

        def is_heard(sentinel: int) -> bool:
            self.primary.find(PATIENCE)
            return self.says[sentinel] == "" or self.asked[sentinel] > before[sentinel] + 1

        until(lambda: all(map(is_heard, range(3))), "all asked again")


@pytest.fixture
def sentinels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sentinels]:
    monkeypatch.setattr(module, "ASK_PAUSES", (0.02, 0.05))
    monkeypatch.setattr(module, "WAKE_PAUSE", 0.0)
    monkeypatch.setattr(module, "FRESH", PATIENCE)
    sentinels = Sentinels()
    yield sentinels
    sentinels.thawed.set()
    monkeypatch.setattr(module, "IDLE", -1.0)
    for thread in threading.enumerate():
        if thread.name == "lowq-sentinel":
            thread.join(PATIENCE)


def test_connections_break_when_a_sentinel_names_another_primary_and_not_before(sentinels: Sentinels) -> None:
    sentinels.primary.find(PATIENCE)
    connection = sentinels.primary.followed(Connection())
    for says in (Answer(OLD, 1), exceptions.ConnectionError("nobody there"), None, ""):
        sentinels.says = [says] * 3
        sentinels.hear_all()
        assert sentinels.primary.find(PATIENCE) == OLD
        assert not connection.is_broken()
    sentinels.says = [Answer(NEXT, 2)] * 3
    sentinels.thawed.set()
    until(connection.is_broken, "broken connection")
    assert sentinels.primary.find(PATIENCE) == NEXT
    connection.close()


def test_sentinels_that_disagree(sentinels: Sentinels) -> None:
    frozen, away = "", exceptions.ConnectionError("nobody there")
    sentinels.says = [frozen, away, Answer(OLD, 1)]
    assert sentinels.primary.find(PATIENCE) == OLD
    sentinels.thawed.set()
    steps: list[tuple[list[Answer | None], tuple[str, int]]] = [
        ([Answer(NEXT, 2), Answer(OLD, 1), Answer(OLD, 1)], OLD),  # most do not know it yet
        ([Answer(NEXT, 2), Answer(NEXT, 2), Answer(OLD, 1)], NEXT),
        ([None, None, Answer(OLD, 1)], NEXT),  # it is cut off
        ([Answer(OLD, 0), Answer(OLD, 0), None], OLD),  # they were told anew whom to watch
    ]
    for says, meant in steps:
        sentinels.says = list(says)
        sentinels.hear_all()
        assert sentinels.primary.find(PATIENCE) == meant, says


def test_nobody_names_a_primary(sentinels: Sentinels) -> None:
    def failure() -> str:
        with pytest.raises(MasterNotFoundError) as caught:
            sentinels.primary.find(PATIENCE)
        return str(caught.value)

    sentinels.says = [None, exceptions.ConnectionError("nobody there"), None]
    assert failure().endswith("'main'")
    sentinels.says = [exceptions.ConnectionError("nobody there")] * 3
    until(lambda: "nobody there" in failure(), "why none answers")


def test_the_threads_end_with_the_last_user_and_come_back_with_the_next(sentinels: Sentinels) -> None:
    def asking() -> int:
        return [thread.name for thread in set(threading.enumerate()) - before].count("lowq-sentinel")

    before = set(threading.enumerate())
    one, other = (Pool(Connection, 1, 0.0, shebang=False) for _ in range(2))
    for user in (one, other):
        sentinels.primary.follow(user)
    sentinels.primary.leave(one)
    sentinels.hear_all()
    assert asking() == 3
    sentinels.primary.leave(other)
    until(lambda: not asking(), "the end of the threads")
    sentinels.primary.follow(one)
    assert asking() == 3


def test_who_uses_the_primary_while_a_thread_ends_has_the_sentinel_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    now, made, asked = [0.0], 0, [0.0]

    def ask() -> Answer:
        asked.append(now[0])
        now[0] += 2 * module.IDLE  # and nobody uses it
        return Answer(OLD, 1)

    def make_ask() -> module.Ask:
        nonlocal made
        made += 1
        if made == 2:  # the last thing that the first thread does
            primary.follow()
        return ask

    monkeypatch.setattr(module, "ASK_PAUSES", (0.02, 0.05))
    primary = FollowedPrimary("main", [make_ask], lambda: now[0])
    primary.follow()
    until(lambda: len(asked) == 3, "asked again")


FORK = """
import os, threading
from lowq.store.sentinels import FollowedPrimary, Answer

parent, calls, held = os.getpid(), 0, threading.Event()

def clock():
    global calls
    if threading.current_thread().name == "lowq-sentinel" and os.getpid() == parent:
        calls += 1
        if calls == 2:  # the first answer is being looked at
            held.set()
            threading.Event().wait()
    return 1000.0

primary = FollowedPrimary("shop", [lambda: lambda: Answer(("10.0.0.1", 6379), 1)], clock)
primary.follow()
held.wait()
if os.fork() == 0:
    print(primary.find(60), flush=True)
    os._exit(0)
os._exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""


def test_a_forked_child_asks_anew_though_the_parent_was_about_to_decide() -> None:
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.stdout == "('10.0.0.1', 6379)\n", done.stderr
