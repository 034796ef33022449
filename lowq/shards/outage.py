"""Outages: Redis is away, or not ready."""

import time
from collections.abc import Callable
from typing import TypeVar

from lowq.clock import Lock
from lowq.errors import RedisNotReady, RedisUnavailable
from lowq.logs import get_log

log = get_log("lowq.shards")

#: Seconds between two attempts to start while Redis can't serve.
START_RETRY = 0.2
T = TypeVar("T")


class Outage:
    """Redis is away, or answers and is not ready (`RedisNotReady`). The begin and the end are logged once each."""

    def __init__(self, is_partial: Callable[[], bool] = lambda: False) -> None:
        """``is_partial``: whether a part of Redis is known to be away. Then replies of other parts end nothing."""
        self._is_partial = is_partial
        #: Number of outages that have begun. Read it before a call is sent: the reply ends an outage that had begun by
        #: then, and none that began later, as the call may have been under way already when Redis went away.
        self.begun = 0
        #: Whether one lasts: then `end` has something to end.
        self.is_on = False
        self._lock = Lock()
        self._since: float | None = None
        self._error: Exception | None = None
        #: The events that were logged of it.
        self._logged: set[str] = set()

    @property
    def seconds(self) -> float:
        """Seconds for which Redis has been away, or not ready; 0.0: it is neither."""
        since = self._since
        return 0.0 if since is None else time.monotonic() - since

    @property
    def trouble(self) -> str | None:
        """A sentence for people, without the address of Redis. None: there is no outage."""
        since, error = self._since, self._error
        if since is None:
            return None
        seconds = time.monotonic() - since
        if isinstance(error, RedisNotReady):
            return f"waiting for {seconds:.1f} s: Redis {error.state}"
        return f"Redis has not answered for {seconds:.1f} s"

    def begin(self, error: Exception) -> None:
        """Notes that a call has ended with this error."""
        waits = isinstance(error, RedisNotReady)
        event = "waiting" if waits else "outage"
        with self._lock:
            if self._since is None:
                self.begun += 1
                self._since = time.monotonic()
                self.is_on = True
                self._logged.clear()
            self._error = error
            if event in self._logged:
                return
            self._logged.add(event)
        # Without the lock: a log that is slow must not keep the other threads.
        log.error(
            "%s; %s", error, "waiting until it can" if waits else "trying until it is back", extra={"event": event}
        )

    def start(self, do: Callable[[], T], wait: Callable[[float], object], *, has_answered: Callable[[], bool]) -> T:
        """Calls ``do`` as soon as Redis can serve. ``wait``: waits so many seconds, and returns whether the start is
        called off. ``has_answered``: whether the address is known to be right, as when a node of the cluster has
        answered and a primary is being replaced: then a Redis that does not answer is waited for, too.

        Raises:
            RedisUnavailable: there is no Redis, or the start is called off. What else ``do`` raises.
        """
        while True:
            begun = self.begun
            try:
                result = do()
            except RedisUnavailable as error:
                if not isinstance(error, RedisNotReady) and not (has_answered() or self.seconds):
                    raise  # it may be the wrong address
                self.begin(error)
                if wait(START_RETRY):
                    raise
            else:
                self.end(begun)
                return result

    def end(self, begun: int) -> None:
        """Notes that Redis has answered a call before which so many outages had begun."""
        if self._since is not None and not self._is_partial():
            with self._lock:
                if begun != self.begun or self._since is None:  # another thread was quicker
                    return
                away = time.monotonic() - self._since
                self._since = self._error = None
                self.is_on = False
            log.warning("Redis is back after %.1f s", away, extra={"event": "recovery", "seconds": away})
