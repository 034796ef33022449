"""A job: as producers push it, and as people see it."""

import json
from collections.abc import AsyncIterable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, NotRequired, TypedDict
from uuid import UUID

from lowq.errors import ConfigError, JobError

if TYPE_CHECKING:
    from typing_extensions import TypeVar  # what `typing` has from Python 3.13 on

    P = TypeVar("P", default=Any)
else:
    from typing import TypeVar

    P = TypeVar("P")

#: The types of an entity's id. It is kept and handed over as ``str``.
JobId = str | int | UUID
#: The state of a job; docs/design.md has a drawing.
State = Literal["scheduled", "due", "retrying", "taken", "morgue"]


class JobDict(TypedDict, Generic[P]):
    """A job as producers push it: ``JobDict[Order]``, or ``JobDict`` with any payload."""

    id: JobId
    #: A JSON value; ``""`` by default.
    payload: NotRequired[P]
    #: The payload's order within its id: a version or a time. The server's clock by default.
    score: NotRequired[float]
    #: When to run: Unix time in seconds, or an aware datetime. Now by default. Later times than the year 2242 are moved
    #: there, and mean "never".
    perform_at: NotRequired[float | datetime]
    #: Lowkiq's name of ``perform_at``.
    perform_in: NotRequired[float | datetime]
    #: When to run, from now on: seconds or timedelta.
    delay: NotRequired[float | timedelta]
    #: When the payload expires, counted from its arrival: seconds or timedelta. An expired payload is removed, and
    #: never handed out. None: it never expires.
    ttl: NotRequired[float | timedelta | None]
    #: 0, the most urgent, to 9: due jobs of a shard are taken in this order. By default that of the queue.
    priority: NotRequired[int]


#: The jobs of `Queue.push` and `Worker.perform_async`: one, or any iterable of them. A `JobDict` is such a mapping.
Jobs = Mapping[str, Any] | Iterable[Mapping[str, Any]]
#: The jobs of a coroutine's push, which may also be an async iterable.
AnyJobs = Jobs | AsyncIterable[Mapping[str, Any]]


class Untyped:
    """Stands for payloads of any type, for type checkers: workers and queues without a type of payloads take any
    mappings, others only a `JobDict` of their payloads.
    """


class JobOptions(TypedDict, total=False):
    """The options of ``push(id, payload, ...)``, as in a `JobDict`; None counts as not given."""

    score: float | None
    perform_at: float | datetime | None
    delay: float | timedelta | None
    ttl: float | timedelta | None
    priority: int | None


