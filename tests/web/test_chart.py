"""Lines of charts, and histories added up: pure functions."""

import pytest

import lowq
from lowq_web.chart import HEIGHT, WIDTH, Line, chart
from tests.rows import case


def rate(
    at: float, processed: float | None = 0.0, failed: float | None = 0.0, lag: float | None = 0.0
) -> lowq.HistoryPoint:
    return lowq.HistoryPoint(at, processed, failed, lag)


def unknown(at: float) -> lowq.HistoryPoint:
    return lowq.HistoryPoint(at, None, None, None)


def points(line: Line) -> list[list[tuple[float, float]]]:
    """The pieces of a line: (from the left, from the bottom), 1 being the whole width and the top of the scale."""
    return [
        [(float(x) / WIDTH, (HEIGHT - float(y)) / (HEIGHT - 4)) for x, y in (pair.split(",") for pair in piece.split())]
        for piece in line.pieces
    ]


def near(expected: list[tuple[float, float]]) -> list[object]:
    return [pytest.approx(point, abs=0.002) for point in expected]


class TestLines:
    def test_values_are_heights_and_time_goes_to_the_right(self) -> None:
        found = chart([rate(0, 0), rate(10, 5), rate(20, 10), rate(30, 2.5), rate(40, 0)], ["processed"])
        assert found.top == 10
        (line,) = found.lines
        assert line.name == "processed"
        assert points(line) == [near([(0, 0), (0.25, 0.5), (0.5, 1), (0.75, 0.25), (1, 0)])]

    def test_all_lines_have_one_scale(self) -> None:
        found = chart([rate(0, 10, 1), rate(10, 5, 2)], ["processed", "failed"])
        assert [line.name for line in found.lines] == ["processed", "failed"]
        assert [points(line) for line in found.lines] == [[near([(0, 1), (1, 0.5)])], [near([(0, 0.1), (1, 0.2)])]]

    def test_each_line_is_of_its_own_field(self) -> None:
        rates = [rate(0, 1, 2, 5), rate(10, 2, 1, 1)]
        found = chart(rates, ["processed", "failed", "lag"])
        assert [points(line) for line in found.lines] == [
            [near([(0, 0.2), (1, 0.4)])], [near([(0, 0.4), (1, 0.2)])], [near([(0, 1), (1, 0.2)])],
        ]  # fmt: skip
        assert chart(rates, ["failed"]).top == 2

    def test_a_line_is_broken_where_nothing_is_known(self) -> None:
        rates = [rate(0, 1), rate(10, 1), unknown(20), rate(30, 0), unknown(40), rate(50, 1), rate(60, 0), unknown(70)]
        # A single stretch between two gaps is as long as it lasts.
        (line,) = chart(rates, ["processed"]).lines
        assert points(line) == [
            near([(0, 1), (1 / 7, 1)]), near([(2.5 / 7, 0), (3.5 / 7, 0)]), near([(5 / 7, 1), (6 / 7, 0)])
        ]  # fmt: skip

    def test_a_single_stretch_at_an_end_stays_within_the_chart(self) -> None:
        (line,) = chart([rate(0, 1), unknown(10), rate(20, 0)], ["processed"]).lines
        assert points(line) == [near([(0, 1), (1 / 4, 1)]), near([(3 / 4, 0), (1, 0)])]

    @pytest.mark.parametrize("rates", [[], [unknown(0), unknown(10)]])
    def test_without_a_value_there_is_no_line(self, rates: list[lowq.HistoryPoint]) -> None:
        found = chart(rates, ["processed", "lag"])
        assert [line.pieces for line in found.lines] == [[], []]
        assert found.top > 0

    def test_only_where_nothing_is_known_there_is_nothing_to_draw(self) -> None:
        assert chart([], ["lag"]).empty
        assert chart([unknown(0), unknown(10)], ["processed", "failed"]).empty
        assert not chart([unknown(0), rate(10, 0)], ["processed"]).empty

    def test_zero_all_the_time_lies_at_the_bottom(self) -> None:
        found = chart([rate(0), rate(10)], ["processed"])
        assert points(found.lines[0]) == [near([(0, 0), (1, 0)])]

    def test_a_scale_ends_with_a_round_number_that_nothing_exceeds(self) -> None:
        rows: list[tuple[float, float]] = [
            (0.0, 1), (1, 1), (1.01, 2), (2, 2), (2.1, 5), (5, 5), (5.5, 10), (10, 10), (11, 20), (99, 100),
            (101, 200), (4001, 5000), (0.5, 0.5), (0.3, 0.5), (0.11, 0.2), (0.1, 0.1), (0.013, 0.02), (1_000_001, 2e6),
        ]  # fmt: skip
        for most, top in rows:
            with case(most, top):
                assert chart([rate(0), rate(10, most)], ["processed"]).top == pytest.approx(top)
