"""Coroutines without an event loop, and coroutines in a context of their own.

Code that threads and event loops share is written once, as coroutines. In a thread, everything they await is done at
once.
"""

from asyncio import CancelledError
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context, copy_context
from typing import Any, TypeVar

T = TypeVar("T")


def at_once(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine that never suspends, and returns its result."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError("it was suspended")


def run_first(run: Callable[[Coroutine[Any, Any, T]], T], coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine as the first task of an event loop, by ``asyncio.run`` or the like. Its exception is raised
    here, and not in the task: the loop would ask the exception for its class, and wait for ever if that raises.
    """
    raised: list[BaseException] = []

    async def carry_out() -> Any:
        try:
            return await coroutine
        except CancelledError:
            raise
        except BaseException as error:
            raised.append(error)

    result = run(carry_out())
    if raised:
        raise raised.pop()
    return result


def plain(function: Callable[..., Coroutine[Any, Any, T]]) -> Callable[..., T]:
    """Makes a plain function of a coroutine function whose coroutines never suspend."""

    def call(*args: Any) -> T:
        coroutine = function(*args)
        try:
            return at_once(coroutine)
        except RuntimeError as error:
            raised = as_raised(error)
            if raised is error:
                raise
        finally:
            coroutine.close()  # a time limit may have interrupted it before it began
        try:
            raise raised
        finally:
            del raised  # its traceback refers to this frame

    return call


def as_raised(error: BaseException) -> BaseException:
    """The error that plain code in a coroutine has raised. Python makes a RuntimeError of a `StopIteration` that leaves
    a coroutine.
    """
    if type(error) is RuntimeError and error.args == ("coroutine raised StopIteration",):
        cause = error.__cause__
        if cause is not None and issubclass(type(cause), StopIteration):
            return cause
    return error


class OwnContext(Coroutine[Any, Any, T], Generator[Any, Any, T]):
    """Runs a coroutine, to be awaited once, in a context of its own: by default a copy of the current one.

    A task has one context for all its batches, so the context variables that a handler sets would remain for the next
    batch. A task for each batch would cost more, and be another task for `asyncio.current_task`, timeouts and
    cancelling.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, T], context: Context | None = None) -> None:
        #: As of a coroutine that awaits it: tools that show where a task waits follow this attribute.
        self.cr_await = coroutine
        self._run = (context or copy_context()).run

    def __await__(self) -> Generator[Any, Any, T]:
        return self

    def send(self, value: Any) -> Any:
        return self._run(self.cr_await.send, value)

    def throw(self, *error: Any) -> Any:
        return self._run(self.cr_await.throw, *error)

    def close(self) -> None:
        self._run(self.cr_await.close)
