"""Pages: HTML that is complete without JavaScript.

A page asks the queue's handle, turns what it gets into words with `text`, and fills a template. Listings that look at
every id are streamed: the rows found so far, again and again, each time in a table body that hides the one before.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

import lowq
from lowq_web import text
from lowq_web.actions import ACTIONS
from lowq_web.app import queue_of, site_of
from lowq_web.chart import HEIGHT, WIDTH, chart, heat_map, heat_maps
from lowq_web.entity import entity
from lowq_web.listing import LIMIT, ORDERS, STATES, Asked, asked_of, tab_counts
from lowq_web.notices import Notice
from lowq_web.security import TOKEN, visit_of
from lowq_web.tasks import ActionName, Filter
from lowq_web.threads import Held

#: What a template says where what it has made so far is to be sent.
_FLUSH = "\x00flush\x00"
#: Characters of a payload on the page of an id; more behind a link. And payloads of an id.
MAX_SHOWN, MAX_PAYLOADS = 4000, 100
#: Queues on the dashboard, shards on a page of them.
MAX_QUEUES, MAX_SHARDS = 500, 200
#: Characters of a pattern that a search is turned into.
MAX_PATTERN = 64
#: Actions that can't be undone: always confirmed.
DESTRUCTIVE = ("bury", "delete")
_VERBS = {"perform_now": "perform now", "kick": "kick", "bury": "bury", "delete": "delete"}
_DONE = {
    "perform_now": "made due now",
    "kick": "kicked",
    "bury": "buried",
    "delete": "deleted",
}
_TOLD = {"quiet": "told to go quiet", "stop": "told to stop"}
#: Jobs of a state, in words; None: all that wait.
_JOBS = {None: "waiting jobs", "morgue": "buried jobs", "taken": "jobs in flight"}
#: Seconds of lag above which shards without an owner are worth a warning: a deploy takes a few.
OWNERLESS_LAG = 10.0


def routes() -> list[Route]:
    """All pages."""
    return [
        Route("/", dashboard, name="dashboard"),
        Route("/search", search, name="search"),
        Route("/nodes", nodes, name="nodes"),
        Route("/nodes/tell", tell, methods=["POST"], name="tell"),
        Route("/audit", audit, name="audit"),
        Route("/tasks", tasks, name="tasks"),
        Route("/tasks/{task}", task, name="task"),
        Route("/tasks/{task}/cancel", cancel, methods=["POST"], name="cancel"),
        Route("/queues/{queue:name}", queue, name="queue"),
        Route("/queues/{queue:name}/job", job, name="job"),
        Route("/queues/{queue:name}/payload", payload, name="payload"),
        Route("/queues/{queue:name}/shards", shards, name="shards"),
        Route("/queues/{queue:name}/act", act, methods=["POST"], name="act"),
        Route("/queues/{queue:name}/pause", pause, methods=["POST"], name="pause"),
        Route("/queues/{queue:name}/resume", resume, methods=["POST"], name="resume"),
    ]


# --- templates -----------------------------------------------------------------------------------------------


def _finalize(value: Any) -> Any:
    """Everything that a template shows: what is no text for the eye (control characters, direction marks, broken
    encodings) is shown as its escape. Then it is escaped for HTML.
    """
    if isinstance(value, Markup):
        return value
    return text.printable(value) if isinstance(value, str) else value


def _block(value: str) -> Markup:
    """A text whose lines are to be seen as lines."""
    return escape(text.printable(value, "\n"))


_environment = Environment(
    loader=PackageLoader("lowq_web"),
    autoescape=True,
    finalize=_finalize,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_environment.filters |= {
    "short": text.short,
    "exact": text.exact,
    "rate": text.rate,
    "duration": text.duration,
    "bytes": text.bytes_of,
    "iso": text.iso,
    "utc": text.utc,
    "score": text.score,
    "block": _block,
    "cut": text.cut,
    "json": text.payload,
    "preview": text.preview,
    "jobs_of": lambda state: _JOBS.get(state, f"{state} jobs"),
    "last_line": text.last_line,
    "encode_id": text.encode_id,
}
_environment.globals |= {"token_field": TOKEN, "chart_width": WIDTH, "chart_height": HEIGHT}


def url(request: Request, name: str, query: Mapping[str, Any] | None = None, /, **parts: Any) -> str:
    """The address of a page, wherever we are mounted."""
    root: str = request.scope.get("lowq_root", "")
    path = root + str(request.app.url_path_for(name, **parts))
    given = {key: value for key, value in (query or {}).items() if value not in (None, "")}
    if not given:
        return path
    return f"{path}?{urlencode(given, errors='surrogateescape')}"


def _context(request: Request, now: float, **values: Any) -> dict[str, Any]:
    visit = visit_of(request)

    def link(name: str, query: Mapping[str, Any] | None = None, /, **parts: Any) -> str:
        return url(request, name, query, **parts)

    def ago(at: float | None) -> str:
        return text.ago(at, now)

    return {
        "link": link,
        "ago": ago,
        "now": now,
        "user": visit.user,
        "may_act": visit.user.role == "admin",
        "token": visit.token,
        "page": request.scope["path"].removeprefix(request.scope.get("lowq_root", "")),
        "said": _said(request),
        "root": request.scope.get("lowq_root", ""),
        "version": lowq.__version__,
        "searched": "",
        "flush": Markup(""),
        **values,
    }


def _render(request: Request, template: str, status: int = 200, /, **values: Any) -> HTMLResponse:
    context = _context(request, site_of(request).lookout.now(), **values)
    return HTMLResponse(_encode(_environment.get_template(template).render(context)), status)


def _encode(html: str) -> bytes:
    return html.encode("utf-8", "replace")


def _stream(request: Request, template: str, /, **values: Any) -> Response:
    context = _context(request, site_of(request).lookout.now(), flush=Markup(_FLUSH), **values)

    def chunks() -> Iterator[bytes]:
        waiting: list[str] = []
        for piece in _environment.get_template(template).generate(context):
            if _FLUSH in piece:
                waiting.append(piece.replace(_FLUSH, ""))
                yield _encode("".join(waiting))
                waiting = []
            else:
                waiting.append(piece)
        yield _encode("".join(waiting))

    site = site_of(request)
    return Held(site.scans, site.threads.iterate(chunks()), "text/html")


def trouble(request: Request, status: int, reason: str) -> Response:
    """The page for what went wrong."""
    may_retry = status in (429, 500, 503) and request.method == "GET"
    context = _context(request, 0.0, status=status, reason=reason, may_retry=may_retry)
    return HTMLResponse(_encode(_environment.get_template("trouble.html").render(context)), status)


def query_of(request: Request) -> dict[str, str]:
    """The query's last value of each name; ids may be any bytes."""
    raw = request.scope["query_string"].decode("ascii", "replace")
    try:
        return dict(parse_qsl(raw, keep_blank_values=True, errors="surrogateescape", max_num_fields=100))
    except ValueError:
        raise lowq.ConfigError("the address has too many fields") from None


