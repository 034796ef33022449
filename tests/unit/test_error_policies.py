"""Wrong forms of `bury_on`, `release_on` and `retry_in` are refused where they are written, with the right one."""

from collections.abc import Callable
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


def async_retry_in() -> Any:
    class Sync:
        def perform(self, payloads_by_id: Any) -> None: ...
        async def retry_in(self, retry_count: int) -> float:
            return 1

    return Sync


def generator_retry_in() -> Any:
    class Sync:
        def perform(self, payloads_by_id: Any) -> None: ...
        def retry_in(self, retry_count: int) -> Any:
            yield 1

    return Sync


def retry_in_of_none() -> Any:
    class Sync:
        def perform(self, payloads_by_id: Any) -> None: ...
        def retry_in(self) -> float:
            return 1

    return Sync


def retry_in_of_three() -> Any:
    class Sync:
        def perform(self, payloads_by_id: Any) -> None: ...
        def retry_in(self, retry_count: int, error: Any, more: int) -> float:
            return 1

    return Sync


def retry_in_that_is_a_number() -> Any:
    class Sync:
        retry_in = 30

        def perform(self, payloads_by_id: Any) -> None: ...

    return Sync


def test_a_wrong_retry_in_is_refused_at_decoration(app: lowq.Lowq) -> None:
    rows: list[tuple[Callable[[], Any], str]] = [
        (
            async_retry_in,
            r"Sync\.retry_in must return a number of seconds at once; write a plain def retry_in\(self, re",
        ),
        (generator_retry_in, r"Sync\.retry_in must return a number of seconds at once"),
        (
            retry_in_of_none,
            r"Sync\.retry_in\(self\) -> float: write def retry_in\(self, retry_count, error\), or without",
        ),
        (retry_in_of_three, r"Sync\.retry_in\(self, retry_count.*: write def retry_in\(self, retry_count, error\)"),
        (
            retry_in_that_is_a_number,
            r"Sync\.retry_in=30 is no function; write def retry_in\(self, retry_count, error\)",
        ),
    ]
    for make, message in rows:
        with case(make, message), pytest.raises(ConfigError, match=message):
            app.worker(make())


def test_a_wrong_retry_in_of_an_application_is_refused() -> None:
    values: list[Any] = [5, "soon", lambda: 5, lambda _a, _b, _c: 5]
    for value in values:
        with case(value), pytest.raises(ConfigError, match=r"retry_in.*write def retry_in\(retry_count, error\)"):
            Config(retry_in=value)


def test_a_static_retry_in_has_no_instance_before_it(app: lowq.Lowq) -> None:
    class Sync(lowq.Worker[Any]):
        def perform(self, payloads_by_id: dict[str, list[Any]]) -> None: ...

        @staticmethod
        def retry_in(retry_count: int, error: BaseException | str) -> float:
            return retry_count + len(str(error))

    assert app.worker(Sync)._retry_in_takes_error
