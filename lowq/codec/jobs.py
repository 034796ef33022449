"""Jobs as their push script gets them: validated and encoded, with their ids, scores, times and priorities."""

import math
import os
import secrets
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from difflib import get_close_matches
from operator import methodcaller
from typing import Any, NoReturn
from uuid import UUID

from lowq.clock import Lock
from lowq.codec.payloads import APPENDED
from lowq.codec.payloads import dump_payload as _dump_payload  # where a parameter has its name
from lowq.errors import JobError, PayloadError
from lowq.guesses import JOB_FIELDS, hint_for
from lowq.job import JobDict

#: Longest id, in bytes of UTF-8.
MAX_ID_BYTES = 512
#: Whole numbers beyond this can't be told apart as the floats that Redis keeps as scores.
MAX_SCORE = 2**53
#: Smaller numbers are delays that were given as a time by mistake (Unix time, seconds: September 2001).
EARLIEST_TIME = 1e9
#: Larger numbers are milliseconds by mistake (Unix time, seconds: the year 5138).
LATEST_TIME = 1e11
#: The least urgent priority.
MAX_PRIORITY = 9
#: The latest time that is kept (Unix time, seconds: the year 2242), and the longest delay. Later times count as this,
#: and mean "never".
MAX_TIME = 2**33 - 1

_FIELDS = frozenset(JobDict.__annotations__)

