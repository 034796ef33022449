import math
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest

import lowq
from lowq.codec import dump_payload, load_payload
from lowq.codec.payloads import MAX_DUMPED_BYTES, MAX_ERROR_BYTES, cut_error, dump_text, format_error
from lowq.errors import ConfigError
from lowq.settings import Config
from tests.rows import case

# --- defaults ---


def test_the_codec_and_the_hooks_work_as_they_are() -> None:
    config = Config()
    assert (config.dump_payload, config.load_payload) == (dump_payload, load_payload)
    assert config.load_error(config.dump_error("bo\N{SNOWMAN}m")) == "bo\N{SNOWMAN}m"
    assert config.load_error(config.dump_error("no such file: caf\udce9")) == "no such file: caf\\udce9"
    config.on_server_init()
    config.on_server_stop()
    config.last_words(ValueError("boom"))
    config.server_middlewares.append(print)
    assert Config().server_middlewares == [], "two applications share no list"


def test_an_error_is_kept_with_its_traceback() -> None:
    try:
        raise ValueError("boom")
    except ValueError as error:
        text = format_error(error)
    assert text.startswith("Traceback")
    assert text.endswith("ValueError: boom")


def test_what_is_longer_than_fits_is_cut_in_the_middle_by_its_bytes() -> None:
    for text in ("", "x" * MAX_ERROR_BYTES, "é" * (MAX_ERROR_BYTES // 2), "short \udc80"):
        assert cut_error(text) == text
    for char, length in product(["x", "€", "\udc80"], [MAX_ERROR_BYTES + 1, 20_000_000]):
        with case(char, length):
            text = cut_error("start" + char * (length // len(char.encode("utf-8", "surrogatepass")) + 1) + "end")
            assert len(text.encode()) <= MAX_ERROR_BYTES
            assert text.startswith("start")
            assert text.endswith("end")
            assert "bytes left out" in text


def test_what_dump_error_makes_of_it_is_bounded_too() -> None:
    assert dump_text(Config(dump_error=lambda text: text[:4].encode() * 10).dump_error, "boom") == b"boom" * 10
    with pytest.raises(ValueError, match="dump_error gave"):
        dump_text(Config(dump_error=lambda _: b"x" * (MAX_DUMPED_BYTES + 1)).dump_error, "boom")
    with pytest.raises(TypeError, match="dump_error gave a NoneType instead of bytes"):
        dump_text(Config(dump_error=lambda _: None).dump_error, "boom")  # type: ignore[arg-type,return-value]


# --- the environment ---


def test_a_variable_replaces_the_default_and_code_wins_over_it(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[tuple[str, str, object]] = [
        ("redis_url", "redis://elsewhere:7000/3", "redis://elsewhere:7000/3"), ("namespace", "", "lowq"),
        ("threads_per_node", "12", 12), ("pool_timeout", "1", 1.0), ("lease_ttl", "30.5", 30.5),
        ("warn_after", "0", 0.0), ("server_middlewares", "os.remove", []), ("dump_payload", "os.remove", dump_payload),
    ]  # fmt: skip
    for name, text, value in rows:
        with case(name, text, value), monkeypatch.context() as patch:
            patch.setenv(f"LOWQ_{name.upper()}", text)
            assert getattr(Config(), name) == value
            assert type(getattr(Config(), name)) is type(value)
    monkeypatch.setenv("LOWQ_THREADS_PER_NODE", "12")
    config = Config(threads_per_node=3)
    assert config.threads_per_node == 3
    config.threads_per_node = 4
    assert config.threads_per_node == 4


def test_a_wrong_variable_is_named_and_stops_the_first_use_also_when_nobody_asked_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for variable, text in (("LOWQ_THREADS_PER_NODE", "2.5"), ("LOWQ_LEASE_TTL", "0"), ("LOWQ_REDIS_URL", "host:6379")):
        with case(variable, text), monkeypatch.context() as patch:
            patch.setenv(variable, text)
            config = Config()
            with pytest.raises(ConfigError, match=f"environment variable {variable}: .*'?{text}"):
                getattr(config, variable.removeprefix("LOWQ_").lower())
    monkeypatch.setenv("LOWQ_SHUTDOWN_TIMEOUT", "soon")
    app = lowq.Lowq(redis_url="memory://")
    with pytest.raises(ConfigError, match="LOWQ_SHUTDOWN_TIMEOUT"):
        app.queue("Orders", 1).push({"id": 1})


# --- what is refused ---

NUMBERS: list[Any] = ["soon", True, math.nan, math.inf, -1, 10**400, "nan"]
KNOWN_URLS = r"redis_url=.*redis://, rediss://, unix://.*memory://"
NOT_A_LIST: list[Any] = [None, print, [print, "x"]]
#: Settings, values that they refuse, and what is said of them.
WRONG: list[tuple[list[str], list[Any], str]] = [
    # Seconds are a number that one can wait.
    (["poll_interval", "pool_timeout", "push_timeout", "lease_ttl", "shutdown_timeout"], [*NUMBERS, None], "^{name}="),
    (["warn_after"], NUMBERS, "^warn_after="),
    # A count is a whole number from 1 on.
    (
        ["threads_per_node", "concurrency", "client_pool_size", "max_payload_bytes"],
        ["many", 0, 2.5, True, None],
        "^{name}=",
    ),
    # An interval of 0 would poll without end, a lease of less than its renewal takes would always be lost.
    (["poll_interval", "pool_timeout", "push_timeout"], [0], "^{name}=0 must be a number of more than 0"),
    (["lease_ttl"], [0.01], r"lease_ttl=0\.01 must be a number of at least 0\.1"),
    (
        ["redis_url"],
        ["localhost:6379", "http://localhost", "redis:localhost", "valkey+unix://h", "", None],
        KNOWN_URLS,
    ),
    (["namespace"], ["", "a b", "a{b}", "a\nb", "x" * 65, "a\ud800", 5], "namespace="),
    (
        ["on_server_init", "on_server_stop", "last_words", "dump_payload", "load_payload", "format_error",
         "dump_error", "load_error"],
        [None, "print", 5],
        "{name}=.* must be callable",
    ),
    (["build_scheduler", "build_splitter"], ["lag"], "{name}='lag' must be callable; or None"),
    (["server_middlewares", "client_middlewares"], NOT_A_LIST, "{name}"),
    (["workers"], [5, "OrderSync", object()], "workers="),
]  # fmt: skip


def test_what_makes_no_sense_is_refused_by_name_and_changes_nothing() -> None:
    for names, values, message in WRONG:
        for name, value in product(names, values):
            with case(name, value), pytest.raises(ConfigError, match=message.replace("{name}", name)):
                Config(**{name: value})
    config = Config(threads_per_node=3)
    with pytest.raises(ConfigError):
        config.threads_per_node = 0
    assert config.threads_per_node == 3


def test_what_is_documented_is_taken() -> None:
    for name in ("warn_after", "build_scheduler", "build_splitter", "workers"):
        nothing: dict[str, Any] = {name: None}
        assert getattr(Config(**nothing), name) is None
    urls = "redis://h:1/0", "rediss://h", "unix:///run/s", "redis+sentinel://h:1,i:2/m/0", "redis+cluster://h:1"
    for url in (*urls, "valkey://h", "valkeys://h", "valkeys+sentinel://h/m", "valkey+cluster://h"):
        assert Config(redis_url=url).redis_url == url


def test_a_password_is_not_shown_when_the_url_is_wrong() -> None:
    for url in ("rdis://user:hunter2@host", "http://:hunter2@host", "://hunter2@host"):
        with case(url), pytest.raises(ConfigError, match="host") as caught:
            Config(redis_url=url)
        assert "hunter2" not in str(caught.value)


def test_workers_are_those_of_the_application() -> None:
    with pytest.raises(ConfigError, match="was not decorated with this application"):
        lowq.Lowq(workers=[int]).selected_workers()


def test_an_unknown_setting_is_refused_and_the_nearest_named() -> None:
    for name, nearest in (("redis_ur", "redis_url"), ("server_middleware", "server_middlewares")):
        message = f"unknown setting '{name}'; did you mean '{nearest}'"
        misspelt: dict[str, Any] = {name: "x"}
        with pytest.raises(ConfigError, match=message):
            lowq.Lowq(**misspelt)
        with pytest.raises(ConfigError, match=message):
            setattr(Config(), name, "x")
    with pytest.raises(ConfigError, match=r"unknown setting 'xyzzy'; settings are redis_url, .*workers"):
        Config(xyzzy=1)  # type: ignore[call-arg]
    assert not hasattr(Config(), "redis_ur")


def test_settings_and_the_environment_are_frozen_by_the_first_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    uses: list[Callable[[lowq.Lowq, lowq.Queue], object]] = [
        lambda _app, queue: queue.push({"id": 1}), lambda _app, queue: queue.stats(), lambda app, _queue: app.queues(),
    ]  # fmt: skip
    for number, use in enumerate(uses):
        with case(number), monkeypatch.context() as patch:
            app, other = lowq.Lowq(redis_url="memory://"), lowq.Lowq(redis_url="memory://")
            queue = app.queue("Orders", 1)
            app.config.threads_per_node = 3  # a handle alone connects to nothing
            use(app, queue)
            with pytest.raises(ConfigError, match="threads_per_node is set after the first connection"):
                app.config.threads_per_node = 4
            patch.setenv("LOWQ_LEASE_TTL", "99")
            assert (app.config.threads_per_node, app.config.lease_ttl) == (3, 15)
            other.config.namespace = "other"  # it is not frozen with the first one
