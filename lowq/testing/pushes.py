"""The payloads that were pushed, as the store got them: for `assert_pushed`."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lowq.application import Lowq
from lowq.codec import decode_id, dump_payload, encode_id, encode_job
from lowq.errors import ConfigError
from lowq.job import JobOptions
from lowq.push.calls import pushed_items
from lowq.store import Call
from lowq.store.keys import queue_of_prefix
from lowq.testing.drainer import worker_of
from lowq.workers import Worker, payload_type_of

#: Pushes that a failure lists.
MOST_SHOWN = 20
#: Characters of a payload that a failure shows.
MOST_CHARACTERS = 300


class _Any:
    def __repr__(self) -> str:
        return "..."


#: Stands for any value.
ANYTHING: Any = _Any()
#: Store, namespace and name of a queue.
Place = tuple[int, str, str]


@dataclass(frozen=True, slots=True)
class Pushed:
    """A payload that was pushed and accepted."""

    queue: str
    id: str
    #: As a handler gets it.
    payload: Any
    #: None: the server's clock gave it one.
    score: float | None = None
    #: Unix time, seconds; None: none was given.
    perform_at: float | None = None
    #: Seconds; None: none was given.
    delay: float | None = None
    #: Seconds, its own or that of its queue; None: it never expires.
    ttl: float | None = None
    #: Its own, or that of its queue.
    priority: int = 0
    data: bytes = field(default=b"", repr=False)
    place: Place = field(default=(0, "", ""), repr=False)

    def __str__(self) -> str:
        said = {name: getattr(self, name) for name in ("score", "perform_at", "delay", "ttl")}
        parts = [f"id {self.id!r}", f"payload {short(self.payload)}"]
        parts += [f"{name} {value!r}" for name, value in said.items() if value is not None]
        if self.priority:
            parts.append(f"priority {self.priority}")
        return "  ".join(parts)


class Pushes:
    """The accepted payloads, in their order."""

    def __init__(self) -> None:
        self.all: list[Pushed] = []

    def note(self, store: int, call: Call[Any], load: Callable[[bytes], Any]) -> None:
        """Notes a push that was carried out."""
        namespace, queue = queue_of_prefix(call.key)
        place = store, namespace, queue
        for job_id, data, score, moment, ttl, priority in pushed_items(call.data):
            is_delay = moment[:1] == b"+"
            self.all.append(
                Pushed(
                    queue,
                    decode_id(job_id),
                    _loaded(data, load),
                    _number(score),
                    None if is_delay else _number(moment),
                    _number(moment) if is_delay else None,
                    _number(ttl),
                    int(priority or 0),
                    data,
                    place,
                )
            )

    def check(
        self, target: object, job_id: object, payload: Any, times: int | None, options: JobOptions
    ) -> list[Pushed]:
        """Returns the payloads that the arguments describe.

        Raises:
            AssertionError: there is none, or not ``times``. ConfigError, JobError: the arguments make no sense.
        """
        __tracebackhide__ = True
        given: object = times
        if given is not None and (isinstance(given, bool) or not isinstance(given, int) or given < 0):
            raise ConfigError(f"assert_pushed(times={times!r}): write how many times, as 0 or 2; None: at least once")
        name, is_there, dump = _place_of(target)
        wanted = _Wanted(job_id, payload, options, dump)
        there = [pushed for pushed in self.all if is_there(pushed.place)]
        found = [pushed for pushed in there if not wanted.differences(pushed)]
        if len(found) == times or (times is None and found):
            return found
        raise AssertionError(self._failure(name, wanted, times, there, found))

    def _failure(
        self, name: str, wanted: "_Wanted", times: int | None, there: list[Pushed], found: list[Pushed]
    ) -> str:
        said = f" with {wanted}" if str(wanted) else ""
        if times is None:
            head = f"{name}: nothing was pushed{said}"
        else:
            head = f"{name}: pushed {_times(len(found))}{said}, not {_times(times)}"
        if not there:
            others = Counter(pushed.queue for pushed in self.all)
            listed = ", ".join(f"{queue} ({count})" for queue, count in others.items()) or "nothing was pushed at all"
            return f"{head}\nto other queues: {listed}" if others else f"{head}; {listed}"
        # The most similar first; equally similar ones in the order in which they came.
        near = sorted(there, key=lambda pushed: len(wanted.differences(pushed)))
        lines = [f"{head}\npushed to {name} ({len(there)}):"]
        for pushed in near[:MOST_SHOWN]:
            other = wanted.differences(pushed)
            lines.append(f"  {pushed}" + (f"   <- another {', '.join(other)}" if other else ""))
        if len(near) > MOST_SHOWN:
            lines.append(f"  and {len(near) - MOST_SHOWN} more")
        return "\n".join(lines)


class _Wanted:
    """The payload that `assert_pushed` looks for."""

    def __init__(self, job_id: object, payload: Any, options: JobOptions, dump: Callable[[Any], bytes]) -> None:
        self._id = job_id if job_id is ANYTHING else decode_id(encode_id(job_id))
        self._payload = payload
        self._data = b"" if payload is ANYTHING else _dumped(payload, dump)
        unknown = options.keys() - JobOptions.__annotations__.keys()
        if unknown:
            known = ", ".join(["id", "payload", *JobOptions.__annotations__, "times"])
            raise ConfigError(f"assert_pushed({min(unknown)}=...): it may be asked for {known}")
        self._options = {name: _plain(name, value) for name, value in options.items()}

    def differences(self, pushed: Pushed) -> list[str]:
        """The fields in which a payload differs."""
        other = [] if self._id is ANYTHING or self._id == pushed.id else ["id"]
        if self._payload is not ANYTHING and self._data != pushed.data and not _equal(self._payload, pushed.payload):
            other.append("payload")
        return other + [name for name, value in self._options.items() if value != getattr(pushed, name)]

    def __str__(self) -> str:
        parts = [] if self._id is ANYTHING else [f"id {self._id!r}"]
        parts += [] if self._payload is ANYTHING else [f"payload {short(self._payload)}"]
        return ", ".join([*parts, *(f"{name} {value!r}" for name, value in self._options.items())])


def _place_of(target: object) -> tuple[str, Callable[[Place], bool], Callable[[Any], bytes]]:
    """The name of the worker or queue, whether a place is its own, and how its payloads are encoded.

    Raises:
        ConfigError: it is neither.
    """
    if isinstance(target, str):
        return target, lambda place: place[2] == target, dump_payload
    worker: type[Worker[Any]] = worker_of(target)  # type: ignore[arg-type]  # which looks whether it is one
    app = worker._app
    assert isinstance(app, Lowq)
    own = place_in(app, worker.queue_name)
    typed = payload_type_of(worker)
    return worker.queue_name, lambda place: place == own, app.config.dump_payload if typed is None else typed.dump


def place_in(app: Lowq, queue: str) -> Place:
    """The place of a queue of an application."""
    return id(app._store), app.config.namespace, queue


def _plain(name: str, value: Any) -> Any:
    """The value of an option in a `Pushed`."""
    if value is None:
        return 0 if name == "priority" else None
    # Encoded and read again, so that it is refused where a push refuses it.
    encoded = encode_job({"id": "1", name: value}, lambda _: b"", 1)
    if name == "priority":
        return value
    return _number(encoded[{"score": 2, "ttl": 4}.get(name, 3)])


def _number(text: bytes) -> float | None:
    return float(text) if text else None


def _loaded(data: bytes, load: Callable[[bytes], Any]) -> Any:
    try:
        return load(data)
    except Exception:
        return data


def _dumped(payload: Any, dump: Callable[[Any], bytes]) -> bytes | None:
    try:
        return dump(payload)
    except Exception:  # such as a matcher, which is equal to what it matches
        return None


def _equal(wanted: Any, payload: Any) -> bool:
    """As ``==``, but True is not 1, as in JSON. Parts may be matchers."""
    try:
        if isinstance(wanted, int | float) and isinstance(payload, int | float):
            return wanted == payload and isinstance(wanted, bool) == isinstance(payload, bool)
        if isinstance(wanted, dict) and isinstance(payload, dict):
            return wanted.keys() == payload.keys() and all(_equal(item, payload[key]) for key, item in wanted.items())
        if isinstance(wanted, list | tuple) and isinstance(payload, list | tuple):
            return len(wanted) == len(payload) and all(map(_equal, wanted, payload))
        return bool(wanted == payload)
    except Exception:
        return False


def short(payload: Any) -> str:
    """A payload as a failure shows it."""
    text = repr(payload)
    return text if len(text) <= MOST_CHARACTERS else f"{text[: MOST_CHARACTERS - 1]}…"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
