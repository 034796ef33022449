"""What fails: failures of all queues, or of one, in groups of alike errors."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from lowq.inspection import ErrorGroup
from lowq.observe.error_groups import HOURS
from lowq_web.context import context_of, query_of
from lowq_web.pages.rendering import render

#: Groups that a page shows.
MOST = 200
#: Height of a sparkline, and width of an hour in it.
HEIGHT, WIDTH = 16, 3


@dataclass(frozen=True, slots=True)
class _Row:
    """The groups of a fingerprint, one of each queue that it fails in, the last seen first."""

    groups: list[ErrorGroup]

    @property
    def latest(self) -> ErrorGroup:
        return self.groups[0]

    @property
    def hours(self) -> list[int]:
        return [sum(counts) for counts in zip(*(group.hours for group in self.groups), strict=True)]

    @property
    def count(self) -> int:
        return sum(group.count for group in self.groups)

    @property
    def first_seen(self) -> float:
        return min(group.first_seen for group in self.groups)


def errors(request: Request) -> Response:
    """The errors, those that fail most first, or those that were seen last."""
    app, query = context_of(request).app, query_of(request)
    queue, by_last = query.get("queue", ""), query.get("sort") == "last"
    rows = _rows(app.queue(queue, app.queue(queue).shards_count).error_groups() if queue else app.error_groups())
    if not by_last:
        rows.sort(key=lambda row: sum(row.hours), reverse=True)
    return render(
        request, "errors.html", queue=queue, by_last=by_last, rows=rows[:MOST], hidden_count=max(len(rows) - MOST, 0),
        sparkline=sparkline, hours=HOURS, width=HOURS * WIDTH, height=HEIGHT,
    )  # fmt: skip


def _rows(groups: Iterable[ErrorGroup]) -> list[_Row]:
    rows: dict[str, _Row] = {}
    for group in groups:
        rows.setdefault(group.fingerprint, _Row([])).groups.append(group)
    return list(rows.values())


def sparkline(counts: Sequence[int]) -> str:
    """The path of a bar for each hour, the highest as high as the line is."""
    highest = max(counts, default=0) or 1
    bars = []
    for hour, count in enumerate(counts):
        size = max(round(HEIGHT * count / highest), 1 if count else 0)
        bars.append(f"M{hour * WIDTH} {HEIGHT - size}h{WIDTH - 1}v{size}h-{WIDTH - 1}z" if size else "")
    return "".join(bars)
