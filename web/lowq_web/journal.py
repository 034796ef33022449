"""Actions of people, written into the audit log before they begin, and again with their outcome.

The log in Redis is bounded, so whoever may act can push old entries out of it. `logging` gets each entry as well.
"""

import contextlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import lowq
from lowq.operate.audit import ActionRecord

#: Gets every entry, at level INFO: one line of JSON, pure ASCII, with the fields of an `AuditEntry`.
audit_log = logging.getLogger("lowq_web.audit")


@dataclass(frozen=True, slots=True)
class Actor:
    """Who does something, and from where."""

    name: str
    #: None: not known.
    address: str | None = None


def log_entry(who: Actor, action: str, target: str, count: int | None, detail: Mapping[str, Any]) -> None:
    """Writes an entry to `logging`. Never fails: no handler or filter of the application can prevent an action."""
    entry = {"who": who.name, "action": action, "target": target, "count": count, "detail": detail}
    entry["address"] = who.address
    with contextlib.suppress(Exception):  # a handler or filter of the application
        audit_log.info("%s", json.dumps(entry, default=str))


class Entry(ActionRecord):
    """An entry of the audit log, in Redis and in `logging`.

    Raises:
        RedisUnavailable, RedisRefused: it can't be written, so the action must not begin.
    """

    def __init__(self, app: lowq.Lowq, who: Actor, action: str, target: str, detail: Mapping[str, Any]) -> None:
        super().__init__(app, who.name, action, target, detail, address=who.address)
        self._says = who, action, target
        # Not before: without the entry in Redis the action does not begin.
        log_entry(*self._says, None, {**detail, "outcome": "started"})

    def end(self) -> None:
        """Replaces the entry by its outcome. Never fails."""
        log_entry(*self._says, self.count, self.detail)
        super().end()
