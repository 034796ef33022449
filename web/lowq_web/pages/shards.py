"""The shards of a queue: who holds which, and what waits there.

They are sorted anew for every page, by values that change all the time. So an address carries the shards that the
pages before it have shown, and a page has the first of the others: none is shown twice or missed.
"""

import re

from starlette.requests import Request
from starlette.responses import Response

from lowq.store.keys import MAX_SHARDS as LARGEST
from lowq_web.chart import heat_map
from lowq_web.context import context_of, queue_of
from lowq_web.fields import query_of
from lowq_web.pages.rendering import render

#: Shards of a page.
MAX_SHARDS = 200


def shards(request: Request) -> Response:
    """Who holds which, and what waits there."""
    context, handle, query = context_of(request), queue_of(request), query_of(request)
    found = context.stats_cache.shards(handle)
    keys = {"shard": lambda item: item.index, "length": lambda item: item.length, "lag": lambda item: item.lag}
    sort = query.get("sort", "shard")
    sort = sort if sort in keys else "shard"
    down = query.get("dir") == "desc"
    seen = _seen(query.get("seen", ""))
    left = [shard for shard in sorted(found, key=keys[sort], reverse=down) if not seen >> shard.index & 1]
    page = left[:MAX_SHARDS]
    return render(
        request,
        "shards.html",
        queue=handle.name,
        shards=page,
        further=min(len(left) - len(page), MAX_SHARDS),
        seen=f"{seen:x}" if seen else "",
        then_seen=f"{seen | sum(1 << shard.index for shard in page):x}",
        count=len(found),
        heat_map=heat_map(handle.name, found),
        sort=sort,
        down=down,
    )


def _seen(typed: str) -> int:
    """Shards as the bits of a hexadecimal number; none for what is no such number."""
    return int(typed, 16) if re.fullmatch(f"[0-9a-f]{{1,{LARGEST // 4 + 1}}}", typed) else 0
