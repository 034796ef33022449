"""The log of what people did: who, what, to how many. Bounded; the dashboard writes it, everybody may read it."""

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lowq.backend import Backend
from lowq.store import untrusted
from lowq.store.keys import audit_key

#: Entries that are kept.
KEPT = 1000
#: Characters of a text in an entry.
MAX_TEXT = 300


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """Something that somebody did."""

    #: Unix time, seconds, by the server's clock.
    at: float
    who: str
    #: For example "kick", "pause", "stop".
    action: str
    #: The queue or the node that it was done to.
    target: str
    #: To how many jobs; None where that makes no sense.
    count: int | None = None
    #: The rest, such as the filter that the jobs had to match.
    detail: Mapping[str, Any] = field(default_factory=dict)


def note(
    backend: Backend,
    who: str,
    action: str,
    target: str,
    count: int | None = None,
    detail: Mapping[str, Any] | None = None,
    *,
    replaces: str = "",
) -> str:
    """Writes an entry into the log of what people did; long texts are cut. Returns its token: an entry that
    ``replaces`` it takes its place, as the newest one. It is a method of `Lowq`, too.

    Raises:
        RedisUnavailable, RedisRefused
    """
    entry = {"who": who, "action": action, "target": target, "count": count, "detail": dict(detail or {})}
    token = secrets.token_hex(8)
    text = json.dumps({**_cut(entry), "token": token})
    backend.client.run("audit_append", audit_key(backend.config.namespace), "", text, KEPT, replaces)
    return token


def _cut(value: Any) -> Any:
    if isinstance(value, str):
        return value if len(value) <= MAX_TEXT else value[: MAX_TEXT - 1] + "…"
    if isinstance(value, Mapping):
        return {str(name)[:MAX_TEXT]: _cut(item) for name, item in list(value.items())[:20]}
    if isinstance(value, list | tuple):
        return [_cut(item) for item in value[:5]]
    return value if isinstance(value, int | float | bool | None) else _cut(str(value))


def entries(backend: Backend, limit: int = 100) -> list[AuditEntry]:
    """The latest entries, newest first.

    Raises:
        RedisUnavailable, RedisRefused
    """
    key = audit_key(backend.config.namespace)
    raw = backend.client.command("LRANGE", key, 0, max(min(limit, KEPT), 1) - 1, key=key)
    return [entry for entry in map(_entry, raw) if entry is not None]


def _entry(raw: bytes) -> AuditEntry | None:
    head, _, said = raw.partition(b" ")
    at, says = untrusted.finite(head), untrusted.json_object(said) or {}
    who, action, target = (untrusted.text(says.get(name)) for name in ("who", "action", "target"))
    if at is None or who is None or action is None or target is None:
        untrusted.log_skipped("audit", raw[:100], "it is no entry of ours")
        return None
    detail = says.get("detail")
    return AuditEntry(
        at,
        who,
        action,
        target,
        untrusted.whole(says.get("count"), 0),
        untrusted.plain(detail) if isinstance(detail, dict) else {},
    )
