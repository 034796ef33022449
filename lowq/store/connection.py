"""One connection: how it is made, written and read, by threads and by an event loop, without a thread in between.

Host names are looked up in threads of their own: the system gives a name server many seconds to answer, and a
connection that is only made anew must not wait for that.
"""

import asyncio
import os
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from contextvars import Context
from typing import Any

import redis
from redis import exceptions

from lowq.clock import Waker

hiredis: Any
try:
    import hiredis
except ImportError:  # where it can't be installed; then a loop's calls are sent by a thread, as with TLS
    hiredis = None

#: Seconds that the addresses of a name are waited for that are known from the last time.
PATIENCE = 0.25

# --- commands and replies ---


def pack_slowly(command: tuple[bytes, ...]) -> bytes:
    """As hiredis does it, where that can't be installed."""
    parts = [b"*%d\r\n" % len(command)]
    parts += [b"$%d\r\n%b\r\n" % (len(word), word) for word in command]
    return b"".join(parts)


#: A command and its arguments as Redis's protocol has them. Bytes only: of a number hiredis asks for the `repr`, in
#: which Python runs signal handlers, and does not check whether one of them has raised. That is a SIGSEGV.
pack: Callable[[tuple[bytes, ...]], bytes]
pack = pack_slowly if hiredis is None else hiredis.pack_command


def encode(arguments: Iterable[str | bytes | int | float]) -> list[bytes]:
    """Arguments of a command as Redis gets them."""
    return [
        item if type(item) is bytes else item.encode() if isinstance(item, str) else repr(item).encode()
        for item in arguments
    ]


class Packer:
    """Packs the commands that redis-py itself sends, when it connects."""

    @staticmethod
    def pack(*args: str | bytes | int | float) -> list[bytes]:
        name, *others = encode(args)
        return [pack((*name.split(), *others))]


def ask(connection: Any, *command: bytes) -> Any:
    """The reply to one command, as `read_reply` has it."""
    connection.send_packed_command([pack(command)], check_health=False)
    return read_reply(connection)


def read_reply(connection: Any) -> Any:
    """One reply, in the shapes of RESP2; an error reply is returned.

    Raises:
        redis-py's ConnectionError, TimeoutError: the connection broke, or the server said no to it.
    """
    try:
        reply = connection.read_response()
    except exceptions.ResponseError as error:
        if isinstance(error, exceptions.ReadOnlyError):
            # The primary became a replica. A fresh connection may find the new one behind the same name.
            connection.disconnect()
        return error
    return as_resp2(reply) if getattr(connection, "protocol", 2) == 3 else reply


def speaks_resp3(connection: Any) -> bool:
    """Whether it does; the embedded store's connections may not say, and speak RESP2."""
    return getattr(connection, "protocol", 2) == 3


def as_resp2(reply: Any) -> Any:
    """A reply of RESP3 as RESP2 has it. RESP3 answers plain commands with maps, sets, numbers and booleans. Scripts
    answer the same under both.
    """
    if isinstance(reply, bytes | None):
        return reply
    if isinstance(reply, list | set | frozenset):
        items = [as_resp2(item) for item in reply]
        # Members with scores: RESP3 has pairs, of which only those have a float.
        if reply and all(isinstance(item, list) and len(item) == 2 and isinstance(item[1], float) for item in reply):
            return [part for pair in items for part in pair]
        return items
    if isinstance(reply, dict):
        return [as_resp2(part) for pair in reply.items() for part in pair]
    if isinstance(reply, bool):
        return int(reply)
    if isinstance(reply, float):
        return f"{reply:.17g}".encode()
    return reply.encode() if isinstance(reply, str) else reply


#: Bytes that are read at once.
READ_SIZE = 2**16


def reader_of(connection: Any) -> Any:
    """A reader of replies for a connection. Error replies, and what is no reply at all, are redis-py's exceptions."""
    parse_error = connection._parser.parse_error  # private, too
    return hiredis.Reader(protocolError=exceptions.InvalidResponse, replyError=parse_error)


def parse_info(text: bytes) -> dict[str, str]:
    """The reply to INFO."""
    lines = (line.partition(":") for line in text.decode().splitlines() if ":" in line)
    return {name: value for name, _, value in lines}


def set_timeout(connection: Any, seconds: float | None) -> None:
    """Sets how long a read or a write may take."""
    plain = connection._sock  # redis-py has no public way to it, and the embedded store's is no socket
    if isinstance(plain, socket.socket):
        plain.settimeout(seconds)


# --- host names ---

#: As `socket.getaddrinfo` has them.
Addresses = list[tuple[Any, ...]]
_Name = tuple[str, int, int]


class _LookUp:
    """One that is under way."""

    def __init__(self, name: _Name) -> None:
        self._name = name
        # Nothing that a signal handler could find locked, see `lowq.store.pool`: each caller that waits has its own.
        self._waiting: deque[Waker] = deque()
        self._result: Addresses | OSError | None = None

    def run(self) -> None:
        host, port, family = self._name
        try:
            self._result = _known[self._name] = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)
        except OSError as error:
            self._result = error
        except UnicodeError:
            self._result = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        _under_way.pop(self._name, None)
        while self._waiting:
            self._waiting.popleft().set()

    def wait(self, seconds: float | None) -> Addresses | OSError | None:
        """None: it has not ended in time."""
        ended = Waker()
        self._waiting.append(ended)
        if self._result is None:  # otherwise it may have woken all before this one came
            ended.wait(seconds)
        return self._result


