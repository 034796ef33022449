"""Pushes of schedules: ticks, together with the record of their schedule."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lowq.codec import dump_payload, encode_id
from lowq.codec.types import PayloadType
from lowq.errors import MiddlewareError, QueueFull, Resharding
from lowq.push.batcher import ThreadRequest
from lowq.push.calls import SharedCall, is_full, is_misrouted
from lowq.push.push import Push
from lowq.push.target import ANEW, Target
from lowq.push.write import Write
from lowq.store.shard import ShardScripts


def tick_payload(tick: float, payload_type: PayloadType | None) -> Any:
    """The payload of a schedule's tick, as the type that the queue's worker says.

    Raises:
        Whatever says why the type has no such value.
    """
    payload = {"planned_at": tick}
    return payload if payload_type is None else payload_type.load(dump_payload(payload))


def push_ticks(
    target: Target, schedule: str, ticks: Sequence[float], record: bytes, new_record: bytes, *, is_anew: bool = False
) -> bool:
    """Pushes ticks of a schedule and changes its record, in one script call. Returns whether the record was still the
    one that the caller has read; otherwise nothing is written. So a tick is pushed once, whoever tries again.
    ``is_anew``: Redis has lost the shard.

    Raises:
        LowqError: client middlewares gave the jobs another id. What else `push` raises.
    """
    jobs = [{"id": schedule, "payload": tick_payload(tick, target.payload_type), "score": tick} for tick in ticks]
    words = target.words + b" ticks=%b>%b" % (record, new_record) + (ANEW if is_anew else b"")
    parts = Push(replace(target, words=words), jobs, None).prepare_all()
    if not parts:  # the middlewares want none of them
        layout, shard, _ = target.routes.find(encode_id(schedule))
        prefix = target.prefix(layout, shard)
        return bool(target.group.client.call(ShardScripts(prefix).set_schedule(schedule, record, new_record)))
    part = parts[0]
    if len(parts) > 1 or part.items[0][0] != encode_id(schedule):
        raise MiddlewareError(
            f"a client middleware gave jobs of the schedule {schedule!r} another id: leave it to them"
        )
    request = ThreadRequest(parts, 1, 0, math.inf)
    write = Write(target.group.writer, [request])
    write.calls = [SharedCall(request, part, b"")]
    write.send()
    refusal, outcome = request.again.get(part), request.outcomes.get(part)
    if is_misrouted(refusal):
        if target.note_misrouted(part, refusal) and not is_anew:
            return push_ticks(target, schedule, ticks, record, new_record, is_anew=True)
        return False  # the caller reads the record again, where it is now
    if is_full(refusal):
        raise QueueFull(target.queue, 0, jobs, target.options.capacity or 0)
    if isinstance(outcome, Exception) and not isinstance(outcome, Resharding):
        raise outcome
    if outcome is not True:
        return False
    if target.events.follows_jobs:
        target.events.jobs_changed("pushed", part.ids(), 1)
    return True
