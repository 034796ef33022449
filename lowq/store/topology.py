"""The primary of a key, and how it is followed. A single server is a cluster of one, whose primary has all keys.

`Topology` is that cluster of one: the server of the URL, the primary that sentinels name, or the embedded store.
`Cluster` is the one of several primaries: which of them has a key, and which of them are silent.
"""

import random
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import ref

from redis import exceptions

from lowq.clock import Lock
from lowq.errors import RedisRefused, RedisUnavailable
from lowq.store.calls import Deadline
from lowq.store.connection import start_thread
from lowq.store.keys import SLOTS, slot_of
from lowq.store.pool import Pool

Address = tuple[str, int]

#: Errors after which a primary may have been replaced: no answer, or it does not serve.
SILENCE = (exceptions.ConnectionError, exceptions.TimeoutError, exceptions.ClusterDownError)

#: Seconds that each node of a cluster has to say which primary serves which slots.
ASK_TIMEOUT = 1.0
#: Seconds before the nodes are asked again, as long as a primary does not answer or serve: at first, and at most. Each
#: time up to half of it less, so that not all clients ask at once.
ASK_PAUSES = (0.1, 0.5)
#: Seconds that a primary has to answer which did not answer before: at first, how much more each time, and at most.
PROBE_TIMEOUTS = (0.1, 0.1, 1.0)
#: The key that it is asked for: one of lowq's, as the user may have no right to others.
PROBE_KEY = b"lowq:v1:nodes"


class Topology:
    """One primary, which has all keys."""

    #: Whether there may be several primaries, of which one may be away while others serve.
    has_several_primaries = False

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        #: The connections for all keys; None: there may be several primaries.
        self.only_pool: Pool | None = pool

    def pool_for(self, _key: str, _deadline: Deadline | None = None) -> Pool:
        """The connections to the primary of a key. A cluster may have to ask its nodes.

        Raises:
            redis-py's errors, RedisUnavailable
        """
        return self._pool

    def pool_at(self, _address: Address | None) -> Pool:
        """The connections to a primary of the cluster; None: to any."""
        return self._pool

    def known_pool(self, _key: str) -> Pool | None:
        """As `pool_for`, as far as that is known without asking."""
        return self._pool

    def pools(self) -> dict[str, Pool]:
        """The connections to all primaries, by their addresses; "" is the only one."""
        return {"": self._pool}

    def address_of(self, _key: str) -> Address | None:
        """The server that has a key, as far as that is known. None also where it is always the same."""
        return self._pool.address

    def replicas(self) -> dict[str, int]:
        """The number of replicas of each primary of a cluster, by its address, as the nodes said last."""
        return {}  # a server says that itself

    def redirected(self, _key: str, error: Any, _deadline: Deadline | None) -> Pool:
        """The connections for a call that was answered with MOVED or ASK."""
        raise RedisRefused(f"the server is part of a cluster ({error} was its answer); use redis+cluster://")

    def follow(self) -> None:
        """Asks the sentinels, for a caller with a connection of its own. It does not block."""
        self._pool.follow()

    def find_again(self, key: str) -> None:
        """Finds out anew which primary has the keys. It blocks."""
        raise RedisRefused(f"the server of {key} is part of a cluster; use redis+cluster://")

    def failed(self, pool: Pool, error: Exception, deadline: Deadline | None) -> None:
        """Notes that a primary did not answer, or does not serve: another one may have its keys."""

    def answered(self, pool: Pool) -> None:
        """Notes that a primary has answered."""

    @property
    def is_partial(self) -> bool:
        """Whether a primary does not answer or serve, while others may."""
        return False

    @property
    def is_known(self) -> bool:
        """Whether a node of a cluster has said which primary has which keys: the URL is right."""
        return False

    def started_at(self) -> float:
        """The start of the youngest of the servers, monotonic."""
        return self._pool.started_at

    def reset(self) -> None:
        """Forgets all connections: after a fork they are the parent's."""
        self._pool.reset()

    def close(self) -> None:
        """Closes the connections that are not in use."""
        self._pool.close()


