"""Middlewares: callables around a batch (in a node) or around a list of jobs (when pushing)."""

import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Sequence
from typing import Any

from lowq.coroutines import plain
from lowq.errors import ConfigError, MiddlewareError

#: ``(worker, batch, call_next)``: ``batch`` is payloads_by_id in a node, the list of jobs when pushing.
Middleware = Callable[[Any, Any, Callable[[], Any]], Any]


def wrap(
    middlewares: Sequence[Middleware], worker: Any, inner: Callable[[Any], Awaitable[object]], *, is_async: bool
) -> Callable[[Any], Coroutine[Any, Any, None]]:
    """Wraps the middlewares around ``inner``, the first outermost. ``is_async``: they await ``call_next()``; otherwise
    they call it, and every ``await`` in here is done at once.

    A middleware that returns without ``call_next()`` and without raising would get the batch acknowledged though it was
    not performed, so that raises `MiddlewareError`. So does a plain one that returns a coroutine or the like.

    Raises:
        ConfigError: ``is_async``, and a middleware has no async form.
    """
    chain = [_async_form(middleware, worker) if is_async else middleware for middleware in middlewares]

    async def call(batch: Any) -> None:
        async def at(position: int) -> None:
            if position == len(chain):
                await inner(batch)
                return
            called = finished = False
            middleware = chain[position]

            async def call_next() -> None:
                nonlocal called, finished
                if called:
                    raise MiddlewareError(f"middleware {_name(middleware)} called call_next() twice")
                called = True
                try:
                    await at(position + 1)
                except Exception:
                    finished = True  # the middleware may swallow it
                    raise
                except BaseException:
                    finished = not is_async  # an exception that ends a task must go on
                    raise
                finished = True

            returned = middleware(worker, batch, call_next if is_async else plain(call_next))
            if is_async:
                await returned
            elif kind := _discard_unrun(returned):
                raise MiddlewareError(
                    f"middleware {_name(middleware)} returned {kind}, which nobody runs; "
                    "write a plain def that calls call_next()"
                )
            if not finished:
                raise MiddlewareError(
                    f"middleware {_name(middleware)} returned without {'awaiting ' if is_async else ''}call_next() and "
                    "without raising; nothing was done, so the batch counts as failed"
                )

        await at(0)

    return call


def all_async(middlewares: Sequence[Middleware]) -> bool:
    """Whether an event loop can run all of the middlewares.

    Raises:
        MiddlewareError: some can only be awaited, and others can't be awaited at all.
    """
    forms = [_find_async_form(middleware) for middleware in middlewares]
    if all(forms):
        return True
    for middleware, form in zip(middlewares, forms, strict=True):
        if form is middleware:
            raise MiddlewareError(
                f"middleware {_name(middleware)} is async and {_name(middlewares[forms.index(None)])} is not; "
                "all client middlewares must be of one kind"
            )
    return False


def check_plain(middlewares: Sequence[Middleware], worker: Any) -> None:
    """Checks that the middlewares suit a worker with a plain ``perform``.

    Raises:
        ConfigError: one of them is an async def.
    """
    for middleware in middlewares:
        if _is_async(middleware):
            raise ConfigError(
                f"{worker.__name__}.{_handler(worker)} is a plain def and middleware {_name(middleware)} is an async "
                "def, which can't be around it: write a plain def that calls call_next(). For workers of both kinds, "
                "write a class with def __call__ and async def acall"
            )


def _async_form(middleware: Middleware, worker: Any) -> Middleware:
    """The awaitable form of the middleware, for an async worker.

    Raises:
        ConfigError: it has none.
    """
    form = _find_async_form(middleware)
    if form is None:
        raise ConfigError(
            f"{worker.__name__}.{_handler(worker)} is an async def and middleware {_name(middleware)} is a plain "
            "def, which can't be around it: write async def, and await call_next(). For workers of both kinds, write "
            "a class with def __call__ and async def acall"
        )
    return form


def _find_async_form(middleware: Middleware) -> Middleware | None:
    """The awaitable form of the middleware: itself, or its method ``acall``."""
    if _is_async(middleware):
        return middleware
    form: Middleware | None = getattr(middleware, "acall", None)
    return form


def _is_async(middleware: Middleware) -> bool:
    call = getattr(middleware, "__call__", None)  # noqa: B004  # not whether it can be called, but how
    return inspect.iscoroutinefunction(inspect.unwrap(middleware)) or inspect.iscoroutinefunction(call)


def check_done(returned: object, worker: Any, method: str) -> None:
    """Checks that a worker's method returned no coroutine and no generator: these have done nothing yet, and the work
    would count as done. When the worker is defined, a decorator may hide that its method is an ``async def``.

    Raises:
        ConfigError: it did; the coroutine is closed, so that Python does not complain as well.
    """
    if returned is not None:
        kind = _discard_unrun(returned)
        if kind:
            raise ConfigError(
                f"{getattr(worker, '__name__', worker)}.{method} returned {kind}, which nobody runs, so nothing was "
                "done; write a plain def, or an async def, without yield (is there a decorator that hides an async "
                "def? Give its wrapper functools.wraps)"
            )


_UNRUN: tuple[tuple[type, str], ...] = (
    (Coroutine, "a coroutine"),
    (AsyncGenerator, "an async generator"),
    (Generator, "a generator"),
    (Awaitable, "an awaitable"),
)


def _discard_unrun(returned: object) -> str:
    """Closes a coroutine or the like, and returns the kind that it is; "": none."""
    if returned is None:
        return ""
    for kind, name in _UNRUN:
        if isinstance(returned, kind):
            if isinstance(returned, Coroutine | Generator):
                returned.close()
            return name
    return ""


def _handler(worker: Any) -> str:
    return getattr(worker, "_handler", "perform")


def _name(middleware: Middleware) -> str:
    return getattr(middleware, "__qualname__", repr(middleware))
