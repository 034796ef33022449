"""The shards of a queue: who holds which, and what waits there."""

from starlette.requests import Request
from starlette.responses import Response

from lowq_web.chart import heat_map
from lowq_web.fields import query_of
from lowq_web.pages.rendering import render
from lowq_web.site import queue_of, site_of

#: Shards of a page.
MAX_SHARDS = 200


def shards(request: Request) -> Response:
    """Who holds which, and what waits there."""
    site, handle, query = site_of(request), queue_of(request), query_of(request)
    found = site.lookout.shards(handle)
    keys = {"shard": lambda item: item.index, "length": lambda item: item.length, "lag": lambda item: item.lag}
    sort = query.get("sort", "shard")
    sort = sort if sort in keys else "shard"
    down = query.get("dir") == "desc"
    begin = min(int(query["from"][:6]), len(found)) if query.get("from", "").isdecimal() else 0
    return render(
        request,
        "shards.html",
        queue=handle.name,
        shards=sorted(found, key=keys[sort], reverse=down)[begin : begin + MAX_SHARDS],
        begin=begin,
        end=begin + MAX_SHARDS,
        count=len(found),
        heat_map=heat_map(handle.name, found),
        sort=sort,
        down=down,
    )
