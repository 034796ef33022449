"""The audit log: who did what, from where, to how many jobs. Bounded. The dashboard and the command line write it, and
everybody may read it. Actions of programs through the library are not in it.
"""

import json
import logging
import math
import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from lowq.backend import Backend
from lowq.errors import ConfigError, LowqError
from lowq.store import registry, untrusted
from lowq.store.keys import audit_key

log = logging.getLogger(__name__)
#: Entries that are kept.
KEPT = 1000
#: Characters of a text in an entry.
MAX_TEXT = 300
#: The address in entries of the command line.
CLI = "cli"
#: Entries that are read with one command.
_TOGETHER = 200
_TOKEN = re.compile("[0-9a-f]{1,32}")


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """An action of a person."""

    #: Unix time, seconds, by the server's clock.
    at: float
    who: str
    #: For example "kick", "pause", "stop".
    action: str
    #: The queue or the node that it was done to.
    target: str
    #: Jobs that it was done to; None where that makes no sense.
    count: int | None = None
    #: The rest, such as the filter of the jobs.
    detail: Mapping[str, Any] = field(default_factory=dict)
    #: The address of the browser, or "cli" for the command line. None: not known.
    address: str | None = None
    #: For ``after``: asks for older entries.
    cursor: str = ""


def note(
    backend: Backend,
    who: str,
    action: str,
    target: str,
    count: int | None = None,
    detail: Mapping[str, Any] | None = None,
    *,
    replaces: str = "",
    address: str | None = None,
) -> str:
    """Writes an entry into the audit log; long texts are cut. Returns its token: an entry that ``replaces`` it takes
    its place, as the newest one. It is a method of `Lowq`, too.

    Raises:
        RedisUnavailable, RedisRefused
    """
    entry = {"who": who, "action": action, "target": target, "count": count, "detail": dict(detail or {})}
    if address is not None:
        entry["address"] = address
    token = secrets.token_hex(8)
    text = json.dumps({**_cut(entry), "token": token})
    backend.client.call(registry.audit_append(audit_key(backend.config.namespace), text, KEPT, replaces))
    return token


class ActionRecord:
    """The entry of an action, for the block that does it. Its outcome is "started" until the action ends, and a new
    entry replaces it. It stays "started" if Redis or this process dies in between.

    Raises:
        RedisUnavailable, RedisRefused: it can't be written, so the action must not begin.
    """

    def __init__(
        self,
        backend: Backend,
        who: str,
        action: str,
        target: str,
        detail: Mapping[str, Any],
        *,
        address: str | None = None,
    ) -> None:
        self._backend = backend
        self._action = who, action, target
        self._address = address
        #: Jobs that it was done to; and the details, to which it may add.
        self.count: int | None = None
        self.detail = dict(detail)
        self._token = note(backend, *self._action, None, {**detail, "outcome": "started"}, address=address)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if isinstance(error, LowqError):
            self.count = error.done or self.count
            self.detail |= {"outcome": "failed", "error": str(error)}
        elif isinstance(error, KeyboardInterrupt):
            self.detail |= {"outcome": "interrupted"}
        elif error is not None:
            self.detail |= {"outcome": "failed", "error": type(error).__name__}
        self.end()

    def end(self) -> None:
        """Replaces the entry by its outcome. Never fails: on an error after the action, people would do it twice."""
        try:
            note(self._backend, *self._action, self.count, self.detail, replaces=self._token, address=self._address)
        except LowqError as error:
            who, action, target = self._action
            log.warning("%s of %s by %s: how it ended could not be written to the log: %s", action, target, who, error)


def _cut(value: Any) -> Any:
    if isinstance(value, str):
        return value if len(value) <= MAX_TEXT else value[: MAX_TEXT - 1] + "…"
    if isinstance(value, Mapping):
        return {str(name)[:MAX_TEXT]: _cut(item) for name, item in list(value.items())[:20]}
    if isinstance(value, list | tuple):
        return [_cut(item) for item in value[:5]]
    return value if isinstance(value, int | float | bool | None) else _cut(str(value))


def entries(
    backend: Backend,
    limit: int = 100,
    *,
    who: str | None = None,
    action: str | None = None,
    target: str | None = None,
    since: float | None = None,
    until: float | None = None,
    after: str | None = None,
) -> list[AuditEntry]:
    """The latest entries, newest first. ``who``: a part of the name, in any case; ``action`` and ``target`` (a queue or
    a node): exactly this; ``since``, ``until``: Unix time, seconds, both included; ``after``: the cursor of an entry,
    for older ones.

    Raises:
        ConfigError: the cursor is malformed. RedisUnavailable, RedisRefused
    """
    wanted = max(min(limit, KEPT), 1)
    moment = math.inf if after is None else untrusted.finite(after.rpartition("-")[0])
    if moment is None:
        raise ConfigError(f"after={after!r:.50} is no cursor of an entry")
    found: list[AuditEntry] = []
    passed = False
    for entry in _all(backend):
        # Behind the entry with the cursor; if that is gone, before its time.
        is_older = passed or entry.at < moment
        passed = passed or entry.cursor == after
        if (
            is_older
            and (since is None or entry.at >= since)  # not the end: the server's clock may have stepped back
            and (until is None or entry.at <= until)
            and (who is None or who.casefold() in entry.who.casefold())
            and (action is None or entry.action == action)
            and (target is None or entry.target == target)
        ):
            found.append(entry)
            if len(found) == wanted:
                break
    return found


def _all(backend: Backend) -> Iterator[AuditEntry]:
    key = audit_key(backend.config.namespace)
    seen: set[bytes] = set()
    for first in range(0, KEPT, _TOGETHER):
        raw = backend.client.command("LRANGE", key, first, first + _TOGETHER - 1, key=key)
        for item in raw:
            # Entries that were written meanwhile have moved the others.
            if item not in seen and (entry := _entry(item)) is not None:
                yield entry
        seen.update(raw)
        if len(raw) < _TOGETHER:
            return


def _entry(raw: bytes) -> AuditEntry | None:
    head, _, text = raw.partition(b" ")
    at, fields = untrusted.finite(head), untrusted.json_object(text) or {}
    who, action, target = (untrusted.text(fields.get(name)) for name in ("who", "action", "target"))
    if at is None or who is None or action is None or target is None:
        untrusted.log_skipped("audit", raw[:100], "it is no entry of ours")
        return None
    detail, token = fields.get("detail"), untrusted.text(fields.get("token")) or ""
    detail = untrusted.plain(detail) if isinstance(detail, dict) else {}
    cursor = f"{at:.6f}-{token if _TOKEN.fullmatch(token) else ''}"
    count, address = untrusted.whole(fields.get("count"), 0), untrusted.text(fields.get("address"))
    return AuditEntry(at, who, action, target, count, detail, address, cursor)
