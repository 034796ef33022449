"""The pure parts of the benchmarks; and that the docs show what was measured, no more and no less."""

import itertools
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import publish, tables
from benchmarks.charts import Axis, Line, Panel, bars, lines
from benchmarks.figures import FIGURES, Figure
from benchmarks.figures.arrivals import timetable
from benchmarks.numbers import Spread, percentile, shown, spread
from benchmarks.peers import BASE, PEERS
from benchmarks.peers.jobs import payloads
from benchmarks.results import PUBLISHED, Results, load, save
from lowq.codec import dump_payload
from tests.rows import case


def test_the_docs_and_plots_are_made_of_the_published_results() -> None:
    # `make bench-docs` makes them.
    assert publish.stale(publish.made(load(PUBLISHED))) == []


def test_the_published_results_have_every_figure_that_is_to_be_reached() -> None:
    results = load(PUBLISHED)
    assert results.rounds >= 3
    assert [figure.key for figure in FIGURES if results.spread(figure.key) is None] == []


def test_every_row_was_measured_or_says_why_not() -> None:
    results = load(PUBLISHED)
    assert {*results.rows, *results.skipped} == {peer.label for peer in PEERS}
    assert all(results.skipped.values())


def test_a_percentile_is_the_smallest_value_that_enough_values_do_not_exceed() -> None:
    for share in [0.0, 0.01, 0.5, 0.99, 1.0]:
        with case(share):
            values = [7.0, 1.0, 5.0, 3.0, 9.0, 11.0]
            found = percentile(values, share)
            assert sum(value <= found for value in values) >= share * len(values)
            lower = [value for value in values if value < found]
            assert all(sum(value <= one for value in values) < share * len(values) for one in lower)


def test_a_spread_is_minimum_median_maximum() -> None:
    assert spread([5.0, 1.0, 2.0]) == Spread(1.0, 2.0, 5.0)


def test_figures_are_shown_with_the_digits_that_say_something() -> None:
    rows: list[tuple[float, str]] = [
        (0, "0"), (104_992.4, "104,992"), (9.267, "9.27"), (0.1234, "0.123"), (55.01, "55.0"),
    ]  # fmt: skip
    for value, text in rows:
        with case(value, text):
            assert shown(value) == text


def test_arrivals_are_random_at_the_rate_asked_for_and_the_same_for_a_seed() -> None:
    moments = timetable(100.0, 50.0, seed=3)
    assert moments == timetable(100.0, 50.0, seed=3) == sorted(moments)
    assert moments != timetable(100.0, 50.0, seed=4)
    assert len(moments) == pytest.approx(5000, rel=0.06)
    gaps = [later - earlier for earlier, later in itertools.pairwise(moments)]
    # Of a Poisson process, about one gap in e is longer than the average one.
    assert sum(gap > 0.01 for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.03)


def test_payloads_have_the_size_that_is_asked_for() -> None:
    for size in [10, 12, 20, 64, 100, 1000]:
        with case(size):
            made = payloads(50, size)
            assert {len(dump_payload(payload)) for payload in made} == {size}
            assert size < 20 or len({payload["v"] for payload in made}) == 50


def test_a_figure_says_what_it_reaches() -> None:
    rows: list[tuple[Figure, float, str]] = [
        (Figure("f", "", "", 100, 200), 250, "aim"),
        (Figure("f", "", "", 100, 200), 100, "must"),
        (Figure("f", "", "", 100, 200), 99, "no"),
        (Figure("f", "", "", 10, 5, "less"), 5, "aim"),
        (Figure("f", "", "", 10, 5, "less"), 11, "no"),
        (Figure("f", "", "", 10, None, "less"), 1, "must"),
        (Figure("f", "", ""), 1, ""),
    ]
    for figure, value, reached in rows:
        with case(figure, value, reached):
            assert figure.reached(value) == reached


def test_the_table_beside_the_peers_has_ratios_to_lowq_and_words_for_what_is_missing() -> None:
    results = Results(skipped={"Lowkiq": "not to be had"})
    results.add_row(BASE, {"drain": 100_000.0, "pickup_p50": 0.5})
    results.add_row("Sidekiq", {"drain": 20_000.0, "pickup_p50": 1.0})
    rows = [[cell.strip() for cell in line.split("|")] for line in tables.beside_the_peers(results).splitlines()]
    by_system = {row[1]: row for row in rows}
    assert by_system[BASE][4] == "100,000"
    assert by_system["Sidekiq"][4] == "20,000 (0.2x)"
    assert by_system["Sidekiq"][7] == "1.00 (2x)"
    assert by_system["Lowkiq"][2] == "left out: not to be had"


def test_results_are_read_as_they_were_kept(tmp_path: Path) -> None:
    results = Results(machine={"cores": "2"}, rounds=1)
    results.add_figures({"length/1000/drain": 1.5, "length/10/drain": 2.5})
    path = tmp_path / "results.json"
    save(results, path)
    assert load(path) == results
    assert [x for x, _ in load(path).points("length", "drain")] == [10.0, 1000.0]


def test_charts_are_svg_and_the_same_every_time() -> None:
    points = [(10.0, Spread(1.0, 2.0, 3.0)), (1000.0, Spread(5.0, 6.0, 60.0))]
    drawings: list[Callable[[], str]] = [
        lambda: lines("<Title>", Axis("x"), Axis("y"), [Line("a & b", points), Line("c", points)]),
        lambda: lines("Title", Axis("x", "linear"), Axis("y", "linear"), [Line("a", points)]),
        lambda: bars("Title", [Panel("drain", {"lowq": 3.0, "other": 1.0}), Panel("bulk", {"lowq": 2.0})], "lowq"),
    ]
    for draw in drawings:
        assert draw() == draw()
        assert ElementTree.fromstring(draw()).tag.endswith("svg")
        assert "prefers-color-scheme:dark" in draw()
