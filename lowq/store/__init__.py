"""From a URL to a client that runs scripts and turns redis-py's errors into ours.

The only package that knows redis-py and fakeredis. Commands go through redis-py's connections directly: packing
and parsing is hiredis's work, and the layers of the full client, which cost more than Redis itself, are left
out. redis-py retries nothing behind our back; whoever calls decides what may be repeated.

A script names the one key that routes it, the prefix of its shard, and so a client also knows which primary of
a cluster a shard lives on.

    keys        every key in Redis, and what is in it
    scripts     the transitions, one in Lua for each
    shard       how those of a shard are called; shard_replies: what they answer
    registry    the same, of all that is no shard: queues, nodes, sessions, limits, histories
    calls       runs of scripts, and the pipeline that takes some of them to a server and back
    client      sends calls, and what got no answer again
    deadline    how long a caller waits: for an answer, and until a replica, or the disk, has what was written
    pool        connections to one server, prepared
    connection  one connection: made, written, read, by threads and by an event loop; host names
    topology    which primary has a key: of one server, of several; sentinels: of one that others name
    urls        a URL -> its topology
    pubsub      channels and their messages
    translate   redis-py's errors -> ours
    embedded    the embedded store, also for other processes
    untrusted   values that may come from anywhere
"""

from lowq.store.calls import Call, Command
from lowq.store.client import REPEATS, SOCKET_TIMEOUT, Client
from lowq.store.connection import LoopConnection, parse_info
from lowq.store.deadline import (
    DURABILITIES,
    Deadline,
    Durability,
    NotConfirmed,
    Wait,
    caller_deadline,
    caller_limit,
    deadlines,
)
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