def _form_of(request: Request) -> list[tuple[str, str]]:
    body = visit_of(request).body.decode("ascii", "replace")
    try:
        return parse_qsl(body, keep_blank_values=True, errors="surrogateescape", max_num_fields=5000)
    except ValueError:
        raise lowq.ConfigError("the form has too many fields") from None


def _said(request: Request) -> Notice | None:
    """What was just done: told once."""
    if request.method != "GET":
        return None
    try:
        return site_of(request).notices.take(query_of(request).get("said", ""))
    except lowq.ConfigError:  # this page says just that
        return None


def _back(
    request: Request,
    name: str,
    query: Mapping[str, Any] | None = None,
    /,
    *,
    done: str | None = None,
    slip: str | None = None,
    **parts: Any,
) -> RedirectResponse:
    """To a page, which says what was done, or why nothing was."""
    if done or slip:
        notice = Notice(slip or done or "", slip=slip is not None)
        query = {**(query or {}), "said": site_of(request).notices.leave(notice)}
    return RedirectResponse(url(request, name, query, **parts), 303)


def _jobs(count: int) -> str:
    return "1 job" if count == 1 else f"{count:,} jobs"


# --- all queues ----------------------------------------------------------------------------------------------

_SORTS = {
    "name": lambda stats: stats.name,
    "lag": lambda stats: stats.lag,
    "due": lambda stats: stats.due,
    "length": lambda stats: stats.length,
    "fresh": lambda stats: stats.fresh,
    "retries": lambda stats: stats.retries,
    "taken": lambda stats: stats.taken,
    "morgue": lambda stats: stats.morgue_length,
    "processed": lambda stats: stats.processed,
    "failed": lambda stats: stats.failed,
}


