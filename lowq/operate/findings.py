"""What the doctor finds, and what there is to say of each kind of finding."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

Severity = Literal["ok", "warning", "error"]
#: Ids that a finding names; how many there are says its count.
MAX_NAMED = 10


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at, or that is wrong."""

    #: What kind it is: a short name that stays the same, such as "orphan_payloads".
    code: str
    #: "ok": as it should be. "warning": it may become a problem. "error": jobs are stuck, lost, or about to be.
    severity: Severity
    #: What is wrong, in a sentence.
    what: str
    #: How it may have come; what it means for jobs; what to do now. Empty when the severity is "ok".
    cause: str = ""
    effect: str = ""
    advice: str = ""
    queue: str | None = None
    shards: tuple[int, ...] = ()
    #: Some of the ids, at most 10.
    ids: tuple[str, ...] = ()
    #: Nodes that it is about.
    nodes: tuple[str, ...] = ()
    #: How many ids, shards or nodes it is about.
    count: int = 1
    #: Whether a repair can put it right, or a part of it, without risk.
    repairable: bool = False
    #: How many of them were put right by this examination.
    repaired: int = 0

    @property
    def wrong(self) -> bool:
        """Whether something of it is wrong still."""
        return self.severity != "ok" and self.repaired < self.count


class Kind(NamedTuple):
    """What all findings with one code have in common. The texts are filled in with `str.format`."""

    severity: Severity
    what: str
    cause: str
    effect: str
    advice: str
    repairable: bool = False


