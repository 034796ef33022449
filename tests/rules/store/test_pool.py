"""The pool of connections, whatever interrupts those who use it."""

import gc
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

import pytest

from lowq.errors import RedisUnavailable, ScriptError
from lowq.store import Call, Client, calls, client, pool
from lowq.store import connection as io
from lowq.store.calls import Deadline, Rights
from lowq.store.connection import encode
from lowq.store.pool import Pipeline, Pool
from lowq.store.urls import topology_of
from tests.waiting import PATIENCE

SIZE = 2
#: Where the exceptions come from: every bytecode of these may be the last one.
SOURCES = {client.__file__, calls.__file__, io.__file__, pool.__file__}


class Interrupted(BaseException):
    """What a signal handler raises."""


class FakeConnection:
    """Answers each command in turn, as a server does; what was not read is there still."""

    def __init__(self) -> None:
        self._sock: object = None  # where redis-py has it
        self.replies: list[int] = []

    def connect(self) -> None:
        self._sock = object()

    def disconnect(self) -> None:
        self._sock = None
        self.replies.clear()

    def send_packed_command(self, command: list[bytes], check_health: bool) -> None:
        assert self._sock
        self.replies += [1] * len(b"".join(command))

    def read_response(self) -> int:
        return self.replies.pop(0)


def make_pool(size: int = SIZE, timeout: float = 0.0) -> Pool:
    return Pool(FakeConnection, size, timeout, shebang=False)


