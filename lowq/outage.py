"""Redis away: what a node says of it."""

import logging
import threading
import time

log = logging.getLogger(__name__)


class Outage:
    """Redis away: logged once when it begins and once when it is over, whoever notices."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._since: float | None = None

    def begin(self, error: Exception) -> None:
        with self._lock:
            if self._since is None:
                self._since = time.monotonic()
                log.error("%s; trying until it is back", error, extra={"event": "outage"})

    def end(self) -> None:
        if self._since is not None:
            with self._lock:
                if self._since is not None:
                    away = time.monotonic() - self._since
                    self._since = None
                    log.warning("Redis is back after %.1f s", away, extra={"event": "recovery", "seconds": away})
