import importlib
import inspect
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
from redis import exceptions
from redis._parsers.base import BaseParser  # turns an error reply into one of its exceptions

import lowq
from lowq import errors
from lowq.errors import (
    ConfigError,
    JobError,
    LeaseLost,
    LowqError,
    NotReplicated,
    PayloadError,
    PushError,
    PushInterrupted,
    QueueFull,
    RedisFull,
    RedisNotReady,
    RedisRefused,
    RedisUnavailable,
    ScriptError,
    ShardsCountError,
    TimeLimitExceeded,
    UnknownQueueError,
)
from lowq.store import Call, Refusal
from lowq.store.translate import translate, without_password
from tests.rows import case

URL = "redis://user:hunter2@host:6379/0"


def classes_of(module: object) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(module).items()
        if inspect.isclass(value) and issubclass(value, BaseException) and value.__module__ == module.__name__  # type: ignore[attr-defined]  # a module has a name
    }


# --- our tree ---


class TestTree:
    def test_all_our_errors_are_lowq_errors_and_public(self) -> None:
        for name in classes_of(errors):
            with case(name):
                error = classes_of(errors)[name]
                assert issubclass(error, LowqError) or error is TimeLimitExceeded
                assert getattr(lowq, name) is error
                assert name in lowq.__all__

    def test_they_are_also_what_python_calls_such_an_error(self) -> None:
        rows: list[tuple[type[Exception], list[type[Exception]]]] = [
            (ConfigError, [ValueError]),
            (ShardsCountError, [ConfigError]),
            (JobError, [ValueError]),
            (PayloadError, [JobError]),
            (UnknownQueueError, [LookupError]),
            (RedisUnavailable, [ConnectionError]),
            (RedisFull, [RedisUnavailable]),
            (RedisNotReady, [RedisUnavailable]),
            (PushInterrupted, [PushError, RedisUnavailable]),
            (QueueFull, [PushError]),
            (NotReplicated, [PushError]),
        ]
        for child, parents in rows:
            with case(child, parents):
                assert all(issubclass(child, parent) for parent in parents)

    def test_the_drawing_shows_every_class_below_its_parent(self) -> None:
        drawn = drawing()
        assert {name: parent for name, parent in drawn if parent} == {
            name: error.__bases__[0].__name__ for name, error in classes_of(errors).items() if error is not LowqError
        }

    def test_each_says_in_its_docstring_what_it_means(self) -> None:
        for name in classes_of(errors):
            with case(name):
                assert (classes_of(errors)[name].__doc__ or "").strip()

    def test_a_time_limit_gets_through_to_the_end_of_a_handler_that_goes_on_after_any_exception(self) -> None:
        assert not issubclass(TimeLimitExceeded, Exception)
        assert str(TimeLimitExceeded()) == "the batch has run for longer than its time_limit"

    def test_shards_count_error_names_the_queue_and_both_numbers(self) -> None:
        error = ShardsCountError("Orders", 5, 7)
        assert (error.queue, error.existing, error.wanted) == ("Orders", 5, 7)
        assert "queue 'Orders' has shards_count=5" in str(error)
        assert "shards_count=7" in str(error)

    def test_push_error_says_what_is_in_and_carries_the_rest(self) -> None:
        error = PushError("Orders", 3, [{"id": 1}], RedisUnavailable("no answer"))
        assert (error.queue, error.accepted, error.rest) == ("Orders", 3, [{"id": 1}])
        assert "queue 'Orders': 3 payloads are in" in str(error)
        assert "no answer" in str(error)

    def test_not_replicated_says_what_is_in_and_not_safe(self) -> None:
        error = NotReplicated("Orders", 3, [{"id": 1}], [{"id": 4}], "replicated", 5.0)
        assert (error.accepted, error.unsafe, error.rest, error.replicas) == (3, [{"id": 1}], [{"id": 4}], 0)
        assert "3 payloads are in, but 1 of them are not safe" in str(error)
        assert "0 of 1 replica confirmed them within 5 s" in str(error)
        assert "disk" in str(NotReplicated("Orders", 3, [{"id": 1}], [], "fsynced", 5.0))
        assert "no rights" in str(NotReplicated("Orders", 3, [{"id": 1}], [], "fsynced", 5.0, reason="no rights"))

    def test_an_error_survives_the_way_between_processes(self) -> None:
        names = ["ConfigError", "JobError", "RedisUnavailable", "LeaseLost"]
        for name in names:
            with case(name):
                error = classes_of(errors)[name]("what happened")
                assert str(pickle.loads(pickle.dumps(error))) == "what happened"


