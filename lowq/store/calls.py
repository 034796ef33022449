"""Scripts, calls of them, and how long a caller waits: for an answer (`Deadline`), and until a replica or the disk has
what was written (`Wait`).

Redis gets one Lua script per transition, of ``lua/``, with the functions of ``lua/lib/`` that it needs: each costs time
whenever the script runs. A script names Redis's script flags in a line ``--!flags a,b``. Functions that it seldom needs
it names in lines ``--!rarely a b``: they, and what only they call, are made when it calls ``rarely()``, which returns
them in that order.
"""

import hashlib
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from importlib import resources
from math import inf
from typing import Any, Generic, Literal, Protocol, TypeVar

from redis import exceptions

from lowq.errors import ConfigError, LowqError, RedisRefused
from lowq.store.connection import ask, encode, pack
from lowq.store.translate import is_forbidden

#: A function of the library with the comment above it, from the start of a line to its ``end`` there.
_FUNCTION = re.compile(r"(?:^--[^\n]*\n)*^local function (\w+)\(.*?^end$", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"--[^\n]*")
_CALLED = re.compile(r"\b(\w+)\(")
_RARELY = re.compile(r"^--!rarely (.+)$", re.MULTILINE)
_FLAGS = re.compile(r"^--!flags (\S+)$", re.MULTILINE)
#: A command that a script calls, or that reaches a call by a variable. Scripts do without commands called by `pcall`.
_COMMAND = re.compile(r"redis\.call\(\s*'(\w+)'|'([HSZ]SCAN|HLEN|[SZ]CARD|ZMSCORE|HMGET|ZREM|SREM|HDEL)'")


@dataclass(frozen=True, slots=True)
class Script:
    """One transition, ready to be loaded."""

    name: str
    source: str
    #: Flags for the ``#!lua`` line, such as ``allow-oom``.
    flags: str

    def for_server(self, *, shebang: bool) -> tuple[bytes, bytes]:
        """Source and SHA1. fakeredis rejects the ``#!lua`` line, without which there are no flags."""
        head = f"#!lua flags={self.flags}\n" if self.flags else "#!lua\n"
        source = ((head if shebang else "") + self.source).encode()
        return source, hashlib.sha1(source, usedforsecurity=False).hexdigest().encode()

    def commands(self) -> frozenset[str]:
        """The commands that it needs."""
        return _commands_of(self.source)


@cache
def load_scripts() -> dict[str, Script]:
    """All transitions by name, each with the functions of the library that it needs before it."""
    folder = resources.files("lowq.store") / "lua"
    library = {
        function[1]: function[0]
        for item in sorted((folder / "lib").iterdir(), key=lambda entry: entry.name)
        if item.name.endswith(".lua")
        for function in _FUNCTION.finditer(item.read_text(encoding="utf-8"))
    }
    scripts = {}
    for item in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if not item.name.endswith(".lua"):
            continue
        text = item.read_text(encoding="utf-8")
        flags = _FLAGS.search(text)
        name = item.name.removesuffix(".lua")
        scripts[name] = Script(name, _assemble(text, library), flags[1] if flags else "")
    return scripts


@cache
def _commands_of(source: str) -> frozenset[str]:
    return frozenset(name for found in _COMMAND.findall(source) for name in found if name)


def _assemble(text: str, library: Mapping[str, str]) -> str:
    """A script with the functions of the library that it needs before it."""
    names = " ".join(_RARELY.findall(text)).split()
    others = {name: function for name, function in library.items() if name not in names}
    needed: dict[str, str] = {}
    _find_needed(text, others, needed)
    if not names:
        return "\n\n".join([*needed.values(), text])
    all_needed: dict[str, str] = {}
    _find_needed(text, library, all_needed)
    rest = [function for name, function in all_needed.items() if name not in needed]
    returned = ",\n  ".join(", ".join(names[i : i + 4]) for i in range(0, len(names), 4))
    made = "\n\n".join(["local rarely = function()", *rest, f"return {returned}\nend"])
    return "\n\n".join([*needed.values(), made, text])


