"""The wire format: every key that lowq has in Redis, as data, and the functions that make their names.

All keys of a shard carry its hash tag (below), so a shard lives in one slot of a cluster and every script
is atomic there. Scripts are given the shard's prefix and append the names of `SHARD_KEYS` themselves. The other
keys, `NAMESPACE_KEYS`, are in a slot each.

The doctor, the dashboard, docs/keys.md and tests read these tables. A new key is a line in one of them, and outside
the shards a function below. ``python -m tests.key_table`` writes the tables into docs/keys.md.
"""

import re
from binascii import crc_hqx
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from string import ascii_lowercase
from typing import Literal, TypeGuard

#: Part of every key: changes only when the layout below changes incompatibly.
FORMAT = "v1"
#: Shards that a queue has at most.
MAX_SHARDS = 16384

Type = Literal["zset", "hash", "set", "list", "string", "channel"]


@dataclass(frozen=True, slots=True)
class Key:
    """A kind of key."""

    #: What follows the prefix of the shard, or of the namespace. ``<id>`` and ``<queue>`` stand for those.
    name: str
    #: The Redis types that it may have; ``channel``: it is none, but a name to publish to.
    types: tuple[Type, ...]
    #: What its members, fields and scores mean: Markdown.
    content: str
    #: The packages that change it; what people do with the handle of a queue counts as `operate`.
    owners: tuple[str, ...]
    #: How long it is there.
    lifetime: str
    #: Of a hash that has always the same ones: field -> its meaning, which may go without saying.
    fields: Mapping[str, str] = field(default_factory=dict)
    #: Its members or fields are ids of jobs.
    has_ids: bool = False

    @property
    def head(self) -> str:
        """The name as far as it is always the same."""
        return self.name.partition("<")[0]

    @property
    def is_one(self) -> bool:
        """Whether it is one key with one type: of its shard, or of the namespace."""
        return self.head == self.name and self.types != ("channel",)


