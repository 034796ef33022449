"""Pauses of the kind that a busy machine makes, in every Python process that has this folder in PYTHONPATH, as
`make test-adverse` has: threads begin late, and so does whoever has started one; event loops stall, sleeps are longer,
sockets slow, signals take effect late, and threads take turns much more often. A test must pass all the same.

ADVERSE_SEED, an integer, chooses the pauses.
"""

import _socket
import _thread
import asyncio
import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

#: Of so many moments one has a pause, and how long these are at most, seconds; one in fifty of them is much longer.
SELDOM = 20
SHORT, LONG = 0.02, 0.4

_sleep = time.sleep
_chance = random.Random(f"{os.environ.get('ADVERSE_SEED', '1')}/{os.getpid()}")


def pause() -> None:
    """Now and then, for a moment."""
    if _chance.random() * SELDOM < 1:
        _sleep(_chance.random() * (LONG if _chance.random() < 0.02 else SHORT))


def _late(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        pause()
        return function(*args, **kwargs)

    return call


def _starting(start: Callable[..., Any]) -> Callable[..., Any]:
    def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        started = start(_late(function), *args, **kwargs)
        pause()
        return started

    return call


class _Handlers:
    """Signal handlers that begin late. Who asks for one gets what was set."""

    def __init__(self) -> None:
        self._set: dict[int, tuple[Any, Any]] = {}
        self._signal, self._getsignal = signal.signal, signal.getsignal

    def signal(self, number: int, handler: Any) -> Any:
        before = self.getsignal(number)
        late = _late(handler) if callable(handler) and handler is not signal.default_int_handler else handler
        self._signal(number, late)
        self._set[int(number)] = late, handler
        return before

    def getsignal(self, number: int) -> Any:
        present = self._getsignal(number)
        late, handler = self._set.get(int(number), (None, None))
        return handler if present is late and late is not None else present


def install() -> None:
    """From now on there are pauses in this process."""
    for name in ("_start_new_thread", "_start_joinable_thread"):
        if hasattr(threading, name):
            setattr(threading, name, _starting(getattr(threading, name)))
    _thread.start_new_thread = _starting(_thread.start_new_thread)
    for name in ("recv", "recv_into", "send", "sendall"):
        setattr(socket.socket, name, _late(getattr(_socket.socket, name)))
    setattr(asyncio.BaseEventLoop, "_run_once", _late(asyncio.BaseEventLoop._run_once))  # type: ignore[attr-defined]  # noqa: B010
    time.sleep = lambda seconds: _sleep(float(seconds) * (1 + _chance.random()))
    handlers = _Handlers()
    signal.signal, signal.getsignal = handlers.signal, handlers.getsignal  # type: ignore[assignment]
    sys.setswitchinterval(1e-5)


install()
