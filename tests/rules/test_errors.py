import inspect
import pickle
import re
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


def test_all_our_errors_are_public_and_also_what_python_calls_such_an_error() -> None:
    for name, error in classes_of(errors).items():
        assert issubclass(error, LowqError) or error in (TimeLimitExceeded, lowq.JobCancelled), name  # no Exceptions
        assert getattr(lowq, name) is error
        assert name in lowq.__all__
    rows: list[tuple[type[Exception], list[type[Exception]]]] = [
        (ConfigError, [ValueError]), (ShardsCountError, [ConfigError]), (JobError, [ValueError]),
        (PayloadError, [JobError]), (UnknownQueueError, [LookupError]), (RedisUnavailable, [ConnectionError]),
        (RedisFull, [RedisUnavailable]), (RedisNotReady, [RedisUnavailable]),
        (PushInterrupted, [PushError, RedisUnavailable]), (QueueFull, [PushError]), (NotReplicated, [PushError]),
    ]  # fmt: skip
    for child, parents in rows:
        assert all(issubclass(child, parent) for parent in parents), child
    assert not issubclass(TimeLimitExceeded, Exception), "it gets through a handler that goes on after any exception"


def test_the_drawing_shows_every_class_below_its_parent() -> None:
    assert {name: parent for name, parent in drawing() if parent} == {
        name: error.__bases__[0].__name__ for name, error in classes_of(errors).items() if error is not LowqError
    }


def drawing() -> Iterator[tuple[str, str]]:
    """The drawn tree: each name with that of its parent."""
    depths: dict[int, str] = {}
    lines = (errors.__doc__ or "").partition("::")[2].splitlines()
    for line in filter(None, lines):
        name = line.split("+-- ")[-1].split()[0]
        depth = (len(line) - len(line.lstrip(" |")) - 4) // 4 + ("+--" in line)
        depths[depth] = name
        yield name, depths.get(depth - 1, "")


def test_an_error_says_what_it_is_about() -> None:
    job, other = {"id": 1}, {"id": 4}
    unsafe = {"accepted": 3, "unsafe": [job], "rest": [other], "replicas": 0}
    rows: list[tuple[Exception, dict[str, Any], str]] = [
        (ShardsCountError("Orders", 5, 7), {"queue": "Orders", "existing": 5, "wanted": 7}, "'Orders' .*=5.*=7"),
        (PushError("Orders", 3, [job], RedisUnavailable("no answer")), {"accepted": 3, "rest": [job]},
         "queue 'Orders': 3 payloads are in.*no answer"),
        (NotReplicated("Orders", 3, [job], [other], "replicated", 5.0), unsafe,
         "3 payloads are in, but 1 of them are not safe.*0 of 1 replica confirmed them within 5 s"),
        (NotReplicated("Orders", 3, [job], [], "fsynced", 5.0), {}, "disk"),
        (NotReplicated("Orders", 3, [job], [], "fsynced", 5.0, reason="no rights"), {}, "no rights"),
        (pickle.loads(pickle.dumps(JobError("what happened"))), {}, "^what happened$"),
    ]  # fmt: skip
    for error, fields, text in rows:
        with case(error):
            assert {name: getattr(error, name) for name in fields} == fields
            assert re.search(text, str(error), re.DOTALL)


def test_the_public_names_are_those_that_are_listed_in_order() -> None:
    namespace: dict[str, object] = {}
    exec("from lowq import *", namespace)
    public = {name for name, value in namespace.items() if name != "__builtins__" and value is not None}
    assert public == {*lowq.__all__}
    assert lowq.__all__ == sorted(set(lowq.__all__))
    ours = {name for name, value in vars(lowq).items() if not name.startswith("_") and not inspect.ismodule(value)}
    # `default` and `VERSION` are there under their public names, app and __version__.
    assert ours - {*lowq.__all__} <= {"default", "VERSION", "APPLICATION", "TYPE_CHECKING", "Any"}


# --- redis-py's errors ---


def redis_error(kind: type[Exception]) -> Exception:
    try:
        return kind("the text")
    except (TypeError, ValueError, IndexError):
        return kind("1234 host:7000")  # those that name a slot and an address


#: What those of redis-py's exceptions mean to a caller that are no replies of Redis.
MEANINGS: dict[type[Exception], type[LowqError]] = {
    exceptions.InvalidResponse: RedisRefused,
    exceptions.ConnectionError: RedisUnavailable,
    exceptions.TimeoutError: RedisUnavailable,
    exceptions.MaxConnectionsError: RedisUnavailable,
    exceptions.AskError: RedisUnavailable,
    exceptions.MovedError: RedisUnavailable,
    exceptions.NoScriptError: ScriptError,
    exceptions.DataError: ScriptError,
}


CALL = Call[Any]("ack_and_take", "lowq:v1:{Orders:3}:", [])


def test_every_exception_of_redis_py_becomes_one_of_ours_and_none_shows_the_password() -> None:
    for name in classes_of(exceptions):
        with case(name):
            error = redis_error(classes_of(exceptions)[name])
            for call in (None, CALL):
                translated = translate(error, call, URL)
                assert type(translated) in classes_of(errors).values()
                assert "hunter2" not in str(translated)
                assert call or type(translated) is MEANINGS.get(type(error), type(translated))
    for kind in (exceptions.ConnectionError, exceptions.ReadOnlyError, exceptions.OutOfMemoryError):
        assert "redis://host:6379/0" in str(translate(kind("text"), None, URL))


def test_what_redis_replies_becomes_one_of_ours() -> None:
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
            assert type(translate(BaseParser.parse_error(reply), CALL, URL)) is ours
    error = translate(exceptions.ResponseError("boom"), CALL, URL)
    assert str(error) == "ack_and_take on lowq:v1:{Orders:3}: failed in Redis: boom"
    assert translate(error, None, URL) is error


def test_a_url_is_shown_without_its_password() -> None:
    rows: list[tuple[str, str]] = [
        ("redis://:hunter2@host:1/0", "redis://host:1/0"),
        ("redis://us@er:hunt@er2@host", "redis://host"),
        ("redis://:hunt/er2@host:1/0", "redis://host:1/0"),
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
