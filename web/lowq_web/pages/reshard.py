"""Another number of shards for a queue: the form, what happens then, and how far it is."""

from starlette.requests import Request
from starlette.responses import Response

import lowq
from lowq.store.keys import MAX_SHARDS
from lowq_web.context import actions_of, context_of, form_of, queue_of
from lowq_web.pages.rendering import redirect, render

#: Characters of what was typed that are put back into the field.
_SHOWN = 30


def reshard(request: Request) -> Response:
    """The form; and what was sent with it: asked about first, then begun."""
    if request.method != "POST":
        return _page(request)
    handle, form = queue_of(request), dict(form_of(request))
    typed = form.get("shards_count", "").strip()
    try:
        wanted = _number(handle, typed)
        if form.get("sure") != "1":
            return _page(request, typed, wanted=wanted)
        started = actions_of(request).reshard(handle.name, wanted)
    except (lowq.ConfigError, lowq.Resharding) as error:
        return _page(request, typed, error=str(error))
    return redirect(request, "task", task=started.id)


def _number(handle: lowq.Queue, typed: str) -> int:
    """What was typed as a number of shards.

    Raises:
        ConfigError: it is none, or the queue has so many; in the words of the page.
    """
    if not (typed.isascii() and typed.isdecimal() and len(typed) < 10 and 1 <= int(typed) <= MAX_SHARDS):
        raise lowq.ConfigError(f"A whole number from 1 to {MAX_SHARDS:,}, not {typed[:_SHOWN]!r}.")
    layouts = handle.layouts
    if layouts.next is None and int(typed) == layouts.current.shards_count:
        raise lowq.ConfigError(f"It has {typed} already.")
    return int(typed)


def _page(request: Request, typed: str = "", *, wanted: int | None = None, error: str | None = None) -> Response:
    handle = queue_of(request)
    stats = context_of(request).stats_cache.stats(handle)
    return render(
        request,
        "reshard.html",
        400 if error else 200,
        queue=handle.name,
        stats=stats,
        jobs=stats.length + stats.taken + stats.morgue_length,
        progress=handle.reshard_progress(),
        shards_count=handle.layouts.current.shards_count,
        most=MAX_SHARDS,
        typed=typed[:_SHOWN],
        wanted=wanted,
        error=error,
    )
