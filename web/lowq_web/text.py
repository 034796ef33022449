"""Values as text: numbers, times, payloads. Nothing here is HTML; templates escape what comes from here."""

import json
import math
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote, unquote

from lowq.clock import ago, duration, relative_seconds
from lowq.logs import printable

__all__ = ["ago", "bytes_of", "decode_id", "duration", "encode_id", "exact", "iso", "last_line", "moment", "printable"]


def short(value: float) -> str:
    """``950``, ``1.2K``, ``12K``, ``3.4M``."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "K")):
        if abs(value) >= size * 0.9995:
            scaled = value / size
            return f"{scaled:.1f}{unit}".replace(".0", "") if abs(scaled) < 9.95 else f"{scaled:.0f}{unit}"
    return f"{value:.0f}"


def rate(value: float | None) -> str:
    """Per second: ``0``, ``0.02``, ``4.2``, ``1.2K``."""
    if value is None:
        return "-"
    if value == 0 or value >= 10:
        return short(value)
    return f"{value:.1f}" if value >= 1 else f"{value:.2g}"


def exact(value: float) -> str:
    """``1,234,567``; a float with its fraction."""
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3f}".rstrip("0").rstrip(".")


def bytes_of(value: float) -> str:
    """``1.5 MB``."""
    for size, unit in ((2**30, "GB"), (2**20, "MB"), (2**10, "kB")):
        if value >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value:.0f} B"


def iso(at: float) -> str:
    """``2026-11-21T12:00:00.123Z``; empty for a time that no calendar has."""
    try:
        return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    except (OverflowError, OSError, ValueError):
        return ""


def utc(at: float) -> str:
    """``2026-11-21 12:00:00.123 UTC``."""
    return iso(at).replace("T", " ").replace("Z", " UTC") or str(at)


def moment(text: str, now: float) -> float:
    """Parses Unix time in seconds, ISO 8601 (UTC when it names no zone), ``-2h`` or ``+30 min`` into Unix time.

    Raises:
        ValueError: it is none of these.
    """
    text = text.strip()
    away = relative_seconds(text)
    if away is not None:
        value = now + away
    else:
        try:
            value = float(text)
        except ValueError:
            parsed = datetime.fromisoformat(text)
            value = (parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).timestamp()
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def score(value: float) -> str:
    """A score as it was given, as far as a float has it: 7, not 7.0."""
    return str(int(value)) if abs(value) <= 2**53 and value == int(value) else repr(value)


def payload(value: Any, *, indent: int | None = None) -> str:
    """A payload as JSON, readable or in one line."""
    try:
        separators = (",", ": ") if indent else (", ", ": ")
        return json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, default=str)
    except (TypeError, ValueError, RecursionError):
        return _repr(value)


def _repr(value: Any) -> str:
    try:
        return repr(value)
    except RecursionError:
        return "nested too deeply to be shown"


def preview(value: Any, length: int) -> str:
    """The beginning of a payload as JSON in one line. Of a large one hardly more than that is encoded."""
    found, size = [], 0
    try:
        for piece in json.JSONEncoder(ensure_ascii=False, separators=(", ", ": "), default=str).iterencode(value):
            found.append(piece if len(piece) <= length else piece[: length + 1])
            size += len(found[-1])
            if size > length:
                break
    except (TypeError, ValueError, RecursionError):
        return cut(_repr(value), length)
    return cut("".join(found), length)


def cut(text: str, length: int) -> str:
    """The text, or its beginning."""
    return text if len(text) <= length else text[: length - 1] + "…"


def last_line(error: str | None) -> str:
    """The last line of a traceback, which has the message."""
    lines = (error or "").strip().splitlines()
    return lines[-1].strip() if lines else ""


# --- ids in forms and addresses ------------------------------------------------------------------------------
# Browsers change line ends and invalid text in form fields, so ids are escaped once more there.


def encode_id(job_id: str) -> str:
    """An id as a form field carries it."""
    return quote(job_id, safe="", errors="surrogateescape")


def decode_id(text: str) -> str:
    """The counterpart of `encode_id`."""
    return unquote(text, errors="surrogateescape")
