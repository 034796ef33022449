"""Logging: loggers whose calls never raise, and the formats of nodes that the command line starts. The library logs
through stdlib logging and sets nothing up.

::

    text   2027-01-01 13:04:05.123+01:00 WARNING lowq.shards  Redis is back after 3.2 s
    json   {"time": "2027-01-01T12:04:05.123Z", "level": "WARNING", "logger": "lowq.shards",
            "message": "Redis is back after 3.2 s", "event": "recovery", "seconds": 3.2}

A process of a supervisor has its name in each line: ``WARNING [2.1] lowq.shards`` or ``"process": "2.1"``.
"""

import json
import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from traceback import walk_tb
from typing import Any, Literal, TextIO

LogFormat = Literal["text", "json"]

#: Characters of a value that `describe` shows.
_DESCRIBED = 1000
#: Bounds of a message, a traceback or a stack: a chain of exceptions may have megabytes, and occur every minute.
_MAX_LINES, _MAX_CHARACTERS = 200, 32_000
#: Characters of a line of JSON beyond which its fields are shortened.
_MAX_JSON = 4 * _MAX_CHARACTERS
#: Beginnings of the files of lowq, and of the standard library and installed packages.
_OURS = f"{Path(__file__).parent}{os.sep}"
_INSTALLED = re.compile(rf"<frozen |{re.escape(str(Path(os.__file__).parent))}|.*[/\\](site|dist)-packages[/\\]")


class Log(logging.LoggerAdapter[logging.Logger]):
    """A logger whose calls never raise, whatever an application's handlers, filters and values do: a log call must not
    decide the outcome of a job. A record that could not be logged goes to stderr.
    """

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """As `logging.Logger.log`. Only Ctrl-C gets through."""
        try:
            # Two frames up: the caller of `error`, `warning` ..., which call this.
            self.logger.log(level, msg, *args, stacklevel=2, **kwargs)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
                raise  # Ctrl-C, in the middle of it
            _complain(msg, args, error)


def get_log(name: str) -> Log:
    """The logger of a module."""
    return Log(logging.getLogger(name), None)


def flush() -> None:
    """Flushes the root logger's handlers."""
    for handler in logging.getLogger().handlers:
        try:
            handler.flush()
        except Exception as error:
            _complain("", (), error)


def _complain(message: object, args: tuple[object, ...], error: BaseException) -> None:
    try:
        if sys.stderr is not None:
            print(f"lowq could not log: {describe(error)}; it was: {message} {describe(args)}", file=sys.stderr)  # noqa: T201
    except BaseException:  # there may be no stderr, and no other place to report it
        pass


def describe(value: object, as_text: Callable[[object], str] = repr) -> str:
    """The repr of an application's value, shortened; its type, where that raises."""
    try:
        text = "".join((as_text(value),))  # a plain str, also of a subclass
    except BaseException:
        return f"<{type.__getattribute__(type(value), '__name__')}>"
    return text if len(text) <= _DESCRIBED else f"{text[:_DESCRIBED]}..."


def where(error: BaseException) -> str:
    """Where the application raised an error, as `` at /app/orders.py:17 in perform_one``: the innermost line outside of
    lowq, and of the standard library and installed packages, if there is one. Empty without a traceback.
    """
    try:
        lines = [(frame.f_code, line) for frame, line in walk_tb(error.__traceback__)]
        lines = [item for item in lines if not item[0].co_filename.startswith(_OURS)]
        code, line = ([item for item in lines if not _INSTALLED.match(item[0].co_filename)] or lines)[-1]
    except BaseException:  # there is no line, or the application's error raises when it is asked for its traceback
        return ""
    return f" at {code.co_filename}:{line} in {code.co_name}"


