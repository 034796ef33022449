"""Instances of workers: set up before their first batch and torn down after their last, where they perform.

An instance belongs to one thread, or to the event loop. ``setup`` and ``teardown`` are called there, once each. What
could not be set up is not torn down.
"""

from collections.abc import Iterable
from typing import Any

from lowq.logs import get_log
from lowq.middleware import check_done
from lowq.workers import Worker, is_async

log = get_log("lowq.node")

#: Those that do nothing.
_OF_WORKER: list[tuple[str, Any]] = [("setup", Worker.setup), ("teardown", Worker.teardown)]


def has_life(worker: object) -> bool:
    """Whether the worker, a class or an instance, has a ``setup`` or a ``teardown`` of its own."""
    kind: Any = worker if isinstance(worker, type) else type(worker)
    return any(getattr(kind, name, own) is not own for name, own in _OF_WORKER)


class Instances:
    """Those of one thread, or of the event loop, that were set up. Only for that thread."""

    def __init__(self) -> None:
        self._set_up: list[Any] = []

    def __bool__(self) -> bool:
        return bool(self._set_up)

    async def set_up(self, instances: Iterable[object]) -> None:
        """Calls ``setup`` of each, which may be an async def if its worker is async.

        Raises:
            What it raises, with a note that says of which worker. ConfigError: it returned a coroutine.
        """
        for instance in instances:
            if has_life(instance):
                try:
                    await _call(instance, "setup")
                except BaseException as error:
                    error.add_note(
                        f"raised by {type(instance).__name__}.setup, before anything was performed by that instance"
                    )
                    raise
                self._set_up.append(instance)

    async def tear_down(self) -> None:
        """Calls ``teardown`` of all that were set up, the last first. What it raises is logged."""
        while self._set_up:
            instance = self._set_up.pop()
            try:
                await _call(instance, "teardown")
            except BaseException:
                log.exception("%s.teardown failed", type(instance).__name__)


async def _call(instance: Any, method: str) -> None:
    returned = getattr(instance, method)()
    if returned is not None and is_async(type(instance)):
        returned = await returned
    check_done(returned, type(instance), method)
