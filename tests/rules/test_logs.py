"""Logging of the command line's node: formats, and whose handlers stay."""

import io
import json
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import tzset
from typing import Any

import pytest

import lowq
from lowq.logs import JsonFormatter, TextFormatter, configure, printable, where
from tests.rows import case


def record(message: str = "hello %s", *args: Any, **extra: Any) -> logging.LogRecord:
    item = logging.LogRecord("lowq.node", logging.INFO, "node.py", 1, message, args or ("you",), None)
    item.created = 1_800_000_000.25
    for name, value in extra.items():
        setattr(item, name, value)
    return item


def failed(message: str = "it failed: %s") -> logging.LogRecord:
    item = record(message, "why", levelname="ERROR")
    try:
        raise ValueError("no such \x1b[31morder")
    except ValueError as error:
        item.exc_info = (ValueError, error, error.__traceback__)
    return item


# --- json ---


def as_json(item: logging.LogRecord) -> dict[str, Any]:
    line = JsonFormatter().format(item)
    assert "\n" not in line
    document: dict[str, Any] = json.loads(line)
    return document


def test_json_lines_have_time_level_logger_message_process_and_extra() -> None:
    item = record(event="start", queue="Orders", shard=3, node="h:1:abc", level="high")
    assert as_json(item) == {
        "time": "2027-01-15T08:00:00.250Z", "level": "INFO", "logger": "lowq.node", "message": "hello you",
        "event": "start", "queue": "Orders", "shard": 3, "node": "h:1:abc", "level_": "high",
    }  # fmt: skip
    item.processName = "2.1"
    assert as_json(item)["process"] == "2.1"
    line = as_json(failed())
    assert line["message"] == "it failed: why"
    assert line["exception"].startswith("Traceback (most recent call last)")
    assert line["exception"].endswith("ValueError: no such \x1b[31morder")


def test_json_survives_what_is_no_json() -> None:
    endless: list[Any] = []
    endless.append(endless)
    assert as_json(record(thing=object, nan=float("nan")))["nan"] == "nan"
    assert as_json(record(endless=endless))["endless"] == "[[...]]"
    assert as_json(record("two %s %s", "one"))["message"] == "two %s %s ('one',)"
    assert "stack" in as_json(record(stack_info="Stack:\n  here"))


def test_an_exception_that_can_not_be_shown_is_named() -> None:
    def raises(_: object) -> Any:
        raise RuntimeError("no class")

    item, error = record(), type("NoClass", (Exception,), {"__class__": property(raises)})()
    item.exc_info = (type(error), error, None)
    assert as_json(item)["exception"] == "NoClass()"
    assert TextFormatter().format(item).endswith("\nNoClass()")


def test_the_place_of_an_error_is_the_innermost_line_of_the_application() -> None:
    class Hostile(Exception):
        __traceback__ = property(lambda _: 1 / 0)

    def lowqs_own() -> object:
        return lowq.Lowq(redis_url="unheard://of").queue("Orders", 5).stats()

    rows: list[tuple[Callable[[], object], str]] = [
        (lambda: int("nope"), r" at .*test_logs\.py:\d+ in <lambda>"),
        (lambda: json.loads("{"), r" at .*test_logs\.py:\d+ in <lambda>"),
        (lowqs_own, r" at .*test_logs\.py:\d+ in lowqs_own"),
        (lambda: exec(compile("1 / 0", "/x/site-packages/shop.py", "exec")), r" at .*test_logs\.py:\d+ in <lambda>"),
    ]
    for raises, place in rows:
        with case(place):
            with pytest.raises(Exception) as raised:  # noqa: PT011 - any
                raises()
            assert re.fullmatch(place, where(raised.value))
    assert (where(KeyError("never raised")), where(Hostile())) == ("", "")


# --- text ---


def test_text_lines_show_the_process_and_extra_that_the_message_does_not_tell() -> None:
    item = record("Orders:%d is late", 3, event="late", queue="Orders", seconds=7)
    assert TextFormatter().format(item).endswith(" INFO    lowq.node  Orders:3 is late  seconds=7")
    told = record("id 1: attempt 2 of 26", event="failed", outcome=[("1", "retry", 0, 21.4)])
    told.args = ()
    assert TextFormatter().format(told).endswith("id 1: attempt 2 of 26")
    item.processName = "2.1"
    assert " INFO    [2.1] lowq.node  Orders:3" in TextFormatter().format(item)
    item.name = "shop"  # an application's
    assert TextFormatter().format(item).endswith("Orders:3 is late  event='late' queue='Orders' seconds=7")
    assert "\x1b[31mERROR  \x1b[0m" in TextFormatter(colours=True).format(
        record(levelname="ERROR", levelno=logging.ERROR)
    )


