"""Actions on jobs: at once, or after a confirmation page."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

import lowq
from lowq import inspection
from lowq.operate.actions import ACTIONS, ActionName
from lowq_web import text
from lowq_web.actions import DESTRUCTIVE
from lowq_web.confirmations import confirmation_of, encode_moments, moments_of, snapshot_of
from lowq_web.context import context_of, queue_of
from lowq_web.fields import form_of
from lowq_web.listing import JobQuery, asked_of, group_text
from lowq_web.pages.queue import in_words
from lowq_web.pages.rendering import redirect, render
from lowq_web.security import visit_of
from lowq_web.words import DONE, VERBS

#: The fields of a listing, to go back to it.
_LISTED = ("state", "match", "order_by", "reverse", "min", "max", "payload", "error", "error_group", "shard")


def act(request: Request) -> Response:
    """An action on one id, on the selected ones, or on all that match: at once, or after a confirmation page.

    A confirmed action is done to what the page has shown: its form carries the number and the time, nothing newer is
    touched, and the question is asked again when the number has changed by more than a tenth.
    """
    context, handle, who = context_of(request), queue_of(request), visit_of(request).actor
    fields = form_of(request)
    form = dict(fields)
    ids = list(dict.fromkeys(text.decode_id(value) for name, value in fields if name == "id"))
    action, _, what = form.get("do", "").partition(" ")
    if action not in ACTIONS or what not in ("selected", "all", ""):
        raise lowq.ConfigError(f"do={form.get('do')!r:.50} is no action")
    reason = form.get("reason", "").strip()[:300] or None
    # The listing to go back to: built from the filter, never from an address in the form.
    back = {name: form[name] for name in _LISTED if form.get(name)}
    sure = form.get("sure") == "1"
    if what == "all":
        try:
            asked = asked_of(back, context.stats_cache.now())
            wanted = asked.filter_for(action)
            if wanted.payload is not None:
                raise lowq.ConfigError("Actions on all that match don't go by payloads: tick the jobs")
        except lowq.ConfigError as error:
            return redirect(request, "queue", back, form_error=in_words(str(error)), queue=handle.name)
        # "-2h" would mean another time when the form is sent.
        back |= {name: repr(bound) for name, bound in (("min", wanted.min), ("max", wanted.max)) if bound}
        confirm = _Confirm(request, handle, action, what, back, reason)
        if not sure:
            return confirm.of_all(asked, wanted)
        given = confirmation_of(form, context.stats_cache.now())
        bound = snapshot_of(form, given, context.snapshots)
        with context.scans:
            count = handle.count(action, wanted)
        if given.outdated(count, context.stats_cache.now()):
            return confirm.of_all(asked, wanted, was=given.count)
        started = context.actions.on_all(who, handle.name, action, replace(wanted, before=bound), reason)
        return redirect(request, "task", task=started.id)
    if not ids:
        form_error = f"Nothing was done: no job is ticked. Tick those to {VERBS[action]}."
        return redirect(request, "queue", back, form_error=form_error, queue=handle.name)
    unchanged = None
    if action in DESTRUCTIVE:
        confirm = _Confirm(request, handle, action, what, back, reason)
        if not sure:
            return confirm.of_ids(ids)
        given, unchanged = confirmation_of(form, context.stats_cache.now()), moments_of(fields, ids)
        left = sum(handle_moments == unchanged[job_id] for job_id, handle_moments in handle.moments(ids).items())
        if given.outdated(given.count - (len(ids) - left), context.stats_cache.now()):
            return confirm.of_ids(ids, was=given.count)
    acted = context.actions.on_ids(who, handle.name, action, ids, reason, unchanged)
    done = f"{_jobs(acted.done)} {DONE[action]}"
    if acted.in_flight:
        done += f"; {acted.in_flight:,} running, left alone"
    if acted.missing:
        done += f"; {acted.missing:,} {'no longer there' if unchanged is None else 'changed or no longer there'}"
    if what == "":
        return redirect(request, "job", {"id": ids[0]}, done=f"{done}.", queue=handle.name)
    return redirect(request, "queue", back, done=f"{done}.", queue=handle.name)


@dataclass(frozen=True, slots=True)
class _Confirm:
    """The confirmation page."""

    request: Request
    queue: lowq.Queue
    action: ActionName
    what: str
    #: The filter of the listing that it links back to.
    back: Mapping[str, str]
    reason: str | None

    def of_all(self, asked: JobQuery, wanted: inspection.JobFilter, was: int | None = None) -> Response:
        """For all that match. ``was``: how many were shown before, when the question is asked again."""
        context = context_of(self.request)
        with context.scans:
            found = self.queue.snapshot(self.action, wanted)
        name = context.snapshots.keep(found) if len(found) else ""
        group = group_text(self.queue, asked.filter.error_group)
        return self._page(found.total, found.at, was, asked=asked, group_text=group, snapshot=name)

    def of_ids(self, ids: Sequence[str], was: int | None = None) -> Response:
        """For the given ids."""
        at = context_of(self.request).stats_cache.redis_time()
        moments = self.queue.moments(ids)
        total = sum(waiting is not None or (buried is not None and self.action == "delete")
                    for waiting, buried in moments.values())  # fmt: skip
        seen = [(job_id, encode_moments(moments[job_id])) for job_id in ids]
        return self._page(total, at, was, seen=seen)

    def _page(self, total: int, at: float, was: int | None, **values: Any) -> Response:
        return render(
            self.request,
            "confirm.html",
            queue=self.queue.name,
            action=self.action,
            what=self.what,
            total=total,
            at=at,
            was=was,
            back=self.back,
            reason=self.reason or "",
            destructive=self.action in DESTRUCTIVE,
            **{"asked": None, "group_text": None, "snapshot": "", "seen": [], **values},
        )


def _jobs(count: int) -> str:
    return "1 job" if count == 1 else f"{count:,} jobs"
