"""Actions on jobs: at once, or after a confirmation page."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

import lowq
from lowq import admin, inspection
from lowq.admin import Moments
from lowq.operate.actions import ACTIONS, ActionName
from lowq_web import text
from lowq_web.actions import DESTRUCTIVE
from lowq_web.confirmations import confirmation_of, encode_moments, moments_of, snapshot_of
from lowq_web.context import actions_of, context_of, form_of, queue_of, queues_of
from lowq_web.listing import FIELDS, WAITING, JobQuery, Queues, Target, asked_of, group_text
from lowq_web.pages.jobs import in_words
from lowq_web.pages.rendering import redirect, render
from lowq_web.words import DONE, VERBS

#: An id, and the name of its queue.
Chosen = tuple[str, str]


def act(request: Request) -> Response:
    """An action on one id, on the selected ones, or on all that match: at once, or after a confirmation page.

    A confirmed action is done to what the page has shown: its form carries the number and the time, nothing newer is
    touched, and the question is asked again when the number has changed by more than a tenth.
    """
    form = dict(form_of(request))
    action, _, what = form.get("do", "").partition(" ")
    if action not in ACTIONS or what not in ("selected", "all", ""):
        raise lowq.ConfigError(f"do={form.get('do')!r:.50} is no action")
    is_one = "queue" in request.path_params
    target = queue_of(request) if is_one else queues_of(request, form.get("queue", "").strip())
    # The listing to go back to: built from the filter, never from an address in the form.
    back = {name: form[name] for name in FIELDS if form.get(name) and not (is_one and name == "queue")}
    reason = form.get("reason", "").strip()[:300] or None
    doing = _Doing(request, target, action, what, form, back, reason)
    return doing.to_all() if what == "all" else doing.to_chosen()


@dataclass(frozen=True, slots=True)
class _Doing:
    """What a form asks for."""

    request: Request
    target: Target
    action: ActionName
    #: all, selected, or "" for the one of a page of its own.
    what: str
    form: Mapping[str, str]
    #: The filter of the listing.
    back: dict[str, str]
    reason: str | None

    @property
    def _is_sure(self) -> bool:
        return self.form.get("sure") == "1"

    def to_all(self) -> Response:
        """All that match."""
        context = context_of(self.request)
        try:
            default = "any" if isinstance(self.target, Queues) else WAITING
            asked = asked_of(self.back, context.stats_cache.now(), default)
            wanted = asked.filter_for(self.action)
            if wanted.payload is not None:
                raise lowq.ConfigError("Actions on all that match don't go by payloads: tick the jobs")
        except lowq.ConfigError as error:
            return self._to_list(form_error=in_words(str(error)))
        # "-2h" would mean another time when the form is sent.
        self.back.update({name: repr(bound) for name, bound in (("min", wanted.min), ("max", wanted.max)) if bound})
        if not self._is_sure:
            return self._ask_about_all(asked, wanted)
        given = confirmation_of(self.form, context.stats_cache.now())
        bound = snapshot_of(self.form, given, context.snapshots)
        with context.scans:
            count = self.target.count(self.action, wanted)
        if given.outdated(count, context.stats_cache.now()):
            return self._ask_about_all(asked, wanted, was=given.count)
        bounded = replace(wanted, before=bound)
        started = actions_of(self.request).on_all(self.target, self.action, bounded, self.reason)
        return redirect(self.request, "task", task=started.id)

    def to_chosen(self) -> Response:
        """The ids of the form."""
        context, fields = context_of(self.request), form_of(self.request)
        chosen = list(dict.fromkeys(map(self._chosen, (value for name, value in fields if name == "id"))))
        if not chosen:
            return self._to_list(form_error=f"Nothing was done: no job is ticked. Tick those to {VERBS[self.action]}.")
        unchanged: Mapping[Chosen, Moments] | None = None
        if self.action in DESTRUCTIVE:
            if not self._is_sure:
                return self._ask_about(chosen)
            given, changed = confirmation_of(self.form, context.stats_cache.now()), 0
            if self.action != "cancel":  # nothing tells one run of an id from another
                unchanged = moments_of(fields, chosen)
                changed = sum(moments != unchanged[key] for key, moments in self._moments(chosen).items())
            if given.outdated(given.count - changed, context.stats_cache.now()):
                return self._ask_about(chosen, was=given.count)
        acted = admin.Acted()
        for queue, ids in _by_queue(chosen).items():
            same = None if unchanged is None else {job_id: unchanged[queue, job_id] for job_id in ids}
            acted += actions_of(self.request).on_ids(queue, self.action, ids, self.reason, same)
        done = f"{_jobs(acted.done)} {DONE[self.action]}"
        if acted.signalled:
            done += f"; {acted.signalled:,} running, told to end"
        if acted.in_flight:
            done += f"; {acted.in_flight:,} running, left alone"
        if acted.missing:
            done += f"; {acted.missing:,} {'no longer there' if unchanged is None else 'changed or no longer there'}"
        if self.what == "":
            queue, job_id = chosen[0]
            return redirect(self.request, "job", {"id": job_id}, done=f"{done}.", queue=queue)
        return self._to_list(done=f"{done}.")

    def _chosen(self, value: str) -> Chosen:
        """The id of a ticked box: with its queue in front, where the list is of several."""
        if not isinstance(self.target, Queues):
            return self.target.name, text.decode_id(value)
        queue, _, job_id = value.partition(" ")
        return queue, text.decode_id(job_id)

    def _moments(self, chosen: Sequence[Chosen]) -> dict[Chosen, Moments]:
        app = context_of(self.request).app
        return {
            (queue, job_id): moments
            for queue, ids in _by_queue(chosen).items()
            for job_id, moments in app.queue(queue).moments(ids).items()
        }

    def _to_list(self, **said: str) -> Response:
        if isinstance(self.target, Queues):
            return redirect(self.request, "jobs", self.back, **said)
        return redirect(self.request, "queue", self.back, queue=self.target.name, **said)

    # --- asking ---

    def _ask_about_all(self, asked: JobQuery, wanted: inspection.JobFilter, was: int | None = None) -> Response:
        """``was``: how many were shown before, when the question is asked again."""
        context = context_of(self.request)
        with context.scans:
            found = self.target.snapshot(self.action, wanted)
        name = context.snapshots.keep(found) if len(found) else ""
        group = group_text(self.target, asked.filter.error_group)
        return self._ask(found.total, found.at, was, asked=asked, group_text=group, snapshot=name)

    def _ask_about(self, chosen: Sequence[Chosen], was: int | None = None) -> Response:
        at = context_of(self.request).stats_cache.redis_time()
        moments = self._moments(chosen)
        total = sum(waiting is not None or (buried is not None and self.action == "delete") or self.action == "cancel"
                    for waiting, buried in moments.values())  # fmt: skip
        return self._ask(total, at, was, seen=[(*key, encode_moments(moments[key])) for key in chosen])

    def _ask(self, total: int, at: float, was: int | None, **values: Any) -> Response:
        return render(
            self.request,
            "confirm.html",
            queue=None if isinstance(self.target, Queues) else self.target.name,
            target=str(self.target) if isinstance(self.target, Queues) else self.target.name,
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


def _by_queue(chosen: Sequence[Chosen]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for queue, job_id in chosen:
        found.setdefault(queue, []).append(job_id)
    return found


def _jobs(count: int) -> str:
    return "1 job" if count == 1 else f"{count:,} jobs"