#: The addresses that were found last.
_known: dict[_Name, Addresses] = {}
_under_way: dict[_Name, _LookUp] = {}


def find_addresses(host: str, port: int, family: int, seconds: float | None) -> Addresses:
    """The addresses of a name. When its name server does not answer, soon or at all, those that were found last.

    Raises:
        OSError: there is no such name, or nothing was found in so many seconds.
    """
    try:
        return socket.getaddrinfo(host, port, family, socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except (socket.gaierror, UnicodeError):
        pass  # it is a name
    name = host, port, family
    known = _known.get(name)
    look_up = _under_way.get(name) or _start(name)
    result = look_up.wait(seconds if known is None else min(PATIENCE, PATIENCE if seconds is None else seconds))
    if isinstance(result, list):
        return result
    is_unknown = isinstance(result, socket.gaierror) and result.errno == socket.EAI_NONAME
    if known is not None and not is_unknown:
        return known
    raise result or TimeoutError(f"the address of {host} was not found in time")


def _start(name: _Name) -> _LookUp:
    look_up = _under_way[name] = _LookUp(name)
    if start_thread(look_up.run, "lowq-name") is None:
        look_up.run()
    return look_up


def start_thread(work: Callable[[], object], name: str) -> threading.Thread | None:
    """Starts a thread that keeps no process from ending. None: the interpreter ends, so none can be started."""
    thread = threading.Thread(target=work, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError:
        return None
    return thread


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_under_way.clear)  # their threads are the parent's


class TcpConnection(redis.Connection):
    """Connected within ``socket_connect_timeout``: with the look-up of its name, and over all addresses of that."""

    #: Reads replies of RESP2; None: redis-py's parser does.
    _reader: Any = None

    def read_response(self, *args: Any, **options: Any) -> Any:
        """As redis-py does it, in one call instead of five."""
        own: Any = self  # redis-py's types say neither that it may be closed, nor what `disconnect` takes
        reader, plain = own._reader, own._sock
        if reader is None or plain is None or args or options:
            return super().read_response(*args, **options)
        try:
            while (reply := reader.gets()) is False:  # which is no reply of RESP2: there is none yet
                data = plain.recv(READ_SIZE)
                if not data:
                    raise exceptions.ConnectionError("Connection closed by server.")
                reader.feed(data)
            if isinstance(reply, exceptions.ConnectionError):  # it does not serve
                raise reply
        except OSError as error:
            own.disconnect()
            where = f"reading from {self.host}:{self.port}"
            if isinstance(error, TimeoutError):
                raise exceptions.TimeoutError(f"Timeout {where}") from error
            raise exceptions.ConnectionError(f"Error while {where} : {error.args}") from error
        except BaseException:
            own.disconnect()
            raise
        if isinstance(reply, exceptions.ResponseError):
            raise reply
        return reply

    def _connect(self) -> socket.socket:
        """As redis-py does it, which has no public way to it."""
        timeout = self.socket_connect_timeout
        ends = None if timeout is None else time.monotonic() + timeout
        failure: OSError | None = None
        for family, kind, protocol, _, address in find_addresses(self.host, self.port, self.socket_type, timeout):
            left = None if ends is None else max(ends - time.monotonic(), 0.001)
            plain = socket.socket(family, kind, protocol)
            try:
                plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if self.socket_keepalive:
                    plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                    for option, value in self.socket_keepalive_options.items():
                        plain.setsockopt(socket.IPPROTO_TCP, option, value)
                plain.settimeout(left)
                plain.connect(address)
                plain.settimeout(self.socket_timeout)
            except OSError as error:
                failure = error
                plain.close()
            except BaseException:
                plain.close()
                raise
            else:
                self._reader = reader_of(self) if hiredis is not None and self.protocol == 2 else None
                return plain
        raise failure or OSError(f"{self.host} has no address")


class TlsConnection(redis.SSLConnection, TcpConnection):
    """The same, with TLS on top."""


# --- event loops ---

#: Gets the replies that came, and why there are no more of them; None: there are all.
Done = Callable[[list[Any], Exception | None], object]


def fits_loop(connection: Any) -> bool:
    """Whether a loop can have this connection: a plain socket, and hiredis to parse replies in pieces. TLS may have to
    read in order to write, and the embedded store has no socket.
    """
    return hiredis is not None and type(getattr(connection, "_sock", None)) is socket.socket  # no public way


class LoopConnection:
    """One round trip at a time. Belongs to the event loop that uses it first, and to its thread.

    It holds no reference to the loop, so that an owner beside the loop does not keep the loop alive. It is closed with
    its loop, at the latest when that is garbage.
    """

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._socket: socket.socket = connection._sock  # redis-py has no public way to it
        self._socket.settimeout(0)
        self._fd = self._socket.fileno()
        self._reader = reader_of(connection)
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
                self._registered = True  # first: a reader that was not added can be removed as well
                # Garbage together with the loop, a socket may come before the connection that would close it.
                self._end_of_loop = weakref.finalize(loop, self._connection.disconnect)
                self._end_of_loop.atexit = False
                # In an empty context: the reader stays, and would keep the context of one caller alive.
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
        except exceptions.InvalidResponse as error:
            self.fail(error)
        except BaseException:
            # A signal handler raised, perhaps between two steps: replies may be lost. The loop logs it, or ends.
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