def dashboard(request: Request) -> Response:
    """All queues."""
    site, query = site_of(request), query_of(request)
    figures = site.lookout.figures()
    span = _span(query)
    sort = query.get("sort", "")
    sort = sort if sort in _SORTS else "name"
    down = query.get("dir") == "desc"
    queues = sorted(figures.queues, key=lambda item: _SORTS[sort](item.stats), reverse=down)
    history = site.lookout.history("", span)
    return _render(
        request,
        "dashboard.html",
        figures=figures,
        queues=queues[:MAX_QUEUES],
        left_out=max(len(queues) - MAX_QUEUES, 0),
        sort=sort,
        down=down,
        spans=_spans(request, "dashboard", span, query),
        span=span,
        rates=chart(history.rates, ["processed", "failed"]),
        lags=chart(history.rates, ["lag"], seconds=True),
        heats=heat_maps(queues),
        hottest=_hottest(figures.queues),
        warnings=_unworked(figures.queues),
        redis=site.app.redis_info(),
        nodes=site_of(request).app.nodes(),
    )


@dataclass(frozen=True, slots=True)
class Unworked:
    """A queue some of whose jobs nobody works."""

    queue: str
    #: Shards without an owner in which jobs wait, and of how many.
    shards: int
    of: int
    #: Jobs that wait in them, or were in flight.
    jobs: int
    lag: float

    @property
    def wholly(self) -> bool:
        """No node works it at all."""
        return self.shards == self.of


def _unworked(queues: Iterable[lowq.QueueOverview]) -> list[Unworked]:
    """The queues with jobs that nobody works: those without any node, then those of which shards have no owner for
    longer than a deploy takes.
    """
    found = []
    for item in queues:
        lost = [shard for shard in item.shards if shard.owner is None]
        jobs = sum(shard.length + shard.taken for shard in lost)
        lag = max((shard.lag for shard in lost), default=0.0)
        if len(lost) == len(item.shards):
            lost_ones = len(lost)
        else:
            lost_ones = sum(shard.lag > OWNERLESS_LAG for shard in lost)
        if jobs and lost_ones:
            found.append(Unworked(item.stats.name, lost_ones, len(item.shards), jobs, lag))
    return sorted(found, key=lambda item: (not item.wholly, item.queue))


def _hottest(queues: tuple[lowq.QueueOverview, ...]) -> list[tuple[str, lowq.ShardInfo]]:
    found = [(item.stats.name, shard) for item in queues for shard in item.shards if shard.lag > 1]
    return sorted(found, key=lambda item: item[1].lag, reverse=True)[:3]


def _span(query: Mapping[str, str]) -> lowq.Span:
    span = query.get("span", "hour")
    return span if span in ("hour", "day", "month") else "hour"  # type: ignore[return-value]  # just checked


def _spans(
    request: Request, name: str, current: lowq.Span, query: Mapping[str, str], **parts: Any
) -> list[tuple[str, str, bool]]:
    kept = {key: value for key, value in query.items() if key in ("sort", "dir")}
    words = {"hour": "Hour", "day": "Day", "month": "30 days"}
    return [
        (word, url(request, name, {**kept, "span": span}, **parts), span == current) for span, word in words.items()
    ]


