"""Checks and warnings of a node's start, and the rehearsal of a start, for code that is to be run later."""

import asyncio
import errno
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lowq import drivers
from lowq.application import Lowq
from lowq.coroutines import at_once, run_first
from lowq.errors import ConfigError, RedisRefused
from lowq.logs import get_log
from lowq.registrations import QueueInfo
from lowq.schedules import is_internal
from lowq.settings import Config
from lowq.store import Client
from lowq.store.keys import nodes_key
from lowq.store.registry import rights
from lowq.work.handler import WorkerRuntime
from lowq.work.lifecycle import LoopState, has_life, set_up, tear_down
from lowq.workers import Worker, is_async

log = get_log("lowq.node")

#: What an OSError says of a port or a lock that another process has.
_HELD_BY_OTHERS = (errno.EADDRINUSE, errno.EAGAIN, errno.EWOULDBLOCK)


def new_splitter(config: Config, threads: int) -> Any:
    """A splitter, as the settings say.

    Raises:
        ConfigError: it can't be called; and what building it raises.
    """
    build = config.build_splitter or (lambda: drivers.load("splitter", config.splitter)(max(threads, 1)))
    return _checked_made("splitter", build())


def new_scheduler(config: Config) -> Any:
    """A scheduler for a queue of a thread, as the settings say.

    Raises:
        ConfigError: it can't be called; and what building it raises.
    """
    return _checked_made("scheduler", (config.build_scheduler or drivers.load("scheduler", config.scheduler))())


def _checked_made(kind: str, made: Any) -> Any:
    if not callable(made):  # every batch would fail with it
        raise ConfigError(
            f"what makes the {kind} (build_{kind}, or the driver) gave {made!r:.100}; it must be callable"
        )
    return made


@contextmanager
def _free_after_exec() -> Iterator[None]:
    """Ignores that something, such as a port, is in use: the running node has it, and frees it by its exec."""
    try:
        yield
    except OSError as error:
        if error.errno not in _HELD_BY_OTHERS:
            raise


def rehearse(app: Lowq, workers: Iterable[type[Worker[Any]]], threads: int) -> None:
    """Runs the application's own code of a start, in a process that ends then.

    Raises:
        What on_server_init, on_loop_start, a splitter, a scheduler or a worker's __init__ or setup raises.
    """
    with _free_after_exec():
        app.config.on_server_init()
    new_splitter(app.config, threads)
    new_scheduler(app.config)
    awaiting = []
    for worker in workers:
        instance = WorkerRuntime.of(worker, app.config, events=app.events_of(worker.queue_name)).instance
        if is_async(worker):
            awaiting.append(instance)
        elif has_life(worker):
            at_once(_live([instance], None))
    state = LoopState.of(app) if awaiting else None
    if state is not None or any(map(has_life, awaiting)):
        run_first(asyncio.run, _live(awaiting, state))


async def _live(instances: Iterable[object], state: LoopState | None) -> None:
    if state is not None:
        with _free_after_exec():
            await state.start()
    for instance in filter(has_life, instances):
        with _free_after_exec():
            await set_up(instance)
            await tear_down(instance)
    if state is not None:
        await state.stop()


def warn(app: Lowq, client: Client, registered: Sequence[QueueInfo]) -> None:
    """Warns of a Redis that loses jobs, or wake-ups, and of jobs that nobody performs.

    Raises:
        RedisUnavailable, RedisRefused
    """
    _warn_of_eviction(client)
    _warn_of_channels(client, app.config)
    _warn_of_unserved(app, registered)


def _warn_of_eviction(client: Client) -> None:
    try:
        policy = client.server_info().get("maxmemory_policy", "noeviction")
    except RedisRefused as error:
        log.warning(
            "Redis does not let this user ask about itself, so it is not known whether it is 7.0 or newer, whether "
            "it evicts keys (it needs maxmemory-policy noeviction), and when it was started, which decides whether "
            "jobs of a node that is gone are charged with a crash; allow +info, see docs/operations.md#rights: %s",
            error, extra={"event": "unchecked"},
        )  # fmt: skip
        return
    if policy != "noeviction":
        log.warning(
            "Redis has maxmemory-policy %s: under memory pressure it removes keys, and jobs are lost; "
            "set it to noeviction", policy, extra={"event": "eviction", "policy": policy},
        )  # fmt: skip


def _warn_of_channels(client: Client, config: Config) -> None:
    channel = nodes_key(config.namespace)
    if client.call(rights(channel, ["SPUBLISH"])):
        log.warning(
            "Redis does not let this user publish (SPUBLISH on %s): what it pushes and gives back is found up to "
            "%g s later; allow +spublish and the channels, see docs/operations.md#rights",
            channel, config.renewal_interval, extra={"event": "unpublished"},
        )  # fmt: skip


def _warn_of_unserved(app: Lowq, registered: Sequence[QueueInfo]) -> None:
    served = {queue for node in app.nodes() for queue in node.queues} | set(app.workers)
    for queue in registered:
        if queue.name not in served and not is_internal(queue.name):
            stats = app.queue(queue.name).stats()
            if stats.length or stats.taken:
                log.warning(
                    "queue %r holds jobs (%d) and no live node serves it: start a node that works it. If its "
                    "worker was renamed, give the new one queue_name=%r",
                    queue.name, stats.length + stats.taken, queue.name,
                    extra={"event": "unserved", "queue": queue.name},
                )  # fmt: skip
