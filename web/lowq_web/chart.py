"""Charts as SVG, for pages without JavaScript; with it, static/app.js draws them anew, larger and live."""

from collections.abc import Sequence
from dataclasses import dataclass

import lowq

WIDTH, HEIGHT = 960, 180
#: Shards of a queue that its heat map shows: the hottest of them.
MOST_CELLS = 500


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a chart, in pieces: it is broken where nothing is known."""

    name: str
    pieces: list[str]


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines scaled to a box of WIDTH x HEIGHT."""

    lines: list[Line]
    top: float
    begin: float
    end: float


def chart(rates: Sequence[lowq.Rate], names: Sequence[str]) -> Chart:
    """The fields of some rates over time, on one scale."""
    values = [value for rate in rates for name in names if (value := getattr(rate, name)) is not None]
    top = _round_up(max(values, default=0.0))
    last = max(len(rates) - 1, 1)
    lines = []
    for name in names:
        pieces: list[list[str]] = [[]]
        for index, rate in enumerate(rates):
            value = getattr(rate, name)
            if value is None:
                pieces.append([])
            else:
                pieces[-1].append(f"{WIDTH * index / last:.1f},{HEIGHT - (HEIGHT - 4) * value / top:.1f}")
        lines.append(Line(name, [" ".join(piece) for piece in pieces if len(piece) > 1]))
    return Chart(lines, top, rates[0].at if rates else 0.0, rates[-1].at if rates else 0.0)


def _round_up(value: float) -> float:
    """To 1, 2 or 5 times a power of ten."""
    step = 1.0
    while step < value:
        step *= 10
    while step > 0.001 and step / 10 >= value:
        step /= 10
    return next(part for part in (step / 5, step / 2, step) if part >= value) if value > 0 else 1.0


# --- heat maps -----------------------------------------------------------------------------------------------

#: Lags in seconds, and lengths, above which a shard is a degree hotter.
_LAGS = (1.0, 5.0, 30.0, 120.0, 600.0)
_LENGTHS = (1, 10, 100, 1_000, 10_000, 100_000)


@dataclass(frozen=True, slots=True)
class Cell:
    """A shard: colour by lag, fill by length."""

    shard: lowq.ShardInfo
    #: 0 (no lag) to 5.
    heat: int
    #: 0 (empty) to 6.
    level: int


def heat_map(shards: Sequence[lowq.ShardInfo]) -> list[Cell]:
    """The shards by index; of very many the hottest."""
    cells = [
        Cell(shard, sum(shard.lag > lag for lag in _LAGS), sum(shard.length >= length for length in _LENGTHS))
        for shard in shards
    ]
    if len(cells) > MOST_CELLS:
        hottest = sorted(cells, key=lambda cell: (cell.shard.lag, cell.shard.length), reverse=True)[:MOST_CELLS]
        cells = sorted(hottest, key=lambda cell: cell.shard.index)
    return cells