#: A job as its push script gets it: id, payload, score (``b""``: the clock of the shard), perform_at (``b""``:
#: now; ``b"+n"``: in n seconds). A bare tuple: it is made once per job pushed.
PlainJob = tuple[bytes, bytes, bytes, bytes]
#: The same with ttl (``b""``: it never expires) and priority (``b""``: 0), of jobs that have others than their queue.
EncodedJob = PlainJob | tuple[bytes, bytes, bytes, bytes, bytes, bytes]
#: ttl and priority.
Rest = tuple[bytes, bytes]
NO_REST: Rest = (b"", b"")


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
    """As `encode_id`, for ids that are in Redis already. Other programs may have written any bytes: they are shown, and
    found again, by ``surrogateescape``.

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


#: An id as people and handlers get it: bytes that are no UTF-8 are decoded by ``surrogateescape``.
decode_id: Callable[[bytes], str] = methodcaller("decode", "utf-8", "surrogateescape")


class _FreshIds:
    """UUIDv7 (RFC 9562), each later than all that this process made before: 48 bits of milliseconds of Unix time, 12 of
    the fraction of the millisecond (or one more than the last one had), and 62 random ones. Safe for threads.
    """

    def __init__(self) -> None:
        self.reset()
        self._last = 0

    def reset(self) -> None:
        """Makes a new lock in a forked child, where the thread that may hold the old one does not exist."""
        self._lock = Lock()  # reentrant: a signal handler may put

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


# --- scores, times and priorities ---


def _finite(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise JobError(f"{name} {value!r:.100} is of type {type(value).__name__}; it must be a number")
    try:
        if math.isfinite(value):
            # Plain numbers: Redis gets their repr, and that of a subclass may be anything.
            return int(value) if isinstance(value, int) else float(value)
    except OverflowError:
        raise JobError(f"{name} is a number of hundreds of digits; it must be a finite number") from None
    raise JobError(f"{name} {value!r:.100} is not a finite number")


def _encode_score(value: object) -> bytes:
    score = _finite("score", value)
    if abs(score) > MAX_SCORE and isinstance(score, int):
        raise JobError(
            f"score {score} is beyond 2**53: two such scores could collapse into one. "
            "Use a smaller version number, or seconds instead of nanoseconds"
        )
    return repr(score).encode()


def score_reader(
    score: str | Callable[[Any], Any], whose: str, load: Callable[[bytes], Any] | None
) -> Callable[[Any, bytes], bytes]:
    """Makes a function that reads the score of a payload: of the payload as it was given, and encoded. ``score``: a
    field, or a function of the payload. ``load``: decodes payloads of a type, if they were given as mappings.

    The function raises `PayloadError`.
    """

    def read(payload: Any, encoded: bytes) -> bytes:
        if load is not None and isinstance(payload, Mapping):
            payload = load(encoded)
        try:
            if not isinstance(score, str):
                value = score(payload)
            else:
                value = payload[score] if isinstance(payload, Mapping) else getattr(payload, score)
            return _encode_score(value)
        except Exception as error:
            if isinstance(error, JobError):
                why = f"gives no score: {error}"
            elif isinstance(score, str) and isinstance(error, KeyError | AttributeError):
                why = "is missing"
            else:
                why = f"raised {error!r:.200}"
            what = f"the field {score!r}" if isinstance(score, str) else f"the function {score!r:.100}"
            raise PayloadError(
                f"{what}, from which {whose} takes the score of a payload, {why}; put that right, or push it with "
                "score=..."
            ) from error

    return read


def _encode_time(name: str, value: object) -> bytes:
    if isinstance(value, datetime):
        if value.utcoffset() is None:
            raise JobError(f"{name} {value!r} has no time zone; give an aware datetime, such as datetime.now(UTC)")
        return repr(min(value.timestamp(), MAX_TIME)).encode()
    moment = _finite(name, value)
    if moment < EARLIEST_TIME:
        raise JobError(
            f"{name}={moment!r} is a Unix time long ago; to run in {moment!r} seconds, give delay={moment!r} instead"
        )
    if moment > LATEST_TIME:
        raise JobError(f"{name}={moment!r} is beyond the year 5000; it is Unix time in seconds, not milliseconds")
    return repr(min(moment, MAX_TIME)).encode()


def _seconds(name: str, value: object) -> float:
    if isinstance(value, timedelta):  # whose unit is beyond doubt, so its largest is "never" as well
        return value.total_seconds()
    seconds = _finite(name, value)
    if seconds > LATEST_TIME - EARLIEST_TIME:
        raise JobError(f"{name}={value!r} is thousands of years; it is given in seconds, or as a timedelta")
    return seconds


def delay_seconds(value: object) -> float:
    """Seconds from a number or a timedelta; negative ones count as 0, and larger ones than `MAX_TIME` as that.

    Raises:
        JobError: it is neither, or not finite, or a number too large for seconds.
    """
    return min(max(_seconds("delay", value), 0), MAX_TIME)


def future_delay(value: object) -> float:
    """As `delay_seconds`, but a negative delay is refused.

    Raises:
        JobError
    """
    seconds = _seconds("delay", value)
    if seconds < 0:
        raise JobError(f"delay={value!r:.100} is negative; write max(delay, 0) for a time that may have passed")
    return min(seconds, MAX_TIME)


def encode_ttl(value: object) -> bytes:
    """A ttl in seconds as the push script takes it; None: there is none.

    Raises:
        JobError: it is no length of time of more than 0.
    """
    if value is None:
        return b""
    seconds = _seconds("ttl", value)
    if seconds <= 0:
        raise JobError(f"ttl={value!r} is not more than 0; to leave a job out, don't push it. None: it never expires")
    return repr(min(seconds, MAX_TIME)).encode()


def encode_priority(value: object) -> bytes:
    """A priority as the push script takes it.

    Raises:
        JobError: it is no whole number from 0 to 9.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_PRIORITY:
        raise JobError(f"priority={value!r:.100} must be a whole number from 0, the most urgent, to {MAX_PRIORITY}")
    return b"%d" % value if value else b""


def rest_words(rest: Rest) -> bytes:
    """The words of a push call for all jobs without a ttl or priority of their own."""
    ttl, priority = rest
    return (b" ttl=" + ttl if ttl else b"") + (b" priority=" + priority if priority else b"")


