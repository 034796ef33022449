import inspect
import pickle
from collections.abc import Iterator
from typing import Any

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

    def test_an_error_says_what_it_is_about(self) -> None:
        job, other = {"id": 1}, {"id": 4}
        not_replicated = NotReplicated("Orders", 3, [job], [other], "replicated", 5.0)
        fsynced = NotReplicated("Orders", 3, [job], [], "fsynced", 5.0)
        refused = NotReplicated("Orders", 3, [job], [], "fsynced", 5.0, reason="no rights")
        rows: list[tuple[Exception, dict[str, Any], list[str]]] = [
            (
                ShardsCountError("Orders", 5, 7),
                {"queue": "Orders", "existing": 5, "wanted": 7},
                ["queue 'Orders' has shards_count=5", "shards_count=7"],
            ),
            (
                PushError("Orders", 3, [job], RedisUnavailable("no answer")),
                {"queue": "Orders", "accepted": 3, "rest": [job]},
                ["queue 'Orders': 3 payloads are in", "no answer"],
            ),
            (
                not_replicated,
                {"accepted": 3, "unsafe": [job], "rest": [other], "replicas": 0},
                ["3 payloads are in, but 1 of them are not safe", "0 of 1 replica confirmed them within 5 s"],
            ),
            (fsynced, {}, ["disk"]),
            (refused, {}, ["no rights"]),
        ]
        for error, fields, texts in rows:
            with case(error):
                assert {name: getattr(error, name) for name in fields} == fields
                assert [text for text in texts if text not in str(error)] == []

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


def test_the_public_names_are_those_that_are_listed_in_order() -> None:
    namespace: dict[str, object] = {}
    exec("from lowq import *", namespace)
    assert {name for name, value in namespace.items() if name != "__builtins__" and value is not None} == {
        *lowq.__all__
    }
    assert lowq.__all__ == sorted(set(lowq.__all__))
    ours = {name for name, value in vars(lowq).items() if not name.startswith("_") and not inspect.ismodule(value)}
    # `default` and `VERSION` are there under their public names, app and __version__.
    assert ours - {*lowq.__all__} <= {"default", "VERSION"}


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
                    assert call or type(translated) is MEANINGS.get(type(error), type(translated))

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

    def test_the_server_is_named_without_the_password(self) -> None:
        for kind in (exceptions.ConnectionError, exceptions.ReadOnlyError, exceptions.OutOfMemoryError):
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
