"""Guesses of passwords: each costs time, and leaves a line in the log.

A login that fails makes the next one of that user from that address wait: a quarter of a second, then twice as long
with each failure, 10 seconds at most. What comes earlier is refused, right or wrong: otherwise a guess would cost
nothing. So from an address a user's password is guessed some 8,600 times a day, not 1,000 times a second.

That is not to shut out who shares the address, behind a proxy, with somebody who guesses: other users are not touched,
and nor is a browser that has logged in as this user before, which it shows by our cookie. Anybody else of that name
gets in when the guessing has ended for as long as the pause is.
"""

import ipaddress
import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

log = logging.getLogger(__name__)

#: Seconds after the first failure, and at most.
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 10.0
#: Seconds after which a failure is forgotten.
FORGOTTEN = 900.0
#: Pairs of address and user, and browsers that have logged in, that are remembered: the latest ones.
REMEMBERED = 10_000

#: Characters by which users are told apart here.
_LONGEST = 100


@dataclass(slots=True)
class _Failures:
    count: int = 0
    #: Monotonic time.
    last: float = -math.inf


class Logins:
    """Safe for threads. ``token``: of the cookie that a browser brought; empty for none."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._failures: OrderedDict[tuple[str, str], _Failures] = OrderedDict()
        self._known: OrderedDict[tuple[str, str], None] = OrderedDict()

    def pause(self, address: str, user: str, token: str) -> float:
        """Seconds until this may be tried; 0: now."""
        user = user[:_LONGEST]
        with self._lock:
            if (token, user) in self._known:
                return 0.0
            failures = self._failures.get((address, user))
            if failures is None:
                return 0.0
            doubled: int = 2 ** min(failures.count - 1, 20)
            return max(failures.last + min(FIRST_PAUSE * doubled, LONGEST_PAUSE) - self._clock(), 0.0)

    def failed(self, address: str, user: str, token: str) -> None:
        """It was tried, and is wrong."""
        user = user[:_LONGEST]
        with self._lock:
            now = self._clock()
            # What it knew is wrong now: the password was changed, or it is somebody else's turn.
            self._known.pop((token, user), None)
            failures = self._failures.pop((address, user), None)
            if failures is None or now - failures.last >= FORGOTTEN:
                failures = _Failures()
            failures.count += 1
            failures.last = now
            _remember(self._failures, (address, user), failures)
        log.warning(
            "a login as %r from %s failed, %d in a row", user, address, failures.count,
            extra={"event": "login_failed", "user": user, "address": address, "failures": failures.count},
        )  # fmt: skip

    def succeeded(self, user: str, token: str) -> None:
        """It was tried, and is right. What failed before is not forgotten: that may have been somebody else."""
        if token:
            with self._lock:
                _remember(self._known, (token, user[:_LONGEST]), None)


def _remember(known: OrderedDict[tuple[str, str], Any], key: tuple[str, str], value: Any) -> None:
    known[key] = value
    known.move_to_end(key)
    if len(known) > REMEMBERED:
        known.popitem(last=False)


def network_of(address: str) -> str:
    """Whom an address stands for: of IPv6 everybody has a network of them."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped is None:
        return str(ipaddress.ip_network((parsed, 64), strict=False))
    return address
