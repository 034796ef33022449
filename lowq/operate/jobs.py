"""Jobs by their ids: looked up in bounded replies, and decoded."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from lowq.codec import MAX_PAYLOAD_DEPTH, decode_id, original_payload
from lowq.job import Job
from lowq.operate.job_filter import JobFilter
from lowq.operate.queues import QueueShards
from lowq.operate.walk import ask
from lowq.settings import Config
from lowq.sharding import Layouts
from lowq.store import Call, untrusted
from lowq.store.shard import ShardScripts

#: Payloads, and bytes of payloads and errors, of one reply; a single payload always fits.
MAX_PAYLOADS = 1000
MAX_BYTES = 2**20
#: Ids that one call looks up.
MAX_IDS = 200
#: Such calls that go out together: each takes up to 2 or 3 ms.
LOOKS_TOGETHER = 3
#: Bytes of payloads and errors after which a page ends, each payload counted as PAYLOAD_BYTES more: what it takes here.
MAX_PAGE_BYTES, PAYLOAD_BYTES = 4 * 2**20, 100
#: What a payload that can't be decoded is shown as: a str of this and the raw bytes, others than text escaped.
UNDECODABLE = "undecodable payload: "


def look_up(
    shards: QueueShards, ids: Sequence[bytes], where: str, now: float | None, room: float = math.inf
) -> tuple[dict[bytes, Job], set[bytes]]:
    """The jobs of these ids until about so many bytes have come, and the ids that were not looked up any more. At least
    the first one is. Shards take turns, so that what came is about what comes first. ``where``: taken, waiting or
    morgue; "": the first of these in which the id is.
    """
    pending: dict[str, list[bytes]] = defaultdict(list)
    for job_id in dict.fromkeys(ids):
        for prefix in shards.prefixes_of(job_id):
            pending[prefix].append(job_id)
    found: dict[bytes, Job] = {}
    while pending and room > 0:
        some = list(pending)[:LOOKS_TOGETHER]
        calls = [fetch_call(prefix, where, pending[prefix][:MAX_IDS], now) for prefix in some]
        for prefix, reply in zip(some, ask(shards.client, calls, LOOKS_TOGETHER), strict=True):
            asked = pending.pop(prefix)
            for job_id, raw in zip(asked, reply, strict=False):
                if raw is not None and job_id not in found:
                    found[job_id] = decode_job(shards.backend.config, job_id, raw)
                    room -= sum(PAYLOAD_BYTES / 2 + len(part) for part in raw if isinstance(part, bytes))
            if len(reply) < len(asked):
                pending[prefix] = asked[len(reply) :]
    return found, {job_id for left in pending.values() for job_id in left}


def fetch_call(prefix: str, where: str, ids: Sequence[bytes], now: float | None) -> Call[list[Any]]:
    """Asks for jobs, as many as fit into a reply."""
    return ShardScripts(prefix).fetch_jobs(ids, where, MAX_PAYLOADS, MAX_BYTES, now)


def admitted_by(shards: QueueShards, wanted: JobFilter, now: float | None) -> Callable[[Sequence[bytes]], set[bytes]]:
    """A function that returns the ids whose job matches the content filter. Jobs are read in bounded batches."""

    def admitted(ids: Sequence[bytes]) -> set[bytes]:
        found, left = set[bytes](), ids
        while left:
            jobs, missing = look_up(shards, left, wanted.where, now, MAX_PAGE_BYTES)
            found |= {job_id for job_id, job in jobs.items() if wanted.admits(job)}
            left = [job_id for job_id in left if job_id in missing]
        return found

    return admitted


# --- an id, everywhere ---


def everywhere_calls(shards: QueueShards, job_id: bytes, now: float | None, layouts: Layouts) -> list[Call[Any]]:
    """Asks for the jobs of an id in flight, waiting, and in the morgue; see `jobs_everywhere`."""
    # In this order a job that moves on meanwhile is rather met twice than not at all.
    return [
        fetch_call(prefix, where, [job_id], now)
        for prefix in shards.prefixes_of(job_id, layouts)
        for where in ("waiting", "taken", "morgue")
    ]


def jobs_everywhere(shards: QueueShards, job_id: bytes, replies: Iterable[Any]) -> list[Job]:
    """The jobs from these replies: what is in flight, waits, and is buried; at most one each."""
    jobs: list[Job] = []
    for (raw,) in replies:
        if raw is not None:
            job = decode_job(shards.backend.config, job_id, raw)
            if all(job.state != other.state for other in jobs):  # of the shard that it leaves, if it is in both
                jobs.append(job)
    return sorted(jobs, key=lambda job: {"taken": 0, "morgue": 2}.get(job.state, 1))


# --- decoding ---


def decode_job(config: Config, job_id: bytes, raw: list[Any]) -> Job:
    """A job from what `fetch_jobs` has of it."""
    state, time, retry_count, error, crashes, payloads_count, *pairs = raw
    # perform_at or the time of burial, the priority, and when the first payload expires.
    at, level, expires = (*(time or b"").split(), None, None, None)[:3]
    buried = state == b"morgue"
    return Job(
        id=decode_id(job_id),
        state=state.decode(),
        payloads=[
            (_decode_payload(config, data), untrusted.figure(score, math.nan))
            for data, score in zip(pairs[::2], pairs[1::2], strict=True)
        ],
        perform_at=None if buried else untrusted.finite(at),
        retry_count=max(retry_count, -1),
        error=_decode_error(config, error) if error else None,
        crashes=untrusted.count(crashes),
        buried_at=untrusted.finite(at) if buried else None,
        payloads_count=payloads_count,
        priority=untrusted.count(level),
        expires_at=untrusted.finite(expires),
    )


def _decode_payload(config: Config, data: bytes) -> Any:
    try:
        payload = config.load_payload(original_payload(data))
    except Exception:
        return UNDECODABLE + data.decode("utf-8", "backslashreplace")
    # Nobody could push it, and not everybody could show it.
    if isinstance(payload, dict | list) and untrusted.deeper_than(payload, MAX_PAYLOAD_DEPTH + 1):
        return UNDECODABLE + data.decode("utf-8", "backslashreplace")
    return payload


def _decode_error(config: Config, data: bytes) -> str:
    try:
        return config.load_error(data)
    except Exception:
        return data.decode("utf-8", "backslashreplace")