_BY_HAND = "keys were removed or written by hand or by another program, evicted by Redis (maxmemory-policy), or lost"
_REPAIR = "lowq doctor --repair "
#: code -> what there is to say. Those of a server are with its checks.
KINDS = {
    # --- ids of a shard: found and confirmed by one script ---
    "orphan_payloads": Kind(
        "error",
        "payloads of {count} wait, and nothing makes them due",
        f"the entry in `due` is gone: {_BY_HAND}",
        "nobody performs these payloads, unless something more is pushed for the same id",
        _REPAIR + "makes these ids due now",
        True,
    ),
    "orphan_taken_payloads": Kind(
        "error",
        "payloads of {count} are in flight, and no entry in `taken` tells of them",
        f"the entry in `taken` is gone: {_BY_HAND}",
        "when their owner dies these payloads are not restored, and its acknowledgement does not remove them",
        _REPAIR + "lets them wait again, due now; payloads that were performed meanwhile are performed once more",
        True,
    ),
    "orphan_morgue_payloads": Kind(
        "error",
        "payloads of {count} are buried, and the morgue does not list them",
        f"the entry in `morgue` is gone: {_BY_HAND}",
        "nobody sees these payloads, and kick does not find them",
        _REPAIR + "puts these ids back into the morgue; kick or delete them there",
        True,
    ),
    "due_without_payloads": Kind(
        "error",
        "`due` lists {count} without any payload",
        f"their payloads are gone: {_BY_HAND}",
        "what these ids were to perform is lost; when their time comes they are dropped without a word",
        "push what they stand for again; " + _REPAIR + "removes the empty entries",
        True,
    ),
    "taken_without_payloads": Kind(
        "error",
        "`taken` lists {count} without any payload",
        f"their payloads are gone: {_BY_HAND}",
        "what is being performed goes on, but would be lost with its owner",
        "push what they stand for again; an acknowledgement removes the entry, and where the shard has no owner "
        + _REPAIR
        + "does",
        True,
    ),
    "morgue_without_payloads": Kind(
        "warning",
        "the morgue lists {count} without any payload",
        f"their payloads are gone: {_BY_HAND}",
        "there is nothing left that kick could have performed",
        "see with `lowq peek {queue} ID` why they were buried, push what they stand for again, then "
        "`lowq delete {queue} ID`. The entry is the last trace of them, so it is left",
    ),
    "payloads_unreadable": Kind(
        "error",
        "payloads of {count} are in a form that lowq never gives them",
        "their keys were written by hand or by another program",
        "the shard can't hand out anything once it is their turn: all its jobs wait",
        "look at the keys payloads:ID, taken:payloads:ID and morgue:payloads:ID of these shards (TYPE, GET), note what "
        "is in them, remove them, and examine again",
    ),
    "taken_unreadable": Kind(
        "error",
        "`taken` has entries of {count} that can't be read",
        "it was written by hand, by another program, or by a version of lowq with another format",
        "nobody can take over the shard, nor take anything more from it: all its jobs wait",
        _REPAIR + "lets these ids wait again, due now; their retry_count is lost",
        True,
    ),
    "delivery_behind": Kind(
        "warning",
        "`taken` lists {count} under a delivery that the shard has not counted yet",
        "`meta` was lost or written by hand, or is older than `taken`: a failover or a restore in parts",
        "an acknowledgement of an old delivery could be taken for one of a new delivery with the same number",
        _REPAIR + "sets the counter to the largest delivery that was handed out",
        True,
    ),
    "expiry_unindexed": Kind(
        "warning",
        "payloads of {count} have a ttl, and `expires` does not list when the first of them expires",
        _BY_HAND,
        "they do not expire",
        _REPAIR + "lists them again",
        True,
    ),
    "leftovers": Kind(
        "warning",
        "{count} left of ids that are nowhere: retries, errors, crashes, solo marks, times of expiry and of debounce, "
        "reasons of burial, trace contexts",
        f"the jobs they belonged to are gone: {_BY_HAND}; or a `lowq drop` was interrupted",
        "an id that is pushed again starts with the past of the job before it; until then they only take memory",
        _REPAIR + "removes them; after an interrupted drop call it again",
        True,
    ),
    "wrong_shard": Kind(
        "error",
        "payloads of {count} are in a shard that is not theirs",
        "they were written by hand or by another program, or the queue's shards_count was changed in Redis",
        "such an id can be performed in two shards at once, and out of order",
        "stop the producer that writes there. If no job of these ids is in their own shard, let them be performed "
        "where they are; otherwise note the payloads, delete the keys, and push them again",
    ),
    # --- keys of a shard ---
    "wrong_type": Kind(
        "error",
        "keys of {shards} have a type that lowq never gives them: {detail}",
        "they were written by hand or by another program",
        "every call to these shards fails: their jobs wait",
        "look at the keys (TYPE, then GET, LRANGE ...) and remove or rename them",
    ),
    "shards_count": Kind(
        "error",
        "the registry says {expected}, and the keys of {shards} say {detail}",
        "the registry was changed by hand or lost, or a queue was used anew while parts of an older one of its name "
        "were still there",
        "pushing to these shards and working them is refused with ShardsCountError",
        "decide which number is right. If the registry is wrong, stop all nodes and producers of the queue and correct "
        "its entry in the hash `{queues_key}`; if the shards are old, drop the queue",
    ),
    "shard_beyond": Kind(
        "error",
        "the queue has {expected}, and Redis also holds {shards}, with {jobs}",
        "the queue had more shards once, and the registry was changed by hand or lost; or another program wrote them",
        "no node works these shards: what waits there is never performed",
        "read what is in them, push it again through lowq, and delete their keys",
    ),
    "layout_unknown": Kind(
        "error",
        "Redis holds {shards}, with {jobs}, and the registry says that the queue has {expected} in layout {epoch}",
        "the registry was restored from an older copy, changed by hand or lost; or a program that knows nothing of the "
        "last reshard wrote there",
        "no node works these shards: what waits there is never performed",
        "lowq reshard {queue} N, with the number of shards that the queue is to have: it puts a registry right that is "
        "older than the shards, and moves what the layout before still has. What is there after that: read it, push it "
        "again through lowq, and delete its keys",
    ),
    "shard_sealed": Kind(
        "error",
        "{shards} say that their jobs are being moved to a layout of {detail} shards, and the registry does not",
        "the registry was restored from an older copy, changed by hand or lost while the queue was resharded or since",
        "nodes take nothing more from these shards, and pushes go to shards that no node works",
        "lowq reshard {queue} {detail}: it goes on where the reshard was, and ends with the registry in order",
    ),
    "reshard_left": Kind(
        "warning",
        "the queue is being resharded to {following} shards, and nobody goes on with that",
        "the command, or the process of the dashboard, was stopped or killed, or lost Redis for too long",
        "pushes are accepted; ids of shards that are being moved or filled wait until it goes on",
        "lowq reshard {queue} {following}: it goes on where it was",
    ),
    "clock_ahead": Kind(
        "warning",
        "the clock of {shards} is ahead of the server's, by up to {ahead}",
        "the server's clock has stepped back, or another server with an earlier clock has taken over",
        "payloads get scores that lie in the future, so that order is kept. Jobs are due by the server's clock: what "
        "was due stays so, what was scheduled or failed while the clock was ahead may wait until it is there again",
        "see that the clocks of all Redis servers are kept in step (NTP). It ends by itself when the server's clock is "
        "there; setting the shard's clock back would turn order around. `lowq perform-now` starts what waits too long",
    ),
    "meta_lost": Kind(
        "error",
        "there are jobs in {shards}, and the hash `meta` with clock, fence and counters is gone",
        _BY_HAND,
        "their clock and counters begin anew; scores that are given by the clock may be lower than older ones if the "
        "server's clock has stepped back",
        _REPAIR + "notes shards_count again; the rest follows with the next push",
        True,
    ),
    "features_lost": Kind(
        "error",
        "jobs in {shards} use what `features` in `meta` does not say: {detail}",
        _BY_HAND,
        "a job with a priority above 0 waits as if it were scheduled for centuries; payloads do not expire",
        _REPAIR + "notes it again; so does the next push that uses the same",
        True,
    ),
    "lease_endless": Kind(
        "error",
        "the lease of {shards} never ends",
        "somebody used PERSIST or SET on it, or it was restored from a copy",
        "if its owner is dead, nobody ever takes over these shards",
        _REPAIR + "lets it end after lease_ttl, unless an owner that lives renews it",
        True,
    ),
    "lease_disagrees": Kind(
        "warning",
        "the lease of {shards} is not the one that `meta` tells of",
        f"`meta` or the lease was written by hand, or {_BY_HAND}",
        "should the owner lose its lease for a moment, it does not get its own jobs back but repeats them, charged "
        "with a crash",
        _REPAIR + "notes the holder of the lease as the owner; it ends with the next change of owner, too",
        True,
    ),
    "counters": Kind(
        "warning",
        "counters of {shards} are no numbers: {detail}",
        "they were written by hand or by another program",
        "reporting a failure or taking jobs fails in these shards",
        _REPAIR + "begins them anew",
        True,
    ),
    "unknown_keys": Kind(
        "warning",
        "the queue has {count} that lowq does not know: {detail}",
        "another program or a newer version of lowq wrote them",
        "lowq does not touch them, and neither does `lowq drop`",
        "find out who writes them; if nobody does, remove them",
    ),
    # --- who works what: looked at again and again for a while before it is reported ---
    "ownerless": Kind(
        "error",
        "{count} in flight, and nobody holds the lease of {shards}",
        "their owner died, or was stopped before they were finished, and no node of the queue came to take over",
        "they are not performed, and newer payloads of the same ids wait behind them",
        "start a node that works the queue: it restores them. Or "
        + _REPAIR
        + "restores them as a node would: they wait again; unless their owner was stopped, each one alone and charged "
        "with a crash",
        True,
    ),
    "shard_unserved": Kind(
        "error",
        "nobody holds the lease of {shards}, though nodes work the queue; {jobs} there",
        "a ByNodeSplitter counts on nodes that do not run, or a splitter of your own leaves shards out",
        "what waits there is not performed",
        "start the nodes that are missing, or correct number_of_nodes and node_number",
    ),
    "queue_unserved": Kind(
        "warning",
        "{jobs} in the queue, and no node works it",
        "no node is running, all are quiet, or its worker was renamed or removed",
        "they are not performed",
        "start a node that works it; if its worker was renamed give that the option queue_name={queue!r}; or "
        "remove it with all these jobs: lowq drop {queue}",
    ),
    "queue_unregistered": Kind(
        "error",
        "the registry does not know the queue, and {jobs} in its shards",
        "the registry was lost or changed by hand; or something was pushed while the queue was being dropped",
        "no tool lists the queue, and its number of shards is not checked",
        _REPAIR
        + "enters it with the number of shards that its shards tell; so does the next start of a node or producer",
        True,
    ),
    "queue_unused": Kind(
        "ok",
        "registered, with no job ever pushed, and no node works it",
        "",
        "",
        "`lowq drop {queue}` removes the entry",
    ),
    "paused_in_part": Kind(
        "warning",
        "the queue is paused only in part: {shards}",
        "a pause or resume was interrupted half way",
        "ids of these shards are not performed, and others are",
        "lowq pause {queue}, or lowq resume {queue}",
    ),
    "queue_unreadable": Kind(
        "error",
        "the queue's entry in the registry can't be read: {detail}",
        "it was written by hand or by another program",
        "nodes and producers that use the queue fail",
        "remove it with HDEL {queues_key} {queue}; the next start of a node or producer enters it again",
    ),
    "node_unreadable": Kind(
        "warning",
        "the registry's entry of {nodes} can't be read",
        "the entry was written by hand, or by a version of lowq with another format",
        "which queues it works is not known here",
        _REPAIR + "removes it, and so does the next heartbeat of any node; what only has strange details stays: HDEL "
        "{nodes_key} NODE removes that, and a node that lives writes it anew",
        True,
    ),
    "node_silent": Kind(
        "warning",
        "no word from {nodes} for {ago}, and no goodbye",
        "they were killed or cut off, and no other node has lived since then that would have removed their entries",
        "none by itself: what they held is taken over when a node starts",
        "if they should run, look into their logs; " + _REPAIR + "removes the entries",
        True,
    ),
    "node_without_leases": Kind(
        "warning",
        "the last heartbeat of {nodes} tells of shards held, and none of these leases is its own",
        "they died, were frozen or cut off for longer than lease_ttl; or the leases were removed by hand",
        "others may work these shards by now. Whatever the old owner still writes to the queue is refused",
        "if they run, look into their logs for lost leases and a maintenance loop that runs late",
    ),
    "threads_busy": Kind(
        "warning",
        "all threads of {nodes} have been busy with the same batches for {seconds}",
        "handlers that hang, or a few very long jobs that met",
        "nothing else is performed on the shards that it holds until one of them ends",
        "see `lowq nodes` for the batches, and send the process TTIN for the stacks of its threads; give the worker a "
        "time_limit or a ttr, or more threads",
    ),
    "lease_unknown": Kind(
        "warning",
        "the lease of {shards} belongs to {owner}, which is no node that lives",
        "the registry of nodes was lost or changed by hand, or a program other than a node holds it",
        "while the lease is renewed nobody else can work these shards",
        "find out which process it is (nodes log their names when they start); a lease that nobody renews ends by "
        "itself",
    ),
    "version_drift": Kind(
        "warning",
        "nodes run different versions of lowq: {detail}",
        "a deploy that is under way, or one that did not reach all machines",
        "scripts of both versions work the same queues; within one major version that is meant to work for a while",
        "finish the deploy",
    ),
    "maintenance_late": Kind(
        "warning",
        "the maintenance loop of {nodes} ran up to {late} late in the last ten minutes",
        "a handler holds the GIL (a huge regular expression, a C extension), the machine is overloaded or swaps, or "
        "Redis answers slowly",
        "leases are renewed late; past lease_ttl ({lease_ttl}) other nodes take over shards that still are worked",
        "the node's log names what it performed then. Run several processes with fewer threads, or raise lease_ttl",
    ),
}
