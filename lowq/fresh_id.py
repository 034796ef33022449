"""Ids for payloads that belong to no entity."""

import os
import secrets
import threading
import time
from uuid import UUID


class _FreshIds:
    """UUIDv7 (RFC 9562), each later than all that this process made before: 48 bits of milliseconds of Unix time, 12 of
    the fraction of the millisecond (or one more than the last one had), and 62 random ones. Safe for threads.
    """

    def __init__(self) -> None:
        self.reset()
        self._last = 0

    def reset(self) -> None:
        """A lock that nobody has: in a forked child, where whoever had it is not there."""
        self._lock = threading.RLock()  # reentrant: a signal handler may put

    def __call__(self) -> UUID:
        milliseconds, nanoseconds = divmod(time.time_ns(), 1_000_000)
        moment = milliseconds << 12 | nanoseconds * 4096 // 1_000_000
        with self._lock:
            moment = self._last = max(moment, self._last + 1)
        high = (moment >> 12) << 16 | 7 << 12 | moment & 0xFFF
        return UUID(int=high << 64 | 2 << 62 | secrets.randbits(62))


#: A fresh id.
fresh_id = _FreshIds()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=fresh_id.reset)
