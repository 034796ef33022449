"""Slows down and logs guesses of passwords.

A login that fails makes the next one of that user from that address wait: a quarter of a second, then twice as long
with each failure, 10 seconds at most. An earlier attempt is refused, right or wrong: otherwise a guess would cost
nothing. So from an address a user's password is guessed some 8,600 times a day, not 1,000 times a second. Processes of
the dashboard count together, in Redis; while that is away, each for itself.

Somebody who shares the address with a guesser, behind a proxy, is not shut out: other users are not affected, nor is a
browser that has logged in as this user before, which its cookie shows. Everybody else with that user name can log in
once the guessing has stopped for the length of the pause.
"""

import contextlib
import ipaddress
import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lowq
from lowq.operate.logins import find_failures, record_failure

log = logging.getLogger(__name__)

#: Seconds after the first failure, and at most.
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 10.0
#: Seconds after which a failure is forgotten.
FORGOTTEN = 900.0
#: Remembered pairs of address and user, and remembered browsers that have logged in; older ones are dropped.
REMEMBERED = 10_000

#: Characters of a user name that are compared here.
_LONGEST = 100


@dataclass(slots=True)
class _Failures:
    count: int = 0
    #: Monotonic time.
    last: float = -math.inf


class Logins:
    """Safe for threads. ``token``: of the cookie that a browser brought; empty for none. ``app``: whose Redis has the
    failures of all processes; None: this one counts alone.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, app: lowq.Lowq | None = None) -> None:
        self._clock = clock
        self._app = app
        self._lock = threading.Lock()
        self._failures: OrderedDict[tuple[str, str], _Failures] = OrderedDict()
        self._known: OrderedDict[tuple[str, str], None] = OrderedDict()

    def pause(self, address: str, user: str, token: str) -> float:
        """Seconds until the next attempt is allowed; 0: now."""
        user = user[:_LONGEST]
        with self._lock:
            if (token, user) in self._known:
                return 0.0
            failures = self._failures.get((address, user))
            if failures is None:
                return 0.0
            doubled: int = 2 ** min(failures.count - 1, 20)
            return max(failures.last + min(FIRST_PAUSE * doubled, LONGEST_PAUSE) - self._clock(), 0.0)

    def knows(self, user: str, token: str) -> bool:
        """Whether this browser has logged in as this user before."""
        with self._lock:
            return (token, user[:_LONGEST]) in self._known

    def learn(self, address: str, user: str) -> None:
        """Reads what other processes have counted. Redis may keep it waiting."""
        user = user[:_LONGEST]
        found = None
        if self._app is not None:
            with contextlib.suppress(lowq.LowqError):
                found = find_failures(self._app, address, user)
        if found is None:
            return
        with self._lock:
            now = self._clock()
            failures = self._failures.get((address, user))
            if failures is None or now - failures.last >= FORGOTTEN or found.count > failures.count:
                _remember(self._failures, (address, user), _Failures(found.count, now - found.ago))

    def failed(self, address: str, user: str, token: str) -> None:
        """A login failed."""
        user = user[:_LONGEST]
        count = 0
        if self._app is not None:
            with contextlib.suppress(lowq.LowqError):
                count = record_failure(self._app, address, user, FORGOTTEN)
        with self._lock:
            now = self._clock()
            # This browser has no right password any more: it was changed, or somebody else uses the browser.
            self._known.pop((token, user), None)
            failures = self._failures.pop((address, user), None)
            if failures is None or now - failures.last >= FORGOTTEN:
                failures = _Failures()
            failures.count = max(failures.count + 1, count)
            failures.last = now
            _remember(self._failures, (address, user), failures)
        log.warning(
            "a login as %r from %s failed, %d in a row", user, address, failures.count,
            extra={"event": "login_failed", "user": user, "address": address, "failures": failures.count},
        )  # fmt: skip

    def succeeded(self, user: str, token: str) -> None:
        """A login succeeded. Failures before it are not forgotten: they may have been somebody else's."""
        if token:
            with self._lock:
                _remember(self._known, (token, user[:_LONGEST]), None)


def _remember(known: OrderedDict[tuple[str, str], Any], key: tuple[str, str], value: Any) -> None:
    known[key] = value
    known.move_to_end(key)
    if len(known) > REMEMBERED:
        known.popitem(last=False)


def network_of(address: str) -> str:
    """The address, or for IPv6 its /64 network: one client has that many addresses."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped is None:
        return str(ipaddress.ip_network((parsed, 64), strict=False))
    return address
