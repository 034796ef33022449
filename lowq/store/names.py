"""Connections by TCP, and the host names that they go to. Names are looked up in threads of their own: the system gives
a name server many seconds to answer, and nobody may have to wait for that who only wants to connect anew.
"""

import os
import socket
import threading
import time
from collections import deque
from queue import Empty, SimpleQueue
from typing import Any

import redis

#: Seconds that the addresses of a name are waited for that are known from the last time.
PATIENCE = 0.25

#: As `socket.getaddrinfo` has them.
Addresses = list[tuple[Any, ...]]
_Name = tuple[str, int, int]


class _LookUp:
    """One that is under way."""

    def __init__(self, name: _Name) -> None:
        self._name = name
        # No lock of Python's own, see `lowq.store.pool`: each who waits has a queue.
        self._waiting: deque[SimpleQueue[None]] = deque()
        self._result: Addresses | OSError | None = None

    def run(self) -> None:
        host, port, family = self._name
        try:
            self._result = _known[self._name] = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)
        except OSError as error:
            self._result = error
        except UnicodeError:
            self._result = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        _under_way.pop(self._name, None)
        while self._waiting:
            self._waiting.popleft().put(None)

    def wait(self, seconds: float | None) -> Addresses | OSError | None:
        """None: it has not ended in time."""
        ended: SimpleQueue[None] = SimpleQueue()
        self._waiting.append(ended)
        if self._result is None:  # otherwise it may have woken all before this one came
            try:
                ended.get(timeout=seconds)
            except Empty:
                pass
        return self._result


#: What was found last.
_known: dict[_Name, Addresses] = {}
_under_way: dict[_Name, _LookUp] = {}


def find_addresses(host: str, port: int, family: int, seconds: float | None) -> Addresses:
    """The addresses of a name. When its name server does not answer, soon or at all, those that were found last.

    Raises:
        OSError: there is no such name, or nothing was found in so many seconds.
    """
    try:
        return socket.getaddrinfo(host, port, family, socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except (socket.gaierror, UnicodeError):
        pass  # it is a name
    name = host, port, family
    known = _known.get(name)
    look_up = _under_way.get(name) or _start(name)
    result = look_up.wait(seconds if known is None else min(PATIENCE, PATIENCE if seconds is None else seconds))
    if isinstance(result, list):
        return result
    is_unknown = isinstance(result, socket.gaierror) and result.errno == socket.EAI_NONAME
    if known is not None and not is_unknown:
        return known
    raise result or TimeoutError(f"the address of {host} was not found in time")


def _start(name: _Name) -> _LookUp:
    look_up = _under_way[name] = _LookUp(name)
    try:
        threading.Thread(target=look_up.run, name="lowq-name", daemon=True).start()
    except RuntimeError:  # the interpreter ends
        look_up.run()
    return look_up


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_under_way.clear)  # their threads are the parent's


class TcpConnection(redis.Connection):
    """Connected within ``socket_connect_timeout``: with the look-up of its name, and over all addresses of that."""

    def _connect(self) -> socket.socket:
        """As redis-py does it, which has no public way to it."""
        timeout = self.socket_connect_timeout
        ends = None if timeout is None else time.monotonic() + timeout
        failure: OSError | None = None
        for family, kind, protocol, _, address in find_addresses(self.host, self.port, self.socket_type, timeout):
            left = None if ends is None else max(ends - time.monotonic(), 0.001)
            plain = socket.socket(family, kind, protocol)
            try:
                plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if self.socket_keepalive:
                    plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                    for option, value in self.socket_keepalive_options.items():
                        plain.setsockopt(socket.IPPROTO_TCP, option, value)
                plain.settimeout(left)
                plain.connect(address)
                plain.settimeout(self.socket_timeout)
            except OSError as error:
                failure = error
                plain.close()
            except BaseException:
                plain.close()
                raise
            else:
                return plain
        raise failure or OSError(f"{self.host} has no address")


class TlsConnection(redis.SSLConnection, TcpConnection):
    """The same, with TLS on top."""
