"""Access control: everything between a request and the pages.

::

    request -> /healthz? ---------------------------------------------------------------> answered
            -> without authentication: to names of this machine, and those that are listed -> or 403, saying why
            -> authentication                                                             -> or 401
            -> not GET: the role is admin                                                 -> or 403
            -> GET: no page elsewhere has it fetched behind somebody's back               -> or 403
            -> not GET: sent by one of our own pages, or by no browser                    -> or 403
            -> the routes

Every answer gets the headers that keep browsers from running, framing or storing what must not be.
"""

import hmac
import inspect
import ipaddress
import logging
import re
import secrets
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

import lowq
from lowq_web.auth import Authenticate, Network, User, UserHeader
from lowq_web.hosts import NO_PASSWORD, host_of, host_refusal
from lowq_web.journal import Actor
from lowq_web.threads import Threads

log = logging.getLogger(__name__)

#: Bytes of a form or a JSON document that is sent to us: a page of ids as long as ids may be, escaped.
MAX_BODY = 4 * 2**20
#: Characters of the address of a client: a trusted proxy passes on what it likes.
MAX_ADDRESS = 100
#: The cookie and the form field of the token, for browsers that say nothing of where a request comes from.
TOKEN = "lowq_token"

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-frame-options": "DENY",
    "x-content-type-options": "nosniff",
    # Not "no-referrer": forms would then be sent with "Origin: null".
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
#: Our token in the header Cookie, as `secrets.token_urlsafe` makes it: no other cookie is parsed.
_COOKIE = re.compile(rf"(?:^|;)\s*{TOKEN}=([A-Za-z0-9_-]{{32}})\s*(?:;|$)")


@dataclass(frozen=True, slots=True)
class Visit:
    """The user, token and body of a request, as the guard has checked them."""

    user: User
    #: Where the request comes from: behind trusted proxies the client's address; empty when that is not known.
    address: str
    #: For forms.
    token: str
    body: bytes

    @property
    def actor(self) -> Actor:
        """For the audit log."""
        return Actor(self.user.name, self.address or None)


def visit_of(request: Request) -> Visit:
    """The visit of a request that has passed the guard."""
    visit: Visit = request.scope["lowq_web"]
    return visit


# --- does it come from our own pages? ------------------------------------------------------------------------


_DEFAULT_PORTS = {"http": ":80", "https": ":443"}


def checked_origins(origins: Iterable[str]) -> frozenset[str]:
    """As browsers write them.

    Raises:
        ConfigError: one is none.
    """
    found = set()
    for given in origins:
        origin = re.fullmatch(r"(https?)://([\w.-]+|\[[0-9a-f:.]+\])(:\d+)?/?", given.lower(), re.ASCII)
        if origin is None:
            raise lowq.ConfigError(f"LOWQ_WEB_ORIGINS, origins: {given!r} is no origin such as https://ops.example.com")
        scheme, host, port = origin.groups()
        found.add(f"{scheme}://{host}{port if port and port != _DEFAULT_PORTS[scheme] else ''}")
    return frozenset(found)


def cross_site(headers: Headers, scheme: str, origins: Collection[str] = ()) -> bool | None:
    """Whether a page of somebody else has sent this; None: the headers don't say. ``scheme``: ours, http or https;
    ``origins``: our own besides the one that the request names, as `checked_origins` has them.
    """
    sites = headers.getlist("sec-fetch-site")
    if sites:
        return any(site not in ("same-origin", "none") for site in sites)
    origin = headers.get("origin")
    if origin is not None:
        host = headers.get("host", "").lower()
        own = {f"{scheme}://{host}", f"https://{host}"} if host else set()
        return origin.lower() not in own | set(origins)
    return None


def _refuse_cross_site(headers: Headers) -> str:
    """The reason for a refusal by `cross_site`. The browser may be right, and a proxy have changed a header."""
    said = "This was sent by a page of another site."
    origin, host = headers.get("origin", ""), headers.get("host", "")
    if headers.get("sec-fetch-site") or not host_of(origin):
        return said
    return (
        f"{said} It comes from {origin[:100]}, and what was asked for is {host[:100] or 'nothing by name'}. If this is "
        "the dashboard's own page, a proxy between has changed the header Host: let it pass that on (nginx: "
        "proxy_set_header Host $http_host;), or start the dashboard with LOWQ_WEB_ORIGINS set to the address that "
        f"browsers have it from: LOWQ_WEB_ORIGINS={origin[:100]}"
    )


