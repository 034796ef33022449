"""Actions of people, written into the audit log before they begin, and again with their outcome.

The log in Redis is bounded, so whoever may act can push old entries out of it. `logging` gets each entry as well.
"""

import contextlib
import json
import logging
from collections.abc import Mapping
from typing import Any

import lowq

log = logging.getLogger(__name__)
#: Gets every entry, at level INFO: one line of JSON, pure ASCII, with the fields of an `AuditEntry`.
audit_log = logging.getLogger("lowq_web.audit")


def say(who: str, action: str, target: str, count: int | None, detail: Mapping[str, Any]) -> None:
    """Writes an entry to `logging`. Never fails: no handler or filter of the application can prevent an action."""
    entry = {"who": who, "action": action, "target": target, "count": count, "detail": detail}
    with contextlib.suppress(Exception):  # a handler or filter of the application
        audit_log.info("%s", json.dumps(entry, default=str))


class Entry:
    """An entry of the audit log. Its outcome is "started" until the action ends; then a new entry replaces it. It stays
    "started" when Redis or this process dies in between.

    Raises:
        RedisUnavailable, RedisRefused: it can't be written, so the action must not begin.
    """

    def __init__(self, app: lowq.Lowq, who: str, action: str, target: str, detail: Mapping[str, Any]) -> None:
        self._app = app
        self._says = who, action, target
        self._detail = dict(detail)
        begun = {**self._detail, "outcome": "started"}
        self._token = app.note(*self._says, None, begun)
        say(*self._says, None, begun)  # not before: without the entry in Redis the action does not begin

    def ended(self, count: int | None, more: Mapping[str, Any]) -> None:
        """Replaces the entry by its outcome: the number of jobs, and details. Never fails: an error after the action
        was done would have it done twice.
        """
        detail = {**self._detail, **more}
        say(*self._says, count, detail)
        try:
            self._app.note(*self._says, count, detail, replaces=self._token)
        except lowq.LowqError as error:
            who, action, target = self._says
            log.warning("%s of %s by %s: how it ended could not be written to the log: %s", action, target, who, error)
