"""The wire format: every key that lowq has in Redis, its type, and what its scores and fields mean.

All keys of a shard carry the hash tag ``{queue:shard}``, so a shard lives in one slot of a cluster and every
script is atomic there. Scripts are given the shard's prefix and append the suffixes below themselves.

===================== ======= ==========================================================================
after the prefix      type    content
===================== ======= ==========================================================================
due                   ZSET    id -> perform_at (Unix time, seconds): everything that waits
payloads:<id>         ZSET    payload bytes -> score: what waits for the id (*)
retries               ZSET    id -> retry_count, of waiting ids that failed at least once
errors                HASH    id -> last error, of ids that failed
solo                  SET     ids that must be taken alone
taken                 HASH    id -> "delivery perform_at retry_count level taken_at": what is in flight;
                              and behind that, if it was taken from a STRING, " score payload\\n"
taken:payloads:<id>   ZSET    payload bytes -> score: what else is in flight for the id
crashes               HASH    id -> times that an owner died with it in flight; and behind that, after a space,
                              times that one stopped with it in flight, and nobody was charged
morgue                ZSET    id -> buried_at (Unix time, seconds)
morgue:payloads:<id>  ZSET    payload bytes -> score (*)
morgue:errors         HASH    id -> why it was buried
pushed                LIST    tokens of the latest push calls, newest first
repeated              ZSET    token -> slot: of push calls that were repeated lately
void                  ZSET    attempt of an operator's call -> when it was repeated (Unix time, seconds); expires
meta                  HASH    shards_count, clock (of default scores), seen (the server's time at the last push),
                              seen_since (since when it had come there without a jump), fence, owner,
                              lease_ttl (milliseconds), leased_until, delivery, paused, paused_by, uncharged,
                              processed, failed, buried, repeated (1: there is such a key), slot (of `pushed` and
                              `repeated`, see lib/repeats.lua)
lease                 STRING  the owner's token "nonce:fence"; expires (PX)
wake                  channel the shard may have work earlier than its owner believes: delay, seconds
lease_released        channel the lease was given up: whoever waits may try, in so many milliseconds
===================== ======= ==========================================================================

(*) Or a STRING "score payload", which is how a single payload of up to 4,096 bytes is kept until a second one comes: a
sorted set takes 850 bytes more as soon as a payload has more than 64. A set is never turned back, so it may hold one.

Outside the shards:

===================== ======= ==========================================================================
queues                HASH    queue -> JSON {"shards_count": n, "options": {...}}
nodes                 HASH    node -> "heartbeat_at silence bytes part details": Unix seconds of the server;
                              seconds of silence after which it is dead; the length of the part; two
                              JSON objects, of which the part says what the node serves
nodes                 channel what a node has a part in has changed: the node that noticed; or what
                              people tell a node: JSON {"to": node, "do": "quiet" or "stop"}
history:<queue>       HASH    "width:slot" -> "number processed failed lag" of a stretch of time (lag -1: not
                              known), and "perform:bucket" -> how many performs took so long; expires
audit                 LIST    "time JSON": what people did on the dashboard, newest first
===================== ======= ==========================================================================
"""

import re
from typing import TypeGuard

#: Part of every key: changes only when the layout above changes incompatibly.
FORMAT = "v1"
#: Shards that a queue has at most.
MAX_SHARDS = 16384


def shard_prefix(namespace: str, queue: str, shard: int) -> str:
    """What all keys of one shard begin with, for example ``lowq:v1:{Orders:3}:``."""
    return f"{namespace}:{FORMAT}:{{{queue}:{shard}}}:"


def is_queue_name(name: object) -> TypeGuard[str]:
    """Whether it may be a part of keys: braces would break the tag, and control characters whoever shows it."""
    return isinstance(name, str) and re.fullmatch(r"[^{}\s]{1,128}", name) is not None and name.isprintable()


def queues_key(namespace: str) -> str:
    """The registry of queues."""
    return f"{namespace}:{FORMAT}:queues"


def nodes_key(namespace: str) -> str:
    """The registry of nodes."""
    return f"{namespace}:{FORMAT}:nodes"


def history_key(namespace: str, queue: str) -> str:
    """A queue's rates and lag over time."""
    return f"{namespace}:{FORMAT}:history:{queue}"


def audit_key(namespace: str) -> str:
    """The log of what people did."""
    return f"{namespace}:{FORMAT}:audit"