#: The packages that change most keys of a shard.
EVERYBODY = ("push", "shards", "operate")
# fmt: off
#: Below the prefix of a shard.
SHARD_KEYS: tuple[Key, ...] = (
    Key("due", ("zset",),
        "id -> priority * 2**33 + perform_at (Unix time, seconds): everything that waits",
        EVERYBODY, "while a job waits", has_ids=True),
    Key("payloads", ("hash",),
        'id -> "score payload": what waits for the id, if that is a single payload. See below',
        EVERYBODY, "an entry while the id waits", has_ids=True),
    Key("payloads:<id>", ("zset",),
        "payload bytes -> score: what waits for the id, unless `payloads` holds it",
        EVERYBODY, "while the id waits"),
    Key("retries", ("zset",),
        "id -> retry_count, of waiting ids that failed at least once",
        ("shards", "operate"), "until the id is performed, buried or deleted", has_ids=True),
    Key("errors", ("hash",),
        "id -> last error, of ids that failed; with `keep_finished`, and the last attempts: `lib/kept.lua`",
        ("shards", "operate"), "as `retries`", has_ids=True),
    Key("solo", ("set",),
        "ids that must be taken alone",
        ("shards", "operate"), "until the id is performed, fails alone, or is buried or deleted", has_ids=True),
    Key("debounced", ("zset",),
        "id -> until when it may be put off by more payloads (Unix time, seconds): of a queue with `debounce`",
        EVERYBODY, "while the id waits for more", has_ids=True),
    Key("taken", ("hash",),
        'id -> "delivery perform_at retry_count level[mark] taken_at": what is in flight. See below',
        ("shards", "operate"), "while a job is in flight", has_ids=True),
    Key("taken:payloads:<id>", ("zset",),
        "payload bytes -> score: what is in flight for the id, unless `taken` holds it",
        ("shards", "operate"), "while the id is in flight"),
    Key("crashes", ("hash",),
        "id -> times that an owner died with it in flight; behind that, after a space, times that one stopped with "
        "it in flight, uncharged",
        ("shards", "operate"), "until the id is performed, buried or deleted", has_ids=True),
    Key("morgue", ("zset",),
        "id -> buried_at (Unix time, seconds)",
        ("shards", "operate"), "until the last id is kicked or deleted", has_ids=True),
    Key("morgue:payloads", ("hash",),
        'id -> "score payload", of a single one',
        ("shards", "operate"), "an entry until the id is kicked or deleted", has_ids=True),
    Key("morgue:payloads:<id>", ("zset",),
        "payload bytes -> score, unless `morgue:payloads` holds it",
        ("shards", "operate"), "until the id is kicked or deleted"),
    Key("morgue:errors", ("hash",), "id -> why it was buried; as `errors`", ("shards", "operate"),
        "as `morgue`", has_ids=True),
    Key("expires", ("zset",),
        "id -> when the first of its payloads that wait expires (Unix time, seconds): an index of those with a ttl",
        EVERYBODY, "while such a payload waits", has_ids=True),
    Key("expires:<id>", ("zset",),
        "payload bytes -> when it expires, where what waits for the id is a ZSET",
        EVERYBODY, "as `expires`"),
    Key("taken:expires:<id>", ("zset",),
        "payload bytes -> when it expires, unless `taken` says it",
        ("shards", "operate"), "while the id is in flight"),
    Key("traces:<id>", ("string",),
        '"context\\n" each, oldest first: the spans that pushed what waits. The latest 32, of up to 256 bytes',
        EVERYBODY, "while the id waits, a week at most"),
    Key("taken:traces:<id>", ("string",),
        "the same of what is in flight",
        ("shards", "operate"), "while the id is in flight, a week at most"),
    Key("pushed", ("list",),
        "tokens of the latest push calls, newest first: of the last `keep` seconds at least, and never fewer than "
        "1,000. At most 500,000",
        ("push",), "for good"),
    Key("repeated", ("zset",),
        "token -> slot: of push calls that were repeated lately, for as long. At most 10,000",
        ("push",), "until no such token is left"),
    Key("superseded", ("zset",),
        "attempt of an operator's call -> when it was repeated (Unix time, seconds)",
        ("operate",), "expires an hour after the last"),
    Key("schedules", ("hash",),
        "schedule -> its record: JSON, percent-encoded where it has spaces or equals signs. `table` is its time "
        "table, `settled` the moment up to which all ticks were pushed or skipped, `last` the tick that was pushed "
        "last (Unix time, seconds), `missed` how many were not pushed in time; `paused_at`, `paused_by`, and "
        "`unknown_since` when no node knows it",
        ("push", "node", "operate"), "an entry until no node has known the schedule for an hour"),
    Key("finished", ("hash",),
        'id -> "finished_at seconds payloads node" of a queue with `keep_finished`: when it finished last (Unix time, '
        "seconds), how long it was in flight, with how many payloads, and where. At most 5,500",
        ("shards",), "twice `keep_finished` at most; then, or when it has 5,000 ids, it becomes `finished:before`"),
    Key("finished:before", ("hash",), "the same, of what finished before", ("shards",), "for `keep_finished`"),
    Key("meta", ("hash",), "",
        EVERYBODY, "for good", fields={
            "shards_count": "", "clock": "of default scores", "server_time": "the server's time at the last push",
            "server_time_since": "since when it had come there without a jump", "fence": "of the lease's token",
            "resumed_fence": "the last fence, of a lease that was resumed: of what is taken since", "owner": "",
            "lease_ttl": "milliseconds", "leased_until": "", "delivery": "", "paused": "", "paused_by": "",
            "uncharged": "1: the last owner has stopped with jobs in flight, and twice in a row that is charged to "
                "nobody; 2: what is still in flight is charged to nobody",
            "detached": "1: a consumer has left and may come back, with the session that `owner` begins with",
            "pushed": "payloads that came in", "processed": "", "failed": "", "buried": "", "expired": "",
            "released": "", "kicked": "", "deleted": "", "cancelled": "", "repeated": "1: there is such a key",
            "slot": "in which `pushed` and `repeated` are remembered: `lib/repeated_calls.lua`",
            "features": "what the shard uses that most don't: `lib/features.lua`",
            "scores": '"explicit": payloads have versions as scores; "clock": there is one with the time as its score',
            "sealed": '"m e": the jobs of the shard belong to a layout of m shards with the epoch e',
            "step": "the step in which they are moved there that is under way, counted from the time of the seal in "
                "µs",
            "page": '"kind jobs payloads" of that step', "moved": "1: all of them were moved",
            "fed": "1: jobs are being moved to this shard, so nothing is taken of it",
            "moved:<shard>": "the last step that has come from that shard of the layout before",
            "came": "the last step that had come from any of them when the shard was opened",
        }),
    Key("lease", ("string",),
        "the owner's token \"nonce:fence\"",
        ("shards", "operate"), "expires (PX) if not renewed"),
    Key("consumer", ("string",),
        "1: a consumer holds the shard, which is woken also while something is in flight",
        ("shards",), "expires (PX) if not renewed with the lease"),
    Key("wake", ("channel",),
        "the shard may have work earlier than its owner believes: delay, seconds, and a priority above 0; or a word: "
        "sealed, or cancelled",
        EVERYBODY, ""),
    Key("lease_released", ("channel",),
        "the lease was given up: those who wait may try, in so many milliseconds",
        ("shards",), ""),
    Key("room", ("channel",),
        "there may be room in a queue with `capacity`, in which a push did not fit: nothing",
        ("shards", "operate"), ""),
)

