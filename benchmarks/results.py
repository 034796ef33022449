"""What a run measured: every value of every round, kept as JSON. Tables and plots are made of this alone."""

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from benchmarks.numbers import Spread, spread

HERE = Path(__file__).resolve().parent
#: The run that the docs show.
PUBLISHED = HERE / "results.json"
#: The last run.
LAST = HERE.parent / "build" / "bench.json"


@dataclass
class Results:
    """Rows of the table beside the peers, and lowq's own figures: name -> one value per round."""

    machine: dict[str, str] = field(default_factory=dict)
    rounds: int = 0
    quick: bool = False
    #: label -> versions
    versions: dict[str, str] = field(default_factory=dict)
    #: label -> why
    skipped: dict[str, str] = field(default_factory=dict)
    #: label -> column -> values
    rows: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    figures: dict[str, list[float]] = field(default_factory=dict)
    #: figure -> why it is missing in a round
    failed: dict[str, str] = field(default_factory=dict)

    def add_row(self, label: str, values: dict[str, float]) -> None:
        for column, value in values.items():
            self.rows.setdefault(label, {}).setdefault(column, []).append(_rounded(value))

    def add_figures(self, values: dict[str, float]) -> None:
        for name, value in values.items():
            self.figures.setdefault(name, []).append(_rounded(value))

    def with_figures_of(self, other: "Results") -> "Results":
        """This run, with the rows and figures that another one has measured anew."""
        failed = {name: why for name, why in self.failed.items() if name not in other.figures}
        return replace(
            self, rows=self.rows | other.rows, figures=self.figures | other.figures, failed=failed | other.failed
        )

    def spread(self, key: str) -> Spread | None:
        """Of a figure, or of "row/column", or of "one against another" in the same round; None: it was not measured."""
        ours, _, theirs = key.partition(" against ")
        values = self._values(ours)
        if values and theirs:
            values = [one / other for one, other in zip(values, self._values(theirs), strict=False)]
        return spread(values) if values else None

    def _values(self, key: str) -> list[float]:
        label, _, column = key.rpartition("/")
        return self.figures.get(key) or self.rows.get(label, {}).get(column, [])

    def median(self, key: str) -> float | None:
        found = self.spread(key)
        return found.median if found else None

    def points(self, curve: str, name: str) -> list[tuple[float, Spread]]:
        """A curve: ``curve/X/name`` of all X, in order."""
        found = []
        for key in self.figures:
            parts = key.split("/")
            if len(parts) == 3 and parts[0] == curve and parts[2] == name:
                found.append((float(parts[1]), spread(self.figures[key])))
        return sorted(found)


def save(results: Results, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(results), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def load(path: Path) -> Results:
    return Results(**json.loads(path.read_text(encoding="utf-8")))


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")
