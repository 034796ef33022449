"""Payloads without a type, as canonical JSON."""

import math
from collections.abc import Callable
from types import NoneType
from typing import Any

import msgspec

from lowq.errors import PayloadError

#: Deepest nesting of a payload: what is accepted must also be readable from deep inside of an application.
MAX_PAYLOAD_DEPTH = 200
#: What a payload of a queue with merge="append" begins with in Redis, and the bytes of that head: 14 more follow, by
#: which it differs from equal ones.
APPENDED, HEAD_BYTES = b"\0\0a", 17

#: Types whose values JSON has as they are, or most of them.
_PLAIN = frozenset({str, int, bool, NoneType})

_encode = msgspec.json.Encoder(order="sorted").encode
#: The counterpart of `dump_payload`.
load_payload: Callable[[bytes], Any] = msgspec.json.Decoder().decode


def dump_payload(value: Any) -> bytes:
    """Canonical JSON: keys sorted, so that equal payloads are equal bytes and collapse.

    Tuples come back as lists. Everything else comes back as it went in, or is refused.

    Raises:
        PayloadError: a part of it is no JSON value; the message says where.
    """
    try:
        items = value.items() if type(value) is dict else (("", value),)
        for key, item in items:  # most payloads have no more levels
            if type(key) is not str or type(item) not in _PLAIN:
                check_json(value)
                break
        return _encode(value)
    except RecursionError:
        raise PayloadError(_TOO_DEEP) from None
    except (ValueError, msgspec.MsgspecError) as error:
        if isinstance(error, PayloadError):
            raise
        raise PayloadError(f"the payload is no JSON value: {error}") from error


def original_payload(stored: bytes) -> bytes:
    """A payload as it was pushed, from what Redis has."""
    return stored[HEAD_BYTES:] if stored[:3] == APPENDED else stored


_TOO_DEEP = f"the payload is nested in more than {MAX_PAYLOAD_DEPTH} levels, or contains itself"


def check_json(value: Any, depth: int = MAX_PAYLOAD_DEPTH) -> None:
    """Whether a value is one of JSON's, and so comes back as it goes in.

    Raises:
        PayloadError: it is not; the message says where.
    """
    # The encoder would silently turn bytes, sets, dates, NaN and keys that are no strings into something else.
    kind = type(value)
    if kind is str or kind is int or kind is bool or value is None:
        return
    if kind is float:
        if not math.isfinite(value):
            raise PayloadError(f"{value!r} is no JSON number")
    elif depth == 0:
        raise PayloadError(_TOO_DEEP)
    elif isinstance(value, dict):
        for key, item in value.items():
            if type(key) is not str:
                raise PayloadError(
                    f"key {key!r:.100} is of type {type(key).__name__}; JSON keys are strings: use {str(key)!r:.100}"
                )
            kind = type(item)
            if kind is not str and kind is not int and kind is not bool and item is not None:
                try:
                    check_json(item, depth - 1)
                except PayloadError as error:
                    raise PayloadError(f"in {key!r:.100}: {error}") from None
    elif isinstance(value, list | tuple):
        for item in value:
            check_json(item, depth - 1)
    else:
        hint = "" if kind.__module__ == "builtins" else f"; others are declared: lowq.Worker[{kind.__name__}]"
        raise PayloadError(
            f"{value!r:.100} is of type {kind.__name__}, which would not come back as it went in; "
            f"payloads are JSON values: str, int, float, bool, None, list, dict{hint}"
        )
