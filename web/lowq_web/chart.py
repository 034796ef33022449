"""Charts as SVG. static/app.js adds the values at the pointer, and replaces a chart when there is a newer one."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count
from typing import Protocol

from lowq import inspection
from lowq_web import text

WIDTH, HEIGHT = 960, 180
#: Steps that an axis of values has at most.
_MOST_STEPS = 5
#: Shards that a heat map shows, the hottest: of one queue, and of all queues of a page together.
MOST_CELLS, ALL_CELLS = 500, 1000
#: Queues of a page that have one.
MOST_MAPS = 20
#: More than that is no rate and no lag: another program has written into a history.
_ABSURD = 1e15


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a chart, in pieces: it has gaps where no value is known."""

    name: str
    pieces: list[str]


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment on the axis of time."""

    #: From the left, in percent of the width.
    x: float
    #: Unix time, seconds; and in UTC: 15:30, or Nov 21.
    at: float
    label: str


@dataclass(frozen=True, slots=True)
class Step:
    """A value on the axis of values."""

    #: From the top, in the units of HEIGHT.
    y: float
    label: str


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines scaled to a box of WIDTH x HEIGHT, and its axes."""

    lines: list[Line]
    steps: list[Step]
    marks: list[Mark]
    #: No value is known, so there is nothing to draw.
    empty: bool

    @property
    def top(self) -> str:
        """The largest value of the axis."""
        return self.steps[-1].label


class Moment(Protocol):
    """Values at some time."""

    @property
    def at(self) -> float:
        """Unix time, seconds."""


def chart(moments: Sequence[Moment], names: Sequence[str], *, seconds: bool = False, least: float = 1.0) -> Chart:
    """Some of their fields over time, on one scale. ``seconds``: the fields are durations, and the scale ends with
    ``least`` or more of them; otherwise they are rates per second.
    """
    columns = {name: [known(getattr(moment, name)) for moment in moments] for name in names}
    most = max((value for column in columns.values() for value in column if value is not None), default=0.0)
    most = max(most, least) if seconds else most or 1.0
    step = _step_of(most, _DURATIONS if seconds else ())
    steps = max(math.ceil(most / step - 1e-9), 1)
    write = _written_by(step) if seconds else _written
    last = max(len(moments) - 1, 1)
    lines = []
    for name, column in columns.items():
        pieces: list[list[tuple[float, float]]] = [[]]
        for index, value in enumerate(column):
            if value is None:
                pieces.append([])
            else:
                pieces[-1].append((WIDTH * index / last, HEIGHT * (1 - value / (steps * step))))
        lines.append(Line(name, [_points(piece, WIDTH / last / 2) for piece in pieces if piece]))
    return Chart(
        lines,
        [Step(round(HEIGHT * (1 - number / steps), 1), write(number * step)) for number in range(steps + 1)],
        _marks(moments[0].at, moments[-1].at) if moments else [],
        empty=all(value is None for column in columns.values() for value in column),
    )


def _points(piece: Sequence[tuple[float, float]], half: float) -> str:
    """A piece of a line. A single moment is drawn ``half`` a moment to each side: a point alone is not to be seen."""
    if len(piece) == 1:
        ((x, y),) = piece
        piece = [(max(x - half, 0.0), y), (min(x + half, WIDTH), y)]
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in piece)


def _written(value: float) -> str:
    return text.short(value) if value >= 10 else f"{value:g}"


#: Seconds of a unit -> its name.
_UNITS = {86_400: "d", 3600: "h", 60: "min", 1: "s", 0.001: "ms"}


def _written_by(step: float) -> Callable[[float], str]:
    """Durations in one unit, that of the step: 80 s, 100 s."""
    size = next(size for size in _UNITS if size <= step)
    return lambda value: f"{value / size:g} {_UNITS[size]}"


def known(value: float | None) -> float | None:
    """The value, unless it is none that a history can have."""
    return value if value is not None and 0 <= value < _ABSURD else None


#: Durations that an axis may step by, in seconds, up to a day.
_DURATIONS = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600,
    7200, 14_400, 21_600, 43_200, 86_400,
)  # fmt: skip


