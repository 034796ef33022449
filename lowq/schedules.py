"""Schedules: their ticks, the policies for missed ticks, and their records in Redis.

A *tick* is a moment in a schedule's time table. cronsim finds the ticks of a cron string, in a time zone. The ticks of
an interval are its multiples since the beginning of 1970, UTC, so all nodes agree on them, and neither a restart nor a
late tick moves the following ones. All times are Unix time in seconds, by Redis's clock.

When the clocks change, cron strings with a fixed minute and hour follow Debian's cron: a tick in the skipped hour comes
right after it, and a tick in the repeated hour comes once. Others (``*`` or ``*/n`` as minute or hour) go by elapsed
time.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta, tzinfo
from difflib import get_close_matches
from functools import lru_cache
from itertools import islice, takewhile
from typing import Any, Literal, Self, TypeAlias, get_args
from urllib.parse import quote, unquote
from zoneinfo import ZoneInfo, available_timezones

from cronsim import CronSim

from lowq.codec import MAX_TIME
from lowq.errors import ConfigError
from lowq.store import untrusted

#: Which of the ticks that were missed are performed: the latest, all, or none.
Missed: TypeAlias = Literal["one", "all", "skip"]
MISSED: tuple[Missed, ...] = get_args(Missed)

#: Seconds that a schedule may be late with a tick under ``missed="skip"``; never less than two leases.
GRACE_SECONDS = 60.0
#: Ticks of one push, with ``missed="all"``.
TICKS_TOGETHER = 500
#: Missed ticks that are counted of one stretch of time.
MOST_COUNTED = 10_000
#: The most characters of a name.
MAX_NAME = 128
#: The least and the most seconds between two ticks.
_INTERVALS = (1.0, 366 * 86400.0)
#: Names of the machine's own zone, which differs from node to node.
_OF_THE_MACHINE = ("localtime", "Factory", "posixrules")
#: The prefix of the internal queue in which the schedules of a queue wait for their ticks.
_PREFIX = "lowq:schedules:"
#: A record that a push can name: without spaces, equals signs and the like.
_UNBROKEN = re.compile(rb"[^\s=>]+")
#: Characters that are not quoted in a record. A space or "=" would end an option of a push.
_SAFE = '{}":,[]*/+-_.@'


@dataclass(frozen=True, slots=True)
class Schedule:
    """A schedule, as declared above a worker."""

    name: str
    #: A cron string, or seconds.
    at: str | float
    #: The name of the time zone of a cron string; None: UTC.
    tz: str | None = None
    missed: Missed = "one"

    @property
    def text(self) -> str:
        """The time table, for people."""
        if isinstance(self.at, str):
            return f"{self.at} {self.tz or 'UTC'}"
        return f"every {self.at} s"

    def after(self, moment: float) -> Iterator[float]:
        """The ticks after a moment, one by one."""
        return _cron_after(self.at, self.tz, moment) if isinstance(self.at, str) else _multiples_after(self.at, moment)

    def next(self, moment: float) -> float:
        """The first tick after a moment; infinity if there is none."""
        return next(self.after(moment), math.inf)

    def latest(self, since: float, until: float) -> float | None:
        """The last tick after ``since`` and until ``until``; None: there is none. Looks back in growing steps, so it
        does not go through all of many ticks.
        """
        window = 60.0
        while True:
            begin = max(since, until - window)
            ticks = list(takewhile(until.__ge__, self.after(begin)))
            if ticks or begin <= since:
                return ticks[-1] if ticks else None
            window *= 2

    def due(self, since: float, now: float, grace: float) -> tuple[list[float], float]:
        """The ticks to push, of those after ``since``, and the moment up to which all ticks are settled then.
        ``grace``: seconds that a tick may be late under ``missed="skip"``.
        """
        if self.missed != "one":
            ticks: list[float] = []
            if self.missed == "skip":
                since = max(since, math.nextafter(now - grace, 0.0))
            for tick in self.after(since):
                if tick > now:
                    break
                ticks.append(tick)
                if len(ticks) == TICKS_TOGETHER:
                    return ticks, tick
            return ticks, max(now, since)
        latest = self.latest(since, now)
        return ([] if latest is None else [latest]), max(now, since)

    def count(self, since: float, until: float) -> int:
        """The number of ticks after ``since`` and until ``until``, ``MOST_COUNTED`` at most."""
        return sum(1 for _ in islice(takewhile(until.__ge__, self.after(since)), MOST_COUNTED)) if until > since else 0

    def shown(self) -> dict[str, Any]:
        """Its fields in Redis, besides the name."""
        return {"at": self.at, "tz": self.tz, "missed": self.missed}

    @classmethod
    def of(cls, name: str, said: Mapping[str, Any]) -> Self | None:
        """Decodes its fields in Redis, which may come from any version; None: this version can't read them."""
        try:
            found = _read(name, said.get("at"), said.get("tz"), said.get("missed"))
        except TypeError:  # a list, for example
            return None
        return None if found is None else cls(*found)


