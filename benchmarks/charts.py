"""Two kinds of charts: bars beside each other, and lines over an axis."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.numbers import Spread, shown
from benchmarks.svg import WIDTH, Drawing

#: Pixels.
LINE_WIDTH, LINE_HEIGHT = 620, 340
BAR_WIDTH, BAR_STEP = 760, 22
#: Between two marks of an axis, or they would run into each other.
NARROWEST = 32


@dataclass(frozen=True)
class Panel:
    """Bars of one figure: its heading, and label -> value."""

    heading: str
    values: dict[str, float]


def bars(title: str, panels: Sequence[Panel], marked: str) -> str:
    """Panels of horizontal bars beside each other, one line per label; those whose label begins with `marked` stand
    out.
    """
    labels = list(dict.fromkeys(label for panel in panels for label in panel.values))
    left = max(len(label) for label in labels) * 12 * WIDTH + 16
    height = 78 + len(labels) * BAR_STEP + 10
    drawing = Drawing(BAR_WIDTH, height, title)
    drawing.text(12, 24, title, size=15, bold=True)
    room = (BAR_WIDTH - left - 12) / len(panels)
    for number, panel in enumerate(panels):
        x = left + number * room
        drawing.text(x, 56, panel.heading, colour="faint")
        longest = room - 64  # behind the longest bar its value has its place
        most = max(panel.values.values())
        for row, label in enumerate(labels):
            y = 68 + row * BAR_STEP
            ours = label.startswith(marked)
            if number == 0:
                drawing.text(left - 8, y + 13, label, anchor="end", bold=ours)
            value = panel.values.get(label)
            if value is None:
                continue
            width = max(value / most * longest, 1)
            drawing.bar(x, y + 2, width, BAR_STEP - 6, colour="first" if ours else "plain")
            drawing.text(x + width + 5, y + 13, shown(_short(value)), size=11, colour="ink" if ours else "faint")
    return drawing.render()


@dataclass(frozen=True)
class Line:
    """A line of a chart: its name, and its points with their spread."""

    name: str
    points: Sequence[tuple[float, Spread]]


@dataclass(frozen=True)
class Axis:
    """An axis: what it shows, and whether each step is ten times the last, or it is marked at its points alone."""

    name: str
    scale: str = "log"


def lines(title: str, horizontal: Axis, vertical: Axis, content: Sequence[Line]) -> str:
    """Lines over an axis, with what lies between minimum and maximum of the rounds."""
    drawing = Drawing(LINE_WIDTH, LINE_HEIGHT, title)
    drawing.text(12, 24, title, size=15, bold=True)
    left, right, top, bottom = 64.0, LINE_WIDTH - 130.0, 48.0, LINE_HEIGHT - 52.0
    xs = sorted({x for line in content for x, _ in line.points})
    ys = [value for line in content for _, found in line.points for value in found]
    across = _Scale(xs[0], xs[-1], left + 8, right - 8, horizontal.scale)
    low, high = (0.0, max(ys) * 1.1) if vertical.scale == "linear" else _decades(min(ys), max(ys))
    up = _Scale(low, high, bottom, top, vertical.scale)

    for tick in _ticks(low, high, vertical.scale):
        drawing.line([(left, up(tick)), (right, up(tick))])
        drawing.text(left - 8, up(tick) + 4, _tick(tick), colour="faint", size=11, anchor="end")
    last = -math.inf
    for x in xs:
        if across(x) - last > NARROWEST:
            last = across(x)
            drawing.text(last, bottom + 18, _tick(x), colour="faint", size=11, anchor="middle")
    drawing.text((left + right) / 2, LINE_HEIGHT - 10, horizontal.name, colour="faint", anchor="middle")
    drawing.text(16, (top + bottom) / 2, vertical.name, colour="faint", anchor="middle", turned=True)

    ends = []
    for line, colour in zip(content, ("first", "second", "third"), strict=False):
        above = [(across(x), up(found.high)) for x, found in line.points]
        below = [(across(x), up(found.low)) for x, found in line.points]
        drawing.area([*above, *reversed(below)], colour=colour)
        middle = [(across(x), up(found.median)) for x, found in line.points]
        drawing.line(middle, colour=colour, width=2)
        for x, y in middle:
            drawing.dot(x, y, colour=colour)
        ends.append((middle[-1][1], line.name, colour))
    place = -math.inf
    for y, name, colour in sorted(ends):  # never one name upon another
        place = max(y + 4, place + 15)
        drawing.text(right + 8, place, name, colour=colour)
    return drawing.render()


class _Scale:
    """From values to pixels."""

    def __init__(self, low: float, high: float, start: float, end: float, kind: str) -> None:
        self._log = kind == "log"
        self._low, self._high = self._value(low), self._value(high)
        self._start, self._end = start, end

    def __call__(self, value: float) -> float:
        share = (self._value(value) - self._low) / ((self._high - self._low) or 1.0)
        return self._start + share * (self._end - self._start)

    def _value(self, value: float) -> float:
        return math.log10(value) if self._log else value


def _decades(low: float, high: float) -> tuple[float, float]:
    return 10.0 ** math.floor(math.log10(low)), 10.0 ** math.ceil(math.log10(high))


def _ticks(low: float, high: float, kind: str) -> list[float]:
    if kind == "log":
        return [10.0**power for power in range(round(math.log10(low)), round(math.log10(high)) + 1)]
    step = 10.0 ** math.floor(math.log10(high / 2))
    step *= next(factor for factor in (1, 2, 5) if high / (step * factor) <= 6)
    return [number * step for number in range(int(high / step) + 1)]


def _tick(value: float) -> str:
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"


def _short(value: float) -> float:
    """Three digits: a chart is no place for more."""
    return float(f"{value:.3g}")
