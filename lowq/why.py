"""Why an id is not being performed right now, in a sentence."""

from dataclasses import dataclass
from typing import Any, Literal

from lowq.connection import Client
from lowq.duration import duration
from lowq.job import State
from lowq.scripts import time_argument

#: absent      there is no such id
#: buried      it is in the morgue
#: performing  it is in flight: being performed, or about to be
#: not_due     its time has not come
#: retry_wait  it failed and its retry has not come
#: paused      its time has come, and the queue is paused
#: no_owner    its time has come (or it was in flight), and its shard is leased to nobody
#: behind      its time has come, and older jobs of its shard come first
#: next        it is the next one of its shard
Reason = Literal["absent", "buried", "performing", "not_due", "retry_wait", "paused", "no_owner", "behind", "next"]


@dataclass(frozen=True, slots=True)
class Why:
    """Where an id is, and what keeps it."""

    #: None: nowhere.
    state: State | None
    reason: Reason
    #: Unix time, seconds, at which the reason ends by itself; None when no time ends it.
    until: float | None
    #: For people.
    detail: str


def explain(client: Client, prefix: str, shard: int, job_id: bytes, max_retry_count: int, now: float | None) -> Why:
    """Asks Redis for all that decides, and puts it into words.

    Raises:
        RedisUnavailable, RedisRefused
    """
    reply = client.run("why", prefix, time_argument(now), job_id)
    time, horizon, record, perform_at, retry_count, rank, buried_at, paused, lease, _ttl, solo = reply
    nobody = f"shard {shard} is leased to nobody: all nodes of this queue are down or quiet, or none has it yet"
    if record is not None:
        waits = "; newer payloads wait for its next run" if perform_at is not None else ""
        if lease is None:
            detail = f"its owner is gone; whoever gets shard {shard} next puts it back and performs it again{waits}"
            return Why("taken", "no_owner", None, detail)
        since = duration(float(time) - float(record.split()[4]))
        return Why("taken", "performing", None, f"taken {since} ago by {_owner(lease)}{waits}")
    if perform_at is None:
        if buried_at is None:
            return Why(None, "absent", None, "no such job waits, is in flight or is buried")
        ago = duration(float(time) - float(buried_at))
        return Why("morgue", "buried", None, f"buried {ago} ago; kick it to have it performed")
    due_at = float(perform_at)
    # The retry_count of a failed job counts from 0, people count from 1.
    retry = "" if retry_count is None else f"retry {int(float(retry_count)) + 1} of {max_retry_count}, "
    if due_at > float(horizon):
        halted = "; the queue is paused, too" if paused is not None else ""
        detail = f"{retry}due in {duration(due_at - float(time))}{halted}"
        return Why("scheduled" if not retry else "retrying", "retry_wait" if retry else "not_due", due_at, detail)
    if paused is not None:
        detail = f"{retry}due, and the queue is paused since {duration(float(time) - float(paused))}; resume it"
        return Why("due", "paused", None, detail)
    if lease is None:
        return Why("due", "no_owner", None, retry + nobody)
    if rank:
        jobs = "1 older job" if rank == 1 else f"{rank} older jobs"
        return Why("due", "behind", None, f"{retry}behind {jobs} of shard {shard}")
    alone = ", alone" if solo else ""
    return Why("due", "next", None, f"{retry}next of shard {shard}, which {_owner(lease)} works{alone}")


def _owner(token: Any) -> str:
    return f"owner {token.decode().rpartition(':')[0]}"