def grace_of(lease_ttl: float) -> float:
    """Seconds after which a tick counts as missed, and is skipped under ``missed="skip"``: at least the time that
    another node needs to take over.
    """
    return max(GRACE_SECONDS, 2 * lease_ttl)


# --- declared ---


def checked_schedule(whose: str, name: object, at: object, tz: object, missed: object) -> Schedule:
    """The schedule of a decoration.

    Raises:
        ConfigError: an argument is wrong; the message says what to write.
    """
    return Schedule(*_checked(f"{whose}: ", name, at, tz, missed))


@lru_cache(4096, typed=True)
def _read(name: object, at: object, tz: object, missed: object) -> tuple[str, str | float, Any, Missed] | None:
    # Cached, since the time tables of all nodes are read each time, and the check of a cron string takes 0.2 ms.
    try:
        return _checked("", name, at, tz, missed)
    except ConfigError:
        return None


def _checked(prefix: str, name: object, at: object, tz: object, missed: object) -> tuple[str, str | float, Any, Missed]:
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME or not name.isprintable():
        raise ConfigError(
            f"{prefix}name={name!r:.150} must be a text of 1 to {MAX_NAME} characters that can be printed"
        )
    if missed not in MISSED:
        raise ConfigError(
            f'{prefix}missed={missed!r:.100} must be "one" (the latest of the ticks that were missed is performed), '
            '"all" or "skip"'
        )
    if isinstance(at, str):
        zone = _checked_zone(prefix, tz)
        _check_cron(prefix, at, zone)
        return name, " ".join(at.split()), zone, missed
    seconds = _checked_interval(prefix, at)
    if tz is not None:
        raise ConfigError(
            f"{prefix}tz={tz!r:.100} is for cron strings; the ticks of every({at!r}) are the same in each time zone"
        )
    return name, seconds, None, missed


def _checked_interval(prefix: str, at: object) -> float:
    seconds = at.total_seconds() if isinstance(at, timedelta) else at
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise ConfigError(
            f'{prefix}every({at!r:.100}): write a cron string, such as every("0 8 * * 1"), or an interval, such as '
            "every(30), in seconds or as a timedelta"
        )
    least, most = _INTERVALS
    if not least <= seconds <= most:
        raise ConfigError(
            f"{prefix}every({at!r:.100}): an interval is {least:g} second at least, and {most / 86400:g} days at most; "
            "for something rarer write a cron string"
        )
    return int(seconds) if seconds == int(seconds) else float(seconds)


def _checked_zone(prefix: str, tz: object) -> str | None:
    if tz is None or tz is UTC:
        return None
    name = tz.key if isinstance(tz, ZoneInfo) else tz
    if not isinstance(name, str):
        raise ConfigError(f'{prefix}tz={tz!r:.100} must be the name of a time zone, such as tz="Europe/Berlin"')
    if name in _OF_THE_MACHINE:
        raise ConfigError(
            f'{prefix}tz={name!r} is another zone on each machine; write its name, such as "Europe/Berlin"'
        )
    try:
        _zone(name)
    except (LookupError, ValueError, OSError) as error:
        names = available_timezones()
        near = get_close_matches(name, names, 2, 0.5)
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else 'names are such as "Europe/Berlin"'
        if not names:
            hint = "this system has no time zones: install the package tzdata"
        raise ConfigError(f"{prefix}there is no time zone tz={name!r:.100}; {hint}") from error
    return name


def _check_cron(prefix: str, at: str, zone: str | None) -> None:
    example = 'such as "0 8 * * 1", Mondays at 8:00'
    fields = at.split()
    if len(fields) != 5:
        raise ConfigError(
            f"{prefix}every({at!r:.100}): a cron string has five fields, minute, hour, day of month, month, day of "
            f"week, {example}; this has {len(fields)}"
        )
    try:
        never = next(_cron_after(at, zone, 0.0), None) is None
    except Exception as error:  # cronsim's own errors, and others
        raise ConfigError(f"{prefix}every({at!r:.100}) is no cron string ({error}); write one {example}") from error
    if never:
        raise ConfigError(f"{prefix}every({at!r:.100}) never comes: no month has such a day")


# --- time tables ---


@lru_cache(64)
def _zone(name: str | None) -> tzinfo:
    return UTC if name in (None, "UTC") else ZoneInfo(name)  # the system may have no time zones


def _cron_after(at: str, zone: str | None, moment: float) -> Iterator[float]:
    found, before = _zone(zone), moment
    walk = _walk_time if any(field.startswith("*") for field in at.split()[:2]) else _walk_clock
    for tick in walk(at, found, math.floor(moment)):
        if tick > before:  # ticks in a skipped hour fall together
            before = tick
            yield tick


# cronsim counts without a time zone, on the clock on the wall. Its rules for time zones are right for whole hours only,
# and its ticks depend on the first moment.


