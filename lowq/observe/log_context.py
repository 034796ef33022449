"""What a handler logs says which job it is about."""

import logging
from typing import Any

from lowq.work.execution import Execution, current_execution

#: Ids that a record carries at most.
MAX_IDS = 10


class LogContext(logging.Filter):
    """A filter for handlers of `logging`: each record that is made inside of ``perform`` gets the attributes ``queue``,
    ``shard``, ``ids`` (the first 10 of the batch, and ``ids_count`` when there are more; in ``perform_one`` its id),
    and ``delivery``. Records from elsewhere, and attributes that a record has, stay as they are. All records pass.

    It goes by context variables: it works in coroutines, and in what copies the context, such as `asyncio.to_thread`.
    ``lowq run`` adds it to the handlers of the root logger.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Adds the attributes. Always True."""
        execution = current_execution.get()
        if execution is not None:
            for name, value in _fields(execution).items():
                record.__dict__.setdefault(name, value)
        return True


def install() -> None:
    """Adds the filter to those handlers of the root logger that don't have it."""
    for handler in logging.getLogger().handlers:
        if not any(isinstance(item, LogContext) for item in handler.filters):
            handler.addFilter(LogContext())


def _fields(execution: Execution) -> dict[str, Any]:
    running = execution._running_id
    ids = [item.id for item in execution._jobs[:MAX_IDS]] if running is None else [running]
    fields = {
        "queue": getattr(execution.worker, "queue_name", execution.worker.__name__),
        "shard": execution.shard,
        "ids": ids,
        "delivery": execution.delivery,
    }
    if running is None and len(execution._jobs) > MAX_IDS:
        fields["ids_count"] = len(execution._jobs)
    return fields
