"""The faults of the matrix: what is planned, from a seed, and under which load."""

import random
from collections.abc import Callable

from tests.chaos.death import BOUNDARIES
from tests.chaos.load import USUAL, Load
from tests.chaos.stage import PERSISTENCE, TTL, Fault, Step

Plan = Callable[[random.Random, float], list[Step]]

#: Seconds between two deaths, so that the first is over when the second comes: a lease and some more.
APART = (2.3, 3.0)


#: Seconds after which no run goes on.
FOR_EVER = 3600.0


def every(gap: tuple[float, float], *names: str) -> Plan:
    """One of the names after another, with so many seconds between them, until the load ends."""

    def plan(chance: random.Random, seconds: float) -> list[Step]:
        steps = []
        when = chance.uniform(0.3, max(gap[0], 0.4))
        while when < seconds:
            steps.append(Step(when, chance.choice(names), chance.randrange(1000)))
            when += chance.uniform(*gap)
        return steps

    return plan


def at(*steps: tuple[float, str]) -> Plan:
    """These, at these times."""

    def plan(chance: random.Random, seconds: float) -> list[Step]:
        return [Step(when, what, chance.randrange(1000)) for when, what in steps]

    return plan


def resharding(gap: tuple[float, float], *names: str) -> Plan:
    """A reshard begins, and one of the names after another is done meanwhile, with so many seconds between them."""

    def plan(chance: random.Random, seconds: float) -> list[Step]:
        return [Step(0.2, "reshard"), *every(gap, *names)(chance, seconds)]

    return plan


def nothing(chance: random.Random, seconds: float) -> list[Step]:
    """The harm is in the jobs."""
    return []


def all_boundaries(chance: random.Random) -> list[str]:
    """Every moment that `tests.chaos.death` knows, in some order, each after some calls."""
    often = {
        "ack_and_take": 60,
        "renew": 10,
        "acquire": 8,
        "perform": 60,
        "fail": 5,
        "heartbeat": 4,
    }  # in a second or two
    deaths = [
        f"{script}:{moment}:{chance.randint(1, often.get(script, 1))}"
        for script, moments in BOUNDARIES.items()
        for moment in moments
    ]
    chance.shuffle(deaths)
    return deaths


NODES_DIE = [
    Fault("kill", "a node is killed (SIGKILL)", every(APART, "kill"), Load(seconds=9)),
    Fault("kills", "nodes are killed all the time", every((0.1, 0.7), "kill"), timed=False),
    Fault(
        "boundaries",
        "nodes are killed at every boundary of a call to Redis",
        every((0.8, 1.2), "term"),
        Load(seconds=16, mix={**USUAL, "raise": (30, 0), "release": (30, 0)}),
        dies=all_boundaries,
        timed=False,
        deadly=True,
    ),
]

SCHEDULES = [
    Fault(
        "schedule",
        "nodes are killed or frozen while a schedule has a tick a second: each is pushed once",
        every(APART, "kill", "freeze"),
        Load(seconds=9),
        settings={"CHAOS_TICKS": "1"},
        timed=False,
    ),
]

NODES_ARE_LATE = [
    Fault("freeze", "a node is frozen (SIGSTOP) for longer than a lease", every(APART, "freeze"), Load(seconds=9)),
    Fault("blink", "nodes are frozen for about a lease", every((0.2, 1.0), "blink"), timed=False),
    Fault(
        "gil",
        "a handler holds the GIL for longer than a lease",
        nothing,
        Load(rate=400, mix={**USUAL, "busy": (1, 1.6 * TTL)}),
        timed=False,
    ),
]

NODES_COME_AND_GO = [
    Fault("stop", "a node is stopped (SIGTERM)", every((1.0, 2.0), "term")),
    Fault(
        "stops",
        "nodes are stopped all the time, also all at once",
        every((0.2, 0.8), "term", "term", "term_all", "quiet"),
        timed=False,
    ),
    Fault("membership", "nodes join and leave all the time", every((0.1, 0.4), "join", "leave")),
    Fault(
        "roll",
        "for each node a new one is started and the old one stopped",
        at((0.5, "roll"), (4.0, "roll")),
        Load(seconds=8),
    ),
    Fault(
        "deploy",
        "deploys by a supervisor (`--processes 3`, HUP)",
        at((0.5, "deploy"), (4.0, "deploy")),
        Load(seconds=8),
        supervised=True,
    ),
    Fault(
        "reload",
        "nodes go on with new code in the same process (HUP)",
        every((0.4, 1.6), "reload"),
        Load(seconds=8),
        deployed=True,
        seamless=True,
    ),
    Fault(
        "supervisor",
        "processes of a supervisor are killed, also during deploys",
        every((0.8, 1.8), "kill_child", "kill_child", "deploy"),
        Load(seconds=8),
        supervised=True,
        timed=False,
    ),
]

