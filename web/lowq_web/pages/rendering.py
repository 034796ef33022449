"""How a page is made: templates with their filters, addresses of other pages, and notices.

What a template shows is escaped, after control characters and the like have been made visible.
"""

import math
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

import lowq
from lowq.retry import attempt_number
from lowq.schedules import is_internal
from lowq_web import text
from lowq_web.chart import HEIGHT, WIDTH, HeatMap
from lowq_web.context import context_of, query_of
from lowq_web.notices import Notice
from lowq_web.security import TOKEN, visit_of
from lowq_web.static_files import files
from lowq_web.threads import LimitedStream
from lowq_web.words import ACTION_HINTS, TERMS, do, jobs_of, state_word

#: Marks the place in a template where what is rendered so far is to be sent.
_FLUSH = "\x00flush\x00"
#: Shards of a page.
SHARDS_PER_PAGE = 200
#: Where a word of a name ends: order_sync, Order-Sync, OrderSync.
_WORDS = re.compile(r"(?<=[-_.:/@])(?=\w)|(?<=[a-z0-9])(?=[A-Z])")


def _finalize(value: Any) -> Any:
    """Makes control characters, direction marks and broken encodings visible as escapes, in everything that a template
    shows. Then it is escaped for HTML.
    """
    if isinstance(value, Markup):
        return value
    return text.printable(value) if isinstance(value, str) else value


def _block(value: str) -> Markup:
    """A text with its line breaks."""
    return escape(text.printable(value, "\n"))


def _breakable(name: str) -> Markup:
    """A name that may be wrapped between its words, not within one."""
    return Markup("<wbr>").join(text.printable(part) for part in _WORDS.split(name))


_environment = Environment(
    loader=PackageLoader("lowq_web"),
    autoescape=True,
    finalize=_finalize,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
for _filter in (
    attempt_number, text.short, text.exact, text.rate, text.duration, text.iso, text.utc, text.score, text.cut,
    text.preview, jobs_of, state_word, text.last_line, text.encode_id, is_internal,
):  # fmt: skip
    _environment.filters[_filter.__name__] = _filter
_environment.filters |= {
    "bytes": text.bytes_of,
    "block": _block,
    "breakable": _breakable,
    "shell": shlex.quote,
    "json": text.payload,
}
_environment.globals |= {
    "token_field": TOKEN,
    "chart_width": WIDTH,
    "chart_height": HEIGHT,
    "terms": TERMS,
    "infinite": math.inf,
    "do": do,
    "action_hints": ACTION_HINTS,
}


def url(request: Request, name: str, query: Mapping[str, Any] | None = None, /, **parts: Any) -> str:
    """The address of a page, wherever we are mounted; or of a static file, by its ``path``, in its present version."""
    if name == "static":
        file = parts.pop("path").lstrip("/")
        parts, query = {"name": file}, {"v": files()[file].version}
    root: str = request.scope.get("lowq_root", "")
    path: str = root + request.app.state.routes[name].url_path_for(name, **parts)
    given = {key: value for key, value in (query or {}).items() if value not in (None, "")}
    if not given:
        return path
    return f"{path}?{urlencode(given, errors='surrogateescape')}"


def _context(request: Request, now: float, **values: Any) -> dict[str, Any]:
    visit = visit_of(request)

    def link(name: str, query: Mapping[str, Any] | None = None, /, **parts: Any) -> str:
        return url(request, name, query, **parts)

    def shard_link(queue: str, index: int) -> str:
        """The page of shards that has this one, and its row there."""
        before = index // SHARDS_PER_PAGE * SHARDS_PER_PAGE
        seen = {"seen": f"{(1 << before) - 1:x}"} if before else {}
        return f"{url(request, 'shards', seen, queue=queue)}#shard-{index}"

    def ago(at: float | None) -> str:
        return text.ago(at, now)

    return {
        "link": link,
        "ago": ago,
        "shard_link": shard_link,
        "now": now,
        "posted": request.method == "POST",
        "user": visit.user,
        "may_act": visit.user.role == "admin",
        "token": visit.token,
        "page": request.scope["path"].removeprefix(request.scope.get("lowq_root", "")),
        "said": None,
        "root": request.scope.get("lowq_root", ""),
        "version": lowq.__version__,
        "searched": "",
        "flush": Markup(""),
        **values,
    }


def render(request: Request, template: str, status: int = 200, /, **values: Any) -> HTMLResponse:
    """A page: a template filled with these values, and with what is on every page."""
    context = _context(request, context_of(request).stats_cache.now(), said=_said(request), **values)
    return HTMLResponse(encode(_environment.get_template(template).render(context)), status)


def draw_heat(shown: HeatMap) -> str:
    """The picture of a heat map."""
    drawn: str = _environment.get_template("_macros.html").module.heat(shown)  # type: ignore[attr-defined]  # a macro
    return drawn


def encode(html: str) -> bytes:
    """As it is sent."""
    return html.encode("utf-8", "replace")


def stream(request: Request, template: str, /, **values: Any) -> Response:
    """The same, sent in pieces as it is made: up to wherever the template says `flush`. It counts as a scan."""
    context = _context(
        request, context_of(request).stats_cache.now(), flush=Markup(_FLUSH), said=_said(request), **values
    )

    def chunks() -> Iterator[bytes]:
        waiting: list[str] = []
        for piece in _environment.get_template(template).generate(context):
            if _FLUSH in piece:
                waiting.append(piece.replace(_FLUSH, ""))
                yield encode("".join(waiting))
                waiting = []
            else:
                waiting.append(piece)
        yield encode("".join(waiting))

    shared = context_of(request)
    return LimitedStream(shared.scans, shared.threads.iterate(chunks()), "text/html")


def trouble(request: Request, status: int, reason: str) -> Response:
    """The page for what went wrong. It asks Redis nothing, which may be what is wrong."""
    may_retry = status in (429, 500, 503) and request.method == "GET"
    context = _context(request, 0.0, status=status, reason=reason, may_retry=may_retry)
    return HTMLResponse(encode(_environment.get_template("trouble.html").render(context)), status)


def _said(request: Request) -> Notice | None:
    """The notice about what was just done, shown once. Redis is asked for it only where an address names one."""
    if request.method != "GET":
        return None
    try:
        return context_of(request).notices.take(query_of(request).get("said", ""))
    except lowq.ConfigError:  # this page says just that
        return None


def redirect(
    request: Request,
    name: str,
    query: Mapping[str, Any] | None = None,
    /,
    *,
    done: str | None = None,
    form_error: str | None = None,
    **parts: Any,
) -> RedirectResponse:
    """To a page, which says what was done, or why nothing was."""
    if done or form_error:
        notice = Notice(form_error or done or "", form_error=form_error is not None)
        query = {**(query or {}), "said": context_of(request).notices.leave(notice)}
    return RedirectResponse(url(request, name, query, **parts), 303)
