"""The sweeper: what has expired leaves Redis, also of shards that nobody takes from.

Whoever holds a shard sweeps it, in the maintenance loop: every second a look at what expires first, and where that has
expired, in steps of ``scan_size`` until nothing has any more. `take` never hands out what has expired, swept or not.
"""

from collections.abc import Callable, Iterable, Sequence

from lowq.codec import decode_id
from lowq.errors import RedisUnavailable
from lowq.options import QueueOptions
from lowq.shards.shard import Shard
from lowq.store import Call, Client
from lowq.store.shard import ShardScripts
from lowq.store.shard_replies import SweepReply

#: Bounds the time that a script may take, and Lua's arguments.
MAX_SCAN_SIZE = 2000
#: Seconds between two looks at a shard.
INTERVAL = 1.0
#: Shards that are swept in one write: between two writes Redis serves others.
_WRITE = 10
#: Writes after which the maintenance loop does what else is due.
_ROUNDS = 20


class Sweeper:
    """Sweeps the shards that are held. ``queues``: their options. Belongs to the maintenance loop."""

    def __init__(self, held: Callable[[], Sequence[Shard]], queues: Iterable[QueueOptions], scan_size: int) -> None:
        self._held = held
        #: What is to be kept of a morgue, as the script has it: seconds, and jobs of a shard.
        self._morgues = {
            options.queue_name: (
                "" if options.morgue_ttl is None else repr(options.morgue_ttl),
                "" if options.morgue_max is None else str(-(-options.morgue_max // options.shards_count)),
            )
            for options in queues
            if options.morgue_ttl is not None or options.morgue_max is not None
        }
        self._scan_size = min(scan_size, MAX_SCAN_SIZE)
        self._next = 0.0
        #: When there will be something to look at: `_next`, or never, as far as is known.
        self._due = float("inf")
        #: Shards of which there is more to be swept at once.
        self._unfinished: list[Shard] = []

    def sweep(self, client: Client, now: float) -> float:
        """Does what is due; returns the monotonic time at which it is to be called again.

        Raises:
            RedisUnavailable
        """
        shards = self._unfinished
        if now >= self._next:
            self._next = now + INTERVAL
            shards = [shard for shard in self._held() if shard.in_flight.has_ttl or shard.queue in self._morgues]
            # Mostly there are none. That there are some is learnt when idle shards are asked anew, or from a take.
            self._due = self._next if shards else float("inf")
        for _ in range(_ROUNDS):
            if not shards:
                self._unfinished = []
                return self._due
            some, shards = shards[:_WRITE], shards[_WRITE:]
            replies = client.run_many([self._call(shard) for shard in some])
            for shard, reply in zip(some, replies, strict=True):
                if isinstance(reply, RedisUnavailable):
                    self._unfinished = []
                if isinstance(reply, Exception):
                    raise reply
                swept: SweepReply = reply
                if swept.more:
                    shards.append(shard)
                events = shard.in_flight.events
                events.jobs_changed("expired", [*map(decode_id, swept.expired_of)], [*swept.expired_of.values()])
                events.jobs_changed("deleted", [*map(decode_id, swept.removed_ids)])
        self._unfinished = shards
        return now

    def _call(self, shard: Shard) -> Call[SweepReply]:
        return ShardScripts(shard.prefix).sweep(self._scan_size, *self._morgues.get(shard.queue, ("", "")))