BY_HAND = {"ORDERS_CONSUMER": "1"}
STORM = {"ORDERS_CONSUMER": "storm", "ORDERS_TAKES": "1 3 10"}
CONSUMERS = [
    Fault("consumer-kill", "a consumer is killed (SIGKILL)", every(APART, "kill"), Load(seconds=9), settings=BY_HAND),
    Fault(
        "consumer-freeze",
        "a consumer is frozen (SIGSTOP) for longer than a lease",
        every(APART, "freeze"),
        Load(seconds=9),
        settings=BY_HAND,
    ),
    Fault(
        "consumer-freeze-in-take",
        "a consumer is frozen (SIGSTOP) inside `take`, while Redis answers, for longer than a lease",
        every(APART, "freeze_in_take"),
        Load(seconds=9),
        settings={"ORDERS_CONSUMER": "thread"},
        proxied=True,
    ),
    Fault(
        "consumer-detach",
        "consumers detach with jobs in hand, and come back with their sessions",
        every((0.5, 1.5), "reattach"),
        settings=BY_HAND,
        timed=False,
        seamless=True,
        lease_ttl=10.0,
    ),
    Fault(
        "consumer-ttr",
        "the `ttr` of a consumer's jobs passes, which it acknowledges too late",
        nothing,
        Load(mix={**USUAL, "late": (20, 1.0), "raise": (10, 0)}),
        settings={**BY_HAND, "ORDERS_TTR": 0.5, "ORDERS_BATCH": 1},
        timed=False,
        refuses=True,
        expects=("its ttr has passed",),
        settles=30.0,  # what is left of them comes one after the other
    ),
    Fault(
        "consumer-read-only",
        "Redis becomes a read-only replica, and a primary again, with consumers beside nodes",
        every((1.0, 2.0), "redis_read_only"),
        settings={"ORDERS_CONSUMER": "mixed"},
    ),
    Fault(
        "consumer-mixed",
        "consumers beside nodes: killed, frozen and stopped",
        every((0.8, 2.0), "kill", "blink", "term"),
        settings={"ORDERS_CONSUMER": "mixed"},
        timed=False,
    ),
    Fault(
        "consumer-storm",
        "sync and async consumers beside nodes, with takes that are cancelled: killed, frozen, stopped, cut off, and "
        "back with their sessions",
        every(
            (0.1, 0.5),
            *("kill", "freeze", "freeze_in_take", "freeze_in_take", "blink", "term", "reattach", "reattach"),
            *("hold", "slow", "cut", "lose_replies", "lose_replies"),
        ),
        Load(seconds=15, mix={**USUAL, "raise": (10, 0)}),
        settings=STORM,
        proxied=True,
        timed=False,
        nodes=4,
        settles=30.0,
        deadly=True,  # who cannot detach has no session to come back with
        exits=(1,),  # nor can a consumer start, or come back, while its link is cut
    ),
    Fault(
        "consumer-poison",
        "jobs that kill their consumer every time, beside others in one list (only they end in the morgue)",
        every((0.5, 1.5), "term"),
        Load(rate=150, seconds=9, mix={"sleep": (700, 0.03), "poison": (4, 0)}),
        settings={"ORDERS_CONSUMER": "thread", "ORDERS_TAKES": "10", "ORDERS_MAX_CRASHES": 2},
        buries=True,
        spares=True,
        timed=False,
        settles=50.0,  # what is left of them comes one after the other
        expects=("is buried as poison",),
        deadly=True,
        exits=(9,),  # who is told to stop as a job kills it
    ),
]

