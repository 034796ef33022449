"""Settings: their defaults, units, environment variables and checks.

A setting is looked for on the command line, then in code, then in the environment, then here. They are checked
when set, and frozen when the first connection is made.
"""

import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, TypedDict

from lowq import codec, drivers
from lowq.address import Transport, parse_address
from lowq.error_policies import (
    BuryOn,
    ReleaseOn,
    RetryIn,
    check_apart,
    checked_bury_on,
    checked_release_on,
    checked_retry_in,
)
from lowq.errors import ConfigError
from lowq.logs import get_log
from lowq.observe.job_events import Listener

log = get_log(__name__)


#: Bytes of UTF-8 that are kept of an error, or of a reason: G6 bounds what a job takes.
MAX_ERROR_BYTES = 8192
#: Bytes that ``dump_error`` may make of them.
MAX_DUMPED_BYTES = 8 * MAX_ERROR_BYTES


def format_error(error: BaseException) -> str:
    """What is kept of an exception: its traceback, cut in the middle beyond 8 KiB."""
    import traceback

    return cut_error("".join(traceback.format_exception(error)).rstrip())


def cut_error(text: str) -> str:
    """A text as it is kept with a job: all that are longer than ``MAX_ERROR_BYTES`` are cut here, in the middle.

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


def dump_text(config: "Config", text: str) -> bytes:
    """An error or a reason as Redis keeps it: cut, then encoded by the application's ``dump_error``.

    Raises:
        TypeError: it is no text, or ``dump_error`` gave no bytes. ValueError: it gave too many. What it raises.
    """
    data: object = config.dump_error(cut_error(text))
    if not isinstance(data, bytes):
        raise TypeError(f"dump_error gave a {type(data).__name__} instead of bytes")
    data = bytes(memoryview(data))  # plain bytes, also of a subclass
    if len(data) > MAX_DUMPED_BYTES:
        raise ValueError(f"dump_error gave {len(data)} bytes; it may give {MAX_DUMPED_BYTES}")
    return data


def _dump_error(text: str) -> bytes:
    # The name of a file that is no UTF-8 is in the error as surrogates, which UTF-8 has no bytes for.
    return text.encode("utf-8", "backslashreplace")


def _say_nothing(error: BaseException) -> None:
    """The default of ``last_words``: what stopped the process is in the log already."""


def _do_nothing() -> None:
    """The default of ``on_server_init`` and ``on_server_stop``."""


#: No setting is larger: a timeout of a thousand years is a mistake, and some functions can't wait so long.
_LARGEST = 2**31


def _number(least: float, *, whole: bool = False, above: bool = False) -> Callable[[str, Any], Any]:
    def check(name: str, value: Any) -> Any:
        kinds = (int,) if whole else (int, float)
        if isinstance(value, str):
            try:
                value = int(value) if whole else float(value)
            except ValueError:
                raise ConfigError(f"{name}={value!r} is not a{' whole' if whole else ''} number") from None
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise ConfigError(f"{name}={value!r} is not a{' whole' if whole else ''} number")
        if not (value > least if above else value >= least) or value > _LARGEST:
            raise ConfigError(
                f"{name}={value!r}: it must be {'more than' if above else 'at least'} {least:g}, at most 2**31"
            )
        return value

    return check


def _switch(name: str, value: Any) -> Any:
    if isinstance(value, str):
        value = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}.get(
            value.lower(), value
        )
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={value!r:.100} is neither true nor false; in the environment: 1 or 0")
    return value


def _optional_number(name: str, value: Any) -> Any:
    return None if value is None else _number(0)(name, value)


def _text(pattern: str, meaning: str) -> Callable[[str, Any], Any]:
    def check(name: str, value: Any) -> Any:
        if not isinstance(value, str) or not re.fullmatch(pattern, value):
            raise ConfigError(f"{name}={value!r}: {meaning}")
        return value

    return check


def _callable(name: str, value: Any) -> Any:
    if not callable(value):
        raise ConfigError(f"{name}={value!r} is not callable")
    return value


def _optional_callable(name: str, value: Any) -> Any:
    return None if value is None else _callable(name, value)


def _callback(name: str, value: Any) -> Any:
    if value is not None and (not callable(value) or inspect.iscoroutinefunction(value)):
        raise ConfigError(f"{name}={value!r:.100} is no function; write def {name}(event), not async def")
    return value


def _driver(kind: drivers.Kind) -> Callable[[str, Any], Any]:
    def check(name: str, value: Any) -> Any:
        try:
            return drivers.check(kind, value)
        except ConfigError as error:
            raise ConfigError(f"{name}={value!r:.100}: {error}") from error.__cause__

    return check


def _bury_on(_name: str, value: Any) -> Any:
    return checked_bury_on("", value)


def _release_on(_name: str, value: Any) -> Any:
    return checked_release_on("", value)


def _retry_in(_name: str, value: Any) -> Any:
    if value is not None:
        checked_retry_in("", value)
    return value


def _callables(name: str, value: Any) -> Any:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ConfigError(f"{name}={value!r} is not a list of callables")
    return [_callable(f"an item of {name}", item) for item in value]


def _workers(name: str, value: Any) -> Any:
    if value is not None and (isinstance(value, str) or not isinstance(value, Sequence)):
        raise ConfigError(f"{name}={value!r:.100} is not a list of workers")
    return value


_URL_SCHEMES = (
    "redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster", "memory",
)  # fmt: skip


def _url(name: str, value: Any) -> Any:
    if not isinstance(value, str) or value.partition("://")[0] not in _URL_SCHEMES or "://" not in value:
        shown = re.sub(r"(?<=//).*@|\?.*", "", value) if isinstance(value, str) else value  # without a password
        raise ConfigError(
            f"{name}={shown!r} is not a URL that lowq knows; it begins with one of "
            + ", ".join(f"{scheme}://" for scheme in _URL_SCHEMES)
        )
    return value


#: How Graphite and StatsD may be spoken to; the first is the default.
GRAPHITE_TRANSPORTS: tuple[Transport, ...] = ("tcp", "udp")
STATSD_TRANSPORTS: tuple[Transport, ...] = ("udp",)


def _address(*transports: Transport) -> Callable[[str, Any], Any]:
    def check(name: str, value: Any) -> Any:
        if value is None:
            return None
        if not isinstance(value, str):
            raise ConfigError(f"{name}={value!r:.100} is not a text; write HOST:PORT")
        try:
            parse_address(value, transports)
        except ValueError as error:
            raise ConfigError(f"{name}={value!r:.100}: {error}") from None
        return value

    return check


def _optional_text(pattern: str, meaning: str) -> Callable[[str, Any], Any]:
    check = _text(pattern, meaning)
    return lambda name, value: None if value is None else check(name, value)


#: name -> (default, check, readable from the environment)
_SETTINGS: Mapping[str, tuple[Any, Callable[[str, Any], Any], bool]] = {
    "redis_url": ("redis://localhost:6379/0", _url, True),
    "namespace": (
        "lowq",
        _text(r"[^\s{}\x00-\x1f\x7f-\x9f\ud800-\udfff]{1,64}", "1 to 64 characters without braces and spaces"),
        True,
    ),
    "poll_interval": (1.0, _number(0, above=True), True),
    "threads_per_node": (5, _number(1, whole=True), True),
    "concurrency": (100, _number(1, whole=True), True),
    "client_pool_size": (5, _number(1, whole=True), True),
    "pool_timeout": (5.0, _number(0, above=True), True),
    "push_timeout": (5.0, _number(0, above=True), True),
    "durability_timeout": (5.0, _number(0, above=True), True),
    "lease_ttl": (15.0, _number(0.1), True),
    "shutdown_timeout": (25.0, _number(0), True),
    "warn_after": (60.0, _optional_number, True),
    "max_payload_bytes": (2**20, _number(1, whole=True), True),
    "scan_size": (200, _number(1, whole=True), True),
    "strict_shards_count": (False, _switch, True),
    "graphite": (None, _address(*GRAPHITE_TRANSPORTS), True),
    "statsd": (None, _address(*STATSD_TRANSPORTS), True),
    "metrics_prefix": (
        None,
        _optional_text(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*", "names of ASCII letters, digits, - and _, between dots"),
        True,
    ),
    "server_middlewares": ((), _callables, False),
    "client_middlewares": ((), _callables, False),
    "on_job_event": (None, _callback, False),
    "on_server_init": (_do_nothing, _callable, False),
    "on_server_stop": (_do_nothing, _callable, False),
    "last_words": (_say_nothing, _callable, False),
    "retry_in": (None, _retry_in, False),
    "bury_on": (None, _bury_on, False),
    "release_on": (None, _release_on, False),
    "build_scheduler": (None, _optional_callable, False),
    "build_splitter": (None, _optional_callable, False),
    "scheduler": ("lag", _driver("scheduler"), True),
    "splitter": ("balanced", _driver("splitter"), True),
    "codec": ("json", _driver("codec"), True),
    "dump_payload": (codec.dump_payload, _callable, False),
    "load_payload": (codec.load_payload, _callable, False),
    "format_error": (format_error, _callable, False),
    "dump_error": (_dump_error, _callable, False),
    "load_error": (bytes.decode, _callable, False),
    "workers": (None, _workers, False),
}


#: The settings that say what becomes of a job by its error.
_BY_ERROR = ("bury_on", "release_on")

#: The settings that a codec brings.
_OF_A_CODEC = ("dump_payload", "load_payload")

#: Variables that the dashboard reads, not the library.
_OF_THE_DASHBOARD = {
    f"LOWQ_WEB_{name}" for name in ("USER", "PASSWORD", "READ_USER", "READ_PASSWORD", "USERS", "REDACT", "ORIGINS")
}


def _warn_of_unknown_variables() -> None:
    known = {f"LOWQ_{name.upper()}" for name, (_, _, readable) in _SETTINGS.items() if readable} | _OF_THE_DASHBOARD
    for variable in os.environ:
        if variable.startswith("LOWQ_") and variable not in known:
            near = get_close_matches(variable, known, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            log.warning("environment variable %s is no setting of lowq%s", variable, hint)


class Settings(TypedDict, total=False):
    """Those of a `Config`, as the keywords of `Lowq`: type checkers know no other way to say so."""

    redis_url: str
    namespace: str
    poll_interval: float
    threads_per_node: int
    concurrency: int
    client_pool_size: int
    pool_timeout: float
    push_timeout: float
    durability_timeout: float
    lease_ttl: float
    shutdown_timeout: float
    warn_after: float | None
    max_payload_bytes: int
    scan_size: int
    strict_shards_count: bool
    graphite: str | None
    statsd: str | None
    metrics_prefix: str | None
    server_middlewares: Sequence[Callable[..., Any]]
    client_middlewares: Sequence[Callable[..., Any]]
    on_job_event: Listener | None
    on_server_init: Callable[[], object]
    on_server_stop: Callable[[], object]
    last_words: Callable[[BaseException], object]
    retry_in: RetryIn | None
    bury_on: BuryOn | None
    release_on: ReleaseOn | None
    build_scheduler: Callable[[], Any] | None
    build_splitter: Callable[[], Any] | None
    scheduler: str
    splitter: str
    codec: str
    dump_payload: Callable[[Any], bytes]
    load_payload: Callable[[bytes], Any]
    format_error: Callable[[BaseException], str]
    dump_error: Callable[[str], bytes]
    load_error: Callable[[bytes], str]
    workers: Sequence[type] | None


class Config:
    """All settings of an application. Attributes are checked when set.

    Raises:
        ConfigError: an unknown name (with the nearest known one), a value that makes no sense, or a change
            after the first connection.
    """

    #: Where Redis is: redis://, unix://, redis+sentinel://, redis+cluster:// or memory://. With TLS: rediss://,
    #: rediss+sentinel://, rediss+cluster://.
    redis_url: str
    #: What all keys begin with.
    namespace: str
    #: Seconds after which an idle node asks anew, should a wake-up have been lost.
    poll_interval: float
    #: Threads that perform jobs, per node.
    threads_per_node: int
    #: Shards that the event loop of a node works at once, of the queues of async workers.
    concurrency: int
    #: Connections that producers share, per process.
    client_pool_size: int
    #: Seconds that a producer waits for a free connection.
    pool_timeout: float
    #: Seconds that a push waits without an answer of Redis. Included are a free connection, connecting and repeats.
    push_timeout: float
    #: Seconds that a push with a ``durability`` waits, once Redis has answered, for a replica or the disk.
    durability_timeout: float
    #: Seconds after which the shards of a dead node are worked by another.
    lease_ttl: float
    #: Seconds that a stopping node waits for what it performs.
    shutdown_timeout: float
    #: Seconds after which a batch that still runs is named in the log; again after twice as long, and so on. 0 or None:
    #: never.
    warn_after: float | None
    #: Largest payload, encoded.
    max_payload_bytes: int
    #: Expired payloads, and jobs of the morgue, that are removed in one step.
    scan_size: int
    #: Whether another ``shards_count`` in the registry than in the code is a `ShardsCountError`; otherwise the registry
    #: is followed.
    strict_shards_count: bool
    #: Where nodes and consumers send their figures, once a second: ``host:port`` (TCP) or ``udp://host:port``.
    graphite: str | None
    #: The same in StatsD's format, ``host:port``, over UDP.
    statsd: str | None
    #: What the names of these figures begin with; by default the namespace, and the host and pid where that matters.
    metrics_prefix: str | None
    #: ``(worker, payloads_by_id, call_next)``, the first is outermost.
    server_middlewares: list[Callable[..., Any]]
    #: ``(worker, jobs, call_next)``, the first is outermost.
    client_middlewares: list[Callable[..., Any]]
    #: Called with every `lowq.JobEvent` of this process, in a thread for that.
    on_job_event: Listener | None
    #: Called in a node before its threads start.
    on_server_init: Callable[[], object]
    #: Called in a node that stops, when its threads have ended and its shards are given up.
    on_server_stop: Callable[[], object]
    #: Called with the exception that stops a node.
    last_words: Callable[[BaseException], object]
    #: ``(retry_count, error)`` -> seconds until that retry, of workers without a ``retry_in`` of their own.
    retry_in: RetryIn | None
    #: Classes of errors with which a job is buried, of workers that say none.
    bury_on: BuryOn | None
    #: Class of error -> seconds, or a timedelta, after which the job runs again, uncharged; of workers that say none.
    release_on: ReleaseOn | None
    #: Makes the scheduler of one thread for one queue; ``lowq.LagScheduler`` by default.
    build_scheduler: Callable[[], Any] | None
    #: Makes the splitter of a node; ``lowq.BalancedSplitter(threads_per_node)`` by default.
    build_splitter: Callable[[], Any] | None
    #: The name of what makes schedulers, where ``build_scheduler`` is None: "lag", "seq", or a driver.
    scheduler: str
    #: The name of what makes splitters, where ``build_splitter`` is None: "balanced", "default", or a driver.
    splitter: str
    #: The name of what ``dump_payload`` and ``load_payload`` are taken from: "json", or a driver. Of these three
    #: settings the one that is set last holds.
    codec: str
    #: Payload -> bytes, canonically: equal payloads must give equal bytes.
    dump_payload: Callable[[Any], bytes]
    #: Bytes -> payload.
    load_payload: Callable[[bytes], Any]
    #: Exception -> what is kept of it.
    format_error: Callable[[BaseException], str]
    #: What is kept of an error -> bytes.
    dump_error: Callable[[str], bytes]
    #: Bytes -> what was kept of an error.
    load_error: Callable[[bytes], str]
    #: The workers that a node runs; None: all that were decorated.
    workers: Sequence[type] | None

    def __init__(self, **settings: Any) -> None:
        object.__setattr__(self, "_frozen", False)
        for name, value in settings.items():
            setattr(self, name, value)

    def _read(self, name: str) -> Any:
        # Only what was not set in code comes here, once: from the environment, or the default.
        if name not in _SETTINGS:
            raise AttributeError(f"there is no setting {name!r}; settings are {', '.join(_SETTINGS)}")
        default, check, readable = _SETTINGS[name]
        variable = f"LOWQ_{name.upper()}"
        text = os.environ.get(variable) if readable else None
        value: Any
        if text:
            try:
                value = check(name, text)
            except ConfigError as error:
                raise ConfigError(f"environment variable {variable}: {error}") from None
        elif name in _OF_A_CODEC and self.codec != "json":
            value = getattr(drivers.load("codec", self.codec), name)
        else:
            value = list(default) if isinstance(default, tuple) else default
        object.__setattr__(self, name, value)
        return value

    def _set(self, name: str, value: Any) -> None:
        if name not in _SETTINGS:
            near = get_close_matches(name, _SETTINGS, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"settings are {', '.join(_SETTINGS)}"
            raise ConfigError(f"unknown setting {name!r}; {hint}")
        if self._frozen:
            raise ConfigError(
                f"{name} is set after the first connection to Redis was made; set it earlier, "
                "before anything is pushed or asked"
            )
        checked = _SETTINGS[name][1](name, value)
        if name in _BY_ERROR:
            others = {other: self.__dict__.get(other) for other in _BY_ERROR}
            check_apart("", **{**others, name: checked})
        object.__setattr__(self, name, checked)
        if name == "codec":
            for other in _OF_A_CODEC:  # read anew, from this one
                self.__dict__.pop(other, None)

    if not TYPE_CHECKING:
        # Hidden from type checkers: they would take every misspelt setting for one that may be there.
        __getattr__ = _read
        __setattr__ = _set

    _frozen: bool

    def freeze(self) -> None:
        """From now on nothing may change: a connection that was made doesn't follow."""
        if not self._frozen:
            _warn_of_unknown_variables()
        for name in _SETTINGS:
            getattr(self, name)
        object.__setattr__(self, "_frozen", True)
