"""The listener: receives wake-ups of the shards held, releases of wanted leases, and changes of the members. And what
finds out that a wake-up did not come.
"""

import re
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from math import inf
from types import MappingProxyType

from lowq.clock import Clock
from lowq.errors import LowqError, RedisRefused, RedisUnavailable
from lowq.logs import get_log
from lowq.shards.shard import Shard
from lowq.store import Client
from lowq.store.shard import RenewReply

log = get_log("lowq.shards")

#: Seconds that a wake-up is on its way, at most: one that is not heard by then was lost.
HEARD_SECONDS = 1.0
#: Seconds for which idle shards are asked every `poll_interval` after a wake-up was lost.
POLLING_SECONDS = 60.0
#: Seconds until a job is due, milliseconds until a lease ends.
_NUMBER = re.compile(rb"\d{1,15}(\.\d{1,9})?")
#: Seconds by which the times of two replies may differ that say the same.
ROUNDING_SECONDS = 0.01


class Listener:
    """Reads a subscription, and reconnects. Messages may have been lost before a subscription is confirmed, so each
    confirmation counts as a wake-up. ``on_word``: called for wake-ups that are such a word. ``limits``: channels of
    limits over all nodes, for ``on_permits``, which gets "" where messages may have been lost. ``nodes_channel``: "":
    it is nobody's.
    """

    def __init__(
        self,
        client: Client,
        shards: Sequence[Shard],
        nodes_channel: str,
        on_wake: Callable[[Shard, float, int], object],
        on_lease_released: Callable[[Shard, float], object],
        on_nodes: Callable[[str], object],
        on_trouble: Callable[[LowqError], object],
        limits: Collection[str] = (),
        on_permits: Callable[[str, str], object] = lambda _channel, _holders: None,
        on_word: Mapping[bytes, Callable[[Shard], object]] = MappingProxyType({}),
    ) -> None:
        self._thread = threading.Thread(target=self._run, name="lowq-listener", daemon=True)
        self._subscription = client.subscribe()
        self._wakes: dict[str, Shard] = {}
        self._released: dict[str, Shard] = {}
        self.add_shards(shards)
        self._on_word = on_word
        self._nodes_channel = nodes_channel
        self._on_wake = on_wake
        self._on_lease_released = on_lease_released
        self._on_nodes = on_nodes
        self._on_trouble = on_trouble
        self._limits = set(limits)
        self._on_permits = on_permits
        self._closed = threading.Event()
        self._subscription.add([channel for channel in (nodes_channel, *limits) if channel])

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def add_shards(self, shards: Sequence[Shard]) -> None:
        """Adds shards."""
        self._wakes.update({f"{shard.prefix}wake": shard for shard in shards})
        self._released.update({f"{shard.prefix}lease_released": shard for shard in shards})

    def listen_for_wakes(self, shards: Sequence[Shard]) -> None:
        """Listens to the wake-ups of these shards, which are held now."""
        self._subscription.remove([f"{shard.prefix}lease_released" for shard in shards])
        self._subscription.add([f"{shard.prefix}wake" for shard in shards])

    def listen_for_releases(self, shards: Sequence[Shard]) -> None:
        """Listens to the releases of these shards, which others hold."""
        self._subscription.remove([f"{shard.prefix}wake" for shard in shards])
        self._subscription.add([f"{shard.prefix}lease_released" for shard in shards])

    def listen_for_permits(self, limits: Collection[str]) -> None:
        """Listens to the channels of these limits, too."""
        self._limits.update(limits)
        self._subscription.add(limits)

    def ignore_permits(self, limits: Collection[str]) -> None:
        """Listens to nothing of these limits."""
        self._limits.difference_update(limits)
        self._subscription.remove(limits)

    def ignore(self, shards: Sequence[Shard]) -> None:
        """Listens to nothing of these shards, which are neither held nor wanted."""
        self._subscription.remove([f"{shard.prefix}{name}" for shard in shards for name in ("wake", "lease_released")])

    def _run(self) -> None:
        try:
            self._listen()
        finally:
            self._subscription.close()  # `close` may have come just before it was opened

    def _listen(self) -> None:
        failures, said = 0, ""
        while not self._closed.is_set():
            try:
                event = self._subscription.get(1.0)
                failures = 0
                if event is not None:
                    self._handle(*event)
            except Exception as error:
                if self._closed.is_set():
                    return
                if isinstance(error, RedisUnavailable):
                    failures += 1
                    if failures > 1:  # else perhaps only this connection was cut: at once a fresh one
                        self._on_trouble(error)
                        self._closed.wait(0.2)
                elif isinstance(error, RedisRefused):
                    if str(error) != said:  # not every few seconds for as long as it lasts
                        said = str(error)
                        log.warning(
                            "Redis does not let this user listen: jobs start up to lease_ttl / 3 later; %s",
                            error, extra={"event": "unheard"},
                        )  # fmt: skip
                    self._closed.wait(5.0)
                else:
                    log.exception("listening for wake-ups failed; jobs start up to lease_ttl / 3 later meanwhile")
                    self._closed.wait(5.0)

    def _handle(self, kind: str, channel: str, data: bytes) -> None:
        first, _, level = data.partition(b" ")
        # A message that is no number is not ours; to look is always right.
        number = float(first) if _NUMBER.fullmatch(first) else 0.0
        if kind not in ("subscribe", "message"):
            return
        if channel in self._wakes and data in self._on_word:
            self._on_word[data](self._wakes[channel])
        elif channel in self._wakes:
            self._on_wake(self._wakes[channel], number, int(level) if level.isdigit() else 0)
        elif channel in self._released:
            self._on_lease_released(self._released[channel], number / 1000)
        elif channel == self._nodes_channel:
            self._on_nodes(data.decode("utf-8", "replace"))
        elif channel in self._limits:
            self._on_permits(channel, data.decode("utf-8", "replace") if kind == "message" else "")

    def close(self) -> None:
        """Ends the thread, which reads until its connection is closed."""
        self._closed.set()
        self._subscription.close()
        if self._thread.is_alive():
            self._thread.join(1.5)


