"""Coroutines where there is no event loop, and coroutines in a context of their own.

What threads and event loops do alike is written once, as coroutines. In a thread all that they await is done at once.
"""

from asyncio import CancelledError
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context, copy_context
from typing import Any, TypeVar

T = TypeVar("T")


def at_once(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that awaits nothing but what is done at once."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError("it was suspended")


def run_first(run: Callable[[Coroutine[Any, Any, T]], T], coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine as the first task of an event loop, by ``asyncio.run`` or the like. What it raises is raised
    here, and not in the task: the loop would ask what class it says it has, and wait for ever if that raises.
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
    """The coroutine function as a plain one: what its coroutines await is done at once."""

    def call(*args: Any) -> T:
        coroutine = function(*args)
        try:
            return at_once(coroutine)
        except RuntimeError as error:
            raised = as_raised(error)
            if raised is error:
                raise
        finally:
            coroutine.close()  # interrupted by a time limit, it may not have begun
        try:
            raise raised
        finally:
            del raised  # this frame is a part of its traceback

    return call


def as_raised(error: BaseException) -> BaseException:
    """The error as plain code in a coroutine has raised it. Python makes a RuntimeError of a `StopIteration` that
    leaves a coroutine.
    """
    if type(error) is RuntimeError and error.args == ("coroutine raised StopIteration",):
        cause = error.__cause__
        if cause is not None and issubclass(type(cause), StopIteration):
            return cause
    return error


class OwnContext(Coroutine[Any, Any, T], Generator[Any, Any, T]):
    """The coroutine, to be awaited once, with its steps in a context of its own: a copy of the current one by default.

    A task has one context for all that it performs: what a handler sets of context variables would be there for the
    next batch. A task for each batch would cost more, and be another one for `asyncio.current_task`, timeouts and
    cancelling.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, T], context: Context | None = None) -> None:
        #: As of a coroutine that awaits it: who shows where a task waits goes by that.
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
