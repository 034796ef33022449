"""How long the jobs of a queue wait and run, over time, and which ran longest."""

from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from lowq import inspection
from lowq.observe.histories import PERCENTILES
from lowq_web.chart import Chart, chart
from lowq_web.context import query_of, queue_of
from lowq_web.pages.charts import span_of, spans
from lowq_web.pages.rendering import render


@dataclass(frozen=True, slots=True)
class _Moment:
    """Percentiles of a stretch; None: there was nothing in it."""

    at: float
    p50: float | None
    p95: float | None
    p99: float | None


@dataclass(frozen=True, slots=True)
class _Drawn:
    """What of the times is on the page: of waits, or of runs."""

    title: str
    hint: str
    times: inspection.Histogram
    chart: Chart

    @property
    def percentiles(self) -> dict[str, tuple[float, float]]:
        """Name -> about how long, and the bound that it does not exceed."""
        return {
            name: (_estimate(self.times, share), self.times.percentile(share)) for name, share in PERCENTILES.items()
        }


def times(request: Request) -> Response:
    """Both, and the slowest batches of the last hour."""
    handle, query = queue_of(request), query_of(request)
    span = span_of(query)
    found = handle.times(span)
    waits = [_moment(item.at, item.wait) for item in found.stretches]
    runs = [_moment(item.at, item.run) for item in found.stretches]
    return render(
        request,
        "times.html",
        queue=handle.name,
        span=span,
        spans=spans(request, "times", span, query, queue=handle.name),
        drawn=(
            _Drawn("Wait", "From when a job is due until it is taken", found.wait, _drawn(waits)),
            _Drawn("Run", "Of a batch, with all its ids", found.run, _drawn(runs)),
        ),
        slowest=handle.slowest(),
    )


def _estimate(found: inspection.Histogram, share: float) -> float:
    """About the seconds that this share does not exceed, as if the lengths between two bounds were spread evenly, so
    that percentiles between the same bounds differ. Infinite: beyond all bounds; 0.0: without counts.
    """
    wanted, seen, low = share * found.count, 0, 0.0
    for bound, number in found.buckets:
        if number and seen + number >= wanted:
            return low + (bound - low) * (wanted - seen) / number
        seen, low = seen + number, bound
    return 0.0


def _moment(at: float, found: inspection.Histogram) -> _Moment:
    longest = found.buckets[-2][0]  # what is beyond the bounds is drawn there
    estimates = (_estimate(found, share) for share in PERCENTILES.values())
    return _Moment(at, *(min(estimate, longest) if found.count else None for estimate in estimates))


def _drawn(moments: list[_Moment]) -> Chart:
    # The largest lies behind the others.
    return chart(moments, list(reversed(PERCENTILES)), seconds=True, least=0.001)
