"""The plots of the docs, by the name of their file."""

from benchmarks.charts import Axis, Line, Panel, bars, lines
from benchmarks.peers import BASE
from benchmarks.results import Results


def all_plots(results: Results) -> dict[str, str]:
    """File name -> SVG, of those that there are figures for."""
    load = Axis("load, % of what the node can do", "linear")
    plots = {
        "peers.svg": _peers(results),
        "lag.svg": _curve(
            results, "load", "From the intended moment of a push to its perform", load,
            Axis("milliseconds"), {"p99.9": "p99.9", "p99": "p99", "p50": "p50"},
        ),
        "length.svg": _curve(
            results, "length", "Redis's processor time, by the length of the queue", Axis("queued jobs"),
            Axis("µs per job", "linear"), {"drain_cpu": "drain", "push_cpu": "enqueue"},
        ),
        "size.svg": _curve(
            results, "size", "Jobs per second, by the size of the payload", Axis("bytes of a payload"),
            Axis("jobs per second"), {"bulk": "enqueue in bulk", "drain": "drain"},
        ),
        "merging.svg": _curve(
            results, "merge", "Payloads per second, pushed and performed at once", Axis("ids that they are for"),
            Axis("payloads per second", "linear"), {"push": "pushed", "rate": "performed"},
        ),
    }  # fmt: skip
    return {name: plot for name, plot in plots.items() if plot}


def _peers(results: Results) -> str:
    panels = []
    for column, heading in (("drain", "drain, jobs/s"), ("bulk", "enqueue in bulk, jobs/s")):
        values = {label: results.median(f"{label}/{column}") for label in results.rows}
        # Rows with other settings enqueue alike.
        panels.append(
            Panel(heading, {label: value for label, value in values.items() if value and _own(results, label, column)})
        )
    return bars("One worker process, 5 threads, blank jobs", panels, BASE) if panels[0].values else ""


def _own(results: Results, label: str, column: str) -> bool:
    return column == "drain" or "single" in results.rows[label]


def _curve(results: Results, curve: str, title: str, across: Axis, up: Axis, names: dict[str, str]) -> str:
    content = [Line(name, results.points(curve, key)) for key, name in names.items()]
    return lines(title, across, up, content) if content[0].points else ""