def test_text_lines_have_the_date_and_the_zone_that_their_time_is_told_in(monkeypatch: pytest.MonkeyPatch) -> None:
    formatter = TextFormatter()
    for zone, time in (("UTC", "2027-01-15 08:00:00.250+00:00"), ("XST-5:30", "2027-01-15 13:30:00.250+05:30")):
        with monkeypatch.context() as environment:
            environment.setenv("TZ", zone)
            tzset()
            assert formatter.format(record()).startswith(f"{time} INFO ")
    tzset()


def test_what_comes_from_jobs_can_neither_drive_the_terminal_nor_forge_a_line() -> None:
    line = TextFormatter().format(record("ids %s", "a\x1b[2J\n10:00:00 INFO all is well", id="\x07"))
    first, second = line.split("\n")
    assert first.endswith("ids a\\x1b[2J")
    assert second.startswith("    10:00:00")
    text = TextFormatter().format(failed())
    assert "\x1b" not in text
    assert text.splitlines()[-1] == "ValueError: no such \\x1b[31morder"
    assert printable("Größe 価格 42") == "Größe 価格 42"
    assert printable("a\tb\n\u202e\udcff\x9b") == "a\\tb\\n\\u202e\\udcff\\x9b"
    assert printable("a\tb\x00", keep="\t") == "a\tb\\x00"


def chained(count: int) -> BaseException:
    """A failure at the end of so many, each of which came from the one before."""
    error: BaseException = ValueError("the first")
    for number in range(count):
        try:
            raise ValueError(f"number {number}") from error
        except ValueError as raised:
            error = raised
    return error


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()])
def test_a_record_is_bounded_and_keeps_its_beginning_and_its_end(formatter: logging.Formatter) -> None:
    long = "first " + "x" * 1_000_000 + " last"
    chain, wide = chained(5000), ValueError(long)
    for name, item, kept in (
        ("message", record("%s", long), ("first x", "x last")),
        ("lines", record("%s", "first" + "\nx" * 100_000 + "last"), ("first", "xlast")),
        ("chain", record(exc_info=(ValueError, chain, chain.__traceback__)), ("the first", "number 4999")),
        ("error", record(exc_info=(ValueError, wide, None)), ("first x", "x last")),
        ("text", record(exc_text=long), ("first x", "x last")),
        ("stack", record(stack_info=long), ("first x", "x last")),
        ("field", record(field=[long]), ("first x",)),
    ):
        line = formatter.format(item)
        assert len(line) < 50_000, name
        assert line.count("\n") + line.count("\\n") < 210, name
        assert [text for text in kept if text not in line] == [], name
    short = "x\n" * 150
    assert short in TextFormatter().format(record(exc_text=short))


# --- set-up ---


@contextmanager
def fresh_root(*handlers: logging.Handler) -> Iterator[logging.Logger]:
    """The root logger as in a fresh process; no fixture, as pytest adds handlers of its own after those."""
    logger, ours = logging.getLogger(), logging.getLogger("lowq")
    before = logger.handlers[:], logger.level, ours.level
    logger.handlers[:] = handlers
    logger.setLevel(logging.WARNING)
    try:
        yield logger
    finally:
        logger.handlers[:], level, ours_level = before
        logger.setLevel(level)
        ours.setLevel(ours_level)


def test_without_handlers_of_the_application_text_of_level_info_goes_to_the_stream() -> None:
    with fresh_root():
        stream = io.StringIO()
        configure(None, None, stream)
        logging.getLogger("lowq.node").info("starts")
        logging.getLogger("lowq.node").debug("not shown")
        assert stream.getvalue().endswith("INFO    lowq.node  starts\n")
        assert stream.getvalue().count("\n") == 1
    with fresh_root():
        stream = io.StringIO()
        configure("json", "debug", stream)
        logging.getLogger("lowq.shards").debug("taken", extra={"event": "taken"})
        assert json.loads(stream.getvalue())["event"] == "taken"


def test_handlers_and_the_level_of_the_application_stay_unless_a_format_is_asked_for() -> None:
    own = logging.NullHandler()
    with fresh_root(own) as root:
        configure(None, None, io.StringIO())
        assert (root.handlers, root.level) == ([own], logging.WARNING)
        configure(None, "debug", io.StringIO())
        assert (root.handlers, root.level) == ([own], logging.WARNING)
        assert logging.getLogger("lowq").level == logging.DEBUG
        stream = io.StringIO()
        configure("json", None, stream)
        assert len(root.handlers) == 1
        logging.getLogger("theirs").info("once")
        assert json.loads(stream.getvalue())["logger"] == "theirs"