@pytest.fixture(autouse=True)
def pack(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command becomes one byte, for which `FakeConnection` has one answer."""
    monkeypatch.setattr(gc, "collect", lambda: 0)  # which takes its time, for each that has waited in vain
    for module in (client, calls, io, pool):
        monkeypatch.setattr(module, "pack", lambda _command: b"*")


def interrupt_at(number: int, action: Callable[[], object]) -> bool:
    """Does it, and raises before its bytecode of that number. Whether it has so many."""
    seen = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal seen
        if frame.f_code.co_filename not in SOURCES:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            seen += 1
            if seen == number:
                raise Interrupted
        return trace

    def run() -> bool:
        # Python 3.12 looks whether anybody wants opcodes only when tracing begins.
        sys._getframe().f_trace_opcodes = True
        sys.settrace(trace)
        try:
            action()
        except Interrupted:
            return True
        finally:
            sys.settrace(None)
        return False

    # In a thread of its own: one in which something is raised as an `except` ends handles that exception for ever.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(run).result()


def check(fake: Pool) -> None:
    """All connections are to be had at once, no more, and nothing is left on any of them."""
    out = [fake.checkout() for _ in range(SIZE)]
    assert len({id(connection) for connection in out}) == SIZE
    assert all(connection.replies == [] for connection in out)
    with pytest.raises(RedisUnavailable, match="all 2 connections are in use"):
        fake.checkout()
    for connection in out:
        fake.release(connection)


def run_one(made: Client) -> None:
    made.call(Call("stats", "x:", [""]))


def lend_one(made: Client) -> None:
    finish = made.start([Call("stats", "x:", [""])], lend=True)
    made.start([Call("stats", "x:", [""])])()  # the foreign code
    finish()


def command(made: Client) -> None:
    made.commands([["PING"], ["ECHO", 5]])


@pytest.mark.parametrize("action", [run_one, lend_one, command])
def test_an_exception_at_any_moment_leaves_all_connections(
    monkeypatch: pytest.MonkeyPatch, action: Callable[[Client], None]
) -> None:
    fake = make_pool()
    monkeypatch.setattr("lowq.store.embedded.Pool", lambda *_, **__: fake)
    made = Client("memory://", size=SIZE, timeout=0.0)
    number = 1
    while interrupt_at(number, lambda: action(made)):
        number += 1
        check(fake)
    check(fake)
    assert number > 100


def test_an_exception_while_one_waits_leaves_all_connections() -> None:
    fake = make_pool(timeout=0.001)
    number = 0
    going = True

    def wait() -> None:
        with pytest.raises(RedisUnavailable) as full:
            fake.checkout()
        assert full.value.__context__ is None

    while going:
        number += 1
        out = [fake.checkout() for _ in range(SIZE)]
        going = interrupt_at(number, wait)
        for connection in out:
            fake.release(connection)
        check(fake)
    assert number > 30


def test_a_wait_for_a_connection_ends_in_time_whenever_the_thread_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """With waits so short that it stands still for that long now and then, also right after one was given back."""
    monkeypatch.setattr(pool, "LOOK_AGAIN", 1e-6)
    fake = make_pool(1, timeout=1e-5)
    held = fake.checkout()
    for _ in range(20_000):
        fake.release(held)
        held = fake.checkout()
        with pytest.raises(RedisUnavailable):
            fake.checkout()


def test_a_connection_that_is_garbage_frees_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = make_pool(1, timeout=0.01)
    monkeypatch.undo()
    cycle: list[Any] = [fake.checkout()]
    cycle.append(cycle)
    gc.disable()
    try:
        del cycle
        assert fake.checkout() is not None
    finally:
        gc.enable()


def test_a_signal_handler_gets_a_connection_that_another_thread_makes_for_it() -> None:
    """It waits for that thread, while what it has interrupted is making one."""
    fake = make_pool(2, timeout=60.0)
    connect = fake.connect
    got: list[Any] = []

    def interrupted() -> Any:
        fake.connect = connect
        thread = threading.Thread(target=lambda: got.append(fake.checkout()))
        thread.start()
        thread.join(PATIENCE)
        assert got
        return connect()

    fake.connect = interrupted
    held = fake.checkout()
    assert held is not got[0]
    with pytest.raises(RedisUnavailable, match="all 2 connections are in use"):
        fake.checkout(Deadline(0.01))


def test_of_several_that_make_one_at_the_same_moment_only_as_many_as_there_is_room_for_get_one() -> None:
    fake = make_pool(2, timeout=60.0)
    connect, meeting = fake.connect, threading.Barrier(5)

    def together() -> Any:
        connection = connect()
        meeting.wait(PATIENCE)
        return connection

    def checkout(_: int) -> Any:
        try:
            return fake.checkout(Deadline(0.5))
        except RedisUnavailable:
            return None

    fake.connect = together
    with ThreadPoolExecutor(5) as threads:
        assert list(threads.map(checkout, range(5))).count(None) == 3


def test_redis_pys_connections_end_with_the_last_reference() -> None:
    # Otherwise a lost one would keep its place until the garbage collector runs.
    connection = topology_of("redis://127.0.0.1:1", 1, 0.0, 1.0, None).pool_at(None).connect()
    reference = weakref.ref(connection)
    gc.disable()
    try:
        del connection
        assert reference() is None
    finally:
        gc.enable()


def test_numbers_are_sent_as_python_writes_them() -> None:
    assert encode([10**20, -1, 0.1, 1e22, "\N{SNOWMAN}", b"\xff"]) == [
        b"100000000000000000000", b"-1", b"0.1", b"1e+22", "\N{SNOWMAN}".encode(), b"\xff",
    ]  # fmt: skip


def test_what_a_signal_handler_raises_while_a_reply_is_read_is_not_taken_for_a_wrong_reply() -> None:
    class Timeout(Exception):
        pass

    for error, expected in ((ValueError(), ScriptError), (Timeout(), Timeout)):

        def read(_reply: Any, error: Exception = error) -> None:
            raise error

        results: list[Any] = [None]
        pipeline = Pipeline(make_pool(), [(0, Call("push", "key", (), read=read))], results, None, None)
        pipeline.send()
        try:
            pipeline.receive()
        except Timeout as raised:
            results[0] = raised
        assert type(results[0]) is expected


def test_rights_that_another_thread_forgets_while_they_are_noted_are_looked_at_again() -> None:
    class Meanwhile(Rights):
        is_asked = False

        def _ask(self, _connection: Any, _key: str) -> dict[str, list[str]]:
            self.is_asked = True
            return {}

        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value)
            if self.is_asked and name != "is_asked":
                self.is_asked = False
                self.forget()

    rights = Meanwhile(b"", is_granted=False)
    rights.check(None, [Call("push", "key", ())])
    assert rights.may_lack
