"""Who may do what: everything that stands between a request and the pages.

::

    request -> /healthz? ---------------------------------------------------------------> answered
            -> without authentication: only from this machine, to this machine's own name -> or 403, saying why
            -> authentication                                                             -> or 401
            -> not GET: the role is admin                                                 -> or 403
            -> not GET: sent by one of our own pages, or by no browser                    -> or 403
            -> the routes

Every answer gets the headers that keep browsers from running, framing or storing what is not ours.
"""

import base64
import hashlib
import hmac
import inspect
import ipaddress
import os
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from typing import Any, Literal
from urllib.parse import parse_qs, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import lowq

Role = Literal["read", "admin"]

#: Bytes of a form or a JSON document that is sent to us: a page of ids as long as ids may be, escaped.
MAX_BODY = 4 * 2**20
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
#: What proxies add to a request.
_FORWARDED = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-real-ip", "via")


@dataclass(frozen=True, slots=True)
class User:
    """Who asks. The role "read" may look, "admin" may act, too."""

    name: str
    role: Role = "admin"


#: Tells who asks; None: nobody who may see anything. May be async.
Authenticate = Callable[[Request], User | Awaitable[User | None] | None]


@dataclass(frozen=True, slots=True)
class Visit:
    """What the guard found out about a request."""

    user: User
    #: For forms.
    token: str
    body: bytes


def visit_of(request: Request) -> Visit:
    """What the guard found out about this request."""
    visit: Visit = request.scope["lowq_web"]
    return visit


# --- who asks ------------------------------------------------------------------------------------------------


class BasicAuth:
    """User and password, as browsers ask for them. ``users``: name -> (password, role).

    Raises:
        ConfigError: an empty name or password, or an unknown role.
    """

    #: How a client is asked for what it lacks.
    challenge = 'Basic realm="lowq", charset="UTF-8"'

    def __init__(self, users: Mapping[str, tuple[str, Role]]) -> None:
        if not users:
            raise lowq.ConfigError("BasicAuth needs at least one user")
        self._users: list[tuple[bytes, bytes, User]] = []
        for name, (password, role) in users.items():
            if not name or ":" in name or not password:
                raise lowq.ConfigError(
                    f"user {name!r}: neither name nor password may be empty, nor a name have a colon"
                )
            if role not in ("read", "admin"):
                raise lowq.ConfigError(f"user {name!r}: role={role!r} is neither 'read' nor 'admin'")
            self._users.append((_digest(name), _digest(password), User(name, role)))

    def __call__(self, request: Request) -> User | None:
        scheme, _, encoded = request.headers.get("authorization", "").partition(" ")
        try:
            decoded = base64.b64decode(encoded.strip(), validate=True).decode()
        except ValueError:
            return None
        name, colon, password = decoded.partition(":")
        if scheme.lower() != "basic" or not colon:
            return None
        found = None
        # All of them, and digests of equal length: how long it takes tells nothing.
        for known_name, known_password, user in self._users:
            right = hmac.compare_digest(known_name, _digest(name)) & hmac.compare_digest(
                known_password, _digest(password)
            )
            if right:
                found = user
        return found


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def auth_from_environment() -> BasicAuth | None:
    """LOWQ_WEB_USER and LOWQ_WEB_PASSWORD may do everything, LOWQ_WEB_READ_USER and LOWQ_WEB_READ_PASSWORD only look.

    Raises:
        ConfigError: one of a pair is missing.
    """
    users: dict[str, tuple[str, Role]] = {}
    pairs: list[tuple[str, Role]] = [("LOWQ_WEB_", "admin"), ("LOWQ_WEB_READ_", "read")]
    for prefix, role in pairs:
        name, password = os.environ.get(f"{prefix}USER", ""), os.environ.get(f"{prefix}PASSWORD", "")
        if bool(name) != bool(password):
            raise lowq.ConfigError(f"{prefix}USER and {prefix}PASSWORD go together: one of them is not set")
        if name:
            if name in users:
                raise lowq.ConfigError("LOWQ_WEB_USER and LOWQ_WEB_READ_USER must have different names")
            users[name] = (password, role)
    return BasicAuth(users) if users else None


# --- may this be seen without authentication? ----------------------------------------------------------------


def is_loopback(host: str) -> bool:
    """Whether an address, or a name, surely leads to this very machine."""
    host = host.strip("[]").rstrip(".").lower()
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def exposure(scope: Scope) -> str | None:
    """Why somebody else than people on this machine may be asking; None: surely not.

    Judged by each connection, and so however the server was started. A proxy on this machine makes every request look
    local, so what proxies add counts as well, and so does the name that was asked for: a page elsewhere may have had
    its own name point here.
    """
    server = scope.get("server")
    if not server:
        return "the server does not tell its address"
    host, port = server[0], server[1]
    if port is not None and not is_loopback(host):  # without a port it is the path of a Unix socket
        return f"it was reached at the address {host}"
    headers = Headers(scope=scope)
    for name in _FORWARDED:
        if name in headers:
            return f"the request came through a proxy: it has the header {name}"
    client = scope.get("client")
    if client and _is_address(client[0]) and not is_loopback(client[0]):
        return f"the request came from {client[0]}"
    asked = headers.get("host", "")
    if asked and not is_loopback(urlsplit(f"//{asked}").hostname or ""):
        return f"it was asked for by the name {asked[:100]!r}"
    return None


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def refuse_bind(host: str) -> str:
    """What to say when the dashboard is to listen where others can reach it, without authentication."""
    return (
        f"the dashboard would be open to everybody who can reach {host}: set LOWQ_WEB_USER and LOWQ_WEB_PASSWORD, "
        "or say --no-auth if something else protects it"
    )


