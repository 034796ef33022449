"""What is in flight of holders that are gone waits again at once, also when nobody is there who would take over."""

import secrets
from collections.abc import Sequence

from lowq.errors import LeaseLost
from lowq.inspection.calls import TOGETHER
from lowq.shards.in_flight import log_poisoned
from lowq.shards.lease import LeaseDenied, ShardLease
from lowq.store import Client, Command

#: Seconds that a shard is nobody else's should this process die in between.
LEASE_TTL = 2.0


def release_all(client: Client, queue: str, prefixes: Sequence[str], *, shards_count: int, max_crash_count: int) -> int:
    """For each shard with jobs in flight whose lease has run out: gets the lease, which is what charges them and lets
    them wait again, and gives it up. Returns how many of them wait.

    Raises:
        RedisUnavailable, ShardsCountError
    """
    released = 0
    for start in range(0, len(prefixes), TOGETHER):
        some = prefixes[start : start + TOGETHER]
        counts = client.run_many([Command(prefix, "HLEN", f"{prefix}taken") for prefix in some])
        for index, (prefix, count) in enumerate(zip(some, counts, strict=True), start):
            if isinstance(count, Exception):
                raise count
            if count:
                lease = ShardLease(
                    client, queue, prefix, shards_count=shards_count, nonce=secrets.token_hex(8),
                    max_crash_count=max_crash_count,
                )  # fmt: skip
                released += _release(lease, queue, index)
    return released


def _release(lease: ShardLease, queue: str, index: int) -> int:
    got = lease.acquire(LEASE_TTL)
    log_poisoned(queue, index, got.poisoned)
    if isinstance(got, LeaseDenied):
        return got.restored  # its holder lives, or died less than a lease ago, which nobody can tell apart
    try:
        lease.surrender()
    except LeaseLost:
        pass  # it has run out by itself
    return got.restored