def _step_of(most: float, durations: Sequence[float]) -> float:
    """The smallest round step of which at most `_MOST_STEPS` reach ``most``: one of these, or beyond them 1, 2 or 5
    times a power of ten of the last one.
    """
    unit = durations[-1] if durations else 1.0
    powers = (part * 10.0**power * unit for power in count(0 if durations else -3) for part in (1, 2, 5))
    found = next((step for step in durations if step * _MOST_STEPS >= most), 0.0)
    return found or next(step for step in powers if step * _MOST_STEPS >= most)


#: Spans up to so many seconds -> seconds between two marks, and how a moment is written.
_MARKS = ((7200.0, 600, "%H:%M"), (2 * 86_400.0, 4 * 3600, "%H:%M"), (math.inf, 5 * 86_400, "%b %-d"))


def _marks(begin: float, end: float) -> list[Mark]:
    """Round moments between these; none so near to an end that its label would not fit."""
    if not 0 < begin < end < _ABSURD:
        return []
    _, step, written = next(row for row in _MARKS if end - begin <= row[0])
    if (end - begin) / step > 100:
        return []  # no span of a history is that long
    at = (begin // step + 1) * step
    marks = []
    while at < end:
        x = 100 * (at - begin) / (end - begin)
        if 3 <= x <= 97:
            marks.append(Mark(round(x, 2), at, datetime.fromtimestamp(at, UTC).strftime(written)))
        at += step
    return marks


# --- heat maps -----------------------------------------------------------------------------------------------

#: Lags in seconds, and lengths, above which a shard is a degree hotter.
_LAGS = (1.0, 5.0, 30.0, 120.0, 600.0)
_LENGTHS = (1, 10, 100, 1_000, 10_000, 100_000)


@dataclass(frozen=True, slots=True)
class Cell:
    """A shard: colour by lag, fill by length."""

    shard: inspection.ShardInfo
    #: 0 (no lag) to 5.
    heat: int
    #: 0 (empty) to 6.
    level: int

    @property
    def words(self) -> str:
        """What is special about it while its queue is resharded; "": nothing."""
        shard = self.shard
        if shard.moved:
            return "moved, old "
        return "being moved, old " if shard.sealed else "being filled, new " if shard.fed else ""


@dataclass(frozen=True, slots=True)
class HeatMap:
    """The shards of a queue, by index; only the hottest if there are very many."""

    queue: str
    cells: list[Cell]
    #: A description for screen readers.
    words: str


def heat_map(queue: str, shards: Sequence[inspection.ShardInfo], most: int = MOST_CELLS) -> HeatMap:
    """The heat map of a queue, with at most ``most`` cells."""
    shown = sorted(sorted(shards, key=_heat, reverse=True)[:most], key=lambda shard: (shard.epoch, shard.index))
    cells = [
        Cell(shard, sum(shard.lag > lag for lag in _LAGS), sum(shard.length >= length for length in _LENGTHS))
        for shard in shown
    ]
    return HeatMap(queue, cells, _words(shards))


def heat_maps(queues: Sequence[inspection.QueueOverview]) -> list[HeatMap]:
    """The heat maps of the queues with the hottest shards, as many as a page has room for, in the order given."""
    left = ALL_CELLS
    found: dict[str, HeatMap] = {}
    for item in sorted(queues, key=lambda item: max(map(_heat, item.shards), default=(0.0, 0)), reverse=True):
        if left <= 0 or len(found) == MOST_MAPS:
            break
        found[item.stats.name] = heat_map(item.stats.name, item.shards, min(left, MOST_CELLS))
        left -= len(found[item.stats.name].cells)
    return [found[item.stats.name] for item in queues if item.stats.name in found]


def _heat(shard: inspection.ShardInfo) -> tuple[float, int]:
    return shard.lag, shard.length


def _words(shards: Sequence[inspection.ShardInfo]) -> str:
    parts = ["1 shard" if len(shards) == 1 else f"{len(shards):,} shards"]
    hottest = max(shards, key=_heat, default=None)
    if hottest is not None and hottest.lag >= 1:
        parts.append(f"shard {hottest.index} has the highest latency, {text.duration(hottest.lag)}")
        slow = sum(shard.lag > 30 for shard in shards)
        if slow > 1:
            parts.append(f"{slow:,} above 30 s")
    else:
        parts.append("none is late")
    ownerless = sum(shard.owner is None and not (shard.sealed or shard.fed) for shard in shards)
    if ownerless:
        parts.append(f"{ownerless:,} without an owner")
    return ", ".join(parts)