class MissedWakeUps:
    """Finds out which shards have work that nobody has announced. Belongs to the maintenance loop.

    Redis delivers a message at most once, and a client that may not publish sends none. So the reply to each renewal of
    a lease says when the next job is due, and a shard of which it says more than is known is asked. If no message comes
    within a second either, wake-ups get lost: all idle shards are asked every ``poll_interval`` for a minute.
    """

    def __init__(self, poll_interval: float, clock: Clock) -> None:
        self._poll_interval = poll_interval
        self._clock = clock
        #: Of these a renewal has said more than is known.
        self._behind: list[Shard] = []
        #: These had work that was not announced, with their counts of wake-ups then.
        self._unannounced: dict[Shard, int] = {}
        #: Monotonic times: by when that must have been heard; until when all are asked, and when next.
        self._heard_by = inf
        self._polls_until = self._next_poll = -inf

    def note_renewal(self, shard: Shard, reply: RenewReply) -> None:
        """Compares the reply to a renewal with what is known of the shard, unless somebody works it, who asks anyway.
        Without the dispatcher's lock: at worst the shard is asked once too often, or next time.
        """
        in_flight = shard.in_flight
        if shard.dispatch.claimed_by is None and (
            self.note(shard, reply.delay, paused=reply.paused)
            or (shard.dispatch.paused and not reply.paused)
            or (reply.has_ttl and not in_flight.has_ttl)
            or in_flight.full_under is not None
            # Of a take that was carried out after its repeat, or whose jobs were left.
            or reply.in_flight > len(in_flight.in_hand) + len(in_flight.unacknowledged)
        ):
            self._behind.append(shard)

    def note(self, shard: Shard, delay: float | None, *, paused: bool) -> bool:
        """Whether a job of the shard is due earlier than is known. ``delay``: seconds until it is due."""
        if delay is None or paused:
            return False
        now, known = self._clock(), shard.dispatch.next_due
        early = inf if known is None else known - now - max(delay, 0.0)
        if early > HEARD_SECONDS:
            self._unannounced.setdefault(shard, shard.dispatch.wakes)
            self._heard_by = min(self._heard_by, now + HEARD_SECONDS)
        return early > ROUNDING_SECONDS

    def to_be_asked(self, now: float, held: Callable[[], Sequence[Shard]]) -> Sequence[Shard]:
        """The shards to be asked now, of those that are ``held``."""
        if now >= self._heard_by:
            if any(shard.dispatch.wakes == wakes for shard, wakes in self._unannounced.items()):
                self._polls_until = now + POLLING_SECONDS
            self._unannounced, self._heard_by = {}, inf
        shards, self._behind = self._behind, []
        if self._next_poll <= now < self._polls_until:
            self._next_poll = now + self._poll_interval
            return held()
        return [shard for shard in shards if shard.lease.current is not None]

    def next_look(self, now: float) -> float:
        """Monotonic time at which there may be some again."""
        return min(self._heard_by, self._next_poll if now < self._polls_until else inf)
