"""Redis away: what a node says of it."""

import threading
import time

from lowq.logs import get_log

log = get_log("lowq.broker")


class Outage:
    """Redis away: logged once when it begins and once when it is over, whoever notices."""

    def __init__(self) -> None:
        #: How many began so far. Read it before a call is sent: its reply ends what had begun by then, and nothing that
        #: began since, as it may have been under way already when Redis went away.
        self.begun = 0
        self._lock = threading.Lock()
        self._since: float | None = None

    @property
    def seconds(self) -> float:
        """For how long Redis has been away; 0.0: it is not."""
        since = self._since
        return 0.0 if since is None else time.monotonic() - since

    def begin(self, error: Exception) -> None:
        with self._lock:
            if self._since is not None:
                return
            self.begun += 1
            self._since = time.monotonic()
        # Without the lock: a log that is slow must not keep the other threads.
        log.error("%s; trying until it is back", error, extra={"event": "outage"})

    def end(self, begun: int) -> None:
        """Redis has answered a call before which so many had begun."""
        if self._since is not None:
            with self._lock:
                if begun != self.begun or self._since is None:  # another thread was quicker
                    return
                away = time.monotonic() - self._since
                self._since = None
            log.warning("Redis is back after %.1f s", away, extra={"event": "recovery", "seconds": away})