def drawing() -> Iterator[tuple[str, str]]:
    """The drawn tree: each name with that of its parent."""
    depths: dict[int, str] = {}
    lines = (errors.__doc__ or "").partition("::")[2].splitlines()
    for line in filter(None, lines):
        name = line.split("+-- ")[-1].split()[0]
        depth = (len(line) - len(line.lstrip(" |")) - 4) // 4 + ("+--" in line)
        depths[depth] = name
        yield name, depths.get(depth - 1, "")


# --- public names ---


class TestPublicNames:
    def test_every_public_name_is_there(self) -> None:
        for name in lowq.__all__:
            with case(name):
                assert getattr(importlib.import_module("lowq"), name) is not None

    def test_every_public_name_is_listed_once_in_order(self) -> None:
        assert lowq.__all__ == sorted(set(lowq.__all__))

    def test_nothing_of_ours_is_public_without_being_listed(self) -> None:
        ours = {
            name
            for name, value in vars(lowq).items()
            if not name.startswith("_") and not inspect.ismodule(value) and name not in lowq.__all__
        }
        # `default` and `VERSION` are there under their public names, app and __version__.
        assert ours <= {"default", "VERSION"}

    def test_a_star_import_brings_them(self) -> None:
        namespace: dict[str, object] = {}
        exec("from lowq import *", namespace)
        assert set(lowq.__all__) <= set(namespace)


# --- redis-py's errors ---


def redis_error(kind: type[Exception]) -> Exception:
    try:
        return kind("the text")
    except (TypeError, ValueError, IndexError):
        return kind("1234 host:7000")  # those that name a slot and an address


#: What each of redis-py's exceptions means to a caller. What is not named is a bug in lowq or foreign data.
MEANINGS: dict[type[Exception], type[LowqError]] = {
    exceptions.AuthenticationError: RedisRefused,
    exceptions.AuthenticationWrongNumberOfArgsError: RedisRefused,
    exceptions.NoPermissionError: RedisRefused,
    exceptions.InvalidResponse: RedisRefused,
    exceptions.OutOfMemoryError: RedisFull,
    exceptions.ReadOnlyError: RedisNotReady,
    exceptions.ConnectionError: RedisUnavailable,
    exceptions.TimeoutError: RedisUnavailable,
    exceptions.BusyLoadingError: RedisNotReady,
    exceptions.MaxConnectionsError: RedisUnavailable,
    exceptions.ClusterDownError: RedisUnavailable,
    exceptions.MasterDownError: RedisNotReady,
    exceptions.TryAgainError: RedisUnavailable,
    exceptions.AskError: RedisUnavailable,
    exceptions.MovedError: RedisUnavailable,
    exceptions.ResponseError: ScriptError,
    exceptions.NoScriptError: ScriptError,
    exceptions.DataError: ScriptError,
}


