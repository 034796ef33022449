"""Wrong forms of `bury_on`, `release_on` and `retry_in` are refused where they are written, with the right one."""

from typing import Any

import pytest

import lowq
from lowq.errors import ConfigError
from lowq.settings import Config
from tests.rows import case


@pytest.fixture
def app() -> lowq.Lowq:
    return lowq.Lowq(redis_url="memory://")


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"bury_on": ValueError}, r"bury_on=ValueError: write bury_on=\(ValueError,\), with the comma"),
    (
        {"bury_on": "ValueError"},
        r"bury_on='ValueError' is no tuple of exception classes; write bury_on=\(ValueError, K",
    ),
    ({"bury_on": {ValueError}}, r"bury_on=\{.*ValueError.*\} is no tuple of exception classes"),
    ({"bury_on": ("ValueError",)}, r"bury_on: 'ValueError' is no exception class; write bury_on=\(ValueError, KeyErr"),
    ({"bury_on": (ValueError(),)}, r"bury_on: ValueError\(\) is no exception class"),
    ({"bury_on": (int,)}, r"bury_on: <class 'int'> is no exception class"),
    ({"bury_on": (SystemExit,)}, r"bury_on: SystemExit stops the process.*name subclasses of Exception, or lowq.TimeL"),
    ({"release_on": (ValueError,)}, r"release_on=.* is no mapping of exception classes to seconds; write release_on="),
    ({"release_on": ValueError}, r"release_on=.* is no mapping of exception classes to seconds"),
    ({"release_on": {"x": 3}}, r"release_on: 'x' is no exception class; write release_on=\{TimeoutError: 30\}"),
    ({"release_on": {KeyboardInterrupt: 3}}, r"release_on: KeyboardInterrupt stops the process"),
    ({"release_on": {ValueError: 0}}, r"release_on=\{ValueError: 0\}: the delay must be seconds.* more than 0"),
    ({"release_on": {ValueError: "30"}}, r"release_on=\{ValueError: '30'\}: the delay must be seconds"),
    ({"release_on": {ValueError: True}}, r"release_on=\{ValueError: True\}: the delay must be seconds"),
    ({"release_on": {ValueError: None}}, r"release_on=\{ValueError: None\}: the delay must be seconds"),
    ({"release_on": {ValueError: float("nan")}}, r"release_on=\{ValueError: nan\}: the delay must be seconds"),
    ({"release_on": {ValueError: 1e300}}, r"release_on=\{ValueError: 1e\+300\}: the delay must be .* under 272 years"),
    (
        {"bury_on": (KeyError, ValueError), "release_on": {ValueError: 5}},
        "ValueError is in bury_on and in release_on; leave it in the one that is meant",
    ),
]


def test_a_wrong_option_is_refused_at_decoration(app: lowq.Lowq) -> None:
    for options, message in WRONG:
        with case(options, message):
            with pytest.raises(ConfigError, match=f"^sync: {message}"):

                @app.worker(**options)
                def sync(payloads_by_id: dict[str, list[Any]]) -> None: ...

            assert app.workers == {}


def test_a_wrong_setting_is_refused_when_it_is_set() -> None:
    for options, message in WRONG:
        with case(options, message), pytest.raises(ConfigError, match=f"^{message}"):
            Config(**options)


def test_an_attribute_of_the_class_is_checked_as_well(app: lowq.Lowq) -> None:
    class Sync(lowq.Worker[Any]):
        bury_on = (int,)  # type: ignore[assignment]  # it is wrong

        def perform(self, payloads_by_id: dict[str, list[Any]]) -> None: ...

    with pytest.raises(ConfigError, match=r"^Sync: bury_on: <class 'int'> is no exception class"):
        app.worker(Sync)


def test_a_wrong_retry_in_of_an_application_is_refused() -> None:
    values: list[Any] = [5, "soon", lambda: 5, lambda _a, _b, _c: 5]
    for value in values:
        with case(value), pytest.raises(ConfigError, match=r"retry_in.*write def retry_in\(retry_count, error\)"):
            Config(retry_in=value)


async def in_a_while(self: Any, retry_count: int) -> float:
    return 1


def step_by_step(self: Any, retry_count: int) -> Any:
    yield 1


def of_none(self: Any) -> float:
    return 1


def of_three(self: Any, retry_count: int, error: Any, more: int) -> float:
    return 1


def test_a_wrong_retry_in_is_refused_at_decoration(app: lowq.Lowq) -> None:
    write = r"write def retry_in\(self, retry_count, error\)"
    rows: list[tuple[Any, str]] = [
        (in_a_while, r"retry_in must return a number of seconds at once; write a plain def retry_in\(self, re"),
        (step_by_step, "retry_in must return a number of seconds at once"),
        (of_none, rf"retry_in\(self.*\) -> float: {write}, or without"),
        (of_three, rf"retry_in\(self.*more.*: {write}"),
        (30, f"retry_in=30 is no function; {write}"),
    ]
    for retry_in, message in rows:
        sync = type("Sync", (), {"perform": lambda _self, _payloads_by_id: None, "retry_in": retry_in})
        with case(retry_in), pytest.raises(ConfigError, match=rf"Sync\.{message}"):
            app.worker(sync)
