"""The docs show what was measured, no more and no less."""

from benchmarks import publish
from benchmarks.figures import FIGURES
from benchmarks.peers import PEERS
from benchmarks.results import PUBLISHED, load


def test_the_docs_and_plots_are_made_of_the_published_results() -> None:
    # `make bench-docs` makes them.
    assert publish.stale(publish.made(load(PUBLISHED))) == []


def test_the_published_results_have_every_row_and_every_figure_that_is_to_be_reached() -> None:
    results = load(PUBLISHED)
    assert results.rounds >= 3
    assert [figure.key for figure in FIGURES if results.spread(figure.key) is None] == []
    assert {*results.rows, *results.skipped} == {peer.label for peer in PEERS}
    assert all(results.skipped.values())
