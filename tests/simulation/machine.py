"""The machine of a simulation: what Python's modules say of time, threads, chance and sockets comes from the world.

`install` replaces parts of the standard library in this whole process, so it comes before anything else is imported,
and the process does nothing but simulate. Where no world runs, the clocks stand still and threads can't be started.
"""

import _thread
import errno
import itertools
import os
import queue
import random
import select
import selectors
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from tests.simulation.world import BEGINNING, BEGINNING_WALL, Task, current, has_world

# --- time ---


def monotonic() -> float:
    return current().glance() if has_world() else BEGINNING


def wall() -> float:
    if not has_world():
        return BEGINNING_WALL
    world = current()
    process = world.process
    ahead = 0.0 if process is None else process.wall_ahead
    return BEGINNING_WALL + (world.glance() - BEGINNING) + ahead


def sleep(seconds: float) -> None:
    current().sleep(seconds)


# --- threads ---


class Lock:
    """As `threading.Lock`."""

    def __init__(self) -> None:
        self._is_locked = False
        self._waiting: deque[Task] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if not has_world():
            taken, self._is_locked = not self._is_locked, True
            return taken
        world = current()
        world.step()
        if not self._is_locked:
            self._is_locked = True
            return True
        if not blocking:
            return False
        task = world.task
        if task is None:
            raise RuntimeError("the hub waits for a lock")
        ends = None if timeout < 0 else world.now + timeout
        while self.locked():
            left = None if ends is None else ends - world.now
            if left is not None and left <= 0:
                return False
            self._waiting.append(task)
            try:
                world.park(left)
            finally:
                if task in self._waiting:
                    self._waiting.remove(task)
        self._is_locked = True
        return True

    def release(self) -> None:
        if not self._is_locked:
            raise RuntimeError("release unlocked lock")
        self._is_locked = False
        if self._waiting:
            chosen = self._waiting[0] if len(self._waiting) == 1 else current().chance.choice(self._waiting)
            chosen.wake()

    def locked(self) -> bool:
        return self._is_locked

    def _at_fork_reinit(self) -> None:
        self._is_locked = False
        self._waiting.clear()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Thread:
    """As `threading.Thread`."""

    def __init__(
        self,
        group: None = None,
        target: Callable[..., object] | None = None,
        name: str | None = None,
        args: Any = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        daemon: bool | None = None,
        context: Any = None,
    ) -> None:
        self._target, self._args, self._kwargs = target, args, kwargs or {}
        self.name = name or f"Thread-{current().next_number() if has_world() else 0}"
        self.daemon = bool(daemon)
        self._task: Task | None = None
        self._joining: list[Task] = []

    def start(self) -> None:
        world = current()
        process = world.process
        assert process is not None
        self._task = world.spawn(process, self._run, self.name)
        self._task.thread = self

    def _run(self) -> None:
        try:
            self.run()
        except SystemExit:
            pass
        finally:
            for task in self._joining:
                task.wake()

    def run(self) -> None:
        if self._target is not None:
            self._target(*self._args, **self._kwargs)

    def join(self, timeout: float | None = None) -> None:
        world = current()
        ends = None if timeout is None else world.now + timeout
        while self.is_alive():
            assert world.task is not None
            left = None if ends is None else ends - world.now
            if left is not None and left <= 0:
                return
            self._joining.append(world.task)
            world.park(left)

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.is_done and self._task.process.is_alive

    @property
    def ident(self) -> int | None:
        return None if self._task is None else self._task.ident

    native_id = ident

    def isDaemon(self) -> bool:  # noqa: N802 - the standard library's name
        return self.daemon


class _Main(Thread):
    """Of a thread that the simulation itself has started, or of none."""

    def is_alive(self) -> bool:
        return True


_main = _Main(name="MainThread")


def current_thread() -> Thread:
    task = current().task if has_world() else None
    if task is None:
        return _main
    if task.thread is None:
        thread = task.thread = _Main(name=task.name)
        thread._task = task
    found: Thread = task.thread
    return found


def get_ident() -> int:
    task = current().task if has_world() else None
    return 0 if task is None else task.ident


def enumerate_threads() -> list[Thread]:
    world = current()
    process = world.process
    tasks = [] if process is None else process.tasks
    return [task.thread for task in tasks if not task.is_done and task.thread is not None]


def start_new_thread(function: Callable[..., object], args: Any = (), kwargs: Mapping[str, Any] | None = None) -> int:
    """As `_thread.start_new_thread`."""
    thread = Thread(target=function, args=args, kwargs=kwargs)
    thread.start()
    assert thread.ident is not None
    return thread.ident


