"""Notices: a message about the action that was just done, or could not be, shown once.

The page that a form redirects to shows it, and no other: neither a reload nor a bookmark shows it again, and a made-up
address shows nothing. It is kept in the memory of this process; when another one answers, only the notice is missing.
"""

import secrets
import threading
from dataclasses import dataclass

#: Notices that wait to be shown. Browsers fetch theirs at once; older ones are dropped.
MAX_WAITING = 200


@dataclass(frozen=True, slots=True)
class Notice:
    """A sentence for the user who sent the form."""

    text: str
    #: Nothing was done.
    form_error: bool = False


class Notices:
    """Safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[str, Notice] = {}

    def leave(self, notice: Notice) -> str:
        """Keeps it until it is taken; returns the name to take it by, which nobody can guess."""
        name = secrets.token_urlsafe(9)
        with self._lock:
            self._waiting[name] = notice
            if len(self._waiting) > MAX_WAITING:
                del self._waiting[next(iter(self._waiting))]
        return name

    def take(self, name: str) -> Notice | None:
        """The notice of that name, once."""
        with self._lock:
            return self._waiting.pop(name, None)
