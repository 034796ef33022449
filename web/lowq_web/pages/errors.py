"""What fails: failures of all queues, or of one, in groups of alike errors."""

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from lowq.observe.error_groups import HOURS, most_frequent_first
from lowq_web.context import context_of
from lowq_web.fields import query_of
from lowq_web.pages.rendering import render

#: Groups that a page shows.
MOST = 200
#: Height of a sparkline, and width of an hour in it.
HEIGHT, WIDTH = 16, 3


def errors(request: Request) -> Response:
    """The groups, those that fail most first, or those that were seen last."""
    app, query = context_of(request).app, query_of(request)
    queue, by_last = query.get("queue", ""), query.get("sort") == "last"
    found = app.queue(queue, app.queue(queue).shards_count).error_groups() if queue else app.error_groups()
    groups = found if by_last else most_frequent_first(found)
    return render(
        request, "errors.html", queue=queue, by_last=by_last, groups=groups[:MOST],
        hidden_count=max(len(found) - MOST, 0), sparkline=sparkline, hours=HOURS, width=HOURS * WIDTH, height=HEIGHT,
    )  # fmt: skip


def sparkline(counts: Sequence[int]) -> str:
    """The path of a bar for each hour, the highest as high as the line is."""
    highest = max(counts, default=0) or 1
    bars = []
    for hour, count in enumerate(counts):
        size = max(round(HEIGHT * count / highest), 1 if count else 0)
        bars.append(f"M{hour * WIDTH} {HEIGHT - size}h{WIDTH - 1}v{size}h-{WIDTH - 1}z" if size else "")
    return "".join(bars)
