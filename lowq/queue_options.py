"""The options of a queue: what its worker declares, or ``app.queue(...)`` where there is none.

They are checked here, made plain values, and kept in the registry, where whoever only knows the queue's name finds
them.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any, Literal, Self, TypeAlias, TypedDict

from lowq import drivers
from lowq.codec import MAX_TIME, Rest, encode_priority, encode_ttl, rest_words
from lowq.errors import ConfigError, LowqError
from lowq.retry import MAX_RETRY_COUNT
from lowq.store import DURABILITIES, Durability
from lowq.store.keys import MAX_SHARDS

#: A merge policy of an application: from the payloads of an id, oldest first, to those that are to be handed over.
MergeFunction: TypeAlias = Callable[[list[Any]], list[Any]]
#: Gives the score of a payload.
ScoreFunction: TypeAlias = Callable[[Any], float]
#: How Redis merges payloads of an id.
MergePolicy = Literal["collapse", "append", "latest"]

#: Without ``max_wait`` an id that is debounced runs after so many times ``debounce`` at the latest.
DEBOUNCES_WAITED = 10


class HandleOptions(TypedDict, total=False):
    """The options of ``app.queue(...)`` besides ``shards_count``."""

    #: Payloads of one id handed over at once (1000).
    max_payloads: int
    #: Retries before the oldest payload is buried (25).
    max_retry_count: int
    #: Deaths of its process, and batches that exceeded ttr, before a job is buried as poison (3).
    max_crash_count: int
    #: Seconds, or a timedelta, after which ``perform``, or a job taken by hand, is given up and its jobs are performed
    #: again (None: never).
    ttr: float | timedelta | None
    #: Seconds, or a timedelta, after which a payload that was not performed is removed; of jobs that say none (None:
    #: never).
    ttl: float | timedelta | None
    #: 0, the most urgent, to 9; of jobs that say none (0).
    priority: int
    #: Ids that wait or are taken, at most; None: any number (None).
    capacity: int | None
    #: How payloads of an id are merged: ``"collapse"``, ``"append"``, ``"latest"``, or a function of the payloads that
    #: returns those to be handed over (``"collapse"``).
    merge: str | MergeFunction
    #: The field of a payload, or a function of it, that gives the score of one that is pushed without: ``"version"``
    #: (None: the time).
    score: str | ScoreFunction | None
    #: Seconds, or a timedelta: a fresh id runs when nothing came for it for so long (None: at once).
    debounce: float | timedelta | None
    #: Seconds, or a timedelta, after its first payload in which a debounced id runs at the latest (None: 10 times
    #: ``debounce``).
    max_wait: float | timedelta | None
    #: Seconds, or a timedelta, after which a buried job is removed (None: never).
    morgue_ttl: float | timedelta | None
    #: Jobs in the morgue, at most: the oldest are removed; None: any number (None).
    morgue_max: int | None
    #: What a push waits for: ``"none"``, only Redis's answer; ``"replicated"``, that a replica has it, too;
    #: ``"fsynced"``, that it is on the server's disk (``"none"``).
    durability: Durability


class DeclaredOptions(HandleOptions, total=False):
    """The options of a queue. A worker has these as well."""

    #: Shards of the queue, fixed by the first use of the queue (5).
    shards_count: int


#: Least and largest value of whole-number options. A reply of Redis's Lua can hold about 8,000 items.
RANGES: Mapping[str, tuple[int, int]] = {
    "shards_count": (1, MAX_SHARDS),
    "batch_size": (1, 500),
    "max_retry_count": (0, 2**31),
    "max_payloads": (1, 3000),
    "max_crash_count": (1, 2**31),
    "max_threads": (1, 2**31),
    "priority": (0, 9),
    "capacity": (1, 2**31),
    "morgue_max": (1, 2**31),
}
#: Those of them that may be None.
OPTIONAL = ("max_threads", "capacity", "morgue_max")
_POLICIES: tuple[MergePolicy, ...] = ("collapse", "append", "latest")


@dataclass(frozen=True, slots=True)
class QueueOptions:
    """The options of a queue, as plain values. Times are seconds. The defaults are those of a queue that says none."""

    queue_name: str
    shards_count: int
    max_payloads: int = 1000
    max_retry_count: int = MAX_RETRY_COUNT
    max_crash_count: int = 3
    ttr: float | None = None
    ttl: float | None = None
    priority: int = 0
    capacity: int | None = None
    merge: MergePolicy | MergeFunction = "collapse"
    score: str | ScoreFunction | None = None
    debounce: float | None = None
    max_wait: float | None = None
    morgue_ttl: float | None = None
    morgue_max: int | None = None
    durability: Durability = "none"

    def declared(self, options: Mapping[str, Any], whose: str = "") -> Self:
        """With these, which were checked one by one. ``whose``: for the message.

        Raises:
            ConfigError: they contradict each other.
        """
        made = type(self)(**{name: options.get(name, getattr(self, name)) for name in FIELDS})
        check_waits(whose or f"queue {self.queue_name!r}", made.debounce, made.max_wait)
        return made

    def registered(self, options: Mapping[str, Any]) -> Self:
        """With those of an entry of the registry, which may come from any version: what can't be read is left out."""
        found: dict[str, Any] = {}
        for name in options.keys() & FIELDS.keys() - {"queue_name", "shards_count"}:
            try:
                found[name] = checked("", name, options[name])
            except ConfigError:
                continue
        try:
            return self.declared(found)
        except ConfigError:
            return self.declared({**found, "max_wait": None})

    def shown(self) -> dict[str, Any]:
        """Those that differ from the defaults, as the registry keeps them: it is sent with every heartbeat. A function
        can't be kept there.
        """
        values = {name: getattr(self, name) for name in FIELDS if name not in ("queue_name", "shards_count")}
        return {name: value for name, value in values.items() if value != FIELDS[name] and not callable(value)}

    @property
    def policy(self) -> MergePolicy:
        """How Redis merges."""
        return "collapse" if callable(self.merge) else self.merge

    def push_words(self) -> bytes:
        """What a push tells Redis of them; nothing of a queue that has none which concern pushes."""
        words = "" if self.policy == "collapse" else f" merge={self.policy}"
        if self.debounce is not None:
            words += f" debounce={self.debounce!r} max_wait={self.longest_wait!r}"
        if self.shard_capacity is not None:
            words += f" capacity={self.shard_capacity}"
        return words.encode() + rest_words(self.rest)

    @property
    def rest(self) -> Rest:
        """ttl and priority of jobs that say none, encoded."""
        return encode_ttl(self.ttl), encode_priority(self.priority)

    @property
    def merge_function(self) -> MergeFunction | None:
        """What is applied to payloads before they are handed over."""
        return self.merge if callable(self.merge) else None

    @property
    def longest_wait(self) -> float | None:
        """Seconds after its first payload in which a debounced id runs at the latest."""
        if self.debounce is None:
            return None
        return min(self.debounce * DEBOUNCES_WAITED, MAX_TIME) if self.max_wait is None else self.max_wait

    @property
    def shard_capacity(self) -> int | None:
        """``capacity`` of one shard."""
        return None if self.capacity is None else -(-self.capacity // self.shards_count)


#: The fields of `QueueOptions`, with their defaults.
FIELDS: Mapping[str, Any] = {field.name: field.default for field in fields(QueueOptions)}


def checked_options(whose: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """What ``app.queue`` was given, as plain values.

    Raises:
        ConfigError: an option that there isn't, or a value that makes no sense.
    """
    for name in options:
        if name not in DeclaredOptions.__annotations__:
            raise ConfigError(
                f"{whose}: unknown option {name!r}; options are {', '.join(DeclaredOptions.__annotations__)}"
            )
    return {name: checked(whose, name, value) for name, value in options.items()}


def checked(whose: str, name: str, value: Any) -> Any:
    """An option as a plain value.

    Raises:
        ConfigError: it is none; the message names it.
    """
    if name in RANGES:
        if value is not None or name not in OPTIONAL:
            check_whole(whose, name, value)
        return value
    if name == "merge":
        return _checked_merge(whose, value)
    if name == "score":
        return _checked_score(whose, value)
    if name == "durability":
        return checked_durability(value, f"{whose}: ")
    check_time(whose, name, value)
    return seconds_of(value)


def check_whole(whose: str, name: str, value: object) -> None:
    """A whole-number option.

    Raises:
        ConfigError: it is out of range, or no whole number.
    """
    least, most = RANGES[name]
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ConfigError(f"{whose}: {name}={value!r:.100} must be a whole number from {least} to {most}")


def checked_durability(value: object, whose: str = "") -> Durability:
    """What a push waits for.

    Raises:
        ConfigError: it is none of `DURABILITIES`.
    """
    for durability in DURABILITIES:
        if value == durability:
            return durability
    raise ConfigError(f"{whose}durability={value!r:.100} must be one of {', '.join(map(repr, DURABILITIES))}")


def check_time(whose: str, name: str, value: object) -> None:
    """A length of time, or None.

    Raises:
        ConfigError: it is none, or not more than 0.
    """
    if value is None:
        return
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds <= MAX_TIME:
        raise ConfigError(
            f"{whose}: {name}={value!r:.100} must be seconds, or a timedelta, of more than 0, and under 272 years; "
            "or None"
        )


def seconds_of(value: float | timedelta | None) -> float | None:
    """A length of time in seconds."""
    return value.total_seconds() if isinstance(value, timedelta) else value if value is None else float(value)


def merged(merge: MergeFunction, payloads: list[Any]) -> list[Any]:
    """What a merge function makes of the payloads of an id, oldest first.

    Raises:
        LowqError: something else than a list. What the function raises.
    """
    result: object = merge(list(payloads))
    if not isinstance(result, list):
        raise LowqError(f"merge={merge!r:.100} gave {result!r:.100}; it must return the list of payloads to hand over")
    return result


def room_timeout(timeout: float | timedelta) -> float:
    """How long a push waits for room, in seconds.

    Raises:
        ConfigError: it is no length of time.
    """
    seconds: object = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds <= MAX_TIME:
        raise ConfigError(
            f"timeout={timeout!r:.100} must be seconds, or a timedelta, of 0 or more, and under 272 years; or None"
        )
    return float(seconds)


def check_waits(whose: str, debounce: float | None, max_wait: float | None) -> None:
    """``max_wait`` is that of ``debounce``.

    Raises:
        ConfigError: there is none, or it is longer.
    """
    if max_wait is None:
        return
    if debounce is None:
        raise ConfigError(f"{whose}: max_wait={max_wait!r} bounds the wait of debounce, which is not given")
    if max_wait < debounce:
        raise ConfigError(f"{whose}: max_wait={max_wait!r} must not be less than debounce={debounce!r}")


def _checked_merge(whose: str, merge: Any) -> MergePolicy | MergeFunction:
    if isinstance(merge, str):
        if merge in _POLICIES:
            return merge
        try:
            merge = drivers.load("merge", merge)
        except ConfigError as error:
            raise ConfigError(f"{whose}: merge={merge!r:.100}: {error}") from error.__cause__
    if not callable(merge):
        raise ConfigError(
            f"{whose}: merge={merge!r:.100} must be one of {', '.join(map(repr, _POLICIES))}, the name of a driver, or "
            "a function of the payloads"
        )
    if inspect.iscoroutinefunction(merge):
        raise ConfigError(f"{whose}: merge={merge!r:.100} must not be async")
    if not _takes_one(merge):
        raise ConfigError(f"{whose}: merge={merge!r:.100} must take one argument, the list of payloads")
    return merge  # type: ignore[no-any-return]  # whatever it is, it can be called


def _checked_score(whose: str, score: Any) -> str | ScoreFunction | None:
    if score is None or (isinstance(score, str) and score):
        return score
    if not callable(score) or inspect.iscoroutinefunction(score) or not _takes_one(score):
        raise ConfigError(
            f"{whose}: score={score!r:.100} must be the name of a field of the payload, or a function of one argument, "
            "the payload, that returns a number"
        )
    return score  # type: ignore[no-any-return]  # whatever it is, it can be called


def _takes_one(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        return False
    except ValueError:  # of a builtin nothing is known
        return True
    return True
