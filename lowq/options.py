"""Options: each is declared once, with its default, its kind (bounds, check, message) and its help.

`QueueOptions` declares the options of a queue, ``WORKER_OPTIONS`` adds those of a worker, and `lowq.settings.Config`
declares the settings in the same way. The tables of docs/settings.md are made from the declarations. The `TypedDict` of
each is for type checkers.
"""

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any, Literal, NamedTuple, Self, TypeAlias, TypedDict

from lowq import drivers
from lowq.clock import seconds_of
from lowq.codec import MAX_PRIORITY, MAX_TIME, Rest, encode_priority, encode_ttl, rest_words
from lowq.errors import ConfigError
from lowq.guesses import OPTIONS as GUESSES
from lowq.guesses import hint_for
from lowq.limits import LimitRule, checked_limits
from lowq.observe.callbacks import Listener
from lowq.retry import MAX_RETRY_COUNT, BuryOn, ReleaseOn, RetryIn, as_retry_in, checked_bury_on, checked_release_on
from lowq.store import DURABILITIES, Durability
from lowq.store.keys import MAX_SHARDS, is_queue_name

#: A merge policy of an application: from the payloads of an id, oldest first, to the payloads to hand over.
MergeFunction: TypeAlias = Callable[[list[Any]], list[Any]]
#: What a push does to what runs of its id.
OnPush = Literal["cancel_running"]
#: Gives the score of a payload.
ScoreFunction: TypeAlias = Callable[[Any], float]
#: How Redis merges payloads of an id.
MergePolicy = Literal["collapse", "append", "latest"]

#: The default of ``max_wait``, in multiples of ``debounce``.
DEBOUNCES_WAITED = 10
#: The largest number, also of seconds: a larger timeout is a mistake, and some functions can't wait so long.
LARGEST = 2**31
_POLICIES: tuple[MergePolicy, ...] = ("collapse", "append", "latest")


# --- kinds ---


class Kind(NamedTuple):
    """The kind of an option's values."""

    #: ``(prefix, name, value)`` -> the plain value. It raises a `ConfigError` that begins with the prefix and the name.
    check: Callable[[str, str, Any], Any]
    #: Reads a text from the environment. None: it can't be set there.
    read: Callable[[str], Any] | None = None


def kind(
    must_be: str, is_right: Callable[[Any], bool], *, optional: bool = False,
    read: Callable[[str], Any] | None = None, plain: Callable[[Any], Any] | None = None,
) -> Kind:  # fmt: skip
    """Values that are right, and with ``optional`` None. ``plain`` converts them."""

    def check(prefix: str, name: str, value: Any) -> Any:
        if value is None and optional:
            return None
        if not is_right(value):
            raise ConfigError(f"{prefix}{name}={value!r:.100} must be {must_be}{'; or None' if optional else ''}")
        return value if plain is None else plain(value)

    return Kind(check, read)


