"""A job: as producers push it, and as people see it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Generic, Literal, NotRequired, TypedDict
from uuid import UUID

from lowq.errors import JobError

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
