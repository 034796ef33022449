"""Settings: their defaults, units, environment variables and checks.

The command line comes first, then code, then the environment, then the defaults. Settings are checked when they are
set, and frozen when the first connection is made.
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, ClassVar, dataclass_transform

from lowq import drivers
from lowq.codec import dump_payload, load_payload
from lowq.codec.payloads import dump_error, format_error
from lowq.errors import ConfigError
from lowq.guesses import SETTINGS as GUESSES
from lowq.guesses import hint_for
from lowq.logs import get_log
from lowq.observe.callbacks import Listener
from lowq.observe.sinks import Transport, parse_address
from lowq.options import LISTENER, Kind, Option, driver, kind, number, whole
from lowq.retry import (
    BuryOn,
    ReleaseOn,
    RetryIn,
    as_retry_in,
    check_apart,
    checked_bury_on,
    checked_release_on,
    checked_retry_in,
)  # fmt: skip

log = get_log(__name__)


def _say_nothing(error: BaseException) -> None:
    """The default of ``last_words``: the log has the exception already."""


def _do_nothing() -> None:
    """The default of ``on_server_init`` and ``on_server_stop``."""


# --- declarations ---

_URL_SCHEMES = (
    "redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster", "memory",
)  # fmt: skip


def _check_url(prefix: str, name: str, value: Any) -> Any:
    scheme, mark, _ = value.partition("://") if isinstance(value, str) else ("", "", "")
    if not mark or re.sub("^valkey", "redis", scheme) not in _URL_SCHEMES:
        shown = re.sub(r"(?<=//).*@|\?.*", "", value) if isinstance(value, str) else value  # without a password
        raise ConfigError(
            f"{prefix}{name}={shown!r} is not a URL that lowq knows; it begins with one of "
            + ", ".join(f"{known}://" for known in _URL_SCHEMES)
            + "; valkey and valkeys mean the same as redis and rediss"
        )
    return value


#: The transports of Graphite and StatsD; the first is the default.
GRAPHITE_TRANSPORTS: tuple[Transport, ...] = ("tcp", "udp")
STATSD_TRANSPORTS: tuple[Transport, ...] = ("udp",)


def _address(transports: tuple[Transport, ...]) -> Kind:
    def check(prefix: str, name: str, value: Any) -> Any:
        try:
            if value is not None:
                parse_address(value, transports)
        except (ValueError, TypeError) as error:
            why = error if isinstance(value, str) else "it is no text; write HOST:PORT"
            raise ConfigError(f"{prefix}{name}={value!r:.100}: {why}") from None
        return value

    return Kind(check, str)


def _text(pattern: str, must_be: str, *, optional: bool = False) -> Kind:
    return kind(
        must_be,
        lambda value: isinstance(value, str) and re.fullmatch(pattern, value) is not None,
        optional=optional,
        read=str,
    )


_SWITCHES = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
_SWITCH = kind(
    "true or false; in the environment: 1 or 0", lambda value: isinstance(value, bool),
    read=lambda text: _SWITCHES.get(text.lower(), text),
)  # fmt: skip
_CALLABLE, _OPTIONAL_CALLABLE = (kind("callable", callable, optional=optional) for optional in (False, True))


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


_CALLABLES = kind("a list of callables", lambda value: _is_list(value) and all(map(callable, value)), plain=list)


def _check_retry_in(prefix: str, _name: str, value: Any) -> Any:
    function = as_retry_in(prefix, value)
    if function is not None:
        checked_retry_in(prefix, function)
    return function


if TYPE_CHECKING:

    class Seconds:
        """Given in seconds or as a timedelta, and read in seconds."""

        def __get__(self, instance: object, owner: object) -> float: ...
        def __set__(self, instance: object, value: float | timedelta) -> None: ...

    class Callables:
        """Given as any sequence, and read as a list."""

        def __get__(self, instance: object, owner: object) -> list[Callable[..., Any]]: ...
        def __set__(self, instance: object, value: Sequence[Callable[..., Any]]) -> None: ...

else:
    Seconds = float


@dataclass(frozen=True, slots=True)
class _Setting(Option):
    """The declaration of a setting. An attribute of `Config` that was not set in code is read through it."""

    unit: str = ""
    #: The attribute.
    name: str = ""

    def __set_name__(self, _owner: type, name: str) -> None:
        object.__setattr__(self, "name", name)

    def __get__(self, config: "Config | None", _owner: type) -> Any:
        return self if config is None else config._read(self)

    @property
    def variable(self) -> str:
        """The environment variable; "": it can't be set there."""
        return f"LOWQ_{self.name.upper()}" if self.kind.read is not None else ""

    def checked(self, value: Any, name: str = "") -> Any:
        """A value, or a text from the environment, as a plain value. ``name``: its name in a message.

        Raises:
            ConfigError
        """
        if isinstance(value, str) and self.kind.read is not None:
            with suppress(ValueError):  # it stays a text, and is refused
                value = self.kind.read(value)
        if self.unit == "seconds" and isinstance(value, timedelta):
            value = value.total_seconds()
        return self.kind.check("", name or self.name, value)


