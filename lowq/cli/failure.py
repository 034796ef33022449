"""How a command ends when it can't do what it was asked for: one line, and an exit code."""

from typing import IO, Any

import click

from lowq.errors import (
    START_REDIS,
    ConfigError,
    JobError,
    LowqError,
    RedisUnavailable,
    ShardsCountError,
    UnknownQueueError,
)
from lowq.logs import printable

#: Something failed.
FAILED = 1
#: What was typed makes no sense; the message says what to type instead.
USAGE = 2
#: Ended by Ctrl-C.
INTERRUPTED = 130


class Failure(click.ClickException):
    """Ends the command with ``lowq: message`` on stderr.

    ``passing``: trying again later may well help. ``trace``: where in the user's code it went wrong, shown before that.
    """

    def __init__(self, message: str, exit_code: int = FAILED, *, passing: bool = False, trace: str = "") -> None:
        super().__init__(message)
        self.passing = passing
        self.trace = trace
        self.exit_code = exit_code  # type: ignore[misc]  # click declares it for the class, and reads it here

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(self.trace, file=file, err=file is None, nl=False)
        click.echo(f"lowq: {printable(self.format_message())}", file=file, err=file is None)


def failure_of(error: LowqError) -> Failure:
    """What lowq raises is for people to read; a traceback would only hide it."""
    typed = isinstance(error, UnknownQueueError | ConfigError | JobError) and not isinstance(error, ShardsCountError)
    return Failure(message_of(error), USAGE if typed else FAILED)


def message_of(error: LowqError, or_else: str = "") -> str:
    """What went wrong; where nothing listens, also what to do about it. ``or_else``: one way more."""
    if isinstance(error, RedisUnavailable) and "does not answer" in str(error):
        reason = str(error).removesuffix(f"; {START_REDIS.format('redis_url')}").rstrip(".")
        return f"{reason}; {START_REDIS.format('--redis-url')}{or_else}"
    return str(error)