def encode_job(
    job: Mapping[str, Any],
    dump_payload: Callable[[Any], bytes],
    max_payload_bytes: int,
    rest: Rest = NO_REST,
    *,
    is_typed: bool = False,
    read_score: Callable[[Any, bytes], bytes] | None = None,
) -> EncodedJob:
    """Validates a job and encodes it for the push script. ``rest``: the queue's ttl and priority, which are left out of
    the encoded job, as `rest_words` has them. ``is_typed``: a job must have a payload. ``read_score``: reads the score
    of a job without one, see `score_reader`.

    Raises:
        JobError, PayloadError: the message names the field and the id.
    """
    try:
        given_id = job["id"]
    except (KeyError, TypeError) as error:
        raise _why_no_id(job, error) from None
    kind = type(given_id)
    if kind is str and given_id.isascii() and 0 < len(given_id) <= MAX_ID_BYTES:
        job_id = given_id.encode()
    else:
        job_id = b"%d" % given_id if kind is int and abs(given_id) <= MAX_SCORE else encode_id(given_id)
    score = perform_at = b""
    payload = b'""'
    known = 1
    default = rest
    try:
        if "payload" in job:
            known += 1
            try:
                payload = dump_payload(job["payload"])
            except JobError:
                raise
            except Exception as error:
                _refuse_unencoded(error, is_own=is_typed or dump_payload is _dump_payload)
            given: object = payload
            if not isinstance(given, bytes) or given[:3] == APPENDED:
                raise PayloadError(
                    f"dump_payload gave {given!r:.100}; it must give bytes, without {APPENDED!r} in front"
                )
            if len(given) > max_payload_bytes:
                raise PayloadError(
                    f"the payload has {len(given)} bytes encoded; max_payload_bytes is {max_payload_bytes}. "
                    "Push a reference instead, such as a URL or a row's key"
                )
        elif is_typed:
            _refuse_unknown(job)  # such as a misspelt payload
            payload = dump_payload("")
        if len(job) > known:
            score, perform_at, rest = _encode_order(job, known, rest)
        if read_score is not None and not score:
            score = read_score(job.get("payload", ""), payload)
    except JobError as error:
        raise type(error)(f"job {job['id']!r:.100}: {error}") from error.__cause__
    return (job_id, payload, score, perform_at) if rest == default else (job_id, payload, score, perform_at, *rest)


def _refuse_unencoded(error: Exception, *, is_own: bool) -> NoReturn:
    """``is_own``: by lowq's own encoding, which raises only PayloadErrors: the error is a signal handler's."""
    if is_own:
        raise error
    raise PayloadError(f"the payload can't be encoded: {error!r:.200}") from error


def _why_no_id(job: object, error: Exception) -> Exception:
    if not isinstance(job, Mapping):
        return JobError(f"{job!r:.100} is of type {type(job).__name__}, not a mapping such as {{'id': 42}}")
    if isinstance(error, KeyError):
        return JobError(f"a job has no id: {dict(job)!r:.200}; every job needs one, such as {{'id': 42}}")
    return error


def _encode_order(job: Mapping[str, Any], known: int, rest: Rest) -> tuple[bytes, bytes, Rest]:
    """The score, the time and the rest of a job with further fields. ``known``: fields that were read before."""
    score = perform_at = b""
    if "ttl" in job:
        known += 1
        rest = encode_ttl(job["ttl"]), rest[1]
    if "priority" in job:
        known += 1
        rest = rest[0], encode_priority(job["priority"])
    if "score" in job:
        known += 1
        score = _encode_score(job["score"])
    for name, encode in _TIMES:
        if name in job:
            known += 1
            if perform_at:
                raise JobError("perform_at, perform_in and delay are three ways to say one thing: give one")
            perform_at = encode(name, job[name])
    if len(job) > known:
        _refuse_unknown(job)
    if "ttl" in job and "delay" in job and rest[0] and float(rest[0]) <= float(perform_at[1:]):
        raise JobError(
            f"ttl={job['ttl']!r:.100} is over before delay={job['delay']!r:.100} is: it would never be performed"
        )
    return score, perform_at, rest


_TIMES: tuple[tuple[str, Callable[[str, object], bytes]], ...] = (
    ("perform_at", _encode_time),
    ("perform_in", _encode_time),
    ("delay", lambda _, value: b"+" + repr(future_delay(value)).encode()),
)


def _refuse_unknown(job: Mapping[str, Any]) -> None:
    for name in job:
        if name not in _FIELDS:
            near = next(iter(get_close_matches(str(name), _FIELDS, 1)), None)
            hint = hint_for(JOB_FIELDS, name, sorted(_FIELDS), near, "a job has")
            raise JobError(f"unknown field {name!r}; {hint}")
