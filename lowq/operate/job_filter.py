"""Filters of jobs: by state, a pattern of ids, bounds, contents, and the time of a snapshot."""

import dataclasses
import hashlib
import json
import math
import re
import secrets
import struct
from array import array
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any, Literal, TypedDict, get_args

from lowq.clock import seconds_of
from lowq.codec import MAX_ID_BYTES, MAX_PRIORITY
from lowq.errors import ConfigError
from lowq.job import Job, PayloadField, State, check_text
from lowq.observe.error_groups import FINGERPRINT, error_fingerprint
from lowq.options import seconds

#: Bytes of a pattern, and of its part from the first ``*`` on. Stars side by side are one; a ``*`` at the end is free.
MAX_PATTERN_BYTES, MAX_PATTERN_REST = 1024, 100
#: Stars of a pattern. Redis before 7.0.9 (and the embedded store) tries them all against each other: ``lua/scan.lua``
#: allows fewer there.
MAX_PATTERN_STARS = 4
#: Ids that one call looks at at most.
MAX_SCANNED = 1000
#: Steps of one call, each of 1 to 2 nanoseconds: 1 to 2 ms, and three calls go out together.
_STEPS = 1_000_000


def check_pattern(pattern: object) -> str:
    """A pattern of ids, or "" for None.

    Raises:
        ConfigError: it is none, or too expensive; the message names the limit.
    """
    if pattern is None or pattern == "":
        return ""
    if not isinstance(pattern, str):
        raise ConfigError(f"match={pattern!r:.100}: it is a pattern of ids, such as '42*'")
    pattern = re.sub(r"(?<!\\)\*{2,}", "*", pattern)
    try:
        encoded = encode_pattern(pattern)
    except UnicodeEncodeError:
        raise ConfigError(f"match={pattern!r:.100}: it is no valid Unicode text") from None
    rest, stars = _pattern_parts(encoded)[1], pattern.count("*")
    if len(encoded) > MAX_PATTERN_BYTES:
        raise ConfigError(
            f"match={pattern[:50]!r}... has {len(encoded)} bytes; a pattern has at most {MAX_PATTERN_BYTES}"
        )
    if rest > MAX_PATTERN_REST:
        raise ConfigError(
            f"match={pattern[:50]!r}... has {rest} bytes from its first * on; a pattern has at most {MAX_PATTERN_REST} "
            "there, as Redis tries them at every place of every id"
        )
    if stars > MAX_PATTERN_STARS:
        raise ConfigError(f"match={pattern[:50]!r} has {stars} stars; a pattern has at most {MAX_PATTERN_STARS}")
    return pattern


def encode_pattern(pattern: str) -> bytes:
    """The bytes of a pattern or an id, which need not be UTF-8."""
    return pattern.encode("utf-8", "surrogateescape")


