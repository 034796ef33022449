"""Values that a process of the dashboard leaves for whichever process answers the next request: the latest of a kind.

::

    leave   HINCRBY next -> slot; HSET slot "token value"; EXPIRE      the name: "slot-token", which nobody can guess
    find    HGET slot, if the token is the name's
    take    the same, then HDEL: one of several who take it gets it

The slots are used in turn, so there are never more values than slots. A process that dies between two commands leaves
an old value in its slot. Each value is of one request, and nothing breaks when it is gone.
"""

import re
import secrets
from dataclasses import dataclass

from lowq.backend import Backend

_NEXT = "next"
_NAME = re.compile(r"([0-9]{1,4})-([A-Za-z0-9_-]{16})", re.ASCII)


@dataclass(frozen=True, slots=True)
class TokenStore:
    """The latest values of a kind, in the hash ``key``. Safe for threads.

    All methods raise RedisUnavailable and RedisRefused.
    """

    backend: Backend
    key: str
    #: How many values are kept.
    slots: int
    #: Seconds after the latest value until all are dropped.
    ttl: int

    def leave(self, value: bytes) -> str:
        """Keeps it; returns the name to find it by."""
        run = self.backend.client.command
        slot = int(run("HINCRBY", self.key, _NEXT, 1, key=self.key)) % self.slots
        token = secrets.token_urlsafe(12)
        commands = [
            ("HSET", self.key, slot, token.encode() + b" " + value),
            ("EXPIRE", self.key, self.ttl),
        ]
        self.backend.client.commands(commands, key=self.key)
        return f"{slot}-{token}"

    def find(self, name: str) -> bytes | None:
        """The value of that name, if it is still there. Redis is not asked for what is no name."""
        parts = _NAME.fullmatch(name)
        if parts is None or int(parts[1]) >= self.slots:
            return None
        raw = self.backend.client.command("HGET", self.key, int(parts[1]), key=self.key)
        token, _, value = (raw or b"").partition(b" ")
        return value if secrets.compare_digest(token, parts[2].encode()) else None

    def take(self, name: str) -> bytes | None:
        """The same, once."""
        value = self.find(name)
        if value is None:
            return None
        removed = self.backend.client.command("HDEL", self.key, int(name.partition("-")[0]), key=self.key)
        return value if removed else None