def interrupt_of_this_thread() -> Callable[[type[BaseException] | None], object]:
    """As lowq's: raises an exception in the thread that calls this, where it waits."""
    task = current().task
    assert task is not None

    def interrupt(kind: type[BaseException] | None) -> None:
        assert task is not None
        task.pending = kind
        if kind is not None and task.is_waiting:
            task.wake()

    return interrupt


# --- sockets ---


class Socket:
    """As `socket.socket`, of a simulated network. One end of a connection; the other is a socket or a server's."""

    _numbers = itertools.count(1_000_000)
    open_ones: ClassVar[dict[int, "Socket"]] = {}

    def __init__(self, family: int = socket.AF_INET, type: int = socket.SOCK_STREAM, proto: int = 0) -> None:  # noqa: A002
        self.family, self.type, self.proto = family, type, proto
        self._fd = next(self._numbers)
        self.open_ones[self._fd] = self
        self._timeout: float | None = None
        self.received = bytearray()
        #: The other end has closed, or the connection broke: with that error, if any.
        self.is_ended = False
        self.error: OSError | None = None
        self._is_closed = False
        #: Gets what is sent; None: not connected.
        self.deliver: Callable[[bytes], object] | None = None
        self.on_close: Callable[[], object] = lambda: None
        self._waiting: list[Task] = []
        self._address: tuple[str, int] | None = None

    # for the network

    def arrived(self, data: bytes) -> None:
        self.received += data
        self._wake()

    def ended(self, error: OSError | None = None) -> None:
        """Nothing more comes: the other end was closed, or the connection broke."""
        if not self.is_ended:
            self.is_ended, self.error = True, error
            self._wake()

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for task in waiting:
            task.wake()

    @property
    def is_readable(self) -> bool:
        return bool(self.received) or self.is_ended or self._is_closed

    def hang_up(self) -> None:
        """The kernel closes it, as its process has ended."""
        self.on_close()

    # as a socket

    def connect(self, address: tuple[str, int]) -> None:
        self._address = address
        NETWORK.connect(self, address, self._timeout)

    def send(self, data: bytes, _flags: int = 0) -> int:
        self.sendall(data)
        return len(data)

    def sendall(self, data: bytes, _flags: int = 0) -> None:
        current().step()
        self._check()
        if self.error is not None:
            raise self.error
        if self.deliver is None:
            raise OSError(errno.ENOTCONN, "not connected")
        if self.is_ended:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")
        self.deliver(bytes(data))

    def recv(self, size: int, flags: int = 0) -> bytes:
        current().step()
        self._await_data(flags & getattr(socket, "MSG_DONTWAIT", 0) != 0)
        data = bytes(self.received[:size])
        if not flags & socket.MSG_PEEK:
            del self.received[:size]
        return data

    def recv_into(self, buffer: Any, size: int = 0, flags: int = 0) -> int:
        data = self.recv(size or len(buffer), flags)
        buffer[: len(data)] = data
        return len(data)

    def _await_data(self, is_polling: bool) -> None:
        world = current()
        self._check()
        timeout = 0.0 if is_polling else self._timeout
        ends = None if timeout is None else world.now + timeout
        while not self.is_readable:
            left = None if ends is None else ends - world.now
            if timeout == 0.0:
                raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
            if left is not None and left <= 0:
                raise TimeoutError("timed out")
            assert world.task is not None
            self._waiting.append(world.task)
            world.park(left)
            self._check()
        if not self.received and self.error is not None:
            raise self.error

    def _check(self) -> None:
        if self._is_closed:
            raise OSError(errno.EBADF, "Bad file descriptor")

    def settimeout(self, value: float | None) -> None:
        self._timeout = value

    def gettimeout(self) -> float | None:
        return self._timeout

    def setblocking(self, flag: bool) -> None:
        self._timeout = None if flag else 0.0

    def getblocking(self) -> bool:
        return self._timeout != 0.0

    def setsockopt(self, *_: object) -> None:
        pass

    def getsockopt(self, *_: object) -> int:
        return 0

    def getpeername(self) -> tuple[str, int]:
        if self.deliver is None or self._address is None:
            raise OSError(errno.ENOTCONN, "not connected")
        return self._address

    def getsockname(self) -> tuple[str, int]:
        return "127.0.0.1", self._fd

    def fileno(self) -> int:
        return -1 if self._is_closed else self._fd

    def shutdown(self, _how: int) -> None:
        self.ended()
        self.on_close()

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self.open_ones.pop(self._fd, None)
            self.on_close()
            if has_world():
                self._wake()

    def detach(self) -> int:
        return self._fd

    def __enter__(self) -> "Socket":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def socketpair(*_: object) -> tuple[Socket, Socket]:
    one, other = Socket(), Socket()
    one.deliver, other.deliver = other.arrived, one.arrived
    one.on_close, other.on_close = other.ended, one.ended
    return one, other


