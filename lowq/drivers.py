"""Drivers: parts of lowq that an installed package brings, by name.

A package names them in its entry points, and the settings and options refer to the names. Entry points are read only
when a driver is asked for that is not lowq's own.
"""

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal

from lowq.errors import ConfigError

Kind = Literal["splitter", "scheduler", "codec", "merge", "queue"]

#: kind -> the group of its entry points.
GROUPS: Mapping[str, str] = {
    "splitter": "lowq.splitters",
    "scheduler": "lowq.schedulers",
    "codec": "lowq.codecs",
    "merge": "lowq.merges",
    "queue": "lowq.queues",
}

#: kind -> name -> where it is.
_OWN: Mapping[str, Mapping[str, str]] = {
    "splitter": {
        "balanced": "lowq.shards.splitter:BalancedSplitter",
        "default": "lowq.shards.splitter:DefaultSplitter",
    },
    "scheduler": {"lag": "lowq.shards.scheduler:LagScheduler", "seq": "lowq.shards.scheduler:SeqScheduler"},
    "codec": {"json": "lowq.codec"},
    "merge": {},
    "queue": {"default": "lowq.queue:Queue"},
}
#: The merge policies that Redis has.
_MERGES = ("append", "collapse", "latest")


def names(kind: Kind) -> list[str]:
    """The names of all drivers of a kind, in order."""
    own = set(_MERGES if kind == "merge" else _OWN[kind])
    return sorted(own | {point.name for point in entry_points(group=GROUPS[kind])})


def check(kind: Kind, name: object) -> str:
    """Checks the name of a driver, without importing it.

    Raises:
        ConfigError: there is no such driver, or two packages have one of that name.
    """
    if not isinstance(name, str) or (name not in _OWN[kind] and _find(kind, name) is None):
        raise _unknown(kind, name)
    return name


def load(kind: Kind, name: str) -> Any:
    """The driver of that name.

    ==========  =====================================================================================
    splitter    ``(threads) -> splitter``, called by each node
    scheduler   ``() -> scheduler``, called for each queue of each thread
    codec       a module or object with ``dump_payload(payload) -> bytes`` and ``load_payload(bytes)``
    merge       ``(payloads) -> payloads``
    queue       a subclass of ``lowq.Queue``
    ==========  =====================================================================================

    Raises:
        ConfigError: there is none, or it can't be imported, or it has the wrong form.
    """
    given: object = name
    if not isinstance(given, str):
        raise _unknown(kind, given)
    place = _OWN[kind].get(name)
    if place is not None:
        module, _, attribute = place.partition(":")
        found = import_module(module)
        return getattr(found, attribute) if attribute else found
    point = _find(kind, name)
    if point is None:
        raise _unknown(kind, name)
    try:
        driver = point.load()
    except Exception as error:
        raise ConfigError(f"{_described(kind, point)} can't be imported: {error!r}") from error
    must_be, is_right = _FORMS[kind]
    if not is_right(driver):
        raise ConfigError(f"{_described(kind, point)} is {driver!r:.100}; it must be {must_be}")
    return driver


def _find(kind: Kind, name: str) -> EntryPoint | None:
    points = list(entry_points(group=GROUPS[kind], name=name))
    if len({point.value for point in points}) > 1:
        places = ", ".join(sorted(f"{point.value} ({_package(point)})" for point in points))
        raise ConfigError(f"{kind} {name!r} is there more than once, in the entry points {GROUPS[kind]}: {places}")
    return points[0] if points else None


def _package(point: EntryPoint) -> str:
    return "an unknown package" if point.dist is None else point.dist.name


def _described(kind: Kind, point: EntryPoint) -> str:
    return f"{kind} {point.name!r}, {point.value} of {_package(point)},"


def _unknown(kind: Kind, name: object) -> ConfigError:
    known = names(kind)
    near = get_close_matches(name, known, 1) if isinstance(name, str) else []
    hint = f"Did you mean {near[0]!r}? " if near else ""
    return ConfigError(
        f"there is no {kind} {name!r:.100}. {hint}There are {', '.join(known)}; an installed package adds others by "
        f"entry points in the group {GROUPS[kind]!r}"
    )


def _is_codec(driver: Any) -> bool:
    return all(callable(getattr(driver, name, None)) for name in ("dump_payload", "load_payload"))


def _is_queue(driver: Any) -> bool:
    return isinstance(driver, type) and issubclass(driver, load("queue", "default"))


#: kind -> the form of a driver in words, and its check.
_FORMS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "splitter": ("a callable (threads) -> splitter", callable),
    "scheduler": ("a callable () -> scheduler", callable),
    "codec": ("a module or object with dump_payload and load_payload", _is_codec),
    "merge": ("a callable (payloads) -> payloads", callable),
    "queue": ("a subclass of lowq.Queue", _is_queue),
}
