"""Calls: runs of scripts, and plain commands; and the pipeline that takes some of them to a server and back."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, TypeVar

from redis import exceptions

from lowq.errors import RedisRefused, RedisUnavailable, ScriptError
from lowq.store.connection import encode, pack, read_reply, set_timeout
from lowq.store.deadline import Deadline, Wait, conclude
from lowq.store.pool import Pool

#: An argument of a script.
Argument = str | bytes | int | float
#: The reply to a call, with its fields named.
R_co = TypeVar("R_co", covariant=True)

#: Bytes of calls that are written at once. Of more, each call has a timeout of its own, as a slow line takes its time.
MAX_WRITE = 2**20


class Call(Generic[R_co]):
    """One run of a script. ``key`` routes it; ``args`` may still be changed until it is sent. ``data`` is what follows
    them: a push has thousands of arguments, which need not be looked at one by one. ``read`` names the fields of its
    reply; None: the reply is as it is. ``only_if``: whether somebody still wants it; None: yes.
    """

    __slots__ = ("args", "data", "key", "only_if", "read", "script")

    def __init__(
        self,
        script: str,
        key: str,
        args: Iterable[Argument],
        data: list[bytes] | None = None,
        *,
        read: Callable[[Any], R_co] | None = None,
    ) -> None:
        self.script = script
        self.key = key
        self.args = list(args)
        self.data = data or []
        self.read = read
        self.only_if: Callable[[], bool] | None = None

    def is_wanted(self) -> bool:
        """Whether somebody still wants it. Called each time right before it is sent, on whatever connection; what it is
        after that is sent.
        """
        return self.only_if is None or self.only_if()

    def pack(self, scripts: Mapping[str, tuple[bytes, bytes]]) -> bytes:
        """The bytes to send. ``scripts``: name -> source and SHA1, as the server has them."""
        args = [
            item if type(item) is bytes else item.encode() if isinstance(item, str) else repr(item).encode()
            for item in self.args
        ]
        return pack((b"EVALSHA", scripts[self.script][1], b"1", self.key.encode(), *args, *self.data))


class Command(Call[Any]):
    """A plain command among calls of scripts, reading or otherwise fit to be repeated. ``script`` is its name."""

    __slots__ = ()

    def __init__(self, key: str, name: str, *args: Argument) -> None:
        super().__init__(name, key, args)

    def pack(self, scripts: Mapping[str, tuple[bytes, bytes]]) -> bytes:  # noqa: ARG002  # it needs none
        return pack(tuple(encode([self.script, *self.args])))


class Pipeline:
    """Calls to one server in one write, and their replies. Whoever has sent it receives it, or gives it up.

    ``calls``: each with its position among the ``results``; ``wait``: what the server is to confirm behind them;
    ``prelude``: is called with the connection before anything is sent.
    """

    __slots__ = ("_calls", "_connection", "_is_lent", "_results", "_wait", "deadline", "error", "has_errors", "pool")

    def __init__(
        self, pool: Pool, calls: list[tuple[int, Call[Any]]], results: list[Any], deadline: Deadline | None,
        wait: Wait | None,
    ) -> None:  # fmt: skip
        self.pool = pool
        self.deadline = deadline
        #: What kept the server from answering: redis-py's error, or one of ours.
        self.error: Exception | None = None
        #: Whether there is any error among the results.
        self.has_errors = False
        self._calls = calls
        self._results = results
        self._wait = wait
        self._connection: Any = None
        self._is_lent = False

    def send(self, *, prelude: Callable[[Any], object] | None = None, lend: bool = False) -> None:
        """Writes the calls. An error is kept for `receive`. ``lend``: the connection does not count as in use until
        then, as foreign code runs.
        """
        pool, wait = self.pool, self._wait
        try:
            connection = self._connection = pool.checkout(self.deadline)
            if prelude is not None:
                prelude(connection)
            if pool.may_lack_rights:
                pool.check_rights(connection, [(c.script, c.key) for _, c in self._calls if type(c) is not Command])
            if wait is not None:
                pool.check_wait(connection, wait)
            # Only now that there is a connection: that may have taken long.
            wanted = [item for item in self._calls if item[1].is_wanted()]
            if len(wanted) < len(self._calls):
                self._give_up_unwanted(wanted)
            packed = [call.pack(pool.scripts) for _, call in wanted]
            if wait is not None and packed:
                packed.append(pack(wait.command(self.deadline)))
            if packed:
                if len(packed) > 1 and sum(map(len, packed)) <= MAX_WRITE:
                    packed = [b"".join(packed)]
                connection.send_packed_command(packed, check_health=False)
        except (exceptions.RedisError, RedisUnavailable, RedisRefused) as error:
            self.error = error
        if lend:
            self._lend()

    def _give_up_unwanted(self, wanted: list[tuple[int, Call[Any]]]) -> None:
        positions = {position for position, _ in wanted}
        for position, _ in self._calls:
            if position not in positions:
                self._results[position] = RedisUnavailable("it was given up before it was sent")
        self._calls, self.has_errors = wanted, True

    def receive(self) -> None:
        """Puts the replies, with their fields named, into their places among the results, and gives the connection
        back. A call without a reply gets the error.
        """
        results, deadline = self._results, self.deadline
        for position, call in self._calls:
            if self.error is None:
                try:
                    if deadline is not None:
                        set_timeout(self._connection, deadline.left())
                    reply = read_reply(self._connection)
                    if deadline is not None:
                        deadline.restart()
                except exceptions.RedisError as error:
                    self.error = error
                else:
                    if isinstance(reply, Exception):
                        self.has_errors = True
                    elif call.read is not None:
                        try:
                            reply = call.read(reply)
                        # Of this call alone: the others' replies are behind it. Not what a signal handler raises.
                        except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
                            reply = ScriptError(f"{call.script} on {call.key}: its reply can't be read: {error!r:.200}")
                            self.has_errors = True
                    results[position] = reply
                    continue
            results[position] = self.error
        if self._wait is not None and self._calls:
            self._receive_confirmation(self._wait)
        if self.error is not None:
            self.has_errors = True
        self.close(is_whole=True)

    def _receive_confirmation(self, wait: Wait) -> None:
        self.has_errors = True  # perhaps: `NotConfirmed` is one
        if not self._is_lent:
            self._lend()  # it may take long, and must not keep those from writing who wait for nothing
        positions = [position for position, _ in self._calls]
        if self.error is None:
            try:
                self.pool.limit_confirmation(self._connection, self.deadline, wait)
                conclude(self._results, positions, wait, read_reply(self._connection))
                if self.deadline is not None:
                    self.deadline.restart()
                return
            except exceptions.RedisError as error:
                self.error = error
        # They were carried out, and by whom is lost if that was the end of the server: whoever serves now is asked.
        for position in positions:
            if not isinstance(self._results[position], Exception):
                self._results[position] = self.error

    def _lend(self) -> None:
        if self._connection is not None:
            self._is_lent = True
            self.pool.lend(self._connection)

    def close(self, *, is_whole: bool) -> None:
        """Gives the connection back. ``is_whole``: no reply is left on it; otherwise it is closed."""
        # Forgotten first, so that it is never given back twice, whatever interrupts this.
        connection, self._connection = self._connection, None
        if connection is None or (self._is_lent and not self.pool.take_back(connection)):
            return
        if is_whole and self.error is None:
            self.pool.release(connection)
        else:
            self.pool.release_closed(connection)
