"""Checks that the payloads of each id are handed over in the order of their scores, without gaps: for `assert_ordered`.

It follows every script call that changes the waiting payloads, to know which should have been handed over::

    pushed --> waiting --handed over--> taken --acknowledged, buried--> gone
                  ^                       |
                  +-- failed, released, its owner died --+

Payloads must be handed over in the order of their scores, and none with a lower score may be left waiting for the id.
Payloads that may be removed without being handed over are not followed: those with a ``ttl``, and those of a queue with
``merge="latest"``. Nor is an id that was kicked out of the morgue.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lowq.codec import decode_id, original_payload
from lowq.push.calls import pushed_items
from lowq.store import Call
from lowq.store.keys import queue_of_prefix
from lowq.testing.pushes import short

#: A shard: its store, and its prefix there.
_Shard = tuple[int, str]
#: Problems that a failure lists.
MOST_SHOWN = 20


@dataclass(slots=True)
class _Payload:
    """A payload that was pushed."""

    data: bytes
    #: None: the shard's clock gave it one, which is known when it is handed over.
    score: float | None
    #: The number of its push; None: its place is not known, as of two equal ones one had a score and one had not.
    number: int | None
    was_reported: bool = False


@dataclass(slots=True)
class _Id:
    """The followed payloads of an id."""

    waiting: list[_Payload] = field(default_factory=list)
    taken: list[_Payload] = field(default_factory=list)
    #: The delivery of the taken payloads, and the lowest payload of it.
    delivery: int = 0
    lowest: bytes = b""
    is_followed: bool = True


class OrderCheck:
    """Follows the calls to all shards of a sandbox, in the order in which they are carried out."""

    def __init__(self) -> None:
        #: (queue, text) of what was wrong.
        self.problems: list[tuple[str, str]] = []
        #: Queues with payloads that were handed over.
        self.handed_over: set[str] = set()
        self._shards: defaultdict[_Shard, defaultdict[bytes, _Id]] = defaultdict(lambda: defaultdict(_Id))
        self._appending: set[_Shard] = set()
        self._pushes = 0
        self._followed: dict[str, Callable[[_Shard, Call[Any], Any, Callable[[bytes], Any]], None]] = {
            "push": self._on_push,
            "ack_and_take": self._on_ack_and_take,
            "fail": self._on_fail,
            "release": self._on_release,
            "bury": self._on_bury,
            "acquire": self._on_acquire,
            "delete": self._on_delete,
            "kick": self._on_kick,
            "drop": self._on_drop,
        }

    def note(self, store: int, call: Call[Any], reply: Any, load: Callable[[bytes], Any]) -> None:
        """Notes a script call that was carried out."""
        follow = self._followed.get(call.script)
        if follow is not None:
            follow((store, call.key), call, reply, load)

    def note_performed(
        self, queue: str, taken: Sequence[tuple[str, list[Any]]], given: dict[str, list[Any]], *, may_drop: bool
    ) -> None:
        """Notes the payloads ``given`` to a handler, which middlewares and a merge function may have made of those
        ``taken``. Other payloads than those taken are not checked. ``may_drop``: there is a merge function.
        """
        for job_id, payloads in taken:
            got = given.get(job_id)
            if got is None or not all(item in payloads for item in got):
                continue
            rest = iter(payloads)
            if not all(item in rest for item in got):
                what = "a middleware or the merge function has changed the order"
            elif len(got) < len(payloads) and not may_drop:
                what = "a middleware has left out payloads"
            else:
                continue
            self.problems.append((queue, f"id {job_id!r}: {what}: perform got {', '.join(map(short, got)) or 'none'}"))

    def failure(self, queues: Sequence[str]) -> str:
        """Describes what was wrong with these queues, or with any; "": nothing."""
        found = [f"  {queue}, {text}" for queue, text in self.problems if not queues or queue in queues]
        if not found:
            return ""
        more = [f"  and {len(found) - MOST_SHOWN} more"] if len(found) > MOST_SHOWN else []
        return "\n".join(["payloads were not handed over in order:", *found[:MOST_SHOWN], *more])

    # --- the scripts ---

    def _on_push(self, shard: _Shard, call: Call[Any], _reply: Any, _load: Any) -> None:
        if b"merge=latest" in call.data[4]:
            return
        if b"merge=append" in call.data[4]:
            self._appending.add(shard)
        for job_id, data, score, _, ttl, _ in pushed_items(call.data):
            self._pushes += 1
            if not ttl and self._shards[shard][job_id].is_followed:
                payload = _Payload(data, float(score) if score else None, None if score else self._pushes)
                self._put(shard, self._shards[shard][job_id], payload)

    def _on_ack_and_take(self, shard: _Shard, call: Call[Any], reply: Any, load: Callable[[bytes], Any]) -> None:
        ids = self._shards[shard]
        for job_id in map(_bytes, call.args[7:]):
            if ids[job_id].delivery == int(call.args[6]):
                ids[job_id].taken.clear()
        for job_id, payloads in reply.jobs():
            queue = queue_of_prefix(call.key)[1]
            self.handed_over.add(queue)
            state = ids[job_id]
            self._put_back(shard, state)  # its owner died, or never got the reply
            state.delivery = reply.delivery
            if payloads:
                state.lowest = original_payload(payloads[0][0])
            problem = _hand_over(state, payloads, load, is_appending=shard in self._appending)
            if problem:
                self.problems.append((queue, f"id {decode_id(job_id)!r}: {problem}"))

    def _on_fail(self, shard: _Shard, call: Call[Any], reply: Any, _load: Any) -> None:
        for i, done in enumerate(reply):
            job_id, verdict = call.args[3 + 5 * i : 5 + 5 * i]
            if done != 1:
                continue
            state = self._shards[shard][_bytes(job_id)]
            if verdict == "exhausted":
                lowest = next((item for item in state.taken if item.data == state.lowest), None)
                if lowest is not None:  # else it is not followed
                    state.taken.remove(lowest)
            self._put_back(shard, state)

    def _on_release(self, shard: _Shard, call: Call[Any], reply: Any, _load: Any) -> None:
        for i, done in enumerate(reply):
            state = self._shards[shard][_bytes(call.args[4 + 3 * i])]
            if done == 2:
                _forget_payloads(state)
            elif done == 1:
                self._put_back(shard, state)

    def _on_bury(self, shard: _Shard, call: Call[Any], _reply: Any, _load: Any) -> None:
        args = call.args[5:]
        while args:
            job_id, count = _bytes(args[0]), int(args[2])
            payloads, args = args[3 : 3 + count], args[3 + count :]
            state = self._shards[shard][job_id]
            if call.args[1] == "":
                state.waiting.clear()
            else:
                state.taken = [item for item in state.taken if payloads and item.data not in payloads]

    def _on_acquire(self, shard: _Shard, _call: Call[Any], reply: Any, _load: Any) -> None:
        if reply.state in ("acquired", "restoring"):
            for job_id in reply.poisoned:
                _forget_payloads(self._shards[shard][job_id])
        if reply.state == "acquired":
            for state in self._shards[shard].values():
                self._put_back(shard, state)

    def _on_delete(self, shard: _Shard, call: Call[Any], reply: Any, _load: Any) -> None:
        for job_id, done in zip(call.args[4:], reply, strict=True):
            if done:
                self._shards[shard][_bytes(job_id)].waiting.clear()

    def _on_kick(self, shard: _Shard, call: Call[Any], reply: Any, _load: Any) -> None:
        for job_id, done in zip(call.args[3:], reply, strict=True):
            if done:
                self._shards[shard][_bytes(job_id)] = _Id(is_followed=False)

    def _on_drop(self, shard: _Shard, _call: Call[Any], _reply: Any, _load: Any) -> None:
        self._shards.pop(shard, None)

    # --- what waits ---

    def _put_back(self, shard: _Shard, state: _Id) -> None:
        payloads, state.taken = state.taken, []
        for payload in payloads:
            self._put(shard, state, payload)

    def _put(self, shard: _Shard, state: _Id, payload: _Payload) -> None:
        """Has a payload wait, merged with an equal one unless the queue appends."""
        if shard not in self._appending:
            for other in state.waiting:
                if other.data == payload.data:
                    _collapse(other, payload)
                    return
        state.waiting.append(payload)


def _forget_payloads(state: _Id) -> None:
    """Removes all payloads of an id, as of a job that was buried as poison."""
    state.waiting.clear()
    state.taken.clear()


def _collapse(kept: _Payload, payload: _Payload) -> None:
    """Keeps the lower score of two equal payloads."""
    if kept.score is not None and payload.score is not None:
        kept.score = min(kept.score, payload.score)
    elif kept.score is not None or payload.score is not None:
        kept.score = kept.number = None


def _find(state: _Id, data: bytes, score: float, *, is_appending: bool) -> _Payload | None:
    """Finds a waiting payload. Several may have these bytes where the queue appends."""
    equal = [item for item in state.waiting if item.data == data]
    if is_appending:
        exact = [item for item in equal if item.score == score]
        equal = exact or [item for item in equal if item.score is None]
    return equal[0] if equal else None


def _hand_over(
    state: _Id, payloads: list[tuple[bytes, float]], load: Callable[[bytes], Any], *, is_appending: bool
) -> str:
    """Moves payloads from the waiting to the taken ones. Describes what was wrong; "": nothing."""
    latest = -1
    for stored, score in payloads:
        found = _find(state, original_payload(stored), score, is_appending=is_appending)
        if found is not None:
            if found.score is None and found.number is not None:
                latest = max(latest, found.number)
            found.score = score
            state.waiting.remove(found)
            state.taken.append(found)
    scores = [score for _, score in payloads]
    shown = ", ".join(_shown(original_payload(data), score, load) for data, score in payloads[:10])
    if scores != sorted(scores):
        return f"handed over in the wrong order: {shown}"
    top = max(scores, default=0.0)
    left = [
        item
        for item in state.waiting
        if not item.was_reported
        and (item.score < top if item.score is not None else item.number is not None and item.number < latest)
    ]
    if not left:
        return ""
    for item in left:
        item.was_reported = True
    behind = ", ".join(_shown(item.data, item.score, load) for item in left[:10])
    return f"handed over {shown}, and not what was pushed before and comes first: {behind}"


def _shown(data: bytes, score: float | None, load: Callable[[bytes], Any]) -> str:
    try:
        payload = load(data)
    except Exception:
        payload = data
    return f"{short(payload)} (score {'by the clock' if score is None else f'{score:g}'})"


def _bytes(text: str | bytes | float) -> bytes:
    return text if isinstance(text, bytes) else str(text).encode("utf-8", "surrogateescape")