def search(request: Request) -> Response:
    """An id, in whatever queue it is."""
    site, typed = site_of(request), query_of(request).get("id", "")
    if not typed.strip():
        return _back(request, "dashboard")
    names = [info.name for info in site.app.queues()]
    # Blanks around it came with copying, most likely; but ids may have some.
    job_id, found = typed, []
    for job_id in dict.fromkeys((typed, typed.strip())):
        for name in names:
            places = site.app.queue(name).places(job_id)
            if places:
                found.append((name, [item.state for item in places]))
        if found:
            break
    if len(found) == 1:
        return _back(request, "job", {"id": job_id}, queue=found[0][0])
    pattern = _like(job_id)
    return _render(
        request,
        "search.html",
        200,
        found=found,
        places=[] if found or pattern is None else _places(site.lookout.figures().queues),
        pattern=pattern,
        job_id=job_id,
        searched=job_id,
    )


def _like(typed: str) -> str | None:
    """The pattern of ids with this in them, or this if it is a pattern already; None: it is too long for one."""
    if "*" in typed:
        pattern = typed
    else:
        pattern = "*" + re.sub(r"([?\[\]\\])", r"\\\1", typed) + "*"
    return pattern if len(pattern) <= MAX_PATTERN else None


def _places(queues: Iterable[lowq.QueueOverview]) -> list[tuple[str, list[tuple[str, str, int]]]]:
    """Where jobs are: queue, then state, its words and how many. The first queues only."""
    found = []
    for stats in (item.stats for item in queues):
        counts = (("", "waiting", stats.length), ("taken", "in flight", stats.taken),
                  ("morgue", "in the morgue", stats.morgue_length))  # fmt: skip
        places = [place for place in counts if place[2]]
        if places:
            found.append((stats.name, places))
    return found[:50]


def nodes(request: Request) -> Response:
    """The nodes that live."""
    return _render(request, "nodes.html", nodes=site_of(request).app.nodes())


def audit(request: Request) -> Response:
    """What people did."""
    return _render(
        request,
        "audit.html",
        entries=site_of(request).app.audit(200),
        verbs=_VERBS,
    )


def tasks(request: Request) -> Response:
    """What runs in the background."""
    return _render(request, "tasks.html", tasks=site_of(request).tasks.all(), verbs=_VERBS)


def task(request: Request) -> Response:
    """How far something is that runs in the background."""
    found = site_of(request).tasks.get(request.path_params["task"])
    if found is None:
        return trouble(request, 404, "There is no such task: this process has not started it, or forgotten it.")
    return _render(request, "task.html", task=found, verbs=_VERBS, done=_DONE)


# --- one queue -----------------------------------------------------------------------------------------------


def queue(request: Request) -> Response:
    """Its jobs: by state, sorted, filtered, page by page."""
    site, handle = site_of(request), queue_of(request)
    query = query_of(request)
    now = site.lookout.now()
    slip, status = None, 200
    try:
        asked = asked_of(query, now)
        pages = asked.pages(handle)
    except lowq.ConfigError as error:
        # Said where it was typed, with what was typed.
        asked, pages, slip, status = _as_typed(query), iter(()), _in_words(str(error)), 400
    stats = site.lookout.stats(handle)
    span = _span(query)
    history = site.lookout.history(handle.name, span)
    counts = tab_counts(handle, stats)
    values: dict[str, Any] = {
        "queue": handle.name,
        "stats": stats,
        "counts": counts,
        "asked": asked,
        "slip": slip,
        "verbs": _verbs(asked),
        "elsewhere": _elsewhere(asked, counts),
        "span": span,
        "spans": _spans(request, "queue", span, query, queue=handle.name),
        "rates": chart(history.rates, ["processed", "failed"]),
        "lags": chart(history.rates, ["lag"], seconds=True),
        "masked": site.redact,
        "words": _VERBS,
    }
    if asked.scans and slip is None:
        return _stream(request, "queue.html", pages=_told(pages), **values)
    return _render(request, "queue.html", status, pages=list(pages), **values)


