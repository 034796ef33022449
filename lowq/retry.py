"""Retries: the formula of their delays, and the policies by error class, ``bury_on``, ``release_on``, ``retry_in``.

Of the classes that a worker or its application names, the nearest in the error's ``__mro__`` counts. A worker's own
option replaces the application's. Where the worker names a class in one of ``bury_on`` and ``release_on``, and the
application in the other, the worker's counts.
"""

import inspect
import math
import random
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeAlias

from lowq.codec import MAX_TIME
from lowq.errors import ConfigError, TimeLimitExceeded

#: The default number of retries of an id, after which its oldest payload is buried.
MAX_RETRY_COUNT = 25
#: Classes of errors.
BuryOn: TypeAlias = Sequence[type[BaseException]]
#: Class -> seconds, or a timedelta.
ReleaseOn: TypeAlias = Mapping[type[BaseException], float | timedelta]
#: ``(retry_count, error)``, or ``(retry_count)``, -> seconds, or a timedelta; or always so many.
RetryIn: TypeAlias = Callable[..., float | timedelta] | float | timedelta
#: Class -> seconds until the job runs again, uncharged; None: it is buried.
Policies: TypeAlias = Mapping[type[BaseException], float | None]
#: ``bury_on`` and ``release_on``, checked.
ByError: TypeAlias = tuple[BuryOn | None, ReleaseOn | None]


def default_retry_in(retry_count: int) -> float:
    """Seconds until retry ``retry_count``: a random time within `default_retry_bounds`."""
    return random.uniform(*default_retry_bounds(retry_count))


def default_retry_bounds(retry_count: int) -> tuple[float, float]:
    """The least and the most seconds until retry ``retry_count``: Lowkiq's formula, from seconds to days."""
    least = retry_count**4 + 15
    return least, least + 30 * (retry_count + 1)


def attempt_number(retry_count: int) -> int:
    """The attempt that a job waits for, or is in: 1 when it has not failed yet, which is ``retry_count`` -1."""
    return retry_count + 2


def attempt_text(retry_count: int, max_retry_count: int) -> str:
    """That attempt for people: ``attempt 3 of 26`` after two failures."""
    return f"attempt {attempt_number(retry_count)} of {max_retry_count + 1}"


def is_exhausted(retry_count: int, max_retry_count: int) -> bool:
    """Whether a job is given up after its failure number ``retry_count``, counted from 0."""
    return retry_count >= max_retry_count


def retry_delay(seconds: float) -> float | None:
    """Seconds until a retry, within bounds, from the result of ``retry_in``; None: that is no time."""
    return min(max(seconds, 0.0), MAX_TIME) if math.isfinite(seconds) else None


def checked_bury_on(prefix: str, name: str, value: Any) -> tuple[type[BaseException], ...] | None:
    """The classes of the option. ``prefix``: the beginning of a message.

    Raises:
        ConfigError
    """
    if value is None:
        return None
    if isinstance(value, type) and issubclass(value, BaseException):
        raise ConfigError(f"{prefix}{name}={value.__name__}: write {name}=({value.__name__},), with the comma")
    if not isinstance(value, tuple | list):
        raise ConfigError(
            f"{prefix}{name}={value!r:.100} is no tuple of exception classes; write bury_on=(ValueError, KeyError)"
        )
    return tuple(_checked_class(prefix, name, item, "bury_on=(ValueError, KeyError)") for item in value)


def checked_release_on(prefix: str, name: str, value: Any) -> dict[type[BaseException], float] | None:
    """Class -> seconds, of the option.

    Raises:
        ConfigError
    """
    if value is None:
        return None
    form = "release_on={TimeoutError: 30}"
    if not isinstance(value, Mapping):
        raise ConfigError(f"{prefix}{name}={value!r:.100} is no mapping of exception classes to seconds; write {form}")
    checked = {}
    for item, delay in value.items():
        kind = _checked_class(prefix, name, item, form)
        seconds = delay.total_seconds() if isinstance(delay, timedelta) else delay
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds <= MAX_TIME:
            raise ConfigError(
                f"{prefix}{name}={{{kind.__name__}: {delay!r:.100}}}: the delay must be seconds, or a timedelta, "
                f"of more than 0, and under 272 years; write {form}"
            )
        checked[kind] = float(seconds)
    return checked


