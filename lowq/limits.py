"""Limits over all nodes: jobs that begin in a period, and batches that run at once."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from lowq.errors import ConfigError
from lowq.store.keys import is_queue_name

#: Bounds of `Rate.per`, in seconds.
_PER = (0.01, 31 * 86400.0)
#: The most permits of a limit.
_MOST = 1_000_000
#: The longest time, in seconds, for which a limit is put off.
MAX_DEFER = 31 * 86400.0
#: Whether limits around calls hold: not in `lowq.testing`.
limits_apply: ContextVar[bool] = ContextVar("lowq_limits_apply", default=True)


@contextmanager
def no_limits() -> Iterator[None]:
    """Within the block, limits around calls let everybody in, and ask nobody."""
    token = limits_apply.set(False)
    try:
        yield
    finally:
        limits_apply.reset(token)


#: The most limits of a worker: each is asked before a batch may begin.
MAX_LIMITS = 8


@dataclass(frozen=True, slots=True)
class Rate:
    """At most ``limit`` jobs begin in any period of ``per`` seconds, over all nodes.

    ``per``: seconds, or a timedelta, from 0.01 s to 31 days. ``key``: its name; workers with the same key share the
    limit. By default each queue has its own. ``strict``: a job counts until ``per`` after it has ended, so no period
    has more, wherever it is measured.

    Raises:
        ConfigError: an argument is out of bounds.
    """

    limit: int
    per: float | timedelta = 1.0
    key: str | None = None
    strict: bool = False

    def __post_init__(self) -> None:
        _check("Rate", self.limit, self.key)
        if type(self.strict) is not bool:
            raise ConfigError(f"lowq.Rate({self.limit}, strict={self.strict!r:.100}): strict is True or False")
        seconds: object = self.per.total_seconds() if isinstance(self.per, timedelta) else self.per
        least, most = _PER
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not least <= seconds <= most:
            raise ConfigError(
                f"lowq.Rate({self.limit}, per={self.per!r:.100}): per must be seconds, or a timedelta, from {least} s "
                "to 31 days"
            )
        object.__setattr__(self, "per", float(seconds))

    @property
    def seconds(self) -> float:
        """``per`` in seconds."""
        assert isinstance(self.per, float)
        return self.per

    def name(self, queue: str) -> str:
        """Its name in Redis, as a limit of that queue. Two rates of a queue differ in ``per``."""
        return f"rate:{self.seconds!r}:{self.key or queue}"

    def shown(self) -> dict[str, Any]:
        """Its fields in the registry."""
        more = ({"key": self.key} if self.key else {}) | ({"strict": True} if self.strict else {})
        return {"rate": self.limit, "per": self.seconds} | more


@dataclass(frozen=True, slots=True)
class Concurrency:
    """At most ``limit`` batches are performed at once, over all nodes. With ``batch_size=1``, the default, a batch is
    one job. ``key``: as of `Rate`.

    Raises:
        ConfigError: an argument is out of bounds.
    """

    limit: int
    key: str | None = None

    def __post_init__(self) -> None:
        _check("Concurrency", self.limit, self.key)

    def name(self, queue: str) -> str:
        """Its name in Redis, as a limit of that queue."""
        return f"concurrency:{self.key or queue}"

    def shown(self) -> dict[str, Any]:
        """Its fields in the registry."""
        return {"concurrency": self.limit} | ({"key": self.key} if self.key else {})


#: What a limit allows.
LimitRule = Rate | Concurrency


def _check(kind: str, limit: object, key: object) -> None:
    if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= _MOST:
        raise ConfigError(f"lowq.{kind}({limit!r:.100}): the limit must be a whole number from 1 to {_MOST:,}")
    if key is not None and not is_queue_name(key):
        raise ConfigError(
            f"lowq.{kind}({limit}, key={key!r:.150}): a key is a text of 1 to 128 characters, without braces, spaces "
            "and control characters"
        )


def checked_limits(prefix: str, name: str, value: object, key: str = "") -> tuple[LimitRule, ...]:
    """The option ``limit`` of a worker: None, a limit, or several. ``key``: of those without one.

    Raises:
        ConfigError: it is something else.
    """
    if value is None:
        return ()
    limits = tuple(value) if isinstance(value, list | tuple) else (value,)
    for limit in limits:
        if not isinstance(limit, LimitRule):
            raise ConfigError(
                f"{prefix}{name}={value!r:.100} must be a lowq.Rate, such as lowq.Rate(100, per=1), a "
                "lowq.Concurrency, such as lowq.Concurrency(5), or a list of them"
            )
    if len(limits) > MAX_LIMITS:
        raise ConfigError(f"{prefix}{name} has {len(limits)} limits; a worker has at most {MAX_LIMITS}")
    names = [limit.name(key) for limit in limits]
    for limit in limits:
        if names.count(limit.name(key)) > 1:
            raise ConfigError(f"{prefix}{name} says twice the same, {limit!r}: keep one, or give them different keys")
    return limits


def registered_limits(entry: object) -> list[LimitRule]:
    """The limits in an entry of the registry, which may come from any version: unreadable ones are left out."""
    found: list[LimitRule] = []
    for shown in entry if isinstance(entry, Sequence) else ():
        try:
            if "rate" in shown:
                found.append(Rate(shown["rate"], shown["per"], shown.get("key"), bool(shown.get("strict"))))
            else:
                found.append(Concurrency(shown["concurrency"], shown.get("key")))
        except (ConfigError, LookupError, TypeError, AttributeError):
            continue
    return found
