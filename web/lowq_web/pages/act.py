"""Something done to jobs: at once, or after a page that asks."""

from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import Response

import lowq
from lowq_web import text
from lowq_web.actions import ACTIONS, DESTRUCTIVE, DONE, VERBS
from lowq_web.fields import form_of
from lowq_web.listing import Asked, asked_of
from lowq_web.pages.queue import in_words
from lowq_web.pages.rendering import redirect, render
from lowq_web.security import visit_of
from lowq_web.site import queue_of, site_of
from lowq_web.tasks import Filter


def act(request: Request) -> Response:
    """Something done to one id, to those selected, or to all that match: at once, or after a page that asks."""
    site, handle, who = site_of(request), queue_of(request), visit_of(request).user.name
    fields = form_of(request)
    form = dict(fields)
    ids = list(dict.fromkeys(text.decode_id(value) for name, value in fields if name == "id"))
    action, _, what = form.get("do", "").partition(" ")
    if action not in ACTIONS or what not in ("selected", "all", ""):
        raise lowq.ConfigError(f"do={form.get('do')!r:.50} is no action")
    reason = form.get("reason", "").strip()[:300] or None
    # Where to go back to: only the filter, never an address that somebody sent.
    back = {name: form[name] for name in ("state", "match", "order_by", "reverse", "min", "max") if form.get(name)}
    sure = form.get("sure") == "1"
    if what == "all":
        try:
            asked = asked_of(back, site.lookout.now())
            wanted = Filter(asked.bulk_state(action), asked.match, *asked.bulk_bounds())
        except lowq.ConfigError as error:
            return redirect(request, "queue", back, slip=in_words(str(error)), queue=handle.name)
        if not sure:
            # "-2h" would mean another moment when the answer comes.
            back |= {
                name: repr(bound) for name, bound in zip(("min", "max"), asked.bulk_bounds(), strict=True) if bound
            }
            with site.scans:
                total = handle.count(action, wanted.state, wanted.match, wanted.min, wanted.max)
            return _confirm(request, handle.name, action, what, total, [], back, asked)
        started = site.actions.on_all(who, handle.name, action, wanted, reason)
        return redirect(request, "task", task=started.id)
    if not ids:
        slip = f"Nothing was done: no job is ticked. Tick those to {VERBS[action]}."
        return redirect(request, "queue", back, slip=slip, queue=handle.name)
    if action in DESTRUCTIVE and not sure:
        return _confirm(request, handle.name, action, what, len(ids), ids, back, None)
    acted = site.actions.on_ids(who, handle.name, action, ids, reason)
    done = f"{_jobs(acted.done)} {DONE[action]}"
    if acted.in_flight:
        done += f"; {acted.in_flight:,} in flight, left alone"
    if acted.missing:
        done += f"; {acted.missing:,} no longer there"
    if what == "":
        return redirect(request, "job", {"id": ids[0]}, done=f"{done}.", queue=handle.name)
    return redirect(request, "queue", back, done=f"{done}.", queue=handle.name)


def _confirm(
    request: Request,
    name: str,
    action: str,
    what: str,
    total: int,
    ids: list[str],
    back: Mapping[str, str],
    asked: Asked | None,
) -> Response:
    return render(
        request,
        "confirm.html",
        queue=name,
        action=action,
        verb=VERBS[action],
        what=what,
        total=total,
        ids=ids,
        back=back,
        asked=asked,
        destructive=action in DESTRUCTIVE,
    )


def _jobs(count: int) -> str:
    return "1 job" if count == 1 else f"{count:,} jobs"
