"""The broker of a node: what it is told of the queues, their workers and their schedules."""

from collections.abc import Sequence
from typing import Any

from lowq.application import Lowq
from lowq.node.checks import new_splitter
from lowq.node.performers import Performers, Workers
from lowq.node.schedules import QueueSchedules
from lowq.observe.error_groups import ErrorCounts, ErrorRecorder
from lowq.observe.tallies import Recorder
from lowq.sharding import Layout, Layouts
from lowq.shards.broker import Broker
from lowq.shards.fairness import Share
from lowq.shards.membership import Identity
from lowq.shards.shard import Shard, lag_of, shards_of, take_inflow
from lowq.store import Client
from lowq.version import VERSION
from lowq.workers import limits_of, payload_type_of, queue_options_of


def make_broker(
    app: Lowq, nonce: str, client: Client, workers: Workers, schedules: Sequence[QueueSchedules],
    performers: Performers, **node: Any,
) -> tuple[Broker, Recorder]:  # fmt: skip
    """The broker, and what goes into the histories of the queues. The queues are registered. ``node``: what else the
    broker is told of its node.

    Raises:
        ConfigError: a splitter or a scheduler can't be called; and what building it raises.
    """
    config = app.config
    schedule_workers = {item.worker.queue_name: item.worker for item in schedules}
    all_workers = workers | schedule_workers
    failed = {name: ErrorCounts(config.load_error) for name in workers}

    def make_shards(queue: str, layout: Layout) -> list[Shard]:
        worker, events = all_workers[queue], app.events_of(queue)
        return shards_of(
            client, config, worker, nonce, layout=layout,
            events=events.joined_by(failed[queue]) if queue in failed else events,
            payload_type=payload_type_of(worker),
        )  # fmt: skip

    def layouts_of(queue: str) -> Layouts:
        routes = app.registrations.routes_of(queue)
        return Layouts.plain(all_workers[queue].shards_count) if routes is None else routes.layouts

    layouts = {name: layouts_of(name) for name in all_workers}
    each = [(name, layout) for name, found in layouts.items() for layout in found.all]
    recorder = Recorder(
        config.namespace, workers, lambda queue: lag_of(broker.shards, queue),
        take_inflow=lambda queue: take_inflow(shard for shard in broker.shards if shard.queue == queue),
    )  # fmt: skip
    broker = Broker(
        Identity(nonce, {layout.name(name): layout.shards_count for name, layout in each}, performers.count, VERSION),
        [shard for name, layout in each for shard in make_shards(name, layout)],
        client, app.connect(2, socket_timeout=max(config.lease_ttl / 4, 0.1)), config,
        splitter=new_splitter(config, performers.count), groups=performers.groups(schedule_workers),
        shares={
            name: Share(worker.weight, worker.max_threads, limits_of(worker), worker.batch_size)
            for name, worker in workers.items()
        },
        activities=performers.activities, queues=[queue_options_of(worker) for worker in workers.values()],
        registrations=lambda: [
            app.registrations.call(name, worker.shards_count, worker) for name, worker in all_workers.items()
        ],
        chore=(lambda client, _now: min(item.enter(client) for item in schedules)) if schedules else None,
        layouts=layouts, make_shards=make_shards, read_layouts=app.registrations.layouts_in,
        heartbeat_extras=[recorder, ErrorRecorder(config.namespace, failed, app.events_of)],
        **node,
    )  # fmt: skip
    return broker, recorder
