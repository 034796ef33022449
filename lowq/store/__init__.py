"""Keys, scripts, connections: a client for a URL, which runs scripts and raises lowq's errors.

The only package that knows redis-py and fakeredis. Commands go through redis-py's connections directly: hiredis packs
and parses, and the layers of redis-py's full client, which cost more than Redis itself, are left out. redis-py retries
nothing; the caller decides what may be repeated.

A call names the one key that routes it, the prefix of its shard, so a client also knows which primary of a cluster has
a shard.

    keys              every key in Redis, and what is in it
    calls             the Lua scripts, calls of them, deadlines, and what servers are to confirm
    shard             calls for the holder of a shard, and their replies
    shard_operations  calls for people who act on jobs, look, examine and repair, and their replies
    registry          calls for queues, nodes, sessions, limits, histories
    client            sends calls, and repeats those without an answer
    pool              connections to one server, prepared; the pipeline that takes calls there and back
    connection        one connection: made, written, read, by threads and by an event loop; host names
    topology          which primary has a key: of one server, of several
    sentinels         the primary that sentinels name
    urls              a URL -> its topology
    pubsub            channels and their messages
    translate         redis-py's errors -> lowq's
    embedded          the embedded store, also for other processes
    untrusted         values that may come from anywhere
"""

from lowq.store.calls import (
    DURABILITIES,
    Call,
    Command,
    Deadline,
    Durability,
    NotConfirmed,
    Wait,
    caller_deadline,
    caller_limit,
    deadlines,
)
from lowq.store.client import REPEATS, SOCKET_TIMEOUT, Client
from lowq.store.connection import LoopConnection, parse_info
from lowq.store.embedded import memory_store, new_store
from lowq.store.keys import slot_of
from lowq.store.pubsub import Subscription
from lowq.store.topology import Address
from lowq.store.translate import Refusal, may_repeat

__all__ = [
    "DURABILITIES", "REPEATS", "SOCKET_TIMEOUT", "Address", "Call", "Client", "Command", "Deadline", "Durability",
    "LoopConnection", "NotConfirmed", "Refusal", "Subscription", "Wait", "caller_deadline", "caller_limit", "deadlines",
    "may_repeat", "memory_store", "new_store", "parse_info", "slot_of",
]  # fmt: skip
