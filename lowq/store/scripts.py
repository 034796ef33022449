"""The Lua scripts as Redis gets them: one file per transition under ``lua/``, shared functions under ``lua/lib/``.

A script simply calls functions of the library: those that it calls, and those that they call, are put before it, and
no others, as each costs time whenever the script runs. It names Redis's script flags in a line ``--!flags a,b``.
Functions that it seldom needs it names in lines ``--!rarely a b``: they, and what only they call, are made when it
calls ``rarely()``, which returns them in that order.
"""

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources

from lowq.errors import ConfigError

#: A function of the library with the comment above it, from the start of a line to its ``end`` there.
_FUNCTION = re.compile(r"(?:^--[^\n]*\n)*^local function (\w+)\(.*?^end$", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"--[^\n]*")
_CALLED = re.compile(r"\b(\w+)\(")
_RARELY = re.compile(r"^--!rarely (.+)$", re.MULTILINE)
_FLAGS = re.compile(r"^--!flags (\S+)$", re.MULTILINE)
#: A command that a script calls, or that reaches a call by a variable. It can do without what it calls by `pcall`.
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
    """Adds what a text calls, after what that calls itself: in Lua a local function is known only below it."""
    for name in _CALLED.findall(_COMMENT.sub("", text)):
        if name in library and name not in needed and library[name] is not text:
            _find_needed(library[name], library, needed)
            needed[name] = library[name]


def time_of(reply: Sequence[bytes]) -> float:
    """Unix time, seconds, from what the command TIME answers."""
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
