"""Ids as Redis keeps them, and fresh ones for payloads that belong to no entity."""

import os
import secrets
import threading
import time
from uuid import UUID

from lowq.errors import JobError

#: Longest id, in bytes of UTF-8.
MAX_ID_BYTES = 512


def encode_id(job_id: object) -> bytes:
    """An id as Redis keeps it.

    Raises:
        JobError: it is no str, int or UUID, or empty, or longer than ``MAX_ID_BYTES``.
    """
    if isinstance(job_id, str):
        text = job_id
    elif isinstance(job_id, bool) or not isinstance(job_id, int | UUID):
        raise JobError(f"id {job_id!r:.100} is of type {type(job_id).__name__}; an id is a str, an int or a UUID")
    else:
        try:
            # int: or the str of an enum's member would be its name.
            text = str(int(job_id) if isinstance(job_id, int) else job_id)
        except ValueError:
            raise JobError("an id is a number of thousands of digits; an id has 1 to 512 bytes") from None
    try:
        encoded = text.encode()
    except UnicodeEncodeError as error:
        raise JobError(f"id {text!r:.100} is no valid Unicode text: {error}") from None
    if not encoded:
        raise JobError("an id is empty; an id has 1 to 512 bytes")
    if len(encoded) > MAX_ID_BYTES:
        raise JobError(f"id {text[:40]!r}... has {len(encoded)} bytes; an id has 1 to {MAX_ID_BYTES} bytes")
    return encoded


def lookup_id(job_id: object) -> bytes:
    """As `encode_id`, for ids that are in Redis already. A foreign producer may have written any bytes: they are shown
    as ``surrogateescape`` has it, and found again by that.

    Raises:
        JobError: as `encode_id`.
    """
    if isinstance(job_id, str) and not job_id.isascii():
        try:
            encoded = job_id.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:
            return encode_id(job_id)
        if len(encoded) <= MAX_ID_BYTES:
            return encoded
    return encode_id(job_id)


def decode_id(raw: bytes) -> str:
    """An id as Redis has it, for people and handlers: what is no UTF-8 is shown as ``surrogateescape`` has it."""
    return raw.decode("utf-8", "surrogateescape")


class _FreshIds:
    """UUIDv7 (RFC 9562), each later than all that this process made before: 48 bits of milliseconds of Unix time, 12 of
    the fraction of the millisecond (or one more than the last one had), and 62 random ones. Safe for threads.
    """

    def __init__(self) -> None:
        self.reset()
        self._last = 0

    def reset(self) -> None:
        """A lock that nobody has: in a forked child, where whoever had it is not there."""
        self._lock = threading.RLock()  # reentrant: a signal handler may put

    def __call__(self) -> UUID:
        milliseconds, nanoseconds = divmod(time.time_ns(), 1_000_000)
        moment = milliseconds << 12 | nanoseconds * 4096 // 1_000_000
        with self._lock:
            moment = self._last = max(moment, self._last + 1)
        high = (moment >> 12) << 16 | 7 << 12 | moment & 0xFFF
        return UUID(int=high << 64 | 2 << 62 | secrets.randbits(62))


#: A fresh id.
fresh_id = _FreshIds()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=fresh_id.reset)
