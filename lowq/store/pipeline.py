"""A pipeline: calls to one server in one write, and their replies."""

from collections.abc import Callable
from typing import Any

from redis import exceptions

from lowq.errors import RedisRefused, RedisUnavailable
from lowq.store.call import Call, Command
from lowq.store.deadline import Deadline
from lowq.store.durability import Wait, conclude
from lowq.store.pool import Pool, encode, pack, read_reply
from lowq.store.replies import read

#: Bytes of calls that are written at once. Of more, each call has a timeout of its own, as a slow line takes its time.
MAX_WRITE = 2**20


class Pipeline:
    """Calls to one server. Whoever has sent it receives and closes it, also when something was raised in between.

    ``calls``: each with the position of its result; ``wait``: what the server is to confirm behind them; ``prelude``:
    is called with the connection before anything is sent.
    """

    def __init__(
        self,
        pool: Pool,
        calls: list[tuple[int, Call[Any]]],
        deadline: Deadline | None,
        wait: Wait | None,
        prelude: Callable[[Any], object] | None = None,
    ) -> None:
        self.pool = pool
        self.deadline = deadline
        #: What kept the server from answering: redis-py's error, or one of ours.
        self.error: Exception | None = None
        self._calls = calls
        self._wait = wait
        self._prelude = prelude
        self._connection: Any = None
        self._is_lent = False
        #: The positions of calls that nobody wanted any more when they were to be sent.
        self._unwanted: list[int] = []

    def send(self) -> None:
        """Writes the calls. An error is kept for `receive`."""
        try:
            connection = self._connection = self.pool.checkout(self.deadline)
            if self._prelude is not None:
                self._prelude(connection)
            self.pool.check_rights(connection, (call for _, call in self._calls))
            if self._wait is not None:
                self.pool.check_wait(connection, self._wait)
            if packed := self._pack():
                connection.send_packed_command(packed, check_health=False)
        except (exceptions.RedisError, RedisUnavailable, RedisRefused) as error:
            self.error = error

    def _pack(self) -> list[bytes]:
        # Only now that there is a connection: that may have taken long.
        self._unwanted = [position for position, call in self._calls if not call.is_wanted()]
        if self._unwanted:
            self._calls = [item for item in self._calls if item[0] not in self._unwanted]
        packed = [pack_call(self.pool, call) for _, call in self._calls]
        if self._wait is not None and packed:
            packed.append(pack(self._wait.command(self.deadline)))
        return [b"".join(packed)] if len(packed) > 1 and sum(map(len, packed)) <= MAX_WRITE else packed

    def receive(self, results: list[Any]) -> None:
        """Puts the replies into their places among the results. A call without a reply gets the error."""
        for position, _ in self._calls:
            results[position] = self._read()
        if self._wait is not None and self._calls:
            self._receive_confirmation(results, self._wait)
        for position in self._unwanted:
            results[position] = RedisUnavailable("it was given up before it was sent")

    def _read(self, wait: Wait | None = None) -> Any:
        if self.error is None:
            try:
                if wait is not None:
                    self.pool.limit_confirmation(self._connection, self.deadline, wait)
                elif self.deadline is not None:
                    self.pool.limit(self._connection, self.deadline)
                reply = read_reply(self._connection)
                if self.deadline is not None:
                    self.deadline.restart()
                return reply
            except exceptions.RedisError as error:
                self.error = error
        return self.error

    def _receive_confirmation(self, results: list[Any], wait: Wait) -> None:
        if not self._is_lent:
            self.lend()  # it may take long, and must not keep those from writing who wait for nothing
        reply = self._read(wait)
        positions = [position for position, _ in self._calls]
        if self.error is None:
            conclude(results, positions, wait, reply)
            return
        # They were carried out, and by whom is lost if that was the end of the server: whoever serves now is asked.
        for position in positions:
            if not isinstance(results[position], Exception):
                results[position] = self.error

    def lend(self) -> None:
        """Has the connection not count as in use: foreign code runs, or a confirmation is waited for."""
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


def pack_call(pool: Pool, call: Call[Any]) -> bytes:
    """A call as the server of that pool gets it."""
    if type(call) is Command:
        return pack(tuple(encode([call.script, *call.args])))
    return pack((b"EVALSHA", pool.scripts[call.script][1], b"1", call.key.encode(), *encode(call.args), *call.data))


def ask(connection: Any) -> None:
    """Says that a call goes to the server that imports its slot: the prelude after ASK."""
    connection.send_packed_command([pack((b"ASKING",))], check_health=False)
    read(connection)
