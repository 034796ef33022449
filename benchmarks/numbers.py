"""Percentiles and spreads, and how figures are printed."""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least that share of the values doesn't exceed; `share` is 0.5 for the median."""
    ordered = sorted(values)
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)]


class Spread(NamedTuple):
    """What several rounds gave."""

    low: float
    median: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    return Spread(min(values), statistics.median(values), max(values))


def shown(value: float) -> str:
    """A figure with three digits that say something, or all of those before the point."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else "-"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(digits, 3)}f}"