def setting(kind: Kind, help: str, *, default: Any, unit: str = "", shown: str = "") -> Any:  # noqa: A002 - as click calls it
    """Declares a setting as an attribute of `Config`."""
    return _Setting(default, kind, help, shown, unit)


#: The settings that decide by a job's error.
_BY_ERROR = ("bury_on", "release_on")

#: The settings that a codec brings.
_OF_A_CODEC = ("dump_payload", "load_payload")

#: Variables of the dashboard.
_OF_THE_DASHBOARD = {
    f"LOWQ_WEB_{name}" for name in ("USER", "PASSWORD", "READ_USER", "READ_PASSWORD", "REDACT", "ORIGINS", "HOSTS")
}
#: Of `lowq run` and `lowq ready`, and what `lowq consume` tells a command.
_OF_COMMANDS = {"LOWQ_HEALTH", "LOWQ_ID", "LOWQ_QUEUE", "LOWQ_RETRY_COUNT"}


def _warn_of_unknown_variables() -> None:
    known = {declared.variable for declared in SETTINGS.values()} | _OF_THE_DASHBOARD | _OF_COMMANDS
    for variable in os.environ:
        if variable.startswith("LOWQ_") and variable not in known:
            near = get_close_matches(variable, known, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            log.warning("environment variable %s is no setting of lowq%s", variable, hint)


@dataclass_transform(kw_only_default=True, field_specifiers=(setting,))
class _Declared:
    """Tells type checkers that the attributes of `Config` are keywords."""


class Config(_Declared):
    """All settings of an application. Attributes are checked when they are set.

    Raises:
        ConfigError: an unknown name (with the nearest known one), a wrong value, or a change after the first
            connection.
    """

    redis_url: str = setting(
        Kind(_check_url, str),
        "where Redis is; [URLs](operations.md#redis-settings)",
        default="redis://localhost:6379/0",
        unit="URL",
    )
    namespace: str = setting(
        _text(r"[^\s{}\x00-\x1f\x7f-\x9f\ud800-\udfff]{1,64}", "1 to 64 characters without braces and spaces"),
        "what all keys begin with",
        default="lowq",
        unit="text",
    )
    poll_interval: Seconds = setting(
        number(above=0),
        "how often idle shards are asked for work while [wake-ups get lost](guarantees.md#wake-ups-that-get-lost)",
        default=1.0,
        unit="seconds",
    )
    threads_per_node: int = setting(whole(1), "threads that perform jobs", default=5, unit="threads")
    concurrency: int = setting(
        whole(1),
        "shards that the event loop of a node works at once, for [async workers](workers.md#async-workers)",
        default=100,
        unit="shards",
    )
    client_pool_size: int = setting(
        whole(1),
        "shared by the threads of a process that push. An event loop that pushes has one more",
        default=5,
        unit="connections",
    )
    pool_timeout: Seconds = setting(
        number(above=0), "how long a producer waits for a free connection", default=5.0, unit="seconds"
    )
    push_timeout: Seconds = setting(
        number(above=0),
        "how long a push waits for Redis [without an answer](producing.md#when-a-push-fails), repeats "
        "included",
        default=5.0, unit="seconds",
    )  # fmt: skip
    durability_timeout: Seconds = setting(
        number(above=0),
        "how long a push with a [`durability`](producing.md#what-a-push-waits-for) waits for a replica or the "
        "disk, once Redis has answered",
        default=5.0, unit="seconds",
    )  # fmt: skip
    lease_ttl: Seconds = setting(
        number(least=0.1), "after this the shards of a dead node go to another", default=15.0, unit="seconds"
    )
    shutdown_timeout: Seconds = setting(
        number(least=0),
        "how long a stopping node waits for what it performs. What the application does at the end of the "
        "process has no longer either",
        default=25.0, unit="seconds",
    )  # fmt: skip
    warn_after: float | None = setting(
        number(least=0, optional=True),
        "a batch that runs for so long is [named in the log](failures.md#time-limits), again after "
        "twice that time, and so on; `0` or `None`: never",
        default=60.0, unit="seconds",
    )  # fmt: skip
    max_payload_bytes: int = setting(whole(1), "the largest payload, encoded", default=2**20, unit="bytes")
    scan_size: int = setting(
        whole(1),
        "how many [expired payloads](producing.md#payloads-that-expire), or jobs of the morgue, one step "
        "removes; at most 2,000 count",
        default=200, unit="payloads",
    )  # fmt: skip
    strict_shards_count: bool = setting(
        _SWITCH,
        "whether it is an error that a queue [was resharded](deploys.md#what-the-code-says) and the code "
        "says another number of shards; otherwise Redis is followed, with a warning",
        default=False,
    )  # fmt: skip
    graphite: str | None = setting(
        _address(GRAPHITE_TRANSPORTS),
        "where nodes and consumers [send their figures](monitoring.md#graphite-and-statsd): `host:port`, "
        "`udp://host:port`",
        default=None, unit="address",
    )  # fmt: skip
    statsd: str | None = setting(
        _address(STATSD_TRANSPORTS), "the same for StatsD: `host:port`", default=None, unit="address"
    )
    metrics_prefix: str | None = setting(
        _text(
            r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*", "names of ASCII letters, digits, - and _, between dots", optional=True
        ),
        "what the names of these figures begin with; `None`: the namespace, host and pid",
        default=None,
        unit="text",
    )
    outbox: str | None = setting(
        _text(r"[\w+-]+://.+|[\w-]+", "the URL of a database, or its name in Django", optional=True),
        "the database whose [outbox](outbox.md#the-relay) nodes relay: its URL, or the name that Django knows it by",
        default=None, unit="URL",
    )  # fmt: skip
    server_middlewares: "Callables" = setting(
        _CALLABLES, "[around each batch](extending.md#middlewares) in a node", default=()
    )
    client_middlewares: "Callables" = setting(_CALLABLES, "[around each push](extending.md#middlewares)", default=())
    on_job_event: Listener | None = setting(
        LISTENER, "called with [every event](monitoring.md#events) of jobs in this process", default=None
    )
    on_server_init: Callable[[], object] = setting(
        _CALLABLE, "called in a node before its threads start", default=_do_nothing, shown="does nothing"
    )
    on_server_stop: Callable[[], object] = setting(
        _CALLABLE,
        "called in a node that stops, when its threads have ended and its shards are given up. A node that is "
        "cut short skips it; where it hangs, the process ends",
        default=_do_nothing, shown="does nothing",
    )  # fmt: skip
    last_words: Callable[[BaseException], object] = setting(
        _CALLABLE, "called with the exception that stops a node", default=_say_nothing, shown="does nothing"
    )
    retry_in: RetryIn | None = setting(
        Kind(_check_retry_in),
        "[seconds until a retry](failures.md#by-error), of workers that have none; `None`: lowq's formula",
        default=None,
    )
    bury_on: BuryOn | None = setting(
        Kind(checked_bury_on),
        "[errors with which a job is buried](failures.md#by-error), of workers that say none",
        default=None,
    )
    release_on: ReleaseOn | None = setting(
        Kind(checked_release_on),
        "[errors with which a job waits again](failures.md#by-error), uncharged, of workers that say none",
        default=None,
    )
    build_scheduler: Callable[[], Any] | None = setting(
        _OPTIONAL_CALLABLE, "makes a thread's scheduler for a queue; `None`: what `scheduler` names", default=None
    )
    build_splitter: Callable[[], Any] | None = setting(
        _OPTIONAL_CALLABLE, "makes the node's splitter; `None`: what `splitter` names", default=None
    )
    scheduler: str = setting(
        driver("scheduler"),
        "what makes schedulers: `lag`, `seq`, or a [driver](extending.md#drivers)",
        default="lag",
        unit="name",
    )
    splitter: str = setting(
        driver("splitter"),
        "what makes splitters: `balanced`, `default`, or a [driver](extending.md#drivers)",
        default="balanced",
        unit="name",
    )
    codec: str = setting(
        driver("codec"),
        "what `dump_payload` and `load_payload` are taken from: `json`, or a [driver](extending.md#drivers)",
        default="json",
        unit="name",
    )
    dump_payload: Callable[[Any], bytes] = setting(
        _CALLABLE,
        "payload to bytes; equal payloads must give equal bytes",
        default=dump_payload,
        shown="canonical JSON",
    )
    load_payload: Callable[[bytes], Any] = setting(_CALLABLE, "bytes to payload", default=load_payload, shown="JSON")
    format_error: Callable[[BaseException], str] = setting(
        _CALLABLE, "exception to the text that is kept of it, cut at 8 KiB", default=format_error, shown="the traceback"
    )
    dump_error: Callable[[str], bytes] = setting(
        _CALLABLE, "that text to bytes, 64 KiB at most", default=dump_error, shown="UTF-8"
    )
    load_error: Callable[[bytes], str] = setting(_CALLABLE, "bytes to that text", default=bytes.decode, shown="UTF-8")
    workers: Sequence[type] | None = setting(
        kind("a list of workers", _is_list, optional=True),
        "the workers that a node runs; `None`: all that were decorated",
        default=None,
    )

    _frozen: ClassVar[bool] = False  # and True in an instance

    if not TYPE_CHECKING:  # which have it from the attributes

        def __init__(self, **settings: Any) -> None:
            for name, value in settings.items():
                setattr(self, name, value)

    def _read(self, declared: _Setting) -> Any:
        # Called once, for a setting that was not set in code: from the environment, or the default.
        name, variable = declared.name, declared.variable
        text = os.environ.get(variable) if variable else None
        value: Any
        if text:
            try:
                value = declared.checked(text)
            except ConfigError as error:
                raise ConfigError(f"environment variable {variable}: {error}") from None
        elif name in _OF_A_CODEC and self.codec != "json":
            value = getattr(drivers.load("codec", self.codec), name)
        else:
            value = list(declared.default) if isinstance(declared.default, tuple) else declared.default
        object.__setattr__(self, name, value)
        return value

    def _set(self, name: str, value: Any) -> None:
        if name not in SETTINGS:
            near = next(iter(get_close_matches(name, SETTINGS, 1)), None)
            hint = hint_for(GUESSES, name, SETTINGS, near, "settings are")
            raise ConfigError(f"unknown setting {name!r}; {hint}")
        if self._frozen:
            raise ConfigError(
                f"{name} is set after the first connection to Redis was made; set it earlier, "
                "before anything is pushed or asked"
            )
        checked = SETTINGS[name].checked(value)
        if name in _BY_ERROR:
            others = {other: self.__dict__.get(other) for other in _BY_ERROR}
            check_apart("", **{**others, name: checked})
        object.__setattr__(self, name, checked)
        if name == "codec":
            for other in _OF_A_CODEC:  # to be read from this codec
                self.__dict__.pop(other, None)

    if not TYPE_CHECKING:
        # Hidden from type checkers, which would accept every misspelt setting.
        __setattr__ = _set

    @property
    def renewal_interval(self) -> float:
        """Seconds between two renewals of a lease. They also find work whose wake-up was lost, so a long lease does not
        make them rarer than five intervals of `poll_interval`.
        """
        return min(self.lease_ttl / 3, 5 * self.poll_interval)

    def freeze(self) -> None:
        """Forbids changes: a connection that was made would not follow."""
        if not self._frozen:
            _warn_of_unknown_variables()
        for name in SETTINGS:
            getattr(self, name)
        object.__setattr__(self, "_frozen", True)


#: All settings, by name.
SETTINGS: Mapping[str, _Setting] = {
    name: declared for name, declared in vars(Config).items() if isinstance(declared, _Setting)
}