# --- does it come from our own pages? ------------------------------------------------------------------------


def cross_site(headers: Headers) -> bool | None:
    """Whether a page of somebody else has sent this; None: the headers don't tell."""
    site = headers.get("sec-fetch-site")
    if site is not None:
        return site not in ("same-origin", "none")
    origin = headers.get("origin")
    if origin is not None:
        return urlsplit(origin).netloc.lower() != headers.get("host", "").lower()
    return None


def _has_token(headers: Headers, body: bytes) -> bool:
    """Whether a form brings the token that its page was given: pages elsewhere can't read our cookie."""
    if headers.get("content-type", "").partition(";")[0].strip().lower() == "application/json":
        return True  # no page elsewhere may send this without asking first, and we allow nobody to ask
    expected = _cookie(headers)
    try:
        given = parse_qs(body.decode("ascii", "replace"), max_num_fields=5000).get(TOKEN, [""])[0]
    except ValueError:
        return False
    return bool(expected) and hmac.compare_digest(expected.encode(), given.encode())


def _cookie(headers: Headers) -> str:
    jar: SimpleCookie = SimpleCookie()
    try:
        jar.load(headers.get("cookie", ""))
    except CookieError:
        return ""
    return jar[TOKEN].value if TOKEN in jar else ""


# --- the guard -----------------------------------------------------------------------------------------------


class Guard:
    """The middleware around all routes. ``auth`` None: nobody is asked who they are."""

    def __init__(self, app: ASGIApp, auth: Authenticate | None, *, open_to_all: bool) -> None:
        self._app = app
        self._auth = auth
        self._open = open_to_all

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        scope["lowq_root"] = scope.get("root_path", "")
        token = _cookie(Headers(scope=scope))
        new_token = "" if token else secrets.token_urlsafe(24)
        guarded = _with_headers(scope, send, new_token)
        if path_of(scope) == "/healthz":
            await self._app(scope, receive, guarded)
            return
        request = Request(scope, receive)
        user = await self._who(request)
        if isinstance(user, Response):
            await user(scope, receive, guarded)
            return
        body = b""
        if scope["method"] not in ("GET", "HEAD"):
            refusal, body = await self._may_act(request, user)
            if refusal is not None:
                await refusal(scope, receive, guarded)
                return
        scope["lowq_web"] = Visit(user, token or new_token, body)
        await self._app(scope, receive, guarded)

    async def _who(self, request: Request) -> User | Response:
        if self._auth is None:
            reason = None if self._open else exposure(request.scope)
            if reason is not None:
                return refusal(
                    request,
                    403,
                    f"The dashboard has no authentication, and others than you could reach it: {reason}. Set "
                    "LOWQ_WEB_USER and LOWQ_WEB_PASSWORD (or give create_app an auth=), or start it with --no-auth "
                    "(no_auth=True) if something else protects it.",
                )
            return User("anonymous", "admin")
        answer: Any = self._auth(request)
        user = await answer if inspect.isawaitable(answer) else answer
        if isinstance(user, User) and user.role in ("read", "admin"):
            return user
        response = refusal(request, 401, "This needs a user and a password.")
        challenge = getattr(self._auth, "challenge", None)
        if challenge:
            response.headers["www-authenticate"] = challenge
        return response

    async def _may_act(self, request: Request, user: User) -> tuple[Response | None, bytes]:
        """None, and the body; or why not."""
        if user.role != "admin":
            return refusal(request, 403, f"{user.name} may look, not act: the role is {user.role!r}."), b""
        other = cross_site(request.headers)
        if other:
            return refusal(request, 403, "This was sent by a page of another site."), b""
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_BODY:
                return refusal(request, 413, f"What was sent is larger than {MAX_BODY} bytes."), b""
        if other is None and not _has_token(request.headers, body):
            return refusal(request, 403, "The form lacks its token: go back, load the page anew and try again."), b""
        return None, body


def path_of(scope: Scope) -> str:
    """The path below the place where we are mounted."""
    path: str = scope["path"]
    # The place itself is asked for again and again while a request goes inwards: only ours counts.
    return path.removeprefix(scope.get("lowq_root", scope.get("root_path", "")))


def is_for_programs(request: Request) -> bool:
    """Whether JSON is expected rather than a page."""
    return path_of(request.scope).startswith(("/api/", "/healthz", "/metrics", "/live"))


def refusal(request: Request, status: int, reason: str) -> Response:
    """An answer that says no, and why: JSON to programs, text to people."""
    if is_for_programs(request):
        return JSONResponse({"error": reason}, status)
    return PlainTextResponse(reason + "\n", status)


def _with_headers(scope: Scope, send: Send, new_token: str) -> Send:
    async def guarded(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in _HEADERS.items():
                headers[name] = value
            headers.setdefault("cache-control", "no-store")
            if new_token and headers.get("content-type", "").startswith("text/html"):
                path = scope.get("root_path", "") or "/"
                secure = "; Secure" if scope.get("scheme") == "https" else ""
                headers.append("set-cookie", f"{TOKEN}={new_token}; Path={path}; HttpOnly; SameSite=Strict{secure}")
        await send(message)

    return guarded