def _checked_class(prefix: str, name: str, item: Any, form: str) -> type[BaseException]:
    if not (isinstance(item, type) and issubclass(item, BaseException)):
        raise ConfigError(f"{prefix}{name}: {item!r:.100} is no exception class; write {form}")
    if not issubclass(item, Exception | TimeLimitExceeded):
        raise ConfigError(
            f"{prefix}{name}: {item.__name__} stops the process, whatever becomes of the job; name subclasses of "
            "Exception, or lowq.TimeLimitExceeded"
        )
    return item


def check_apart(prefix: str, bury_on: Sequence[type] | None, release_on: Mapping[type, float] | None) -> None:
    """Checks that no class is in both.

    Raises:
        ConfigError
    """
    for kind in bury_on or ():
        if kind in (release_on or {}):
            raise ConfigError(
                f"{prefix}{kind.__name__} is in bury_on and in release_on; leave it in the one that is meant"
            )


def checked_retry_in(where: str, function: Any, bound: int = 0) -> bool:
    """Whether ``retry_in`` takes the error beside the retry count. ``where``: the beginning of a message, for that of a
    worker. ``bound``: the number of arguments before these, such as ``self``.

    Raises:
        ConfigError: it can be called with neither.
    """
    form = "def retry_in(self, retry_count, error)" if where else "def retry_in(retry_count, error)"
    if not callable(function):
        raise ConfigError(
            f"{where}retry_in={function!r:.100} is no function; write {form}, or seconds, such as retry_in=30"
        )
    inner = inspect.unwrap(function)
    if inspect.iscoroutinefunction(inner) or inspect.isgeneratorfunction(inner) or inspect.isasyncgenfunction(inner):
        raise ConfigError(f"{where}retry_in must return a number of seconds at once; write a plain {form}")
    if _takes(function, bound + 2):
        return not _takes(function, bound + 1) or _is_for_error(function, bound + 1)
    if _takes(function, bound + 1):
        return False
    raise ConfigError(
        f"{where}retry_in{inspect.signature(function)}: write {form}, or without error; it returns seconds"
    )


def as_retry_in(prefix: str, value: Any) -> Any:
    """The function of a ``retry_in`` that is given as seconds, or as a timedelta; anything else as it is. ``prefix``:
    the beginning of a message.

    Raises:
        ConfigError: a wrong length of time.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | timedelta):
        return value
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if not 0 <= seconds <= MAX_TIME:
        raise ConfigError(
            f"{prefix}retry_in={value!r:.100} must be seconds, or a timedelta, of 0 or more, and under 272 years"
        )
    return lambda _retry_count: seconds


def _takes(function: Callable[..., Any], count: int) -> bool:
    try:
        inspect.signature(function).bind(*[None] * count)
    except TypeError:
        return False
    except ValueError:  # something of C's own, which doesn't say
        return count == 1
    return True


def _is_for_error(function: Callable[..., Any], position: int) -> bool:
    """Whether an optional parameter is for the error, and not the function's own."""
    given = [*inspect.signature(function).bind(*[None] * (position + 1)).arguments][-1]
    parameter = inspect.signature(function).parameters[given]
    return parameter.kind is parameter.VAR_POSITIONAL or parameter.name == "error"


def policies_of(own: ByError, default: ByError) -> Policies:
    """The policies of a worker: its own options, and the application's where it has none."""
    policies: dict[type[BaseException], Any] = {}
    for (bury_on, release_on), (own_bury_on, own_release_on) in ((default, own), (own, (None, None))):
        if bury_on and own_bury_on is None:
            policies.update(dict.fromkeys(bury_on))
        if release_on and own_release_on is None:
            policies.update(release_on)
    return policies


def find_policy(policies: Policies, error: BaseException) -> type[BaseException] | None:
    """The class that the error falls under; None: none. A group, as of `asyncio.TaskGroup`, falls under a class if all
    of its errors do: it is buried if one of them is, otherwise released after the longest of their delays.
    """
    if policies:
        for kind in type(error).__mro__:
            if kind in policies:
                return kind
        if isinstance(error, BaseExceptionGroup):
            found = [find_policy(policies, one) for one in error.exceptions]
            kinds = [kind for kind in found if kind is not None]
            if len(kinds) == len(found):
                return max(kinds, key=lambda kind: math.inf if policies[kind] is None else policies[kind] or 0.0)
    return None