def shortened(text: str) -> str:
    """The text; of a long one the beginning and the end, with the number of characters left out between them."""
    if len(text) > _MAX_CHARACTERS or text.count("\n") >= _MAX_LINES:
        # Cut to characters first: it may be one long line.
        half = _MAX_CHARACTERS // 2
        head, tail = (text, text) if len(text) <= _MAX_CHARACTERS else (text[:half], text[-half:])
        head = "\n".join(head.split("\n", _MAX_LINES // 2)[: _MAX_LINES // 2])
        tail = "\n".join(tail.rsplit("\n", _MAX_LINES // 2)[-(_MAX_LINES // 2) :])
        return f"{head}\n... {len(text) - len(head) - len(tail)} characters left out ...\n{tail}"
    return text


#: The attributes of every record; others came with ``extra``.
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}

_DIM, _RESET = "\x1b[2m", "\x1b[0m"
_COLOURS = {logging.WARNING: "\x1b[33m", logging.ERROR: "\x1b[31m", logging.CRITICAL: "\x1b[1;31m"}


def configure(log_format: LogFormat | None, level: str | None, stream: TextIO | None = None) -> None:
    """Sets the root logger up for a node that was started from the command line.

    Call it after the application was loaded: its handlers stay, unless ``log_format`` is given. ``level``: a name such
    as "info", the default; if the application has set up handlers, the level of lowq's own loggers only.
    """
    root = logging.getLogger()
    if log_format is not None or not root.handlers:
        target = stream or sys.stderr
        handler = logging.StreamHandler(target)
        handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter(colours=_wants_colours(target)))
        for other in root.handlers[:]:
            root.removeHandler(other)
        root.addHandler(handler)
        root.setLevel((level or "info").upper())
        logging.captureWarnings(log_format == "json")
    if level is not None:
        logging.getLogger("lowq").setLevel(level.upper())


def _wants_colours(stream: TextIO) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def printable(text: str, keep: str = "") -> str:
    """The text with all control characters escaped, except those in ``keep``."""
    if text.isprintable():
        return text
    return "".join(
        char if char in keep or char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC), level, logger, message, the fields of ``extra``, exception, stack."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {
            "time": time.replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "message": _message(record),
        }
        if _is_named(record):
            line["process"] = record.processName
        trouble = dict(_trouble(self, record))
        for name, value in _extra(record):
            line[f"{name}_" if name in line or name in trouble else name] = value
        line |= trouble
        with suppress(Exception):
            text = json.dumps(line, default=str, allow_nan=False)
            if len(text) <= _MAX_JSON:
                return text
        # It is too long, or has keys that are no strings, NaN, a cycle, or a value whose __str__ raises: rather as text
        # than not at all.
        return json.dumps(
            {name: shortened(value) if isinstance(value, str) else describe(value) for name, value in line.items()}
        )


class TextFormatter(logging.Formatter):
    """Time, level, the process if it has a name, logger, message; then the fields of ``extra``, except those that are
    in a message of lowq's own already, as ``outcome`` is.

    The time is local, with its offset from UTC, as the application may change the zone. Texts from jobs can't send
    control characters to the terminal, nor look like a line of the log.
    """

    def __init__(self, *, colours: bool = False) -> None:
        super().__init__()
        self.colours = colours

    def format(self, record: logging.LogRecord) -> str:
        message = _message(record)
        extra = [f"{name}={describe(value)}" for name, value in _extra(record) if _adds(record, name, value, message)]
        time = datetime.fromtimestamp(record.created, UTC).astimezone().isoformat(" ", "milliseconds")
        level = f"{record.levelname:<7}"
        logger = record.name
        fields = printable("  " + " ".join(extra)) if extra else ""
        if self.colours:
            level = f"{_COLOURS.get(record.levelno, '')}{level}{_RESET}"
            logger, time = f"{_DIM}{logger}{_RESET}", f"{_DIM}{time}{_RESET}"
            fields = fields and f"{_DIM}{fields}{_RESET}"
        if _is_named(record):
            logger = f"[{record.processName}] {logger}"
        message = printable(message, keep="\n\t").replace("\n", "\n    ")
        parts = [f"{time} {level} {logger}  {message}{fields}"]
        parts += [printable(text, keep="\n\t") for text in dict(_trouble(self, record)).values()]
        return "\n".join(parts)


def _trouble(formatter: logging.Formatter, record: logging.LogRecord) -> Iterator[tuple[str, str]]:
    """The exception and the stack of a record, if it has any."""
    if record.exc_info and record.exc_info[0] is not None:
        try:
            yield "exception", shortened(formatter.formatException(record.exc_info))
        except Exception:  # an exception may raise when it is asked for its class
            yield "exception", describe(record.exc_info[1])
    elif record.exc_text:
        yield "exception", shortened(record.exc_text)
    if record.stack_info:
        yield "stack", shortened(formatter.formatStack(record.stack_info))


def _message(record: logging.LogRecord) -> str:
    try:
        return shortened(record.getMessage())
    except Exception:  # the arguments don't fit: show them as they are
        return f"{record.msg} {describe(record.args)}"


def _is_named(record: logging.LogRecord) -> bool:
    return record.processName not in (None, "MainProcess")


def _extra(record: logging.LogRecord) -> Iterator[tuple[str, Any]]:
    return ((name, value) for name, value in vars(record).items() if name not in _STANDARD)


def _adds(record: logging.LogRecord, name: str, value: Any, message: str) -> bool:
    """Whether to show a field. A message of lowq's own may have it already. In an application's message a number may
    mean anything: "1 change" is no ``delivery=1``.
    """
    if not f"{record.name}.".startswith("lowq."):
        return True
    return name not in ("event", "outcome") and describe(value).strip("'\"") not in message