def new_job(job_id: JobId, payload: Any, options: JobOptions) -> dict[str, Any]:
    """The `JobDict` of an id, its payload and the options.

    Raises:
        JobError: the options have another id.
    """
    if "id" in options:  # it would replace the other one
        other = dict(options)["id"]
        raise JobError(f"two ids are given, {job_id!r:.60} and id={other!r:.60}: write push(42, payload)")
    return {"id": job_id, "payload": payload} | {name: value for name, value in options.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Attempt:
    """An attempt of an id that failed, of a queue with ``keep_finished``."""

    #: Unix time, seconds.
    at: float
    #: How long it was in flight, with all of its batch.
    seconds: float
    #: The name of the node, or of the consumer.
    node: str
    #: The last line of the error; what ``dump_error`` made of it, if that is short.
    error: str


@dataclass(frozen=True, slots=True)
class Job:
    """A job at one moment, in any state."""

    id: str
    state: State
    #: ``(payload, score)``, lowest score first. At most the first 1,000, or about 1 MiB, of a long list.
    payloads: list[tuple[Any, float]]
    #: Unix time, seconds, at which the job is or was to run; None in the morgue.
    perform_at: float | None
    #: -1: fresh; n: failed n + 1 times.
    retry_count: int = -1
    #: The last error, or in the morgue the reason.
    error: str | None = None
    #: The number of owners that died with the job in flight.
    crashes: int = 0
    #: Unix time, seconds; only in the morgue.
    buried_at: float | None = None
    #: The number of all payloads, also when ``payloads`` holds only the first of them.
    payloads_count: int = 0
    #: 0, the most urgent, to 9; of a waiting job.
    priority: int = 0
    #: Unix time, seconds: when its first waiting payload expires; None: none does.
    expires_at: float | None = None
    #: The last five attempts that failed, oldest first, of a queue with ``keep_finished``.
    attempts: tuple[Attempt, ...] = ()


@dataclass(slots=True, eq=False)  # not frozen: that would cost more than all else about it
class ConsumerJob:
    """A job that a consumer has taken. Reported once, by `ack`, `release`, `bury` or `fail`. Each of them raises
    `NotTaken` when the consumer has the job no more, and `RedisUnavailable` when it may be called again.
    """

    id: str
    #: Oldest (lowest score) first.
    payloads: list[Any]
    #: -1 fresh, n: failed n + 1 times.
    retry_count: int
    #: Reports the job in any process that has the session: ``consumer.ack(receipt)``.
    receipt: str
    #: The fencing token: grows with every change of the shard's owner. A database that remembers the highest one it saw
    #: can refuse an owner that was replaced without noticing.
    fence: int
    #: Its `Consumer`.
    _consumer: Any = field(repr=False)
    #: It is handed over without others, so that they are not in flight should it end the process.
    _is_solo: bool = field(default=False, repr=False)

    @property
    def payload(self) -> Any:
        """The newest of the payloads; None if somebody has removed them by hand."""
        return self.payloads[-1] if self.payloads else None

    @property
    def is_cancelled(self) -> bool:
        """Whether the job is to end: it was cancelled, or a newer payload has come with ``on_push="cancel_running"``.
        Release it then, and it is removed, or waits with that payload. Known as soon as the consumer hears of it.
        """
        return bool(self._consumer._hand.is_cancelled(self.receipt))

    def ack(self) -> None:
        """The job is done."""
        self._consumer.ack(self.receipt)

    def release(self, delay: float | timedelta | None = None) -> None:
        """The job waits again, uncharged: for so many seconds, or as it did before."""
        self._consumer.release(self.receipt, delay)

    def bury(self, reason: str = "") -> None:
        """The job goes to the morgue."""
        self._consumer.bury(self.receipt, reason)

    def fail(self, error: BaseException | str = "", delay: float | timedelta | None = None) -> None:
        """The job is charged a retry, and waits for it; without any left its oldest payload goes to the morgue."""
        self._consumer.fail(self.receipt, error, delay)

    def touch(self, seconds: float | timedelta) -> None:
        """From now on the job has so many seconds until ``ttr`` passes."""
        self._consumer.touch(self.receipt, seconds)


# --- what people look for in jobs ---

#: Characters of a text to look for, and names of fields in it.
MAX_TEXT, MAX_NAMES = 512, 20


class PayloadField(NamedTuple):
    """A field of a payload, by its path, and the value wanted."""

    path: tuple[str, ...]
    value: str

    @classmethod
    def parse(cls, text: object) -> "PayloadField":
        """``a.b:7``: the field ``b`` of the object in the field ``a``. The value may have colons.

        Raises:
            ConfigError: it is none.
        """
        check_text("payload", text)
        name, colon, value = str(text).partition(":")
        path = tuple(name.strip().split("."))
        if not colon or not all(path) or not value.strip():
            raise ConfigError(f"payload={text!r:.100}: it is a field and its value, such as customer:7 or order.id:7")
        if len(path) > MAX_NAMES:
            raise ConfigError(f"payload={text!r:.100} has {len(path)} names; a path has at most {MAX_NAMES}")
        return cls(path, value.strip())

    def holds(self, payload: Any) -> bool:
        """Whether the payload has that value there. One element of a list is enough, 7 is 7 and "7", and a name may
        have dots in it.
        """
        return self._is_in(payload, self.path)

    def _is_in(self, value: Any, path: Sequence[str]) -> bool:
        if isinstance(value, list | tuple):
            return any(self._is_in(item, path) for item in value)
        if not path:
            return self._equals(value)
        if not isinstance(value, dict):
            return False
        for count in range(1, len(path) + 1):
            name = ".".join(path[:count])
            if name in value and self._is_in(value[name], path[count:]):
                return True
        return False

    def _equals(self, value: Any) -> bool:
        if isinstance(value, str):
            return value.strip() == self.value
        if value is None or isinstance(value, bool | int | float):
            return json.dumps(value) == self.value
        return str(value) == self.value


def check_text(name: str, text: object) -> None:
    """
    Raises:
        ConfigError: it is no text, or too long.
    """
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(f"{name}={text!r:.100}: it is a text to look for")
    if len(text) > MAX_TEXT:
        raise ConfigError(f"{name}={text!r:.50}... has {len(text)} characters; it has at most {MAX_TEXT}")
