"""Passwords, as browsers ask for them: who knows the right one. `lowq_web.logins` slows guesses down.

A password is looked at one at a time in each process, so guesses that come together cost what single ones do. One that
was right is remembered for as long as its user has it, as a keyed digest: hashes of a file take long on purpose.
"""

import base64
import copy
import hashlib
import hmac
import math
import os
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from starlette.exceptions import HTTPException
from starlette.requests import Request

import lowq
from lowq_web.logins import Logins, network_of
from lowq_web.users import Role, User, UserFile

#: Right passwords that are remembered; older ones are dropped.
REMEMBERED = 1000
#: Logins from one address that wait to be verified; more are refused. So many names from one address keep nobody else
#: waiting for long.
WAITING = 8


@dataclass(frozen=True, slots=True)
class Attempt:
    """A login that is to be checked."""

    name: str
    password: str
    address: str
    token: str

    def __repr__(self) -> str:
        return f"Attempt({self.name!r})"  # no password in tracebacks


class BasicAuth:
    """User and password, as browsers ask for them. ``users``: name -> (password, role); or ``file``: the path of a file
    with lines as `lowq web-user` makes them. Failed logins are logged and delay the next ones.

    Raises:
        ConfigError: an empty name or password, or an unknown role; a file that can't be read; both, or neither.
    """

    #: The header WWW-Authenticate of a 401.
    challenge = 'Basic realm="lowq", charset="UTF-8"'

    def __init__(
        self,
        users: Mapping[str, tuple[str, Role]] | None = None,
        *,
        file: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._logins = Logins(clock)
        if (file is None) == (users is None):
            raise lowq.ConfigError("BasicAuth takes users or a file of them, one of both")
        self._file = None if file is None else UserFile(file)
        self._users = _checked(users or {}) if file is None else []
        self._one_at_a_time = threading.Lock()
        self._key = secrets.token_bytes(32)
        self._lock = threading.Lock()
        self._right: OrderedDict[bytes, User] = OrderedDict()
        #: Address -> logins that wait to be verified.
        self._waiting: dict[str, int] = {}

    def shared(self, app: lowq.Lowq) -> "BasicAuth":
        """The same, that counts failed logins together with the other processes on that Redis. One with a clock of its
        own counts alone: Redis's time is another.
        """
        if self._clock is not time.monotonic:
            return self
        other = copy.copy(self)
        other._logins = Logins(self._clock, app)
        return other

    def __call__(self, request: Request) -> User | None:
        """The user, or None. It may take long.

        Raises:
            HTTPException: 429, too many logins have failed lately; this one was not checked.
        """
        found = self.attempt(request)
        return (self.recall(found) or self.verify(found)) if isinstance(found, Attempt) else found

    def attempt(self, request: Request) -> Attempt | User | None:
        """What is known at once: the user, of a browser that has logged in before; None, as there is no name and
        password; otherwise what is to be recalled, or else verified.

        Raises:
            HTTPException: 429
        """
        scheme, _, encoded = request.headers.get("authorization", "").partition(" ")
        try:
            decoded = base64.b64decode(encoded.strip(), validate=True).decode()
        except ValueError:
            return None
        name, colon, password = decoded.partition(":")
        if scheme.lower() != "basic" or not colon:
            return None
        if self._file is not None:
            self._file.refresh()
        attempt = Attempt(name, password, network_of(address_of(request)) or "a local socket", token_of(request))
        self._refuse_if_paused(attempt)
        return self._remembered(attempt) if self._logins.knows(name, attempt.token) else attempt

    def recall(self, attempt: Attempt) -> User | None:
        """The user, if the password is remembered. Redis is asked how many logins have failed elsewhere.

        Raises:
            HTTPException: 429
        """
        self._logins.learn(attempt.address, attempt.name)
        self._refuse_if_paused(attempt)
        found = self._remembered(attempt)
        return found if isinstance(found, User) else None

    @contextmanager
    def waiting(self, attempt: Attempt) -> Iterator[None]:
        """For the time that an attempt waits to be verified, and is.

        Raises:
            HTTPException: 429, too many from that address do.
        """
        address = attempt.address
        with self._lock:
            count = self._waiting.get(address, 0)
            if count >= WAITING:
                reason = f"{WAITING} logins from {address} are being checked already: try again in a second."
                raise HTTPException(429, reason, {"retry-after": "1"})
            self._waiting[address] = count + 1
        try:
            yield
        finally:
            with self._lock:
                self._waiting[address] -= 1
                if not self._waiting[address]:
                    del self._waiting[address]

    def verify(self, attempt: Attempt) -> User | None:
        """The user, or None. It takes long: it is for a thread.

        Raises:
            HTTPException: 429
        """
        with self._one_at_a_time:
            # What has failed since it was attempted.
            self._logins.learn(attempt.address, attempt.name)
            self._refuse_if_paused(attempt)
            digest = self._digest(attempt)
            found = self._find(attempt.name, attempt.password)
            if found is None:
                self._logins.failed(attempt.address, attempt.name, attempt.token)
                return None
        self._logins.succeeded(attempt.name, attempt.token)
        with self._lock:
            self._right[digest] = found
            if len(self._right) > REMEMBERED:
                self._right.popitem(last=False)
        return found

    def _remembered(self, attempt: Attempt) -> User | Attempt:
        """The user, if this password was right before; otherwise what is to be verified."""
        with self._lock:
            found = self._right.get(self._digest(attempt))
        if found is None:
            return attempt
        self._logins.succeeded(attempt.name, attempt.token)
        return found

    def _refuse_if_paused(self, attempt: Attempt) -> None:
        pause = math.ceil(self._logins.pause(attempt.address, attempt.name, attempt.token))
        if pause:
            reason = (
                f"Too many logins as {attempt.name[:100]!r} from {attempt.address} have failed: try again in {pause} s."
            )
            raise HTTPException(429, reason, {"retry-after": str(pause)})

    def _digest(self, attempt: Attempt) -> bytes:
        """Of name and password; another one when the file has changed."""
        version = 0 if self._file is None else self._file.version
        # Its name has no colon.
        return hmac.digest(self._key, f"{version}:{attempt.name}:{attempt.password}".encode(), "sha256")

    def _find(self, name: str, password: str) -> User | None:
        if self._file is not None:
            return self._file.check(name, password)
        found = None
        # All of them, and digests of equal length: the time it takes reveals nothing.
        for known_name, known_password, user in self._users:
            right = hmac.compare_digest(known_name, _sha256(name)) & hmac.compare_digest(
                known_password, _sha256(password)
            )
            if right:
                found = user
        return found


def _checked(users: Mapping[str, tuple[str, Role]]) -> list[tuple[bytes, bytes, User]]:
    if not users:
        raise lowq.ConfigError("BasicAuth needs at least one user")
    found = []
    for name, (password, role) in users.items():
        if not name or ":" in name or not password:
            raise lowq.ConfigError(f"user {name!r}: neither name nor password may be empty, nor a name have a colon")
        if role not in ("read", "admin"):
            raise lowq.ConfigError(f"user {name!r}: role={role!r} is neither 'read' nor 'admin'")
        found.append((_sha256(name), _sha256(password), User(name, role)))
    return found


def _sha256(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def address_of(request: Request) -> str:
    """Where a request comes from, as the guard has found it; empty when that is not known."""
    found: str | None = request.scope.get("lowq_address")
    return (request.client.host if request.client else "") if found is None else found


def token_of(request: Request) -> str:
    """The token that a browser brought in its cookie, as the guard has found it; empty for none."""
    found: str = request.scope.get("lowq_token", "")
    return found


def auth_from_environment() -> BasicAuth | None:
    """LOWQ_WEB_USER and LOWQ_WEB_PASSWORD may do everything, LOWQ_WEB_READ_USER and LOWQ_WEB_READ_PASSWORD only look;
    or LOWQ_WEB_USERS is the path of a file of users.

    Raises:
        ConfigError: one of a pair is missing, or the file can't be read, or there are both.
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
    file = os.environ.get("LOWQ_WEB_USERS", "")
    if file and users:
        raise lowq.ConfigError("LOWQ_WEB_USERS is a file of all users: leave LOWQ_WEB_USER and LOWQ_WEB_READ_USER out")
    if file:
        return BasicAuth(file=file)
    return BasicAuth(users) if users else None
