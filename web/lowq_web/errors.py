"""Errors as answers."""

from contextlib import suppress
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

import lowq
from lowq.store.keys import SHARD_KEYS, kind_of
from lowq_web.background import TooManyTasks
from lowq_web.context import context_of
from lowq_web.pages.rendering import trouble
from lowq_web.security import is_for_programs, shown_error

_STATUS: list[tuple[type[Exception], int]] = [
    (lowq.UnknownQueueError, 404),
    (lowq.UnknownNodeError, 404),
    (lowq.UnknownScheduleError, 404),
    (lowq.ConfigError, 400),
    (lowq.JobError, 400),
    (TooManyTasks, 429),
    (lowq.QueueInUse, 409),
    (lowq.Resharding, 409),
    (lowq.QueueFull, 409),
    (lowq.RedisUnavailable, 503),
    (lowq.RedisRefused, 503),
    (lowq.LowqError, 500),
]


def error_handlers() -> dict[Any, Any]:
    """Error -> what answers it: JSON for programs, a page for people."""

    def answer(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException):
            status, reason = error.status_code, error.detail
        else:
            status = next(code for kind, code in _STATUS if isinstance(error, kind))
            reason = shown_error(request, error)
            if isinstance(error, lowq.ScriptError):
                with suppress(lowq.LowqError):
                    if wrong := _wrong_type(context_of(request).app, error):
                        status, reason = 503, wrong
        if is_for_programs(request):
            response: Response = JSONResponse({"error": reason}, status)
        else:
            response = trouble(request, status, reason)
        if isinstance(error, HTTPException) and error.headers:
            response.headers.update(error.headers)
        return response

    return dict.fromkeys((HTTPException, *(kind for kind, _ in _STATUS)), answer)


def _wrong_type(app: lowq.Lowq, error: lowq.ScriptError) -> str | None:
    """A sentence on the key that another program gave a wrong type; None: the error is about something else.

    Raises:
        RedisUnavailable, RedisRefused
    """
    if "WRONGTYPE" not in str(error) or error.key is None:
        return None
    if error.key.endswith(":"):
        expected = {error.key + key.name: key.types[0] for key in SHARD_KEYS if key.is_one}
    else:
        kind = kind_of(app.config.namespace, error.key)
        if kind is None:
            return None
        expected = {error.key: kind.types[0]}
    kinds = app.client.commands([("TYPE", key) for key in expected], key=error.key)
    for (key, wanted), raw in zip(expected.items(), kinds, strict=True):
        found = raw.decode() if isinstance(raw, bytes) else str(raw)
        if found not in ("none", wanted):
            return (
                f"The key {key!r} in Redis is a {found} and must be a {wanted}: it was written by hand or by another "
                "program, and nothing that needs it works. Look at it, rename or remove it; `lowq doctor` shows what "
                "else is wrong."
            )
    return None
