"""What nodes and the log say, as far as a page can show it.

Whoever can write to Redis may have written it, in whatever version of lowq or by hand: what has another form than
expected is left out, and the rest of the page stays.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import lowq

#: More is no amount of memory, in bytes, and no process id.
_MEMORY, _PID = 2**60, 2**40


def node(info: lowq.NodeInfo) -> lowq.NodeInfo:
    """A node; a thread that says something else than what it performs is an empty mapping."""
    return replace(
        info,
        pid=info.pid if 0 < info.pid < _PID else 0,
        started_at=info.started_at if _number(info.started_at) else None,
        memory=info.memory if 0 < info.memory < _MEMORY else 0,
        queues=tuple(filter(_text, info.queues)),
        shards={
            queue: held
            for queue, held in info.shards.items()
            if _text(queue) and isinstance(held, list | tuple) and all(isinstance(index, int) for index in held)
        },
        performing=tuple(map(_seat, info.performing)),
    )


def _seat(says: Any) -> Mapping[str, Any] | None:
    if says is None:
        return None
    if (
        isinstance(says, Mapping)
        and _text(says.get("queue"))
        and isinstance(says.get("shard"), int)
        and isinstance(says.get("ids"), list | tuple)
        and all(map(_text, says["ids"]))
        and _number(says.get("seconds"))
    ):
        count = says.get("count")
        return {**says, "count": count if isinstance(count, int) else len(says["ids"])}
    return {}


def entry(said: lowq.AuditEntry) -> lowq.AuditEntry:
    """An entry of the log."""
    count: Any = said.count
    detail: Any = said.detail
    return replace(
        said,
        count=count if isinstance(count, int) else None,
        detail=detail if isinstance(detail, Mapping) else {},
    )


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) < 1e15 and math.isfinite(value)


def _text(value: Any) -> bool:
    """A text that an address can hold."""
    if not isinstance(value, str) or not value:
        return False
    try:
        value.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False
    return True
