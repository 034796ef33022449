"""A TCP proxy between a process and Redis that gets worse on command.

    with Proxy(server.port) as proxy:
        client = redis.Redis(port=proxy.port)
        proxy.lose_replies(1)       # the next command is executed, and its connection breaks before the answer

It runs in a thread of its own; its methods may be called from any thread and have taken effect when they return.
"""

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Literal, Self

from tests.waiting import PATIENCE

Direction = Literal["request", "reply"]


class Proxy:
    """Forwards 127.0.0.1:`port` to 127.0.0.1:`target`."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.port = 0
        #: Replies that were thrown away.
        self.lost = 0
        #: How often something was asked after all that was asked before had been answered.
        self.round_trips = 0
        self._delay = 0.0
        self._swallows: set[Direction] = set()
        self._to_lose = 0
        self._to_hold_back = 0
        #: The next reply with this in it is held.
        self._awaited = b""
        #: Whether such a reply is there.
        self.is_holding = False
        self._released = asyncio.Event()
        #: Scripts that were held back, as they were sent.
        self._held_back: list[bytes] = []
        self._refuses = False
        self._links: set[_Link] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._flows = asyncio.Event()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def __enter__(self) -> Self:
        self._thread.start()
        self.port = self._do(self._listen())
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._thread.is_alive():
            self._do(self._end())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(PATIENCE)
            self._loop.close()

    # --- harm ---

    def delay(self, seconds: float) -> None:
        """Everything takes so much longer, in each direction."""
        self._call(lambda: setattr(self, "_delay", seconds))

    def cut(self, *, refuse: bool = False) -> None:
        """Resets all connections. With ``refuse`` there are no new ones either, until `heal`."""

        def harm() -> None:
            self._refuses = refuse
            for link in list(self._links):
                link.reset()

        self._call(harm)

    def hold(self) -> None:
        """Nothing gets through, in both directions, and no connection breaks; what was held arrives after `heal`."""
        self._call(self._flows.clear)

    def half_open(self, direction: Direction = "reply") -> None:
        """What goes in one direction disappears: replies of commands that were executed, or requests. Connections stay
        open, and are reset by `heal`, since their streams have holes.
        """
        self._call(lambda: self._swallows.add(direction))

    def lose_replies(self, count: int) -> None:
        """The next so many replies are thrown away after their commands were executed, and their connections reset.
        Every other time the first half of the reply still gets through.
        """
        self._call(lambda: setattr(self, "_to_lose", self._to_lose + count))

    def hold_reply(self, word: bytes) -> None:
        """The next reply with this word in it is held until `heal`. When it is, `is_holding` is true."""

        def harm() -> None:
            self._awaited = word
            self._released.clear()

        self._call(harm)

    def hold_back(self, count: int) -> None:
        """The next so many runs of a script are held back, and their connections reset: so it looks to a client whose
        bytes are on their way still when it gives the connection up.
        """
        self._call(lambda: setattr(self, "_to_hold_back", self._to_hold_back + count))

    def deliver(self) -> int:
        """What was held back arrives. Returns how many calls that were, once Redis has executed them."""
        return int(self._do(self._deliver()))

    def heal(self) -> None:
        """From now on everything gets through."""

        def repair() -> None:
            if self._swallows:
                for link in list(self._links):
                    link.reset()
            self._delay, self._to_lose, self._refuses = 0.0, 0, False
            self._swallows.clear()
            self._flows.set()
            self._awaited, self.is_holding = b"", False
            self._released.set()

        self._call(repair)

    # --- inside of the thread ---

    def _do(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(PATIENCE)

    def _call(self, function: Callable[[], object]) -> None:
        async def run() -> None:
            function()

        self._do(run())

    async def _listen(self) -> int:
        self._flows.set()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def _deliver(self) -> int:
        held_back, self._held_back = self._held_back, []
        for data in held_back:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.target)
            writer.write(data)
            await reader.read(2**16)
            writer.close()
        return len(held_back)

    async def _end(self) -> None:
        self._server.close()
        for link in list(self._links):
            link.reset()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refuses:
            writer.transport.abort()
            return
        try:
            to_redis = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:  # Redis is down: so it looks to the client
            writer.transport.abort()
            return
        link = _Link(writer, to_redis[1])
        self._links.add(link)
        try:
            pumps = [self._pump(link, reader, to_redis[1], "request"), self._pump(link, to_redis[0], writer, "reply")]
            for pump in asyncio.as_completed([asyncio.ensure_future(one) for one in pumps]):
                with contextlib.suppress(OSError):
                    await pump
                link.close()
        except asyncio.CancelledError:
            pass  # the proxy ends
        finally:
            link.close()
            self._links.discard(link)

    async def _pump(
        self, link: "_Link", reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: Direction
    ) -> None:
        while data := await reader.read(2**16):
            await self._flows.wait()
            if direction in self._swallows:
                self.lost += direction == "reply"
                continue
            if self._delay:
                await asyncio.sleep(self._delay)
            if direction == "reply" and self._to_lose and link.is_asked:
                self._to_lose -= 1
                self.lost += 1
                if self._to_lose % 2:
                    writer.write(data[: len(data) // 2])
                    await writer.drain()
                link.reset()
                return
            if direction == "reply" and self._awaited and self._awaited in data:
                self._awaited, self.is_holding = b"", True
                await self._released.wait()
            if direction == "request" and self._to_hold_back and b"EVALSHA" in data:
                self._to_hold_back -= 1
                self._held_back.append(data)
                link.reset()
                return
            if direction == "request":
                link.is_asked = link.is_asked or b"EVALSHA" in data
                self.round_trips += link.is_answered
            link.is_answered = direction == "reply"
            writer.write(data)
            await writer.drain()


class _Link:
    """A connection of a client, and the one that it is forwarded to."""

    def __init__(self, *writers: asyncio.StreamWriter) -> None:
        self._writers = writers
        #: Whether a script has ever been run on it: what precedes, such as HELLO, is not worth losing.
        self.is_asked = False
        self.is_answered = True

    def close(self) -> None:
        for writer in self._writers:
            writer.close()

    def reset(self) -> None:
        """Ends both with a RST, as a machine does that knows nothing of the connection."""
        for writer in self._writers:
            end: socket.socket = writer.get_extra_info("socket")
            with contextlib.suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
