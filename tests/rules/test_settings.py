import math
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, get_type_hints

import pytest

import lowq
from lowq.codec import dump_payload, load_payload
from lowq.errors import ConfigError
from lowq.settings import MAX_DUMPED_BYTES, MAX_ERROR_BYTES, Config, Settings, cut_error, dump_text, format_error
from tests.rows import case


class TestDefaults:
    def test_the_codec_and_the_hooks_work_as_they_are(self) -> None:
        config = Config()
        assert config.load_payload(config.dump_payload({"a": 1})) == {"a": 1}
        assert config.load_error(config.dump_error("bo\N{SNOWMAN}m")) == "bo\N{SNOWMAN}m"
        assert config.load_error(config.dump_error("no such file: caf\udce9")) == "no such file: caf\\udce9"
        assert (config.dump_payload, config.load_payload) == (dump_payload, load_payload)
        config.on_server_init()
        config.on_server_stop()
        config.last_words(ValueError("boom"))

    def test_two_applications_share_no_list(self) -> None:
        one, other = Config(), Config()
        one.server_middlewares.append(print)
        assert other.server_middlewares == []
        assert one.server_middlewares == [print]

    def test_an_error_is_kept_with_its_traceback(self) -> None:
        try:
            raise ValueError("boom")
        except ValueError as error:
            text = format_error(error)
        assert text.startswith("Traceback")
        assert text.endswith("ValueError: boom")

    def test_a_long_error_is_cut_in_the_middle(self) -> None:
        text = format_error(ValueError("start" + "x" * 100_000 + "end"))
        assert len(text) <= MAX_ERROR_BYTES
        assert text.startswith("ValueError: start")
        assert "bytes left out" in text
        assert text.endswith("end")

    def test_what_fits_is_not_cut(self) -> None:
        texts: list[str] = ["", "x" * MAX_ERROR_BYTES, "é" * (MAX_ERROR_BYTES // 2), "short \udc80"]
        for text in texts:
            with case(text):
                assert cut_error(text) == text

    def test_what_is_longer_is_cut_by_its_bytes(self) -> None:
        for char, length in product(["x", "é", "€", "\U0001f600", "\udc80"], [MAX_ERROR_BYTES + 1, 20_000_000]):
            with case(char, length):
                text = cut_error("start" + char * (length // len(char.encode("utf-8", "surrogatepass")) + 1) + "end")
                assert len(text.encode()) <= MAX_ERROR_BYTES
                assert text.startswith("start")
                assert text.endswith("end")
                assert "bytes left out" in text

    def test_what_dump_error_makes_of_it_is_bounded_too(self) -> None:
        assert dump_text(Config(dump_error=lambda text: text[:4].encode() * 10), "boom") == b"boom" * 10
        with pytest.raises(ValueError, match="dump_error gave"):
            dump_text(Config(dump_error=lambda _: b"x" * (MAX_DUMPED_BYTES + 1)), "boom")
        with pytest.raises(TypeError, match="dump_error gave a NoneType instead of bytes"):
            dump_text(Config(dump_error=lambda _: None), "boom")


class TestEnvironment:
    def test_a_variable_replaces_the_default(self, monkeypatch: pytest.MonkeyPatch) -> None:
        rows: list[tuple[str, str, object]] = [
            ("redis_url", "redis://elsewhere:7000/3", "redis://elsewhere:7000/3"),
            ("namespace", "shop", "shop"),
            ("poll_interval", "0.25", 0.25),
            ("threads_per_node", "12", 12),
            ("client_pool_size", "2", 2),
            ("pool_timeout", "1", 1.0),
            ("lease_ttl", "30.5", 30.5),
            ("shutdown_timeout", "0", 0.0),
            ("warn_after", "0", 0.0),
            ("max_payload_bytes", "1000", 1000),
        ]
        for name, text, value in rows:
            with case(name, text, value), monkeypatch.context() as patch:
                patch.setenv(f"LOWQ_{name.upper()}", text)
                assert getattr(Config(), name) == value
                assert type(getattr(Config(), name)) is type(value)

    def test_code_wins_over_the_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("LOWQ_THREADS_PER_NODE", "12")
        assert Config(threads_per_node=3).threads_per_node == 3
        config = Config()
        config.threads_per_node = 4
        assert config.threads_per_node == 4

    def test_an_empty_variable_counts_as_none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("LOWQ_NAMESPACE", "")
        assert Config().namespace == "lowq"

    def test_what_is_no_text_is_not_read_from_the_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("LOWQ_SERVER_MIDDLEWARES", "os.remove")
        monkeypatch.setenv("LOWQ_DUMP_PAYLOAD", "os.remove")
        assert Config().server_middlewares == []
        assert Config().dump_payload is dump_payload

    def test_a_wrong_variable_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        rows: list[tuple[str, str]] = [
            ("LOWQ_THREADS_PER_NODE", "many"),
            ("LOWQ_THREADS_PER_NODE", "2.5"),
            ("LOWQ_LEASE_TTL", "0"),
            ("LOWQ_REDIS_URL", "localhost:6379"),
        ]
        for variable, text in rows:
            with case(variable, text), monkeypatch.context() as patch:
                patch.setenv(variable, text)
                config = Config()
                with pytest.raises(ConfigError, match=f"environment variable {variable}: .*'?{text}"):
                    getattr(config, variable.removeprefix("LOWQ_").lower())

    def test_a_wrong_variable_stops_the_first_use_also_when_nobody_asked_for_it(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("LOWQ_SHUTDOWN_TIMEOUT", "soon")
        app = lowq.Lowq(redis_url="memory://")
        with pytest.raises(ConfigError, match="LOWQ_SHUTDOWN_TIMEOUT"):
            app.queue("Orders", 1).push({"id": 1})


NUMBERS: list[Any] = ["soon", "", True, math.nan, math.inf, -1, 10**400, [], "nan"]
KNOWN_URLS = r"redis_url=.*redis://, rediss://, unix://.*memory://"
NOT_A_LIST: list[Any] = [None, print, "print", [print, "x"], {print}]
#: Settings, values that they refuse, and what is said of them.
WRONG: list[tuple[list[str], list[Any], str]] = [
    # Seconds are a number that one can wait.
    (["poll_interval", "pool_timeout", "push_timeout", "lease_ttl", "shutdown_timeout"], [*NUMBERS, None], "^{name}="),
    (["warn_after"], NUMBERS, "^warn_after="),
    # A count is a whole number from 1 on.
    (
        ["threads_per_node", "concurrency", "client_pool_size", "max_payload_bytes"],
        ["many", 0, -1, 2.5, 2.0, True, None, math.nan],
        "^{name}=",
    ),
    # An interval of 0 would poll without end, a lease of less than its renewal takes would always be lost.
    (["poll_interval", "pool_timeout", "push_timeout"], [0], "^{name}=0: it must be more than 0"),
    (["lease_ttl"], [0.01], r"lease_ttl=0\.01: it must be at least 0\.1"),
    (
        ["redis_url"],
        ["localhost", "localhost:6379", "http://localhost", "redis:localhost", "rdis://localhost", "", None, b"x"],
        KNOWN_URLS,
    ),
    (["namespace"], ["", "a b", "a{b}", "a\nb", "x" * 65, "a\ud800", "a\x9b", 5, None], "namespace="),
    (
        ["on_server_init", "on_server_stop", "last_words", "dump_payload", "load_payload", "format_error",
         "dump_error", "load_error"],
        [None, "print", 5],
        "{name}=.* is not callable",
    ),
    (["build_scheduler", "build_splitter"], ["lag"], "{name}='lag' is not callable"),
    (["server_middlewares", "client_middlewares"], NOT_A_LIST, "{name}"),
    (["workers"], [5, "OrderSync", object()], "workers="),
]  # fmt: skip


class TestChecks:
    def test_what_makes_no_sense_is_refused_by_name(self) -> None:
        for names, values, message in WRONG:
            for name, value in product(names, values):
                with case(name, value), pytest.raises(ConfigError, match=message.replace("{name}", name)):
                    Config(**{name: value})

    def test_none_is_taken_where_it_says_something(self) -> None:
        for name in ("warn_after", "build_scheduler", "build_splitter", "workers"):
            assert getattr(Config(**{name: None}), name) is None
        assert Config(build_splitter=print).build_splitter is print

    def test_all_documented_kinds_of_urls_are_taken(self) -> None:
        urls = [
            "redis://h:1/0", "rediss://h", "unix:///run/redis.sock", "redis+sentinel://h:1,i:2/main/0",
            "redis+cluster://h:1", "memory://",
        ]  # fmt: skip
        for url in urls:
            with case(url):
                assert Config(redis_url=url).redis_url == url

    @pytest.mark.parametrize("url", ["rdis://user:hunter2@host", "http://:hunter2@host", "://hunter2@host"])
    def test_a_password_is_not_shown_when_the_url_is_wrong(self, url: str) -> None:
        with pytest.raises(ConfigError, match="host") as caught:
            Config(redis_url=url)
        assert "hunter2" not in str(caught.value)

    def test_workers_are_those_of_the_application(self) -> None:
        app = lowq.Lowq(workers=[int])
        with pytest.raises(ConfigError, match="was not decorated with this application"):
            app.selected_workers()

    def test_a_refused_value_changes_nothing(self) -> None:
        config = Config(threads_per_node=3)
        with pytest.raises(ConfigError):
            config.threads_per_node = 0
        assert config.threads_per_node == 3


class TestUnknownSettings:
    @pytest.mark.parametrize(
        ("name", "nearest"),
        [
            ("redis_ur", "redis_url"),
            ("thread_per_node", "threads_per_node"),
            ("server_middleware", "server_middlewares"),
        ],
    )
    def test_the_nearest_known_is_named(self, name: str, nearest: str) -> None:
        message = f"unknown setting '{name}'; did you mean '{nearest}'"
        misspelt: dict[str, Any] = {name: "x"}
        with pytest.raises(ConfigError, match=message):
            lowq.Lowq(**misspelt)
        with pytest.raises(ConfigError, match=message):
            setattr(Config(), name, "x")

    def test_the_keywords_of_an_application_have_the_types_of_the_settings(self) -> None:
        expected = {name: kind for name, kind in get_type_hints(Config).items() if name[0] != "_"}
        for name in ("server_middlewares", "client_middlewares"):  # the setting is a list of its own
            expected[name] = Sequence[Callable[..., Any]]
        assert get_type_hints(Settings) == expected

    def test_without_a_near_one_all_are_named(self) -> None:
        with pytest.raises(ConfigError, match=r"unknown setting 'xyzzy'; settings are redis_url, .*workers"):
            Config(xyzzy=1)

    def test_reading_one_is_an_attribute_error_so_that_hasattr_works(self) -> None:
        assert not hasattr(Config(), "redis_ur")


class TestFrozen:
    @pytest.mark.parametrize("use", ["push", "stats", "queues"])
    def test_settings_are_frozen_by_the_first_connection(self, use: str) -> None:
        app = lowq.Lowq(redis_url="memory://")
        app.config.threads_per_node = 2
        queue = app.queue("Orders", 1)
        app.config.threads_per_node = 3  # a handle alone connects to nothing
        uses: dict[str, Callable[[], object]] = {
            "push": lambda: queue.push({"id": 1}),
            "stats": queue.stats,
            "queues": app.queues,
        }
        uses[use]()
        with pytest.raises(ConfigError, match="threads_per_node is set after the first connection"):
            app.config.threads_per_node = 4
        assert app.config.threads_per_node == 3

    def test_the_environment_is_read_for_the_last_time_then(self, monkeypatch: pytest.MonkeyPatch) -> None:
        app = lowq.Lowq(redis_url="memory://")
        app.queue("Orders", 1).push({"id": 1})
        monkeypatch.setenv("LOWQ_LEASE_TTL", "99")
        assert app.config.lease_ttl == 15

    def test_another_application_is_not_frozen_with_it(self) -> None:
        app, other = lowq.Lowq(redis_url="memory://"), lowq.Lowq(redis_url="memory://")
        app.queue("Orders", 1).push({"id": 1})
        other.config.namespace = "other"
        assert other.config.namespace == "other"
