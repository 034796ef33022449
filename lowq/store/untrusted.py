"""Reads values of Redis, which may come from any version, tool or hand, so that a bad value costs only its own row.

Each function returns a value of its kind, finite and of a sane size, or None. None of them raises. A value that had to
be left out is logged, once.
"""

import json
import math
from collections.abc import Iterable
from typing import Any, overload

from lowq.logs import get_log

log = get_log("lowq.store")

#: The distance between the scores of two priorities in `due`.
LEVEL = 2.0**33
#: Whole numbers beyond this are no count, size or time of ours.
MAX_NUMBER = 2**53
#: So many values that were left out are logged, and no more.
_MAX_LOGGED = 1000

_logged: set[tuple[str, bytes | str]] = set()


def log_skipped(what: str, where: bytes | str, why: str) -> None:
    """Logs once that a value can't be read. ``what`` and ``where`` identify it."""
    if (what, where) in _logged or len(_logged) >= _MAX_LOGGED:
        return
    _logged.add((what, where))
    log.warning(
        "%s %.150r can't be read and is left out: %s; `lowq doctor` may know more", what, where, why,
        extra={"event": "unreadable", "what": what},
    )  # fmt: skip


# --- values as text ---


@overload
def figure(raw: bytes | str | float | None, otherwise: float) -> float: ...
@overload
def figure(raw: bytes | str | float | None, otherwise: None = None) -> float | None: ...
def figure(raw: bytes | str | float | None, otherwise: float | None = None) -> float | None:
    """A number that may be infinite, but is one."""
    try:
        value = float(raw)  # type: ignore[arg-type]  # None raises a TypeError
    except (TypeError, ValueError):
        return otherwise
    return otherwise if math.isnan(value) else value


@overload
def finite(raw: bytes | str | float | None, otherwise: float) -> float: ...
@overload
def finite(raw: bytes | str | float | None, otherwise: None = None) -> float | None: ...
def finite(raw: bytes | str | float | None, otherwise: float | None = None) -> float | None:
    """A number that is finite."""
    try:
        value = float(raw)  # type: ignore[arg-type]  # None raises a TypeError
    except (TypeError, ValueError):
        return otherwise
    return value if math.isfinite(value) else otherwise


def perform_at(score: bytes | None) -> float | None:
    """The time in a score of `due`, which has the priority in front: level * 2**33 + perform_at."""
    value = finite(score)
    return value if value is None or value < LEVEL else value - min(value // LEVEL, 9) * LEVEL


def count(raw: bytes | str | float | None) -> int:
    """A counter; 0 if it is none."""
    value = finite(raw)
    return int(value) if value is not None and 0 <= value <= MAX_NUMBER else 0


# --- values of JSON ---


def json_object(data: bytes | str) -> dict[str, Any] | None:
    """A JSON object."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def number(value: Any, low: float = -MAX_NUMBER, high: float = MAX_NUMBER) -> float | None:
    """A number within these bounds."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        return None
    return value


def whole(value: Any, low: int = -MAX_NUMBER, high: int = MAX_NUMBER) -> int | None:
    """A whole number within these bounds."""
    return value if isinstance(value, int) and number(value, low, high) is not None else None


def text(value: Any) -> str | None:
    """A text that can be written out again; ids may be of any bytes."""
    if not isinstance(value, str):
        return None
    try:
        value.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return None
    return value


def plain(value: Any, depth: int = 4) -> Any:
    """The value as it can be shown: parts that are no text, sane number, bool or None, or lie too deep, become None."""
    if isinstance(value, dict) and depth:
        names = {text(name): item for name, item in value.items()}
        return {name: plain(item, depth - 1) for name, item in names.items() if name is not None}
    if isinstance(value, list) and depth:
        return [plain(item, depth - 1) for item in value]
    return value if isinstance(value, bool) else text(value) if isinstance(value, str) else number(value)


def deeper_than(value: Any, levels: int) -> bool:
    """Whether lists and dicts are nested in more levels than that."""
    boxes = _boxes([value])
    for _ in range(levels):
        if not boxes:
            return False
        boxes = _boxes(item for box in boxes for item in (box.values() if isinstance(box, dict) else box))
    return bool(boxes)


def _boxes(items: Iterable[Any]) -> list[Any]:
    # By identity: the value of a custom decoder may have the same box in many places.
    return list({id(item): item for item in items if isinstance(item, dict | list | tuple)}.values())
