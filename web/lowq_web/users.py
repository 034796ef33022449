"""Who may see and do what: users, and the file that they are read from.

A line of the file is ``name:hash[:role]``, as `lowq web-user` makes it; empty lines and those that begin with # are
left out. Without a role a user may only look.
"""

import logging
import os
import secrets
import stat
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import lowq
from lowq.operate.logins import PasswordHash, check_name

log = logging.getLogger(__name__)

Role = Literal["read", "admin"]

#: Bytes of the file; a larger one is refused.
MAX_FILE = 2**20


@dataclass(frozen=True, slots=True)
class User:
    """The user of a request. The role "read" may look, "admin" may also act."""

    name: str
    role: Role = "admin"


@dataclass(frozen=True, slots=True)
class _Entry:
    password: PasswordHash
    user: User


class UserFile:
    """The users in a file, which is read again when it has changed. When it can't be read then, the users stay those
    that it had. Safe for threads.

    Raises:
        ConfigError: it can't be read, or has no user.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._lock = threading.Lock()
        self._seen: object = None
        self._users: Mapping[str, _Entry] = {}
        self._stranger = PasswordHash.of(secrets.token_hex(16))
        #: Counts the contents that it has had.
        self.version = 0
        try:
            self._seen = self._signature()
            self._read()
        except OSError as error:
            raise lowq.ConfigError(f"LOWQ_WEB_USERS: {error}") from None
        if not self._users:
            raise lowq.ConfigError(f"LOWQ_WEB_USERS: {path} has no user; `lowq web-user NAME` makes a line for one")

    def refresh(self) -> None:
        """Reads it again if it has changed. Never fails."""
        with self._lock:
            try:
                seen: object = self._signature()
            except OSError as error:
                seen = str(error)
            if seen == self._seen:
                return
            self._seen = seen
            try:
                if isinstance(seen, str):
                    raise lowq.ConfigError(f"LOWQ_WEB_USERS: {seen}")
                self._read()
                log.info("%d users read from %s", len(self._users), self._path, extra={"event": "users_read"})
            except (OSError, lowq.ConfigError) as error:
                log.error("%s; the users stay as they were", error, extra={"event": "users_unreadable"})

    def check(self, name: str, password: str) -> User | None:
        """The user, if the password is right. It computes one hash, also for a name that nobody has."""
        entry = self._users.get(name)
        fits = (self._stranger if entry is None else entry.password).fits(password)
        return entry.user if entry is not None and fits else None

    def _signature(self) -> tuple[int, ...]:
        found = self._path.stat()
        return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino

    def _read(self) -> None:
        with self._path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(MAX_FILE + 1)
        if len(content) > MAX_FILE:
            raise lowq.ConfigError(f"LOWQ_WEB_USERS: {self._path} is larger than {MAX_FILE} bytes")
        if mode & (stat.S_IRWXO | stat.S_IWGRP):
            log.warning(
                "%s may be read or changed by others (mode %o): chmod 600 %s", self._path, stat.S_IMODE(mode),
                self._path, extra={"event": "users_exposed"},
            )  # fmt: skip
        users: dict[str, _Entry] = {}
        for number, line in enumerate(content.splitlines(), 1):
            if not line.strip() or line.lstrip().startswith(b"#"):
                continue
            try:
                entry = _entry(line)
                if entry.user.name in users:
                    raise ValueError("an earlier line has the same name")
                users[entry.user.name] = entry
            except (ValueError, lowq.ConfigError) as error:
                # Never the line itself: it may have a hash, or a password that somebody has put there.
                log.warning(
                    "line %d of %s is left out: %s", number, self._path, error, extra={"event": "users_bad_line"}
                )
        self._users = users
        if users:
            # What a stranger costs is what a user costs.
            first = next(iter(users.values())).password
            secret = secrets.token_hex(16)
            self._stranger = PasswordHash.of(secret, log_n=first.log_n, r=first.r, p=first.p)
        self.version += 1


def _entry(line: bytes) -> _Entry:
    try:
        name, *rest = line.decode().strip().split(":")
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8") from None
    if len(rest) not in (1, 2):
        raise ValueError("it is not name:hash or name:hash:role")
    role = rest[1] if len(rest) == 2 else "read"
    if role not in ("read", "admin"):
        raise ValueError("its role is neither read nor admin")
    try:
        check_name(name)
    except lowq.ConfigError:
        raise ValueError("its name is none that a user may have") from None
    return _Entry(PasswordHash.parse(rest[0]), User(name, "admin" if role == "admin" else "read"))
