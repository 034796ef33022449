"""Charts and heat maps, as far as they are reckoned on the server; what was recorded is tested with their pages."""

import math
import re

import pytest

import lowq
from lowq_web.chart import ALL_CELLS, HEIGHT, MOST_CELLS, WIDTH, Line, chart, heat_map, heat_maps
from tests.rows import case

NOON = 1_795_262_400.0  # 2026-11-21 12:00 UTC


def rates(*lags: float | None, begin: float = NOON, step: float = 10.0) -> list[lowq.HistoryPoint]:
    """A history of these lags; what is processed is ten times as much, and nothing fails."""
    return [
        lowq.HistoryPoint(begin + index * step, None if lag is None else lag * 10, None if lag is None else 0.0, lag)
        for index, lag in enumerate(lags)
    ]


def points(line: Line) -> list[list[tuple[float, float]]]:
    """The pieces of a line: (from the left, from the bottom), 1 being the whole width and the top of the scale."""
    return [
        [(float(x) / WIDTH, (HEIGHT - float(y)) / (HEIGHT - 4)) for x, y in (pair.split(",") for pair in piece.split())]
        for piece in line.pieces
    ]


def shard(index: int, lag: float = 0.0, length: int = 0, owner: str | None = "a") -> lowq.ShardInfo:
    return lowq.ShardInfo(index, length, 0, 0, lag, owner, 1, 5.0, False, None)


def overview(name: str, shards: list[lowq.ShardInfo]) -> lowq.QueueOverview:
    stats = lowq.Stats(name, len(shards), 0, 0, 0, 0, 0, 0, 0, 0.0, 0, 0, 0, False)
    return lowq.QueueOverview(stats, shards)


class TestLines:
    def test_a_line_is_broken_where_nothing_is_known(self) -> None:
        rows: list[tuple[list[float | None], list[list[tuple[float, float]]]]] = [
            ([0, 5, 10, 2.5, 0], [[(0, 0), (0.25, 0.5), (0.5, 1), (0.75, 0.25), (1, 0)]]),
            # A single stretch between two gaps is as long as it lasts, and at an end stays within the chart.
            ([1, 1, None, 0, None, 1, 0, None],
             [[(0, 1), (1 / 7, 1)], [(2.5 / 7, 0), (3.5 / 7, 0)], [(5 / 7, 1), (6 / 7, 0)]]),
            ([1, None, 0], [[(0, 1), (1 / 4, 1)], [(3 / 4, 0), (1, 0)]]),
            ([0, 0], [[(0, 0), (1, 0)]]),
            ([], []),
            ([None, None], []),
        ]  # fmt: skip
        for lags, pieces in rows:
            with case(lags):
                found = chart(rates(*lags), ["lag"])
                near = [[pytest.approx(point, abs=0.002) for point in piece] for piece in pieces]
                assert points(found.lines[0]) == near
                assert (found.empty, found.top > 0) == (not pieces, True)

    def test_all_lines_have_one_scale_and_each_is_of_its_own_field(self) -> None:
        found = chart([lowq.HistoryPoint(0, 10, 1, 7), lowq.HistoryPoint(10, 5, 2, 3)], ["processed", "failed"])
        assert [line.name for line in found.lines] == ["processed", "failed"]
        heights = [[y for _, y in piece] for line in found.lines for piece in points(line)]
        assert heights == [pytest.approx([1, 0.5], abs=0.002), pytest.approx([0.1, 0.2], abs=0.002)]

    def test_a_scale_ends_with_a_round_number_that_nothing_exceeds(self) -> None:
        numbers: list[tuple[float, float]] = [
            (0.0, 1), (1, 1), (1.01, 2), (2.1, 5), (5, 5), (5.5, 10), (11, 20), (4001, 5000), (0.3, 0.5), (0.013, 0.02),
        ]  # fmt: skip
        times: list[tuple[float, float]] = [
            (0.2, 1), (21, 30), (45, 60), (500, 600), (4000, 7200), (90_000, 172_800), (1e6, 1_728_000),
        ]  # fmt: skip
        for seconds, rows in ((False, numbers), (True, times)):
            for most, top in rows:
                with case(most, top):
                    assert chart(rates(0.0, most), ["lag"], seconds=seconds).top == pytest.approx(top)

    def test_nonsense_in_a_history_is_a_gap(self) -> None:
        for value in [math.inf, math.nan, -math.inf, 1e300, -5.0]:
            for seconds in (True, False):
                with case(value, seconds):
                    found = chart(rates(1.0, 2.0, value, 2.0, 1.0), ["lag"], seconds=seconds)
                    assert (found.top, len(found.lines[0].pieces)) == (2, 2)

    def test_round_moments_are_marked(self) -> None:
        rows: list[tuple[int, int, float, list[str]]] = [
            (361, 10, 600, ["12:10", "12:20", "12:30", "12:40", "12:50"]),
            (289, 300, 4 * 3600, ["16:00", "20:00", "00:00", "04:00", "08:00"]),
            (361, 7200, 36 * 3600, ["Nov 23", "Nov 28", "Dec 3", "Dec 8", "Dec 13"]),
        ]
        for stretches, step, first, labels in rows:
            with case(step):
                marks = chart(rates(*[1.0] * stretches, step=step), ["lag"]).marks
                assert [mark.label for mark in marks][: len(labels)] == labels
                assert marks[0].x == pytest.approx(100 * first / ((stretches - 1) * step), abs=0.01)
        for begin in [0.0, -1e300, math.inf, math.nan]:
            assert chart(rates(1.0, 2.0, begin=begin), ["lag"]).marks == [], "without a span"


class TestHeatMap:
    def test_colour_is_lag_and_fill_is_length(self) -> None:
        cells = heat_map("q", [shard(0), shard(1, 1.5, 1), shard(2, 31, 500), shard(3, 1e4, 10**6)]).cells
        assert [(cell.heat, cell.level) for cell in cells] == [(0, 0), (1, 1), (3, 3), (5, 6)]

    def test_of_very_many_shards_the_hottest_are_shown_in_their_order(self) -> None:
        cells = heat_map("q", [shard(n, lag=float(n % 700)) for n in range(1400)]).cells
        assert len(cells) == MOST_CELLS
        assert [cell.shard.index for cell in cells] == sorted(cell.shard.index for cell in cells)
        assert min(cell.shard.lag for cell in cells) == 700 - MOST_CELLS / 2

    def test_all_queues_together_have_so_many_cells_and_the_hottest_are_among_them(self) -> None:
        queues = [overview(f"q{n:02d}", [shard(i, lag=float(n)) for i in range(400)]) for n in range(60)]
        maps = heat_maps([*queues, overview("hot", [shard(0, lag=500.0)])])
        assert sum(len(item.cells) for item in maps) <= ALL_CELLS
        assert [item.queue for item in maps] == ["q57", "q58", "q59", "hot"], "in the order of the table"

    def test_it_is_put_into_words(self) -> None:
        rows = [
            ([shard(0), shard(1)], ["2"]),
            ([shard(0, 45), shard(1, 250), shard(2, owner=None)], ["3", "1", "4", "10", "2", "30", "1"]),
            ([shard(7, 2.0)], ["1", "7", "2", "0"]),
        ]
        for shards, numbers in rows:
            with case(shards):
                assert re.findall(r"\d+", heat_map("q", shards).words) == numbers
