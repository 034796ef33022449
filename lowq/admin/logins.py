"""Failed logins of the dashboard, counted for all of its processes together: who guesses at one waits at all of them.

They are kept as digests of address and user, so nothing that somebody has typed is in Redis. Bounded: when there are
many, the older half goes.
"""

import hashlib
import re
import secrets
from dataclasses import dataclass

from lowq.backend import Backend
from lowq.store import registry, untrusted
from lowq.store.keys import logins_key
from lowq.store.scripts import time_of

#: Pairs of address and user that are remembered.
KEPT = 1000
_RECORD = re.compile(rb"([0-9]{1,9}) (\S+) \S+")


@dataclass(frozen=True, slots=True)
class Failures:
    """Failed logins of a user from an address."""

    #: In a row.
    count: int
    #: Seconds since the last one.
    ago: float


def record_failure(backend: Backend, address: str, user: str, forgotten: float) -> int:
    """Counts one; returns how many there are in a row. ``forgotten``: seconds after which a failure no longer counts.

    Raises:
        RedisUnavailable, RedisRefused, ScriptError
    """
    attempt = secrets.token_hex(8)
    digest = _digest(address, user)
    return backend.client.call(registry.login_failed(_key(backend), digest, attempt, int(forgotten), KEPT))


def find_failures(backend: Backend, address: str, user: str) -> Failures | None:
    """Those that are known; None: there are none.

    Raises:
        RedisUnavailable, RedisRefused
    """
    key = _key(backend)
    time, raw = backend.client.commands([("TIME",), ("HGET", key, _digest(address, user))], key=key)
    parts = _RECORD.fullmatch(raw or b"")
    last = untrusted.finite(parts[2]) if parts is not None else None
    if parts is None or last is None:
        return None
    # The clock may have stepped back.
    return Failures(int(parts[1]), max(time_of(time) - last, 0.0))


def _key(backend: Backend) -> str:
    return logins_key(backend.config.namespace)


def _digest(address: str, user: str) -> str:
    text = f"{address}\0{user}".encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=16).hexdigest()