QUEUES = Key("queues", ("hash",),
    'queue -> JSON {"shards_count": n, "epoch": e, "reshard": {"shards_count": m, "epoch": f, "began_at": Unix '
    'seconds, "by": who, "replicas": [[slot, count], ...]}, "options": {...}}: the epoch grows with each reshard '
    "that has ended (absent: 0), and `reshard` is there while one is under way; `replicas`, if there are any, says "
    "how many of a primary confirm what it writes, each count for the slots up to its own",
    ("application", "shards", "operate"), "an entry until its queue is dropped")
NODES = Key("nodes", ("hash",),
    'node -> "heartbeat_at silence bytes part details": Unix seconds of the server; seconds of silence after which '
    "it is dead; the length of the part; two JSON objects, of which the part says what the node serves",
    ("shards", "operate"), "an entry until its node ends, or an hour after others have found it dead")
NODES_CHANNEL = Key("nodes", ("channel",),
    'what a node has a part in has changed: the node that noticed; or a command to a node: JSON {"to": node, "do": '
    '"quiet", "unquiet", "stop" or "reload"}, or "stack" with the queue, the id and the request that it answers',
    ("shards", "application"), "")
HISTORY = Key("history:<queue>", ("hash",),
    '"width:slot" -> "number processed failed lag" of a stretch of time (lag -1: not known), three rings; '
    '"perform:bucket", "wait:bucket" -> how many batches ran, and jobs waited, so long; "perform:seconds", '
    '"wait:seconds": all of that together; "times:width:slot" -> "number waits performs", each "bucket:count,..." or '
    '"-"; "slow:slot:n" -> "at seconds count shard id", a slow batch',
    ("observe", "operate"), "expires a month after a node last wrote to it")
ERROR_GROUPS = Key("error_groups:<queue>", ("hash",),
    'fingerprint -> "count first last hours size sample_id text": failures that are alike; times are Unix seconds, '
    'hours "n:count;..." of the last 24, size the bytes of sample_id. At most 200',
    ("observe", "operate"), "expires a month after the last failure")
AUDIT = Key("audit", ("list",),
    '"time JSON": what people did on the dashboard and the command line, newest first, at most 1,000',
    ("operate",), "for good")
TASKS = Key("tasks", ("hash",),
    'task -> "state began_at heartbeat_at ended_at done total cancel size facts error": a bulk action of the '
    "dashboard; times are Unix seconds; `facts`, of `size` bytes, are JSON; `-` is not known yet; cancel 1: it is to "
    "end. At most 4 that run and 100 others",
    ("lowq_web",), "expires 30 days after the last report")
