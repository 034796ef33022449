"""Timeouts of sockets, and those that are left to the kernel.

Python keeps a socket's timeout by asking the kernel twice, with `poll` and then to read or write, and gives up the GIL
each time. With many threads in a process that is a queue each time, and for a node that was asleep it is code that is
in no cache. The kernel does it alone when it is told how long a read or write may take.

But a signal that a handler of Python's takes starts that time anew. Where signals keep coming, as those of a sampling
profiler do, it would never end. So only the threads of a node leave it to the kernel: a signal to the process is the
main thread's, which waits for nothing but signals there. Producers may be in any thread, and Python counts for them.
"""

import os
import socket
import struct
from typing import Any


def keeps_timeout(connection: Any, seconds: float | None) -> bool:
    """Leaves the timeout of a connected connection to the kernel, if it can: it can't for TLS, which reads on its own,
    and there is no socket in the embedded store.
    """
    plain = getattr(connection, "_sock", None)  # redis-py has no public way to it
    # gevent and its like put a socket of their own, which never blocks, into the place of Python's.
    if (
        os.name != "posix"
        or seconds is None
        or type(plain) is not socket.socket
        or socket.socket.__module__ != "socket"
    ):
        return False
    whole = int(seconds)
    limit = struct.pack("@ll", whole, max(int((seconds - whole) * 1e6), 0 if whole else 1))
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    plain.settimeout(None)
    return True


def set_timeout(connection: Any, seconds: float | None) -> None:
    """How long a read or a write of a connected connection may take, to a hundredth; Python keeps it."""
    plain = getattr(connection, "_sock", None)
    if isinstance(plain, socket.socket):
        present = plain.gettimeout()
        # Each setting asks the kernel. Mostly it is what it was, but for some microseconds.
        if present is None or seconds is None or abs(present - seconds) > seconds / 100:
            plain.settimeout(seconds)


def is_connected(connection: Any) -> bool:
    """Whether it was connected and not disconnected since. redis-py says so from 8.0 on."""
    said: bool | None = getattr(connection, "is_connected", None)
    return getattr(connection, "_sock", None) is not None if said is None else said


def timed_out(error: BaseException) -> bool:
    """Whether redis-py's error is that of a timeout which the kernel has kept."""
    return isinstance(error.__context__, BlockingIOError)