def _as_typed(query: Mapping[str, str]) -> Asked:
    """A query that makes no sense, for the form to be filled with."""
    given = {name: query[name] for name in ("match", "reverse", "min", "max") if query.get(name)}
    state = next((state for state in STATES if state == query.get("state")), None)
    order_by = next((order for order in ORDERS if order == query.get("order_by")), None)
    given |= {name: value for name, value in (("state", state), ("order_by", order_by)) if value}
    return Asked(state, given.get("match"), order_by, "reverse" in given, None, None, None, LIMIT, given)


#: What the fields of the filter are called on the page.
_LABELS = {"min": "From", "max": "To", "match": "Id like", "order_by": "Order", "state": "State"}


def _in_words(reason: str) -> str:
    """A complaint about a field, by the name that the field has on the page."""
    parts = re.fullmatch(r"(\w+)=(.+?): it is (.+)", reason, re.DOTALL)
    if parts is None or parts[1] not in _LABELS:
        return reason
    return f"{_LABELS[parts[1]]} can't be {parts[2]}: it is {parts[3]}"


def _elsewhere(asked: Asked, counts: Mapping[str, Any]) -> list[tuple[str, str, Any]]:
    """Where else ids of the same pattern may be: state, words, how many are there at all."""
    if not asked.match:
        return []
    here = "" if asked.state is None else asked.state
    places = [("", "waiting"), ("taken", "in flight"), ("morgue", "in the morgue")]
    return [(state, word, counts[state]) for state, word in places if state != here and counts[state].number]


def _told(pages: Iterable[lowq.Page | None]) -> Iterator[lowq.Page | str | None]:
    """The pages, and at last what went wrong: the answer has begun already."""
    try:
        yield from pages
    except lowq.LowqError as error:
        yield str(error)


def _verbs(asked: Asked) -> list[ActionName]:
    if asked.state == "taken":
        return []
    if asked.state == "morgue":
        return ["kick", "delete"]
    return ["perform_now", "bury", "delete"] if asked.state != "due" else ["bury", "delete"]


def job(request: Request) -> Response:
    """Everything that is known of an id."""
    site, handle = site_of(request), queue_of(request)
    job_id = query_of(request).get("id", "")
    found = entity(handle, job_id, site.lookout.now())
    return _render(
        request,
        "job.html",
        200 if found.jobs else 404,
        queue=handle.name,
        entity=found,
        masked=site.redact,
        max_shown=MAX_SHOWN,
        max_payloads=MAX_PAYLOADS,
        verbs=_VERBS,
        pattern=_like(job_id),
        hangs=_hangs(request, found.why),
        searched=job_id,
    )


def _hangs(request: Request, why: lowq.Why) -> lowq.NodeInfo | None:
    """The node that performs it."""
    if why.reason != "performing" or why.node is None:
        return None
    return next((node for node in site_of(request).app.nodes() if node.name == why.node and node.pid), None)


def payload(request: Request) -> Response:
    """One payload, whole, as plain text."""
    site, handle, query = site_of(request), queue_of(request), query_of(request)
    state, number = query.get("state", ""), query.get("n", "")
    for item in handle.places(query.get("id", "")):
        if item.state == state and number.isdecimal() and int(number[:6]) < len(item.payloads):
            shown = text.payload(site.redact(item.payloads[int(number[:6])][0]), indent=2)
            return Response(_encode(text.printable(shown, "\n")), media_type="text/plain; charset=utf-8")
    return trouble(request, 404, "There is no such payload any more.")


def shards(request: Request) -> Response:
    """Who holds which, and what waits there."""
    site, handle, query = site_of(request), queue_of(request), query_of(request)
    found = site.lookout.shards(handle)
    keys = {"shard": lambda item: item.index, "length": lambda item: item.length, "lag": lambda item: item.lag}
    sort = query.get("sort", "shard")
    sort = sort if sort in keys else "shard"
    down = query.get("dir") == "desc"
    begin = min(int(query["from"][:6]), len(found)) if query.get("from", "").isdecimal() else 0
    return _render(
        request,
        "shards.html",
        queue=handle.name,
        shards=sorted(found, key=keys[sort], reverse=down)[begin : begin + MAX_SHARDS],
        begin=begin,
        end=begin + MAX_SHARDS,
        count=len(found),
        heat_map=heat_map(handle.name, found),
        sort=sort,
        down=down,
    )