def _walk_clock(at: str, zone: tzinfo, moment: int) -> Iterator[int]:
    """Ticks at fixed hours and minutes, from before the moment on."""
    # Ticks move by a day at most, as when Samoa skipped one.
    for wall in CronSim(at, _wall_at(zone, moment) - timedelta(hours=25)):
        tick = wall.replace(tzinfo=zone)
        while _wall_at(zone, math.floor(tick.timestamp())) != tick.replace(tzinfo=None):
            tick += timedelta(minutes=1)
        yield math.floor(tick.timestamp())


def _walk_time(at: str, zone: tzinfo, moment: int) -> Iterator[int]:
    """Ticks by elapsed time: whenever the clock on the wall shows one."""
    begin = _wall_at(zone, moment)
    while True:
        offset = _offset_at(zone, moment)
        for wall in CronSim(at, begin):
            tick = round((wall - _EPOCH).total_seconds() - offset)
            if _offset_at(zone, tick) != offset:
                break
            moment = tick
            yield tick
        else:
            return
        # The clock changes before that tick. Find that moment.
        while tick - moment > 1:
            middle = (moment + tick) // 2
            moment, tick = (middle, tick) if _offset_at(zone, middle) == offset else (moment, middle)
        moment = tick
        begin = _wall_at(zone, moment) - timedelta(minutes=1)


_EPOCH = datetime(1970, 1, 1)  # noqa: DTZ001  # as the clock on the wall


def _wall_at(zone: tzinfo, moment: int) -> datetime:
    return datetime.fromtimestamp(moment, zone).replace(tzinfo=None, fold=0)


def _offset_at(zone: tzinfo, moment: int) -> float:
    return datetime.fromtimestamp(moment, zone).utcoffset().total_seconds()  # type: ignore[union-attr]


def _multiples_after(interval: float, moment: float) -> Iterator[float]:
    # In whole microseconds, as multiples of 1.1 are inexact as floats.
    step = round(interval * 1e6)
    at = (math.floor(moment * 1e6) // step + 1) * step
    while True:
        tick = at // 1_000_000 if at % 1_000_000 == 0 else at / 1e6
        if tick > moment:
            yield tick
        at += step


# --- records in Redis ---


@dataclass(frozen=True, slots=True)
class Record:
    """The record of a schedule in Redis, in the shard that its ticks are pushed to. A push of ticks changes it, and
    only if it is still as it was read: so of several pushes of a tick, however late, all but the first are refused.
    """

    #: The current time table, as of `Schedule.shown`.
    table: Mapping[str, Any]
    #: All ticks until this moment are settled: pushed, or skipped.
    settled: float
    #: The last pushed tick.
    last: float | None = None
    #: When it was paused, and by whom.
    paused_at: float | None = None
    paused_by: str = ""
    #: The time since which no living node knows it.
    unknown_since: float | None = None
    #: The number of changes. No two states of a record are equal, so late calls are refused.
    version: int = 1
    #: How many ticks came when nobody could push them in time.
    missed: int = 0

    def schedule(self, name: str) -> Schedule | None:
        """The schedule of this record; None: this version can't read it."""
        return Schedule.of(name, self.table)

    def changed(self, **changes: Any) -> Self:
        """A copy with these values, as the next version."""
        return replace(self, **changes, version=self.version + 1)

    def encode(self) -> bytes:
        """As Redis keeps it: JSON, without spaces and equals signs."""
        values = {
            "table": dict(self.table),
            "settled": self.settled,
            "last": self.last,
            "paused_at": self.paused_at,
            "paused_by": self.paused_by or None,
            "unknown_since": self.unknown_since,
            "missed": self.missed or None,
            "version": self.version,
        }
        text = json.dumps({name: value for name, value in values.items() if value is not None}, separators=(",", ":"))
        return quote(text, safe=_SAFE).encode()

    @classmethod
    def decode(cls, data: bytes) -> Self | None:
        """Decodes a record; None: it can't be read."""
        if not _UNBROKEN.fullmatch(data):
            return None  # a push could not name it
        try:
            values = json.loads(unquote(data.decode()))
            table, paused_by, version = values["table"], values.get("paused_by") or "", values["version"]
            settled = _moment(values["settled"])
            others = {
                name: None if values.get(name) is None else _moment(values[name])
                for name in ("last", "paused_at", "unknown_since")
            }
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return None
        if not isinstance(table, dict) or not isinstance(paused_by, str) or not isinstance(version, int):
            return None
        missed = untrusted.whole(values.get("missed"), 0) or 0
        return cls(
            table, settled, others["last"], others["paused_at"], paused_by, others["unknown_since"], version, missed
        )


def _moment(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_TIME:
        raise ValueError(value)
    return value


# --- the internal queues ---


def schedules_queue(queue: str) -> str:
    """The internal queue in which the schedules of a queue wait for their ticks."""
    return _PREFIX + queue


def is_internal(queue: str) -> bool:
    """Whether the queue is an internal one."""
    return queue.startswith(_PREFIX)


def queue_of_schedules(queue: str) -> str:
    """The queue that an internal queue has the schedules of."""
    return queue.removeprefix(_PREFIX)