def _find_needed(text: str, library: Mapping[str, str], needed: dict[str, str]) -> None:
    """Adds the functions that a text calls, behind those that they call: Lua knows a local function only below it."""
    for name in _CALLED.findall(_COMMENT.sub("", text)):
        if name in library and name not in needed and library[name] is not text:
            _find_needed(library[name], library, needed)
            needed[name] = library[name]


def time_of(reply: Sequence[bytes]) -> float:
    """Unix time, seconds, from the reply to the command TIME."""
    seconds, microseconds = reply
    return int(seconds) + int(microseconds) / 1e6


def time_argument(now: float | None) -> str:
    """An explicit time as scripts take it; '' is the server's own.

    Raises:
        ConfigError: it is no finite number.
    """
    if now is None:
        return ""
    given: object = now
    if isinstance(given, bool) or not isinstance(given, int | float) or not math.isfinite(given):
        raise ConfigError(f"now={given!r:.100}: it is Unix time, seconds")
    return repr(float(given))


# --- calls ---

#: An argument of a script.
Argument = str | bytes | int | float
#: The reply to a call, with its fields named.
R_co = TypeVar("R_co", covariant=True)


class Call(Generic[R_co]):
    """One run of a script. ``key`` routes it; ``args`` may still be changed until it is sent. ``data`` are further
    arguments, encoded: a push has thousands, which need not be looked at one by one. ``read`` names the fields of the
    reply; None: the reply stays as it is. ``only_if``: called with the call right before each time that it is sent, it
    tells whether the call is still wanted, and may change it; None: it is.
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
        self.only_if: Callable[[Any], bool] | None = None

    def pack(self, scripts: Mapping[str, tuple[bytes, bytes]]) -> bytes:
        """The bytes to send. ``scripts``: name -> source and SHA1, as the server has them."""
        args = encode(self.args) if self.args else ()
        return pack((b"EVALSHA", scripts[self.script][1], b"1", self.key.encode(), *args, *self.data))


class Repeated(Call[R_co]):
    """A call that is sent again and again as it is, and packed once."""

    __slots__ = ("_packed",)

    def pack(self, scripts: Mapping[str, tuple[bytes, bytes]]) -> bytes:
        """The bytes to send, as of `Call`."""
        sha = scripts[self.script][1]
        packed: tuple[bytes, bytes] | None = getattr(self, "_packed", None)
        if packed is None or packed[0] != sha:
            packed = self._packed = sha, super().pack(scripts)
        return packed[1]


class Command(Call[Any]):
    """A plain command among calls of scripts, reading or otherwise fit to be repeated. ``script`` is its name."""

    __slots__ = ()

    def __init__(self, key: str, name: str, *args: Argument) -> None:
        super().__init__(name, key, args)

    def pack(self, scripts: Mapping[str, tuple[bytes, bytes]]) -> bytes:  # noqa: ARG002  # it needs none
        return pack(tuple(encode([self.script, *self.args])))


class Rights:
    """The commands that the user may run on a server. Redis is asked once, and again after it has refused a command."""

    __slots__ = ("_is_granted", "_refused", "_script", "may_lack")

    def __init__(self, script: bytes, *, is_granted: bool) -> None:
        """``script``: the SHA1 of the one that asks; ``is_granted``: there are no users."""
        self._script = script
        self._is_granted = is_granted
        self.forget()

    def forget(self) -> None:
        """Forgets them, as Redis has refused the user a command: the next call asks."""
        #: script -> commands that it needs and the user may not run; None: that is to be asked.
        self._refused: dict[str, list[str]] | None = None
        #: Whether the user may lack rights that a script needs, as far as is known.
        self.may_lack = not self._is_granted

    def check(self, connection: Any, calls: Iterable[Call[Any]]) -> None:
        """Checks that the user may run all commands of these scripts on their keys: one that Redis refused after its
        first write would leave a transition half done.

        Raises:
            RedisRefused: nothing was sent.
        """
        refused = self._refused
        for call in calls:
            if type(call) is Command:
                continue
            if refused is None or call.script in refused:
                refused = self._ask(connection, call.key)
                self.may_lack = bool(refused)  # first: another thread that forgets both meanwhile sets it again
                self._refused = refused
            if commands := refused.get(call.script):
                raise RedisRefused(
                    f"Redis does not allow what lowq needs (docs/operations.md#rights): {call.script} on {call.key} "
                    f"needs {' '.join(f'+{name.lower()}' for name in commands)}; nothing was written"
                )

    def _ask(self, connection: Any, key: str) -> dict[str, list[str]]:
        needed = {name: script.commands() for name, script in load_scripts().items()}
        names = sorted(frozenset[str]().union(*needed.values()))
        reply = ask(connection, b"EVALSHA", self._script, b"1", key.encode(), *encode(names))
        if isinstance(reply, Exception):
            raise reply
        refused = {name.decode() for name in reply}
        return {name: sorted(commands & refused) for name, commands in needed.items() if commands & refused}

    def allows(self, script: str) -> bool:
        """Whether the user is known to have the rights that a script needs."""
        return self._is_granted or (self._refused is not None and script not in self._refused)


# --- deadlines ---

#: A push waits for: none: Redis's answer; replicated: that a replica has it, too; fsynced: that it is on the disk.
Durability = Literal["none", "replicated", "fsynced"]
DURABILITIES: tuple[Durability, ...] = ("none", "replicated", "fsynced")

#: Seconds by which the server's answer to a `Wait` comes before the caller's own time is up.
MARGIN = 0.05


class Limited(Protocol):
    """An action of a caller that has to end in time."""

    @property
    def deadline(self) -> float | None:
        """``time.monotonic``; None: it may take as long as it likes."""
        ...

    @property
    def thread(self) -> int:
        """The thread that may be interrupted in it at any instruction, as ``threading.get_ident``; 0: none."""
        ...

    @property
    def at_end(self) -> dict[object, Callable[[], object]]:
        """What that thread calls when it ends, for what an interrupt may have kept from being given up."""
        ...


#: The action of the caller that has to end in time, if there is one: no timeout waits longer than for that.
caller_limit: ContextVar[Limited | None] = ContextVar("lowq_caller_limit", default=None)


def caller_deadline() -> float:
    """The moment until which the caller can wait, ``time.monotonic``; infinite: for ever."""
    limit = caller_limit.get()
    deadline = None if limit is None else limit.deadline
    return inf if deadline is None else deadline


class Deadline:
    """The end of a wait: so many seconds from now, or from the last progress, which is an answer, or the moment from
    which on a caller waits. At the latest ``until``.
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
        """The lesser of so many seconds, and those to ``until`` without the margin."""
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
# WAIT and WAITAOF concern the last write of the connection that asks, and with it all earlier writes of the server: the
# stream to replicas, and that to the file, is one. So the wait goes on the same connection, behind calls that have
# written: without a write before it, it is answered at once and means nothing. Therefore `push` writes also when it
# finds that it was carried out before (see `remember_repeat`).


class Wait:
    """The confirmation of a server's last writes, within so many seconds, by that number of replicas."""

    __slots__ = ("durability", "replicas", "seconds")

    def __init__(self, durability: Durability, seconds: float, replicas: int = 1) -> None:
        self.durability = durability
        self.seconds = seconds
        self.replicas = replicas

    def command(self, deadline: Deadline | None) -> tuple[bytes, ...]:
        """The command that asks for it. Its answer comes before the callers' time is up."""
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
        """The number of replicas, or disks, that have it."""
        return int(reply if self._is_for_replicas else reply[0])


class NotConfirmed(LowqError):
    """A call was carried out, and its server did not confirm it in time. ``reply``: that of the call;
    ``confirmations``: how many replicas, or disks, have it; ``reason``: why the server could not say that.
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
        why = f"its user may not do that (docs/operations.md#rights): {text}"
    else:
        why = text
    return RedisRefused(f"the server can't confirm {what}, so nothing was written: {why}")


def conclude(results: list[Any], positions: Sequence[int], wait: Wait, reply: Any) -> None:
    """Replaces the replies to calls that the answer to the wait behind them does not confirm."""
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
