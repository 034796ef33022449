"""``@lowq.every``: a worker whose queue gets a job at the times of a time table."""

import inspect
from collections.abc import Callable
from datetime import timedelta
from itertools import islice
from typing import Any, TypeVar
from zoneinfo import ZoneInfo

from lowq.errors import ConfigError
from lowq.push.ticks import tick_payload
from lowq.schedules import Missed, Schedule, checked_schedule, schedules_queue
from lowq.store.keys import is_queue_name
from lowq.workers import Worker, payload_type_of, schedules_of

# A plain class that became a worker is no subclass of it for a type checker: `lowq.worker` gives back its type.
W = TypeVar("W", bound=type)
#: Unix time, as ticks have it.
_SOME_TIME = 1_800_000_000.0


def every(
    at: str | float | timedelta, *, tz: str | ZoneInfo | None = None, missed: Missed = "one", name: str | None = None
) -> Callable[[W], W]:
    """Pushes a job to the worker's queue at the times of a time table, once for all nodes::

        @lowq.every("0 8 * * 1", tz="Europe/Berlin")
        @lowq.worker
        def send_report(job_id, payloads): ...

    ``at``: a cron string, read in the time zone ``tz`` (UTC), or an interval, in seconds or as a timedelta, of one
    second at least. The job's id is the ``name``, and its payload ``{"planned_at": Unix time of the tick, seconds}``.
    ``name``: by default that of the queue; of a worker's second schedule that with ``-2`` behind it, counted from the
    worker upwards. The name stays the same when the time table changes, so that no tick is lost or comes twice.
    ``missed``: which ticks are made up for that nobody could perform in time: the latest one, all, or none
    (``"skip"``).

    Raises:
        ConfigError: what is given makes no sense, or it is not above a worker.
    """
    decorated: object = at
    if inspect.isclass(decorated) or inspect.isfunction(decorated):
        raise ConfigError(
            f"{decorated.__name__}: @lowq.every says when; write @lowq.every(30), in seconds, or "
            '@lowq.every("0 8 * * 1")'
        )

    def decorate(target: W) -> W:
        worker = _checked_worker(target)
        present = schedules_of(worker)
        queue = worker.queue_name
        number = len(present) + 1
        chosen = (queue if number == 1 else f"{queue}-{number}") if name is None else name
        added = checked_schedule(worker.__name__, chosen, at, tz, missed)
        _check_name(worker, added, present)
        _check_payloads(worker, added)
        worker._schedules = (*present, added)
        return target

    return decorate


def _checked_worker(worker: object) -> type[Worker[Any]]:
    if not (inspect.isclass(worker) and issubclass(worker, Worker) and vars(worker).get("_app") is not None):
        whose = getattr(worker, "__name__", None) or f"{worker!r:.100}"
        raise ConfigError(
            f"{whose}: @lowq.every(...) goes above @lowq.worker, which makes a worker of it first: write it in the "
            "line before @lowq.worker"
        )
    if not is_queue_name(schedules_queue(worker.queue_name)):
        raise ConfigError(
            f"{worker.__name__}: the queue name {worker.queue_name!r} of a worker with schedules has "
            f"{128 - len(schedules_queue(''))} characters at most"
        )
    return worker


def _check_payloads(worker: type[Worker[Any]], added: Schedule) -> None:
    try:
        for tick in islice(added.after(_SOME_TIME), 2):  # of two, one is no whole number where any is none
            tick_payload(tick, payload_type_of(worker))
    except Exception as error:
        raise ConfigError(
            f'{worker.__name__}: a schedule pushes {{"planned_at": <Unix time>}}, which is no payload of the worker\'s '
            f"type: {error}; give the type a field planned_at: float, and defaults to the others"
        ) from error


def _check_name(worker: type[Worker[Any]], added: Schedule, present: tuple[Schedule, ...]) -> None:
    if any(other.name == added.name for other in present):
        raise ConfigError(
            f"{worker.__name__}: two schedules have the name {added.name!r}; give one of them another: "
            f"@lowq.every({added.at!r}, name=...)"
        )
