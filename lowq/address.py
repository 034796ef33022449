"""Addresses of other services, such as Graphite: ``host:port``, ``udp://host:port``, ``[::1]:2003``."""

import re
from typing import Literal, NamedTuple

Transport = Literal["tcp", "udp"]


class Address(NamedTuple):
    """Where something listens, and how it is spoken to."""

    transport: Transport
    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.transport}://{host}:{self.port}"


def parse_address(text: str, transports: tuple[Transport, ...]) -> Address:
    """The address that a text is. Without a scheme the first of the transports is meant.

    Raises:
        ValueError: it is none; the message says what to write.
    """
    schemes = "".join(f" or {transport}://HOST:PORT" for transport in transports[1:])
    found = re.fullmatch(r"(?:(\w+)://)?(?:\[([0-9A-Fa-f:.]+(?:%\w+)?)\]|([^\s:/\[\]@]+)):([0-9]{1,5})", text, re.ASCII)
    if found is None:
        raise ValueError(f"it is no address; write HOST:PORT{schemes}")
    scheme, in_brackets, plain, port = found.groups()
    transport = next((one for one in transports if one == (scheme or transports[0])), None)
    if transport is None:
        raise ValueError(f"it can't be reached by {scheme}; write HOST:PORT{schemes}")
    if not 1 <= int(port) <= 65535:
        raise ValueError("a port is a number from 1 to 65535")
    return Address(transport, in_brackets or plain, int(port))