class _Silence:
    """A primary of a cluster does not answer or serve."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.probe_timeout = PROBE_TIMEOUTS[0]


class Cluster(Topology):
    """The primary of each slot, as one of the nodes says. They are asked at first, when a primary says that a
    slot has moved, and when one does not answer or does not serve: another one may have its slots by now. So that the
    nodes are not asked too often, there is a pause between two times, for all callers together.

    A primary that does not answer or serve is *silent*: calls without a deadline fail at once, until it has answered or
    another one has its slots. So a node with shards of several primaries waits for none of them alone. Two threads find
    out which of the two it is, and live as long as a primary is silent: one asks the silent ones, the other asks the
    nodes, so that it does not wait for the silent ones.
    """

    has_several_primaries = True

    def __init__(self, seeds: list[Address], make_pool: Callable[[Address], Pool]) -> None:
        self.only_pool = None
        self._seeds = seeds
        self._make_pool = make_pool
        self._pools: dict[Address, Pool] = {}
        self._slots: list[Address | None] = []
        #: Primaries and replicas.
        self._nodes: list[Address] = []
        #: How many replicas primaries have.
        self._replicas: dict[Address, int] = {}
        #: Primaries that did not answer or serve since the nodes were asked: these are asked last.
        self._doubted: dict[Address, None] = {}
        #: Primaries that did not answer or serve.
        self._silent: dict[Address, _Silence] = {}
        #: Whether the known slots may be out of date.
        self._is_stale = False
        #: When they may be asked again, monotonic, and the pause after that.
        self._ask_at = -float("inf")
        self._pause = ASK_PAUSES[0]
        self._watchers: dict[Callable[[Cluster], None], threading.Thread] = {}
        #: Held while watchers are started; reentrant, as a signal handler may push.
        self._starting = Lock()
        self._closed = False

    def pool_at(self, address: Address | None) -> Pool:
        if address is None:
            return self.pool_for("")
        # Without a lock, see `Pool`. When several come at the same moment one of the pools stays, the others are empty.
        return self._pools.get(address) or self._pools.setdefault(address, self._make_pool(address))

    def pool_for(self, key: str, deadline: Deadline | None = None) -> Pool:
        slot = slot_of(key)
        if not self._slots:
            self._refresh(deadline)
        elif self._is_stale or self._slots[slot] is None:  # or the node that was asked did not know it yet
            self._look_again(deadline)
        address = self._slots[slot]
        if address is None:
            raise RedisUnavailable(f"no primary of the cluster serves {key}")
        if deadline is None and (silence := self._silent.get(address)) is not None:
            self._watch()  # it may have ended just when this one became silent
            raise RedisUnavailable(
                f"{address[0]}:{address[1]} of the cluster does not answer or serve: {silence.error}"
            )
        return self.pool_at(address)

    def known_pool(self, key: str) -> Pool | None:
        address = self.address_of(key)
        return None if address is None else self.pool_at(address)

    def address_of(self, key: str) -> Address | None:
        return self._slots[slot_of(key)] if self._slots else None

    def replicas(self) -> dict[str, int]:
        return {f"{host}:{port}": count for (host, port), count in self._replicas.items()}

    def pools(self) -> dict[str, Pool]:
        self._refresh()
        addresses = [address for address in dict.fromkeys(self._slots) if address is not None]
        return {f"{address[0]}:{address[1]}": self.pool_at(address) for address in addresses}

    def failed(self, pool: Pool, error: Exception, deadline: Deadline | None) -> None:
        if not isinstance(error, SILENCE):
            return
        # Its caller may have had very little time: then it is asked about, and not silent.
        is_silent = deadline is None or not isinstance(error, exceptions.TimeoutError)
        for address, own in list(self._pools.items()):
            if own is pool:
                self._doubted[address] = None
                self._is_stale = True
                if is_silent and address in self._slots:
                    self._silent.setdefault(address, _Silence(error))
                    self._watch()

    def answered(self, pool: Pool) -> None:
        for address in list(self._silent):
            if self._pools.get(address) is pool:
                self._silent.pop(address, None)

    @property
    def is_partial(self) -> bool:
        return bool(self._silent) or self._is_stale

    @property
    def is_known(self) -> bool:
        return bool(self._slots)

    def redirected(self, key: str, error: Any, deadline: Deadline | None) -> Pool:
        """MOVED: where many slots have moved, each is noted, and the nodes are asked for all of them once in a while.
        ASK is for this call alone.
        """
        host, port = error.host, error.port
        if not isinstance(error, exceptions.MovedError):  # which redis-py makes a kind of AskError
            return self.pool_at((host, port))
        slot = slot_of(key)
        if not host and (before := self._slots[slot]) is not None:
            host = before[0]  # cluster-preferred-endpoint-type unknown-endpoint: the host that was asked
        self._slots[slot] = host, port
        self._is_stale = True
        self._look_again(deadline)
        return self.pool_at((host, port))

    def follow(self) -> None:
        pass  # a primary that is replaced says so itself, or does not answer

    def find_again(self, _key: str) -> None:
        self._refresh()

    def _look_again(self, deadline: Deadline | None) -> None:
        now = time.monotonic()
        if now < self._ask_at:
            return
        self._ask_at = now + self._pause * random.uniform(0.5, 1.0)  # before: others need not ask, too
        self._pause = min(2 * self._pause, ASK_PAUSES[1])
        try:
            self._refresh(deadline)
        except (exceptions.RedisError, RedisUnavailable):
            return  # the known slots may still hold
        if not self._silent and None not in self._slots:
            self._pause = ASK_PAUSES[0]

    def _watch(self) -> None:
        """Starts the threads that watch silent primaries, if there are none."""
        with self._starting:
            self._closed = False  # it is used again
            for look in (Cluster.look_for_others, Cluster.look_at_silent):
                known = self._watchers.get(look)
                if known is None or not known.is_alive():
                    watcher = start_thread(partial(_watch_silent, ref(self), look), "lowq-cluster")
                    if watcher is None:
                        self._silent.clear()
                    else:
                        self._watchers[look] = watcher

    def look_for_others(self) -> None:
        """Asks the nodes whether others have the slots of those that are silent. It blocks."""
        try:
            self._refresh()
        except (exceptions.RedisError, RedisUnavailable):
            pass  # the primaries may answer all the same

    def look_at_silent(self) -> None:
        """Asks those that are silent. It blocks."""
        for address, silence in list(self._silent.items()):
            if self._answers(address, silence):
                self._silent.pop(address, None)

    @property
    def is_watched(self) -> bool:
        """Whether there is something to watch."""
        return bool(self._silent) and not self._closed

    def _answers(self, address: Address, silence: _Silence) -> bool:
        timeout = silence.probe_timeout
        silence.probe_timeout = min(timeout + PROBE_TIMEOUTS[1], PROBE_TIMEOUTS[2])  # the way to it may be long
        try:
            # Of a key: one that is cut off from the others would answer a PING.
            self.pool_at(address).ask(b"EXISTS", PROBE_KEY, deadline=Deadline(timeout))
        except (
            exceptions.ConnectionError,
            exceptions.TimeoutError,
            exceptions.ClusterDownError,
        ):  # or it loads its data
            return False
        except exceptions.RedisError:
            pass  # that is an answer, too
        return True

    def _refresh(self, deadline: Deadline | None = None) -> None:
        """Asks the nodes, one after the other, until one answers.

        Raises:
            redis-py's errors, RedisUnavailable: none does.
        """
        # Not always the same one first: it may be cut off from the others. Those that did not answer just now are last.
        known = list(dict.fromkeys([*self._nodes, *self._pools, *self._seeds]))
        random.shuffle(known)
        known.sort(key=lambda address: address in self._doubted)
        failure: Exception | None = None
        for address in known:
            pool = self._pools.get(address) or self._make_pool(address)
            limit = Deadline(ASK_TIMEOUT if deadline is None else min(deadline.left() / 2, ASK_TIMEOUT))
            try:
                ranges = pool.ask(b"CLUSTER", b"SLOTS", deadline=limit)
            except (exceptions.RedisError, RedisUnavailable) as error:
                failure = error
                continue
            if ranges:
                self._take_ranges(ranges, address[0])
                return
            failure = RedisUnavailable(
                f"{address[0]}:{address[1]} knows of no node of a cluster that serves any slot; "
                "make the cluster first: redis-cli --cluster create"
            )
        raise failure or RedisUnavailable("the cluster's URL names no node")

    def _take_ranges(self, ranges: list[Any], asked: str) -> None:
        slots: list[Address | None] = [None] * SLOTS
        found: dict[Address, None] = {}
        replicas: dict[Address, int] = {}
        for first, last, *nodes in ranges:
            addresses = [((name or b"").decode() or asked, port) for name, port, *_ in nodes]
            slots[first : last + 1] = [addresses[0]] * (last - first + 1)
            found |= dict.fromkeys(addresses)
            replicas[addresses[0]] = len(addresses) - 1
        self._slots, self._nodes, self._replicas = slots, list(found), replicas
        self._is_stale = False
        self._doubted = dict.fromkeys(self._silent)
        serving = set(slots)
        for address in list(self._silent):
            if address not in serving:
                self._silent.pop(address, None)

    def started_at(self) -> float:
        return max((pool.started_at for pool in list(self._pools.values())), default=-float("inf"))

    def reset(self) -> None:
        self._watchers.clear()
        self._starting = Lock()
        self._silent.clear()
        for pool in self._pools.values():
            pool.reset()

    def close(self) -> None:
        self._closed = True
        for pool in list(self._pools.values()):
            pool.close()


def _watch_silent(reference: "ref[Cluster]", look: Callable[[Cluster], None]) -> None:
    pause = ASK_PAUSES[0]
    while (cluster := reference()) is not None and cluster.is_watched:
        look(cluster)
        del cluster  # it may be garbage by now
        time.sleep(pause * random.uniform(0.5, 1.0))
        pause = min(2 * pause, ASK_PAUSES[1])