def whole(least: int, most: int = LARGEST, *, optional: bool = False) -> Kind:
    """A whole number."""

    def is_right(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most

    return kind(f"a whole number from {least} to {most}", is_right, optional=optional, read=int)


def number(
    *, least: float | None = None, above: float | None = None, most: float = LARGEST, optional: bool = False
) -> Kind:
    """A number within bounds; ``above`` is excluded."""
    bound = f"more than {above:g}" if above is not None else f"at least {least:g}"

    def is_right(value: Any) -> bool:
        if not isinstance(value, int | float) or isinstance(value, bool) or not value <= most:
            return False
        return value > above if above is not None else value >= (least or 0)

    return kind(f"a number of {bound}, and at most {most:,.0f}", is_right, optional=optional, read=float)


def seconds(*, zero: bool = False, optional: bool = True) -> Kind:
    """A length of time, in seconds or as a timedelta. ``zero``: whether it may be 0."""

    def is_right(value: Any) -> bool:
        length = value.total_seconds() if isinstance(value, timedelta) else value
        if not isinstance(length, int | float) or isinstance(length, bool):
            return False
        return (length >= 0 if zero else length > 0) and length <= MAX_TIME

    bound = "0 or more" if zero else "more than 0"
    must_be = f"seconds, or a timedelta, of {bound}, and under 272 years"
    return kind(must_be, is_right, optional=optional, plain=seconds_of)


def one_of(values: Sequence[str]) -> Kind:
    """One of some texts."""
    return kind(f"one of {', '.join(map(repr, values))}", lambda value: isinstance(value, str) and value in values)


def driver(of: drivers.Kind, *, optional: bool = False) -> Kind:
    """The name of a driver."""

    def check(prefix: str, name: str, value: Any) -> Any:
        if value is None and optional:
            return None
        try:
            return drivers.check(of, value)
        except ConfigError as error:
            raise ConfigError(f"{prefix}{name}={value!r:.100}: {error}") from error.__cause__

    return Kind(check, str)


def takes(function: Callable[..., Any], count: int) -> bool:
    """Whether the function can be called with ``count`` arguments by position."""
    try:
        inspect.signature(function).bind(*[None] * count)
    except (TypeError, ValueError) as error:  # a ValueError: something of C's own, which doesn't say
        return isinstance(error, ValueError)
    return True


def _is_function_of_one(value: Any) -> bool:
    return callable(value) and not inspect.iscoroutinefunction(value) and takes(value, 1)


#: A callback for events. In the body of a class a plain function would be a method.
LISTENER = kind(
    "a function of one argument, the event, and not async def; in a class write @staticmethod def on_event(event)",
    _is_function_of_one,
    optional=True,
)
#: ``timeout`` of a push: seconds to wait for room.
TIMEOUT = seconds(zero=True)
DURABILITY = one_of(DURABILITIES)


def _check_merge(prefix: str, name: str, value: Any) -> MergePolicy | MergeFunction:
    if isinstance(value, str) and value not in _POLICIES:
        driver("merge").check(prefix, name, value)
        value = drivers.load("merge", value)
    return _MERGE.check(prefix, name, value)  # type: ignore[no-any-return]  # it is callable


_MERGE = kind(
    f"one of {', '.join(map(repr, _POLICIES))}, the name of a driver, or a function of one argument, the list of "
    "payloads, and not async def",
    lambda value: value in _POLICIES if isinstance(value, str) else _is_function_of_one(value),
)
_ON_PUSH = kind("'cancel_running'", lambda value: value == "cancel_running", optional=True)
_SCORE = kind(
    "the name of a field of the payload, or a function of one argument, the payload, that returns a number",
    lambda value: value != "" if isinstance(value, str) else _is_function_of_one(value),
    optional=True,
)


def _check_name(prefix: str, name: str, value: Any) -> str:
    if not is_queue_name(value):
        raise ConfigError(
            f"{prefix}{name} {value!r:.150}: it has 1 to 128 characters, without braces, spaces and control "
            "characters, and does not end with @ and a number"
        )
    return value


# --- declarations ---


@dataclass(frozen=True, slots=True)
class Option:
    """The declaration of an option or a setting."""

    default: Any
    kind: Kind
    #: A line of Markdown for the tables of the documentation.
    help: str
    #: The default in words, where its ``repr`` is not for people.
    shown: str = ""


def option(default: Any, kind: Kind, help: str) -> Any:  # noqa: A002 - as click calls it
    """A field of a dataclass that declares an option."""
    return dataclasses.field(default=default, metadata={"option": Option(default, kind, help)})


@dataclass(frozen=True, slots=True)
class QueueOptions:
    """The options of a queue, as plain values. Times are seconds."""

    queue_name: str
    shards_count: int = option(
        5, whole(1, MAX_SHARDS),
        "shards of a queue that is new: [sizing](deploys.md#how-many-shards). Later Redis's number counts: "
        "[changing](deploys.md#another-number-of-shards)",
    )  # fmt: skip
    # A reply of Redis's Lua can hold about 8,000 items.
    max_payloads: int = option(1000, whole(1, 3000), "payloads of one id handed to one `perform`, at most")
    max_retry_count: int = option(MAX_RETRY_COUNT, whole(0), "retries before the oldest payload goes to the morgue")
    max_crash_count: int = option(
        3, whole(1), "deaths of its process, and batches that exceeded `ttr`, before a job is buried as poison"
    )
    ttr: float | None = option(
        None, seconds(),
        "seconds after which `perform`, or a job taken by hand, is given up and its jobs are performed again",
    )  # fmt: skip
    ttl: float | None = option(
        None, seconds(), "seconds after which a payload that was not performed is removed, of jobs that say none"
    )
    priority: int = option(0, whole(0, MAX_PRIORITY), "0, the most urgent, to 9, of jobs that say none")
    capacity: int | None = option(
        None, whole(1, optional=True),
        "ids that wait or are taken, at most: [a queue that is full](producing.md#a-queue-that-is-full)",
    )  # fmt: skip
    latency_goal: float | None = option(
        None, seconds(), "seconds of waiting beyond which it is [late](dashboard.md#is-anything-wrong); `None`: 60"
    )
    merge: MergePolicy | MergeFunction = option(
        "collapse", Kind(_check_merge), "how payloads of an id are merged: [policies](workers.md#merge-policies)"
    )
    on_push: OnPush | None = option(
        None, _ON_PUSH,
        '`"cancel_running"`: a newer payload [cancels](failures.md#cancelled-jobs) what runs of its id, and both '
        "run together; `None`: it waits for the next run",
    )  # fmt: skip
    score: str | ScoreFunction | None = option(
        None, _SCORE,
        "the field of a payload, or a function of it, that gives its [score](workers.md#scores); `None`: the time",
    )  # fmt: skip
    debounce: float | None = option(
        None, seconds(), "seconds: a fresh id runs when nothing came for it for [so long](workers.md#debounce)"
    )
    max_wait: float | None = option(
        None, seconds(),
        "seconds after its first payload in which a debounced id runs at the latest; `None`: 10 times `debounce`",
    )  # fmt: skip
    morgue_ttl: float | None = option(None, seconds(), "seconds after which a buried job is removed")
    keep_finished: float | None = option(
        None, seconds(),
        "seconds for which it is kept [when an id finished](failures.md#what-has-finished), and how an id has failed",
    )  # fmt: skip
    morgue_max: int | None = option(None, whole(1, optional=True), "jobs in the morgue, at most")
    durability: Durability = option(
        "none", DURABILITY,
        'what a push [waits for](producing.md#what-a-push-waits-for): `"none"`, `"replicated"` or `"fsynced"`',
    )  # fmt: skip

    def declared(self, options: Mapping[str, Any], whose: str = "") -> Self:
        """A copy with these options, each of which was checked alone. ``whose``: for the message.

        Raises:
            ConfigError: they contradict each other.
        """
        made = dataclasses.replace(self, **{name: options[name] for name in options.keys() & QUEUE_OPTIONS.keys()})
        if made.max_wait is not None:
            whose = whose or f"queue {self.queue_name!r}"
            if made.debounce is None:
                raise ConfigError(f"{whose}: max_wait={made.max_wait!r} bounds the wait of debounce, which is missing")
            if made.max_wait < made.debounce:
                raise ConfigError(
                    f"{whose}: max_wait={made.max_wait!r} must not be less than debounce={made.debounce!r}"
                )
        return made

    def registered(self, options: Mapping[str, Any]) -> Self:
        """A copy with the options of a registry entry of any version, without those that can't be read."""
        found: dict[str, Any] = {}
        for name in options.keys() & _REGISTERED:
            with suppress(ConfigError):
                found[name] = QUEUE_OPTIONS[name].kind.check("", name, options[name])
        try:
            return self.declared(found)
        except ConfigError:
            return self.declared({**found, "max_wait": None})

    def shown(self) -> dict[str, Any]:
        """The options that differ from the defaults, as the registry keeps them: its entry is sent with every
        heartbeat. Functions can't be kept there.
        """
        return {
            name: value
            for name, option in QUEUE_OPTIONS.items()
            if name in _REGISTERED and (value := getattr(self, name)) != option.default and not callable(value)
        }

    @property
    def policy(self) -> MergePolicy:
        """The merge policy in Redis."""
        return "collapse" if callable(self.merge) else self.merge

    def push_words(self) -> bytes:
        """The options in the arguments of a push; b"" without any that concern pushes."""
        words = "" if self.policy == "collapse" else f" merge={self.policy}"
        if self.debounce is not None:
            words += f" debounce={self.debounce!r} max_wait={self.longest_wait!r}"
        if self.on_push is not None:
            words += " cancel=1"
        if self.shard_capacity is not None:
            words += f" capacity={self.shard_capacity}"
        return words.encode() + rest_words(self.rest)

    @property
    def rest(self) -> Rest:
        """The default ttl and priority of jobs, encoded."""
        return encode_ttl(self.ttl), encode_priority(self.priority)

    @property
    def merge_function(self) -> MergeFunction | None:
        """The function that merges payloads before they are handed over."""
        return self.merge if callable(self.merge) else None

    @property
    def longest_wait(self) -> float | None:
        """The latest time, in seconds after its first payload, at which a debounced id runs."""
        if self.debounce is None:
            return None
        return min(self.debounce * DEBOUNCES_WAITED, MAX_TIME) if self.max_wait is None else self.max_wait

    @property
    def shard_capacity(self) -> int | None:
        """The ``capacity`` of one shard."""
        return None if self.capacity is None else -(-self.capacity // self.shards_count)


#: The options of a queue.
QUEUE_OPTIONS: Mapping[str, Option] = {
    field.name: field.metadata["option"] for field in fields(QueueOptions) if field.metadata
}
#: The ones among the options of a registry entry.
_REGISTERED = QUEUE_OPTIONS.keys() - {"shards_count"}

#: The options of a worker, those of its queue included.
WORKER_OPTIONS: Mapping[str, Option] = {
    **QUEUE_OPTIONS,
    "batch_size": Option(1, whole(1, 500), "ids handed to one `perform`, at most"),
    "queue_name": Option(None, Kind(_check_name), "the queue's name in Redis", shown="the class's name"),
    "weight": Option(
        # The bounds are beyond any use, and near enough that sums of shares stay exact.
        1, number(least=1e-6, most=1e6),
        "the queue's [share](limits.md#shares-of-queues) of a node's threads, compared with other "
        "queues'",
    ),
    "max_threads": Option(
        None, whole(1, optional=True), "threads of each node that perform its jobs at once, at most; `None`: all"
    ),
    "limit": Option(
        None, Kind(checked_limits), "a [`lowq.Rate` or `lowq.Concurrency`](limits.md) over all nodes, or a list of them"
    ),
    "time_limit": Option(
        None, seconds(),
        "seconds after which `TimeLimitExceeded` is raised in `perform`: [time limits](failures.md#time-limits)",
    ),
    "retry_in": Option(
        None, Kind(lambda prefix, _name, value: as_retry_in(prefix, value)),
        "seconds until a [retry](failures.md#by-error), or a function of its number, instead of the method",
        shown="from 15 s to days",
    ),
    "bury_on": Option(
        None, Kind(checked_bury_on),
        "a tuple of [errors with which a job is buried](failures.md#by-error); `None`: those of the setting",
    ),
    "release_on": Option(
        None, Kind(checked_release_on),
        "[error to seconds](failures.md#by-error) after which the job runs again, uncharged; `None`: those of the "
        "setting",
    ),
    "on_event": Option(
        None, LISTENER, "a function that is called with [every event](monitoring.md#events) of the queue's jobs"
    ),
    "driver": Option(
        None, driver("queue", optional=True),
        "the name of the class of its queue's handle, which an [installed package](extending.md#drivers) brings; "
        "`None`: `lowq.Queue`",
    ),
}  # fmt: skip


class QueueKeywords(TypedDict, total=False):
    """The keywords of ``app.queue(...)``: `QueueOptions`."""

    max_payloads: int
    max_retry_count: int
    max_crash_count: int
    ttr: float | timedelta | None
    ttl: float | timedelta | None
    priority: int
    capacity: int | None
    latency_goal: float | timedelta | None
    merge: str | MergeFunction
    on_push: OnPush | None
    score: str | ScoreFunction | None
    debounce: float | timedelta | None
    max_wait: float | timedelta | None
    morgue_ttl: float | timedelta | None
    morgue_max: int | None
    keep_finished: float | timedelta | None
    durability: Durability


class WorkerKeywords(QueueKeywords, total=False):
    """The keywords of ``@lowq.worker(...)``: ``WORKER_OPTIONS``."""

    shards_count: int
    batch_size: int
    queue_name: str
    weight: float
    max_threads: int | None
    limit: LimitRule | Sequence[LimitRule] | None
    time_limit: float | timedelta | None
    retry_in: RetryIn | None
    bury_on: BuryOn | None
    release_on: ReleaseOn | None
    on_event: Listener | None
    driver: str | None


def checked_options(whose: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of ``app.queue``, as plain values.

    Raises:
        ConfigError: an unknown option, or a wrong value.
    """
    for name in options:
        if name not in QUEUE_OPTIONS:
            hint = hint_for(GUESSES, name, QUEUE_OPTIONS, None, "options are")
            raise ConfigError(f"{whose}: unknown option {name!r}; {hint}")
    return {name: QUEUE_OPTIONS[name].kind.check(f"{whose}: ", name, value) for name, value in options.items()}


def check_queue_name(name: object) -> str:
    """Checks a queue's name, which becomes part of keys: braces and control characters would break them.

    Raises:
        ConfigError
    """
    return _check_name("", "queue name", name)
