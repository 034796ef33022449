"""What a handler needs to know: the objects that all handlers of one application share, and what its request names."""

from dataclasses import dataclass
from urllib.parse import parse_qsl

from starlette.exceptions import HTTPException
from starlette.requests import Request

import lowq
from lowq_web.actions import Actions
from lowq_web.background import BackgroundAction, BackgroundActions, find_action
from lowq_web.confirmations import Snapshots
from lowq_web.listing import Queues
from lowq_web.notices import Notices
from lowq_web.open_streams import OpenStreams
from lowq_web.redaction import Redact
from lowq_web.security import visit_of
from lowq_web.stats_cache import StatsCache
from lowq_web.threads import ConcurrencyLimit, Threads


@dataclass(frozen=True, slots=True)
class AppContext:
    """What the handlers of one application share: `context_of` finds it."""

    #: It has connections of its own; `close` closes only these, not those of the host application.
    app: lowq.Lowq
    stats_cache: StatsCache
    background: BackgroundActions
    redact: Redact
    threads: Threads
    #: Limits for scans of all ids, and for streams of live pages.
    scans: ConcurrencyLimit
    streams: ConcurrencyLimit
    open_streams: OpenStreams
    notices: Notices
    snapshots: Snapshots


def context_of(request: Request) -> AppContext:
    """What the handlers of this application share."""
    context: AppContext = request.app.state.context
    return context


def actions_of(request: Request) -> Actions:
    """What the user of the request may do."""
    context = context_of(request)
    return Actions(context.app, context.stats_cache, context.background, visit_of(request).actor)


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


def queues_of(request: Request, part: str) -> Queues:
    """The queues with this in their names."""
    return Queues(context_of(request).app, part)


def task_of(request: Request) -> BackgroundAction:
    """The background action in the path of the request.

    Raises:
        HTTPException: there is none.
    """
    found = find_action(context_of(request).app, request.path_params["task"])
    if found is None:
        raise HTTPException(404, "there is no such task, or it is not remembered any more")
    return found


# --- its fields, in the address or in a form: ids among them may be of any bytes ---


def query_of(request: Request) -> dict[str, str]:
    """The query's last value of each name.

    Raises:
        ConfigError: there are too many.
    """
    return dict(_fields(request.scope["query_string"], 100, "the address"))


def form_of(request: Request) -> list[tuple[str, str]]:
    """The fields of a form that was sent, in order: those of ticked boxes have one name.

    Raises:
        ConfigError: there are too many.
    """
    return _fields(visit_of(request).body, 5000, "the form")


def _fields(raw: bytes, most: int, where: str) -> list[tuple[str, str]]:
    text = raw.decode("ascii", "replace")
    try:
        return parse_qsl(text, keep_blank_values=True, errors="surrogateescape", max_num_fields=most)
    except ValueError:
        raise lowq.ConfigError(f"{where} has too many fields") from None
