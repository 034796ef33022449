"""How long a caller waits for Redis: for an answer (`Deadline`), and until a replica or the disk has what was written
(`Wait`).
"""

import time
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from math import inf
from typing import Any, Literal, Protocol

from redis import exceptions

from lowq.errors import LowqError, RedisRefused
from lowq.store.translate import is_forbidden

#: What a push waits for. none: Redis's answer; replicated: a replica has it, too; fsynced: it is on the server's disk.
Durability = Literal["none", "replicated", "fsynced"]
DURABILITIES: tuple[Durability, ...] = ("none", "replicated", "fsynced")

#: Seconds by which the server's answer to a `Wait` comes before the caller's own time is up.
MARGIN = 0.05


class Limited(Protocol):
    """What a caller does that has to end in time."""

    @property
    def deadline(self) -> float | None:
        """``time.monotonic``; None: it may take as long as it likes."""
        ...


#: What the caller is about to do, if that has to end in time: whatever has a timeout waits no longer than for that.
caller_limit: ContextVar[Limited | None] = ContextVar("lowq_caller_limit", default=None)


def caller_deadline() -> float:
    """Until when the caller can wait, ``time.monotonic``; infinite: for ever."""
    limit = caller_limit.get()
    deadline = None if limit is None else limit.deadline
    return inf if deadline is None else deadline


class Deadline:
    """So many seconds from now, or from the last progress on: an answer, or a moment from which on somebody waits. In
    any case not longer than ``until``.
    """

    __slots__ = ("_end", "_until", "seconds")

    def __init__(self, seconds: float, until: float = inf) -> None:
        self.seconds = seconds
        self._until = until
        self._end = min(time.monotonic() + seconds, until)

    def restart(self, extra: float = 0.0) -> None:
        """``extra``: seconds more, until the next progress."""
        self._end = min(time.monotonic() + self.seconds + extra, self._until)

    def bounded(self, seconds: float, margin: float) -> float:
        """So many seconds, or those until ``until`` without the margin, if that is less."""
        return min(seconds, self._until - margin - time.monotonic())

    @property
    def passed(self) -> bool:
        return time.monotonic() >= self._end

    def left(self) -> float:
        """Seconds, and a moment at least: no timeout at all is something else."""
        return max(self._end - time.monotonic(), 0.001)


def deadlines(seconds: float, attempts: int, until: float | None = None) -> Iterator[Deadline]:
    """For each attempt half of the time that is left, so that a connection that was cut without a word is not the only
    one that is tried; the last one has the rest. It lasts until the monotonic time ``until`` at most; None: as long as
    the caller can wait, see `caller_limit`.
    """
    if until is None:
        until = caller_deadline()
    if until < inf:
        seconds = min(seconds, max(until - time.monotonic(), 0.0))
    for left in range(attempts - 1, -1, -1):
        if left:
            seconds /= 2
        yield Deadline(seconds, until)


# --- confirmations ---
#
# WAIT and WAITAOF concern the last write of the connection that asks, and with it all that the server has written
# before: what is sent to replicas, or appended to the file, is one stream. So the wait goes on the same connection,
# behind calls that have written something: a connection that has written nothing gets its answer at once, for nothing.
# Therefore `push` writes also when it finds that it was carried out before (see `remember_repeat`).


class Wait:
    """That a server is to confirm its last writes, within so many seconds. ``replicas``: how many have to have them."""

    __slots__ = ("durability", "replicas", "seconds")

    def __init__(self, durability: Durability, seconds: float, replicas: int = 1) -> None:
        self.durability = durability
        self.seconds = seconds
        self.replicas = replicas

    def command(self, deadline: Deadline | None) -> tuple[bytes, ...]:
        """What asks for it. It is answered by when the callers' time is up."""
        seconds = self.seconds if deadline is None else deadline.bounded(self.seconds, MARGIN)
        milliseconds = b"%d" % max(int(seconds * 1000), 1)  # 0 would be for ever
        replicas = b"%d" % self.replicas
        return (b"WAIT", replicas, milliseconds) if self._is_for_replicas else (b"WAITAOF", b"1", b"0", milliseconds)

    @property
    def probe(self) -> tuple[bytes, ...]:
        """A command that tells whether the server can do it. It takes a millisecond at most."""
        return (b"WAIT", b"0", b"1") if self._is_for_replicas else (b"WAITAOF", b"1", b"0", b"1")

    @property
    def _is_for_replicas(self) -> bool:
        return self.durability == "replicated"

    def confirmations(self, reply: Any) -> int:
        """How many replicas, or disks, have it."""
        return int(reply if self._is_for_replicas else reply[0])


class NotConfirmed(LowqError):
    """Calls were carried out, and the server did not confirm what was to be waited for. ``reply``: that of the call;
    ``confirmations``: how many replicas, or disks, have it; ``reason``: why it could not even say that.
    """

    def __init__(self, reply: Any, wait: Wait, confirmations: int, reason: str = "") -> None:
        super().__init__(f"not confirmed as {wait.durability} within {wait.seconds:g} s")
        self.reply = reply
        self.wait = wait
        self.confirmations = confirmations
        self.reason = reason


def refusal_of(wait: Wait, reply: Any) -> RedisRefused | None:
    """Why a server that answers so to `Wait.probe` can't confirm anything; None: it can, or it is a replica, which
    takes no writes either.
    """
    if not isinstance(reply, exceptions.ResponseError) or "replica instances" in str(reply):
        return None
    what, text = f"durability={wait.durability!r}", str(reply)
    if text.lower().startswith("unknown command") and wait.durability == "fsynced":
        why = "it has no command WAITAOF, which comes with Redis 7.2 and Valkey 7.2; or it hides the command"
    elif "appendonly is disabled" in text:
        why = "it has no append-only file: set appendonly yes"
    elif is_forbidden(reply):
        why = f"its user may not do that (docs/rights.md): {text}"
    else:
        why = text
    return RedisRefused(f"the server can't confirm {what}, so nothing was written: {why}")


def conclude(results: list[Any], positions: Sequence[int], wait: Wait, reply: Any) -> None:
    """Puts into the place of the replies to calls what the answer to the wait behind them makes of them."""
    if isinstance(reply, Exception):
        for i in positions:
            if not isinstance(results[i], Exception):
                # A primary that has become a replica meanwhile: the calls are repeated where the new one is.
                lost = str(reply).startswith("UNBLOCKED") or "replica instances" in str(reply)
                results[i] = (
                    exceptions.ConnectionError(str(reply)) if lost else NotConfirmed(results[i], wait, 0, str(reply))
                )
        return
    confirmations = wait.confirmations(reply)
    if confirmations < wait.replicas:
        for i in positions:
            if not isinstance(results[i], Exception):
                results[i] = NotConfirmed(results[i], wait, confirmations)
