"""The names that the dashboard is asked for by, where it has no authentication: a proxy, and a site that points its own
name here (DNS rebinding), can change anything but that.

Starlette's TrustedHostMiddleware compares names, too. It does not know addresses of IPv6, nor says what to set.
"""

import ipaddress
import re
from collections.abc import Collection, Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import Scope

import lowq

#: How headers begin that proxies add to a request.
_FORWARDED = ("forwarded", "via", "x-forwarded-", "x-real-ip")
#: Why a request is refused, with `host_refusal` in it.
NO_PASSWORD = (
    "The dashboard has no authentication, and others than you could reach it: {}. Set LOWQ_WEB_USER and "
    "LOWQ_WEB_PASSWORD (or give create_app an auth=). If something else protects it: set LOWQ_WEB_HOSTS to the names "
    "that browsers have it by, such as ops.example.com; --no-auth (no_auth=True) answers to all addresses."
)


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


def host_refusal(scope: Scope, hosts: Collection[str], *, open_to_all: bool) -> str | None:
    """Why a request is refused where there is no authentication; None: it is not. ``hosts``: names that are answered
    besides those of this machine, as `checked_hosts` returns them; ``open_to_all``: of no_auth.

    The name that a request asks for is the one thing that a proxy, or another site that points its own name here (DNS
    rebinding), passes on unchanged. Names of this machine count only on connections from this machine.
    """
    headers = Headers(scope=scope)
    asked = headers.get("host", "")
    host = host_of(f"//{asked}").rstrip(".")
    if "*" in hosts or host in hosts or any(host.endswith(name[1:]) for name in hosts if name.startswith("*.")):
        return None
    if open_to_all:
        # No site can point an address somewhere else.
        return None if is_loopback(host) or _is_address(host) else f"it was asked for by the name {asked[:100]!r}"
    server, client = scope.get("server"), scope.get("client")
    if not server:
        return "the server does not say its address"
    if server[1] is not None and not is_loopback(server[0]):  # without a port it is the path of a Unix socket
        return f"it was reached at the address {server[0]}"
    if client and _is_address(client[0]) and not is_loopback(client[0]):
        return f"the request came from {client[0]}"
    if not is_loopback(host):
        return f"it was asked for by the name {asked[:100]!r}"
    # A proxy that names this machine in Host, as nginx does unless told otherwise: then Host says nothing.
    if scope.get("http_version") == "1.0" or any(name.startswith(_FORWARDED) for name in headers):
        return "the request came through a proxy that does not pass Host on"
    return None


def checked_hosts(hosts: Iterable[str]) -> frozenset[str]:
    """Names, ``*.example.com`` for all below one, or ``*`` for any.

    Raises:
        ConfigError: one is none.
    """
    found = set()
    for given in hosts:
        host = given.strip("[]").rstrip(".").lower()
        # "*." is a slip, not any name.
        if given != "*" and not re.fullmatch(r"(\*\.)?[\w.-]+|[0-9a-f:.]+(%\w+)?", host, re.ASCII):
            raise lowq.ConfigError(
                f"LOWQ_WEB_HOSTS, hosts: {given!r} is no name such as ops.example.com, without a port"
            )
        found.add(host)
    return frozenset(found)


def host_of(address: str) -> str:
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