def getaddrinfo(host: str, port: int, family: int = 0, kind: int = 0, proto: int = 0, flags: int = 0) -> list[Any]:
    return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port))]


class Network:
    """Connects sockets with servers: see `tests.simulation.servers`."""

    def __init__(self) -> None:
        #: What connects a socket to an address.
        self.connect: Callable[[Socket, tuple[str, int], float | None], None] = self._refuse

    def _refuse(self, _socket: Socket, address: tuple[str, int], _timeout: float | None) -> None:
        raise ConnectionRefusedError(errno.ECONNREFUSED, f"nothing listens at {address}")


NETWORK = Network()


class Selector(selectors._BaseSelectorImpl):  # what all of Python's are made of
    """As those of `selectors`, of simulated sockets."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        world = current()
        world.step()
        ends = None if timeout is None else world.now + timeout
        while True:
            ready = []
            for key in list(self.get_map().values()):
                found = Socket.open_ones.get(key.fd)
                events = 0
                if found is None or found.is_readable:
                    events |= key.events & selectors.EVENT_READ
                if found is None or found.deliver is not None:
                    events |= key.events & selectors.EVENT_WRITE
                if events:
                    ready.append((key, events))
            left = None if ends is None else ends - world.now
            if ready or (left is not None and left <= 0):
                return ready
            assert world.task is not None
            for key in self.get_map().values():
                if key.events & selectors.EVENT_READ:
                    Socket.open_ones[key.fd]._waiting.append(world.task)
            world.park(left)


class Poll:
    """As `select.poll`."""

    def __init__(self) -> None:
        self._selector = Selector()

    def register(self, file: Any, _events: int = 0) -> None:
        self._selector.register(file, selectors.EVENT_READ)

    def poll(self, milliseconds: float | None = None) -> list[tuple[int, int]]:
        ready = self._selector.select(None if milliseconds is None or milliseconds < 0 else milliseconds / 1000)
        return [(key.fd, select.POLLIN) for key, _ in ready]


# --- chance ---


def urandom(size: int) -> bytes:
    return _chance().randbytes(size)


def _chance() -> random.Random:
    return current().chance if has_world() else _spare


_spare = random.Random(0)


def getpid() -> int:
    process = current().process if has_world() else None
    return 1 if process is None else process.pid


def current_frames() -> dict[int, Any]:
    found = {}
    for task in current()._kept:
        if not task.is_done:
            found[task.ident] = task.greenlet.gr_frame or sys._getframe(1)
    return found


def install() -> None:
    """Replaces parts of the standard library, for good."""
    replaced = {
        time: {
            "time": wall, "monotonic": monotonic, "perf_counter": monotonic, "sleep": sleep,
            "time_ns": lambda: int(wall() * 1e9), "monotonic_ns": lambda: int(monotonic() * 1e9),
            "perf_counter_ns": lambda: int(monotonic() * 1e9), "clock_gettime": lambda _clock: monotonic(),
        },
        threading: {
            "Lock": Lock, "_allocate_lock": Lock, "RLock": threading._PyRLock, "_CRLock": None, "Thread": Thread,  # type: ignore[attr-defined]
            "get_ident": get_ident, "get_native_id": get_ident, "current_thread": current_thread,
            "main_thread": lambda: _main, "_MainThread": lambda: _main, "enumerate": enumerate_threads,
            "_time": monotonic,
        },
        _thread: {
            "start_new_thread": start_new_thread, "allocate_lock": Lock, "get_ident": get_ident, "RLock": None,
        },
        queue: {"SimpleQueue": queue._PySimpleQueue, "time": monotonic},  # type: ignore[attr-defined]
        socket: {"socket": Socket, "socketpair": socketpair, "getaddrinfo": getaddrinfo, "gethostname": lambda: "sim"},
        selectors: {"DefaultSelector": Selector, "PollSelector": Selector, "EpollSelector": Selector},
        select: {"poll": Poll},
        os: {"urandom": urandom, "getpid": getpid, "register_at_fork": lambda **_: None},
        random: {"_urandom": urandom},
        sys: {"_current_frames": current_frames},
        signal: {"signal": lambda *_: signal.SIG_DFL, "set_wakeup_fd": lambda *_, **__: -1},
    }  # fmt: skip
    for module, names in replaced.items():
        for name, value in names.items():
            setattr(module, name, value)
    sys.modules["uvloop"] = None  # type: ignore[assignment]  # it asks the system itself
