"""What did not fit into a queue with a capacity: sent again without what is too much, and later as a whole.

::

    refused with the positions that don't fit --> sent again without them --> ... until all that fits is in
                                                          |
                       what is left: until there is room, as long as there is time, and then handed back

A call is carried out as a whole or not at all, so a repeat after a lost reply can't count anything twice. Of a shard
one call is under way at a time, and jobs of an id that did not fit keep back those that came after them: their order
holds.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lowq.errors import RedisRefused, RedisUnavailable
from lowq.group_commit.parts import Part
from lowq.group_commit.requests import Outcome
from lowq.group_commit.writer import is_full, is_out_of_turn, is_sealed
from lowq.store import Client, NotConfirmed, Refusal, Subscription

#: Seconds after which those who wait for room ask again at the latest.
ASK_AGAIN = 1.0
#: Jobs of one call of those who wait: most of them won't fit.
TOGETHER = 100


class Overflow:
    """The parts of a push of which some did not fit. ``send``: sends parts of different shards, and waits.
    ``leave_sealed``: given a part, how its shard has refused it, as it is sealed, and parts for that shard, it returns
    parts for those where the jobs belong now.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        outcomes: Sequence[Outcome],
        send: Callable[[list[Part]], list[Outcome]],
        leave_sealed: Callable[[Part, Refusal, list[Part]], list[Part]],
    ) -> None:
        self._send = send
        self._leave_sealed = leave_sealed
        self._settled: list[tuple[Part, Outcome]] = []
        #: By shard, what is to be sent, in order.
        self._queues: dict[str, list[Part]] = {}
        #: By shard, what did not fit, in order.
        self._left: dict[str, list[Part]] = {}
        for part, outcome in zip(parts, outcomes, strict=True):
            if is_full(outcome):
                self._queues.setdefault(part.prefix, []).extend(self._divide(part, outcome.detail))
            elif part.prefix in self._queues and isinstance(outcome, Exception) and is_out_of_turn(outcome):
                self._queues[part.prefix].append(_copy(part, range(len(part.items))))
            else:
                self._settled.append((part, outcome))

    def settle(
        self, client: Client, until: float, is_wanted: Callable[[], bool]
    ) -> tuple[list[Part], list[Outcome], list[Mapping[str, Any]]]:
        """Sends what fits, and waits for room until that monotonic time. Returns parts with their outcomes, and the
        jobs that did not fit.
        """
        self._send_all()
        if self._left and time.monotonic() < until and is_wanted():
            subscription = client.subscribe()
            try:
                # What became free before the subscription is seen by asking once more.
                listened = set(self._left)
                subscription.add(f"{prefix}room" for prefix in listened)
                while self._left and time.monotonic() < until and is_wanted():
                    if not listened.issuperset(self._left):
                        subscription.add(f"{prefix}room" for prefix in set(self._left) - listened)
                        listened.update(self._left)
                    _wait(subscription, min(until - time.monotonic(), ASK_AGAIN))
                    self._queues, self._left = self._left, {}
                    self._send_all(waits=True)
            finally:
                subscription.close()
        parts = [part for part, _ in self._settled]
        outcomes = [outcome for _, outcome in self._settled]
        return parts, outcomes, [job for left in self._left.values() for part in left for job in part.jobs]

    def _send_all(self, *, waits: bool = False) -> None:
        while True:
            self._queues = {prefix: queue for prefix, queue in self._queues.items() if queue}
            if not self._queues:
                return
            parts = [self._next(prefix, waits=waits) for prefix in list(self._queues)]
            sent = [part for part in parts if part is not None]
            for part, outcome in zip(sent, self._send(sent) if sent else [], strict=True):
                if is_full(outcome):
                    fitting = self._divide(part, outcome.detail)
                    if waits and not fitting:
                        # There is no room. What comes after it was tried before.
                        self._left[part.prefix] += self._queues.pop(part.prefix)
                    else:
                        self._queues[part.prefix][:0] = fitting
                    continue
                if is_sealed(outcome):
                    left = self._left.pop(part.prefix, [])
                    for other in self._leave_sealed(part, outcome, [part, *self._queues.pop(part.prefix)]):
                        self._queues.setdefault(other.prefix, []).append(other)
                    for other in self._leave_sealed(part, outcome, left):
                        self._left.setdefault(other.prefix, []).append(other)
                    continue
                self._settled.append((part, outcome))
                if outcome is not True and not isinstance(
                    outcome, NotConfirmed
                ):  # what comes after it must not overtake it
                    behind = self._left.pop(part.prefix, []) + self._queues.pop(part.prefix)
                    self._settled += [(other, outcome) for other in behind]

    def _next(self, prefix: str, *, waits: bool) -> Part | None:
        """The next part of a shard, without jobs whose ids are kept back; None: none is left of it."""
        queue = self._queues[prefix]
        part = queue.pop(0)
        if waits and len(part.items) > TOGETHER:
            queue.insert(0, _copy(part, range(TOGETHER, len(part.items))))
            part = _copy(part, range(TOGETHER))
        kept_back = {item[0] for left in self._left.get(prefix, ()) for item in left.items}
        behind = [i for i, item in enumerate(part.items) if item[0] in kept_back] if kept_back else []
        if behind:
            self._left[prefix].append(_copy(part, behind))
            part = _copy(part, [i for i in range(len(part.items)) if i not in set(behind)])
        return part if part.items else None

    def _divide(self, part: Part, positions: str) -> list[Part]:
        """Keeps what did not fit, and returns the rest, as a part to be sent; none: nothing fits."""
        unfit = set(map(int, positions.split()))
        self._left.setdefault(part.prefix, []).append(_copy(part, sorted(unfit)))
        fit = [i for i in range(len(part.items)) if i not in unfit]
        return [_copy(part, fit)] if fit else []


def _copy(part: Part, positions: Sequence[int]) -> Part:
    """Some jobs of a part, to be sent with a token of their own."""
    items, jobs = [part.items[i] for i in positions], [part.jobs[i] for i in positions]
    return Part(
        part.prefix, part.shards_count, items, jobs, part.width, words=part.words, layout=part.layout, shard=part.shard
    )


def _wait(subscription: Subscription, seconds: float) -> None:
    """Waits until there may be room."""
    try:
        event = subscription.get(seconds)
        while event is not None and event[0] != "message":
            event = None if event[0] == "subscribe" else subscription.get(seconds)
    except (RedisUnavailable, RedisRefused):
        time.sleep(min(seconds, 0.1))
