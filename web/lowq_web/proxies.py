"""Proxies that are trusted: the address of who is behind one, and the user that one names in a header.

Whoever reaches the dashboard may send any header. So what a header says counts only when the connection comes from an
address of a trusted proxy, which must replace these headers, not add to them.
"""

import ipaddress
import logging
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import Scope

import lowq

log = logging.getLogger(__name__)

#: The header with the groups of a user, unless another one is named.
GROUPS_HEADER = "X-Forwarded-Groups"
#: Characters of a user's name; more are refused, as a name that is cut could be somebody else's.
MAX_NAME = 200
#: Bytes of X-Forwarded-For that are looked at, from its end: what is before was sent by the client.
_MAX_CHAIN = 4096
#: Seconds between two lines of the log about one address, and the addresses that are remembered.
_QUIET, _REMEMBERED = 60.0, 1000
_TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class TrustedProxies:
    """The addresses of proxies whose headers are believed. None are given: no header is.

    Raises:
        ConfigError: one is no network, or all addresses.
    """

    def __init__(self, networks: Iterable[str] = ()) -> None:
        self._networks = [_network(given) for given in networks]

    def __bool__(self) -> bool:
        return bool(self._networks)

    def trusts(self, host: str) -> bool:
        """Whether a connection from this address is one of a trusted proxy."""
        address = _parsed(host)
        return address is not None and any(address in network for network in self._networks)

    def client_address(self, scope: Scope) -> str:
        """The address that a request comes from: behind trusted proxies the last one in X-Forwarded-For that is not one
        of them, since a client can send any before it. Empty: not known, as of a local socket.
        """
        client = scope.get("client")
        found = str(client[0]) if client else ""
        if not self.trusts(found):
            return found
        chain = ",".join(Headers(scope=scope).getlist("x-forwarded-for"))[-_MAX_CHAIN:]
        for said in reversed(chain.split(",")):
            address = _parsed(said.strip())
            if address is None:
                break  # whatever it is, what is before it was not written by a proxy that we know
            found = str(address)
            if not self.trusts(found):
                break
        return found


def _network(given: str) -> _Network:
    try:
        network = ipaddress.ip_network(given.strip())
    except ValueError as error:
        raise lowq.ConfigError(f"--trusted-proxy {given!r:.100}: it is an address or a CIDR network: {error}") from None
    if network.prefixlen == 0:
        raise lowq.ConfigError(f"--trusted-proxy {given!r} are all addresses: everybody could say who they are")
    return network


def _parsed(text: str) -> _Address | None:
    """An address, also with a port or a zone; an IPv4 address that IPv6 carries is that one."""
    host = text.partition("%")[0]
    if host.startswith("["):
        host = host[1:].partition("]")[0]
    elif host.count(":") == 1:
        host = host.partition(":")[0]
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


@dataclass(frozen=True, slots=True)
class Named:
    """The user that a proxy has named."""

    name: str
    is_admin: bool


class UserHeader:
    """Who a trusted proxy says it is, as one does that logs people in: ``header`` has the name, ``groups_header``
    their groups, separated by commas. ``admins``: names, and groups as ``@ops``; everybody else may only look.

    Raises:
        ConfigError: a header or an admin is none; or no proxy is trusted.
    """

    def __init__(
        self,
        header: str,
        proxies: TrustedProxies,
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
        self._lock = threading.Lock()
        #: Address -> when the log last had a line about it.
        self._logged: OrderedDict[str, float] = OrderedDict()

    def named(self, scope: Scope) -> Named | None:
        """The user of a request; None: the proxy names nobody.

        Raises:
            HTTPException: 403, it comes from elsewhere than a trusted proxy; 400, a header is there twice or too long.
        """
        client = scope.get("client")
        peer = str(client[0]) if client else ""
        headers = Headers(scope=scope)
        if not self._proxies.trusts(peer):
            self._log_refusal(peer, sent=self._header in headers)
            raise HTTPException(
                403,
                f"The dashboard is there only through its proxy, and {peer or 'a local socket'} is not the address of "
                "one: whoever starts it names the proxy's with --trusted-proxy.",
            )
        name = self._only(headers, self._header)
        if not name:
            return None
        if len(name) > MAX_NAME:
            raise HTTPException(400, f"The name in {self._header} is longer than {MAX_NAME} characters.")
        groups = {group.strip() for group in self._only(headers, self._groups_header).split(",")} - {""}
        # A name that begins with @ is none of the admins: those are groups.
        return Named(name, name in self._admins or not self._groups.isdisjoint(groups))

    def _only(self, headers: Headers, name: str) -> str:
        """The value of a header, as UTF-8 if it is that; "" for none."""
        values = headers.getlist(name)
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
        with self._lock:
            if now - self._logged.get(peer, -_QUIET) < _QUIET:
                return
            self._logged[peer] = now
            self._logged.move_to_end(peer)
            if len(self._logged) > _REMEMBERED:
                self._logged.popitem(last=False)
        log.warning(
            "refused %s%s: it is not the address of a trusted proxy",
            peer or "a local socket", f", which sent the header {self._header}" if sent else "",
            extra={"event": "untrusted_proxy", "address": peer},
        )  # fmt: skip