class TestTranslation:
    def test_every_exception_of_redis_py_becomes_one_of_ours(self) -> None:
        for name in classes_of(exceptions):
            with case(name):
                error = redis_error(classes_of(exceptions)[name])
                for call in (None, Call("push", "lowq:v1:{Orders:3}:", [])):
                    translated = translate(error, call, URL)
                    assert type(translated) in classes_of(errors).values()
                    assert "hunter2" not in str(translated)

    def test_what_it_means_to_the_caller(self) -> None:
        for kind, meaning in MEANINGS.items():
            with case(kind):
                assert type(translate(redis_error(kind), None, URL)) is meaning

    def test_what_redis_replies(self) -> None:
        rows: list[tuple[str, type[LowqError]]] = [
            ("NOAUTH Authentication required.", RedisRefused),
            ("WRONGPASS invalid username-password pair or user is disabled.", RedisRefused),
            ("ERR AUTH <password> called without any password configured for the default user.", RedisRefused),
            ("ERR Client sent AUTH, but no password is set", RedisRefused),
            ("NOPERM User default has no permissions to run the 'evalsha' command", RedisRefused),
            ("ERR DB index is out of range", RedisRefused),
            ("ERR This instance has cluster support disabled", RedisRefused),
            ("OOM command not allowed when used memory > 'maxmemory'.", RedisFull),
            ("READONLY You can't write against a read only replica.", RedisNotReady),
            ("LOADING Redis is loading the dataset in memory", RedisNotReady),
            ("BUSY Redis is busy running a script.", RedisNotReady),
            ("MASTERDOWN Link with MASTER is down", RedisNotReady),
            ("MISCONF Redis is configured to save RDB snapshots", RedisNotReady),
            ("NOREPLICAS Not enough good replicas to write.", RedisNotReady),
            ("CLUSTERDOWN The cluster is down", RedisUnavailable),
            ("TRYAGAIN Multiple keys request during rehashing of slot", RedisUnavailable),
            ("ERR max number of clients reached", RedisUnavailable),
            ("LEASELOST the lease is somebody else's", LeaseLost),
            ("SHARDSCOUNT 5", Refusal),
            ("WRONGTYPE Operation against a key holding the wrong kind of value", ScriptError),
            ("ERR user_script:3: Script attempted to access nonexistent global variable 'x'", ScriptError),
        ]
        for reply, ours in rows:
            with case(reply, ours):
                error = BaseParser.parse_error(reply)
                assert type(translate(error, Call("ack_and_take", "lowq:v1:{Orders:3}:", []), URL)) is ours

    def test_a_failed_script_is_named_with_its_shard(self) -> None:
        error = translate(exceptions.ResponseError("boom"), Call("ack_and_take", "lowq:v1:{Orders:3}:", []), URL)
        assert str(error) == "ack_and_take on lowq:v1:{Orders:3}: failed in Redis: boom"

    def test_one_of_ours_stays_what_it_is(self) -> None:
        error = LeaseLost("gone")
        assert translate(error, None, URL) is error

    @pytest.mark.parametrize(
        "kind", [exceptions.ConnectionError, exceptions.ReadOnlyError, exceptions.OutOfMemoryError]
    )
    def test_the_server_is_named_without_the_password(self, kind: type[Exception]) -> None:
        text = str(translate(kind("text"), None, URL))
        assert "redis://host:6379/0" in text
        assert "hunter2" not in text


def test_a_url_is_shown_without_its_password() -> None:
    rows: list[tuple[str, str]] = [
        ("redis://:hunter2@host:1/0", "redis://host:1/0"),
        ("redis://user:hunter2@host", "redis://host"),
        ("redis://host:1", "redis://host:1"),
        ("redis://us@er:hunt@er2@host", "redis://host"),
        ("redis://:hunt/er2@host:1/0", "redis://host:1/0"),
        ("redis://:hunt?er2@host", "redis://host"),
        ("redis://:hunt#er2@host", "redis://host"),
        ("redis://host/0?password=hunter2", "redis://host/0"),
        ("redis://[::1]:6379/0", "redis://[::1]:6379/0"),
        ("redis://:hunter2@[::1", "redis://[::1"),
        ("unix://:hunter2@/run/redis.sock", "unix:///run/redis.sock"),
        ("redis+sentinel://:hunter2@a:1,b:2/main/0", "redis+sentinel://a:1,b:2/main/0"),
        ("memory://", "memory://"),
    ]
    for url, shown in rows:
        with case(url, shown):
            assert without_password(url) == shown
