"""Access control: everything between a request and the pages.

::

    request -> /healthz? ---------------------------------------------------------------> answered
            -> without authentication: only from this machine, to this machine's own name -> or 403, saying why
            -> authentication                                                             -> or 401, then 429
            -> not GET: the role is admin                                                 -> or 403
            -> GET: no page elsewhere has it fetched behind somebody's back               -> or 403
            -> not GET: sent by one of our own pages, or by no browser                    -> or 403
            -> the routes

Every answer gets the headers that keep browsers from running, framing or storing what must not be.
"""

import base64
import hashlib
import hmac
import inspect
import ipaddress
import logging
import math
import os
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import lowq
from lowq_web.logins import Logins, network_of
from lowq_web.threads import Threads

log = logging.getLogger(__name__)

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
#: Headers that proxies add to a request; and prefixes of such headers.
_FORWARDED = ("forwarded", "via", "x-real-ip", "x-client-ip", "true-client-ip", "x-cluster-client-ip")
_FORWARDING = ("x-forwarded-", "x-original-", "x-envoy-", "cf-")
#: Our token in the header Cookie, as `secrets.token_urlsafe` makes it: no other cookie is parsed.
_COOKIE = re.compile(rf"(?:^|;)\s*{TOKEN}=([A-Za-z0-9_-]{{32}})\s*(?:;|$)")


@dataclass(frozen=True, slots=True)
class User:
    """The user of a request. The role "read" may look, "admin" may also act."""

    name: str
    role: Role = "admin"


#: Request -> the user; None: may see nothing; a response: is sent instead, such as a redirect to a login. May be async.
Authenticate = Callable[[Request], User | Response | Awaitable[User | Response | None] | None]


@dataclass(frozen=True, slots=True)
class Visit:
    """The user, token and body of a request, as the guard has checked them."""

    user: User
    #: For forms.
    token: str
    body: bytes


def visit_of(request: Request) -> Visit:
    """The visit of a request that has passed the guard."""
    visit: Visit = request.scope["lowq_web"]
    return visit


# --- the user ------------------------------------------------------------------------------------------------


class BasicAuth:
    """User and password, as browsers ask for them. ``users``: name -> (password, role). Failed logins are logged
    and delay the next ones: see `lowq_web.logins`.

    Raises:
        ConfigError: an empty name or password, or an unknown role.
    """

    #: The header WWW-Authenticate of a 401.
    challenge = 'Basic realm="lowq", charset="UTF-8"'

    def __init__(self, users: Mapping[str, tuple[str, Role]], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._logins = Logins(clock)
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
        """The user, or None.

        Raises:
            HTTPException: 429, too many logins have failed lately; this one was not checked.
        """
        scheme, _, encoded = request.headers.get("authorization", "").partition(" ")
        try:
            decoded = base64.b64decode(encoded.strip(), validate=True).decode()
        except ValueError:
            return None
        name, colon, password = decoded.partition(":")
        if scheme.lower() != "basic" or not colon:
            return None
        address = network_of(request.client.host) if request.client else "a local socket"
        token = _cookie(request.headers)
        pause = math.ceil(self._logins.pause(address, name, token))
        if pause:
            reason = f"Too many logins as {name[:100]!r} from {address} have failed: try again in {pause} s."
            raise HTTPException(429, reason, {"retry-after": str(pause)})
        found = self._find(name, password)
        if found is None:
            self._logins.failed(address, name, token)
        else:
            self._logins.succeeded(name, token)
        return found

    def _find(self, name: str, password: str) -> User | None:
        found = None
        # All of them, and digests of equal length: the time it takes reveals nothing.
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
    """Whether an address or a host name surely means this machine."""
    host = host.strip("[]").rstrip(".").lower()
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def exposure(scope: Scope) -> str | None:
    """Why the request may come from another machine; None: it surely does not.

    Checked for each connection, so it holds however the server was started. A proxy on this machine makes every
    request look local, so the headers of proxies are checked as well. So is the host name of the request: another site
    may let its own name point to this machine.
    """
    server = scope.get("server")
    if not server:
        return "the server does not say its address"
    host, port = server[0], server[1]
    if port is not None and not is_loopback(host):  # without a port it is the path of a Unix socket
        return f"it was reached at the address {host}"
    headers = Headers(scope=scope)
    for name in headers:
        if name in _FORWARDED or name.startswith(_FORWARDING):
            return f"the request came through a proxy: it has the header {name[:100]}"
    client = scope.get("client")
    if client and _is_address(client[0]) and not is_loopback(client[0]):
        return f"the request came from {client[0]}"
    asked = headers.get("host", "")
    if asked and not is_loopback(_host_of(f"//{asked}")):
        return f"it was asked for by the name {asked[:100]!r}"
    # A proxy may add no header. But some speak HTTP/1.0, and the headers Origin and Referer of a browser behind it have
    # the address that the browser knows, unless the request follows a link of another site.
    if scope.get("http_version") == "1.0":
        return "the request came through a proxy: it is HTTP/1.0, which no browser speaks"
    for name in ("origin", "referer"):
        page = headers.get(name, "null") if headers.get("sec-fetch-site") != "cross-site" else "null"
        if page != "null" and not is_loopback(_host_of(page)):
            return f"the page that asks is {page[:100]!r}"
    return None


def _host_of(address: str) -> str:
    """The host of an address; empty if it has none, or is written to mislead."""
    try:
        parts = urlsplit(address)
        return "" if "@" in parts.netloc else parts.hostname or ""
    except ValueError:
        return ""


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def refuse_bind(host: str) -> str:
    """The error when the dashboard is to listen where others can reach it, without authentication."""
    return (
        f"the dashboard would be open to everybody who can reach {host}: set LOWQ_WEB_USER and LOWQ_WEB_PASSWORD, "
        "or say --no-auth if something else protects it"
    )


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
    if headers.get("sec-fetch-site") or not _host_of(origin):
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
        origins: Collection[str] = (),
    ) -> None:
        self._app = app
        self._origins = origins
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
        scope["lowq_root"] = scope.get("root_path", "")
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
        scope["lowq_web"] = Visit(user, token, body)
        await self._app(scope, receive, send)

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
        try:
            user = await self._asked(self._auth, request)
        except HTTPException as error:
            response = refusal(request, error.status_code, error.detail)
            response.headers.update(error.headers or {})
            return response
        if isinstance(user, Response) or (isinstance(user, User) and user.role in ("read", "admin")):
            return user
        response = refusal(request, 401, "This needs a user and a password.")
        challenge = getattr(self._auth, "challenge", None)
        if challenge:
            response.headers["www-authenticate"] = challenge
        return response

    async def _asked(self, auth: Authenticate, request: Request) -> Any:
        """The answer of the callable. One that is not async may take long: it looks up a session in a database."""
        if isinstance(auth, BasicAuth) or _is_async(auth):
            answer: Any = auth(request)
        else:
            answer = await self._threads.run(auth, request)
        return await answer if inspect.isawaitable(answer) else answer

    def _may_look(self, request: Request) -> Response | None:
        """None, or the refusal. Other sites may link to pages here, but not fetch them."""
        elsewhere = set(request.headers.getlist("sec-fetch-site")) - {"same-origin", "same-site", "none"}
        if elsewhere and request.headers.get("sec-fetch-mode") != "navigate":
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
