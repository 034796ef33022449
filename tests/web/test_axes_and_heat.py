"""What stands beside the lines of a chart, and heat maps, as far as they are reckoned on the server."""

import math

import pytest

import lowq
from lowq_web.chart import ALL_CELLS, MOST_CELLS, chart, heat_map, heat_maps
from tests.rows import case

NOON = 1_795_262_400.0  # 2026-11-21 12:00 UTC


def rates(*lags: float | None, begin: float = NOON, step: float = 10.0) -> list[lowq.HistoryPoint]:
    """A history of these lags; what is processed is ten times as much, and nothing fails."""
    return [
        lowq.HistoryPoint(begin + index * step, None if lag is None else lag * 10, None if lag is None else 0.0, lag)
        for index, lag in enumerate(lags)
    ]


def shard(index: int, lag: float = 0.0, length: int = 0, owner: str | None = "a") -> lowq.ShardInfo:
    return lowq.ShardInfo(index, length, 0, 0, lag, owner, 1, 5.0, False, None)


def overview(name: str, shards: list[lowq.ShardInfo]) -> lowq.QueueOverview:
    stats = lowq.Stats(name, len(shards), 0, 0, 0, 0, 0, 0, 0, 0.0, 0, 0, 0, False)
    return lowq.QueueOverview(stats, shards)


class TestAxes:
    def test_lags_end_at_a_round_length_of_time(self) -> None:
        rows: list[tuple[float, float]] = [
            (0.2, 1), (21, 30), (45, 60), (500, 600), (4000, 7200), (90_000, 172_800), (1e6, 1_728_000),
        ]  # fmt: skip
        for lag, top in rows:
            with case(lag, top):
                assert chart(rates(0.0, lag), ["lag"], seconds=True).top == top

    def test_nonsense_in_a_history_is_a_gap(self) -> None:
        for value in [math.inf, math.nan, -math.inf, 1e300, -5.0]:
            with case(value):
                for seconds in (True, False):
                    found = chart(rates(1.0, 2.0, value, 2.0, 1.0), ["lag"], seconds=seconds)
                    assert found.top == 2
                    assert len(found.lines[0].pieces) == 2

    @pytest.mark.parametrize(
        ("stretches", "step", "labels"),
        [
            (361, 10, ["12:10", "12:20", "12:30", "12:40", "12:50"]),
            (289, 300, ["16:00", "20:00", "00:00", "04:00", "08:00"]),
            (361, 7200, ["Nov 23", "Nov 28", "Dec 3", "Dec 8", "Dec 13"]),
        ],
    )
    def test_round_moments_are_marked(self, stretches: int, step: int, labels: list[str]) -> None:
        marks = chart(rates(*[1.0] * stretches, step=step), ["lag"]).marks
        assert [mark.label for mark in marks][: len(labels)] == labels
        length = (stretches - 1) * step
        assert marks[0].x == pytest.approx(100 * {10: 600, 300: 4 * 3600, 7200: 36 * 3600}[step] / length, abs=0.01)

    def test_no_marks_without_a_span(self) -> None:
        for begin in [0.0, -1e300, math.inf, math.nan]:
            with case(begin):
                assert chart(rates(1.0, 2.0, begin=begin), ["lag"]).marks == []
                assert chart([], ["lag"]).marks == []


class TestHeatMap:
    def test_colour_is_lag_and_fill_is_length(self) -> None:
        cells = heat_map("q", [shard(0), shard(1, 1.5, 1), shard(2, 31, 500), shard(3, 1e4, 10**6)]).cells
        assert [(cell.heat, cell.level) for cell in cells] == [(0, 0), (1, 1), (3, 3), (5, 6)]

    def test_of_very_many_shards_the_hottest_are_shown_in_their_order(self) -> None:
        shards = [shard(n, lag=float(n % 700)) for n in range(1400)]
        cells = heat_map("q", shards).cells
        assert len(cells) == MOST_CELLS
        assert [cell.shard.index for cell in cells] == sorted(cell.shard.index for cell in cells)
        assert min(cell.shard.lag for cell in cells) == 700 - MOST_CELLS / 2

    def test_all_queues_together_have_so_many_cells_and_the_hottest_are_among_them(self) -> None:
        queues = [overview(f"q{n:02d}", [shard(i, lag=float(n)) for i in range(400)]) for n in range(60)]
        queues.append(overview("hot", [shard(0, lag=500.0)]))
        maps = heat_maps(queues)
        assert sum(len(item.cells) for item in maps) <= ALL_CELLS
        # In the order of the table.
        assert [item.queue for item in maps] == ["q57", "q58", "q59", "hot"]

    @pytest.mark.parametrize(
        ("shards", "words"),
        [
            ([shard(0), shard(1)], "2 shards, none is late"),
            ([shard(0, 45), shard(1, 250), shard(2, owner=None)],
             "3 shards, shard 1 has the highest latency, 4 min 10 s, 2 above 30 s, 1 without an owner"),
            ([shard(7, 2.0)], "1 shard, shard 7 has the highest latency, 2.0 s"),
        ],
    )  # fmt: skip
    def test_it_is_put_into_words(self, shards: list[lowq.ShardInfo], words: str) -> None:
        assert heat_map("q", shards).words == words
