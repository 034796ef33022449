"""The Lua scripts as Redis gets them: one file per transition under ``lua/``, shared snippets under ``lua/lib/``.

A script pulls a snippet in with a line ``--!include name`` and names Redis's script flags in ``--!flags a,b``.
"""

import hashlib
import math
import re
from dataclasses import dataclass
from functools import cache
from importlib import resources

from lowq.errors import ConfigError

_INCLUDE = re.compile(r"^--!include (\w+)$", re.MULTILINE)
_FLAGS = re.compile(r"^--!flags (\S+)$", re.MULTILINE)


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


@cache
def load_scripts() -> dict[str, Script]:
    """All transitions by name. Snippets stand in place of the lines that include them."""
    folder = resources.files("lowq.store") / "lua"
    snippets = {
        item.name.removesuffix(".lua"): item.read_text(encoding="utf-8").rstrip()
        for item in (folder / "lib").iterdir()
        if item.name.endswith(".lua")
    }
    scripts = {}
    for item in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if not item.name.endswith(".lua"):
            continue
        text = item.read_text(encoding="utf-8")
        flags = _FLAGS.search(text)
        name = item.name.removesuffix(".lua")
        source = _INCLUDE.sub(lambda match: snippets[match[1]], text)
        scripts[name] = Script(name, source, flags[1] if flags else "")
    return scripts


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
