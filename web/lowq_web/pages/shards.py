"""The shards of a queue: who holds which, and what waits there.

They are sorted anew for every page, by values that change all the time. So an address carries the shards that the
pages before it have shown, and a page has the first of the others: none is shown twice or missed.
"""

import re

from starlette.requests import Request
from starlette.responses import Response

from lowq.operate.stats import LATE_SECONDS
from lowq.store.keys import MAX_SHARDS as LARGEST
from lowq_web.chart import heat_map
from lowq_web.context import AppContext, context_of, query_of, queue_of
from lowq_web.pages.rendering import SHARDS_PER_PAGE, render
from lowq_web.severity import level_of_lag


def shards(request: Request) -> Response:
    """Who holds which, and what waits there."""
    context, handle, query = context_of(request), queue_of(request), query_of(request)
    found = context.stats_cache.shards(handle)
    # While it is resharded there are two of a number: so `seen` has places, those of the new layout behind the others.
    place = {(shard.epoch, shard.index): number for number, shard in enumerate(found)}
    keys = {
        "shard": lambda item: (item.epoch, item.index),
        "length": lambda item: item.length,
        "lag": lambda item: item.lag,
    }
    sort = query.get("sort", "shard")
    sort = sort if sort in keys else "shard"
    down = query.get("dir") == "desc"
    seen = _seen(query.get("seen", ""))
    left = [
        shard
        for shard in sorted(found, key=keys[sort], reverse=down)
        if not seen >> place[shard.epoch, shard.index] & 1
    ]
    page = left[:SHARDS_PER_PAGE]
    return render(
        request,
        "shards.html",
        queue=handle.name,
        shards=page,
        further=min(len(left) - len(page), SHARDS_PER_PAGE),
        seen=f"{seen:x}" if seen else "",
        then_seen=f"{seen | sum(1 << place[shard.epoch, shard.index] for shard in page):x}",
        count=len(found),
        epoch=min((shard.epoch for shard in found), default=0),
        heat_map=heat_map(handle.name, found),
        latency_goal=_latency_goal(context, handle.name),
        level_of_lag=level_of_lag,
        sort=sort,
        down=down,
    )


def _latency_goal(context: AppContext, name: str) -> float:
    figures = context.stats_cache.figures().queues
    return next((item.stats.latency_goal for item in figures if item.stats.name == name), LATE_SECONDS)


def _seen(typed: str) -> int:
    """Shards as the bits of a hexadecimal number; none for what is no such number."""
    return int(typed, 16) if re.fullmatch(f"[0-9a-f]{{1,{LARGEST // 2 + 1}}}", typed) else 0
