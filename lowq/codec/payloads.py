"""How payloads and errors are encoded unless a setting says otherwise: canonical JSON, and text that is cut."""

import math
from collections.abc import Callable
from types import NoneType
from typing import Any

import msgspec

from lowq.errors import PayloadError

#: Deepest nesting of a payload: a take must be able to read it from deep inside of an application.
MAX_PAYLOAD_DEPTH = 200
#: The first bytes in Redis of a payload of a queue with merge="append", and the length of its head: 14 more bytes
#: distinguish it from equal ones.
APPENDED, HEAD_BYTES = b"\0\0a", 17

#: Types whose values are JSON values.
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
    """Refuses values that are not JSON's, and so would come back as something else.

    Raises:
        PayloadError: the message says where.
    """
    # The encoder would silently turn bytes, sets, dates, NaN and keys that are no strings into other values.
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


# --- errors and reasons ---

#: Bytes of UTF-8 that are kept of an error, or of a reason (G6: bounded).
MAX_ERROR_BYTES = 8192
#: Bytes that ``dump_error`` may make of them.
MAX_DUMPED_BYTES = 8 * MAX_ERROR_BYTES


def format_error(error: BaseException) -> str:
    """The text that is kept of an exception: its traceback, cut in the middle beyond 8 KiB."""
    import traceback

    return cut_error("".join(traceback.format_exception(error)).rstrip())


def cut_error(text: str) -> str:
    """A text as it is kept with a job: cut in the middle beyond ``MAX_ERROR_BYTES``.

    Raises:
        TypeError: it is no text.
    """
    text = "".join((text,))  # a plain str, also of a subclass
    if len(text) <= MAX_ERROR_BYTES // 4:  # which has 4 bytes a character at most
        return text
    data = text.encode("utf-8", "surrogatepass")
    if len(data) <= MAX_ERROR_BYTES:
        return text
    head, tail = data[: MAX_ERROR_BYTES // 4], data[-(MAX_ERROR_BYTES * 3 // 4 - 64) :]
    omitted = len(data) - len(head) - len(tail)
    return f"{head.decode('utf-8', 'ignore')}\n... {omitted} bytes left out ...\n{tail.decode('utf-8', 'ignore')}"


def dump_text(dump_error: Callable[[str], bytes], text: str) -> bytes:
    """An error or a reason as Redis keeps it: cut, then encoded by the setting ``dump_error``.

    Raises:
        TypeError: it is no text, or ``dump_error`` gave no bytes. ValueError: it gave too many. What it raises.
    """
    data: object = dump_error(cut_error(text))
    if not isinstance(data, bytes):
        raise TypeError(f"dump_error gave a {type(data).__name__} instead of bytes")
    data = bytes(memoryview(data))  # plain bytes, also of a subclass
    if len(data) > MAX_DUMPED_BYTES:
        raise ValueError(f"dump_error gave {len(data)} bytes; it may give {MAX_DUMPED_BYTES}")
    return data


def dump_error(text: str) -> bytes:
    """The text as UTF-8: the default of the setting ``dump_error``."""
    # The name of a file that is no UTF-8 is in the error as surrogates, which UTF-8 has no bytes for.
    return text.encode("utf-8", "backslashreplace")
