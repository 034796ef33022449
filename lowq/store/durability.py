"""What a write waits for once it was answered: that a replica has it (WAIT), or the disk (WAITAOF).

Both concern the last write of the connection that asks, and with it all that the server has written before: what is
sent to replicas, or appended to the file, is one stream. So the wait has to go on the same connection, behind calls
that have written something. A connection that has written nothing gets its answer at once, for nothing. Therefore
`push` writes also when it finds that it was carried out before (see `remember_repeat`).
"""

from collections.abc import Sequence
from typing import Any, Literal

from redis import exceptions

from lowq.errors import LowqError, RedisRefused
from lowq.store.deadline import Deadline
from lowq.store.translate import is_forbidden

#: What a push waits for. none: Redis's answer; replicated: a replica has it, too; fsynced: it is on the server's disk.
Durability = Literal["none", "replicated", "fsynced"]
DURABILITIES: tuple[Durability, ...] = ("none", "replicated", "fsynced")

#: Seconds by which the server's answer comes before the caller's own time is up.
MARGIN = 0.05


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
