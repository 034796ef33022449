"""Wrong forms of `bury_on`, `release_on` and `retry_in` are refused where they are written, with the right one."""

from typing import Any

import pytest

import lowq
from lowq.errors import ConfigError
from lowq.settings import Config
from tests.rows import case

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"bury_on": ValueError}, r"bury_on=ValueError: write bury_on=\(ValueError,\), with the comma"),
    ({"bury_on": "ValueError"}, "bury_on='ValueError' is no tuple of exception classes"),
    ({"bury_on": (ValueError(),)}, r"bury_on: ValueError\(\) is no exception class"),
    ({"bury_on": (SystemExit,)}, r"bury_on: SystemExit stops the process.*name subclasses of Exception, or lowq.TimeL"),
    ({"release_on": (ValueError,)}, "release_on=.* is no mapping of exception classes to seconds; write release_on="),
    ({"release_on": {"x": 3}}, r"release_on: 'x' is no exception class; write release_on=\{TimeoutError: 30\}"),
    ({"release_on": {KeyboardInterrupt: 3}}, "release_on: KeyboardInterrupt stops the process"),
    *(({"release_on": {ValueError: delay}}, "release_on={ValueError: .*}: the delay must be seconds")
      for delay in (0, "30", True, float("nan"), 1e300)),
    ({"bury_on": (KeyError, ValueError), "release_on": {ValueError: 5}}, "ValueError is in bury_on and in release_on"),
]  # fmt: skip


def test_what_makes_no_sense_is_refused_in_a_setting_in_a_decorator_and_in_a_class() -> None:
    for options, message in WRONG:
        app = lowq.Lowq(redis_url="memory://")
        made: Any = type("Sync", (lowq.Worker,), {"perform": lambda _self, _payloads_by_id: None})
        with case(options, message):
            with pytest.raises(ConfigError, match=f"^{message}"):
                Config(**options)
            with pytest.raises(ConfigError, match=f"^Sync: {message}"):
                app.worker(**options)(made)
            with pytest.raises(ConfigError, match=f"^Derived: {message}"):
                app.worker(type("Derived", (made,), options))
            assert app.workers == {}


async def in_a_while(self: Any, retry_count: int) -> float:
    return 1


def step_by_step(self: Any, retry_count: int) -> Any:
    yield 1


def test_a_wrong_retry_in_is_refused() -> None:
    app = lowq.Lowq(redis_url="memory://")
    write = r"write def retry_in\(self, retry_count, error\)"
    rows: list[tuple[Any, str]] = [
        (in_a_while, r"retry_in must return a number of seconds at once; write a plain def retry_in\(self, re"),
        (step_by_step, "retry_in must return a number of seconds at once"),
        (lambda _self: 1, rf"retry_in\(_self\): {write}, or without"),
        (lambda _self, _retry_count, _error, _more: 1, rf"retry_in\(_self.*more.*: {write}"),
    ]
    for retry_in, message in rows:
        sync = type("Sync", (), {"perform": lambda _self, _payloads_by_id: None, "retry_in": retry_in})
        with case(retry_in), pytest.raises(ConfigError, match=rf"Sync\.{message}"):
            app.worker(sync)
    values: list[Any] = ["5", lambda: 5, lambda _a, _b, _c: 5]
    for value in values:
        with case(value), pytest.raises(ConfigError, match=r"retry_in.*write def retry_in\(retry_count, error\)"):
            Config(retry_in=value)