HANDLERS_MISBEHAVE = [
    Fault("raise", "handlers raise", nothing, Load(mix={**USUAL, "raise": (50, 0)})),
    Fault(
        "hang",
        "handlers hang until their node is killed",
        nothing,
        Load(mix={**USUAL, "hang": (1, 0)}),
        timed=False,
        watched=True,
        settles=30.0,  # what is left of them comes one after the other
        deadly=True,
    ),
    *(
        Fault(
            f"ttr{'-async' * asynchronous}{'-supervisor' * supervised}",
            f"{'async ' * asynchronous}handlers hang for ever and are given up after `ttr`"
            + ("; nodes with many of them are replaced" if not asynchronous else "")
            + (", with a supervisor" if supervised else ""),
            nothing,
            Load(mix={**USUAL, "stall": (2, FOR_EVER)}),
            settings={"ORDERS_TTR": 0.5, "ORDERS_ASYNC": "1" * asynchronous},
            timed=False,
            expects=("exceeded its ttr", "drains and exits with 75"),
            exits=(75,),
            supervised=supervised,
            settles=40.0,  # what is left of them comes one after the other
            deadly=True,
        )
        for asynchronous in (False, True)
        for supervised in (False, True)
    ),
    *(
        Fault(
            f"blocked-loop{'-supervisor' * supervised}",
            "async handlers block their event loop for ever; the node is given up after `ttr`"
            + (", with a supervisor" if supervised else ""),
            nothing,
            Load(rate=200, mix={**USUAL, "hang": (1, 0)}),
            settings={"ORDERS_TTR": 0.5, "ORDERS_ASYNC": "1"},
            timed=False,
            expects=("exceeded its ttr", "exits with 75"),
            exits=(75,),
            supervised=supervised,
            settles=60.0,  # what is left of them costs a node each
            deadly=True,
        )
        for supervised in (False, True)
    ),
    Fault(
        "cancel",
        "async handlers are cancelled, as their node is stopped and they go on past `shutdown_timeout`",
        every((0.5, 1.5), "term"),
        Load(mix={**USUAL, "sleep 2": (30, 2.0)}),
        settings={"ORDERS_ASYNC": "1", "LOWQ_SHUTDOWN_TIMEOUT": 0.2},
        timed=False,
        exits=(3,),
        settles=40.0,
    ),
    Fault(
        "cancel-jobs",
        "jobs are cancelled by hand, waiting and running, while nodes are killed and stopped",
        every((0.1, 0.4), "cancel", "cancel", "cancel", "cancel", "kill", "term"),
        Load(ids=200, mix={**USUAL, "sleep 2": (30, 0.5), "raise": (20, 0)}),
        timed=False,
        settles=20.0,
    ),
    Fault(
        "exit",
        "handlers exit the process",
        nothing,
        Load(mix={**USUAL, "exit": (2, 0), "die": (1, 0)}),
        timed=False,
        expects=("told to exit",),
        exits=(1, 9),
        settles=40.0,  # what is left of them comes one after the other
        deadly=True,
    ),
    Fault(
        "memory",
        "handlers allocate until there is no more, or until they are killed",
        nothing,
        Load(mix={**USUAL, "allocate": (3, 0), "devour": (1, 0)}),
        timed=False,
        expects=("MemoryError",),
        deadly=True,
    ),
    Fault(
        "poison",
        "jobs that kill their process every time (they end in the morgue)",
        nothing,
        Load(rate=200, mix={**USUAL, "poison": (2, 0)}),
        settings={"ORDERS_MAX_CRASHES": 3},
        timed=False,
        buries=True,
        expects=("is buried as poison",),
        deadly=True,
    ),
]

#: Enough to do that something is in Redis at any time, and can be lost.
ENOUGH = {"sleep": (400, 0.02)}

OPTIONS = [
    Fault(
        "expiry",
        "nodes and consumers are killed while payloads expire",
        every((0.3, 1.0), "kill"),
        Load(rate=1200, ttl=0.7, mix={"sleep": (700, 0.03)}),
        settings={"ORDERS_CONSUMER": "mixed"},
        timed=False,
        settles=30.0,
    ),
    Fault(
        "expiry-redis",
        "Redis, nodes and consumers are killed while payloads expire",
        every((0.5, 1.2), "redis_kill", "kill", "kill"),
        Load(rate=1200, ttl=0.7, mix={"sleep": (700, 0.03)}),
        settings={"ORDERS_CONSUMER": "mixed"},
        persistence=("always",),
        timed=False,
        settles=30.0,
    ),
    Fault(
        "capacity",
        "nodes are killed while 20 producers wait for room in a queue with a capacity",
        every((0.5, 1.5), "kill"),
        Load(producers=20, rate=1200, waits=60.0, mix={"sleep": (400, 0.01)}),
        settings={"ORDERS_CAPACITY": 100},
        timed=False,
        settles=30.0,
    ),
    Fault(
        "kept",
        "nodes are killed and frozen of a queue that keeps what finished: each id that did is known, and no other",
        every((0.3, 1.0), "kill", "freeze"),
        Load(mix={**USUAL, "raise": (50, 0)}),
        settings={"ORDERS_KEEP_FINISHED": 3600},
        timed=False,
    ),
]