def _has_token(headers: Headers, body: bytes | bytearray) -> bool:
    """Whether a form brings the token that its page was given: pages elsewhere can't read our cookie."""
    if is_json(headers):
        return True  # no page elsewhere may send this without asking first, and we allow nobody to ask
    expected = _cookie(headers)
    given = re.search(rb"(?:^|&)" + TOKEN.encode() + rb"=([A-Za-z0-9_-]{32})(?:&|$)", body)
    return bool(expected) and given is not None and hmac.compare_digest(expected.encode(), given[1])


def is_json(headers: Headers) -> bool:
    """Whether the Content-Type is JSON."""
    return headers.get("content-type", "").partition(";")[0].strip().lower() == "application/json"


def _cookie(headers: Headers) -> str:
    found = _COOKIE.search(headers.get("cookie", ""))
    return found[1] if found else ""


# --- errors ---


def shown_error(request: Request, error: Exception) -> str:
    """The text of an error for the viewer. Who may only look is not told where Redis is; the log is."""
    visit: Visit | None = request.scope.get("lowq_web")
    if not isinstance(error, (lowq.RedisUnavailable, lowq.RedisRefused)) or (visit and visit.user.role == "admin"):
        return str(error)
    log.warning("%s: %s", request.scope["path"], error)
    said = "Redis does not answer" if isinstance(error, lowq.RedisUnavailable) else "Redis refuses"
    return f"{said}; the log of the dashboard says more"


# --- the guard -----------------------------------------------------------------------------------------------


