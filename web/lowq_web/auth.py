"""Authentication: who sends a request, by a name and a password or by the header of a trusted proxy.

Whoever reaches the dashboard may send any header. So a proxy's header counts only when the connection comes from an
address of a trusted proxy, which must replace these headers, not add to them.
"""

import base64
import hashlib
import hmac
import ipaddress
import logging
import os
import re
import time
from asyncio import sleep
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

import lowq

log = logging.getLogger(__name__)

#: Characters of a password, at least: nothing else keeps it from being guessed.
MIN_PASSWORD = 12
#: Seconds that a failed login waits for its answer: the next one on its connection comes after that.
FAILED_DELAY = 0.3
#: The header with the groups of a user, unless another one is named.
GROUPS_HEADER = "X-Forwarded-Groups"
#: Characters of a user's name; more are refused, as a name that is cut could be somebody else's.
MAX_NAME = 200
#: Seconds between two lines of the log about connections from elsewhere than a trusted proxy.
_QUIET = 60.0
_TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")

Role = Literal["read", "admin"]
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True, slots=True)
class User:
    """The user of a request. The role "read" may look, "admin" may also act."""

    name: str
    role: Role = "admin"


#: Request -> the user; None: may see nothing; a response: is sent instead, such as a redirect to a login. May be async.
Authenticate = Callable[[Request], User | Response | Awaitable[User | Response | None] | None]


class BasicAuth:
    """Names and passwords, as browsers ask for them. ``users``: name -> (password, role).

    Raises:
        ConfigError: a name is empty or has a colon, a password is too short, or a role is unknown.
    """

    #: The header WWW-Authenticate of a 401.
    challenge = 'Basic realm="lowq", charset="UTF-8"'

    def __init__(self, users: Mapping[str, tuple[str, Role]]) -> None:
        if not users:
            raise lowq.ConfigError("BasicAuth needs at least one user")
        self._users: list[tuple[bytes, User]] = []
        for name, (password, role) in users.items():
            if not name or ":" in name:
                raise lowq.ConfigError(f"user {name!r}: the name must not be empty, nor have a colon")
            if len(password) < MIN_PASSWORD:
                raise lowq.ConfigError(f"user {name!r}: the password must have {MIN_PASSWORD} characters or more")
            if role not in ("read", "admin"):
                raise lowq.ConfigError(f"user {name!r}: role={role!r} is neither 'read' nor 'admin'")
            self._users.append((_digest(name, password), User(name, role)))

    async def __call__(self, request: Request) -> User | None:
        """The user, or None, after a while if there was a wrong name or password."""
        scheme, _, encoded = request.headers.get("authorization", "").partition(" ")
        try:
            decoded = base64.b64decode(encoded.strip(), validate=True).decode()
        except ValueError:
            return None
        name, colon, password = decoded.partition(":")
        if scheme.lower() != "basic" or not colon:
            return None
        found, given = None, _digest(name, password)
        # All of them, and digests of equal length: the time it takes reveals nothing.
        for known, user in self._users:
            if hmac.compare_digest(known, given):
                found = user
        if found is None:
            address = request.client.host if request.client else "a local socket"
            log.warning(
                "a login as %.100r from %.100s failed", name, address,
                extra={"event": "login_failed", "user": name[:100], "address": address[:100]},
            )  # fmt: skip
            await sleep(FAILED_DELAY)
        return found


def _digest(name: str, password: str) -> bytes:
    return hashlib.sha256(f"{name}:{password}".encode("utf-8", "surrogatepass")).digest()


def auth_from_environment() -> BasicAuth | None:
    """LOWQ_WEB_USER and LOWQ_WEB_PASSWORD may do everything, LOWQ_WEB_READ_USER and LOWQ_WEB_READ_PASSWORD only look.

    Raises:
        ConfigError: one of a pair is missing, both have one name, or a password is too short.
    """
    users: dict[str, tuple[str, Role]] = {}
    pairs: list[tuple[str, Role]] = [("LOWQ_WEB_", "admin"), ("LOWQ_WEB_READ_", "read")]
    for prefix, role in pairs:
        name, password = os.environ.get(f"{prefix}USER", ""), os.environ.get(f"{prefix}PASSWORD", "")
        if bool(name) != bool(password):
            raise lowq.ConfigError(f"{prefix}USER and {prefix}PASSWORD go together: one of them is not set")
        if name in users:
            raise lowq.ConfigError("LOWQ_WEB_USER and LOWQ_WEB_READ_USER must have different names")
        if name and len(password) < MIN_PASSWORD:
            raise lowq.ConfigError(f"{prefix}PASSWORD must have {MIN_PASSWORD} characters or more")
        if name:
            users[name] = (password, role)
    return BasicAuth(users) if users else None