NOTICES = Key("notices", ("hash",),
    'slot -> "token JSON": a sentence of the dashboard about the action that was just done, until a page has shown '
    "it; `next` counts. At most 200",
    ("lowq_web",), "expires 5 minutes after the latest")
CONFIRMATIONS = Key("confirmations", ("hash",),
    'slot -> "token JSON fingerprints": the jobs that a question of the dashboard is about and that were not due, 8 '
    "bytes each; `next` counts. At most 10 of up to 2 MB",
    ("lowq_web",), "expires an hour after the latest")
STACK = Key("stack:<request>", ("string",),
    'JSON {"thread": number or null, "text": lines}: where the performer of an id is in its code; 64 KiB at most, "" '
    "when none performs it. The request in the name is random",
    ("node",), "expires 30 seconds after its node has answered")
SESSION = Key("session:<session>", ("string",),
    "which consumer has the session: random, one for each start of one. The session in the name is a digest of it",
    ("shards",), "expires (PX) if not renewed")
LIMIT = Key("limit:<limit>", ("hash",),
    '"holder:name" -> "call held granted slot since waits_until asked ttl": what a queue of a node has of a limit '
    'over all nodes; "slot:number" -> how many permits of a rate count from that 400th of its time on; "deferred" -> '
    '"ends seconds": until when nobody gets any (Unix time), and for how long that was asked for',
    ("shards", "call_limit"), "expires (PX) after twice the time of the rate, or of a lease, or after a deferral")
LIMIT_CHANNEL = Key("limit:<limit>", ("channel",),
    'there may be permits for these holders, parted by spaces; "? holder": that one waits, so what is not needed is '
    'to be given back; "! seconds": nobody gets any for so long',
    ("shards", "call_limit"), "")
# fmt: on
#: Below the namespace.
NAMESPACE_KEYS: tuple[Key, ...] = (
    QUEUES,
    NODES,
    NODES_CHANNEL,
    HISTORY,
    ERROR_GROUPS,
    AUDIT,
    TASKS,
    NOTICES,
    CONFIRMATIONS,
    STACK,
    SESSION,
    LIMIT,
    LIMIT_CHANNEL,
)  # fmt: skip


def shard_prefix(namespace: str, queue: str, shard: int, epoch: int = 0) -> str:
    """What all keys of one shard begin with, for example ``lowq:v1:{Orders:3bb}:``; after the first reshard of its
    queue ``lowq:v1:{Orders@1:3dd}:``.
    """
    layout = f"{queue}@{epoch}" if epoch else queue
    return f"{namespace}:{FORMAT}:{{{tag_of(layout, shard)}}}:"


def queue_of_prefix(prefix: str) -> tuple[str, str]:
    """The namespace and the queue of a shard, from its `shard_prefix`."""
    head, _, tag = prefix.rpartition("{")
    layout = tag.rpartition(":")[0].rpartition(":")[0]
    return head.removesuffix(f":{FORMAT}:"), re.sub(r"@[0-9]+$", "", layout)


def is_queue_name(name: object) -> TypeGuard[str]:
    """Whether it may be a part of keys: braces would break the tag, control characters whoever shows it, and ``@1`` at
    the end stands for the layout that a reshard has made.
    """
    return (
        isinstance(name, str)
        and re.fullmatch(r"[^{}\s]{1,128}", name) is not None
        and re.search(r"@[0-9]+$", name) is None
        and name.isprintable()
    )


def queues_key(namespace: str) -> str:
    """The registry of queues."""
    return _key(namespace, QUEUES)


def nodes_key(namespace: str) -> str:
    """The registry of nodes, and their channel."""
    return _key(namespace, NODES)


def history_key(namespace: str, queue: str) -> str:
    """A queue's rates and lag over time."""
    return _key(namespace, HISTORY) + queue


def error_groups_key(namespace: str, queue: str) -> str:
    """A queue's failures, in groups of alike errors."""
    return _key(namespace, ERROR_GROUPS) + queue


