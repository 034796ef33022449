"""A broker: holds shards of some queues and hands out those that have work.

::

    others' messages -->  wakeups  --- a shard has work ----------->  dispatcher  --- a shard to work -->  whoever
                             |                                             |                               works it
                             +--- a lease is free, members changed -->  maintenance  <--- lost? acks? --------+
                                                                   (membership, leases)

It knows nothing of the threads that work the shards. A node is a broker and threads, a consumer is a broker and the
caller's own code.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any

from lowq.clock import Clock
from lowq.clock import now as clock_now
from lowq.errors import ConfigError
from lowq.logs import get_log
from lowq.options import QueueOptions
from lowq.settings import Config
from lowq.sharding import Layout, Layouts, queue_of_layout
from lowq.shards.dispatcher import Dispatcher, Schedules
from lowq.shards.leases import Leases
from lowq.shards.limits import Permits
from lowq.shards.maintenance import Chore, MaintenanceLoop
from lowq.shards.membership import HeartbeatExtra, Identity, Membership
from lowq.shards.outage import Outage
from lowq.shards.permits import Share
from lowq.shards.shard import Activity, Shard, Sweeper
from lowq.shards.splitter import MembershipSplitter
from lowq.shards.wakeups import Listener
from lowq.store import Client
from lowq.store.registry import Registration

log = get_log("lowq.shards")

#: A splitter of the application's own: shards -> groups of them, one for each thread.
StaticSplitter = Callable[[Sequence[Shard]], Sequence[Sequence[Shard]]]


@dataclass(frozen=True, slots=True)
class WorkerGroup:
    """The performers of some queues: threads of a node, or its event loop, which works many shards at once."""

    queues: Collection[str]
    #: Of each performer: queue -> scheduler.
    schedules: Sequence[Schedules]


class Broker:
    """Membership, leases, wake-ups and dispatch of the shards of some queues.

    client              for the performers and for wake-ups
    maintenance_client  for the maintenance loop alone, which must wait for nobody
    groups              the performers. Each queue is in one group, and each group has a dispatcher, in the same order
    shares              queue -> its share of its group; the default where a queue is not named
    activities          what is being performed
    registrations       the queues' entries, sent again with every heartbeat; ``heartbeat_extras`` go with them
    more_details        more fields of this process's entry in the registry
    queues              options of the queues
    layouts             queue -> the layouts that ``shards`` are of
    make_shards         makes the shards of another layout, when ``read_layouts`` finds one in a reply to a
                        registration, given the layouts served, and the epochs that replies of shards contradict
    chore               periodic work, called by the maintenance loop
    on_ready            called when it is a member and has asked for its shards
    on_command          called with a command that was sent to this process: what it is to ``do``, and with what
    resumes             the process has leases from before an exec, see `MaintenanceLoop.keep`

    Raises:
        ConfigError: the splitter returned a shard that it was not given. Whatever else it raises.
    """

    def __init__(
        self, identity: Identity, shards: Sequence[Shard], client: Client, maintenance_client: Client, config: Config,
        *, splitter: MembershipSplitter | StaticSplitter, groups: Sequence[WorkerGroup], shares: Mapping[str, Share],
        activities: Callable[[], Sequence[Activity]], registrations: Callable[[], Sequence[Registration]],
        heartbeat_extras: Sequence[HeartbeatExtra] = (), more_details: Callable[[], Mapping[str, Any]] = dict,
        queues: Sequence[QueueOptions] = (), layouts: Mapping[str, Layouts] | None = None,
        make_shards: Callable[[str, Layout], Sequence[Shard]] | None = None,
        read_layouts: Callable[[Registration, Any, Layouts | None, Collection[int]], Layouts | None] = lambda *_: None,
        chore: Chore = lambda _client, _now: inf, on_ready: Callable[[], object],
        on_command: Callable[[Mapping[str, str]], object], on_fatal: Callable[[BaseException], object],
        resumes: bool = False, clock: Clock = clock_now,
    ) -> None:  # fmt: skip
        self.name = identity.name
        #: Shared with the leases. The maintenance loop adds shards when a queue is resharded, and removes those that
        #: were left.
        self.shards = list(shards)
        #: The same by queue.
        self.of_queue = _by_queue(self.shards)
        self.outage = Outage(lambda: client.is_partial or maintenance_client.is_partial)
        self._layouts = dict(layouts or {})
        self._make_shards, self._read_layouts = make_shards, read_layouts
        self._queues = dict(identity.queues)
        self._groups = list(groups)
        self._permits = Permits(
            client, config.namespace, identity.nonce, shares, config.lease_ttl, self.outage, on_fatal=on_fatal,
            clock=clock,
        )  # fmt: skip
        self.dispatchers = [
            Dispatcher(
                (), group.schedules, {queue: shares.get(queue, Share()) for queue in group.queues},
                lambda _shard: self.maintenance.nudge(), permits=self._permits.queues, clock=clock,
            )
            for group in groups
        ]  # fmt: skip
        by_queue = {
            queue: dispatcher
            for group, dispatcher in zip(groups, self.dispatchers, strict=True)
            for queue in group.queues
        }
        self._splitter = splitter
        self._on_command = on_command
        #: Whether the subscription to the channel of the members, and of commands, was ever confirmed.
        self._listens = False
        self.membership = Membership(
            identity, config.namespace, silence=config.lease_ttl, shares=isinstance(splitter, MembershipSplitter),
            registrations=registrations, extras=heartbeat_extras, clock=clock,
        )  # fmt: skip
        self._divide({self.name: identity.queues})  # a splitter that can't do it fails here
        self._listener = Listener(
            client, self.shards, self.membership.channel,
            lambda shard, delay, level: by_queue[shard.queue].wake(shard, delay, level, sends=True),
            lambda shard, delay: self.maintenance.lease_released(shard, delay),  # noqa: PLW0108  # it is made later
            self._received, self.outage.begin, self._permits.channels, self._permits.wake,
            {
                b"sealed": lambda shard: self.maintenance.sealed(shard),  # noqa: PLW0108
                b"cancelled": lambda shard: self.maintenance.jobs_are_to_end(shard),  # noqa: PLW0108
            },
        )  # fmt: skip
        leases = Leases(
            maintenance_client, self.shards, by_queue, self._listener, config.lease_ttl,
            poll_interval=config.poll_interval, resumes=resumes, clock=clock,
        )  # fmt: skip
        self.maintenance = MaintenanceLoop(
            maintenance_client, self.membership, leases, activities, self.outage, divide=self._divide,
            lease_ttl=config.lease_ttl, renewal_interval=config.renewal_interval, on_registered=self._registered,
            more_details=lambda: {**more_details(), **({} if self._listens else {"listens": False})},
            on_ready=on_ready, on_fatal=on_fatal, sweeper=Sweeper(lambda: leases.held, queues, config.scan_size),
            chore=chore, clock=clock,
        )  # fmt: skip
        self._follow_seals(self.shards)

    # --- life ---

    def start(self) -> None:
        """Joins the members, and gets shards from then on."""
        self.maintenance.start()
        self._listener.start()
        self._permits.start()

    def quiet(self) -> None:
        """Hands out nothing more, leaves the members, and gives up each shard once nobody works it, for good."""
        for dispatcher in self.dispatchers:
            dispatcher.close()
        self.maintenance.quiet()

    def quiet_for_now(self) -> None:
        """The same until `unquiet`: the performers go on waiting."""
        for dispatcher in self.dispatchers:
            dispatcher.quiet(True)
        self.maintenance.quiet()

    def unquiet(self) -> bool:
        """Joins the members again, and gets shards. False: not after `quiet` or `finish`, which are for good."""
        if any(dispatcher.closed for dispatcher in self.dispatchers):
            return False
        self.maintenance.unquiet(self._queues)
        for dispatcher in self.dispatchers:
            dispatcher.quiet(False)
        return True

    def finish(self) -> None:
        """Hands out nothing more, and lets no further batch begin. Membership and leases stay."""
        for workers, dispatcher in zip(self._groups, self.dispatchers, strict=True):
            dispatcher.leave([shard for shard in self.shards if shard.queue in workers.queues])
            dispatcher.close()

    def stop(self) -> None:
        """Renews nothing any more: from here on the leases run out. After `quiet`."""
        self._permits.close()
        self.maintenance.stop()

    def close(self) -> None:
        """Closes its own connections, after `leave`. ``client`` stays open."""
        self._listener.close()
        self.maintenance.close()

    # --- who works what ---

    def _divide(self, members: Mapping[str, Mapping[str, int]]) -> list[Shard]:
        """Gives each dispatcher its shards while these are the members, and returns the shards that are to be held."""
        if isinstance(self._splitter, MembershipSplitter):
            groups = self._splitter.among(self.shards, members, self.name)
        else:
            groups = list(self._splitter(self.shards))
        known = set(self.shards)
        for shard in (shard for group in groups for shard in group):
            if shard not in known:
                raise ConfigError(f"the splitter returned {shard!r}, which it was not given")
        for workers, dispatcher in zip(self._groups, self.dispatchers, strict=True):
            dispatcher.assign(shard for group in groups for shard in group if shard.queue in workers.queues)
        return list(dict.fromkeys(shard for group in groups for shard in group if not shard.is_sealed))

    # --- other layouts: when a queue is resharded ---

    def _follow_seals(self, shards: Sequence[Shard]) -> None:
        for shard in shards:
            shard.in_flight.on_sealed = partial(self.maintenance.sealed, shard)

    def _registered(self, call: Registration, reply: Any) -> Mapping[str, int] | None:
        """Follows the layouts of a queue in the registry. When they have changed, returns what this process serves from
        now on: name of a layout -> shards_count. Called by the maintenance loop.
        """
        queue = call.queue
        known = self._layouts.get(queue)
        shards = [shard for shard in self.shards if shard.queue == queue]
        doubted = {shard.epoch for shard in shards if shard.is_sealed or shard.is_fed or shard.is_miscounted}
        found = self._read_layouts(call, reply, known, doubted)
        if found is None or found == known or self._make_shards is None:
            return None
        self._layouts[queue] = found
        fresh = [layout for layout in found.all if known is None or layout not in known.all]
        # A failover may have lost a layout of the registry, which is entered again: shards of it may be held still.
        present = {shard.prefix: shard for shard in self.shards if shard.queue == queue and shard.layout in found.all}
        made: list[Shard] = []
        for shard in (shard for layout in fresh for shard in self._make_shards(queue, layout)):
            if shard.prefix in present:
                present[shard.prefix].is_sealed = False
            else:
                made.append(shard)
        self._follow_seals(made)
        self._listener.add_shards(made)
        replaced = {shard.prefix: shard for shard in made}
        for shard in self.shards:
            if shard.queue == queue and shard.layout not in found.all:
                shard.is_sealed = True  # all of its jobs were moved
                if shard.epoch == found.current.epoch:
                    _replace(shard, replaced.get(shard.prefix))
            elif shard.queue == queue and found.next is None:
                shard.is_sealed = False  # it was of a reshard that is gone with the queue, or lost: it says so again
        # Those of the layout before last are let go of, unless they are still held.
        self.shards[:] = [
            shard for shard in self.shards if not shard.is_sealed or shard.lease.current is not None
            or shard.layout in found.all
        ] + made  # fmt: skip
        self.of_queue = _by_queue(self.shards)
        log.info(
            "queue %r: %s", queue,
            f"{found.current.shards_count} shards now" if found.next is None
            else f"is resharded from {found.current.shards_count} shards to {found.next.shards_count}",
            extra={"event": "reshard", "queue": queue},
        )  # fmt: skip
        self._queues = {name: count for name, count in self._queues.items() if queue_of_layout(name) != queue}
        self._queues |= {layout.name(queue): layout.shards_count for layout in found.all}
        return self._queues

    def _received(self, message: str) -> None:
        """A message to the members: the name of one that noticed a change, or a command to one of them. "": from here
        on they are heard, which the next heartbeat says.
        """
        self._listens = True
        if not message.startswith("{"):
            if message != self.name:
                self.maintenance.members_changed()
            return
        try:
            sent = json.loads(message)
            if sent["to"] != self.name:
                return
            command = {name: str(value) for name, value in {"do": sent["do"], **sent}.items()}
        except (ValueError, LookupError, TypeError, AttributeError):
            return  # not ours
        self._on_command(command)


def _by_queue(shards: Sequence[Shard]) -> dict[str, list[Shard]]:
    groups: dict[str, list[Shard]] = {}
    for shard in shards:
        groups.setdefault(shard.queue, []).append(shard)
    return groups


def _replace(shard: Shard, other: Shard | None) -> None:
    """Ends the lease of a shard whose queue has another number of shards at the same epoch: the queue was dropped and
    made again, or the registry had been wrong.
    """
    shard.lease.lose()
    if other is not None and shard.in_flight.in_hand:  # still performed: that lease is not to be resumed
        other.lease.renew_nonce()
