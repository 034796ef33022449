"""Logins of the dashboard: hashes of its users' passwords, and failures, counted for all of its processes together.

::

    ann:scrypt$14$8$5$SALT$HASH:admin        name : "scrypt", log2(n), r, p, salt and hash in base64 : role

Whoever guesses at one process waits at all of them. Failures are kept as digests of address and user, so nothing that
somebody has typed is in Redis. Bounded: when there are many, the older half goes.
"""

import base64
import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass

from lowq.backend import Backend
from lowq.errors import ConfigError
from lowq.store import registry, untrusted
from lowq.store.keys import logins_key
from lowq.store.scripts import time_of

#: What new hashes cost: 16 MiB and some 0.2 s for each attempt.
LOG_N, R, P = 14, 8, 5
#: Bytes of memory that checking one password may take, and its most rounds: whoever writes a file sets both.
MAX_MEMORY, MAX_P = 2**28, 64
#: Characters of a name.
MAX_NAME = 200
_BASE64 = "([A-Za-z0-9+/=]{4,128})"
_HASH = re.compile(r"scrypt\$([0-9]{1,2})\$([0-9]{1,2})\$([0-9]{1,2})" + rf"\${_BASE64}\${_BASE64}")


@dataclass(frozen=True, slots=True)
class PasswordHash:
    """A hash, and what it takes to compute it again."""

    log_n: int
    r: int
    p: int
    salt: bytes
    digest: bytes

    @classmethod
    def of(cls, password: str, *, log_n: int = LOG_N, r: int = R, p: int = P) -> "PasswordHash":
        """The hash of a new password."""
        salt = secrets.token_bytes(16)
        return cls(log_n, r, p, salt, _scrypt(password, log_n, r, p, salt, 32))

    @classmethod
    def parse(cls, text: str) -> "PasswordHash":
        """What `str` has made.

        Raises:
            ValueError: it is none, or would take too much memory. The message does not have the text in it.
        """
        found = _HASH.fullmatch(text)
        if found is None:
            raise ValueError("the hash is not of the form scrypt$14$8$5$SALT$HASH")
        log_n, r, p = (int(found[number]) for number in (1, 2, 3))
        if not (log_n >= 1 and r >= 1 and 1 <= p <= MAX_P and 128 * r * 2**log_n <= MAX_MEMORY):
            raise ValueError(f"the hash takes more than {MAX_MEMORY >> 20} MiB, or its numbers make no sense")
        try:
            salt, digest = (base64.b64decode(found[number], validate=True) for number in (4, 5))
        except ValueError:
            raise ValueError("the salt or the hash is not base64") from None
        if not salt or len(digest) < 16:
            raise ValueError("the salt or the hash is too short")
        return cls(log_n, r, p, salt, digest)

    def __str__(self) -> str:
        salt, digest = (base64.b64encode(part).decode() for part in (self.salt, self.digest))
        return f"scrypt${self.log_n}${self.r}${self.p}${salt}${digest}"

    def __repr__(self) -> str:
        return "PasswordHash(...)"  # it is not for logs

    def fits(self, password: str) -> bool:
        """Whether it is the hash of this password; takes the same time either way."""
        found = _scrypt(password, self.log_n, self.r, self.p, self.salt, len(self.digest))
        return hmac.compare_digest(found, self.digest)


def _scrypt(password: str, log_n: int, r: int, p: int, salt: bytes, size: int) -> bytes:
    return hashlib.scrypt(
        password.encode("utf-8", "surrogatepass"), salt=salt, n=2**log_n, r=r, p=p, dklen=size,
        maxmem=128 * r * (2**log_n + p + 2) + 2**16,
    )  # fmt: skip


def check_name(name: str) -> None:
    """Whether it can be the name of a user.

    Raises:
        ConfigError
    """
    if not name or len(name) > MAX_NAME or ":" in name or name.startswith("#") or name != name.strip():
        raise ConfigError(
            f"user {name!r:.60}: a name has 1 to {MAX_NAME} characters, no colon, no space at its ends, and no # first"
        )
    if not name.isprintable():
        raise ConfigError(f"user {name!r:.60}: a name has only characters that can be printed")


def line_of(name: str, password: str, role: str) -> str:
    """The line of a user, without its end.

    Raises:
        ConfigError: the name can't be one, or the password is empty.
    """
    check_name(name)
    if not password:
        raise ConfigError(f"user {name!r}: the password must not be empty")
    return f"{name}:{PasswordHash.of(password)}:{role}"


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
