"""The objects that all handlers of one application use."""

from dataclasses import dataclass

from starlette.exceptions import HTTPException
from starlette.requests import Request

import lowq
from lowq_web.actions import Actions
from lowq_web.background import BackgroundAction, find_action
from lowq_web.confirmations import Snapshots
from lowq_web.notices import Notices
from lowq_web.open_streams import OpenStreams
from lowq_web.redaction import Redact
from lowq_web.stats_cache import StatsCache
from lowq_web.threads import ConcurrencyLimit, Threads


@dataclass(frozen=True, slots=True)
class AppContext:
    """What the handlers of one application share: `context_of` finds it."""

    #: It has connections of its own; `close` closes only these, not those of the host application.
    app: lowq.Lowq
    stats_cache: StatsCache
    actions: Actions
    redact: Redact
    threads: Threads
    #: Limits for scans of all ids, and for streams of live pages.
    scans: ConcurrencyLimit
    streams: ConcurrencyLimit
    open_streams: OpenStreams
    notices: Notices
    snapshots: Snapshots


def queue_of(request: Request) -> lowq.Queue:
    """The queue in the path of the request. Redis is asked for it once a request.

    Raises:
        UnknownQueueError: it was never used, or its name is invalid.
    """
    found: lowq.Queue | None = getattr(request.state, "queue", None)
    if found is None:
        try:
            found = context_of(request).app.queue(request.path_params["queue"])
        except lowq.ConfigError as error:
            raise lowq.UnknownQueueError(f"there is no such queue: {error}") from None
        found.shards_count  # noqa: B018 - reads it, which raises if there is none
        request.state.queue = found
    return found


def context_of(request: Request) -> AppContext:
    """What the handlers of this application share."""
    context: AppContext = request.app.state.context
    return context


def task_of(request: Request) -> BackgroundAction:
    """The background action in the path of the request.

    Raises:
        HTTPException: there is none.
    """
    found = find_action(context_of(request).app, request.path_params["task"])
    if found is None:
        raise HTTPException(404, "there is no such task, or it is not remembered any more")
    return found