LIMITS = [
    Fault(
        "limit",
        "nodes are killed, frozen and stopped that have permits of a limit around calls, or wait for them",
        every((0.8, 2.0), "kill", "freeze", "term"),
        Load(rate=300, seconds=9),
        settings={"ORDERS_CALLS": 3},
        timed=False,
        settles=30.0,
    ),
    Fault(
        "limit-failover",
        "Sentinel: the primary is killed (SIGKILL), which has the permits of a limit around calls",
        at((1.5, "primary_killed"), (8.0, "primary_killed")),
        Load(rate=300, seconds=14),
        settings={"ORDERS_CALLS": 3},
        servers="sentinel",
        timed=False,
        settles=30.0,
    ),
]

REDIS = [
    Fault(
        "redis-kill",
        "Redis is killed and started at once",
        every((1.5, 2.5), "redis_kill"),
        Load(mix=ENOUGH),
        persistence=tuple(PERSISTENCE),
    ),
    Fault(
        "redis-away",
        "Redis is killed and away for longer than a lease",
        at((1.0, "redis_away"), (5.0, "redis_away")),
        Load(seconds=8, mix=ENOUGH),
        persistence=tuple(PERSISTENCE),
    ),
    Fault(
        "redis-power",
        "the machine of Redis loses power, and with it what was written in the last second",
        at((1.5, "redis_power"), (4.0, "redis_power")),
        Load(mix=ENOUGH),
        persistence=("everysec",),
    ),
    Fault(
        "redis-read-only",
        "Redis becomes a read-only replica, and a primary again",
        every((1.0, 2.0), "redis_read_only"),
    ),
    Fault("redis-hangs", "Redis hangs (SIGSTOP)", every((1.0, 2.0), "redis_hangs")),
    Fault("redis-pause", "`CLIENT PAUSE`", every((1.0, 2.5), "client_pause")),
    Fault("redis-flush", "`SCRIPT FLUSH`, `CLIENT KILL`", every((0.02, 0.3), "script_flush", "client_kill")),
    Fault(
        "memory-full",
        "`maxmemory` is reached while producing",
        nothing,
        Load(rate=1500, padding=3000, mix={"sleep": (1000, 0.02)}),
        redis={"maxmemory": "6mb"},
        refuses=True,
        timed=False,
        settles=30.0,
    ),
]

NETWORK = [
    Fault(
        "cut-off",
        "a node is cut off from Redis in mid-perform",
        every((1.0, 2.5), "cut_off", "hold", "half_open"),
        proxied=True,
    ),
    Fault(
        "network",
        "connections are slow, held and cut",
        every((0.1, 0.6), "slow", "cut", "hold_pushes"),
        proxied=True,
    ),
    Fault(
        "lost-replies",
        "replies to executed commands are lost",
        every((0.02, 0.2), "lose_replies", "lose_pushes", "cut"),
        proxied=True,
    ),
]

CLOCKS = [
    Fault(
        "clocks",
        "Redis's clock steps back and forward, producers' are an hour off",
        every((0.5, 1.5), "clock"),
        Load(unscored=1),
        clocks=True,
    )
]

#: More to do than gets done, so that every shard has work at any time.
BACKLOG = {"sleep": (700, 0.03)}

PRIMARIES = [
    Fault(
        f"cluster-{name}",
        f"cluster: {title}",
        at((1.5, action), (8.0, action)),
        Load(seconds=14, mix=BACKLOG),
        servers="cluster",
        settles=30.0,
    )
    for name, title, action in (
        ("killed", "a primary is killed (SIGKILL)", "primary_killed"),
        ("frozen", "a primary is frozen (SIGSTOP)", "primary_frozen"),
        ("cut-off", "a primary is cut off from the others and from its replica, and clients still reach it",
         "primary_isolated"),
    )
] + [
    Fault(
        "cluster-restarted",
        "cluster: all primaries are restarted, one after the other (SIGTERM)",
        at((1.0, "primaries_restarted")),
        Load(seconds=14),
        persistence=("everysec",),
        servers="cluster",
    ),
    Fault(
        "cluster-slots",
        "cluster: slots move, those of shards and of the registry; a primary joins, and leaves",
        at((0.5, "slots_move"), (2.5, "primary_joins"), (5.0, "slots_move"), (7.0, "primary_leaves")),
        Load(seconds=9),
        servers="cluster",
        redis={"cluster_node_timeout": "5000"},  # nobody is to be replaced, however busy the machine is
    ),
    Fault(
        "sentinel-failover",
        "Sentinel: the primary is killed (SIGKILL)",
        at((1.5, "primary_killed"), (8.0, "primary_killed")),
        Load(seconds=14),
        servers="sentinel",
    ),
    Fault(
        "sentinel-frozen",
        "Sentinel: it hangs (SIGSTOP) for longer than a lease, and connections to the primary are cut",
        at((0.5, "sentinel_frozen"), (4.5, "sentinel_frozen")),
        Load(seconds=9),
        servers="sentinel",
    ),
    Fault(
        "sentinel-isolated",
        "Sentinel: the primary is isolated, and clients still reach it",
        at((1.5, "primary_isolated"), (8.0, "primary_isolated")),
        Load(seconds=14, mix=BACKLOG),
        servers="sentinel",
        settles=30.0,
    ),
]  # fmt: skip