def checked_networks(proxies: Iterable[str]) -> list[Network]:
    """The addresses of trusted proxies.

    Raises:
        ConfigError: one is no network, or all addresses.
    """
    found = []
    for given in proxies:
        try:
            network = ipaddress.ip_network(given.strip())
        except ValueError as error:
            raise lowq.ConfigError(
                f"--trusted-proxy {given!r:.100}: it is an address or a CIDR network: {error}"
            ) from None
        if network.prefixlen == 0:
            raise lowq.ConfigError(f"--trusted-proxy {given!r} are all addresses: everybody could say who they are")
        found.append(network)
    return found


class UserHeader:
    """The user that a trusted proxy names, as one does that logs people in: ``header`` has the name, ``groups_header``
    their groups, separated by commas. ``admins``: names, and groups as ``@ops``; everybody else may only look.

    Raises:
        ConfigError: a header or an admin is none; or no proxy is trusted.
    """

    def __init__(
        self,
        header: str,
        proxies: Collection[Network],
        *,
        admins: Iterable[str] = (),
        groups_header: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._header, self._groups_header = header, groups_header or GROUPS_HEADER
        for option, name in (("--auth-header", header), ("--groups-header", self._groups_header)):
            if not _TOKEN.fullmatch(name):
                raise lowq.ConfigError(f"{option} {name!r:.100} is no name of a header such as X-Forwarded-User")
        if self._header.lower() == self._groups_header.lower():
            raise lowq.ConfigError(f"--auth-header and --groups-header are both {header}: one has the name only")
        if not proxies:
            raise lowq.ConfigError(
                f"--auth-header {header} needs --trusted-proxy: without it, everybody could send that header"
            )
        self._proxies = proxies
        given = [admin.strip() for admin in admins]
        if "" in given or "@" in given:
            raise lowq.ConfigError("--admins: a name is empty; they are written as ann,bob,@ops")
        self._groups = frozenset(admin[1:] for admin in given if admin.startswith("@"))
        self._admins = frozenset(admin for admin in given if not admin.startswith("@"))
        self._clock = clock
        self._logged = -_QUIET

    async def __call__(self, request: Request) -> User | None:
        """The user; None: the proxy names nobody.

        Raises:
            HTTPException: 403, it comes from elsewhere than a trusted proxy; 400, a header is there twice or too long.
        """
        peer: str = request.scope["lowq_peer"]
        if not _is_within(peer, self._proxies):
            self._log_refusal(peer, sent=self._header in request.headers)
            raise HTTPException(
                403,
                f"The dashboard is there only through its proxy, and {peer or 'a local socket'} is not the address of "
                "one: whoever starts it names the proxy's with --trusted-proxy.",
            )
        name = self._only(request, self._header)
        if not name:
            return None
        if len(name) > MAX_NAME:
            raise HTTPException(400, f"The name in {self._header} is longer than {MAX_NAME} characters.")
        groups = {group.strip() for group in self._only(request, self._groups_header).split(",")} - {""}
        # A name that begins with @ is none of the admins: those are groups.
        is_admin = name in self._admins or not self._groups.isdisjoint(groups)
        return User(name, "admin" if is_admin else "read")

    def _only(self, request: Request, name: str) -> str:
        """The value of a header, as UTF-8 if it is that; "" for none."""
        values = request.headers.getlist(name)
        if len(values) > 1:
            # A proxy that adds its header to that of the client would let everybody say who they are.
            raise HTTPException(400, f"The header {name} is there {len(values)} times: the proxy must replace it.")
        if not values:
            return ""
        raw = values[0].strip().encode("latin-1")
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return raw.decode("latin-1")

    def _log_refusal(self, peer: str, *, sent: bool) -> None:
        now = self._clock()
        if now - self._logged < _QUIET:
            return
        self._logged = now
        log.warning(
            "refused %s%s: it is not the address of a trusted proxy",
            peer or "a local socket", f", which sent the header {self._header}" if sent else "",
            extra={"event": "untrusted_proxy", "address": peer},
        )  # fmt: skip


def _is_within(host: str, networks: Iterable[Network]) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return any(address in network for network in networks)


def chosen_auth(
    auth: Authenticate | None,
    proxies: Collection[Network],
    *,
    auth_header: str | None = None,
    groups_header: str | None = None,
    admins: Collection[str] = (),
    no_auth: bool = False,
) -> Authenticate | None:
    """The one authentication that was chosen; None: there is none.

    Raises:
        ConfigError: two were chosen, or one without what it needs.
    """
    from_environment = auth_from_environment()
    if auth_header is None:
        for option, value in (("--admins", admins), ("--groups-header", groups_header)):
            if value:
                raise lowq.ConfigError(f"{option} is about users whom a proxy names: it needs --auth-header")
        return auth or from_environment
    for other, given in (
        ("auth=", auth is not None), ("a password in LOWQ_WEB_*", from_environment is not None),
        ("--no-auth", no_auth),
    ):  # fmt: skip
        if given:
            raise lowq.ConfigError(f"--auth-header and {other} both say who it is: leave one of them out")
    return UserHeader(auth_header, proxies, admins=admins, groups_header=groups_header)
