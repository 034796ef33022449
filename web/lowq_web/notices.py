"""Notices: a message about the action that was just done, or could not be, shown once.

The page that a form redirects to shows it, and no other: neither a reload nor a bookmark shows it again, and a made-up
address shows nothing. It is kept in Redis, as another process may answer the next request. Without Redis only the
notice is missing.
"""

import contextlib
import json
from dataclasses import dataclass

import lowq
from lowq.store import untrusted
from lowq.store.keys import notices_key
from lowq_web.token_store import TokenStore

#: Notices that wait to be shown. Browsers fetch theirs at once; older ones are dropped.
MAX_WAITING = 200
#: Seconds after the latest one until all are dropped.
TTL = 300
#: Characters of a notice; more are cut off.
MAX_TEXT = 1000


@dataclass(frozen=True, slots=True)
class Notice:
    """A sentence for the user who sent the form."""

    text: str
    #: Nothing was done.
    form_error: bool = False


class Notices:
    """Safe for threads, and not for an event loop: Redis is asked."""

    def __init__(self, app: lowq.Lowq) -> None:
        self._kept = TokenStore(app, notices_key(app.config.namespace), MAX_WAITING, TTL)

    def leave(self, notice: Notice) -> str:
        """Keeps it until it is taken; returns the name to take it by, which nobody can guess; empty when it could not
        be kept: what it is about was done all the same.
        """
        said = json.dumps({"text": notice.text[:MAX_TEXT], "form_error": notice.form_error})
        with contextlib.suppress(lowq.LowqError):
            return self._kept.leave(said.encode())
        return ""

    def take(self, name: str) -> Notice | None:
        """The notice of that name, once. Redis is asked only for a name."""
        raw = None
        with contextlib.suppress(lowq.LowqError):
            raw = self._kept.take(name)
        says = untrusted.json_object(raw) if raw is not None else None
        text = untrusted.text(says.get("text")) if says is not None else None
        return None if says is None or text is None else Notice(text, says.get("form_error") is True)
