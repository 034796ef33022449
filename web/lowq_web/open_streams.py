"""The streams that are open, and what wakes them: a new snapshot, or the end of the server."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator


class OpenStreams:
    """Safe for threads. Streams of several event loops may be open at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: dict[asyncio.Event, asyncio.AbstractEventLoop] = {}
        self._closing = False

    def are_closing(self) -> bool:
        """Whether the server is closing: streams must end."""
        return self._closing

    @contextlib.contextmanager
    def enter(self) -> Iterator[asyncio.Event]:
        """For one stream, on its event loop: the event that wakes it, for the length of the block."""
        event = asyncio.Event()
        with self._lock:
            self._events[event] = asyncio.get_running_loop()
        try:
            yield event
        finally:
            with self._lock:
                del self._events[event]

    def wake(self) -> None:
        """Wakes all of them."""
        with self._lock:
            for event, loop in self._events.items():
                with contextlib.suppress(RuntimeError):  # the loop has been closed, and its stream with it
                    loop.call_soon_threadsafe(event.set)

    def close(self) -> None:
        """Ends all of them, for good. The server is closing, and waits for them."""
        self._closing = True
        self.wake()