def audit_key(namespace: str) -> str:
    """The log of what people did."""
    return _key(namespace, AUDIT)


def tasks_key(namespace: str) -> str:
    """The registry of tasks: bulk actions in the background of some process."""
    return _key(namespace, TASKS)


def notices_key(namespace: str) -> str:
    """Notices of the dashboard that wait to be shown."""
    return _key(namespace, NOTICES)


def confirmations_key(namespace: str) -> str:
    """What the questions of the dashboard are about."""
    return _key(namespace, CONFIRMATIONS)


def stack_key(namespace: str, request: str) -> str:
    """The answer of a node to whoever has asked where it is in its code."""
    return _key(namespace, STACK) + request


def session_key(namespace: str, digest: str) -> str:
    """Which consumer has a session."""
    return _key(namespace, SESSION) + digest


def limit_key(namespace: str, limit: str) -> str:
    """What is granted of a limit over all nodes, and the channel of those who wait for it."""
    return _key(namespace, LIMIT) + limit


def _key(namespace: str, key: Key) -> str:
    return f"{namespace}:{FORMAT}:{key.head}"


def kind_of(namespace: str, key: str) -> Key | None:
    """The kind of a key outside the shards; None: it is none of ours."""
    for kind in NAMESPACE_KEYS:
        begin = _key(namespace, kind)
        if kind.types != ("channel",) and (key == begin or (kind.head != kind.name and key.startswith(begin))):
            return kind
    return None


# --- tags ---
#
# The hash tag of a shard decides which slot of a cluster, and so which primary, has it. A slot is a checksum of the
# tag, so those of ``{Orders:0}``, ``{Orders:1}`` and so on would be random: of 24 shards and 3 primaries one has more
# than 10 in 40 % of all cases. So letters follow the number, with which the slot lies where the shard is wanted:
# ``{Orders:3bb}``. The wanted places are a golden ratio sequence, which is spread evenly over the slots wherever it
# ends. So the tag of a shard does not depend on ``shards_count``.
#
# This is a part of the wire format: it is made of integers only, so that every language gets the same.

#: How many slots a cluster has.
SLOTS = 16384
#: The slots are divided into so many stretches of the same size, and letters are chosen by the stretch. With 16 no
#: primary of 3 ever has more than 10 of 24 shards. With fewer it would; with more the letters would be more.
STRETCHES = 16
#: 2**32 divided by the golden ratio: from the place of a shard to that of the next, in 2**32nds of all slots.
_STEP = 2654435769
#: What may follow the number: the first that fits. There always is one.
_SERIES = tuple("".join(letters).encode() for length in range(3) for letters in product(ascii_lowercase, repeat=length))
_TAG = re.compile(r"(.+):(0|[1-9][0-9]*)[a-z]*", re.ASCII)


def slot_of(key: str) -> int:
    """The slot of a key: Redis's checksum of what is between its first braces, if anything is."""
    _, brace, rest = key.partition("{")
    tag, end, _ = rest.partition("}")
    return crc_hqx((tag if brace and end and tag else key).encode(), 0) % SLOTS


@lru_cache(maxsize=SLOTS)
def tag_of(queue: str, shard: int) -> str:
    """The tag of a shard, without braces."""
    begin = f"{queue}:{shard}"
    # Queues begin at different places, so that those of one shard each are spread, too.
    wanted = ((crc_hqx(queue.encode(), 0) << 16) + shard * _STEP) % 2**32 * STRETCHES // 2**32
    before = crc_hqx(begin.encode(), 0)  # goes on where it stopped
    return next(
        begin + letters.decode()
        for letters in _SERIES
        if crc_hqx(letters, before) % SLOTS * STRETCHES // SLOTS == wanted
    )


def place_of(tag: str) -> tuple[str, int] | None:
    """The queue and the shard that have this tag; None: lowq has no such tag."""
    found = _TAG.fullmatch(tag)
    if found is None or len(found[2]) > 9:
        return None
    place = found[1], int(found[2])
    return place if tag_of(*place) == tag else None