RESHARDS = [
    Fault(
        f"reshard-{name}",
        f"a queue is resharded from 12 to 24 to 7 shards, and {title}",
        resharding(gap, *actions),
        Load(seconds=9, mix=BACKLOG),
        settings={"ORDERS_SHARDS": 12},
        reshards=(24, 7),
        persistence=(persistence,),
        timed=False,
        settles=30.0,
    )
    for name, title, gap, actions, persistence in (
        ("killed", "the command is killed (SIGKILL) again and again", (0.4, 1.6), ("kill_reshard",), "none"),
        ("nodes", "nodes and the command are killed", (0.5, 1.5), ("kill", "kill", "kill_reshard"), "none"),
        (
            "redis",
            "Redis, nodes and the command are killed",
            (0.6, 1.6),
            ("redis_kill", "kill", "kill_reshard"),
            "always",
        ),
    )
] + [
    Fault(
        "cluster-reshard",
        "cluster: a queue is resharded again and again, and primaries, nodes and the command are killed",
        resharding((0.7, 2.0), "primary_killed", "kill", "kill_reshard"),
        Load(seconds=14, mix=BACKLOG),
        settings={"ORDERS_SHARDS": 12},
        servers="cluster",
        reshards=(24, 7, 12, 24, 7),
        timed=False,
        settles=30.0,
    ),
    *(
        Fault(
            f"cluster-reshard-{name}",
            f"cluster: a queue is resharded again and again, pushes are replicated, and {title}",
            resharding((2.0, 3.0), action),
            Load(seconds=14, mix=BACKLOG, unscored=0, durability="replicated"),
            settings={"ORDERS_SHARDS": 12, "LOWQ_DURABILITY_TIMEOUT": 1},
            servers="cluster",
            reshards=(24, 7, 12, 24, 7, 12, 24, 7),
            timed=False,
            settles=30.0,
            replicated=True,
        )
        for name, title, action in (
            ("isolated", "primaries are cut off while clients still reach them", "primary_isolated"),
            ("registry", "the primary of the registry is, while reshards end and begin", "registry_isolated"),
        )
    ),
]

DROPS = [
    Fault(
        "dropped",
        "a queue is dropped and used again with other numbers of shards, by producers that know the first one",
        at((1.5, "remake"), (3.5, "remake")),
        Load(seconds=7),
        timed=False,
    )
]

ALL = [
    Fault(
        "all",
        "all of it at once",
        every(
            (0.1, 0.6),
            *("kill", "freeze", "blink", "term", "quiet", "join", "leave"),
            *("cut_off", "hold", "half_open", "slow", "cut", "lose_replies", "lose_pushes"),
            *("script_flush", "client_kill", "redis_hangs", "redis_kill"),
        ),
        Load(seconds=10, mix={**USUAL, "raise": (10, 0), "exit": (1, 0), "die": (1, 0)}),
        persistence=("always",),
        proxied=True,
        timed=False,
        expects=("told to exit",),
        exits=(1, 9),
        settles=40.0,  # what is left of them comes one after the other
        deadly=True,
    )
]

FAULTS = [
    Fault("none", "nothing", nothing),
    *NODES_DIE,
    *NODES_ARE_LATE,
    *NODES_COME_AND_GO,
    *CONSUMERS,
    *HANDLERS_MISBEHAVE,
    *SCHEDULES,
    *OPTIONS,
    *LIMITS,
    *REDIS,
    *NETWORK,
    *CLOCKS,
    *PRIMARIES,
    *RESHARDS,
    *DROPS,
    *ALL,
]

BY_NAME = {fault.name: fault for fault in FAULTS}
