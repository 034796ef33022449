"""What Redis's clock says, as far as a process has heard: for durations that begin with a time in Redis."""

#: Seconds by which two clocks may drift apart in a second.
_DRIFT = 0.0002


class ServerClock:
    """How far Redis's clock is ahead of this process's own. Written by the maintenance loop; others read `offset`.

    Each heartbeat's reply says what time it was in Redis, at some moment between sending and receiving. So each narrows
    down how far apart the clocks are, until the server's clock is set: then what was known before doesn't fit any more.
    """

    __slots__ = ("_bounds", "_noted_at", "offset")

    def __init__(self) -> None:
        #: Seconds to be added to `lowq.clock` for the Unix time by Redis's clock; None: it is not known yet.
        self.offset: float | None = None
        self._bounds = (-float("inf"), float("inf"))
        self._noted_at = 0.0

    def note(self, server_time: float, sent: float, received: float) -> None:
        """A call was sent and its reply received at these times of `lowq.clock`; in between it was ``server_time``."""
        low, high = server_time - received, server_time - sent
        slack = _DRIFT * (received - self._noted_at)
        narrowed = max(low, self._bounds[0] - slack), min(high, self._bounds[1] + slack)
        if narrowed[0] <= narrowed[1]:
            low, high = narrowed
        self._bounds, self._noted_at = (low, high), received
        self.offset = (low + high) / 2
