"""What the command line changes, in the log of what people did: who is user@host, and the address is "cli"."""

import getpass
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from lowq.application import Lowq
from lowq.errors import LowqError
from lowq.operate.audit import CLI, ActionRecord


@dataclass(slots=True)
class Outcome:
    """How it ended."""

    #: Jobs that it was done to.
    count: int | None = None
    detail: dict[str, Any] = field(default_factory=dict)


def me() -> str:
    """Who does it, as far as the operating system knows."""
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (KeyError, OSError):
        return socket.gethostname()


@contextmanager
def audited(app: Lowq, action: str, target: str, detail: Mapping[str, Any] | None = None) -> Iterator[Outcome]:
    """Writes the action of the block into the audit log: before it begins, and how it ended. The library writes none,
    so a verb that changes anything does it here.

    Raises:
        RedisUnavailable, RedisRefused: it can't be written; nothing was done.
    """
    given = {name: value for name, value in (detail or {}).items() if value not in (None, "", [])}
    record, outcome = ActionRecord(app, me(), action, target, given, address=CLI), Outcome()
    try:
        yield outcome
    except LowqError as error:
        record.ended(error.done or outcome.count, {**given, "outcome": "failed", "error": str(error)})
        raise
    except KeyboardInterrupt:
        record.ended(outcome.count, {**given, **outcome.detail, "outcome": "interrupted"})
        raise
    except BaseException as error:
        record.ended(outcome.count, {**given, **outcome.detail, "outcome": "failed", "error": type(error).__name__})
        raise
    record.ended(outcome.count, {**given, **outcome.detail})