class Guard:
    """The middleware around all routes. ``auth`` None: there is no authentication."""

    def __init__(
        self,
        app: ASGIApp,
        auth: Authenticate | None,
        threads: Threads,
        *,
        open_to_all: bool,
        hosts: Collection[str] = (),
        origins: Collection[str] = (),
        proxies: Collection[Network] = (),
    ) -> None:
        self._app = app
        trusted = [str(network) for network in proxies]
        # The same in headers that carry IPv4 addresses as IPv6.
        trusted += [f"::ffff:{net.network_address}/{96 + net.prefixlen}" for net in proxies if net.version == 4]
        # Replaces the client and the scheme of a request by those that a trusted proxy names.
        self._proxied: Any = ProxyHeadersMiddleware(self._answer, trusted)  # type: ignore[arg-type]  # types of its own
        self._hosts, self._origins = hosts, origins
        self._auth = auth
        self._threads = threads
        self._open = open_to_all

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        # Of our own: a host application around us goes on with its scope.
        client = scope.get("client")
        scope = {**scope, "client": _plain_client(client, client), "lowq_root": scope.get("root_path", "")}
        scope["lowq_peer"] = scope["client"][0] if scope["client"] else ""
        await self._proxied(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        # A proxy passes on what it likes.
        scope["client"] = _plain_client(scope["client"], (scope["lowq_peer"], 0))
        token = _cookie(Headers(scope=scope))
        new_token = "" if token else secrets.token_urlsafe(24)
        guarded = _Guarded(scope, send, new_token)
        try:
            await self._guard(scope, receive, guarded, token or new_token)
        except ClientDisconnect:
            pass  # the client has gone before the request was complete: nobody is there to be answered
        except Exception:
            # The client learns nothing of it: it may have caused it on purpose.
            log.exception("%s %.200r failed", scope["method"], scope["path"])
            if not guarded.begun:
                answer = refusal(Request(scope), 500, "The request failed. The log of the dashboard says why.")
                await answer(scope, receive, guarded)

    async def _guard(self, scope: Scope, receive: Receive, send: Send, token: str) -> None:
        request = Request(scope, receive)
        if path_of(scope) == "/healthz":
            await self._app(scope, receive, send)
            return
        user = await self._who(request)
        if isinstance(user, Response):
            await user(scope, receive, send)
            return
        body = b""
        if scope["method"] in ("GET", "HEAD"):
            refused = self._may_look(request)
        else:
            refused, body = await self._may_act(request, user)
        if refused is not None:
            await refused(scope, receive, send)
            return
        address = scope["client"][0][:MAX_ADDRESS] if scope["client"] else ""
        scope["lowq_web"] = Visit(user, address, token, body)
        await self._app(scope, receive, send)

    async def _who(self, request: Request) -> User | Response:
        if self._auth is None:
            reason = host_refusal(request.scope, self._hosts, open_to_all=self._open)
            if reason is not None:
                return refusal(request, 403, NO_PASSWORD.format(reason))
            return User("anonymous", "admin")
        try:
            # One that is not async may take long: it looks up a session in a database.
            answer: Any = self._auth(request) if _is_async(self._auth) else await self._threads.run(self._auth, request)
            user = await answer if inspect.isawaitable(answer) else answer
        except HTTPException as error:
            response = refusal(request, error.status_code, error.detail)
            response.headers.update(error.headers or {})
            return response
        if isinstance(user, Response) or (isinstance(user, User) and user.role in ("read", "admin")):
            return user
        by_proxy = isinstance(self._auth, UserHeader)
        reason = "The proxy has named no user." if by_proxy else "This needs a user and a password."
        response = refusal(request, 401, reason)
        challenge = getattr(self._auth, "challenge", None)
        if challenge:
            response.headers["www-authenticate"] = challenge
        return response

    def _may_look(self, request: Request) -> Response | None:
        """None, or the refusal. Other sites may link to pages here, but neither fetch nor frame
        them: a page may look at all jobs.
        """
        elsewhere = set(request.headers.getlist("sec-fetch-site")) - {"same-origin", "same-site", "none"}
        how = [request.headers.get(f"sec-fetch-{name}") for name in ("mode", "dest")]
        if elsewhere and how != ["navigate", "document"]:
            return refusal(request, 403, "This was asked for by a page of another site.")
        return None

    async def _may_act(self, request: Request, user: User) -> tuple[Response | None, bytes]:
        """None and the body, or the refusal."""
        if user.role != "admin":
            return refusal(request, 403, f"{user.name} may look, not act: the role is {user.role!r}."), b""
        other = cross_site(request.headers, request.scope.get("scheme", "http"), self._origins)
        if other:
            return refusal(request, 403, _refuse_cross_site(request.headers)), b""
        if request.method != "POST":
            return None, b""  # no route takes anything else: it says so
        too_large = refusal(request, 413, f"What was sent is larger than {MAX_BODY} bytes.")
        length = request.headers.get("content-length", "")
        if length.isdecimal() and (len(length) > 12 or int(length) > MAX_BODY):
            return too_large, b""
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_BODY:
                return too_large, b""
        if other is None and not _has_token(request.headers, body):
            if path_of(request.scope).startswith("/api/"):
                return refusal(request, 403, "Send this with the header Content-Type: application/json."), b""
            return refusal(request, 403, "The form lacks its token: go back, load the page anew and try again."), b""
        return None, bytes(body)


def _plain_client(client: Any, otherwise: Any) -> Any:
    """The address and port of a client, ``otherwise`` where that is no address. An IPv4 address that IPv6 carries is
    returned as IPv4.
    """
    try:
        mapped = getattr(ipaddress.ip_address(client[0]), "ipv4_mapped", None) if client else None
    except ValueError:
        return otherwise
    return client if mapped is None else (str(mapped), client[1])


def _is_async(function: Any) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def path_of(scope: Scope) -> str:
    """The path below the place where the dashboard is mounted."""
    path: str = scope["path"]
    # `root_path` grows while inner routers handle a request; `lowq_root` is that of the dashboard.
    return path.removeprefix(scope.get("lowq_root", scope.get("root_path", "")))


def is_for_programs(request: Request) -> bool:
    """Whether the client expects JSON, not a page."""
    return path_of(request.scope).startswith(("/api/", "/healthz", "/metrics", "/live"))


def refusal(request: Request, status: int, reason: str) -> Response:
    """An answer with the reason of a refusal: JSON for programs, text for people."""
    if is_for_programs(request):
        return JSONResponse({"error": reason}, status)
    return PlainTextResponse(reason + "\n", status)


class _Guarded:
    """Sends an answer with the headers that every answer has."""

    def __init__(self, scope: Scope, send: Send, new_token: str) -> None:
        self._scope = scope
        self._send = send
        self._new_token = new_token
        #: Its status was sent.
        self.begun = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.begun = True
            self._add_headers(MutableHeaders(scope=message))
        await self._send(message)

    def _add_headers(self, headers: MutableHeaders) -> None:
        scope = self._scope
        for name, value in _HEADERS.items():
            headers[name] = value
        headers.setdefault("cache-control", "no-store")
        if self._new_token and headers.get("content-type", "").startswith("text/html"):
            path = scope.get("lowq_root", "") or "/"
            secure = "; Secure" if scope.get("scheme") == "https" else ""
            headers.append("set-cookie", f"{TOKEN}={self._new_token}; Path={path}; HttpOnly; SameSite=Strict{secure}")
