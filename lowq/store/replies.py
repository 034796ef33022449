"""Replies in the shapes of RESP2, which the rest of lowq reads, also on a connection that speaks RESP3.

Scripts answer in the shapes of RESP2 under both, as what they call does. Plain commands answer RESP3 with maps, sets,
numbers and booleans, and messages of channels come as pushes.
"""

from typing import Any


def read(connection: Any) -> Any:
    """The next reply.

    Raises:
        redis-py's errors
    """
    return as_resp2(connection.read_response()) if speaks_resp3(connection) else connection.read_response()


def read_event(connection: Any) -> Any:
    """The next message of a subscribed connection.

    Raises:
        redis-py's errors
    """
    # Without this redis-py hands a push to its own callback and waits for the reply to a command.
    return connection.read_response(push_request=True) if speaks_resp3(connection) else connection.read_response()


def speaks_resp3(connection: Any) -> bool:
    """The embedded store's connections don't say: they speak RESP2."""
    return getattr(connection, "protocol", 2) == 3


def as_resp2(reply: Any) -> Any:
    """What RESP2 has for a reply of RESP3."""
    if isinstance(reply, bytes | None):
        return reply
    if isinstance(reply, list | set | frozenset):
        items = [as_resp2(item) for item in reply]
        # Members with scores: RESP3 has pairs, of which only those have a float.
        if reply and all(isinstance(item, list) and len(item) == 2 and isinstance(item[1], float) for item in reply):
            return [part for pair in items for part in pair]
        return items
    if isinstance(reply, dict):
        return [as_resp2(part) for pair in reply.items() for part in pair]
    if isinstance(reply, bool):
        return int(reply)
    if isinstance(reply, float):
        return f"{reply:.17g}".encode()
    return reply.encode() if isinstance(reply, str) else reply