def ids_per_call(pattern: str) -> int:
    """How many ids one call may look at, whatever their length and contents."""
    head, rest = _pattern_parts(encode_pattern(pattern))
    return max(min(_STEPS // (head + MAX_ID_BYTES * rest + 1), MAX_SCANNED), 1)


def _pattern_parts(pattern: bytes) -> tuple[int, int]:
    """Bytes before the first ``*``, and from there on, but for stars at the end."""
    head, _, rest = pattern.rstrip(b"*").partition(b"*")
    return len(head), len(rest) + 1 if rest else 0


_AGE = seconds(zero=True)
OrderBy = Literal["perform_at", "retry_count", "buried_at", "id"]
STATES: tuple[State, ...] = get_args(State)
#: "any": what is in flight, then what waits, then the morgue.
FilterState = Literal[State, "any"]
FILTER_STATES: tuple[FilterState, ...] = (*STATES, "any")
ORDERS: tuple[OrderBy, ...] = get_args(OrderBy)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The jobs that a bulk action would have been done to at one moment. Given as ``before``, it bounds the action."""

    #: Unix time, seconds, by Redis's clock.
    at: float
    #: The number of these jobs.
    total: int
    #: Fingerprints of those that were not due, sorted; None: they were too many to remember.
    _later: "array[int] | None"
    #: The key of the fingerprints: nobody can make up an id with the fingerprint of another.
    _salt: bytes = b""

    def __len__(self) -> int:
        """The number of jobs that it remembers one by one."""
        return len(self._later or ())

    @property
    def remembers(self) -> bool:
        """Whether it knows each job that was not due."""
        return self._later is not None

    def holds(self, prefix: str, perform_at: float, job_id: bytes) -> bool:
        """Whether this job was there, not due, with the same perform_at."""
        if self._later is None:
            return False
        wanted = fingerprint(self._salt, prefix, perform_at, job_id)
        index = bisect_left(self._later, wanted)
        return index < len(self._later) and self._later[index] == wanted

    def pack(self) -> bytes:
        """As bytes, for another process of the same byte order. Only for a snapshot that remembers."""
        head = json.dumps({"at": self.at, "total": self.total, "salt": self._salt.hex()})
        return head.encode() + b"\n" + (self._later or array("q")).tobytes()

    @classmethod
    def unpack(cls, raw: bytes) -> "Snapshot | None":
        """The counterpart of `pack`; None: the bytes are no snapshot."""
        head, _, body = raw.partition(b"\n")
        try:
            fields = json.loads(head)
            at, total, salt = float(fields["at"]), fields["total"], bytes.fromhex(fields["salt"])
        except (ValueError, TypeError, KeyError, RecursionError):
            return None
        if not math.isfinite(at) or type(total) is not int or total < 0 or len(body) % 8 or len(salt) > SALT:
            return None
        later = array("q")
        later.frombytes(body)
        return cls(at, total, later, salt) if all(map(int.__le__, later, later[1:])) else None


#: Bytes of the key of a snapshot's fingerprints.
SALT = 16
_TIME = struct.Struct("<d")


def new_salt() -> bytes:
    """A key for the fingerprints of a snapshot."""
    return secrets.token_bytes(SALT)


def fingerprint(salt: bytes, prefix: str, perform_at: float, job_id: bytes) -> int:
    """Of a job that is not due, with its time; 64 bits, the same in every process."""
    text = b"%b%b\0%b" % (_TIME.pack(perform_at), prefix.encode(), job_id)
    return int.from_bytes(hashlib.blake2b(text, digest_size=8, key=salt).digest(), "little", signed=True)


class FilterOptions(TypedDict, total=False):
    """The fields of a `JobFilter`, as keyword arguments."""

    state: FilterState | None
    match: str | None
    order_by: str | None
    reverse: bool
    min: float | str | None
    max: float | str | None
    before: float | Snapshot | None
    payload: str | None
    error: str | None
    error_group: str | None
    shard: int | None
    priority: int | None
    older_than: float | timedelta | None
    newer_than: float | timedelta | None


@dataclass(frozen=True)
class JobFilter:
    """A filter of the jobs of a queue, and the order in which they are listed. The default: all that wait.

    Raises:
        ConfigError: a field is invalid; the message names the allowed values.
    """

    #: None: all that wait, also new payloads of ids in flight; the jobs in flight themselves are "taken". "any", of
    #: lists: what is in flight, then what waits, then the morgue.
    state: FilterState | None = None
    #: A pattern of ids as Redis has it (``*``, ``?``, ``[a-c]``), of up to 1,024 bytes and four stars, and up to 100
    #: bytes from its first ``*`` on.
    match: str | None = None
    #: perform_at (the default), retry_count (-1 is fresh) or id; in the morgue buried_at (the default) or id. Jobs with
    #: equal values are ordered by the bytes of their ids.
    order_by: str | None = None
    reverse: bool = False
    #: Bounds of the value of that order, both included: Unix time in seconds, a retry_count, or an id.
    min: float | str | None = None
    max: float | str | None = None
    #: Of bulk actions: later jobs are left alone. Unix time in seconds, or a snapshot.
    before: float | Snapshot | None = None
    #: A field of a payload and its value, ``customer:7`` or ``order.customer:7``.
    payload: str | None = None
    #: A part of the error's text, in upper or lower case.
    error: str | None = None
    #: The fingerprint of an `ErrorGroup`: jobs whose last error is in it.
    error_group: str | None = None
    #: Within one queue: only this shard.
    shard: int | None = None
    #: Only waiting jobs of this priority.
    priority: int | None = None
    #: Jobs whose time, perform_at or buried_at, has passed for so long at least, in seconds or as a timedelta.
    older_than: float | timedelta | None = None
    #: Jobs whose time has passed for so long at most, or is to come.
    newer_than: float | timedelta | None = None

    @classmethod
    def of(cls, given: "JobFilter | FilterState | None", options: FilterOptions) -> "JobFilter":
        """The filter of a caller's arguments: a filter, a state, or neither, and single fields by their names.

        Raises:
            TypeError: an unknown field, or two states. ConfigError
        """
        if isinstance(given, JobFilter):
            return dataclasses.replace(given, **options) if options else given
        if given is None:
            return cls(**options)
        if "state" in options:
            raise TypeError(f"the state is given twice: {given!r} and state={options['state']!r}")
        return dataclasses.replace(cls(given), **options)

    def __post_init__(self) -> None:
        if self.state is not None and self.state not in FILTER_STATES:
            raise ConfigError(
                f"state={self.state!r}: it is one of {', '.join(FILTER_STATES)}, or None for all that wait"
            )
        in_morgue = self.state == "morgue"
        allowed: tuple[OrderBy, ...] = ("buried_at", "id") if in_morgue else ("perform_at", "retry_count", "id")
        if self.state == "any":
            allowed = ("perform_at",)
        if self.order not in allowed:
            whose = {"morgue": "jobs in the morgue", "any": "jobs in any state"}.get(
                self.state or "", "jobs that wait or are taken"
            )
            raise ConfigError(f"order_by={self.order_by!r}: {whose} are ordered by one of {', '.join(allowed)}")
        for name, bound in (("min", self.min), ("max", self.max)):
            self._check_bound(name, bound)
        before = self.before
        if before is not None and not isinstance(before, Snapshot):
            number = _number(before)
            if number is None or not math.isfinite(number):
                raise ConfigError(
                    f"before={_quote(before)}: it is a finite number, Unix time in seconds, or a snapshot"
                )
        _ = self.pattern, self.payload_field  # they are checked when they are first asked for
        if self.error is not None:
            check_text("error", self.error)
        group: object = self.error_group
        if group is not None and not (isinstance(group, str) and FINGERPRINT.fullmatch(group)):
            raise ConfigError(
                f"error_group={_quote(group)}: it is the fingerprint of a group of errors, 12 hexadecimal digits"
            )
        if self.shard is not None and (type(self.shard) is not int or self.shard < 0):
            raise ConfigError(f"shard={_quote(self.shard)}: it is the number of a shard, from 0 on")
        self._check_priority()
        for name in ("older_than", "newer_than"):
            age = _AGE.check("", name, getattr(self, name))
            if age is not None and not self.by_time:
                raise ConfigError(f"{name}={age!r}: it goes by the time, and not in the order of {self.order}")
            object.__setattr__(self, name, age)

    def _check_priority(self) -> None:
        priority: object = self.priority
        if priority is None:
            return
        if type(priority) is not int or not 0 <= priority <= MAX_PRIORITY:
            raise ConfigError(f"priority={_quote(priority)}: it is a whole number from 0, the most urgent, to 9")
        if self.state in ("taken", "morgue", "any"):
            where = {"morgue": "in the morgue", "taken": "in flight"}.get(self.state, "that do not wait")
            raise ConfigError(f"priority={priority}: jobs {where} have none; it is for jobs that wait")

    def aged(self, now: Callable[[], float]) -> "JobFilter":
        """The same with its ages as bounds of the time. ``now``: Unix time, seconds; called if there are any."""
        if self.older_than is None and self.newer_than is None:
            return self
        moment, older, newer = now(), seconds_of(self.older_than), seconds_of(self.newer_than)
        low = self.min if newer is None else max(self.low, moment - newer)
        high = self.max if older is None else min(self.high, moment - older)
        return dataclasses.replace(self, min=low, max=high, older_than=None, newer_than=None)

    def _check_bound(self, name: str, bound: object) -> None:
        if bound is None:
            return
        if self.order == "id":
            if not isinstance(bound, str):
                raise ConfigError(f"{name}={_quote(bound)}: with order_by='id' it is an id, a str")
            return
        number = _number(bound)
        if number is None or math.isnan(number):
            raise ConfigError(f"{name}={_quote(bound)}: it is a number, a bound of {self.order}")

    def given(self) -> dict[str, Any]:
        """The fields that are set, as values of JSON: of a snapshot the time."""
        values = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        if isinstance(self.before, Snapshot):
            values["before"] = self.before.at
        return {name: value for name, value in values.items() if value is not None and value is not False}

    @cached_property
    def order(self) -> str:
        """The value that jobs are ordered by: ``order_by``, or the default."""
        return ("buried_at" if self.state == "morgue" else "perform_at") if self.order_by is None else self.order_by

    @property
    def by_time(self) -> bool:
        """Whether the bounds are times."""
        return self.order in ("perform_at", "buried_at")

    @property
    def bounded(self) -> bool:
        return self.min is not None or self.max is not None

    @cached_property
    def pattern(self) -> str:
        """The pattern of ids, or "" for any."""
        return check_pattern(self.match)

    @cached_property
    def payload_field(self) -> PayloadField | None:
        return None if self.payload is None else PayloadField.parse(self.payload)

    @property
    def asks_for_contents(self) -> bool:
        """Whether it asks for the contents of jobs, so that each must be read."""
        return (
            self.payload is not None or self.asks_for_errors or (self.priority is not None and not self.walks_a_level)
        )

    @property
    def walks_a_level(self) -> bool:
        """Whether the jobs of its priority are found by their place, as they are sorted by it."""
        others = self.pattern or self.payload is not None or self.asks_for_errors
        return not others and self.order == "perform_at" and self.state in (None, "due", "scheduled")

    @property
    def asks_for_errors(self) -> bool:
        """Whether it admits only jobs that failed."""
        return self.error is not None or self.error_group is not None

    @property
    def scanned(self) -> bool:
        """Whether each page looks at every id."""
        return bool(self.pattern) or self.order == "id" or self.state in ("taken", "any")

    def admits(self, job: Job, redact: Callable[[Any], Any] | None = None) -> bool:
        """Whether the contents of the job match. ``redact``: returns the part of a payload that may be seen."""
        if self.error is not None and self.error.strip().casefold() not in (job.error or "").casefold():
            return False
        if self.error_group is not None and (job.error is None or error_fingerprint(job.error) != self.error_group):
            return False
        if self.priority not in (None, job.priority):
            return False
        if self.payload_field is None:
            return True
        seen = [payload if redact is None else redact(payload) for payload, _ in job.payloads]
        return any(map(self.payload_field.holds, seen))

    @cached_property
    def low(self) -> float:
        """The lower bound of the value of its order; none in the order by id."""
        return -math.inf if self.min is None or isinstance(self.min, str) else float(self.min)

    @cached_property
    def high(self) -> float:
        """The upper bound of the value of its order; none in the order by id."""
        return math.inf if self.max is None or isinstance(self.max, str) else float(self.max)

    @cached_property
    def _id_bounds(self) -> tuple[bytes, bytes | None]:
        low, high = (encode_pattern(bound) if isinstance(bound, str) else None for bound in (self.min, self.max))
        return low or b"", high

    def holds(self, value: float, job_id: bytes) -> bool:
        """Whether the bounds admit it."""
        if self.order != "id":
            return self.low <= value <= self.high
        low, high = self._id_bounds
        return low <= job_id and (high is None or job_id <= high)

    @property
    def when(self) -> str:
        """The side of now that its state is on, as the scripts call it."""
        return {"due": "due", "scheduled": "later", "retrying": "later"}.get(self.state or "", "")

    @property
    def past(self) -> str:
        """Whether the jobs of its state have failed, as the scripts call it."""
        return {"scheduled": "fresh", "retrying": "failed"}.get(self.state or "", "")

    @property
    def where(self) -> str:
        """The one of an id's jobs that it is about, as the script `fetch_jobs` calls it."""
        return self.state if self.state in ("taken", "morgue") else "waiting"


def _number(value: object) -> float | None:
    """The value as a float, NaN and infinities too; None: it is no number, or too large."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:  # an integer of more than 308 digits
        return None


def _quote(value: object) -> str:
    """The value in a message. Python refuses to write integers of more than 4,300 digits."""
    try:
        return f"{value!r:.100}"
    except ValueError:
        return "(an integer of very many digits)"
