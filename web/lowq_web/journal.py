"""What people do, written into the log before it is done, and once more when it is known what became of it.

The log in Redis is bounded, so that whoever may act can roll it out. `logging` is told each entry as well.
"""

import contextlib
import json
import logging
from collections.abc import Mapping
from typing import Any

import lowq

log = logging.getLogger(__name__)
#: Is told every entry, at level INFO: one line of JSON, pure ASCII, with the fields of an `AuditEntry`.
told = logging.getLogger("lowq_web.audit")


def say(who: str, action: str, target: str, count: int | None, detail: Mapping[str, Any]) -> None:
    """An entry, to `logging`. Never fails: what is to be done, or was, does not depend on who is told of it."""
    entry = {"who": who, "action": action, "target": target, "count": count, "detail": detail}
    with contextlib.suppress(Exception):  # a handler or filter of the application
        told.info("%s", json.dumps(entry, default=str))


class Entry:
    """A line of the log. While something is being done it says "started", and so it stays if we don't come to say how
    it ended: Redis went away, or this process did. Then it replaces itself.

    Raises:
        RedisUnavailable, RedisRefused: it can't be written, so nothing may be done.
    """

    def __init__(self, app: lowq.Lowq, who: str, action: str, target: str, detail: Mapping[str, Any]) -> None:
        self._app = app
        self._says = who, action, target
        self._detail = dict(detail)
        begun = {**self._detail, "outcome": "started"}
        self._token = app.note(*self._says, None, begun)
        say(*self._says, None, begun)  # not before: without the entry in Redis nothing is done

    def ended(self, count: int | None, more: Mapping[str, Any]) -> None:
        """To how many jobs it was done, and what else there is to say. Never fails: to say that what was done has
        failed would have it done twice.
        """
        detail = {**self._detail, **more}
        say(*self._says, count, detail)
        try:
            self._app.note(*self._says, count, detail, replaces=self._token)
        except lowq.LowqError as error:
            who, action, target = self._says
            log.warning("%s of %s by %s: how it ended could not be written to the log: %s", action, target, who, error)
