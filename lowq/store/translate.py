"""Our error for each of redis-py's."""

import re
from typing import Protocol

from redis import exceptions
from redis.sentinel import MasterNotFoundError

from lowq.errors import (
    ConfigError,
    LeaseLost,
    LowqError,
    RedisFull,
    RedisNotReady,
    RedisRefused,
    RedisUnavailable,
    Resharding,
    ScriptError,
)
from lowq.store import untrusted

#: Errors of Redis and Valkey when the user has no right to a command of a script.
_FORBIDDEN_IN_SCRIPT = ("The user executing the script can't", "ACL failure in script")
#: Errors of a cluster whose slots are being moved; a script that met an absent key of one says it in words.
_CLUSTER_CHANGES = (exceptions.TryAgainError, exceptions.ClusterDownError, exceptions.AskError)
#: A TLS handshake that got no answer, the end, or what is no TLS: redis-py's error, or its cause.
_NO_TLS = re.compile("handshake operation timed out|connecting.*reset|EOF occurred|WRONG_VERSION|RECORD_LAYER")

_USE_PRIMARY = "redis_url must name the primary, unless this server becomes it (a failover, REPLICAOF NO ONE)"
#: Errors of a server that can't serve now: redis-py's error, if it has one; its code; the state of the server; advice.
_NOT_READY: list[tuple[type[Exception] | None, str, str, str]] = [
    (exceptions.ReadOnlyError, "READONLY", "is a read-only replica", _USE_PRIMARY),
    (exceptions.MasterDownError, "MASTERDOWN", "is a replica that has lost its primary", _USE_PRIMARY),
    (exceptions.BusyLoadingError, "LOADING", "loads its data", "it serves again when that is done"),
    (None, "NOREPLICAS", "takes no writes, as it has too few replicas", "see its setting min-replicas-to-write"),
    (None, "BUSY", "runs a script of somebody else", "it serves again when that ends; SCRIPT KILL may end it"),
    (None, "MISCONF", "takes no writes, as it can't save its data", "see its log and the disk"),
]


class _Call(Protocol):
    key: str
    script: str


class Refusal(LowqError):
    """A script refused for a reason that its caller explains: a code and a detail."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(f"{code} {detail}")
        self.code = code
        self.detail = detail

    @property
    def shards_count(self) -> int:
        """The number of shards in ``SHARDSCOUNT``; 0: it can't be read."""
        return untrusted.count(self.detail)


def translate(error: Exception, call: _Call | None, url: str) -> Exception:
    """One of our errors for one of redis-py's."""
    where = without_password(url)
    text = str(error)
    if isinstance(error, LowqError):
        return error
    if isinstance(error, exceptions.AuthenticationError | exceptions.AuthenticationWrongNumberOfArgsError) or (
        text.startswith(("NOAUTH", "WRONGPASS", "AUTH "))
    ):
        of_sentinels = "+sentinel" in where.partition("://")[0]
        if "without any password configured" in text or "no password is set" in text:
            whose = "a sentinel of " if "said a sentinel" in text else ""
            return RedisRefused(f"{whose}Redis at {where} has no password: leave it out of redis_url")
        return RedisRefused(
            f"Redis at {where} refused the user or password: {text.rstrip('.?')}. "
            "redis_url gives them as redis://user:password@host"
            + (", those of the sentinels as ?sentinel_username=user&sentinel_password=password" if of_sentinels else "")
        )
    if is_forbidden(error) or text.startswith(_FORBIDDEN_IN_SCRIPT):
        return RedisRefused(f"Redis at {where} does not allow what lowq needs (docs/operations.md#rights): {text}")
    if isinstance(error, exceptions.InvalidResponse):
        return RedisRefused(f"what answers at {where} is no Redis: {text}")
    if "cluster support disabled" in text:
        return RedisRefused(f"Redis at {where} is no cluster: use redis:// for a single server: {text}")
    if "DB index is out of range" in text:
        return RedisRefused(f"Redis at {where} has no such database; its setting databases says how many it has")
    if isinstance(error, exceptions.OutOfMemoryError) or text.startswith("OOM"):
        return RedisFull(f"Redis at {where} is full (maxmemory reached); nothing was written: {text}")
    for kind, code, state, what_to_do in _NOT_READY:
        if (kind is not None and isinstance(error, kind)) or text.partition(" ")[0] == code:
            return RedisNotReady(f"Redis at {where} {state}; {what_to_do}: {text}", state)
    if isinstance(error, MasterNotFoundError):
        service, _, reason = text.partition(" : ")  # see `_Sentinel`
        why = f"does not answer: none of the sentinels does ({reason})" if reason else "has no sentinel that knows it"
        return RedisUnavailable(f"Redis at {where} {why}: {service.rstrip()}")
    if isinstance(error, exceptions.ConnectionError | exceptions.TimeoutError):
        if text.startswith(("Timeout reading", "Timeout writing")):
            text = "nothing was heard in time"
        return RedisUnavailable(f"Redis at {where} does not answer: {text}")
    if isinstance(error, _CLUSTER_CHANGES) or "attempted to access a non local key" in text:
        return RedisUnavailable(f"the cluster at {where} is being changed: {text}")
    code, _, detail = text.partition(" ")
    if code == "UNBLOCKED":
        return RedisUnavailable(f"Redis at {where} can't serve just now: {text}")
    if code == "LEASELOST" and call is not None:
        return LeaseLost(f"{call.key.rstrip(':')}: {call.script} was refused: {detail}")
    if code in ("SHARDSCOUNT", "OUTOFTURN", "QUEUEFULL", "SEALED", "SCORES"):
        return Refusal(code, detail)
    if code == "RESHARDING":
        return Resharding(f"{call.key.rstrip(':') + ': ' if call else ''}{detail}; try again in a moment")
    if code == "PATTERN":
        return ConfigError(detail)
    what = "a command" if call is None else f"{call.script} on {call.key}" if call.key else call.script
    return ScriptError(f"{what} failed in Redis: {text}")


def with_guess(translated: Exception, error: Exception, url: str) -> Exception:
    """The error of a server that has never answered, with what else may listen there. ``error``: redis-py's."""
    text = str(translated).rstrip(".")
    if url.startswith(("rediss", "valkeys")) and _NO_TLS.search(f"{text} {error.__context__}"):
        return RedisUnavailable(f"what listens at {without_password(url)} may speak no TLS ({error}); try redis://")
    if re.search("closed by server|while (reading|writing)", text):
        return RedisUnavailable(f"{text}, before any answer; it may be no Redis")
    return translated


#: Of a call that is to be sent once more, on a fresh connection: it got no answer, or one by a server that can't serve
#: now, behind whose name another may be found.
UNANSWERED = (RedisUnavailable, RedisNotReady)


def may_repeat(result: object) -> bool:
    """Whether the call is to be sent once more."""
    return type(result) in UNANSWERED


def is_forbidden(error: Exception) -> bool:
    """Whether the user may not run that command, or the server has it under another name, as managed ones do."""
    text = str(error)
    return (
        isinstance(error, exceptions.NoPermissionError)
        or text.startswith("NOPERM")
        or (isinstance(error, exceptions.ResponseError) and text.lower().startswith("unknown command"))
    )


def without_password(url: str) -> str:
    """The URL as it may be shown. Also of a text that is no URL, such as one with a bare / in its password."""
    scheme, _, rest = url.partition("://")
    before, _, hosts = rest.rpartition("@")
    if "=" in before.partition("?")[2]:  # an @ of the options, among which there may be a password
        return f"{scheme}://..."
    return f"{scheme}://{hosts.partition('?')[0]}"
