"""Masks fields of payloads."""

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import Any

import lowq

#: A payload -> what is shown of it.
Redact = Callable[[Any], Any]

MASK = "•••"
#: How the queue's handle shows a payload that can't be decoded: its fields are not known, so nothing of it is shown.
_UNDECODABLE = "undecodable payload: "


def redactor(redact: Redact | Iterable[str] | None, always: Iterable[str] = ()) -> Redact:
    """From what `create_app` is given: nothing, names of fields (``"card_*"`` matches several), or a function. The
    fields in ``always`` are masked besides; a function does not see them.

    Fields are masked however deep they lie, and whatever the case of their names.

    Raises:
        ConfigError: it is neither.
    """
    patterns = [name.lower() for name in always]
    if callable(redact):
        shown = redact
        return _safely(lambda payload: shown(_mask(payload, patterns))) if patterns else _safely(redact)
    given: Any = () if redact is None else redact
    names = list(given) if isinstance(given, Iterable) and not isinstance(given, str) else None
    if names is None or not all(isinstance(name, str) for name in names):
        raise lowq.ConfigError("redact= is a list of names of payload fields, or a function of a payload")
    patterns += [name.lower() for name in names]
    if not patterns:
        return lambda payload: payload
    return _safely(lambda payload: _mask(payload, patterns))  # it may be nested deeper than we can go


def _safely(function: Redact) -> Redact:
    def redact(payload: Any) -> Any:
        try:
            return function(payload)
        except Exception:
            return MASK  # nothing is shown rather than too much; a payload may be nested too deep

    return redact


def _mask(payload: Any, patterns: list[str]) -> Any:
    if isinstance(payload, dict):
        return {
            name: MASK
            if any(fnmatchcase(str(name).lower(), pattern) for pattern in patterns)
            else _mask(value, patterns)
            for name, value in payload.items()
        }
    if isinstance(payload, list | tuple):
        return [_mask(item, patterns) for item in payload]
    if patterns and isinstance(payload, str) and payload.startswith(_UNDECODABLE):
        return _UNDECODABLE + MASK
    return payload
