"""Middlewares: callables around a batch (in a node) or around a list of jobs (when pushing)."""

from collections.abc import Callable, Sequence
from typing import Any

from lowq.errors import MiddlewareError

#: ``(worker, batch, call_next)``: ``batch`` is payloads_by_id in a node, the list of jobs when pushing.
Middleware = Callable[[Any, Any, Callable[[], Any]], Any]


def wrap(middlewares: Sequence[Middleware], worker: Any, inner: Callable[[Any], None]) -> Callable[[Any], None]:
    """``inner`` with the middlewares around it, the first outermost. Without any it is ``inner`` itself.

    A middleware that returns without ``call_next()`` and without raising would have the batch acknowledged
    though it was not performed: that raises `MiddlewareError`.
    """
    if not middlewares:
        return inner
    chain = tuple(middlewares)

    def call(batch: Any) -> None:
        def at(position: int) -> None:
            if position == len(chain):
                inner(batch)
                return
            called = 0

            def call_next() -> None:
                nonlocal called
                called += 1
                if called > 1:
                    raise MiddlewareError(f"middleware {_name(chain[position])} called call_next() twice")
                at(position + 1)

            chain[position](worker, batch, call_next)
            if not called:
                raise MiddlewareError(
                    f"middleware {_name(chain[position])} returned without call_next() and without raising; "
                    "nothing was done, so the batch counts as failed"
                )

        at(0)

    return call


def _name(middleware: Middleware) -> str:
    return getattr(middleware, "__qualname__", repr(middleware))