# --- actions -------------------------------------------------------------------------------------------------


def act(request: Request) -> Response:
    """Something done to one id, to those selected, or to all that match: at once, or after a page that asks."""
    site, handle, who = site_of(request), queue_of(request), visit_of(request).user.name
    fields = _form_of(request)
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
            return _back(request, "queue", back, slip=_in_words(str(error)), queue=handle.name)
        if not sure:
            # "-2h" would mean another moment when the answer comes.
            back |= {
                name: repr(bound) for name, bound in zip(("min", "max"), asked.bulk_bounds(), strict=True) if bound
            }
            with site.scans:
                total = handle.count(action, wanted.state, wanted.match, wanted.min, wanted.max)
            return _confirm(request, handle.name, action, what, total, [], back, asked)
        started = site.actions.on_all(who, handle.name, action, wanted, reason)
        return _back(request, "task", task=started.id)
    if not ids:
        slip = f"Nothing was done: no job is ticked. Tick those to {_VERBS[action]}."
        return _back(request, "queue", back, slip=slip, queue=handle.name)
    if action in DESTRUCTIVE and not sure:
        return _confirm(request, handle.name, action, what, len(ids), ids, back, None)
    acted = site.actions.on_ids(who, handle.name, action, ids, reason)
    done = f"{_jobs(acted.done)} {_DONE[action]}"
    if acted.in_flight:
        done += f"; {acted.in_flight:,} in flight, left alone"
    if acted.missing:
        done += f"; {acted.missing:,} no longer there"
    if what == "":
        return _back(request, "job", {"id": ids[0]}, done=f"{done}.", queue=handle.name)
    return _back(request, "queue", back, done=f"{done}.", queue=handle.name)


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
    return _render(
        request,
        "confirm.html",
        queue=name,
        action=action,
        verb=_VERBS[action],
        what=what,
        total=total,
        ids=ids,
        back=back,
        asked=asked,
        destructive=action in DESTRUCTIVE,
    )


def pause(request: Request) -> Response:
    """No more jobs are taken."""
    handle = queue_of(request)
    site_of(request).actions.pause(visit_of(request).user.name, handle.name)
    return _back(request, "queue", done="Paused.", queue=handle.name)


def resume(request: Request) -> Response:
    """Jobs are taken again."""
    handle = queue_of(request)
    site_of(request).actions.resume(visit_of(request).user.name, handle.name)
    return _back(request, *_asked_from(request), done="Resumed.", queue=handle.name)


def _asked_from(request: Request) -> tuple[str, dict[str, str]]:
    """The page of an id, if the form says that it stood there; otherwise that of the queue."""
    job_id = dict(_form_of(request)).get("id")
    return ("queue", {}) if job_id is None else ("job", {"id": text.decode_id(job_id)})


def tell(request: Request) -> Response:
    """A node is told to go quiet or to stop, after a page that asks: neither can be undone from here."""
    site, form = site_of(request), dict(_form_of(request))
    name, what = form.get("node", ""), form.get("do", "")
    living = site_of(request).app.nodes()
    node = next((node for node in living if node.name == name), None)
    if node is not None and what in _TOLD and form.get("sure") != "1":
        others = [other for other in living if other is not node and not other.quiet]
        return _render(request, "tell.html", node=node, what=what, last=not others, alone=_alone(node, others))
    site.actions.tell(visit_of(request).user.name, name, what)
    return _back(request, "nodes", done=f"{name} was {_TOLD[what]}.")


def _alone(node: lowq.NodeInfo, others: Sequence[lowq.NodeInfo]) -> list[str]:
    """The queues that no other node works."""
    return [queue for queue in node.queues if not any(queue in other.queues for other in others)]


def cancel(request: Request) -> Response:
    """A task stops after its current step."""
    site = site_of(request)
    found = site.tasks.get(request.path_params["task"])
    if found is None:
        return trouble(request, 404, "There is no such task: this process has not started it, or forgotten it.")
    site.actions.cancel(visit_of(request).user.name, found)
    return _back(request, "task", task=found.id)
