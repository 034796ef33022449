"""A connection that an event loop writes and reads itself, without a thread in between."""

import asyncio
import socket
import weakref
from collections.abc import Callable
from contextvars import Context
from typing import Any

from redis import exceptions

from lowq.store.connection import as_resp2, speaks_resp3

try:
    import hiredis
except ImportError:  # then a loop's calls are sent by a thread, as with TLS
    hiredis = None  # type: ignore[assignment]
HAS_HIREDIS = hiredis is not None

#: Bytes that are read at once.
READ_SIZE = 2**16

#: Gets the replies that came, and why there are no more of them; None: there are all.
Done = Callable[[list[Any], Exception | None], object]


def fits_loop(connection: Any) -> bool:
    """Whether a loop can have this connection: a plain socket, and hiredis to parse what comes in pieces. TLS may have
    to read in order to write, and the embedded store has no socket.
    """
    return HAS_HIREDIS and type(getattr(connection, "_sock", None)) is socket.socket  # no public way


class LoopConnection:
    """One round trip at a time. Belongs to the event loop that uses it first, and to its thread.

    It holds no reference to the loop: who keeps it beside its loop must not keep the loop alive by that. It is closed
    with its loop, at the latest when nobody refers to that any more.
    """

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._socket: socket.socket = connection._sock  # redis-py has no public way to it
        self._socket.settimeout(0)
        self._fd = self._socket.fileno()
        # Private, too: error replies are to become the same exceptions as on connections that redis-py reads itself.
        parse_error = connection._parser.parse_error
        self._reader = hiredis.Reader(replyError=parse_error)  # type: ignore[arg-type, unused-ignore]  # its stub is narrower
        self._translate = as_resp2 if speaks_resp3(connection) else None
        self._registered = False
        self._end_of_loop: weakref.finalize[..., asyncio.AbstractEventLoop] | None = None
        self._unsent: memoryview | None = None
        self._missing = 0
        self._replies: list[Any] = []
        self._done: Done | None = None
        self.is_open = True

    def send(self, packed: bytes, count: int, done: Done) -> None:
        """Writes calls. ``done`` is called once: with their replies, error replies as redis-py's exceptions; or with
        those before the connection broke. Not before this returns, unless it raises.
        """
        loop = asyncio.get_running_loop()
        self._missing, self._replies, self._done = count, [], done
        try:
            if not self._registered:
                self._registered = True  # first: what was not added can be removed as well
                # Garbage together with the loop, a socket may come before the connection that would close it.
                self._end_of_loop = weakref.finalize(loop, self._connection.disconnect)
                self._end_of_loop.atexit = False
                # In an empty context: the reader stays, and would keep what the context of one caller refers to.
                Context().run(loop.add_reader, self._fd, self._read)
            try:
                sent = self._socket.send(packed)
            except BlockingIOError:
                sent = 0
            if sent < len(packed):
                self._unsent = memoryview(packed)[sent:]
                Context().run(loop.add_writer, self._fd, self._write)
        except OSError as error:
            broken = exceptions.ConnectionError(f"Error while writing to socket: {error}")
            loop.call_soon(self.fail, broken, context=Context())
        except BaseException:
            # A signal handler raised. Replies may come all the same, and the next round trip would take them for its
            # own.
            self.close()
            raise

    def fail(self, error: Exception) -> None:
        """Ends the round trip that is under way, if there is one, and closes the connection."""
        done, self._done = self._done, None
        self.close()
        if done is not None:
            done(self._replies, error)

    def time_out(self) -> None:
        """The replies are no longer waited for."""
        self.fail(exceptions.TimeoutError("Timeout reading from socket"))

    def close(self) -> None:
        """Closes it for good. In the loop's thread, unless the loop is closed."""
        if not self.is_open:
            return
        self.is_open = False
        if self._end_of_loop is not None:
            self._end_of_loop.detach()
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            pass  # it was closed, and has forgotten all sockets
        else:
            # Before it is closed: then its file descriptor may become that of another socket.
            if self._registered:
                loop.remove_reader(self._fd)
            if self._unsent is not None:
                loop.remove_writer(self._fd)
        self._connection.disconnect()

    def _write(self) -> None:
        assert self._unsent is not None
        try:
            self._unsent = self._unsent[self._socket.send(self._unsent) :]
        except BlockingIOError:
            return
        except OSError as error:
            self.fail(exceptions.ConnectionError(f"Error while writing to socket: {error}"))
            return
        if not self._unsent:
            asyncio.get_running_loop().remove_writer(self._fd)
            self._unsent = None

    def _read(self) -> None:
        try:
            self._take_replies()
        except BlockingIOError:
            pass
        except OSError as error:
            self.fail(exceptions.ConnectionError(f"Error while reading from socket: {error}"))
        except hiredis.ProtocolError as error:
            self.fail(exceptions.InvalidResponse(str(error)))
        except BaseException:
            # A signal handler raised, perhaps between two steps: what was read may be lost. The loop logs it, or ends.
            self.fail(exceptions.ConnectionError("interrupted while reading"))
            raise

    def _take_replies(self) -> None:
        data = self._socket.recv(READ_SIZE)
        if not data:
            self.fail(exceptions.ConnectionError("Connection closed by server."))
            return
        self._reader.feed(data)
        replies = self._replies
        while self._missing:
            reply = self._reader.gets()
            if reply is False:  # no reply of RESP2 is that, nor of a script: there is none yet
                return
            replies.append(reply if self._translate is None else self._translate(reply))
            self._missing -= 1
        done, self._done = self._done, None
        if done is None:
            self.fail(exceptions.ConnectionError("the server said something that nobody asked for"))
        elif any(isinstance(reply, exceptions.ReadOnlyError) for reply in replies):
            # The primary became a replica. A fresh connection may find the new one behind the same name.
            self.close()
            done(replies, None)
        else:
            done(replies, None)
