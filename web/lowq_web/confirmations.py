"""Confirmation pages: a form carries how many jobs its page has shown, and the time, so that the answer is bound to it.

Nothing that came after that time is touched, whatever else the form says. The time of a job that is not due does not
say when the job came. So a snapshot of these jobs is kept, under a name that the form carries: in the memory of this
process, and up to `MAX_SHARED` of them in Redis for the others. When the snapshot was dropped meanwhile, only the time
bounds the action (`lowq.Queue.bulk`).
"""

import contextlib
import math
import re
import secrets
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import lowq
from lowq import inspection
from lowq.admin import Moments
from lowq.store.keys import confirmations_key
from lowq_web.token_store import TokenStore

#: Seconds after which a confirmation is asked for again.
MAX_AGE = 3600.0
#: Snapshots that are kept, and the jobs that they remember together; the oldest are dropped.
MAX_WAITING, MAX_REMEMBERED = 100, 2_000_000
#: Jobs of a snapshot that other processes are given, too, 8 bytes each; and such snapshots, the latest.
MAX_SHARED, SHARED_WAITING = 250_000, 10
#: When the number of jobs has changed by more than this part, the question is asked again.
TOLERANCE = 0.1

_AGAIN = "Nothing was done. Go back to the queue and press the button again: then you are asked again, too."


class Snapshots:
    """The snapshots of confirmation pages. Safe for threads."""

    def __init__(self, app: lowq.Lowq) -> None:
        self._shared = TokenStore(app, confirmations_key(app.config.namespace), SHARED_WAITING, int(MAX_AGE))
        self._lock = threading.Lock()
        self._waiting: dict[str, inspection.Snapshot] = {}

    def keep(self, snapshot: inspection.Snapshot) -> str:
        """Keeps it for a while; returns its name, which nobody can guess."""
        name = secrets.token_urlsafe(9)
        if len(snapshot) <= MAX_SHARED:
            with contextlib.suppress(lowq.LowqError):  # then it is known to this process alone
                name = self._shared.leave(snapshot.pack())
        with self._lock:
            self._waiting[name] = snapshot
            while len(self._waiting) > MAX_WAITING or sum(map(len, self._waiting.values())) > MAX_REMEMBERED:
                del self._waiting[next(iter(self._waiting))]
        return name

    def get(self, name: str) -> inspection.Snapshot | None:
        """The snapshot of that name, if it is still there.

        Raises:
            RedisUnavailable, RedisRefused
        """
        with self._lock:
            found = self._waiting.get(name)
        if found is not None:
            return found
        raw = self._shared.find(name)
        return None if raw is None else inspection.Snapshot.unpack(raw)


@dataclass(frozen=True, slots=True)
class Confirmation:
    """What a confirmation page has shown."""

    #: Jobs.
    count: int
    #: Unix time, seconds, by Redis's clock.
    at: float

    def outdated(self, count: int, now: float) -> bool:
        """Whether the question must be asked again, given the present number of jobs."""
        return now - self.at > MAX_AGE or abs(count - self.count) > self.count * TOLERANCE


def confirmation_of(form: Mapping[str, str], now: float) -> Confirmation:
    """What the page of a form has shown, as the form has it.

    Raises:
        ConfigError: it doesn't say so, or something that no page has shown.
    """
    count, at = form.get("count"), form.get("at")
    if count is None or at is None:
        raise lowq.ConfigError(f"The form does not say how many jobs its page has shown, and when. {_AGAIN}")
    try:
        moment = float(at)
    except ValueError:
        moment = math.nan
    # A second more, as clocks differ.
    if not re.fullmatch("[0-9]{1,15}", count, re.ASCII) or not 0 < moment <= now + 1:
        raise lowq.ConfigError(
            f"The form says that its page has shown {count:.30} jobs, as of {at:.30}: no page has done that. {_AGAIN}"
        )
    return Confirmation(int(count), moment)


def snapshot_of(form: Mapping[str, str], given: Confirmation, snapshots: Snapshots) -> "inspection.Snapshot | float":
    """What bounds the action: the snapshot of the page, or its time if the snapshot is not there any more.

    Raises:
        ConfigError: the page has shown something else than the form says.
    """
    found = snapshots.get(form.get("snapshot", ""))
    if found is None:
        return given.at
    if (found.total, found.at) != (given.count, given.at):
        raise lowq.ConfigError(f"The form does not say what its page has shown: {found.total:,} jobs. {_AGAIN}")
    return found


# --- named ids -----------------------------------------------------------------------------------------------


def encode_moments(moments: Moments) -> str:
    """The times of an id's jobs as a form field carries them."""
    return " ".join("-" if at is None else repr(at) for at in moments)


K = TypeVar("K")


def moments_of(fields: Sequence[tuple[str, str]], ids: Sequence[K]) -> dict[K, Moments]:
    """The times of the ids in a form, in their order.

    Raises:
        ConfigError: it doesn't, or not of each.
    """
    given = [value for name, value in fields if name == "seen"]
    try:
        found = {job_id: _decoded(value) for job_id, value in zip(ids, given, strict=True)}
    except ValueError:
        raise lowq.ConfigError(f"The form does not say what its page has shown of each job. {_AGAIN}") from None
    return found


def _decoded(value: str) -> Moments:
    perform_at, buried_at = (None if part == "-" else float(part) for part in value.split(" "))
    return perform_at, buried_at
